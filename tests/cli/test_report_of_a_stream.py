"""`batchtune report` on the run folder of a stream."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from cli.conftest import Run, command
from report_records import made_probe
from streamed_records import made_stream, whole_stream

from batchtune.results import write_result


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder that holds stream.json alone."""
    write_result(tmp_path / "run" / "stream.json", whole_stream(timed=False))
    return tmp_path / "run"


def test_a_process_shows_it_and_holds_it_to_rules(run: Path) -> None:
    rules = [word for rule in ("shards.broken > 0", "stream.under_half > 5%") for word in ("--fail-if", rule)]
    ran = subprocess.run(command("report", run, *rules), capture_output=True, text=True, check=False)
    assert ran.returncode == 3
    assert 'Set BucketedStream(algorithm="pool", buffer_size=4096)' in " ".join(ran.stdout.split())
    assert ran.stderr == "Fails: shards.broken > 0: shards.broken is 1, which is > 0\n"


@pytest.mark.parametrize("name", ["report.md", "report.html", "report.json"])
def test_every_format_is_written(batchtune: Run, run: Path, tmp_path: Path, name: str) -> None:
    assert batchtune("report", run, "-o", name).returncode == 0
    text = (tmp_path / name).read_text(encoding="utf-8")
    assert "fewer batches than with your current config" in text
    if name.endswith("json"):
        assert json.loads(text)["stream"]["recommended"] == 10


def test_it_is_compared_with_another_stream(batchtune: Run, run: Path, tmp_path: Path) -> None:
    write_result(tmp_path / "other" / "stream.json", made_stream())
    compared = ("--baseline", "other", "--fail-if", "stream.batches worse 0%")
    assert batchtune("report", run, *compared).returncode == 0
    ran = batchtune("report", run, *compared, "--fail-if", "batches worse 0%")
    assert ran.returncode == 1
    assert "the run has no sweep.json: run `batchtune sweep-buckets`; fields of the stream begin with" in ran.stderr


def test_a_baseline_of_a_probe_alone_is_refused(batchtune: Run, run: Path, tmp_path: Path) -> None:
    write_result(tmp_path / "other" / "probe.json", made_probe())
    ran = batchtune("report", run, "--baseline", "other")
    assert ran.returncode == 1 and "the baseline other has neither sweep.json nor stream.json" in ran.stderr


def test_drift_needs_a_sweep_of_tables(batchtune: Run, run: Path, tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text("id,duration\na,2\n")
    ran = batchtune("report", run, "--manifest", "new.csv")
    assert ran.returncode == 1
    assert "has no sweep.json to compare the new lengths with: stream.json holds no distribution" in ran.stderr


def test_its_files_are_not_overwritten_by_a_report(batchtune: Run, run: Path) -> None:
    before = (run / "stream.json").read_bytes()
    ran = batchtune("report", run, "-o", run / "stream.json")
    assert ran.returncode == 2 and "must not be overwritten" in ran.stderr
    assert (run / "stream.json").read_bytes() == before


def test_an_edited_stream_is_one_message(batchtune: Run, run: Path) -> None:
    document = json.loads((run / "stream.json").read_text())
    document["rows"][10]["batches"] = 3
    (run / "stream.json").write_text(json.dumps(document))
    ran = batchtune("report", run)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "stream.json is edited or damaged: row 10: batches is 3" in ran.stderr
