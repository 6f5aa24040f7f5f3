"""Where another measured length is worth most: a guide for the probe's search.

Sizes between measured lengths are those of the next longer one, so a table is as good as its ends are measured. For
each number of buckets the guide compares the best table with the sizes that are proven and the best with those that
may be possible (the model's, bounded by all that failed and all that was closed): the difference is what is at stake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from batchtune.batching.optimal import optimal_boundaries
from batchtune.cost import fit_step_seconds, predict
from batchtune.lengths import FloatArray, Histogram, IntArray, Lengths
from batchtune.probe.findings import Findings
from batchtune.probe.outcomes import Anchor
from batchtune.results import CostModel
from batchtune.tuning.joint_refining import JointRefinement

# Lengths that stand for all: so many by where the data's total length lies, and as many by their logarithm.
_ENDS = 192
# A table may cost so much more than with all sizes known.
_AT_STAKE = 0.005
# A length is measured no nearer to another than this part of the gap between two, in the logarithm.
_APART = 0.3
# The same for max_batch_length, which serves frameworks that know no other size; for it lengths are added only up to
# so many times as many as span the data. Where memory grows in proportion to the length, each adds next to nothing.
_OF_MAX_BATCH_LENGTH = 0.03
_FOR_MAX_BATCH_LENGTH = 3
# So many times as many pairs of length and shorter target are measured as lengths span the data.
_PAIRS = 2


@dataclass(frozen=True, eq=False)
class Refinement:
    """Says where to measure next.

    Attributes:
        lengths: The data set, as batches are padded.
        num_buckets: The bucket counts that tables will be swept with.
    """

    lengths: Lengths
    num_buckets: Sequence[int]

    def __call__(self, findings: Findings) -> Anchor | None:
        """Return the length that is worth most, or the pair of length and target; None where none is worth it."""
        single = _single(findings)
        if len(single) < findings.settings.most_lengths:
            known = _Known.of(self, findings, single)
            length = known.worst_end(self.num_buckets)
            if length is None and len(single) < _FOR_MAX_BATCH_LENGTH * findings.settings.num_lengths:
                length = known.end_for_max_batch_length()
            if length is not None:
                return findings.anchor(length)
        if self._joint is None or len(findings.anchors) - len(single) >= _PAIRS * findings.settings.num_lengths:
            return None
        return self._joint.worst_pair(findings, self.num_buckets)

    def left_at_stake(self, findings: Findings) -> float | None:
        """Return how much a table may cost above one with all sizes known, as a share.

        None where that is too little to matter, or more lengths may be measured.
        """
        single = _single(findings)
        if len(single) < findings.settings.most_lengths:
            return None
        lost, _ = _Known.of(self, findings, single).most_lost(self.num_buckets)
        return lost if lost > _AT_STAKE else None

    @cached_property
    def _joint(self) -> JointRefinement | None:
        return None if self.lengths.targets is None else JointRefinement.of(self.lengths, self.lengths.targets)

    @cached_property
    def spread_ends(self) -> FloatArray:
        """Lengths of the data that stand for all, ascending, the longest among them."""
        histogram = self.lengths.histogram
        distinct, totals = histogram.lengths, histogram.cumulative_total
        shares = np.arange(1, _ENDS + 1) / _ENDS
        by_total = np.searchsorted(totals, totals[-1] * shares * (1 - 1e-12))
        logs = np.log(distinct / distinct[0])
        by_log = np.searchsorted(logs, logs[-1] * shares * (1 - 1e-12))
        ends: FloatArray = distinct[np.union1d(by_total, by_log)]
        return ends


@dataclass(frozen=True, eq=False)
class _Known:
    """What is proven and what is possible, at lengths that stand for all; arrays of shape (ends,).

    Attributes:
        histogram: The ends, and how many examples are nearest below each.
        shortest: The shortest length that each end stands for.
        proven, possible: Batch sizes, at least 1.
        fillable: How many examples are at most that long.
        measured: Shape (measured,): the lengths that were tried, ascending.
        tolerance: Sizes that differ by no more than this are as good as the same.
        seconds: (batch sizes, lengths) → cost of a step.
    """

    histogram: Histogram
    shortest: FloatArray
    proven: IntArray
    possible: FloatArray
    fillable: FloatArray
    measured: FloatArray
    tolerance: float
    seconds: Callable[[FloatArray, FloatArray], FloatArray]

    @classmethod
    def of(cls, refinement: Refinement, findings: Findings, single: Sequence[Anchor]) -> _Known:
        lengths = refinement.lengths
        distinct, cumulative = lengths.histogram.lengths, lengths.histogram.cumulative
        measured = np.array([anchor.length for anchor in single])
        ends = np.union1d(refinement.spread_ends, measured[np.isin(measured, distinct)])
        up_to = cumulative[np.searchsorted(distinct, ends)]
        firsts = np.concatenate(([0], np.searchsorted(distinct, ends)[:-1] + 1))
        targets = None
        if lengths.targets is not None:
            targets = np.array([lengths.worst_target(float(end)) for end in ends])
        proven = np.maximum(1, findings.proven_sizes(ends, targets))
        return cls(
            histogram=Histogram(ends, np.diff(up_to, prepend=0)),
            shortest=distinct[firsts],
            proven=proven,
            possible=np.maximum(proven, findings.possible_sizes(ends, targets)),
            fillable=up_to.astype(np.float64),
            measured=np.unique(measured),
            tolerance=findings.settings.tolerance,
            seconds=_seconds(fit_step_seconds(findings.trials), targets, ends),
        )

    def worst_end(self, num_buckets: Sequence[int]) -> float | None:
        """Return the end whose size decides most, in the table that loses most; None where none loses much."""
        lost, theirs = self.most_lost(num_buckets)
        if lost <= _AT_STAKE:
            return None
        ends, counts = self._used(theirs)
        gain = np.where(self._is_open[ends], counts * (self._now - self._best)[ends], 0.0)
        return self._within_its_gap(int(ends[int(gain.argmax())])) if gain.max() > 0 else None

    def most_lost(self, num_buckets: Sequence[int]) -> tuple[float, FloatArray]:
        """How much the table that loses most costs above the best possible, as a share, and that one's boundaries."""
        ours = optimal_boundaries(self.histogram, self._now, num_buckets)
        theirs = optimal_boundaries(self.histogram, self._best, num_buckets)
        lost = [
            self._cost(own, self._now) / self._cost(best, self._best) - 1
            for own, best in zip(ours, theirs, strict=True)
        ]
        worst = int(np.argmax(lost))
        return lost[worst], theirs[worst]

    @cached_property
    def _now(self) -> FloatArray:
        return self._example_costs(self.proven.astype(np.float64))

    @cached_property
    def _best(self) -> FloatArray:
        return self._example_costs(self.possible)

    def _within_its_gap(self, end: int, apart: float = _APART) -> float | None:
        """The open end nearest to this one that leaves a part of the gap between measured lengths on either side.

        Where memory leaps between two lengths, the best ends lie at the very edge of what is known: to creep along it
        would take many trials.

        Returns:
            None where no end in the gap is open.
        """
        lengths = self.histogram.lengths
        right = int(np.searchsorted(self.measured, lengths[end]))
        if right == 0 or right == self.measured.size:
            return float(lengths[end]) if self._is_open[end] else None
        low, high = self.measured[right - 1], self.measured[right]
        inside = np.flatnonzero((lengths > low) & (lengths < high) & self._is_open)
        if not inside.size:
            return None
        span = np.log(high / low)
        wanted = np.clip(np.log(lengths[end] / low), apart * span, (1 - apart) * span)
        return float(lengths[inside[int(np.abs(np.log(lengths[inside] / low) - wanted).argmin())]])

    def end_for_max_batch_length(self) -> float | None:
        """The middle of the lengths whose size is what holds max_batch_length down; None where it is high enough."""
        limited = self.proven < self.fillable
        if not limited.any():
            return None
        now = np.where(limited, (self.proven + 1) * self.shortest, np.inf)
        best = np.where(self.possible < self.fillable, (self.possible + 1) * self.shortest, np.inf)
        if now.min() >= (1 - _OF_MAX_BATCH_LENGTH) * best.min():
            return None
        return self._within_its_gap(int(now.argmin()), apart=0.5)

    @cached_property
    def _is_open(self) -> npt.NDArray[np.bool_]:
        step = np.maximum(1, np.floor(self.proven * self.tolerance))
        most = np.minimum(self.possible, self.fillable)
        wide: npt.NDArray[np.bool_] = most >= self.proven + step
        return wide

    def _example_costs(self, sizes: FloatArray) -> FloatArray:
        """Return what an example costs in a bucket that ends there."""
        return self.seconds(sizes, self.histogram.lengths) / sizes

    def _cost(self, boundaries: FloatArray, example_costs: FloatArray) -> float:
        ends, counts = self._used(boundaries)
        return float(np.sum(counts * example_costs[ends]))

    def _used(self, boundaries: FloatArray) -> tuple[IntArray, IntArray]:
        ends = np.searchsorted(self.histogram.lengths, boundaries)
        return ends, np.diff(self.histogram.cumulative[ends], prepend=0)


def _single(findings: Findings) -> list[Anchor]:
    """Return what was measured with the longest target at or below its length."""
    return [anchor for anchor in findings.anchors if anchor == findings.anchor(anchor.length)]


def _seconds(
    model: CostModel | None, targets: FloatArray | None, ends: FloatArray
) -> Callable[[FloatArray, FloatArray], FloatArray]:
    if model is None:
        return lambda sizes, lengths: np.ones(lengths.shape)
    return lambda sizes, lengths: np.maximum(predict(model, sizes, lengths, targets), 1e-12)
