"""The outcome of each batch shape in the trials so far: which are proven, which are ruled out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batchtune.lengths import FloatArray, IntArray, Lengths
from batchtune.probe.settings import ProbeSettings
from batchtune.results import CostModel, Margin, Trial
from batchtune.shapes import BatchShape

PeakFit = Callable[[Sequence[float], Sequence[float], Sequence[float], "Sequence[float] | None"], "CostModel | None"]
"""(batch sizes, lengths, peaks, target lengths) → the fitted model, or None if they are too few."""

# The margin: this multiple of the widest spread seen, plus this fraction of the limit.
_SPREADS = 1.1
_LEAST_MARGIN = 0.001


class Anchor(NamedTuple):
    """Where the largest batch size is searched: a batch's longest length and longest target (None: no targets)."""

    length: float
    target_length: float | None

    def shape(self, batch_size: int) -> BatchShape:
        """Return a batch of this size here."""
        return BatchShape(batch_size, self.length, self.target_length)

    def is_within(self, other: Anchor) -> bool:
        """Return whether neither its length nor its target is larger than the other's."""
        return self.length <= other.length and (self.target_length or 0.0) <= (other.target_length or 0.0)

    @property
    def arrays(self) -> tuple[FloatArray, FloatArray]:
        """Its length and its target, each as an array of one."""
        return np.array([self.length]), np.array([self.target_length or 0.0])


class Shapes:
    """Batch shapes, to compare with arrays of lengths and targets, shape (n,) each."""

    def __init__(self, shapes: Iterable[BatchShape]) -> None:
        rows = sorted((shape.batch_size, shape.length, shape.target_length or 0.0) for shape in shapes)
        columns = np.array(rows, dtype=np.float64).reshape(-1, 3).T
        self.sizes, self.lengths, self.targets = np.ascontiguousarray(columns)

    def exceeds(self, shape: BatchShape) -> bool:
        """Return whether one of them contains a shape, as `BatchShape.contains` has it."""
        length, target = shape.length, shape.target_length or 0.0
        no_less = (self.sizes >= shape.batch_size) & (self.lengths >= length) & (self.targets >= target)
        same = (self.sizes == shape.batch_size) & (self.lengths == length) & (self.targets == target)
        return bool((no_less & ~same).any())

    def largest_beyond(self, lengths: FloatArray, targets: FloatArray, among: npt.ArrayLike = True) -> FloatArray:
        """Return the largest batch size at a length and target no shorter, or 0; shape (n,)."""
        beyond = (lengths[:, None] <= self.lengths) & (targets[:, None] <= self.targets)
        largest: FloatArray = np.where(beyond & among, self.sizes, 0.0).max(axis=1, initial=0.0)
        return largest

    def smallest_below(self, lengths: FloatArray, targets: FloatArray, among: npt.ArrayLike = True) -> FloatArray:
        """Return the smallest batch size at a length and target no longer, or infinity; shape (n,)."""
        below = (lengths[:, None] >= self.lengths) & (targets[:, None] >= self.targets)
        smallest: FloatArray = np.where(below & among, self.sizes, np.inf).min(axis=1, initial=np.inf)
        return smallest

    def elsewhere(self, anchor: Anchor) -> npt.NDArray[np.bool_]:
        """Return which have another length or target; shape (shapes,)."""
        other: npt.NDArray[np.bool_] = (self.lengths != anchor.length) | (self.targets != (anchor.target_length or 0.0))
        return other


@dataclass(slots=True)
class Task:
    """What is searched for, in which data and memory."""

    lengths: Lengths
    settings: ProbeSettings
    limit_bytes: int
    fit: PeakFit
    rungs: Sequence[int]  # the batch sizes that the tolerance tells apart
    spread_bytes: int = 0  # how far peaks of equal batches differed outside the trials
    first_step_bytes: int = 0  # how far a process's first step exceeded later ones
    held_bytes: int = 0  # the most that a process held between steps outside the trials


class Outcomes:
    """The outcome of each batch shape; derived from the trials, never stored.

    A shape is proven if a trial passed that is at least as large in every respect and leaves the margin free: memory
    is assumed to grow with batch size, length and target. A failure that contradicts this wins: it rules out every
    shape at least as large, whatever passed there. `confirmed` limits which shapes can be proven; None: no limit.
    """

    def __init__(self, task: Task, trials: Sequence[Trial], confirmed: Collection[BatchShape] | None = None) -> None:
        self.task = task
        self.lengths = task.lengths
        self.settings = task.settings
        self.trials = trials
        self.confirmed = confirmed
        self._by_shape: dict[BatchShape, list[Trial]] = defaultdict(list)
        self._sizes: dict[Anchor, list[int]] = defaultdict(list)
        self._first_of_worker: set[int] = set()
        worker: int | None = None
        for trial in trials:
            if trial.worker is not None and trial.worker != worker and not trial.confirmation:
                worker = trial.worker
                self._first_of_worker.add(trial.index)
            if trial.outcome == "error":  # the workload's own, fixed since
                continue
            shape = trial.shape
            if shape not in self._by_shape:
                self._sizes[Anchor(trial.length, trial.target_length)].append(trial.batch_size)
            self._by_shape[shape].append(trial)

    @cached_property
    def anchors(self) -> list[Anchor]:
        """Where a largest batch size was searched: wherever a trial ran for more than its time."""
        tried = (trial for trials in self._by_shape.values() for trial in trials)
        found = {Anchor(one.length, one.target_length) for one in tried if not one.timing or one.outcome != "ok"}
        return [anchor for anchor in self._sizes if anchor in found]

    def anchor(self, length: float) -> Anchor:
        """Return a length with the longest target at or below it."""
        return Anchor(length, self.lengths.worst_target(length))

    def cap(self, anchor: Anchor) -> int:
        """Return the largest batch that the data can fill with examples no longer, in either length."""
        count = self.lengths.count_within(anchor.length, anchor.target_length)
        return min(count, self.settings.max_batch_size or count)

    def tried(self, shape: BatchShape) -> int:
        """Return how many trials a shape had."""
        return len(self._by_shape.get(shape, ()))

    def passes(self, shape: BatchShape) -> bool:
        """Return whether a trial of a shape passed."""
        return any(trial.outcome == "ok" for trial in self._by_shape.get(shape, ()))

    def passed_trial(self, shape: BatchShape) -> Trial:
        """Return the first trial of a shape that passed."""
        return next(trial for trial in self._by_shape[shape] if trial.outcome == "ok")

    @cached_property
    def failures(self) -> dict[BatchShape, Trial]:
        """The trial that rules out each shape: an OOM (two if a larger shape passed), a second crash or time-out.

        A failure while shapes took turns rules a shape out at once.
        """
        found = {}
        for shape, trials in self._by_shape.items():
            ooms = [trial for trial in trials if trial.outcome == "oom"]
            faults = [trial for trial in trials if trial.outcome not in ("ok", "oom")]
            if given_up := [trial for trial in trials if trial.outcome != "ok" and trial.confirmation]:
                found[shape] = given_up[0]
            elif len(ooms) > 1 or (ooms and not self.is_dominated(shape)):
                found[shape] = ooms[0]
            elif len(faults) > 1:
                found[shape] = faults[-1]
        return found

    def to_retry(self, anchor: Anchor) -> int | None:
        """Return a batch size here to try again in a fresh worker before its failure is believed.

        Its only trial crashed, timed out, or ran out of memory though a larger shape passed.
        """
        for size in self._sizes.get(anchor, ()):
            trial, *others = self._by_shape[anchor.shape(size)]
            if not others and not trial.confirmation and trial.outcome != "ok":
                if trial.outcome != "oom" or self.is_dominated(trial.shape):
                    return size
        return None

    def is_dominated(self, shape: BatchShape) -> bool:
        """Return whether a shape that contains this one passed."""
        return self._ran.exceeds(shape)

    def highest_peak(self, shape: BatchShape) -> int | None:
        """Return the highest peak measured for a shape; None if unknown."""
        return max(self._peaks(shape), default=None)

    def peak_range(self, shape: BatchShape, others: Sequence[int] = ()) -> int:
        """Return how far the peaks of a shape's trials, and these others, differ."""
        peaks = [*self._peaks(shape), *others]
        return max(peaks) - min(peaks) if peaks else 0

    def _peaks(self, shape: BatchShape) -> list[int]:
        """Return the highest and lowest peak of each trial, without what a process's first step adds.

        Some processes hold more between steps than others, whatever they run, and more after a while: all peaks are as
        in the one that holds the most.
        """
        peaks = []
        for trial in self._by_shape.get(shape, ()):
            peak = trial.peak_bytes
            if peak is not None and trial.steady_peak_bytes is not None and trial.index in self._first_of_worker:
                peak = trial.steady_peak_bytes
            if peak is not None:
                if trial.rest_bytes is not None:
                    peak += (self.rest_bytes or 0) - trial.rest_bytes
                peaks += [peak, peak - (trial.peak_spread_bytes or 0)]
        return peaks

    @cached_property
    def _rests(self) -> dict[int | None, list[int]]:
        """Each worker's bytes in use after its trials that passed; without the first, if others did."""
        rests: dict[int | None, list[int]] = defaultdict(list)
        firsts = {}
        for trial in self.trials:
            if trial.outcome != "ok" or trial.rest_bytes is None:
                continue
            if trial.index in self._first_of_worker:
                firsts[trial.worker] = [trial.rest_bytes]
            else:
                rests[trial.worker].append(trial.rest_bytes)
        return firsts | rests

    @cached_property
    def _held(self) -> dict[int | None, int]:
        """What each worker holds between trials."""
        return {worker: int(median(rests)) for worker, rests in self._rests.items()}

    @cached_property
    def rest_bytes(self) -> int | None:
        """In use between trials (parameters, optimizer state) in the process that holds the most; None if unknown."""
        return max(*self._held.values(), self.task.held_bytes) if self._held else None

    def is_proven(self, shape: BatchShape) -> bool:
        """Return whether it passed, never failed, and leaves the margin free."""
        if not self.passes(shape) or shape in self.failures:
            return False
        if self.confirmed is not None and shape not in self.confirmed:
            return False
        lowest = min(self._peaks(shape), default=None)
        if lowest is None:
            return True
        room = self.task.limit_bytes - lowest
        return room >= self.margin.bytes or (self._passed_first(shape) and room >= self._steady_margin_bytes)

    def _passed_first(self, shape: BatchShape) -> bool:
        """Return whether it passed as the first of a process, and so needs no room for that beyond its own."""
        return any(trial.outcome == "ok" and trial.index in self._first_of_worker for trial in self._by_shape[shape])

    def median_seconds(self, shape: BatchShape) -> float | None:
        """Return the median step time of a shape; None if unknown."""
        times = [trial.step_seconds for trial in self._by_shape[shape] if trial.step_seconds is not None]
        return float(np.median(times)) if times else None

    def proof(self, anchor: Anchor, batch_size: int) -> int | None:
        """Return the index of the trial that proves this size here: the smallest proven shape that covers it."""
        found = [
            (shape.padded_length, next(trial.index for trial in trials if trial.outcome == "ok"))
            for shape, trials in self._by_shape.items()
            if shape.batch_size >= batch_size and anchor.is_within(Anchor(shape.length, shape.target_length))
            if self.is_proven(shape)
        ]
        return min(found)[1] if found else None

    def proven_sizes(self, lengths: FloatArray, targets: FloatArray | None = None) -> IntArray:
        """Return the largest batch size proven at each length (and target), below any that failed, or 0; shape (n,)."""
        targets = np.zeros(lengths.shape) if targets is None else targets
        below = self._failed.smallest_below(lengths, targets)
        if not self.is_contradicted:
            return self._proven.largest_beyond(lengths, targets, self._proven.sizes < below[:, None]).astype(np.int64)
        # Only the trials at the next longer length that was tried count.
        found = np.zeros(lengths.shape, dtype=np.int64)
        anchors = sorted(self.anchors)
        for index, wanted in enumerate(map(Anchor, lengths.tolist(), targets.tolist())):
            for anchor in anchors:
                if not found[index] and wanted.is_within(anchor):
                    sizes = (size for size in self._sizes[anchor] if self.is_proven(anchor.shape(size)))
                    found[index] = max((size for size in sizes if size < below[index]), default=0)
        return found

    @cached_property
    def is_contradicted(self) -> bool:
        """Whether a shape ran out of memory twice though a larger one passed: then lengths need their own proofs."""
        return any(trial.outcome == "oom" and self.is_dominated(shape) for shape, trial in self.failures.items())

    @cached_property
    def margin(self) -> Margin:
        """The memory that a proven batch leaves free."""
        ranges = [self.task.spread_bytes, 0]
        repetitions = 0
        for shape, trials in self._by_shape.items():
            peaks = self._peaks(shape)
            if peaks and (len(trials) > 1 or any(trial.peak_spread_bytes is not None for trial in trials)):
                ranges.append(max(peaks) - min(peaks))
                repetitions += sum(max(1, trial.steps - 1) for trial in trials if trial.peak_bytes is not None)
        spread = max(*ranges, *(max(rests) - self._held[worker] for worker, rests in self._rests.items()))
        return Margin(
            bytes=self._margin_bytes(max(_SPREADS * spread, self.task.first_step_bytes)),
            spread_bytes=spread,
            first_step_bytes=self.task.first_step_bytes,
            repetitions=repetitions,
        )

    @cached_property
    def _steady_margin_bytes(self) -> int:
        """The margin without what the first step of a process needs."""
        return self._margin_bytes(_SPREADS * self.margin.spread_bytes)

    def _margin_bytes(self, at_least: float) -> int:
        return int(at_least + _LEAST_MARGIN * self.task.limit_bytes) if self.knows_peaks else 0

    @cached_property
    def knows_peaks(self) -> bool:
        """Whether peaks can be measured here; True before anything has passed."""
        passed = [shape for shape in self._by_shape if self.passes(shape)]
        return not passed or any(self.highest_peak(shape) is not None for shape in passed)

    @cached_property
    def _ran(self) -> Shapes:
        return Shapes(shape for shape in self._by_shape if self.passes(shape))

    @cached_property
    def _proven(self) -> Shapes:
        return Shapes(shape for shape in self._by_shape if self.is_proven(shape))

    @cached_property
    def _failed(self) -> Shapes:
        return Shapes(self.failures)

    @cached_property
    def _out_of_reach(self) -> Shapes:
        """The shapes that ran out of memory, or left no margin."""
        ooms = (shape for shape, trial in self.failures.items() if trial.outcome == "oom")
        ran = (shape for shape in self._by_shape if shape not in self.failures and self.passes(shape))
        return Shapes([*ooms, *(shape for shape in ran if not self.is_proven(shape))])
