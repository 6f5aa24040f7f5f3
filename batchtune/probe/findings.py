"""Conclusions of the trials for the search: what an example needs, what may still be possible, where it is done."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np

from batchtune.lengths import FloatArray
from batchtune.probe.outcomes import Anchor, Outcomes
from batchtune.results import ClosedBy, CostModel
from batchtune.shapes import BatchShape

# A shape that takes at least this share of the memory tells what an example needs; a smaller one takes mostly what an
# empty batch takes. The model may be corrected by at most this factor.
_TELLING_SHARE = 0.3
_MOST_CORRECTION = 2.0
# Where the model misses what was measured by more than this, a length's own peaks count alone. So many lengths with
# several batch sizes tell what a batch of nothing would take.
_MISFIT = 0.02
_INTERCEPTS = 2
# A success closes a length if the measured peak leaves less room than one step more needs. That need is known
# to a few per cent; where a step is many examples, that much of it is one too.
_SURE_OF_NEED = 0.9
_MANY = 10
# So well a length's own peaks and the model have to agree on what an example needs.
_AGREEMENT = 0.25
# A peak of so much of the room is nearly at the limit.
_NEARLY_FULL = 0.8
# With room for so many examples more, a failure of one more is a leap.
_LEAP = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bracket:
    """The bounds of the batch size at one length and target."""

    anchor: Anchor
    cap: int  # what the data can fill, or the user allows
    passed: int  # largest that is proven by its own trial, below any that failed; 0 if none is
    ran: int  # largest that ran at all, below any that failed; above `passed` if it leaves no margin
    tight: int | None  # smallest above `passed` that ran but leaves no margin
    failed: int | None  # smallest that failed
    failed_by: ClosedBy | None
    tried: int  # how many batch sizes were tried
    failures: int  # how many of them failed
    misled: int  # how many failed since the last that ran, which said where the limit is
    given_up: int  # how many failed in alternation with others, after they had passed alone
    peaks: tuple[tuple[int, float], ...]  # (batch size, peak bytes) of those that ran, ascending by batch size
    surely: int  # proven by a trial with a longer length or target, or 0
    hardly: int | None  # failed, or left no margin, at a shorter length or target
    # The smallest difference in batch size that matters. It doubles with each batch size given up in alternation: there
    # the limit moves with what the other shapes leave behind, and creeping up to it would fail again and again.
    step: int

    @property
    def beyond(self) -> int:
        """The smallest batch size that is out of the question here."""
        return min(self.failed or self.cap + 1, self.tight or self.cap + 1)

    @property
    def nearest_beyond(self) -> int:
        """The smallest that is out of the question here, or at a shorter length or target."""
        return min(self.beyond, self.hardly or self.beyond)

    @property
    def peak(self) -> float | None:
        """Peak of the largest batch size that is proven here; None if it is not known."""
        return next((peak for size, peak in self.peaks if size == self.passed), None)

    @property
    def proven(self) -> int:
        """The largest batch size that is proven, here or at a longer length or target."""
        return max(self.passed, self.surely)


class Findings(Outcomes):
    """All conclusions of a list of trials; derived from them, never stored."""

    def bracket(self, anchor: Anchor) -> Bracket:
        """Return the bounds there."""
        if anchor not in self._brackets:
            self._brackets[anchor] = self._bracket(anchor)
        return self._brackets[anchor]

    @cached_property
    def _brackets(self) -> dict[Anchor, Bracket]:
        return {}

    def _bracket(self, anchor: Anchor) -> Bracket:
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
        return Bracket(
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

    @property
    def brackets(self) -> list[Bracket]:
        """The bounds at everything that was tried."""
        return [self.bracket(anchor) for anchor in self._sizes]

    # The memory that an example needs

    def need(self, bracket: Bracket) -> float | None:
        """Return the bytes that one more example here needs: by its own trials, else by the model; None: unknown."""
        if (own := self.own_need(bracket)) is not None:
            return own
        known = [self.need_by_model(bracket)] if self.model is not None else []
        if len(bracket.peaks) == 1 and self.rest_bytes is not None:
            size, peak = bracket.peaks[0]
            if self.model is None or self._excess(size, bracket.anchor, peak) is None:
                # All that the step took beyond what is in use at rest: no less than what the examples need.
                known.append((peak - self.rest_bytes) / size)
        return max(known, default=None)

    def own_need(self, bracket: Bracket) -> float | None:
        """Return the need by two of this length's own peaks, the largest and one well below; None if they don't say."""
        if len(bracket.peaks) < 2:
            return None
        large, high = bracket.peaks[-1]
        small, low = bracket.peaks[-2 if bracket.peaks[-2][0] * 2 <= large else 0]
        return (high - low) / (large - small) if high > low else None

    def need_by_model(self, bracket: Bracket) -> float:
        """Return the need by the model, corrected by what was measured at this length, else at its neighbours."""
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
            # Between the nearest lengths on either side, by the logarithm of the length.
            lengths, excesses = np.array(known).T
            excess = float(np.interp(np.log(length), np.log(lengths), excesses))
        return need if excess is None else need * min(max(excess, 1 / _MOST_CORRECTION), _MOST_CORRECTION)

    def _excess(self, size: int, anchor: Anchor, peak: float) -> float | None:
        """Return how many times what the model says the examples of a shape took; None if the peak doesn't tell."""
        model = self.model
        assert model is not None
        said = size * model.per_example(anchor.length, anchor.target_length or 0.0)
        telling = model.constant + _TELLING_SHARE * (self.task.limit_bytes - model.constant)
        if said <= 0 or peak < telling or model.constant + said <= model.floor * 1.05:
            return None
        return (peak - model.constant) / said

    @cached_property
    def excesses(self) -> dict[float, float]:
        """Length → how many times what the model says its largest shape took; of several targets, the longest."""
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
        """The share of the memory that one example needs, fitted to the batch sizes that were found to be largest.

        For systems that tell no peaks: at the limit, batch size × need = memory.
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
        """Whether the model misses what was measured by so much that single lengths are trusted more."""
        return self.model is not None and self.model.relative_error > _MISFIT

    @cached_property
    def intercept(self) -> float | None:
        """The memory of an empty batch, by the lengths at which several batch sizes ran; None if unknown."""
        needs = [(bracket.peaks[-1], self.own_need(bracket)) for bracket in self.brackets if bracket.peaks]
        found = [peak - need * size for (size, peak), need in needs if need is not None]
        return float(np.median(found)) if len(found) >= _INTERCEPTS else None

    @cached_property
    def room_bytes(self) -> float:
        """The memory that a proven batch can use: the limit less the margin, or less where shapes fail before.

        An allocator that can't use every last byte (fragments, large blocks) shows at the ends, where the search always
        goes on until a shape fails. Two lengths must show it, and the more generous one counts.
        """
        usable = float(self.task.limit_bytes)
        ends = []
        for bracket in self.brackets:
            if (failed := bracket.failed) and bracket.failed_by == "oom" and not bracket.given_up:
                if failed - bracket.ran <= step_at(bracket.ran, self.settings.tolerance) and len(bracket.peaks) > 1:
                    largest, last_peak = bracket.peaks[-1]
                    ends.append(last_peak + (self.own_need(bracket) or 0.0) * (failed - largest))
        if len(ends) > 1:
            usable = min(usable, max(*ends, *(float(self.highest_peak(shape) or 0) for shape in self._by_shape)))
        return usable - self.margin.bytes

    # Where the search is done

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
        if not is_end and (shared := self._closed_by_others(bracket, step)) is not None:
            return shared
        if bracket.passed == 0:
            # A single example that leaves no margin.
            at_an_end = bracket.ran >= bracket.cap or bracket.failed is not None or not is_end
            return "memory" if bracket.tight == 1 and at_an_end else None
        if bracket.failed is not None and bracket.failed - bracket.passed <= step:
            return bracket.failed_by
        if bracket.tight is not None and bracket.tight - bracket.passed <= step:
            if not is_end or bracket.ran >= bracket.cap:
                return "memory"
            # What a step leaves of the limit above the margin is worth no search of its own.
            if bracket.failed is not None:
                return bracket.failed_by
        if is_end or bracket.peak is None or (need := self._sure_need(bracket, bracket.peak, step)) is None:
            return None
        needed = need * step * (_SURE_OF_NEED if step >= _MANY else 1.0)
        return "memory" if self.room_bytes - bracket.peak < needed else None

    def _closed_by_others(self, bracket: Bracket, step: int) -> ClosedBy | None:
        """Return what ends it if the proof of a longer length comes within a step of the failure of a shorter one."""
        if bracket.proven >= bracket.cap:
            return "data"
        near = max(step, step_at(bracket.proven, self.settings.tolerance))
        if not bracket.proven or bracket.nearest_beyond - bracket.proven > near:
            return None
        return "oom" if bracket.failed_by == "oom" and bracket.failed == bracket.nearest_beyond else "memory"

    def _sure_need(self, bracket: Bracket, peak: float, step: int) -> float | None:
        """Return the need of one more example, if it is sure enough to close a length without a failure.

        Memory may grow in leaps, so two peaks and the model must agree, or the model must be finer than the step.
        """
        if self.model is None:
            return None
        by_model, own = self.need_by_model(bracket), self.own_need(bracket)
        if own is not None and abs(own - by_model) <= _AGREEMENT * by_model:
            return min(own, by_model)
        nearly_full = self.is_misfit and self.intercept is not None and peak >= _NEARLY_FULL * self.room_bytes
        return by_model if nearly_full or self.model.relative_error * peak <= by_model * step else None

    def is_end(self, anchor: Anchor) -> bool:
        """Return whether it is the longest or the shortest length, with the longest target: both go on to a failure."""
        ends = (self.lengths.longest, self.lengths.shortest)
        return anchor.length in ends and anchor == self.anchor(anchor.length)

    def quantum(self, size: int) -> int:
        """Return the number whose next multiple needs as much memory as this batch size, as far as is known; mostly 1.

        It divides the sizes just above which memory was seen to leap, of those no smaller if there are several.
        """
        beyond = {leap for leap in self._leaps if leap >= size}
        if len(beyond) > 1:
            return math.gcd(*beyond)
        return math.gcd(*self._leaps) if len(self._leaps) > 1 else 1

    @cached_property
    def _leaps(self) -> list[int]:
        """The sizes just above which a batch failed though by the peaks there was room for it, one for each length."""
        found = []
        for bracket in self.brackets:
            if bracket.failed and bracket.failed_by == "oom" and bracket.peak is not None:
                distance = bracket.failed - bracket.passed
                need = self.own_need(bracket) or (self.model and self.need_by_model(bracket))
                if need and self.room_bytes - bracket.peak > max(_LEAP, distance) * need:
                    found.append((bracket.passed, distance))
        single = [size for size, distance in found if distance == 1]
        return [size for size, distance in found if distance <= math.gcd(*single)] if len(single) > 1 else []

    def next_multiple(self, bracket: Bracket) -> int | None:
        """Return the next multiple of the quantum, which needs no more than what is proven; None if none is open."""
        size = bracket.proven
        above = size + -size % self.quantum(size)
        return above if 0 < size < above < bracket.nearest_beyond else None

    def possible_sizes(self, lengths: FloatArray, targets: FloatArray | None = None) -> FloatArray:
        """Return the largest batch size that may fit, by all that is known; shapes are those of `proven_sizes`."""
        proven: FloatArray = self.proven_sizes(lengths, targets).astype(np.float64)
        at = np.zeros(lengths.shape) if targets is None else targets
        most = self._out_of_reach.smallest_below(lengths, at) - 1
        for anchor in self.anchors:
            bracket = self.bracket(anchor)
            if self.closed_by(bracket) not in (None, "data"):
                above = (lengths >= anchor.length) & (at >= (anchor.target_length or 0.0))
                # What lies within a step of what is proven here is as good as that.
                most[above] = np.minimum(most[above], bracket.proven)
        model, room = self.model, self.room_bytes
        if model is not None and self.excesses and model.floor <= room:
            # The lesser of the excesses of the nearest telling lengths on either side.
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
