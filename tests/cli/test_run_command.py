"""Commands of a script and run folders on the command line, without starting a script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace
from report_records import made_probe
from typer.testing import CliRunner

from batchtune.cli.app import app
from batchtune.results import PROBE_FILE, write_result


@pytest.mark.parametrize(("kind", "given"), [("cpu", "16384"), ("cuda", None)])
def test_a_script_takes_memory_as_the_probe_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, given: str | None
) -> None:
    started: list[Mapping[str, str]] = []

    def start(words: Sequence[str], environment: Mapping[str, str]) -> int:
        started.append(environment)
        return 0

    monkeypatch.setattr("batchtune.scripts.starting.run_to_the_end", start)
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("length\n" + "\n".join(map(str, range(1, 100))))
    run = str(tmp_path / "run")
    swept = ["sweep-buckets", str(lengths), "--run", run, "--max-batch-length", "300"]
    assert CliRunner().invoke(app, swept).exit_code == 0
    probe = made_probe()
    device = replace(probe.device, kind=kind)
    write_result(Path(run, PROBE_FILE), replace(probe, device=device))
    trained = ["run", str(lengths), "--run", run, "--", "python", "train.py"]
    ran = CliRunner().invoke(app, trained)
    assert ran.exit_code == 0, ran.output
    assert started[0].get("MALLOC_MMAP_THRESHOLD_") == given


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "tune python train.py --epochs 1",
            "Put its command after --: batchtune tune -- python train.py --epochs 1",
        ),
        (
            "probe-oom --minutes 3 train.py",
            "batchtune probe-oom --minutes 3 -- train.py",
        ),
        ("tune -- train.py", "Give it as in a shell: -- python train.py"),
        (
            "run -- no-such-program x",
            "no-such-program can't be started: no program has this name",
        ),
    ],
)
def test_a_command_in_the_wrong_place_or_form_is_told_so(
    words: str, message: str
) -> None:
    ran = CliRunner().invoke(app, words.split())
    assert ran.exit_code == 2
    assert message in " ".join(ran.output.split())


def test_the_run_folder_is_an_option_too(tmp_path: Path) -> None:
    named = CliRunner().invoke(app, ["report", "--run", str(tmp_path / "run")])
    assert "Run folder" in named.output and "does not exist" in named.output
    placed = CliRunner().invoke(app, ["report", str(tmp_path / "run")])
    assert named.output == placed.output
