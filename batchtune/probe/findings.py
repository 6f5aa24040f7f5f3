"""What follows from the trials so far for the search: where it is done, and what may still be possible."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from batchtune.lengths import FloatArray
from batchtune.probe.dominance import Anchor
from batchtune.probe.ladder import step_at
from batchtune.probe.needs import Bracket, Needs, bounded
from batchtune.results import ClosedBy, CostModel

# A success closes a length where the measured peak leaves less room than one step more needs. What it needs is known
# to a few per cent; where a step is many examples, that much of it is one too.
_SURE_OF_NEED = 0.9
_MANY = 10
# So well a length's own peaks and the model have to agree on what an example needs.
_AGREEMENT = 0.25
# A peak of so much of the room is nearly at the limit.
_NEARLY_FULL = 0.8
# With room for so many examples more, a failure of one more is a leap.
_LEAP = 2.0


class Findings(Needs):
    """All that follows from a list of trials; derived from them, never stored."""

    def closed_by(self, bracket: Bracket) -> ClosedBy | None:
        """Return what ends the search there; None where it goes on."""
        if bracket.passed >= bracket.cap:
            return "data"
        if bracket.failed == 1:
            return bracket.failed_by
        if self.next_multiple(bracket) is not None:
            return None
        step = max(bracket.step(self.settings.tolerance), self.quantum(max(bracket.passed, bracket.surely)))
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
        if is_end:
            return None
        need = self._sure_need(bracket, step)
        if need is None or bracket.peak is None:
            return None
        sure = _SURE_OF_NEED if step >= _MANY else 1.0
        return "memory" if self.room_bytes - bracket.peak < need * step * sure else None

    def _closed_by_others(self, bracket: Bracket, step: int) -> ClosedBy | None:
        """Whether what is proven at longer lengths comes within a step of what failed here or at shorter ones."""
        proven = max(bracket.passed, bracket.surely)
        if proven >= bracket.cap:
            return "data"
        beyond = min(bracket.beyond, bracket.hardly or bracket.beyond)
        near = max(step, step_at(proven, self.settings.tolerance))
        if not proven or beyond - proven > near:
            return None
        return "oom" if bracket.failed_by == "oom" and bracket.failed == beyond else "memory"

    def _sure_need(self, bracket: Bracket, step: int) -> float | None:
        """Return what one more example needs, where that is sure enough to close a length without a failure.

        Where memory grows in leaps, neither two peaks side by side nor a model through them tell the next step: they
        must agree with each other, or the model must be finer than the step.
        """
        if self.model is None or bracket.peak is None:
            return None
        by_model = self.need_by_model(bracket)
        if len(bracket.peaks) >= 2:
            own = self.own_need(bracket)
            if own is not None and abs(own - by_model) <= _AGREEMENT * by_model:
                return min(own, by_model)
        nearly_full = self.is_misfit and self.intercept is not None and bracket.peak >= _NEARLY_FULL * self.room_bytes
        sure = nearly_full or self.model.relative_error * bracket.peak <= by_model * step
        return by_model if sure else None

    def is_end(self, anchor: Anchor) -> bool:
        """Whether it is the longest or the shortest length, with the longest target there: both go on to a failure."""
        ends = (self.lengths.longest, self.lengths.shortest)
        return anchor.length in ends and anchor == self.anchor(anchor.length)

    def quantum(self, size: int) -> int:
        """Batch sizes from here to the next multiple of this need as much as that, as far as is known; mostly 1.

        It is the greatest common divisor of the sizes just above which memory was seen to leap: a slightly larger
        batch failed, though by the peaks there was room for it. Of those that are no smaller, where there are several.
        """
        beyond = {leap for leap in self._leaps if leap >= size}
        if len(beyond) > 1:
            return math.gcd(*beyond)
        return math.gcd(*self._leaps) if len(self._leaps) > 1 else 1

    @cached_property
    def _leaps(self) -> list[int]:
        """The sizes just above which memory was seen to leap, one for each length."""
        single = self._leaps_within(1)
        return self._leaps_within(math.gcd(*single)) if len(single) > 1 else []

    def _leaps_within(self, distance: int) -> list[int]:
        leaps = []
        for anchor in self._sizes:
            bracket = self.bracket(anchor)
            failed, peak = bracket.failed, bracket.peak
            if failed is None or failed - bracket.passed > distance or bracket.failed_by != "oom" or peak is None:
                continue
            need = self.own_need(bracket) or (self.model and self.need_by_model(bracket))
            if need and self.room_bytes - peak > max(_LEAP, failed - bracket.passed) * need:
                leaps.append(bracket.passed)
        return leaps

    def next_multiple(self, bracket: Bracket) -> int | None:
        """The next multiple of the quantum, which needs as much as what is proven; None where that is one, or all."""
        size = max(bracket.passed, bracket.surely)
        above = size + -size % self.quantum(size)
        beyond = min(bracket.beyond, bracket.hardly or bracket.beyond)
        return above if 0 < size < above < beyond else None

    def possible_sizes(self, lengths: FloatArray, targets: FloatArray | None = None) -> FloatArray:
        """Return the largest batch size that may fit, by all that is known: the model, what failed and what was closed.

        No less than the proven ones; else no more than there are examples. Shapes are those of `proven_sizes`.
        """
        proven: FloatArray = self.proven_sizes(lengths, targets).astype(np.float64)
        most = np.full(lengths.shape, np.inf)
        beyond = self._out_of_reach.smallest_within(lengths, targets)
        np.minimum(most, beyond - 1, out=most)
        for anchor in self.anchors:
            bracket = self.bracket(anchor)
            closed_by = self.closed_by(bracket)
            if closed_by is None or closed_by == "data":
                continue
            size = max(bracket.passed, bracket.surely)
            above = lengths >= anchor.length
            if targets is not None:
                above &= targets >= (anchor.target_length or 0.0)
            # What lies within a step of what is proven here is as good as that.
            most[above] = np.minimum(most[above], size)
        if self.model is not None and self.excesses:
            need = self.model.per_example(lengths, 0.0 if targets is None else targets) * self._least_excess(lengths)
            with np.errstate(divide="ignore"):
                sizes = (self.room_bytes - self.model.constant) / need * (1 + min(self.model.relative_error, 0.5))
            if self.model.floor <= self.room_bytes:
                np.minimum(most, sizes, out=most)
        cap = min(self.lengths.count, self.settings.max_batch_size or np.inf)
        possible: FloatArray = np.maximum(proven, np.floor(np.minimum(most, cap)))
        return possible

    def _least_excess(self, lengths: FloatArray) -> FloatArray:
        """Return the lesser of what the nearest telling lengths on either side say of the model."""
        known = sorted(self.excesses.items())
        at = np.array([length for length, _ in known])
        values = np.array([bounded(excess) for _, excess in known])
        above = np.searchsorted(at, lengths)
        least: FloatArray = np.minimum(values[np.maximum(above - 1, 0)], values[np.minimum(above, at.size - 1)])
        return least

    @cached_property
    def inverse_model(self) -> CostModel | None:
        """The share of the memory that one example needs, fitted to the batch sizes that were found to be largest.

        For systems that tell no peaks: at the limit, batch size × need = memory.
        """
        found = []
        for anchor in self.anchors:
            bracket = self.bracket(anchor)
            if bracket.passed and self.closed_by(bracket) not in (None, "data"):
                found.append((anchor, 1 / ((bracket.passed + bracket.beyond) / 2)))
        if not found:
            return None
        if len(found) == 1:
            ((anchor, share),) = found
            return CostModel(floor=0.0, constant=0.0, linear=share / anchor.length, quadratic=0.0, relative_error=0.0)
        return self.task.fit(
            [1.0] * len(found),
            [anchor.length for anchor, _ in found],
            [share for _, share in found],
            self._targets_of([anchor.target_length for anchor, _ in found]),
        )
