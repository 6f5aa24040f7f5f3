"""The whole probe on the CPU, under a real limit, with a workload whose memory is known."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

from batchtune.errors import ProbeError, ResultError, WorkloadError
from batchtune.lengths import Lengths
from batchtune.probe.messages import ProbeHooks
from batchtune.probe.probing import run_probe
from batchtune.probe.settings import ProbeSettings
from batchtune.probe.supervisor import Supervisor
from batchtune.results import (
    PROBE_FILE,
    RUN_FILE,
    TRIALS_FILE,
    BatchShape,
    FrontierPoint,
    Probe,
    read_result,
)

PROBE_TESTS = Path(__file__).parent
KNOWN = f"{PROBE_TESTS / 'known_workload.py'}:Known"
FAULTY = f"{PROBE_TESTS / 'faulty_workload.py'}"
MIB = 1 << 20
# One example of the longest takes 52 MiB (20 · 1 + 20² · 0.08), of the others 18 and 7.
LENGTHS = Lengths.of([5.0, 10.0, 20.0] * 12)
OPTIONS = {"a": 1.0 * MIB, "b": 0.08 * MIB}

# Its probes start dozens of workers.
pytestmark = pytest.mark.usefixtures("one_nursery")


def settings(
    memory_bytes: int, workload: str = KNOWN, options: dict[str, float] | None = None
) -> ProbeSettings:
    return ProbeSettings(
        workload=workload,
        options=OPTIONS if options is None else options,
        device="cpu",
        memory_bytes=memory_bytes,
        memory_fraction=1.0,
        num_lengths=3,
    )


@dataclass(frozen=True)
class Finished:
    """A probe, and the run folder that it wrote; tests that change that take a copy."""

    probe: Probe
    folder: Path


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Finished]:
    """A probe under a limit in MiB, each run once."""

    @cache
    def under(memory_mib: int) -> Finished:
        folder = tmp_path_factory.mktemp("finished") / "run"
        return Finished(run_probe(LENGTHS, settings(memory_mib * MIB), folder), folder)

    return under


@pytest.fixture
def copied(finished: Callable[[int], Finished], tmp_path: Path) -> Path:
    return shutil.copytree(finished(400).folder, tmp_path / "run")


def truth_around(points: list[FrontierPoint], memory_bytes: int) -> dict[float, int]:
    """The largest batch size that fits at each length: every one from the answer up, until three in a row fail.

    Below the answer nothing can be the largest where the answer fits, and memory that is a·B·L + b·B·L² does not
    shrink again above. Where the answer itself does not fit, all below it are tried.
    """
    with Supervisor(settings(memory_bytes)) as supervisor:
        supervisor.start()
        return {
            point.length: _largest(supervisor, point.length, point.batch_size)
            for point in points
        }


def _largest(supervisor: Supervisor, length: float, answer: int) -> int:
    def fits(size: int) -> bool:
        return supervisor.measure(BatchShape(size, length), 0).trial.outcome == "ok"

    cap = LENGTHS.histogram.count_up_to(length)
    above = range(answer, min(answer + 3, cap) + 1)
    largest = max(filter(fits, above), default=0)
    if largest == answer + 3:
        largest = max(filter(fits, range(answer + 3, cap + 1)))
    return largest or max(filter(fits, range(1, answer)), default=0)


LIMITS_MIB = [400, pytest.param(750, marks=pytest.mark.slow)]


@pytest.mark.parametrize("memory_mib", LIMITS_MIB)
def test_the_probe_finds_what_a_brute_force_finds(
    finished: Callable[[int], Finished], memory_mib: int
) -> None:
    probe = finished(memory_mib).probe
    truth = truth_around(probe.frontier, memory_mib * MIB)
    assert list(truth) == [5.0, 10.0, 20.0]
    for point in probe.frontier:
        assert truth[point.length] - 1 <= point.batch_size <= truth[point.length]


@pytest.mark.slow
def test_what_a_failure_leaves_sets_no_margin(tmp_path: Path) -> None:
    """The longest runs out of memory in its backward pass, and the shortest, of which there is one, comes next."""
    limit = 600 * MIB
    lengths = Lengths.of([1.0, *LENGTHS.values])
    probe = run_probe(
        lengths, settings(limit, f"{FAULTY}:TwoLosses", {}), tmp_path / "run"
    )
    assert any(trial.outcome == "oom" for trial in probe.trials)
    assert probe.margin is not None
    assert probe.margin.bytes < 0.01 * limit


def test_what_was_found_is_written(finished: Callable[[int], Finished]) -> None:
    probe, folder = finished(400).probe, finished(400).folder
    assert read_result(folder / PROBE_FILE, Probe) == probe
    assert probe.device.limit_bytes == 400 * MIB
    assert probe.lengths == LENGTHS.summary()
    assert probe.models.peak_bytes is not None
    assert len((folder / TRIALS_FILE).read_bytes().splitlines()) == len(probe.trials)


def test_a_second_run_measures_nothing_again(copied: Path) -> None:
    assert run_probe(LENGTHS, settings(400 * MIB), copied) == read_result(
        copied / PROBE_FILE, Probe
    )


def test_a_folder_of_other_lengths_is_refused_and_left_alone(copied: Path) -> None:
    before = {path.name: path.read_bytes() for path in copied.iterdir()}
    with pytest.raises(ResultError, match="other lengths"):
        run_probe(Lengths.of([5.0, 10.0]), settings(400 * MIB), copied)
    assert {path.name: path.read_bytes() for path in copied.iterdir()} == before


@pytest.mark.slow
def test_a_folder_of_another_limit_is_refused_unless_forced(copied: Path) -> None:
    with pytest.raises(ResultError, match="memory_bytes"):
        run_probe(LENGTHS, settings(500 * MIB), copied)
    assert (
        run_probe(LENGTHS, settings(500 * MIB), copied, force=True).device.limit_bytes
        == 500 * MIB
    )


def test_too_little_memory_for_anything_is_told(tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match="even a batch of one of the shortest example"):
        run_probe(
            LENGTHS, settings(400 * MIB, options={"a": 100.0 * MIB, "b": 0.0}), tmp_path
        )
    assert not (tmp_path / PROBE_FILE).exists()


def test_a_step_that_changes_no_parameter_is_warned_of(tmp_path: Path) -> None:
    untrained = run_probe(
        Lengths.of([1.0] * 4),
        settings(1024 * MIB, f"{FAULTY}:TrainsNothing", {}),
        tmp_path / "a",
    )
    assert any(
        text.startswith("The workload's step changes no parameter")
        for text in untrained.warnings
    )
    trained = run_probe(
        Lengths.of([1.0] * 4),
        settings(1024 * MIB, options={"a": MIB, "b": 0.0}),
        tmp_path / "b",
    )
    assert not any("parameter" in text for text in trained.warnings)


@pytest.mark.slow
def test_a_workload_that_catches_a_lack_of_memory_is_warned_of(tmp_path: Path) -> None:
    probe = run_probe(
        Lengths.of([1.0] * 8),
        settings(1024 * MIB, f"{FAULTY}:CatchesItself", {}),
        tmp_path,
    )
    assert probe.frontier[0].batch_size < 4
    assert any(
        text.startswith("The workload catches out-of-memory errors itself: in ")
        for text in probe.warnings
    )


def test_examples_that_are_too_long_are_counted_and_told_before(tmp_path: Path) -> None:
    notes: list[str] = []
    left: list[float | None] = []
    with pytest.raises(ProbeError, match=r"12 of 36 examples exceed 10") as caught:
        run_probe(
            LENGTHS,
            settings(500 * MIB, options={"a": 15.0 * MIB, "b": 0.0}),
            tmp_path,
            hooks=ProbeHooks(
                on_note=notes.append,
                on_progress=lambda progress: (
                    left.append(progress.seconds_left) if progress.shortening else None
                ),
            ),
        )
    assert "--max-length 10.0" in (caught.value.hint or "")
    assert [note.split(",")[0] for note in notes] == [
        "Warning: the longest example (20) does not fit within 500 MiB"
    ]
    assert left[-1] == 0
    assert not (tmp_path / PROBE_FILE).exists()


@pytest.mark.parametrize(
    "name", [pytest.param("RaisesInMakeBatch", marks=pytest.mark.slow), "RaisesInStep"]
)
def test_the_workloads_own_error_stops_the_probe(tmp_path: Path, name: str) -> None:
    with pytest.raises(WorkloadError, match="failed in its") as caught:
        run_probe(LENGTHS, settings(600 * MIB, f"{FAULTY}:{name}", {}), tmp_path)
    assert "memory limit" not in caught.value.message
    assert caught.value.traceback
    assert not (tmp_path / PROBE_FILE).exists()


def test_an_error_that_only_looks_like_an_oom_is_the_workloads(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="CUBLAS_STATUS_NOT_INITIALIZED"):
        run_probe(
            Lengths.of([1.0, 2.0]),
            settings(600 * MIB, f"{FAULTY}:Disguised", {}),
            tmp_path,
        )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Segfaults", "SIGSEGV"),
        pytest.param("Hangs", "no answer within 1 s", marks=pytest.mark.slow),
    ],
)
def test_a_workload_that_always_crashes_or_hangs_is_not_an_oom(
    tmp_path: Path, name: str, message: str
) -> None:
    chosen = replace(
        settings(600 * MIB, f"{FAULTY}:{name}", {}), trial_timeout_seconds=1.0
    )
    with pytest.raises(WorkloadError, match=message) as caught:
        run_probe(Lengths.of([1.0]), chosen, tmp_path)
    assert "did not run out of memory" in (caught.value.hint or "")


@pytest.mark.slow
def test_a_disguised_oom_counts_if_a_smaller_batch_passes(tmp_path: Path) -> None:
    probe = run_probe(
        Lengths.of([1.0] * 30),
        settings(600 * MIB, f"{FAULTY}:DisguisedAboveFour", {}),
        tmp_path,
    )
    assert [(point.batch_size, point.closed_by) for point in probe.frontier] == [
        (4, "oom")
    ]


def test_a_setup_that_fails_leaves_no_run_behind(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="epoch-3"):
        run_probe(LENGTHS, settings(600 * MIB, f"{FAULTY}:RaisesInSetup", {}), tmp_path)
    assert not (tmp_path / RUN_FILE).exists()
