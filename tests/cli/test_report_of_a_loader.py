"""`batchtune report` and `batchtune export` on the run folder of a data loader."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.conftest import Run
from loader_records import bottleneck, made_dali
from report_records import made_probe, made_sweep

from batchtune.results import write_result


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder that holds loader.json alone."""
    write_result(tmp_path / "run" / "loader.json", bottleneck())
    return tmp_path / "run"


def test_it_is_shown_and_held_to_rules(batchtune: Run, run: Path) -> None:
    ran = batchtune("report", run, "--fail-if", "gpu_idle > 0.05", "--fail-if", "loader.workers > 8")
    assert ran.returncode == 3
    assert "The loader is the bottleneck" in ran.stdout
    assert ran.stderr == "Fails: gpu_idle > 0.05: gpu_idle is 0.34, which is > 0.05\n"
    write_result(run / "loader.json", made_dali())
    ran = batchtune("report", run, "--fail-if", "gpu_idle > 0.05")
    assert ran.returncode == 1 and "no step times are known: give --step-ms, or probe first" in ran.stderr


@pytest.mark.parametrize("name", ["report.md", "report.html", "report.json"])
def test_every_format_is_written(batchtune: Run, run: Path, tmp_path: Path, name: str) -> None:
    assert batchtune("report", run, "-o", name).returncode == 0
    text = (tmp_path / name).read_text(encoding="utf-8")
    assert "The loader is the bottleneck" in text
    if name.endswith("json"):
        assert json.loads(text)["loader"]["recommended"] == 7
    if name.endswith("html"):
        assert "batchtune/loader-config" in text


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kind": "cassette"}, "kind is 'cassette'"),
        ({"rows": [], "recommended": None}, "rows is empty"),
        ({"epoch_batches": "many"}, "$.epoch_batches"),
    ],
)
def test_an_edited_loader_is_one_message(batchtune: Run, run: Path, changed: dict[str, object], message: str) -> None:
    written = json.loads((run / "loader.json").read_text(encoding="utf-8"))
    (run / "loader.json").write_text(json.dumps(written | changed), encoding="utf-8")
    ran = batchtune("report", run)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "loader.json is edited or damaged" in ran.stderr and message in ran.stderr


def test_exports_of_a_run_carry_its_loader(batchtune: Run, run: Path) -> None:
    ran = batchtune("export", run, "--to", "pytorch")
    assert ran.returncode == 1 and "holds no sweep.json" in ran.stderr
    write_result(run / "sweep.json", made_sweep())
    write_result(run / "probe.json", made_probe())
    ran = batchtune("export", run, "--to", "pytorch")
    assert ran.returncode == 0 and "prefetch_factor=2 if num_workers else None" in ran.stdout
