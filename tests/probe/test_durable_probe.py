"""What a probe survives: its own death, a second probe, a full disk, Ctrl-C. Each is caused for real."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from cli.conftest import command
from made_once import MadeOnce

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
MARK = "DURABLE_PROBE_TEST"
DEADLINE_SECONDS = 120.0
# One example takes from 5 to 52 MiB (L + 0.08 · L²), so what fits does not depend on a few MiB.
LENGTHS = (4, 6, 9, 15, 20)
EXAMPLES_OF_EACH = 10
FILES = (TRIALS_FILE, PROBE_FILE, SWEEP_FILE, SAMPLER_FILE)


class Probing:
    """The command as a process, in a folder of its own; whatever it starts is known by a mark."""

    def __init__(self, folder: Path, lengths: Sequence[int] = LENGTHS) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.mark = uuid.uuid4().hex
        clean = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("BATCHTUNE_")
        }
        # Locks of devices lie in the temporary folder: with its own, no other test's probe is in the way.
        self.environment = {
            **clean,
            MARK: self.mark,
            "TMPDIR": str(folder),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self.manifest = folder / "lengths.csv"
        rows = (
            f"{length}-{number},{length}\n"
            for length in lengths
            for number in range(EXAMPLES_OF_EACH)
        )
        self.manifest.write_text("id,duration\n" + "".join(rows))

    def command(self, run: str = "run", name: str = "probe-oom") -> list[str]:
        options = {"folder": self.folder, "a": MIB, "b": 0.08 * MIB}
        workload = ["--workload", f"{HERE / 'held_workload.py'}:Held"]
        for key, value in options.items():
            workload += ["--set", f"{key}={value}"]
        where = ["--device", "cpu", "--memory", "484MiB", "--run", self.folder / run]
        return command(name, self.manifest, *workload, *where)

    def start(self, run: str = "run") -> "subprocess.Popen[bytes]":
        with (self.folder / "stderr").open("wb") as stderr:
            return subprocess.Popen(
                self.command(run),
                cwd=self.folder,
                env=self.environment,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )

    def stderr(self) -> str:
        """Of what was started last."""
        return (self.folder / "stderr").read_text()

    def finish(
        self, run: str = "run", name: str = "probe-oom"
    ) -> "subprocess.CompletedProcess[str]":
        return self.ran(self.command(run, name))

    def ran(self, arguments: list[str]) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            arguments,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
        )

    def journal(self, run: str = "run") -> Path:
        return self.folder / run / TRIALS_FILE

    def lines(self, run: str = "run") -> int:
        with contextlib.suppress(FileNotFoundError):
            return self.journal(run).read_bytes().count(b"\n")
        return 0

    def made(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / "made").read_text().count("\n")
        return 0

    def processes(self) -> list[int]:
        """All that this one's commands have started and that still run, whoever their parent is by now."""
        mark = f"{MARK}={self.mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                running = (
                    entry.name.isdigit()
                    and (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    != "Z"
                )
                if running and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    @contextlib.contextmanager
    def held(self) -> "Iterator[subprocess.Popen[bytes]]":
        """A probe that has measured a few trials and is held in the middle of a step, with a child of the step's."""
        process = self.start()
        try:
            until(lambda: ended(process) or self.lines() >= 2, "two trials")
            (self.folder / "hold").touch()
            until(
                lambda: ended(process) or (self.folder / "held").exists(),
                "a step that is held",
            )
            assert not ended(process), self.stderr()
            yield process
        finally:
            self.let_go()
            process.kill()
            process.wait()

    def let_go(self) -> None:
        for name in ("hold", "held"):
            (self.folder / name).unlink(missing_ok=True)


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


def shapes(trials: list[Trial]) -> list[tuple[int, float]]:
    return [(trial.batch_size, trial.length) for trial in trials]


def errors(stderr: str) -> list[str]:
    assert "Traceback" not in stderr
    return [line for line in stderr.splitlines() if line.startswith("Error:")]


@pytest.fixture
def probing(tmp_path: Path) -> Iterator[Probing]:
    started = Probing(tmp_path)
    yield started
    until(lambda: not started.processes(), "the end of all processes")


@pytest.fixture(scope="session")
def undisturbed(made_once: MadeOnce) -> Path:
    """The run folder of a `tune` that nothing disturbs."""

    def make(folder: Path) -> None:
        ran = Probing(folder).finish(name="tune")
        assert ran.returncode == 0, ran.stderr
        assert {path.name for path in (folder / "run").iterdir()} == {RUN_FILE, *FILES}

    return made_once("undisturbed", make) / "run"


def take_over(undisturbed: Path, probing: Probing) -> None:
    """Puts the undisturbed run there as if it were this one's own, with all its trials but without its results."""
    run = probing.folder / "run"
    run.mkdir()
    told = (
        (undisturbed / RUN_FILE)
        .read_text()
        .replace(str(undisturbed.parent), str(probing.folder))
    )
    (run / RUN_FILE).write_text(told)  # an option of the workload names its folder
    shutil.copy(undisturbed / TRIALS_FILE, run / TRIALS_FILE)


# The parent is killed


def kill(process: "subprocess.Popen[bytes]", probing: Probing) -> None:
    process.kill()
    process.wait()
    until(lambda: not probing.processes(), "the end of the worker and its children")


@pytest.mark.slow
def test_killed_after_every_line_it_finds_the_same(tmp_path: Path) -> None:
    probing = Probing(tmp_path, lengths=(6, 20))
    assert probing.finish("undisturbed").returncode == 0
    kills, before = 0, b""
    while True:
        lines = probing.lines()
        process = probing.start()
        until(lambda: ended(process) or probing.lines() > lines, "another trial")  # noqa: B023  # called at once
        by_itself = ended(process)
        kill(process, probing)
        assert probing.journal().read_bytes().startswith(before)
        before = probing.journal().read_bytes()
        if by_itself:
            break
        kills += 1
    assert process.returncode == 0, probing.stderr()
    found = shapes(read_trials(probing.journal()))
    # Two lines may have come before the kill, but hardly ever.
    assert kills >= len(found) - 1
    assert len(found) == len(set(found)) == probing.lines("undisturbed")
    assert frontier(tmp_path / "run") == frontier(tmp_path / "undisturbed")


@pytest.mark.slow
def test_killed_after_its_last_trial_it_measures_none_again(
    probing: Probing, undisturbed: Path
) -> None:
    # What is left are the batches that are run once more, to confirm them, and the result.
    take_over(undisturbed, probing)
    before = probing.journal().read_bytes()
    process = probing.start()
    until(lambda: ended(process) or probing.made() > 0, "a batch")
    kill(process, probing)
    assert not (probing.folder / "run" / PROBE_FILE).exists()
    assert probing.finish().returncode == 0
    assert probing.journal().read_bytes() == before
    assert frontier(probing.folder / "run") == frontier(undisturbed)


def test_killed_in_mid_step_it_leaves_no_child_of_the_step(probing: Probing) -> None:
    with probing.held() as process:
        assert len(probing.processes()) >= 3
        kill(process, probing)


# No room


@dataclass(frozen=True)
class Stage:
    """How a command ended that had too little room for one file, and what its run folder held then."""

    returncode: int
    stderr: str
    run: Path


_LIMITED = "import os, resource, sys; n = int(sys.argv[1]); resource.setrlimit(resource.RLIMIT_FSIZE, (n, n)); "
# Python would keep the truncated bytecode of what it imports.
_LIMITED += "os.environ['PYTHONDONTWRITEBYTECODE'] = '1'; "
_LIMITED += "os.execv(sys.argv[2], sys.argv[2:])"


def with_a_limit_on_files(probing: Probing, undisturbed: Path) -> dict[str, Stage]:
    """RLIMIT_FSIZE between the size of one file and that of the next; the smallest, sampler.yaml, it can't stop."""
    sizes = {
        name: (undisturbed / name).stat().st_size
        for name in (RUN_FILE, TRIALS_FILE, PROBE_FILE, SWEEP_FILE)
    }
    names = list(sizes)
    assert sorted(names, key=lambda name: sizes[name]) == names
    stages = {}
    for smaller, name in pairwise(names):
        limit = str((sizes[smaller] + sizes[name]) // 2)
        stages[name] = _stage(
            probing,
            name,
            [sys.executable, "-c", _LIMITED, limit, *probing.command(name="tune")],
        )
    stages["room"] = _stage(probing, "room", probing.command(name="tune"))
    return stages


def _stage(probing: Probing, name: str, arguments: list[str]) -> Stage:
    ran = probing.ran(arguments)
    copy = shutil.copytree(probing.folder / "run", probing.folder / f"after-{name}")
    return Stage(ran.returncode, ran.stderr, copy)


@pytest.mark.slow
def test_no_room_for_a_file_is_one_message_and_loses_nothing(
    probing: Probing, undisturbed: Path
) -> None:
    stages = with_a_limit_on_files(probing, undisturbed)
    room = stages.pop("room")  # the same command with enough
    assert room.returncode == 0, room.stderr
    assert {path.name for path in room.run.iterdir()} == {RUN_FILE, *FILES}
    assert frontier(room.run) == frontier(undisturbed)
    for name, stage in stages.items():
        assert stage.returncode == 1, stage.stderr
        (message,) = errors(stage.stderr)
        assert re.search(
            rf"{name} can't be written: (No space left on device|File too large)",
            message,
        )
        assert "run the same command again" in stage.stderr
        expected = {RUN_FILE, *FILES[: FILES.index(name)]} | (
            {name} if name == TRIALS_FILE else set()
        )
        assert {path.name for path in stage.run.iterdir()} == expected
        kept = read_trials(stage.run / TRIALS_FILE)
        assert kept
        assert read_trials(room.run / TRIALS_FILE)[: len(kept)] == kept


# It is told to stop


@pytest.mark.slow
def test_stopped_in_the_middle_of_a_trial_it_loses_nothing(
    probing: Probing, undisturbed: Path
) -> None:
    with probing.held() as process:
        before = probing.journal().read_bytes()
        process.send_signal(signal.SIGTERM)
        process.wait()
        until(lambda: not probing.processes(), "the end of the worker and its children")
    assert process.returncode == 130
    assert "Interrupted" in probing.stderr()
    assert "Traceback" not in probing.stderr()
    assert probing.journal().read_bytes() == before
    left = read_result(probing.folder / "run" / PROBE_FILE, Probe)
    assert left.unfinished
    assert not left.is_proven
    assert f"{PROBE_FILE} holds the largest batches that ran by now" in probing.stderr()
    gate = probing.ran(
        command("report", "run", "--fail-if", "probe.unfinished == true")
    )
    assert gate.returncode == 3, gate.stderr
    assert probing.finish().returncode == 0
    assert not read_result(probing.folder / "run" / PROBE_FILE, Probe).unfinished
    assert probing.journal().read_bytes().startswith(before)
    assert frontier(probing.folder / "run") == frontier(undisturbed)
