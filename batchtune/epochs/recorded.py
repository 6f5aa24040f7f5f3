"""The costs that a recorded training measured, in place of a probe's.

Its steps become trials: those of about the same shape, one trial. Nothing larger than what it ran is proven; between
its shapes, a model of its memory says what needs no more than its largest peak.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from batchtune.epochs.cost_model import fit_cost
from batchtune.epochs.measured_costs import Costs, Frontier
from batchtune.epochs.step_times import StepTimes
from batchtune.errors import ResultError
from batchtune.lengths import FloatArray, IntArray, Lengths
from batchtune.results import (
    TRAINING_FILE,
    TRIALS_FILE,
    BatchShape,
    CostModel,
    TrainingStart,
    TrainingStep,
    Trial,
    read_training,
)
from batchtune.run_folder import append_trial
from batchtune.trust import WORST_TIME_ERROR

# The most trials: models take the square of their number. And the ratio of lengths that count as the same, tried in
# turn until the trials are no more.
_MOST_TRIALS = 200
_SAME_LENGTH = (1.01, 1.03, 1.1, 1.3, 2.0, math.inf)
# A memory model with a larger error says nothing about other shapes.
_WORST_PEAK_ERROR = 0.2
# Recorded batches can be padded a little beyond the longest example, but no further.
_PADDED_BEYOND = 1.5
_UNLIMITED = 2.0**53


@dataclass(frozen=True, slots=True)
class _Batch:
    """A batch that was trained on: its shape in the manifest's unit, its share of the step's time, and its peak."""

    shape: BatchShape
    seconds: float | None
    peak_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTraining:
    """What the recordings of a file measured.

    Attributes:
        trials: Groups of about equal batches, with their median time, and mean sizes and peaks.
        largest: Batch shapes that ran, without those that are within another of as many examples.
        ooms: The trials that ran out of memory.
        peak_bytes: The largest peak; None if none is known.
    """

    device: str
    trials: list[Trial]
    largest: list[BatchShape]
    ooms: list[Trial]
    peak_bytes: int | None

    @classmethod
    def read(cls, path: Path, *, with_targets: bool) -> RecordedTraining:
        """Read `training.jsonl`; targets count only `with_targets`. Raises ResultError if it can't be read."""
        batches: list[_Batch] = []
        ooms: list[Trial] = []
        for line in read_training(path):
            if isinstance(line, TrainingStart):
                start = line
            elif isinstance(line, TrainingStep) and line.oom is not None:
                ooms += _oom_trials(line, start)
            elif isinstance(line, TrainingStep):
                batches += _batches(line, start, with_targets=with_targets)
        return cls(
            device=start.device,
            trials=_grouped(batches),
            largest=_largest({batch.shape for batch in batches}),
            ooms=ooms,
            peak_bytes=max((batch.peak_bytes or 0 for batch in batches), default=0)
            or None,
        )


def _oom_trials(step: TrainingStep, start: TrainingStart) -> list[Trial]:
    """Return the trial of the batch that ran out of memory: of those at hand, the largest; none if none is known."""
    largest = step.largest
    if largest is None:
        return []
    trial = Trial.of(
        largest.shape(start),
        "oom",
        error=step.oom,
        confirmation=True,
        recorded=True,
    )
    return [trial]


def add_recorded_ooms(
    lengths: Lengths,
    trials: Sequence[Trial],
    folder: Path,
    on_note: Callable[[str], None],
) -> list[Trial]:
    """Journal what ran out of memory in a run folder's recorded training, and return what was not there yet."""
    known = {trial.shape for trial in trials if trial.recorded}
    added: list[Trial] = []
    for trial in recorded_ooms(folder / TRAINING_FILE, lengths):
        if trial.shape not in known:
            numbered = replace(trial, index=len(trials) + len(added))
            append_trial(folder / TRIALS_FILE, numbered)
            added.append(numbered)
            on_note(
                f"The recorded training ran out of memory with {trial.shape}: the search stays below."
            )
    return added


def recorded_ooms(path: Path, lengths: Lengths) -> list[Trial]:
    """Return the recorded out-of-memory errors as trials of these lengths, each shape once; none without the file.

    A shape beyond the data counts at the data's own shortest or longest length, and without a recorded target with the
    longest one that occurs: what is ruled out there needs no less memory.
    """
    if not path.exists():
        return []
    trials = {}
    for trial in RecordedTraining.read(path, with_targets=True).ooms:
        length = min(max(trial.length, lengths.shortest), lengths.longest)
        target = lengths.worst_target(length)
        if target is not None and trial.target_length is not None:
            target = min(trial.target_length, target)
        placed = replace(trial, length=length, target_length=target)
        trials[placed.shape] = placed
    return list(trials.values())


def _batches(
    step: TrainingStep, start: TrainingStart, *, with_targets: bool
) -> Iterator[_Batch]:
    """Yield a step's batches: the time is shared by their padded lengths, the peak is that of the largest."""
    cells = sum(batch.batch_size * batch.length for batch in step.batches)
    for batch in step.batches:
        seconds = None
        if step.seconds is not None and not step.warm_up:
            seconds = step.seconds * batch.batch_size * batch.length / cells
        shape = batch.shape(start)
        if not with_targets:
            shape = BatchShape(shape.batch_size, shape.length)
        peak = None
        if batch is step.largest and not step.warm_up:
            peak = step.peak_bytes
        yield _Batch(shape, seconds, peak)


def _grouped(batches: Sequence[_Batch]) -> list[Trial]:
    """Return trials of about equal batches, as many as models can take."""
    groups: dict[tuple[int, int, int], list[_Batch]] = {}
    for ratio in _SAME_LENGTH:
        groups = defaultdict(list)
        for batch in batches:
            shape = batch.shape
            length = int(math.log(shape.length) / math.log(ratio))
            target = int(math.log1p(shape.target_length or 0.0) / math.log(ratio))
            groups[shape.batch_size, length, target].append(batch)
        if len(groups) <= _MOST_TRIALS:
            break
    return [_trial(index, group) for index, group in enumerate(groups.values())]


def _trial(index: int, group: Sequence[_Batch]) -> Trial:
    """Return what was measured of about equal batches."""
    shapes = [batch.shape for batch in group]
    targets = [
        shape.target_length for shape in shapes if shape.target_length is not None
    ]
    shape = BatchShape(
        shapes[0].batch_size,
        float(np.mean([shape.length for shape in shapes])),
        float(np.mean(targets)) if targets else None,
    )
    seconds = [batch.seconds for batch in group if batch.seconds is not None]
    peaks = [batch.peak_bytes for batch in group if batch.peak_bytes is not None]
    facts: dict[str, float | int] = {}
    if seconds:
        facts["step_seconds"] = float(np.median(seconds))
        facts["mean_step_seconds"] = float(np.mean(seconds))
    if len(seconds) > 1:
        low, high = np.quantile(seconds, (0.25, 0.75)).tolist()
        facts["step_seconds_spread"] = high - low
    if peaks:
        facts["peak_bytes"] = round(float(np.mean(peaks)))
    # `steps` counts a warm-up.
    return Trial.of(
        shape, "ok", index=index, steps=len(seconds) + 1, recorded=True, **facts
    )


def _largest(shapes: set[BatchShape]) -> list[BatchShape]:
    """Return the shapes that no other of as many examples covers in both lengths."""
    ordered = sorted(
        shapes,
        key=lambda shape: (shape.batch_size, shape.length, shape.target_length or 0.0),
        reverse=True,
    )
    largest: list[BatchShape] = []
    for shape in ordered:
        before = largest[-1] if largest else None
        if (
            before is None
            or before.batch_size != shape.batch_size
            or (shape.target_length or 0.0) > (before.target_length or 0.0)
        ):
            largest.append(shape)
    return largest


def costs_of_training(path: Path, lengths: Lengths) -> Costs:
    """Return the step times of a recorded training, and what needs no more memory than its largest peak.

    Raises ResultError if the file can't be read, holds no steps, or its lengths count another unit than these.
    """
    recorded = RecordedTraining.read(path, with_targets=lengths.targets is not None)
    if not recorded.trials:
        raise ResultError(
            f"{path} holds no step",
            "Record a training: batchtune record -- COMMAND.",
        )
    longest = max(shape.length for shape in recorded.largest)
    if longest > _PADDED_BEYOND * lengths.longest:
        raise ResultError(
            f"the batches of {path} are up to {longest:g} long, the examples up to {lengths.longest:g}",
            "Record the training with --per-unit: how many positions of a tensor are one unit of the lengths.",
        )
    has_targets = all(trial.target_length is not None for trial in recorded.trials)
    fitting = _Fitting.of(recorded, lengths, has_targets=has_targets)
    times = StepTimes.fit(recorded.trials)
    if times is not None and times.model.relative_error > WORST_TIME_ERROR:
        times = None
    return Costs(
        frontier=fitting,
        continued_frontier=fitting,
        proven=fitting.proven,
        step_seconds=times,
        device_name=recorded.device,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Fitting:
    """Lengths → the largest batch size that needs no more memory than what ran, at least 1."""

    ran: Frontier
    model: CostModel | None
    peak_bytes: int
    ooms: list[Trial]
    lengths: FloatArray  # of the data, distinct and ascending
    targets: FloatArray  # the worst at each; 0 without

    @classmethod
    def of(
        cls, recorded: RecordedTraining, lengths: Lengths, *, has_targets: bool
    ) -> _Fitting:
        """Fit the memory model; None if peaks are not known or do not follow the shapes."""
        distinct = lengths.histogram.lengths
        targets = np.zeros(distinct.size)
        if has_targets:
            targets = np.array([lengths.worst_target(length) for length in distinct])
        measured = [trial for trial in recorded.trials if trial.peak_bytes]
        model = fit_cost(
            [trial.batch_size for trial in measured],
            [trial.length for trial in measured],
            [trial.peak_bytes or 0 for trial in measured],
            [trial.target_length or 0.0 for trial in measured] if has_targets else None,
        )
        if model is not None and model.relative_error > _WORST_PEAK_ERROR:
            model = None
        largest = recorded.largest
        sizes = np.array([shape.batch_size for shape in largest], dtype=np.int64)
        order = np.argsort(sizes, kind="stable")
        ran_targets = np.array([shape.target_length or 0.0 for shape in largest])
        return cls(
            ran=Frontier(
                np.array([shape.length for shape in largest])[order],
                ran_targets[order],
                sizes[order],
            ),
            model=model,
            peak_bytes=recorded.peak_bytes or 0,
            ooms=recorded.ooms,
            lengths=distinct,
            targets=targets,
        )

    def _worst_targets(self, lengths: FloatArray) -> FloatArray:
        index = np.searchsorted(self.lengths, lengths, side="right") - 1
        return self.targets[np.maximum(index, 0)]

    def proven(self, lengths: npt.ArrayLike) -> IntArray:
        """Return the largest batch size that ran at a length or a longer one, or 0."""
        long = np.asarray(lengths, dtype=np.float64)
        return self._below_ooms(long, self.ran.proven(long, self._worst_targets(long)))

    def __call__(self, lengths: npt.ArrayLike) -> IntArray:
        """Return what ran, or what the model says if that is more."""
        long = np.asarray(lengths, dtype=np.float64)
        targets = self._worst_targets(long)
        sizes = self.ran.proven(long, targets)
        if self.model is not None:
            each = np.maximum(self.model.per_example(long, targets), 1e-9)
            by_model = (self.peak_bytes - self.model.constant) / each
            sizes = np.maximum(sizes, np.clip(by_model, 1, _UNLIMITED).astype(np.int64))
        return np.maximum(self._below_ooms(long, sizes), 1)

    def _below_ooms(self, lengths: FloatArray, sizes: IntArray) -> IntArray:
        """Return the sizes below those that ran out of memory at a length or a shorter one."""
        targets = self._worst_targets(lengths)
        for trial in self.ooms:
            covers = lengths >= trial.length
            if self.targets.any():
                covers &= targets >= (trial.target_length or 0.0)
            below = np.minimum(sizes, trial.batch_size - 1)
            sizes = np.where(covers, below, sizes)
        return sizes
