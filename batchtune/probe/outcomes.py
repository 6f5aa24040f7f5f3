"""What happened to each batch shape, by the trials so far: which are proven, which are ruled out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from batchtune.lengths import FloatArray, IntArray, Lengths
from batchtune.probe.dominance import Anchor, Shapes
from batchtune.probe.settings import ProbeSettings
from batchtune.results import CostModel, Margin, Trial
from batchtune.shapes import BatchShape

PeakFit = Callable[[Sequence[float], Sequence[float], Sequence[float], "Sequence[float] | None"], "CostModel | None"]
"""(batch sizes, lengths, peaks, target lengths) → the fitted model, or None where there are too few."""

# The margin: so many times the widest spread that was seen, and this part of the limit.
_SPREADS = 1.1
_LEAST_MARGIN = 0.001


@dataclass(slots=True, kw_only=True)
class Task:
    """What the search is about.

    Attributes:
        lengths: The data set.
        settings: How to search.
        limit_bytes: Memory limit that is enforced on the device.
        fit: Fits the model of peak memory.
        spread_bytes: By how much peaks of equal batches were seen to differ outside of the trials.
        first_step_bytes: By how much the first step of a process was seen to exceed later ones.
    """

    lengths: Lengths
    settings: ProbeSettings
    limit_bytes: int
    fit: PeakFit
    spread_bytes: int = 0
    first_step_bytes: int = 0


class Outcomes:
    """What the trials say of each batch shape; derived from them, never stored.

    A shape is proven if a trial ran that is no smaller in any respect, and that leaves the margin free: memory is
    taken to grow with batch size, length and target. Where a failure shows that it does not, the failure counts: it
    rules out all that is no smaller in any respect, whatever passed there.

    Args:
        task: What the search is about.
        trials: In the order in which they were run.
        confirmed: The shapes that may count as proven; None: all.
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
            if trial.outcome == "error":  # the workload's own; it was shown, fixed and runs anew
                continue
            shape = trial.shape
            if shape not in self._by_shape:
                self._sizes[Anchor(trial.length, trial.target_length)].append(trial.batch_size)
            self._by_shape[shape].append(trial)

    @property
    def anchors(self) -> list[Anchor]:
        """Where a largest batch size was searched: all that were tried, but for those that were merely timed."""
        return [anchor for anchor in self._sizes if not self._is_timing(anchor)]

    def _is_timing(self, anchor: Anchor) -> bool:
        return all(
            trial.timing and trial.outcome == "ok"
            for size in self._sizes[anchor]
            for trial in self._by_shape[anchor.shape(size)]
        )

    def anchor(self, length: float) -> Anchor:
        """Return a length with the longest target at or below it."""
        return Anchor(length, self.lengths.worst_target(length))

    def cap(self, anchor: Anchor) -> int:
        """Return the largest batch size that the data can fill with examples that are no longer, in either length."""
        count = self.lengths.count_within(anchor.length, anchor.target_length)
        return min(count, self.settings.max_batch_size or count)

    def tried(self, shape: BatchShape) -> int:
        """Return how many trials a shape had."""
        return len(self._by_shape.get(shape, ()))

    def passes(self, shape: BatchShape) -> int:
        """Return how many trials of a shape passed."""
        return sum(trial.outcome == "ok" for trial in self._by_shape.get(shape, ()))

    def failure(self, shape: BatchShape) -> Trial | None:
        """Return the trial that rules a shape out.

        One that ran out of memory, unless a larger shape passed: then two. Two crashes or time-outs. One that failed
        in alternation with the others.
        """
        return self._failures.get(shape)

    @cached_property
    def _failures(self) -> dict[BatchShape, Trial]:
        """Those shapes that are ruled out."""
        found = {shape: self._failure(shape) for shape in self._by_shape}
        return {shape: trial for shape, trial in found.items() if trial is not None}

    def _failure(self, shape: BatchShape) -> Trial | None:
        trials = self._by_shape[shape]
        if all(trial.outcome == "ok" for trial in trials):
            return None
        faults = [trial for trial in trials if trial.outcome in ("crash", "timeout")]
        ooms = [trial for trial in trials if trial.outcome == "oom"]
        given_up = [trial for trial in trials if trial.confirmation and trial.outcome != "ok"]
        if given_up:
            return given_up[0]
        if len(ooms) > 1 or (ooms and not self.is_dominated(shape)):
            return ooms[0]
        return faults[-1] if len(faults) > 1 else None

    def to_retry(self, anchor: Anchor) -> int | None:
        """Return a batch size here that is tried once more, in a fresh worker, before its failure is believed.

        One whose only trial crashed or timed out; or ran out of memory, though a larger shape passed.
        """
        for size in self._sizes.get(anchor, ()):
            trials = self._by_shape[anchor.shape(size)]
            if len(trials) != 1 or trials[0].confirmation:
                continue
            if trials[0].outcome in ("crash", "timeout"):
                return size
            if trials[0].outcome == "oom" and self.is_dominated(anchor.shape(size)):
                return size
        return None

    def is_dominated(self, shape: BatchShape) -> bool:
        """Return whether a shape passed that is at least as large in every respect, and larger in one."""
        return self._ran.exceeds(shape)

    def highest_peak(self, shape: BatchShape) -> int | None:
        """Return the highest peak that was measured for a shape; None where none is known."""
        return max(self._peaks(shape), default=None)

    def peak_range(self, shape: BatchShape, others: Sequence[int] = ()) -> int:
        """Return by how much the peaks of a shape's trials, and others of it, differ."""
        peaks = [*self._peaks(shape), *others]
        return max(peaks) - min(peaks) if peaks else 0

    def _peaks(self, shape: BatchShape) -> list[int]:
        """Return the highest and the lowest peak of each of a shape's trials.

        What a process's first step needs besides is a part of the margin, not of the shape.
        """
        peaks = []
        for trial in self._by_shape.get(shape, ()):
            peak = trial.peak_bytes
            if peak is not None and trial.steady_peak_bytes is not None and trial.index in self._first_of_worker:
                peak = trial.steady_peak_bytes
            if peak is not None:
                peaks += [peak, peak - (trial.peak_spread_bytes or 0)]
        return peaks

    def is_proven(self, shape: BatchShape) -> bool:
        """Return whether it ran, did not fail as well, and leaves the margin free."""
        if not self.passes(shape) or self.failure(shape) is not None:
            return False
        if self.confirmed is not None and shape not in self.confirmed:
            return False
        lowest = min(self._peaks(shape), default=None)
        return lowest is None or lowest + self.margin.bytes <= self.task.limit_bytes

    def median_seconds(self, shape: BatchShape) -> float | None:
        """Return the median step time of a shape; None where none is known."""
        times = [trial.step_seconds for trial in self._by_shape[shape] if trial.step_seconds is not None]
        return float(np.median(times)) if times else None

    def proof(self, anchor: Anchor, batch_size: int) -> int | None:
        """Return the index of the trial that proves this size here: the smallest shape that is no smaller."""
        found = [
            (shape.padded_length, trial.index)
            for shape, trials in self._by_shape.items()
            if shape.batch_size >= batch_size and anchor.is_within(Anchor(shape.length, shape.target_length))
            if self.is_proven(shape)
            for trial in trials
            if trial.outcome == "ok"
        ]
        return min(found)[1] if found else None

    def proven_sizes(self, lengths: FloatArray, targets: FloatArray | None = None) -> IntArray:
        """Return the largest batch size that is proven at each length (and target); 0 where none is; shape (n,).

        Where a shape failed though a larger one passed, the largest that ran below it.
        """
        if self.is_contradicted:
            return self._proven_nearby(lengths, targets)
        return self._proven.largest_below(lengths, targets, self._failed)

    @cached_property
    def is_contradicted(self) -> bool:
        """Whether a shape ran out of memory, twice, though a larger one passed: then lengths need their own proofs."""
        failed = (shape for shape, trial in self._failures.items() if trial.outcome == "oom")
        return any(self.is_dominated(shape) for shape in failed)

    def _proven_nearby(self, lengths: FloatArray, targets: FloatArray | None) -> IntArray:
        """Return the same as `proven_sizes`, by the trials at the next longer length that was tried alone."""
        found = np.zeros(lengths.shape, dtype=np.int64)
        below = self._failed.smallest_within(lengths, targets)
        anchors = sorted(self.anchors)
        for index, length in enumerate(lengths):
            wanted = Anchor(float(length), None if targets is None else float(targets[index]))
            for anchor in anchors:
                if not found[index] and wanted.is_within(anchor):
                    sizes = (size for size in self._sizes[anchor] if self.is_proven(anchor.shape(size)))
                    found[index] = max((size for size in sizes if size < below[index]), default=0)
        return found

    @cached_property
    def margin(self) -> Margin:
        """What a proven batch leaves free."""
        ranges, repetitions = [self.task.spread_bytes], 0
        for trials in self._by_shape.values():
            peaks = self._peaks(trials[0].shape)
            repeated = len(trials) > 1 or any(trial.peak_spread_bytes is not None for trial in trials)
            if peaks and repeated:
                ranges.append(max(peaks) - min(peaks))
                repetitions += sum(max(1, trial.steps - 1) for trial in trials if trial.peak_bytes is not None)
        rest = [
            trial.rest_bytes
            for trial in self.trials
            if trial.outcome == "ok" and trial.rest_bytes is not None and trial.index not in self._first_of_worker
        ]
        ranges.append(max(rest, default=0) - min(rest, default=0))
        at_least = max(_SPREADS * max(ranges), float(self.task.first_step_bytes))
        return Margin(
            bytes=int(at_least + _LEAST_MARGIN * self.task.limit_bytes) if self.knows_peaks else 0,
            spread_bytes=max(ranges),
            first_step_bytes=self.task.first_step_bytes,
            repetitions=repetitions,
        )

    @cached_property
    def rest_bytes(self) -> int | None:
        """In use between trials: the parameters, the optimizer's state; None where it is not known."""
        known = [trial.rest_bytes for trial in self.trials if trial.outcome == "ok" and trial.rest_bytes is not None]
        return min(known, default=None)

    @cached_property
    def knows_peaks(self) -> bool:
        """Whether the system tells peaks; also where nothing has passed yet."""
        passed = [shape for shape in self._by_shape if self.passes(shape)]
        return not passed or any(self.highest_peak(shape) is not None for shape in passed)

    @cached_property
    def _ran(self) -> Shapes:
        return Shapes.of([shape for shape in self._by_shape if self.passes(shape)])

    @cached_property
    def _proven(self) -> Shapes:
        return Shapes.of([shape for shape in self._by_shape if self.is_proven(shape)])

    @cached_property
    def _failed(self) -> Shapes:
        return Shapes.of(list(self._failures))

    @cached_property
    def _out_of_reach(self) -> Shapes:
        """What failed or left no margin."""
        return Shapes.of(
            [
                shape
                for shape in self._by_shape
                if ((trial := self._failures.get(shape)) is not None and trial.outcome == "oom")
                or (trial is None and self.passes(shape) and not self.is_proven(shape))
            ]
        )
