"""The fit: what an example needs at each length, by the peaks of all that ran, and how much memory batches can use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np

from batchtune.lengths import FloatArray
from batchtune.probe.bounds import Anchor, Bracket, Task
from batchtune.probe.margin import Peaks
from batchtune.results import CostModel
from batchtune.shapes import BatchShape

# A peak shows what an example needs if it is at least this fraction of the memory; smaller ones are mostly constant.
_TELLING_SHARE = 0.3
# An allocator may fail to use up to this share of the memory that is not in use between trials.
_UNUSABLE = 0.03
# A length is closed if the room is less than this share of what the model says the next size needs.
_SURELY_MISSING = 0.75
_MOST_CORRECTION = 2.0  # of the model, as a factor


class MemoryFit:
    """The need of an example, from the peaks of the shapes that passed and the brackets of all that was tried."""

    def __init__(self, task: Task, peaks: Peaks, passed: Sequence[BatchShape], brackets: Sequence[Bracket]) -> None:
        self._task = task
        self._peaks = peaks
        self._brackets = brackets
        self.model = _fitted(task, peaks, passed)
        # Far off, so that a length's own peaks are trusted more.
        self.is_misfit = self.model is not None and self.model.relative_error > 0.02

    # The memory that an example needs

    def need(self, bracket: Bracket) -> float | None:
        """Return the bytes that one more example needs, by this length's trials, else by the model; None: unknown."""
        measured = measured_need(bracket)
        if measured is not None:
            return measured
        known = [] if self.model is None else [self.need_by_model(bracket)]
        rest_bytes = self._peaks.rest_bytes
        if len(bracket.peaks) == 1 and rest_bytes is not None:
            size, peak = bracket.peaks[0]
            if self.model is None or self._excess(size, bracket.anchor, peak) is None:
                # All that the step took beyond what is in use between trials: at least what the examples need.
                known.append((peak - rest_bytes) / size)
        return max(known, default=None)

    def need_by_model(self, bracket: Bracket) -> float:
        """Return the need by the model, corrected by the peaks of this length, else of its neighbours."""
        assert self.model is not None
        length, target = bracket.anchor
        excess = None
        if bracket.peaks:
            size, peak = bracket.peaks[-1]
            if self.is_misfit and self.intercept is not None and peak > self.intercept:
                if peak >= self.intercept + _TELLING_SHARE * (self._task.limit_bytes - self.intercept):
                    return (peak - self.intercept) / size
            excess = self._excess(size, bracket.anchor, peak)
        else:
            others = [other for other in sorted(self.excesses) if other != length]
            if others:
                excesses = [self.excesses[other] for other in others]
                excess = float(np.interp(np.log(length), np.log(others), excesses))
        need = self.model.per_example(length, target or 0.0)
        if excess is None:
            return need
        return need * min(max(excess, 1 / _MOST_CORRECTION), _MOST_CORRECTION)

    def sure_need(self, bracket: Bracket, peak: float, step: int) -> float | None:
        """Return the need of one more example, if certain enough to close a length without a failure.

        Memory may leap, so two peaks and the model must agree, or the model's error must be smaller than the step.
        """
        if self.model is None:
            return None
        by_model = self.need_by_model(bracket)
        measured = measured_need(bracket)
        if measured is not None and abs(measured - by_model) <= 0.25 * by_model:
            return min(measured, by_model)
        if self.is_misfit:
            certain = self.intercept is not None and peak >= 0.8 * self.room_bytes
        else:
            # Even if the model overrates the need by a third, the next size does not fit.
            certain = self.room_bytes - peak < _SURELY_MISSING * by_model * step
        if certain or self.model.relative_error * peak <= by_model * step:
            return by_model
        return None

    def error_at(self, anchor: Anchor) -> float:
        """Return by which share the model may miss the need here: as it misses all, or as two lengths near differ."""
        assert self.model is not None
        nearest = sorted(self.excesses, key=lambda length: abs(math.log(length / anchor.length)))[:2]
        return max(self.model.relative_error, float(np.ptp([self.excesses[length] for length in nearest] or [0.0])))

    @cached_property
    def excesses(self) -> dict[float, float]:
        """Length → measured / modelled memory of its largest shape, with the longest target that shows it."""
        excesses: dict[float, float] = {}
        for bracket in sorted(self._brackets, key=lambda bracket: bracket.anchor.target_length or 0.0):
            if not bracket.peaks:
                continue
            size, peak = bracket.peaks[-1]
            excess = self._excess(size, bracket.anchor, peak)
            if excess is not None:
                excesses[bracket.anchor.length] = excess
        return excesses

    def _excess(self, size: int, anchor: Anchor, peak: float) -> float | None:
        """Return the measured / modelled memory of a shape's examples; None if the peak is too small to show it."""
        model = self.model
        if model is None:
            return None
        modelled = size * model.per_example(anchor.length, anchor.target_length or 0.0)
        telling = model.constant + _TELLING_SHARE * (self._task.limit_bytes - model.constant)
        if modelled <= 0 or peak < telling or model.constant + modelled <= model.floor * 1.05:
            return None
        return (peak - model.constant) / modelled

    @cached_property
    def intercept(self) -> float | None:
        """The memory of an empty batch, by the lengths at which several batch sizes ran; None if unknown."""
        intercepts = []
        for bracket in self._brackets:
            need = measured_need(bracket)
            if need is not None:
                size, peak = bracket.peaks[-1]
                intercepts.append(peak - need * size)
        if len(intercepts) < 2:
            return None
        return float(np.median(intercepts))

    # The memory that batches can use

    @cached_property
    def room_bytes(self) -> float:
        """The memory that a proven batch can use: the limit - the margin, or less if shapes fail a little before.

        An allocator that can't use every last byte (fragments, large blocks) fails where the peak would have been lower
        than the limit. What can be used is then between that and the highest peak that ran. Two lengths must show it:
        failures further below the limit, or below that peak, are leaps of memory.
        """
        limit = float(self._task.limit_bytes)
        unusable = _UNUSABLE * (limit - (self._peaks.rest_bytes or 0))
        usable = max(float(self._peaks.highest_of_all), limit - unusable)
        failed_at = []
        for bracket in self._brackets:
            if bracket.failed and bracket.failed_by == "oom" and not bracket.given_up and bracket.peaks:
                size, peak = bracket.peaks[-1]
                would_be = peak + (self.need(bracket) or 0.0) * (bracket.failed - size)
                if usable <= would_be < limit:
                    failed_at.append(would_be)
        if len(failed_at) < 2 or self._leaps:
            return self._room_by_limit
        return (usable + min(failed_at)) / 2 - self._peaks.margin.bytes

    @property
    def _room_by_limit(self) -> float:
        return float(self._task.limit_bytes - self._peaks.margin.bytes)

    def largest_sizes(self, lengths: FloatArray, targets: FloatArray) -> FloatArray | None:
        """Return the largest batch sizes that may fit by the model and its error, shape (n,); None if it can't tell."""
        model = self.model
        if model is None or not self.excesses or model.floor > self.room_bytes:
            return None
        # The smaller excess of the nearest lengths on either side that show one.
        telling = np.array(sorted(self.excesses))
        excesses = np.array([self.excesses[length] for length in telling.tolist()])
        excesses = excesses.clip(1 / _MOST_CORRECTION, _MOST_CORRECTION)
        after = np.searchsorted(telling, lengths)
        excess_before = excesses[np.maximum(after - 1, 0)]
        excess_after = excesses[np.minimum(after, telling.size - 1)]
        with np.errstate(divide="ignore"):
            need = model.per_example(lengths, targets) * np.minimum(excess_before, excess_after)
            sizes: FloatArray = (self.room_bytes - model.constant) / need
        return sizes * (1 + min(model.relative_error, 0.5))

    # Memory that grows in leaps

    def quantum(self, size: int) -> int:
        """Return the number whose next multiple needs no more memory than this batch size; mostly 1.

        It divides the sizes just above which memory leapt, only those no smaller if there are several.
        """
        beyond = {leap for leap in self._leaps if leap >= size}
        leaps = beyond if len(beyond) > 1 else self._leaps
        quantum = math.gcd(*leaps) if len(leaps) > 1 else 1
        while self._grows_within(quantum):
            quantum = quantum // 2 if quantum % 2 == 0 else 1
        return quantum

    def _grows_within(self, quantum: int) -> bool:
        """Return whether two sizes with the same next multiple, not the first, needed different memory."""
        if quantum == 1:
            return False
        for bracket in self._brackets:
            for (small, low), (large, high) in pairwise(bracket.peaks):
                if 0 < (small - 1) // quantum == (large - 1) // quantum and high - low > self._peaks.margin.bytes:
                    return True
        return False

    @cached_property
    def _leaps(self) -> list[int]:
        """The sizes just above which a batch failed though its length's peaks left room for it."""
        distances = []  # (the size that passed, how far above it the next one failed)
        for bracket in self._brackets:
            if not bracket.failed or bracket.failed_by != "oom" or bracket.peak is None:
                continue
            distance = bracket.failed - bracket.passed
            need = measured_need(bracket)
            if not need and self.model is not None:
                need = self.need_by_model(bracket)
            if need and self._room_by_limit - bracket.peak > max(2, distance) * need:
                distances.append((bracket.passed, distance))
        single = [size for size, distance in distances if distance == 1]
        if len(single) < 2:
            return []
        quantum = math.gcd(*single)
        return [size for size, distance in distances if distance <= quantum]


def measured_need(bracket: Bracket) -> float | None:
    """Return the need of an example by this length's largest peak and one well below; None if they don't show it."""
    if len(bracket.peaks) < 2:
        return None
    large, high = bracket.peaks[-1]
    small, low = bracket.peaks[-2]
    if small * 2 > large:
        small, low = bracket.peaks[0]
    if high <= low:
        return None
    return (high - low) / (large - small)


def _fitted(task: Task, peaks: Peaks, passed: Sequence[BatchShape]) -> CostModel | None:
    """Return the model of peak memory, fitted to every shape that passed; None if they are too few."""
    shapes = [shape for shape in passed if peaks.highest(shape) is not None]
    targets = None if task.lengths.targets is None else [shape.target_length or 0.0 for shape in shapes]
    return task.fit(
        [shape.batch_size for shape in shapes],
        [shape.length for shape in shapes],
        [float(peaks.highest(shape) or 0) for shape in shapes],
        targets,
    )
