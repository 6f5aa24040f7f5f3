"""Pools in `sweep-buckets`, and what follows from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli.conftest import Run

POOLED = ["--max-batch-length", 300, "--strategy", "pooled"]


@pytest.fixture
def speech(tmp_path: Path) -> Path:
    """A data set that is large enough for pools to be worth it."""
    return write_gamma(tmp_path / "speech.csv", 5)


def write_gamma(path: Path, shape: float) -> Path:
    values = np.random.default_rng(3).gamma(shape, 2, 3000) + 0.5
    path.write_text("id,duration\n" + "".join(f"{index},{value:.2f}\n" for index, value in enumerate(values)))
    return path


def sweep_of(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "batchtune-run" / "sweep.json").read_text())
    return found


def sizes(tmp_path: Path) -> list[int]:
    return [row["pool_size"] for row in sweep_of(tmp_path)["rows"]]


def test_pool_sizes_come_from_flag_environment_or_project(batchtune: Run, speech: Path, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.batchtune]\npool_size = "1000,all"\n')
    assert batchtune("sweep-buckets", speech, *POOLED).returncode == 0
    assert sizes(tmp_path) == [1000, 3000]
    env = {"BATCHTUNE_POOL_SIZE": "400"}
    assert batchtune("sweep-buckets", speech, *POOLED, env=env).returncode == 0
    assert sizes(tmp_path) == [400]
    assert batchtune("sweep-buckets", speech, *POOLED, "--pool-size", "20,99999999", env=env).returncode == 0
    assert sizes(tmp_path) == [20, 3000]


@pytest.mark.parametrize("size", ["0", "-5", "many"])
def test_a_pool_size_that_is_none_is_wrong_usage(batchtune: Run, speech: Path, size: str) -> None:
    ran = batchtune("sweep-buckets", speech, *POOLED, "--pool-size", size)
    assert ran.returncode == 2
    assert f"--pool-size must be a number of examples, at least 1, got '{size}'" in ran.stderr
    assert "Write 20000, a list such as 1000,20000, or all." in ran.stderr


@pytest.mark.parametrize("values", [["3.5"], ["3.5", "7"], ["4"] * 200])
def test_data_without_a_use_for_pools_recommend_none(batchtune: Run, tmp_path: Path, values: list[str]) -> None:
    (tmp_path / "few.csv").write_text("duration\n" + "\n".join(values) + "\n")
    ran = batchtune("sweep-buckets", "few.csv", *POOLED, "--world-size", 8)
    assert ran.returncode == 0
    found = sweep_of(tmp_path)
    assert (found["recommended"], found["recommended_table"]) == (None, None)
    assert found["reason"].startswith("no pools can be recommended: none needs fewer batches than a fixed batch size")
    assert not (tmp_path / "batchtune-run" / "sampler.yaml").exists()


def test_multiples_keep_pools_from_being_recommended(batchtune: Run, speech: Path, tmp_path: Path) -> None:
    options = ["--max-batch-length", 300, "--multiple-of", 4, "--strategy", "pooled", "--strategy", "optimal"]
    assert batchtune("sweep-buckets", speech, *options, "--pool-size", "all").returncode == 0
    found = sweep_of(tmp_path)
    pooled = next(row for row in found["rows"] if row["pool_size"])
    assert found["rows"][found["recommended"]]["pool_size"] is None
    assert all(boundary % 4 == 0 for boundary in pooled["boundaries"])


def test_a_run_in_pools_is_compared_with_others(batchtune: Run, speech: Path, tmp_path: Path) -> None:
    tables = ["--strategy", "optimal", "--num-buckets", 12]
    sweep = ["sweep-buckets", speech, "--max-batch-length", 300]
    assert batchtune(*sweep, *tables, "--run", "tables").returncode == 0
    current = ["--current", "max_batch_length=300,num_buckets=8"]
    assert batchtune(*sweep, *tables, "--strategy", "pooled", *current).returncode == 0
    found = sweep_of(tmp_path)
    assert found["current"]["pool_size"] is None and found["rows"][found["recommended"]]["strategy"] == "optimal"
    assert batchtune("sweep-buckets", speech, *POOLED, "--pool-size", 1000).returncode == 0
    assert "sampler: pooled\npool_size: 1000\n" in (tmp_path / "batchtune-run" / "sampler.yaml").read_text()
    rules = ["--fail-if", "batches worse 5%", "--fail-if", "stale > 1%"]
    report = batchtune("report", "--baseline", "tables", "--manifest", speech, *rules)
    assert report.returncode == 0 and "The manifest has the same lengths as the run" in report.stdout
    shorter = write_gamma(tmp_path / "shorter.csv", 4)
    ran = batchtune("report", "--manifest", shorter, "--fail-if", "stale > 5%", "--format", "json")
    assert ran.returncode == 0
    assert 0 <= json.loads(ran.stdout)["drift"]["stale"] < 0.05


def test_pools_are_current_settings_like_tables(batchtune: Run, speech: Path, tmp_path: Path) -> None:
    assert batchtune("sweep-buckets", speech, *POOLED, "--pool-size", 700).returncode == 0
    (row,) = sweep_of(tmp_path)["rows"]
    boundaries = ":".join(map(str, row["boundaries"]))
    sizes = ":".join(map(str, row["batch_sizes"]))
    current = f"bucket_boundaries={boundaries},bucket_batch_sizes={sizes},pool_size=700"
    if row["batch_overhead"] is not None:
        current += f",batch_overhead={row['batch_overhead']}"
    ran = batchtune("sweep-buckets", speech, *POOLED, "--pool-size", 700, "--current", current, "--force")
    assert ran.returncode == 0, ran.stderr
    found = sweep_of(tmp_path)["current"]
    for name in ("pool_size", "batches", "mates_again"):
        assert found[name] == row[name]
    refused = batchtune("sweep-buckets", speech, *POOLED, "--current", current.replace("=700", "=0"))
    assert refused.returncode == 2
    assert "pool_size: Expected `int` >= 1" in refused.stderr


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ({"recommended_table": 1}, "recommended_table is 1, which is of pools"),
        ({"recommended_table": 2}, "recommended_table is 2, but rows are 0 to 1"),
        ({"simulated_epochs": None}, "pool_size is 3000 and simulated_epochs None"),
        ({"pool_size": None}, "pool_size is None and simulated_epochs 8"),
    ],
)
def test_contradictions_in_results_of_pools_are_damage(
    batchtune: Run, speech: Path, tmp_path: Path, edit: dict[str, Any], said: str
) -> None:
    assert batchtune("sweep-buckets", speech, *POOLED, "--pool-size", "400,all").returncode == 0
    found = sweep_of(tmp_path)
    (found if "recommended_table" in edit else found["rows"][1]).update(edit)
    (tmp_path / "batchtune-run" / "sweep.json").write_text(json.dumps(found))
    ran = batchtune("report")
    assert ran.returncode == 1
    assert said in ran.stderr.replace("\n", " ")
