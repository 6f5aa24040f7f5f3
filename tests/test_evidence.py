"""The harness that measures on a GPU works on the day: tried on the CPU, its files read, its table made."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli.conftest import run_here
from gpu.evidence import main
from gpu.evidence_bench import QUICK_SPEECH_SECONDS, QUICK_TOKENS, Bench
from gpu.evidence_parts import PARTS, Sampled
from gpu.evidence_record import Record, read_evidence, summarise
from memory_laws import LAWS, LawDevice

from batchtune.lengths import Lengths
from batchtune.probe.settings import ProbeSettings
from batchtune.results import Doctor, DoctorTorch
from batchtune.shapes import BatchShape

HARNESS = [sys.executable, str(Path(__file__).parent / "gpu" / "evidence.py")]
ON_THE_CPU = ["--device", "cpu", "--memory", "700MiB", "--quick"]
MEASURING = [part for part in PARTS if part != "tests"]
MACHINE = {"cpu": {"name": "A CPU"}, "gpus": [{"name": "NVIDIA A1", "device": "cuda:0"}]}


def record_of(folder: Path, device: str = "cuda") -> Record:
    return Record("speech", folder / "speech.json", "python evidence.py speech", device, MACHINE, [])


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness in this process, on a machine without a GPU that need not be examined."""
    torch = DoctorTorch(**{**dict.fromkeys(DoctorTorch.__struct_fields__), "problem": "none here"})
    found = Doctor(**{**dict.fromkeys(Doctor.__struct_fields__), "gpus": [], "torch": torch, "cpu": {"name": "A CPU"}})
    monkeypatch.setattr("gpu.evidence.examine", lambda _: found)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def made_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that follows a law of memory in the place of worker processes, and commands run in this process."""

    def made(settings: ProbeSettings, *_: Any, **__: Any) -> LawDevice:
        both = settings.workload == "builtin:transformer-lm"
        longest = Lengths.of([QUICK_TOKENS], [QUICK_TOKENS]) if both else Lengths.of([QUICK_SPEECH_SECONDS])
        return LawDevice(LAWS["quadratic"], longest)

    def here(bench: Bench, *arguments: str, seconds: float | None = None, **environment: str) -> str:
        ran = run_here(*arguments)
        assert ran.returncode in (0, 3), ran.stderr
        return ran.stdout

    for module in ("batchtune.tuning.probing", "batchtune.tuning.verifying", "benchmarks.frontier"):
        monkeypatch.setattr(f"{module}.Supervisor", made)
    monkeypatch.setattr(Bench, "batchtune", here)


def assert_complete(folder: Path, parts: list[str], told: str) -> None:
    found = [read_evidence(folder / f"{part}.json") for part in parts]
    assert [(evidence.complete, evidence.missing) for evidence in found] == [(True, [])] * len(parts)
    assert all(evidence.figures for evidence in found)
    figures = [figure for evidence in found for figure in evidence.figures]
    assert all(figure.what in told and figure.shown in told for figure in figures)


@pytest.mark.usefixtures("machine", "made_device")
def test_all_parts_are_complete_on_a_made_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MEASURING, *ON_THE_CPU, "--out", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert_complete(tmp_path, MEASURING, told)
    assert (tmp_path / "verify-run" / "sampler.yaml").exists() and (tmp_path / "verify.html").exists()
    assert summarise([tmp_path]) == 0
    assert capsys.readouterr().out.count("\n| ") >= told.count(": at most")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_processes_measure_on_the_cpu(tmp_path: Path) -> None:
    parts = ["speech", "verify"]
    done = subprocess.run([*HARNESS, *parts, *ON_THE_CPU, "--out", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_complete(tmp_path, parts, done.stdout)


@pytest.mark.slow
def test_an_interrupted_part_keeps_what_it_has(tmp_path: Path) -> None:
    process = subprocess.Popen([*HARNESS, "speech", *ON_THE_CPU, "--out", str(tmp_path)], stdout=subprocess.PIPE)
    trials = tmp_path / "speech-run" / "trials.jsonl"
    while not trials.exists() and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    evidence = read_evidence(tmp_path / "speech.json")
    assert (evidence.complete, evidence.missing) == (False, ["interrupted"])
    assert trials.exists()


@pytest.mark.usefixtures("machine")
def test_without_a_gpu_it_says_so_and_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["speech", "--out", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert told.startswith("Error: there is no CUDA device: ")
    assert "--device cpu" in told


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("part", "text", "said"),
    [
        ("speech", "a,b\nx,y\n", "no column"),
        ("language", "duration\n1.5\n", "no target lengths"),
        ("speech", "num_tokens\n15\n", "lengths of utterances are needed"),
    ],
)
def test_a_manifest_that_will_not_do_is_named_in_the_file(tmp_path: Path, part: str, text: str, said: str) -> None:
    (tmp_path / "lengths.csv").write_text(text)
    assert main([part, *ON_THE_CPU, "--manifest", str(tmp_path / "lengths.csv"), "--out", str(tmp_path)]) == 1
    evidence = read_evidence(tmp_path / f"{part}.json")
    assert not evidence.complete
    assert said in evidence.missing[0]


@pytest.mark.usefixtures("machine")
def test_a_part_without_time_says_what_is_missing(tmp_path: Path) -> None:
    assert main(["verify", *ON_THE_CPU, "--minutes", "0", "--out", str(tmp_path)]) == 1
    assert "out of time" in read_evidence(tmp_path / "verify.json").missing[0]


def test_unknown_parts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["speach"])
    assert "unknown part 'speach'" in capsys.readouterr().err


def test_a_figure_is_in_the_file_at_once(tmp_path: Path) -> None:
    record = record_of(tmp_path)
    record.figure("trials", "57", trials=57)
    evidence = read_evidence(tmp_path / "speech.json")  # as after a kill
    assert [figure.values for figure in evidence.figures] == [{"trials": 57}]
    assert (evidence.complete, evidence.missing) == (False, ["still running, or killed"])
    record.finish()
    assert read_evidence(tmp_path / "speech.json").complete


def test_the_table_has_a_row_per_figure_and_names_the_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = record_of(tmp_path)
    record.figure("trials | OOMs", "57, 1", trials=57)
    record.miss("“each length anew” came to 3 of 12 lengths")
    record.finish()
    capsys.readouterr()
    assert summarise([tmp_path]) == 0
    told = capsys.readouterr().out
    assert "Measured on NVIDIA A1:" in told
    assert "| trials \\| OOMs | 57, 1 | `python evidence.py speech` |" in told
    assert "speech: missing: “each length anew” came to 3 of 12 lengths" in told


def test_a_summary_names_what_it_can_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text('{"format": "something else"}')
    (tmp_path / "empty").mkdir()
    assert summarise([tmp_path, tmp_path / "empty"]) == 1
    told = capsys.readouterr().err
    assert "other.json" in told
    assert "no PART.json" in told


def test_a_sample_estimates_the_whole_epoch_with_its_error() -> None:
    drawn = np.random.default_rng(0)
    predicted = drawn.uniform(0.5, 2.0, 400)
    seconds = 1.2 * predicted * drawn.normal(1.0, 0.1, 400)
    missed = []
    for _ in range(300):
        order = drawn.permutation(400)
        one = Sampled([BatchShape(1, 1.0)] * 400, 0.1, predicted[order], seconds[order][:60].tolist())
        missed.append((one.seconds / seconds.sum() - 1) / one.error)
    assert np.mean(np.abs(missed) < 2) > 0.9
    whole = Sampled([BatchShape(1, 1.0)] * 400, 0.1, predicted, seconds.tolist())
    assert whole.seconds == pytest.approx(seconds.sum())
    assert whole.error == 0
