"""The training's own batches: the figures of an epoch, counted or recorded; and recorded steps as trials."""

from __future__ import annotations

import math
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from batchtune.epochs import EpochBatches
from batchtune.epochs.expectation import effective_buckets, mates_in_cuts
from batchtune.epochs.measured_costs import Costs, StepTimes, nothing_proven
from batchtune.errors import ResultError
from batchtune.lengths import FloatArray, IntArray, Lengths
from batchtune.results import (
    TRAINING_FILE,
    TRIALS_FILE,
    BatchShape,
    OwnBatches,
    TrainingStep,
    Trial,
    last_recording,
    read_training,
)
from batchtune.run_folder import append_trial
from batchtune.trust import WORST_TIME_ERROR

# Models take the square of the number of trials.
_MOST_TRIALS = 200
# Batches can be padded a little beyond the longest example, but no further.
_PADDED_BEYOND = 1.5
# Of more batches, this many stand for all.
_MOST_SHAPES = 256
# Batches that hold less than this part of what the examples do, in as many of them, are of others.
_LESS_THAN_EXAMPLES = 0.8
# An epoch whose examples are more or less than those of the data by a larger share is no epoch of it.
_OTHER_EXAMPLES = 0.05


def counted(path: Path, lengths: Lengths, ranks: int) -> OwnBatches | None:
    """Return the figures of the batches in a file of `scripts.running.write_own_batches`.

    Returns None without such a file, or if the batches are no epochs of the manifest's rows.
    """
    if lengths.in_order is None:
        return None
    values, targets = lengths.in_order
    try:
        with np.load(path) as stored:
            sampler = str(stored["sampler"])
            first = _cut(stored["first"], values.size)
            second = _cut(stored["second"], values.size)
    except (OSError, ValueError, zipfile.BadZipFile):
        return None
    # A sampler may leave some out, or repeat some; and each rank has a part.
    share = first.examples.size / values.size
    if abs(share * ranks - 1) > _OTHER_EXAMPLES:
        return None
    shapes = first.shapes(values, targets)
    kept = _kept(shapes.padded_lengths)
    mates = mates_in_cuts([first, second], values)
    # Mates that meet again may do so on another rank: this one has only a part of them in its second epoch.
    again = mates.again / np.isin(first.examples, second.examples).mean()
    return OwnBatches(
        sampler=sampler,
        ranks=ranks,
        batches=round(len(shapes) / share),
        padded_length=shapes.padded_length / share,
        shapes=list(shapes.chosen(kept).one_by_one()),
        mates_again=min(1.0, float(again)),
        effective_buckets=effective_buckets(mates.again, first.layout),
    )


def recorded(steps: Sequence[TrainingStep], lengths: Lengths) -> OwnBatches | None:
    """Return the figures of an epoch of a recording's batches.

    None without batches, if some are packed, or if they are longer than the data's or hold less:
    then their lengths are in another unit, or of other data. A recording says how large its batches
    were, not which examples were in them.
    """
    batches = [shape for step in steps if step.oom is None for shape in step.batches]
    if not batches or any(shape.sequences is not None for shape in batches):
        return None
    if max(shape.length for shape in batches) > _PADDED_BEYOND * lengths.longest:
        return None
    epochs = sum(shape.batch_size for shape in batches) / lengths.count
    padded_lengths = np.array([shape.padded_length for shape in batches])
    padded_length = float(padded_lengths.sum()) / epochs
    if padded_length < _LESS_THAN_EXAMPLES * lengths.total:
        return None
    shapes = []
    for index in _kept(padded_lengths):
        shape = batches[index]
        # Batches may be padded a little beyond the longest example.
        length = min(max(shape.length, lengths.shortest), lengths.longest)
        target_length = shape.target_length
        if target_length is None:
            target_length = lengths.worst_target(length)
        shapes.append(BatchShape(shape.batch_size, length, target_length))
    return OwnBatches(
        sampler="a recorded training",
        ranks=len({step.rank for step in steps}),
        batches=max(1, round(len(batches) / epochs)),
        padded_length=padded_length,
        shapes=shapes,
    )


def _kept(padded_lengths: FloatArray) -> IntArray:
    """Return which batches stand for all: evenly spaced in the order of their padded lengths."""
    count = padded_lengths.size
    places = np.linspace(0, count - 1, min(count, _MOST_SHAPES))
    kept: IntArray = np.argsort(padded_lengths)[places.astype(int)]
    return kept


def _cut(epoch: IntArray, count: int) -> EpochBatches:
    """Return the batches of an epoch, shape (2, examples): the number of its batch, and the example."""
    batches, examples = epoch
    return EpochBatches.in_row(examples, np.bincount(batches), count)


def trials_of(steps: Sequence[TrainingStep], lengths: Lengths) -> list[Trial]:
    """Return each step as the trial of its largest batch, whose share of the time is that of the padded length.

    A batch that ran out of memory counts with the longest target of the data, which needs no less.
    Raises ResultError if the steps' lengths count another unit than these.
    """
    trials = []
    for step in steps:
        if not step.batches:
            continue
        largest = max(step.batches, key=lambda shape: shape.padded_length)
        if largest.length > _PADDED_BEYOND * lengths.longest:
            raise ResultError(
                f"recorded batches are up to {largest.length:g} long, the examples up to {lengths.longest:g}",
                f"Remove {TRAINING_FILE}, and record with --per-unit: how many positions of a tensor are one unit.",
            )
        shape = largest
        if shape.sequences is None:
            length = min(max(shape.length, lengths.shortest), lengths.longest)
            shape = BatchShape(shape.batch_size, length)
        padded_length = sum(shape.padded_length for shape in step.batches)
        trial = Trial.of(
            shape,
            "ok",
            step_seconds=step.seconds
            and step.seconds * largest.padded_length / padded_length,
            recorded=True,
        )
        if step.oom is not None:
            trial = replace(
                trial,
                outcome="oom",
                target_length=lengths.worst_target(shape.length),
                error=step.oom,
                confirmation=True,
            )
        trials.append(trial)
    return trials


def add_recorded_ooms(
    lengths: Lengths, trials: list[Trial], folder: Path, on_note: Callable[[str], None]
) -> None:
    """Add what ran out of memory in a run folder's recorded trainings to its trials and their journal, once."""
    path = folder / TRAINING_FILE
    if not path.exists():
        return
    known = {trial.shape for trial in trials if trial.recorded}
    for recording in read_training(path):
        for trial in trials_of(recording.steps, lengths):
            if trial.outcome == "oom" and trial.shape not in known:
                known.add(trial.shape)
                trials.append(replace(trial, index=len(trials)))
                append_trial(folder / TRIALS_FILE, trials[-1])
                on_note(
                    f"The recorded training ran out of memory with {trial.shape}: the search stays below."
                )


def costs_of_training(path: Path, lengths: Lengths) -> tuple[Costs, float]:
    """Return the step times of the last recorded training, and the largest padded length that it ran.

    Nothing is proven. Raises ResultError if the file can't be read, holds no step with a time, or is of another unit.
    """
    recording = last_recording(path)
    trials = trials_of(recording.steps, lengths)
    if any(trial.sequences is not None for trial in trials):
        raise ResultError(
            f"the last recording of {path} is of packed batches, which give no costs of padded ones",
            "Run `batchtune tune` with the script, which measures packed batches.",
        )
    timed = [trial for trial in trials if trial.step_seconds]
    if not timed:
        raise ResultError(
            f"the last recording of {path} holds no step with a time",
            "Record a longer training: batchtune record -- COMMAND.",
        )
    times = StepTimes.fit(_typical(timed))
    if times is not None and times.model.relative_error > WORST_TIME_ERROR:
        times = None
    costs = Costs(
        proven=nothing_proven,
        step_seconds=times,
        device_name=recording.start.device,
        world_size=len({step.rank for step in recording.steps}),
        accumulate=accumulation_of(recording.steps),
    )
    return costs, max(trial.shape.padded_length for trial in timed)


def accumulation_of(steps: Sequence[TrainingStep]) -> int:
    """Return how many batches most steps train on; the last of an epoch may have fewer."""
    counts = Counter(len(step.batches) for step in steps if step.batches)
    return max(counts, key=counts.__getitem__, default=1)


def _typical(trials: Sequence[Trial]) -> list[Trial]:
    """Return at most 200 trials: of neighbours in shape the one whose time is the median."""
    ordered = sorted(trials, key=lambda trial: (trial.batch_size, trial.length))
    size = math.ceil(len(ordered) / _MOST_TRIALS)
    typical = []
    for start in range(0, len(ordered), size):
        group = ordered[start : start + size]
        group.sort(key=lambda trial: trial.step_seconds or 0.0)
        typical.append(group[len(group) // 2])
    return typical
