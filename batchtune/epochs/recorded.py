"""The steps of a recorded training as trials: for a sweep in place of a probe's, and for the next probe."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from batchtune.epochs.measured_costs import Costs
from batchtune.epochs.own_batches import PADDED_BEYOND
from batchtune.epochs.step_times import StepTimes
from batchtune.errors import ResultError
from batchtune.lengths import Lengths
from batchtune.results import (
    TRAINING_FILE,
    TRIALS_FILE,
    BatchShape,
    TrainingStep,
    Trial,
    last_recording,
    read_training,
)
from batchtune.run_folder import append_trial
from batchtune.trust import WORST_TIME_ERROR

# Models take the square of the number of trials.
_MOST_TRIALS = 200


def trials_of(steps: Sequence[TrainingStep], lengths: Lengths) -> list[Trial]:
    """Return each step as the trial of its largest batch, whose share of the time is that of the padded length.

    What ran out of memory counts with the longest target of the data, which needs no less. Raises ResultError if the
    steps' lengths count another unit than these.
    """
    trials = []
    for step in steps:
        if not step.batches:
            continue
        largest = max(step.batches, key=lambda shape: shape.padded_length)
        if largest.length > PADDED_BEYOND * lengths.longest:
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
        proven=lambda lengths: np.zeros(lengths.shape, dtype=np.int64),
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
