"""What a probe survives: a full disk, and being stopped. Each is caused for real."""

import contextlib
import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from cli.conftest import command, run_here
from made_once import MadeOnce
from worker_processes import gone

from batchtune.results import (
    PROBE_FILE,
    RUN_FILE,
    SAMPLER_FILE,
    SWEEP_FILE,
    TRIALS_FILE,
    Probe,
    Trial,
    read_result,
)
from batchtune.run_folder import read_trials

HERE = Path(__file__).parent
MIB = 1 << 20
DEADLINE_SECONDS = 120.0
# One example takes from 5 to 52 MiB (L + 0.08 · L²), so what fits does not depend on a few MiB.
LENGTHS = (4, 6, 9, 15, 20)
EXAMPLES_OF_EACH = 10
FILES = (TRIALS_FILE, PROBE_FILE, SWEEP_FILE, SAMPLER_FILE)


class Probing:
    """The command as a process, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        clean = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("BATCHTUNE_")
        }
        # Locks of devices lie in the temporary folder: with its own, no other test's probe is in the way.
        self.environment = {
            **clean,
            "TMPDIR": str(folder),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self.manifest = folder / "lengths.csv"
        rows = (
            f"{length}-{number},{length}\n"
            for length in LENGTHS
            for number in range(EXAMPLES_OF_EACH)
        )
        self.manifest.write_text("id,duration\n" + "".join(rows))

    def arguments(self, name: str = "probe-oom") -> list[object]:
        options = {"folder": self.folder, "a": MIB, "b": 0.08 * MIB}
        workload = ["--workload", f"{HERE / 'held_workload.py'}:Held"]
        for key, value in options.items():
            workload += ["--set", f"{key}={value}"]
        where = ["--device", "cpu", "--memory", "484MiB", "--run", self.folder / "run"]
        return [name, self.manifest, *workload, *where]

    def start(self) -> "subprocess.Popen[bytes]":
        with (self.folder / "stderr").open("wb") as stderr:
            return subprocess.Popen(
                command(*self.arguments()),
                cwd=self.folder,
                env=self.environment,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )

    def stderr(self) -> str:
        """Of what was started last."""
        return (self.folder / "stderr").read_text()

    def ran(self, arguments: list[str]) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            arguments,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
        )

    def journal(self) -> bytes:
        path = self.folder / "run" / TRIALS_FILE
        return path.read_bytes() if path.exists() else b""

    @contextlib.contextmanager
    def held(self) -> "Iterator[subprocess.Popen[bytes]]":
        """A probe that has measured a few trials and is held in the middle of a step, with a child of the step's."""
        process = self.start()
        try:
            until(
                lambda: ended(process) or self.journal().count(b"\n") >= 2, "two trials"
            )
            (self.folder / "hold").touch()
            until(
                lambda: ended(process) or (self.folder / "held").exists(),
                "a step that is held",
            )
            assert not ended(process), self.stderr()
            yield process
        finally:
            for name in ("hold", "held"):
                (self.folder / name).unlink(missing_ok=True)
            process.kill()
            process.wait()
            assert gone(process.pid)


def until(condition: Callable[[], bool], what: str) -> None:
    """Polls until it holds."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.005)


def ended(process: "subprocess.Popen[bytes]") -> bool:
    return process.poll() is not None


def frontier(run: Path) -> list[tuple[float, int]]:
    return [
        (point.length, point.batch_size)
        for point in read_result(run / PROBE_FILE, Probe).frontier
    ]


def errors(stderr: str) -> list[str]:
    assert "Traceback" not in stderr
    return [line for line in stderr.splitlines() if line.startswith("Error:")]


@pytest.fixture
def probing(tmp_path: Path) -> Probing:
    return Probing(tmp_path)


@pytest.fixture(scope="session")
def undisturbed(made_once: MadeOnce) -> Path:
    """The run folder of a `tune` that nothing disturbs."""

    def make(folder: Path) -> None:
        ran = run_here(*Probing(folder).arguments(name="tune"))
        assert ran.returncode == 0, ran.stderr
        assert {path.name for path in (folder / "run").iterdir()} == {RUN_FILE, *FILES}

    return made_once("undisturbed", make) / "run"


# No room


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """No file of this process may grow beyond the size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.slow
def test_no_room_for_a_file_is_one_message_and_loses_nothing(
    probing: Probing, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit lies between the size of one file and that of the next; the smallest, sampler.yaml, it can't stop."""
    monkeypatch.chdir(probing.folder)
    names = (RUN_FILE, TRIALS_FILE, PROBE_FILE, SWEEP_FILE)
    sizes = [(undisturbed / name).stat().st_size for name in names]
    assert sorted(sizes) == sizes
    run = probing.folder / "run"
    kept: list[Trial] = []
    for (smaller, larger), name in zip(pairwise(sizes), names[1:], strict=True):
        with files_of_at_most((smaller + larger) // 2):
            ran = run_here(*probing.arguments(name="tune"))
        assert ran.returncode == 1, ran.stderr
        (message,) = errors(ran.stderr)
        assert re.search(
            rf"{name} can't be written: (No space left on device|File too large)",
            message,
        )
        assert "run the same command again" in ran.stderr
        expected = {RUN_FILE, *FILES[: FILES.index(name)]} | (
            {name} if name == TRIALS_FILE else set()
        )
        assert {path.name for path in run.iterdir()} == expected
        trials = read_trials(run / TRIALS_FILE)
        assert trials
        assert trials[: len(kept)] == kept
        kept = trials
    ran = run_here(*probing.arguments(name="tune"))  # with enough
    assert ran.returncode == 0, ran.stderr
    assert {path.name for path in run.iterdir()} == {RUN_FILE, *FILES}
    assert frontier(run) == frontier(undisturbed)
    assert read_trials(run / TRIALS_FILE)[: len(kept)] == kept


# It is told to stop


@pytest.mark.slow
def test_stopped_in_the_middle_of_a_trial_it_loses_nothing(
    probing: Probing, undisturbed: Path
) -> None:
    with probing.held() as process:
        before = probing.journal()
        process.send_signal(signal.SIGTERM)
        process.wait()
        assert gone(process.pid)
    assert process.returncode == 130
    assert "Interrupted" in probing.stderr()
    assert "Traceback" not in probing.stderr()
    assert probing.journal() == before
    left = read_result(probing.folder / "run" / PROBE_FILE, Probe)
    assert left.unfinished
    assert not left.is_proven
    assert f"{PROBE_FILE} holds the largest batches that ran by now" in probing.stderr()
    gate = probing.ran(
        command("report", "run", "--fail-if", "probe.unfinished == true")
    )
    assert gate.returncode == 3, gate.stderr
    assert probing.ran(command(*probing.arguments())).returncode == 0
    assert not read_result(probing.folder / "run" / PROBE_FILE, Probe).unfinished
    assert probing.journal().startswith(before)
    assert frontier(probing.folder / "run") == frontier(undisturbed)
