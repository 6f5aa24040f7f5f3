"""The search's conclusions from the trials: what an example needs, what may still fit, which lengths are done."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import cast

import numpy as np

from batchtune.lengths import FloatArray
from batchtune.probe.outcomes import Anchor, Outcomes
from batchtune.results import ClosedBy, CostModel
from batchtune.shapes import BatchShape

# A peak shows what an example needs if it is at least this fraction of the memory; smaller ones are mostly constant.
_TELLING_SHARE = 0.3
# An allocator may fail to use up to this share of the memory that is not in use between trials.
_UNUSABLE = 0.03
_SURELY_MISSING = 0.75
_MOST_CORRECTION = 2.0  # of the model, as a factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Bracket:
    """The bounds of the batch size at one length and target."""

    anchor: Anchor
    cap: int  # what the data can fill, or the user allows
    passed: int  # largest proven by its own trial, below any that failed, or 0
    ran: int  # largest that ran at all, below any that failed; above `passed` if it leaves no margin
    tight: int | None  # smallest above `passed` that ran but leaves no margin
    failed: int | None  # smallest that failed
    failed_by: ClosedBy | None
    tried: int  # how many batch sizes were tried
    failures: int  # how many of them failed
    misled: int  # how many failed since the last success, whose peak said where the limit is
    given_up: int  # how many failed in turns with others, after they had passed alone
    peaks: tuple[tuple[int, float], ...]  # (batch size, peak bytes) of those that ran, ascending by batch size
    surely: int  # proven by a trial with a longer length or target, or 0
    hardly: int | None  # failed, or left no margin, at a shorter length or target
    # The smallest difference in batch size that matters. It doubles with each size given up in turns: there the limit
    # depends on what the other shapes leave behind, and creeping up to it would fail again and again.
    step: int

    @property
    def beyond(self) -> int:
        """The smallest batch size ruled out here."""
        return min(self.failed or self.cap + 1, self.tight or self.cap + 1)

    @property
    def nearest_beyond(self) -> int:
        """The smallest batch size ruled out here, or at a shorter length or target."""
        return min(self.beyond, self.hardly or self.beyond)

    @property
    def peak(self) -> float | None:
        """Peak of the largest batch size proven here; None if unknown."""
        return next((peak for size, peak in self.peaks if size == self.passed), None)

    @property
    def proven(self) -> int:
        """The largest batch size proven, here or at a longer length or target."""
        return max(self.passed, self.surely)


class Findings(Outcomes):
    """All conclusions from a list of trials; derived from them, never stored."""

    @cached_property
    def _brackets(self) -> dict[Anchor, Bracket]:
        return {}

    def bracket(self, anchor: Anchor) -> Bracket:
        """Return the bounds at a length and target."""
        if anchor in self._brackets:
            return self._brackets[anchor]
        sizes = sorted(self._sizes.get(anchor, ()))
        failures = {size: trial for size in sizes if (trial := self.failures.get(anchor.shape(size)))}
        failed = min(failures, default=None)
        ran = [size for size in sizes if self.passes(anchor.shape(size)) and (failed is None or size < failed)]
        passed = max((size for size in ran if self.is_proven(anchor.shape(size))), default=0)
        peaks = [(size, peak) for size in ran if (peak := self.highest_peak(anchor.shape(size))) is not None]
        known_since = max((self._by_shape[anchor.shape(size)][0].index for size in ran), default=-1)
        given_up = sum(trial.confirmation for trial in failures.values())
        cap = self.cap(anchor)
        out, proven = self._out_of_reach, self._proven
        hardly = out.smallest_below(*anchor.arrays, out.elsewhere(anchor))[0]
        surely = proven.largest_beyond(*anchor.arrays, proven.elsewhere(anchor))[0]
        self._brackets[anchor] = found = Bracket(
            anchor=anchor,
            cap=cap,
            passed=passed,
            ran=max(ran, default=0),
            tight=min((size for size in ran if size > passed), default=None),
            failed=failed,
            failed_by=None if failed is None else cast(ClosedBy, failures[failed].outcome),
            tried=len(sizes),
            failures=len(failures),
            misled=sum(trial.index > known_since for trial in failures.values()),
            given_up=given_up,
            peaks=tuple((size, float(peak)) for size, peak in peaks),
            surely=0 if self.is_contradicted else min(int(surely), cap),
            hardly=None if np.isinf(hardly) else int(hardly),
            step=step_at(passed or failed or 1, self.settings.tolerance) << max(0, given_up - 1),
        )
        return found

    @property
    def brackets(self) -> list[Bracket]:
        """The bounds at everything that was tried."""
        return [self.bracket(anchor) for anchor in self._sizes]

    # The memory that an example needs

    def need(self, bracket: Bracket) -> float | None:
        """Return the bytes that one more example needs, by this length's trials, else by the model; None: unknown."""
        if (own := self.own_need(bracket)) is not None:
            return own
        known = [self.need_by_model(bracket)] if self.model is not None else []
        if len(bracket.peaks) == 1 and self.rest_bytes is not None:
            size, peak = bracket.peaks[0]
            if self.model is None or self._excess(size, bracket.anchor, peak) is None:
                # All that the step took beyond what is in use between trials: at least what the examples need.
                known.append((peak - self.rest_bytes) / size)
        return max(known, default=None)

    def own_need(self, bracket: Bracket) -> float | None:
        """Return the need by this length's largest peak and one well below; None if they don't show it."""
        if len(bracket.peaks) < 2:
            return None
        large, high = bracket.peaks[-1]
        small, low = bracket.peaks[-2 if bracket.peaks[-2][0] * 2 <= large else 0]
        return (high - low) / (large - small) if high > low else None

    def need_by_model(self, bracket: Bracket) -> float:
        """Return the need by the model, corrected by the peaks of this length, else of its neighbours."""
        assert self.model is not None
        length, target = bracket.anchor
        need, excess = self.model.per_example(length, target or 0.0), None
        if bracket.peaks:
            size, peak = bracket.peaks[-1]
            if self.is_misfit and self.intercept is not None and peak > self.intercept:
                if peak >= self.intercept + _TELLING_SHARE * (self.task.limit_bytes - self.intercept):
                    return (peak - self.intercept) / size
            excess = self._excess(size, bracket.anchor, peak)
        elif known := sorted((other, excess) for other, excess in self.excesses.items() if other != length):
            lengths, excesses = np.array(known).T
            excess = float(np.interp(np.log(length), np.log(lengths), excesses))
        return need if excess is None else need * min(max(excess, 1 / _MOST_CORRECTION), _MOST_CORRECTION)

    def model_error(self, anchor: Anchor) -> float:
        """Return by which share the model may miss the need here: as it misses all, or as two lengths near differ."""
        assert self.model is not None
        nearest = sorted(self.excesses, key=lambda length: abs(math.log(length / anchor.length)))[:2]
        return max(self.model.relative_error, float(np.ptp([self.excesses[length] for length in nearest] or [0.0])))

    def _excess(self, size: int, anchor: Anchor, peak: float) -> float | None:
        """Return the measured / modelled memory of a shape's examples; None if the peak is too small to show it."""
        model = self.model
        assert model is not None
        said = size * model.per_example(anchor.length, anchor.target_length or 0.0)
        telling = model.constant + _TELLING_SHARE * (self.task.limit_bytes - model.constant)
        if said <= 0 or peak < telling or model.constant + said <= model.floor * 1.05:
            return None
        return (peak - model.constant) / said

    @cached_property
    def excesses(self) -> dict[float, float]:
        """Length → measured / modelled memory of its largest shape, with the longest target that shows it."""
        found: dict[float, float] = {}
        for anchor in sorted(self._sizes, key=lambda anchor: anchor.target_length or 0.0):
            peaks = self.bracket(anchor).peaks
            if peaks and (excess := self._excess(peaks[-1][0], anchor, peaks[-1][1])) is not None:
                found[anchor.length] = excess
        return found

    @cached_property
    def model(self) -> CostModel | None:
        """The model of peak memory, fitted to every shape that passed; None if they are too few."""
        passed = filter(self.passes, self._by_shape)
        return self._fit([(shape, peak) for shape in passed if (peak := self.highest_peak(shape)) is not None])

    @cached_property
    def inverse_model(self) -> CostModel | None:
        """The fraction of the memory that one example needs, for systems without peaks.

        Fitted to the largest batch sizes found: at the limit, batch size × need = memory.
        """
        found = [
            (anchor.shape(1), 2 / (bracket.passed + bracket.beyond))
            for anchor in self.anchors
            if (bracket := self.bracket(anchor)).passed and self.closed_by(bracket) not in (None, "data")
        ]
        if len(found) != 1:
            return self._fit(found)
        ((shape, share),) = found
        return CostModel(floor=0.0, constant=0.0, linear=share / shape.length, quadratic=0.0, relative_error=0.0)

    def _fit(self, costs: Sequence[tuple[BatchShape, float]]) -> CostModel | None:
        shapes = [shape for shape, _ in costs]
        return self.task.fit(
            [shape.batch_size for shape in shapes],
            [shape.length for shape in shapes],
            [cost for _, cost in costs],
            None if self.lengths.targets is None else [shape.target_length or 0.0 for shape in shapes],
        )

    @property
    def is_misfit(self) -> bool:
        """Whether the model is so far off that a length's own peaks are trusted more."""
        return self.model is not None and self.model.relative_error > 0.02

    @cached_property
    def intercept(self) -> float | None:
        """The memory of an empty batch, by the lengths at which several batch sizes ran; None if unknown."""
        needs = [(bracket.peaks[-1], self.own_need(bracket)) for bracket in self.brackets if bracket.peaks]
        found = [peak - need * size for (size, peak), need in needs if need is not None]
        return float(np.median(found)) if len(found) > 1 else None

    @cached_property
    def room_bytes(self) -> float:
        """The memory that a proven batch can use: the limit - the margin, or less if shapes fail a little before.

        An allocator that can't use every last byte (fragments, large blocks) fails where the peak would have been lower
        than the limit. What can be used is then between that and the highest peak that ran. Two lengths must show it:
        failures further below the limit, or below that peak, are leaps of memory.
        """
        limit = float(self.task.limit_bytes)
        highest = max((float(self.highest_peak(shape) or 0) for shape in self._by_shape), default=0.0)
        least = max(highest, limit - _UNUSABLE * (limit - (self.rest_bytes or 0)))
        ends = []
        for bracket in self.brackets:
            if bracket.failed and bracket.failed_by == "oom" and not bracket.given_up and bracket.peaks:
                largest, last_peak = bracket.peaks[-1]
                would_be = last_peak + (self.need(bracket) or 0.0) * (bracket.failed - largest)
                if least <= would_be < limit:
                    ends.append(would_be)
        if len(ends) < 2 or self.leaps:
            return self._room_by_limit
        return (least + min(ends)) / 2 - self.margin.bytes

    @property
    def _room_by_limit(self) -> float:
        return float(self.task.limit_bytes - self.margin.bytes)

    # Which lengths are done

    def closed_by(self, bracket: Bracket) -> ClosedBy | None:
        """Return what ends the search there; None if it goes on."""
        if bracket.passed >= bracket.cap:
            return "data"
        if bracket.failed == 1:
            return bracket.failed_by
        if self.next_multiple(bracket) is not None:
            return None
        step = max(bracket.step, self.quantum(bracket.proven))
        is_end = self.is_end(bracket.anchor)
        # The proof of a longer length may come within a step of the failure of a shorter one.
        near = max(step, step_at(bracket.proven, self.settings.tolerance))
        if not is_end and bracket.proven >= bracket.cap:
            return "data"
        if not is_end and bracket.proven and bracket.nearest_beyond - bracket.proven <= near:
            return "oom" if bracket.failed_by == "oom" and bracket.failed == bracket.nearest_beyond else "memory"
        if bracket.passed == 0:
            # A single example that leaves no margin.
            at_an_end = bracket.ran >= bracket.cap or bracket.failed is not None or not is_end
            return "memory" if bracket.tight == 1 and at_an_end else None
        if bracket.failed is not None and bracket.failed - bracket.passed <= step:
            return bracket.failed_by
        if bracket.tight is not None and bracket.tight - bracket.passed <= step:
            if not is_end or bracket.ran >= bracket.cap:
                return "memory"
            # Less than one step above the margin is not worth a search.
            if bracket.failed is not None:
                return bracket.failed_by
        if is_end or bracket.peak is None or (need := self._sure_need(bracket, bracket.peak, step)) is None:
            return None
        # The need is known to a few per cent, which is at least one example if a step is many.
        needed = need * step * (0.9 if step >= 10 else 1.0)
        return "memory" if self.room_bytes - bracket.peak < needed else None

    def _sure_need(self, bracket: Bracket, peak: float, step: int) -> float | None:
        """Return the need of one more example, if certain enough to close a length without a failure.

        Memory may leap, so two peaks and the model must agree, or the model's error must be smaller than the step.
        """
        if self.model is None:
            return None
        by_model, own = self.need_by_model(bracket), self.own_need(bracket)
        if own is not None and abs(own - by_model) <= 0.25 * by_model:
            return min(own, by_model)
        if self.is_misfit:
            certain = self.intercept is not None and peak >= 0.8 * self.room_bytes
        else:
            # Even if the model overrates the need by a third, the next size does not fit.
            certain = self.room_bytes - peak < _SURELY_MISSING * by_model * step
        return by_model if certain or self.model.relative_error * peak <= by_model * step else None

    def is_end(self, anchor: Anchor) -> bool:
        """Return whether this is the longest or shortest length, with its longest target: both go on to a failure."""
        ends = (self.lengths.longest, self.lengths.shortest)
        return anchor.length in ends and anchor == self.anchor(anchor.length)

    def quantum(self, size: int) -> int:
        """Return the number whose next multiple needs no more memory than this batch size; mostly 1.

        It divides the sizes just above which memory leapt, only those no smaller if there are several.
        """
        beyond = {leap for leap in self.leaps if leap >= size}
        leaps = beyond if len(beyond) > 1 else self.leaps
        quantum = math.gcd(*leaps) if len(leaps) > 1 else 1
        while self._grows_within(quantum):
            quantum = quantum // 2 if quantum % 2 == 0 else 1
        return quantum

    def _grows_within(self, quantum: int) -> bool:
        """Return whether two sizes with the same next multiple, not the first, needed different memory."""
        if quantum == 1:
            return False
        for bracket in self.brackets:
            for (small, low), (large, high) in pairwise(bracket.peaks):
                if 0 < (small - 1) // quantum == (large - 1) // quantum and high - low > self.margin.bytes:
                    return True
        return False

    @cached_property
    def leaps(self) -> list[int]:
        """The sizes just above which a batch failed though its length's peaks left room for it."""
        found = []
        for bracket in self.brackets:
            if bracket.failed and bracket.failed_by == "oom" and bracket.peak is not None:
                distance = bracket.failed - bracket.passed
                need = self.own_need(bracket) or (self.model and self.need_by_model(bracket))
                if need and self._room_by_limit - bracket.peak > max(2, distance) * need:
                    found.append((bracket.passed, distance))
        single = [size for size, distance in found if distance == 1]
        return [size for size, distance in found if distance <= math.gcd(*single)] if len(single) > 1 else []

    def next_multiple(self, bracket: Bracket) -> int | None:
        """Return the next multiple of the quantum, which needs no more memory than what is proven; None if closed."""
        size = bracket.proven
        above = size + -size % self.quantum(size)
        return above if 0 < size < above < bracket.nearest_beyond else None

    def possible_sizes(self, lengths: FloatArray, targets: FloatArray | None = None) -> FloatArray:
        """Return the largest batch size that may fit, by all that is known; arguments as in `proven_sizes`."""
        proven: FloatArray = self.proven_sizes(lengths, targets).astype(np.float64)
        at = np.zeros(lengths.shape) if targets is None else targets
        most = self._out_of_reach.smallest_below(lengths, at) - 1
        for anchor in self.anchors:
            bracket = self.bracket(anchor)
            if self.closed_by(bracket) not in (None, "data"):
                above = (lengths >= anchor.length) & (at >= (anchor.target_length or 0.0))
                most[above] = np.minimum(most[above], bracket.proven)  # within a step of it is as good
        model, room = self.model, self.room_bytes
        if model is not None and self.excesses and model.floor <= room:
            # The smaller excess of the nearest lengths on either side that show one.
            telling, excesses = np.array(sorted(self.excesses.items())).T
            excesses = excesses.clip(1 / _MOST_CORRECTION, _MOST_CORRECTION)
            next_one = np.searchsorted(telling, lengths)
            least = np.minimum(excesses[np.maximum(next_one - 1, 0)], excesses[np.minimum(next_one, telling.size - 1)])
            with np.errstate(divide="ignore"):
                sizes = (room - model.constant) / (model.per_example(lengths, at) * least)
            np.minimum(most, sizes * (1 + min(model.relative_error, 0.5)), out=most)
        cap = min(self.lengths.count, self.settings.max_batch_size or np.inf)
        possible: FloatArray = np.maximum(proven, np.floor(np.minimum(most, cap)))
        return possible


def step_at(size: int, tolerance: float) -> int:
    """Return the smallest difference in batch size that matters, at least 1."""
    return max(1, int(size * tolerance))
