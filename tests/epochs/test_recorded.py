"""Tests of the costs that a recorded training measured, and of its out-of-memory errors as trials of the next probe."""

from pathlib import Path
from typing import cast

import numpy as np
import pytest
from memory_laws import LAWS, LawDevice, made_lengths
from training_lines import start, step, write

from batchtune.epochs.recorded import (
    RecordedTraining,
    costs_of_training,
    recorded_ooms,
)
from batchtune.errors import ResultError
from batchtune.lengths import Lengths
from batchtune.probe.messages import ProbeHooks
from batchtune.probe.probing import run_probe
from batchtune.probe.settings import ProbeSettings
from batchtune.probe.supervisor import Supervisor
from batchtune.results import Probe, TrainingStep

LENGTHS = Lengths.of(np.linspace(1, 30, 500).round(2))


def step_seconds(size: float, length: float) -> float:
    return 0.01 + 1e-3 * size * length


def peak_bytes(size: float, length: float) -> float:
    return 1e9 + 1e6 * size * length + 2e4 * size * length**2


def training(
    count: int = 2000, *, per_unit: float = 100.0, most: float = 200.0
) -> list[TrainingStep]:
    """Steps whose batches hold up to `most` seconds, in positions of 1 / `per_unit`."""
    random = np.random.default_rng(0)
    steps = []
    for length in random.uniform(1, 30, count).round(2).tolist():
        size = int(random.integers(1, max(2, most // length)))
        steps.append(
            step(
                (size, round(length * per_unit)),
                seconds=step_seconds(size, length),
                peak_bytes=round(peak_bytes(size, length)),
            )
        )
    return steps


def test_the_models_of_a_training_are_those_of_its_steps(tmp_path: Path) -> None:
    path = write(tmp_path, [start(per_unit=100.0), *training()])
    costs = costs_of_training(path, LENGTHS)
    sizes = np.array([2.0, 8.0, 60.0])
    lengths = np.array([28.0, 10.0, 2.5])
    assert costs.step_seconds is not None
    assert costs.step_seconds(sizes, lengths) == pytest.approx(
        step_seconds(sizes, lengths), rel=0.05
    )
    assert costs.device_name == "made"


def test_batches_that_fit_need_no_more_than_the_largest_peak(tmp_path: Path) -> None:
    steps = training()
    path = write(tmp_path, [start(per_unit=100.0), *steps])
    costs = costs_of_training(path, LENGTHS)
    largest = max(each.peak_bytes or 0 for each in steps)
    lengths = np.array([1.0, 5.0, 12.0, 29.0])
    assert costs.frontier is not None
    sizes = costs.frontier(lengths)
    assert (peak_bytes(sizes, lengths) <= 1.03 * largest).all()
    assert (peak_bytes(sizes + 1, lengths) > 0.97 * largest).all()


def test_only_what_ran_is_proven(tmp_path: Path) -> None:
    path = write(tmp_path, [start(), step((4, 20)), step((9, 10))])
    costs = costs_of_training(path, LENGTHS)
    assert costs.proven is not None
    assert costs.proven(np.array([5.0, 10.0, 11.0, 20.0, 21.0])).tolist() == [
        *(9, 9, 4, 4, 0)
    ]


def test_nothing_as_large_as_what_ran_out_fits(tmp_path: Path) -> None:
    oom = step((12, 800), oom="CUDA out of memory")
    path = write(tmp_path, [start(per_unit=100.0), *training(), oom])
    costs = costs_of_training(path, LENGTHS)
    assert costs.frontier is not None and costs.proven is not None
    lengths = np.array([7.0, 8.0, 9.0])
    shorter, *longer = costs.frontier(lengths).tolist()
    assert shorter > 12 > max(longer)
    assert costs.proven(lengths).max() > 12 > costs.proven(lengths[1:]).max()


def test_accumulated_batches_share_the_time_by_their_size(tmp_path: Path) -> None:
    path = write(tmp_path, [start(), step((2, 10), (1, 40), seconds=0.6)])
    trials = RecordedTraining.read(path, with_targets=False).trials
    assert [trial.step_seconds for trial in trials] == pytest.approx([0.2, 0.4])
    assert [trial.peak_bytes for trial in trials] == [None, 10**6]


def test_the_first_step_of_a_process_is_not_timed(tmp_path: Path) -> None:
    path = write(tmp_path, [start(), step((2, 10), seconds=9.0, warm_up=True)])
    (trial,) = RecordedTraining.read(path, with_targets=False).trials
    assert trial.step_seconds is None and trial.peak_bytes is None


def test_trials_are_few_however_many_the_steps(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    sizes = random.integers(1, 2000, (5000, 3)).tolist()
    steps = [step((size, length, target)) for size, length, target in sizes]
    path = write(
        tmp_path, [start(), *(step((8, each.batches[0].length)) for each in steps)]
    )
    assert len(RecordedTraining.read(path, with_targets=True).trials) <= 200


def test_lengths_in_another_unit_are_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, [start(), *training()])
    with pytest.raises(ResultError, match="up to") as raised:
        costs_of_training(path, LENGTHS)
    assert "--per-unit" in (raised.value.hint or "")


def test_a_recording_without_steps_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, [start()])
    with pytest.raises(ResultError, match="holds no step"):
        costs_of_training(path, LENGTHS)


def test_an_oom_counts_as_a_trial_of_the_lengths(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        [
            start(per_unit=10.0),
            step((8, 200), (2, 300), oom="first"),
            step((8, 200), oom="the same shape"),
            step((3, 320), oom="padded beyond the longest"),
        ],
    )
    trials = recorded_ooms(path, LENGTHS)
    assert [(trial.batch_size, trial.length) for trial in trials] == [(8, 20), (3, 30)]
    assert all(trial.recorded and trial.outcome == "oom" for trial in trials)
    with_targets = Lengths.of(LENGTHS.values, LENGTHS.values * 2)
    assert [trial.target_length for trial in recorded_ooms(path, with_targets)] == [
        with_targets.worst_target(20.0),
        60.0,
    ]
    assert recorded_ooms(tmp_path / "none.jsonl", LENGTHS) == []


def test_the_next_probe_stays_below_a_recorded_oom(tmp_path: Path) -> None:
    lengths = made_lengths("speech", count=300)

    def probe() -> Probe:
        device = LawDevice(LAWS["blocks of length"], lengths)
        settings = ProbeSettings(
            workload="made.py:Made",
            options={},
            device="cuda",
            num_lengths=6,
            memory_fraction=1.0,
        )
        hooks = ProbeHooks(measurer=cast(Supervisor, device))
        return run_probe(lengths, settings, tmp_path, hooks=hooks)

    before = probe()
    point = before.frontier[len(before.frontier) // 2]
    size = point.batch_size - 1
    write(
        tmp_path,
        [start(), step((size, int(point.length)), oom="CUDA out of memory")],
    )
    after = probe()
    limited = [
        other.batch_size for other in after.frontier if other.length >= point.length
    ]
    assert max(limited) < size
    assert [trial.recorded for trial in after.trials].count(True) == 1
    assert probe().trials == after.trials
