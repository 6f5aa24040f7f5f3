"""Tests of the costs that a recorded training measured, and of its out-of-memory errors as trials of the next probe."""

import numpy as np
import pytest
from memory_laws import LAWS, MADE, LawDevice, made_lengths, probe_on
from msgspec import structs
from training_lines import START, step, write

from batchtune.buckets.current import read_current
from batchtune.buckets.micro_batches import Packing
from batchtune.buckets.sweep import run_sweep
from batchtune.epochs.recorded import costs_of_training, trials_of
from batchtune.errors import ResultError
from batchtune.lengths import Lengths
from batchtune.reports import RunResults
from batchtune.reports.sweeps import sweep_section
from batchtune.results import SweepSettings

LENGTHS = Lengths.of(np.linspace(1, 30, 500).round(2))


def step_seconds(size, length):
    return 0.01 + 1e-3 * size * length


def training():
    random = np.random.default_rng(0)
    steps = []
    for length in random.uniform(1, 30, 2000).round(2).tolist():
        size = int(random.integers(1, max(2, 200 // length)))
        steps.append(step((size, length), seconds=step_seconds(size, length)))
    return steps


def test_times_are_those_of_the_steps_but_for_a_stalled_one(tmp_path):
    stalled = step((8, 10.0), seconds=60.0)
    path = write(tmp_path, [START, *training(), stalled])
    costs, _ = costs_of_training(path, LENGTHS)
    sizes = np.array([2.0, 8.0, 60.0])
    lengths = np.array([28.0, 10.0, 2.5])
    assert costs.step_seconds(sizes, lengths) == pytest.approx(
        step_seconds(sizes, lengths), rel=0.05
    )
    assert costs.device_name == "made"


def test_batches_are_no_longer_than_the_largest_that_ran(tmp_path):
    oom = step((20, 30), oom="CUDA out of memory")
    path = write(tmp_path, [START, step((99, 30)), START, step((4, 20)), oom])
    costs, largest = costs_of_training(path, LENGTHS)
    assert largest == 80
    assert not costs.proven(np.array([5.0])).any()


def test_accumulated_batches_share_the_time_by_their_size():
    (trial,) = trials_of([step((2, 10), (1, 20), seconds=0.6)], LENGTHS)
    assert (trial.batch_size, trial.length) == (2, 10)
    assert trial.step_seconds == pytest.approx(0.3)


def test_lengths_in_another_unit_are_an_error(tmp_path):
    path = write(tmp_path, [START, step((2, 16000))])
    with pytest.raises(ResultError, match=r"up to.*\n.*--per-unit"):
        costs_of_training(path, LENGTHS)


def test_a_recording_without_times_is_an_error(tmp_path):
    path = write(tmp_path, [START, step((2, 10), seconds=None)])
    with pytest.raises(ResultError, match="no step with a time"):
        costs_of_training(path, LENGTHS)


def test_a_training_that_was_not_recorded_is_told_how(tmp_path):
    message = r"does not exist.*\n`batchtune record -- COMMAND` writes it"
    with pytest.raises(ResultError, match=message):
        costs_of_training(tmp_path / "training.jsonl", LENGTHS)


def test_an_oom_counts_as_a_trial_of_the_lengths():
    ooms = [
        step((8, 20), (2, 30), oom="the largest of those at hand"),
        step((3, 32), oom="padded beyond the longest"),
        step(oom="no batch known"),
    ]
    trials = trials_of(ooms, LENGTHS)
    assert [(trial.batch_size, trial.length) for trial in trials] == [(8, 20), (3, 30)]
    assert all(trial.recorded and trial.outcome == "oom" for trial in trials)
    with_targets = Lengths.of(LENGTHS.values, LENGTHS.values * 2)
    assert [trial.target_length for trial in trials_of(ooms, with_targets)] == [
        with_targets.worst_target(20.0),
        60.0,
    ]


def recorded_epoch():
    """Half an epoch of batches of 8 in steps of two; the first is padded beyond the longest example."""
    order = np.random.default_rng(1).permutation(LENGTHS.values)
    longest = order[:256].reshape(16, 2, 8).max(axis=2)
    longest[0, 0] = 31
    return [
        step(*((8, length) for length in pair), seconds=1.0)
        for pair in longest.tolist()
    ]


def swept_after(folder, steps, lengths=LENGTHS, start=START, **options):
    write(folder, [start, *steps])
    settings = SweepSettings(strategies=("linear",), num_buckets=(8,))
    return run_sweep(lengths, settings, folder, **options)


def test_a_recorded_training_is_the_current_row(tmp_path):
    steps = recorded_epoch()
    swept = swept_after(tmp_path, steps, from_training=True)
    row = swept.current
    assert row.mates_again is None
    padded = sum(shape.padded_length for each in steps for shape in each.batches)
    assert row.padded_length == pytest.approx(padded * 500 / 256)
    assert (row.batches, row.steps, row.largest_batch_size) == (62, 31, 8)
    # Each step took a second.
    assert row.estimated_epoch_seconds == pytest.approx(31, rel=0.1)
    assert swept.settings.min_steps == 31
    assert swept.current_settings["describe"] == "the recorded training, of 16 steps"


def test_a_recording_of_longer_data_warns(tmp_path):
    shorter = Lengths.of(LENGTHS.values * 0.8)
    swept = swept_after(tmp_path, recorded_epoch(), shorter, from_training=True)
    (warning,) = [text for text in swept.warnings if "recorded batches" in text]
    assert "are longer than any example, up to 31" in warning
    assert "or it had other data" in warning


def test_packing_is_compared_with_the_steps_of_a_recording(tmp_path):
    lengths = Lengths.of(np.arange(500) % 30 + 1)
    packing = Packing(max_tokens=600)
    swept = swept_after(tmp_path, recorded_epoch(), lengths, packing=packing)
    assert swept.current.steps == swept.min_steps == 31
    assert swept.settings.accumulate == 2
    said = " ".join(sweep_section(RunResults(name="run", sweep=swept)).sentences)
    assert swept.packing.row.steps < 31 and "keeps at least" not in said


def test_a_training_in_batchtunes_batches_is_no_current_row(tmp_path):
    tuned = structs.replace(START, tuned=True)
    swept = swept_after(tmp_path, recorded_epoch(), start=tuned, max_batch_length=400)
    assert swept.current is None


def test_a_recording_of_other_data_is_no_current_row(tmp_path):
    other = [step((8, 300.0))]
    assert swept_after(tmp_path, other, max_batch_length=400).current is None
    current = read_current(str(tmp_path / "training.jsonl"))
    with pytest.raises(ResultError, match="no padded batches of these"):
        swept_after(tmp_path, other, max_batch_length=400, current=current)


def test_the_next_probe_stays_below_a_recorded_oom(tmp_path):
    lengths = made_lengths("speech", count=300)

    def probe():
        device = LawDevice(LAWS["blocks of length"], lengths)
        return probe_on(device, tmp_path, structs.replace(MADE, num_lengths=6))

    before = probe()
    point = before.frontier[len(before.frontier) // 2]
    size = point.batch_size - 1
    oom = step((size, point.length), oom="CUDA out of memory")
    write(tmp_path, [START, oom])
    after = probe()
    limited = [
        other.batch_size for other in after.frontier if other.length >= point.length
    ]
    assert max(limited) < size
    assert [trial.recorded for trial in after.trials].count(True) == 1
    assert probe().trials == after.trials
