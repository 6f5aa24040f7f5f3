"""The harness that measures on a GPU works on the day: tried on the CPU, its files read, its table made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import run_here
from gpu import evidence_epoch, evidence_speech
from gpu.evidence import main
from gpu.evidence_bench import QUICK_SPEECH_SECONDS, Bench
from gpu.evidence_parts import PARTS
from gpu.evidence_record import Missing, Record, read_evidence, summarise
from memory_laws import LAWS, LawDevice

from batchtune.lengths import Lengths
from batchtune.probe.settings import ProbeSettings
from batchtune.results import Doctor, DoctorTorch

HARNESS = [sys.executable, str(Path(__file__).parent / "gpu" / "evidence.py")]
ON_THE_CPU = [
    "--device",
    "cpu",
    "--memory",
    "700MiB",
    "--quick",
    "--from",
    "nothing-earlier",
]
MEASURING = [
    part for part in PARTS if not part.startswith("tests-") and part != "recipes"
]
MACHINE = {
    "cpu": {"name": "A CPU"},
    "gpus": [{"name": "NVIDIA A1", "device": "cuda:0"}],
}


def record_of(folder: Path, device: str = "cuda") -> Record:
    return Record(
        "speech",
        folder / "speech.json",
        "python evidence.py speech",
        device,
        MACHINE,
        [],
    )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness in this process, on a machine without a GPU that need not be examined."""
    torch = DoctorTorch(
        **{**dict.fromkeys(DoctorTorch.__struct_fields__), "problem": "none here"}
    )
    found = Doctor(
        **{
            **dict.fromkeys(Doctor.__struct_fields__),
            "gpus": [],
            "torch": torch,
            "cpu": {"name": "A CPU"},
        }
    )
    monkeypatch.setattr("gpu.evidence.examine", lambda _: found)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def made_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that follows a law of memory in the place of worker processes, and commands run in this process."""

    def made(settings: ProbeSettings, *_: Any, **__: Any) -> LawDevice:
        return LawDevice(LAWS["quadratic"], Lengths.of([QUICK_SPEECH_SECONDS]))

    def here(
        bench: Bench, *arguments: str, seconds: float | None = None, **environment: str
    ) -> str:
        ran = run_here(*arguments)
        assert ran.returncode in (0, 3), ran.stderr
        return ran.stdout

    for name in (
        "batchtune.probe.probing.measurer_for",
        "batchtune.verify.measurer_for",
        "benchmarks.frontier.Supervisor",
    ):
        monkeypatch.setattr(name, made)
    monkeypatch.setattr(Bench, "batchtune", here)


def assert_complete(folder: Path, parts: list[str], told: str) -> None:
    found = [read_evidence(folder / f"{part}.json") for part in parts]
    assert [(evidence.complete, evidence.missing) for evidence in found] == [
        (True, [])
    ] * len(parts)
    assert all(evidence.figures for evidence in found)
    figures = [figure for evidence in found for figure in evidence.figures]
    assert all(figure.what in told and figure.shown in told for figure in figures)


@pytest.mark.usefixtures("machine", "made_device")
def test_the_next_call_goes_on_where_the_last_was_cut_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def cut_off(module: Any, name: str) -> None:
        run = getattr(module, name)

        def limited(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            if len(calls) > 3:
                raise Missing("cut off")
            return run(*arguments, **options)

        monkeypatch.setattr(module, name, limited)

    cut_off(evidence_speech, "probe")
    cut_off(evidence_speech, "peer")
    cut_off(Bench, "batchtune")
    earlier = tmp_path / "nothing"
    codes: list[int] = []
    while codes[-1:] != [0] and len(codes) < 9:
        calls.clear()
        out = tmp_path / f"call-{len(codes)}"
        codes.append(main([*ON_THE_CPU, "--from", str(earlier), "--out", str(out)]))
        for path in out.rglob("*"):
            # As files may come back from another machine.
            path.chmod(0o555 if path.is_dir() else 0o444)
        earlier = out
    assert len(codes) > 1  # of 3 processes or searches each
    assert_complete(out, MEASURING, capsys.readouterr().out)
    assert summarise([out]) == 0
    rows = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")
    ]
    assert len(rows) == len(set(rows)) > len(MEASURING)


@pytest.mark.usefixtures("machine", "made_device")
def test_an_epoch_goes_on_with_the_batches_that_were_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["speech", *ON_THE_CPU, "--out", str(tmp_path)]) == 0
    with monkeypatch.context() as patch:
        # More than there are.
        patch.setattr(evidence_epoch, "QUICK_FEWEST_BATCHES", 10**6)
        left = iter([1.0, 1.0, 0.0])
        patch.setattr(Bench, "seconds_left", property(lambda _: next(left)))
        assert main(["epoch", *ON_THE_CPU, "--out", str(tmp_path)]) == 1
    cut_off = read_evidence(tmp_path / "epoch.json")
    assert {len(seconds) for seconds in cut_off.data["measured"].values()} == {2}
    assert "2 of" in cut_off.missing[0]
    assert main(["epoch", *ON_THE_CPU, "--out", str(tmp_path)]) == 0
    whole = read_evidence(tmp_path / "epoch.json")
    for name, seconds in cut_off.data["measured"].items():
        assert whole.data["measured"][name][:2] == seconds
    assert whole.seconds > cut_off.seconds


def test_the_first_parts_take_15_minutes_in_calls_of_7() -> None:
    first = list(PARTS)[:3]
    assert first == ["calibration", "proof", "recipes"]
    assert sum(PARTS[part].minutes for part in first) <= 15
    assert max(part.minutes for part in PARTS.values()) <= 7
    assert {name for name in PARTS if name.startswith("tests-")} == {
        f"tests-{path.stem.removeprefix('test_').removesuffix('_on_cuda')}"
        for path in (Path(__file__).parent / "gpu").glob("test_*.py")
    }


@pytest.mark.usefixtures("machine")
def test_evidence_of_another_machine_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record_of(tmp_path).finish()
    assert main(["speech", *ON_THE_CPU, "--out", str(tmp_path)]) == 1
    assert "speech.json is of NVIDIA A1; this is A CPU (CPU)" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("machine")
def test_a_part_of_tests_runs_those_that_are_left(tmp_path: Path) -> None:
    ran = {
        "test": "test_batches_arrive_as_they_were_made[fork-True]",
        "outcome": "passed",
        "seconds": 1.5,
    }
    (tmp_path / "tests-loaders.jsonl").write_text(json.dumps(ran) + '\n{"test": "cut')
    for _ in range(2):  # the second finds nothing left
        assert main(["tests-loaders", *ON_THE_CPU, "--out", str(tmp_path)]) == 0
    evidence = read_evidence(tmp_path / "tests-loaders.json")
    assert evidence.figures[0].values == {
        "passed": 1,
        "failed": 0,
        "skipped": 3,
        "seconds": 1.5,
    }


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_processes_measure_on_the_cpu(tmp_path: Path) -> None:
    parts = ["speech"]
    minutes = ["--minutes", "20", "--stretch", "10"]  # however busy the machine
    done = subprocess.run(
        [*HARNESS, *parts, *ON_THE_CPU, *minutes, "--out", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert_complete(tmp_path, parts, done.stdout)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("part", "text", "said"),
    [
        ("speech", "a,b\nx,y\n", "no column"),
        ("speech", "num_tokens\n15\n", "lengths of utterances are needed"),
    ],
)
def test_a_manifest_that_will_not_do_is_named_in_the_file(
    tmp_path: Path, part: str, text: str, said: str
) -> None:
    (tmp_path / "lengths.csv").write_text(text)
    assert (
        main(
            [
                part,
                *ON_THE_CPU,
                "--manifest",
                str(tmp_path / "lengths.csv"),
                "--out",
                str(tmp_path),
            ]
        )
        == 1
    )
    evidence = read_evidence(tmp_path / f"{part}.json")
    assert not evidence.complete
    assert said in evidence.missing[0]
