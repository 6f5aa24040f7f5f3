"""The fit: what an example needs at each length, by the peaks of all that ran, and how much memory batches can use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from statistics import median

import numpy as np

from batchtune.epochs.cost_model import fit_cost
from batchtune.lengths import FloatArray
from batchtune.probe.bounds import Bracket
from batchtune.probe.margin import Peaks
from batchtune.results import BatchShape, CostModel

# A peak shows what an example needs if it is at least this fraction of the memory; smaller ones are mostly constant.
_TELLING_SHARE = 0.3
# An allocator may fail to use up to this share of the memory that is not in use between trials.
_UNUSABLE = 0.03
# A length is closed if the room is less than this share of what the model says the next size needs.
_SURELY_MISSING = 0.75
_MOST_CORRECTION = 2.0  # of the model, as a factor


class MemoryFit:
    """The need of an example, from the peaks of the shapes that passed and the brackets of all that was tried."""

    def __init__(
        self, peaks: Peaks, passed: Sequence[BatchShape], brackets: Sequence[Bracket]
    ) -> None:
        self._peaks = peaks
        self._brackets = brackets
        self._limit_bytes = peaks.limit_bytes
        shapes = [shape for shape in passed if peaks.highest(shape) is not None]
        targets = [shape.target_length or 0.0 for shape in shapes]
        has_targets = any(shape.target_length is not None for shape in shapes)
        self.model = fit_cost(
            [shape.batch_size for shape in shapes],
            [shape.length for shape in shapes],
            [float(peaks.highest(shape) or 0) for shape in shapes],
            targets if has_targets else None,
        )
        """The model of peak memory, fitted to every shape that passed; None if they are too few."""
        # Far off, so that a length's own peaks are trusted more.
        self.is_misfit = self.model is not None and self.model.relative_error > 0.02

    # The memory that an example needs

    def need(self, bracket: Bracket) -> float | None:
        """Return the bytes that one more example needs, by this length's trials, else by the model; None: unknown."""
        measured = bracket.measured_need()
        if measured is not None:
            return measured
        needs = []
        if self.model is not None:
            needs.append(self._need_by_model(bracket, self.model))
        rest_bytes = self._peaks.rest_bytes
        if (
            len(bracket.peaks) == 1
            and rest_bytes is not None
            and self._excess(bracket) is None
        ):
            # All that the step took beyond what is in use between trials: at least what the examples need.
            size, peak = bracket.peaks[0]
            needs.append((peak - rest_bytes) / size)
        return max(needs, default=None)

    def _need_by_model(self, bracket: Bracket, model: CostModel) -> float:
        """Return the need by the model, corrected by the peaks of this length, else of its neighbours."""
        length, target = bracket.anchor
        excess = self._excess(bracket)
        if self.is_misfit and self._intercept is not None and bracket.peaks:
            size, peak = bracket.peaks[-1]
            if self._is_telling(peak, self._intercept):
                return (peak - self._intercept) / size
        if excess is None and not bracket.peaks:
            excess = float(np.max(self._nearest_excesses(np.array([length]))))
        need = model.per_example(length, target or 0.0)
        if excess is None:
            return need
        return need * min(max(excess, 1 / _MOST_CORRECTION), _MOST_CORRECTION)

    def _nearest_excesses(self, lengths: FloatArray) -> FloatArray:
        """Return the excesses of the nearest lengths on either side that show one, shape (2, n); 1 if none does."""
        telling = np.array(sorted(self.excesses))
        if not telling.size:
            return np.ones((2, lengths.size))
        excesses = np.array([self.excesses[length] for length in telling.tolist()])
        after = np.searchsorted(telling, lengths)
        nearest = np.array(
            [np.maximum(after - 1, 0), np.minimum(after, telling.size - 1)]
        )
        near: FloatArray = excesses[nearest].clip(
            1 / _MOST_CORRECTION, _MOST_CORRECTION
        )
        return near

    def leaves_no_room(self, bracket: Bracket, peak: float, step: int) -> bool:
        """Return whether a step more surely does not fit, so that a length is closed without a failure.

        Memory may leap, so two peaks and the model must agree, or the model's error must be smaller than the step.
        """
        if self.model is None:
            return False
        need = self._need_by_model(bracket, self.model)
        measured = bracket.measured_need()
        room = self.room_bytes - peak
        if measured is not None and abs(measured - need) <= 0.25 * need:
            need = min(measured, need)
        elif self.model.relative_error * peak > need * step:
            if self.is_misfit and (
                self._intercept is None or peak < 0.8 * self.room_bytes
            ):
                return False
            # Even if the model overrates the need by a third, the next size does not fit.
            if not self.is_misfit and room >= _SURELY_MISSING * need * step:
                return False
        # The need is known to a few per cent, which is at least one example if a step is many.
        return room < need * step * (0.9 if step >= 10 else 1.0)

    @cached_property
    def excesses(self) -> dict[float, float]:
        """Length → measured / modelled memory of its largest shape, with the longest target that shows it."""
        excesses: dict[float, float] = {}
        for bracket in sorted(
            self._brackets, key=lambda bracket: bracket.anchor.target_length or 0.0
        ):
            excess = self._excess(bracket)
            if excess is not None:
                excesses[bracket.anchor.length] = excess
        return excesses

    def _excess(self, bracket: Bracket) -> float | None:
        """Return measured / modelled memory of the examples of the largest shape; None if the peak does not show it."""
        model = self.model
        if model is None or not bracket.peaks:
            return None
        size, peak = bracket.peaks[-1]
        length, target = bracket.anchor
        modelled = size * model.per_example(length, target or 0.0)
        is_at_floor = model.constant + modelled <= model.floor * 1.05
        if modelled <= 0 or is_at_floor or not self._is_telling(peak, model.constant):
            return None
        return (peak - model.constant) / modelled

    def _is_telling(self, peak: float, constant: float) -> bool:
        return peak >= constant + _TELLING_SHARE * (self._limit_bytes - constant)

    @cached_property
    def _intercept(self) -> float | None:
        """The memory of an empty batch, by the lengths at which several batch sizes ran; None if unknown."""
        intercepts = []
        for bracket in self._brackets:
            need = bracket.measured_need()
            if need is not None:
                size, peak = bracket.peaks[-1]
                intercepts.append(peak - need * size)
        if len(intercepts) < 2:
            return None
        # Where memory leaps between two sizes, their slope is too steep or too flat. To take an example's need for too
        # large costs a trial that passes; for too small, one that fails.
        low = float(np.quantile(intercepts, 0.25))
        return max(low, float(self._peaks.rest_bytes or 0))

    # The memory that batches can use

    @cached_property
    def room_bytes(self) -> float:
        """The memory that a proven batch can use: the limit - the margin, or less if shapes fail a little before.

        An allocator that can't use every last byte (fragments, large blocks) fails where the peak would have been lower
        than the limit. What can be used is then between that and the highest peak that ran. Two lengths must show it:
        failures further below the limit, or below that peak, are leaps of memory. But shapes that only fit once the
        allocator has emptied its cache show it however far below the limit. What ran in a cache and left no margin, at
        two lengths, had too much.
        """
        over_margin = [
            dict(bracket.peaks)[bracket.over_margin]
            for bracket in self._brackets
            if bracket.over_margin is not None
        ]
        if len(over_margin) > 1 and self._peaks.overhead > 1:
            return min(*over_margin, self._usable_bytes)
        return self._usable_bytes

    @cached_property
    def _usable_bytes(self) -> float:
        """The same by the limit and what ran out of memory."""
        highest = float(self._peaks.highest_of_all)
        flushed_at = [
            self._would_be(bracket) for bracket in self._brackets if bracket.flushed
        ]
        too_much = [would_be for would_be in flushed_at if would_be is not None]
        if len(too_much) > 1:
            typical = median(too_much)
            usable = (min(highest, typical) + typical) / 2
            return min(self._peaks.room_bytes, usable - self._peaks.margin.bytes)
        limit = self._limit_bytes / self._peaks.overhead
        unusable = _UNUSABLE * (limit - (self._peaks.rest_bytes or 0))
        usable = max(highest, limit - unusable)
        failed_at = []
        for bracket in self._brackets:
            would_be = self._would_be(bracket)
            if would_be is not None and usable <= would_be < limit:
                failed_at.append(would_be)
        if len(failed_at) < 2 or self._leaps:
            return self._peaks.room_bytes
        return (usable + min(failed_at)) / 2 - self._peaks.margin.bytes

    def _would_be(self, bracket: Bracket) -> float | None:
        """Return what the smallest size that ran out of memory alone would have taken; None if that is unknown."""
        is_oom = bracket.failed_by == "oom" and not bracket.given_up
        if bracket.failed is None or not is_oom:
            return None
        need = self.need(bracket) or 0.0
        if bracket.peaks:
            size, peak = bracket.peaks[-1]
            return peak + need * (bracket.failed - size)
        if self.model is None or not bracket.flushed:
            return None
        return self.model.constant + need * bracket.failed

    def largest_sizes(
        self, lengths: FloatArray, targets: FloatArray
    ) -> FloatArray | None:
        """Return the largest batch sizes that may fit by the model and its error, shape (n,); None if it can't tell."""
        model = self.model
        if model is None or not self.excesses or model.floor > self.room_bytes:
            return None
        with np.errstate(divide="ignore"):
            need = model.per_example(lengths, targets) * self._nearest_excesses(
                lengths
            ).min(axis=0)
            sizes: FloatArray = (self.room_bytes - model.constant) / need
        return sizes * (1 + min(model.relative_error, 0.5))

    # Memory that grows in leaps

    def quantum(self, size: int) -> int:
        """Return the power of two whose next multiple needs no more memory than this batch size; mostly 1.

        It divides the sizes just above which memory leapt, only those no smaller if there are several.
        """
        beyond = {leap for leap in self._leaps if leap >= size}
        leaps = beyond if len(beyond) > 1 else self._leaps
        if len(leaps) < 2:
            return 1
        divisor = math.gcd(*leaps)
        quantum = divisor & -divisor
        while self._grows_within(quantum):
            quantum //= 2
        return quantum

    def _grows_within(self, quantum: int) -> bool:
        """Return whether two sizes with the same next multiple, not the first, needed different memory."""
        if quantum == 1:
            return False
        for bracket in self._brackets:
            for (small, low), (large, high) in pairwise(bracket.peaks):
                if (
                    0 < (small - 1) // quantum == (large - 1) // quantum
                    and high - low > self._peaks.margin.bytes
                ):
                    return True
        return False

    @cached_property
    def _leaps(self) -> list[int]:
        """The sizes just above which a batch failed though its length's peaks left room for it."""
        distances = []  # (the size that passed, how far above it the next one failed)
        for bracket in self._brackets:
            is_oom = bracket.failed_by == "oom" and not bracket.flushed
            if not bracket.failed or not is_oom or bracket.peak is None:
                continue
            distance = bracket.failed - bracket.passed
            need = bracket.measured_need()
            if not need and self.model is not None:
                need = self._need_by_model(bracket, self.model)
            if need and self._peaks.room_bytes - bracket.peak > max(2, distance) * need:
                distances.append((bracket.passed, distance))
        single = [size for size, distance in distances if distance == 1]
        if len(single) < 2:
            return []
        quantum = math.gcd(*single)
        return [size for size, distance in distances if distance <= quantum]
