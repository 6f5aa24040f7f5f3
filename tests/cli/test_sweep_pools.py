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
    path.write_text(
        "id,duration\n"
        + "".join(f"{index},{value:.2f}\n" for index, value in enumerate(values))
    )
    return path


def sweep_of(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (tmp_path / "batchtune-run" / "sweep.json").read_text()
    )
    return found


def sizes(tmp_path: Path) -> list[int]:
    return [row["pool_size"] for row in sweep_of(tmp_path)["rows"]]


def test_pool_sizes_come_from_flag_or_environment(
    batchtune: Run, speech: Path, tmp_path: Path
) -> None:
    env = {"BATCHTUNE_POOL_SIZE": "1000,all"}
    assert batchtune("sweep-buckets", speech, *POOLED, env=env).returncode == 0
    assert sizes(tmp_path) == [1000, 3000]
    assert (
        batchtune(
            "sweep-buckets", speech, *POOLED, "--pool-size", "20,99999999", env=env
        ).returncode
        == 0
    )
    assert sizes(tmp_path) == [20, 3000]


def test_pools_are_current_settings_like_tables(
    batchtune: Run, speech: Path, tmp_path: Path
) -> None:
    assert (
        batchtune("sweep-buckets", speech, *POOLED, "--pool-size", 700).returncode == 0
    )
    (row,) = sweep_of(tmp_path)["rows"]
    boundaries = ":".join(map(str, row["boundaries"]))
    sizes = ":".join(map(str, row["batch_sizes"]))
    current = f"bucket_boundaries={boundaries},bucket_batch_sizes={sizes},pool_size=700"
    if row["batch_overhead"] is not None:
        current += f",batch_overhead={row['batch_overhead']}"
    ran = batchtune(
        "sweep-buckets",
        speech,
        *POOLED,
        "--pool-size",
        700,
        "--current",
        current,
        "--force",
    )
    assert ran.returncode == 0, ran.stderr
    found = sweep_of(tmp_path)["current"]
    for name in ("pool_size", "batches", "mates_again"):
        assert found[name] == row[name]
    refused = batchtune(
        "sweep-buckets", speech, *POOLED, "--current", current.replace("=700", "=0")
    )
    assert refused.returncode == 2
    assert "pool_size: must be a whole number of at least 1" in refused.stderr
