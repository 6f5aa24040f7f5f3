"""What is known at each length and target, and how much memory one more example needs there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np

from batchtune.probe.dominance import Anchor, as_arrays
from batchtune.probe.ladder import step_at
from batchtune.probe.outcomes import Outcomes
from batchtune.results import ClosedBy, CostModel

# A shape that takes at least this share of the memory tells what an example needs; a smaller one mostly what is there
# without any. So far the model may be set right by it.
_TELLING_SHARE = 0.3
_MOST_CORRECTION = 2.0
# Where the model misses what was measured by more than this, a length's own peaks count alone. So many lengths with
# several batch sizes tell what a batch of nothing would take.
_MISFIT = 0.02
_INTERCEPTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Bracket:
    """What is known at one length and target.

    Attributes:
        cap: Largest batch size worth trying: what the data can fill, or the user allows.
        passed: Largest batch size that is proven by its own trial, below any that failed; 0 if none is.
        ran: Largest that ran at all, below any that failed; above `passed` where it leaves no margin.
        tight: Smallest above `passed` that ran but leaves no margin, or None.
        failed: Smallest that failed, or None.
        failed_by: How it failed.
        tried: Number of batch sizes that were tried.
        failures: Number of them that failed.
        misled: Number of them that failed since the last that ran, which said where the limit is.
        given_up: Number of them that failed in alternation with other shapes, after they had passed alone.
        peaks: (batch size, peak bytes) of those that ran, ascending by batch size.
        surely: Batch size that is proven by a trial with a longer length or target; 0 where there is none.
        hardly: Batch size that failed, or left no margin, at a shorter length or target; None where there is none.
    """

    anchor: Anchor
    cap: int
    passed: int
    ran: int
    tight: int | None
    failed: int | None
    failed_by: ClosedBy | None
    tried: int
    failures: int
    misled: int
    given_up: int
    peaks: tuple[tuple[int, float], ...]
    surely: int
    hardly: int | None

    def step(self, tolerance: float) -> int:
        """Return the smallest difference in batch size that matters.

        It doubles with each batch size given up in alternation: there the limit moves with what the other shapes
        leave behind, and creeping up to it would fail again and again.
        """
        return step_at(self.passed or self.failed or 1, tolerance) << max(0, self.given_up - 1)

    @property
    def beyond(self) -> int:
        """The smallest batch size that is out of the question here."""
        return min(self.failed or self.cap + 1, self.tight or self.cap + 1)

    @property
    def peak(self) -> float | None:
        """Peak of the largest batch size that is proven here; None where it is not known."""
        return next((peak for size, peak in self.peaks if size == self.passed), None)


class Needs(Outcomes):
    """What the trials say of each length: bounds of its batch size, and what an example needs."""

    def bracket(self, anchor: Anchor) -> Bracket:
        """Return what is known there."""
        if anchor not in self._brackets:
            self._brackets[anchor] = self._bracket(anchor)
        return self._brackets[anchor]

    @cached_property
    def _brackets(self) -> dict[Anchor, Bracket]:
        return {}

    def _bracket(self, anchor: Anchor) -> Bracket:
        sizes = sorted(self._sizes.get(anchor, ()))
        failures = {size: trial for size in sizes if (trial := self.failure(anchor.shape(size))) is not None}
        failed = min(failures, default=None)
        ran = [size for size in sizes if self.passes(anchor.shape(size)) and (failed is None or size < failed)]
        proven = [size for size in ran if self.is_proven(anchor.shape(size))]
        passed = max(proven, default=0)
        peaks = [(size, peak) for size in ran if (peak := self.highest_peak(anchor.shape(size))) is not None]
        known_since = max((self._by_shape[anchor.shape(size)][0].index for size in ran), default=-1)
        cap = self.cap(anchor)
        hardly = self._out_of_reach.smallest_within(*as_arrays(anchor), apart_from=anchor)[0]
        surely = self._proven.largest_beyond(*as_arrays(anchor), apart_from=anchor)[0]
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
            given_up=sum(trial.confirmation for trial in failures.values()),
            peaks=tuple((size, float(peak)) for size, peak in peaks),
            surely=0 if self.is_contradicted else min(int(surely), cap),
            hardly=None if np.isinf(hardly) else int(hardly),
        )

    @property
    def brackets(self) -> list[Bracket]:
        """Of everything that was tried."""
        return [self.bracket(anchor) for anchor in self._sizes]

    def need(self, bracket: Bracket) -> float | None:
        """Bytes that one more example of this length needs: by its own trials, else by the model; None: unknown."""
        if (own := self.own_need(bracket)) is not None:
            return own
        known = [self.need_by_model(bracket)] if self.model is not None else []
        if len(bracket.peaks) == 1 and self.rest_bytes is not None:
            (size, peak) = bracket.peaks[0]
            if self.model is None or self._excess(size, bracket.anchor, peak) is None:
                # All that the step took beyond what is there at rest: no less than what the examples need.
                known.append((peak - self.rest_bytes) / size)
        return max(known, default=None)

    def own_need(self, bracket: Bracket) -> float | None:
        """Return the need by two of this length's own peaks, the largest and one well below; None: they don't tell."""
        if len(bracket.peaks) < 2:
            return None
        (small, low), (large, high) = bracket.peaks[0], bracket.peaks[-1]
        if len(bracket.peaks) > 2 and bracket.peaks[-2][0] * 2 <= large:
            small, low = bracket.peaks[-2]
        return (high - low) / (large - small) if high > low else None

    def need_by_model(self, bracket: Bracket) -> float:
        """Return the need by the model, set right by what was measured at this length and its neighbours."""
        assert self.model is not None
        if self.is_misfit and self.intercept is not None and bracket.peaks and bracket.peaks[-1][1] > self.intercept:
            size, peak = bracket.peaks[-1]
            if peak >= self.intercept + _TELLING_SHARE * (self.task.limit_bytes - self.intercept):
                return (peak - self.intercept) / size
        need = self.model.per_example(bracket.anchor.length, bracket.anchor.target_length or 0.0)
        if bracket.peaks:
            size, peak = bracket.peaks[-1]
            return need * bounded(self._excess(size, bracket.anchor, peak))
        return need * self._correction(bracket.anchor.length)

    def _excess(self, size: int, anchor: Anchor, peak: float) -> float | None:
        """How many times what the model says the examples of a shape really took; None where that is not told."""
        model = self.model
        assert model is not None
        said = size * model.per_example(anchor.length, anchor.target_length or 0.0)
        telling = model.constant + _TELLING_SHARE * (self.task.limit_bytes - model.constant)
        if said <= 0 or peak < telling or model.constant + said <= model.floor * 1.05:
            return None
        return (peak - model.constant) / said

    def _correction(self, length: float) -> float:
        """What the nearest lengths on either side say of the model, between them by the logarithm of the length."""
        known = sorted(self.excesses.items())
        below = [item for item in known if item[0] < length]
        above = [item for item in known if item[0] > length]
        if not below or not above:
            return bounded(above[0][1] if above else below[-1][1] if below else None)
        (short, low), (long, high) = below[-1], above[0]
        share = np.log(length / short) / np.log(long / short)
        return bounded(float(low + share * (high - low)))

    @property
    def telling_lengths(self) -> int:
        """At how many lengths a shape has passed that tells what an example needs: two separate L from L²."""
        return len(self.excesses)

    @cached_property
    def excesses(self) -> dict[float, float]:
        """Length → what its largest shape says of the model; where there are several targets, of the longest."""
        found: dict[float, float] = {}
        for anchor in sorted(self._sizes, key=lambda anchor: anchor.target_length or 0.0):
            peaks = self.bracket(anchor).peaks
            if peaks and (excess := self._excess(peaks[-1][0], anchor, peaks[-1][1])) is not None:
                found[anchor.length] = excess
        return found

    @property
    def is_misfit(self) -> bool:
        """Whether the model misses what was measured by so much that single lengths are trusted more."""
        return self.model is not None and self.model.relative_error > _MISFIT

    @cached_property
    def intercept(self) -> float | None:
        """What a batch of nothing would take, by the lengths at which several batch sizes ran; None: not known."""
        found = []
        for anchor in self._sizes:
            bracket = self.bracket(anchor)
            if (need := self.own_need(bracket)) is not None:
                size, peak = bracket.peaks[-1]
                found.append(peak - need * size)
        return float(np.median(found)) if len(found) >= _INTERCEPTS else None

    @cached_property
    def usable_bytes(self) -> float:
        """The memory that batches can really use: below the limit where shapes fail before they reach it.

        An allocator that can't use every last byte (fragments, large blocks) shows at the ends, where the search
        always goes on until a shape fails: two lengths must show it, and the more generous one counts.
        """
        limit = float(self.task.limit_bytes)
        ends = []
        for anchor in self._sizes:
            bracket = self.bracket(anchor)
            near = bracket.failed is not None and bracket.failed - bracket.ran <= step_at(
                bracket.ran, self.settings.tolerance
            )
            if near and bracket.failed_by == "oom" and not bracket.given_up and len(bracket.peaks) > 1:
                assert bracket.failed is not None
                largest, last_peak = bracket.peaks[-1]
                ends.append(last_peak + (self.own_need(bracket) or 0.0) * (bracket.failed - largest))
        if len(ends) < 2:
            return limit
        highest = max((peak for shape in self._by_shape if (peak := self.highest_peak(shape))), default=0)
        return min(limit, max(*ends, float(highest)))

    @property
    def room_bytes(self) -> float:
        """The memory that a proven batch can use: what is usable, less the margin."""
        return self.usable_bytes - self.margin.bytes

    @cached_property
    def model(self) -> CostModel | None:
        """The model of peak memory, fitted to every shape that passed; None where there are too few."""
        found = [
            (shape, peak)
            for shape in self._by_shape
            if self.passes(shape) and (peak := self.highest_peak(shape)) is not None
        ]
        if len(found) < 2:
            return None
        return self.task.fit(
            [shape.batch_size for shape, _ in found],
            [shape.length for shape, _ in found],
            [peak for _, peak in found],
            self._targets_of([shape.target_length for shape, _ in found]),
        )

    def _targets_of(self, targets: Sequence[float | None]) -> list[float] | None:
        return None if self.lengths.targets is None else [target or 0.0 for target in targets]


def bounded(excess: float | None) -> float:
    """Return the factor that sets the model right, within bounds; 1 where it is not known."""
    return 1.0 if excess is None else min(max(excess, 1 / _MOST_CORRECTION), _MOST_CORRECTION)
