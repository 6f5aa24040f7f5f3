"""The whole probe on the CPU, under a real limit, with a workload whose memory is known."""

from pathlib import Path

import pytest

from batchtune.lengths import Lengths
from batchtune.probe.probing import run_probe
from batchtune.probe.settings import ProbeSettings
from batchtune.probe.supervisor import Supervisor
from batchtune.results import (
    BatchShape,
    FrontierPoint,
)

PROBE_TESTS = Path(__file__).parent
KNOWN = f"{PROBE_TESTS / 'known_workload.py'}:Known"
FAULTY = f"{PROBE_TESTS / 'faulty_workload.py'}"
MIB = 1 << 20
# One example of the longest takes 52 MiB (20 · 1 + 20² · 0.08), of the others 18 and 7.
LENGTHS = Lengths.of([5.0, 10.0, 20.0] * 12)
OPTIONS = {"a": 1.0 * MIB, "b": 0.08 * MIB}

# Its probes start dozens of workers.
pytestmark = [pytest.mark.process, pytest.mark.usefixtures("one_nursery")]


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


def test_the_probe_finds_what_a_brute_force_finds(tmp_path: Path) -> None:
    probe = run_probe(LENGTHS, settings(400 * MIB), tmp_path)
    assert probe.device.limit_bytes == 400 * MIB
    truth = truth_around(probe.frontier, 400 * MIB)
    assert list(truth) == [5.0, 10.0, 20.0]
    for point in probe.frontier:
        assert truth[point.length] - 1 <= point.batch_size <= truth[point.length]


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
