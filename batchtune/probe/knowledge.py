"""What is known from the trials: the shapes that are proven or ruled out, the bounds at each length, which are done."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import cast

import numpy as np

from batchtune.buckets import optimal_boundaries
from batchtune.epochs.measured_costs import TypicalTargets
from batchtune.lengths import BoolArray, FloatArray, Histogram, IntArray, Lengths
from batchtune.probe.outcomes import (
    SCATTER,
    Anchor,
    Bracket,
    MemoryFit,
    Outcomes,
    Peaks,
    Shapes,
    step_at,
)
from batchtune.probe.settings import ProbeSettings
from batchtune.results import BatchShape, ClosedBy, FrontierPoint, Trial


@dataclass(slots=True)
class SearchTask:
    """The goal of a search: the data, the memory, and the steps that were run in turns so far.

    Attributes:
        expandable: Whether the device's allocator has expandable segments.
        own_size: The size of the training's own batches; 0: unknown.
    """

    lengths: Lengths
    settings: ProbeSettings
    limit_bytes: int
    rungs: Sequence[int]  # the batch sizes that the tolerance tells apart
    steps: list[Trial] = field(default_factory=list)
    expandable: bool = False
    own_size: int = 0


class Knowledge(Outcomes):
    """All that is known from a list of trials; derived from them, never stored.

    A shape is proven if a trial passed that is at least as large in every respect and leaves the margin free: memory
    is assumed to grow with batch size, length and target. Failures after other batches don't count: they show what
    tables can use, not what fits.
    """

    def __init__(
        self,
        task: SearchTask,
        trials: Sequence[Trial],
    ) -> None:
        alone = [trial for trial in trials if not trial.shuffled]
        super().__init__(
            alone,
            Peaks(task.limit_bytes, trials, task.steps, expandable=task.expandable),
        )
        self.task = task
        self._failed_in_tables = Shapes(
            trial.shape for trial in trials if trial.shuffled
        )
        self.lengths = task.lengths
        self.settings = task.settings
        # Where a trial ran for more than its time → the batch sizes.
        self.sizes: dict[Anchor, list[int]] = defaultdict(list)
        for trial in alone:
            if trial.outcome == "error" or (trial.timing and trial.outcome == "ok"):
                continue
            sizes = self.sizes[Anchor(trial.length, trial.target_length)]
            if trial.batch_size not in sizes:
                sizes.append(trial.batch_size)
        self._ran = Shapes(self.passed)
        proven = [shape for shape in self.of_shape if self.is_proven(shape)]
        self._proven = Shapes(proven)
        self._in_tables = Shapes(map(self._in_a_table, proven))
        ooms = [
            shape
            for shape, failure in self.failures.items()
            if failure.outcome == "oom"
        ]
        self._out_of_reach = Shapes(
            [*ooms, *(self.passed - self.failures.keys() - set(proven))]
        )
        self.is_contradicted = any(map(self.is_dominated, ooms))
        """Whether a shape ran out of memory twice though a larger one passed: then lengths need their own proofs."""

    @cached_property
    def brackets(self) -> dict[Anchor, Bracket]:
        """The bounds wherever a trial ran."""
        return {anchor: self._bracket(anchor) for anchor in self.sizes}

    @cached_property
    def fit(self) -> MemoryFit:
        """The model of memory, and how much memory batches can use."""
        passed = [shape for shape in self.of_shape if shape in self.passed]
        return MemoryFit(self.peaks, passed, list(self.brackets.values()))

    @property
    def tolerance(self) -> float:
        """The difference in batch size that matters, as a fraction."""
        return self.peaks.told_apart(self.settings.tolerance)

    # Where sizes are searched

    @property
    def anchors(self) -> list[Anchor]:
        """Where the largest batch size was searched: wherever a trial ran that was not only for its time."""
        return list(self.sizes)

    def anchor(self, length: float) -> Anchor:
        """Return a length with the longest target at or below it."""
        return Anchor(length, self.lengths.worst_target(length))

    def is_end(self, anchor: Anchor) -> bool:
        """Return whether this is the longest or shortest length, with its longest target: both go on to a failure."""
        ends = (self.lengths.longest, self.lengths.shortest)
        return anchor.length in ends and anchor == self.anchor(anchor.length)

    def cap(self, anchor: Anchor) -> int:
        """Return the largest batch that the data can fill with examples no longer, in either length."""
        count = self.lengths.count_within(anchor.length, anchor.target_length)
        return min(count, self.settings.max_batch_size or count)

    # One shape

    def is_dominated(self, shape: BatchShape) -> bool:
        """Return whether a shape that contains this one passed."""
        return self._ran.exceeds(shape)

    # What they prove and rule out elsewhere

    def proven_sizes(self, lengths: FloatArray, targets: FloatArray) -> IntArray:
        """Return the largest batch size proven at each length and target, below any that failed, or 0; shape (n,)."""
        below = Shapes(self.failures).smallest_below(lengths, targets)
        if not self.is_contradicted:
            return self._proven.largest_beyond(
                lengths, targets, self._proven.sizes < below[:, None]
            ).astype(np.int64)
        sizes = np.zeros(lengths.shape, dtype=np.int64)
        for index, wanted in enumerate(map(Anchor, lengths.tolist(), targets.tolist())):
            sizes[index] = self._own_proof(wanted, float(below[index]))
        return sizes

    def _own_proof(self, wanted: Anchor, below: float) -> int:
        """Return the largest size proven at the next longer length that was tried, below that size; or 0."""
        for anchor in sorted(self.anchors):
            if wanted.is_within(anchor):
                proven = [
                    size
                    for size in self.sizes[anchor]
                    if self.is_proven(anchor.shape(size))
                ]
                largest = max((size for size in proven if size < below), default=0)
                if largest:
                    return largest
        return 0

    def table_size(self, anchor: Anchor) -> int:
        """Return the largest batch size here for tables: proven, and smaller than what failed in them; or 0."""
        proven = self.proven_sizes(*anchor.arrays)[0]
        failed = self._failed_in_tables.smallest_below(*anchor.arrays)[0]
        small_enough = self._in_tables.largest_beyond(
            *anchor.arrays, self._in_tables.sizes < failed
        )[0]
        return int(min(proven, small_enough))

    def _in_a_table(self, shape: BatchShape) -> BatchShape:
        """Return a proven shape, less the examples that leave free what tables lacked which failed in training."""
        peaks = self.peaks
        peak = peaks.highest(shape)
        if peak is None or not peaks.fragments_bytes:
            return shape
        size = max(1, int(shape.batch_size * peaks.share_in_a_table(peak)))
        return replace(shape, batch_size=size)

    def possible_sizes(self, lengths: FloatArray, targets: FloatArray) -> FloatArray:
        """Return the largest batch size that may fit, by all that is known; arguments as in `proven_sizes`."""
        largest = self._out_of_reach.smallest_below(lengths, targets) - 1
        for anchor in self.anchors:
            bracket = self.bracket(anchor)
            if self.closed_by(bracket) not in (None, "data"):
                beyond = (lengths >= anchor.length) & (
                    targets >= (anchor.target_length or 0.0)
                )
                # A size within a step of what is proven is as good.
                largest[beyond] = np.minimum(largest[beyond], bracket.proven)
        by_model = self.fit.largest_sizes(lengths, targets)
        if by_model is not None:
            largest = np.minimum(largest, by_model)
        cap = min(self.lengths.count, self.settings.max_batch_size or np.inf)
        possible: FloatArray = np.maximum(
            self.proven_sizes(lengths, targets), np.floor(np.minimum(largest, cap))
        )
        return possible

    # The bounds at one length

    def bracket(self, anchor: Anchor) -> Bracket:
        """Return the bounds at a length and target."""
        return self.brackets.get(anchor) or self._bracket(anchor)

    def _bracket(self, anchor: Anchor) -> Bracket:
        sizes = sorted(self.sizes.get(anchor, ()))
        tried = self.tried({size: anchor.shape(size) for size in sizes})
        failed = tried.failed
        ran = max(tried.ran, default=0)
        cap = self.cap(anchor)
        implied_low = self._proven.largest_beyond(
            *anchor.arrays, self._proven.elsewhere(anchor)
        )[0]
        implied_high = self._out_of_reach.smallest_below(
            *anchor.arrays, self._out_of_reach.elsewhere(anchor)
        )[0]
        scatter = 0.0
        peak = dict(tried.peaks).get(ran)
        if peak is not None:
            used = max(1, peak - (self.peaks.rest_bytes or 0))
            scatter = min(SCATTER, self.peaks.margin.spread_bytes / used)
        return Bracket(
            anchor=anchor,
            cap=cap,
            passed=tried.passed,
            ran=ran,
            over_margin=tried.over_margin,
            failed=failed,
            failed_by=None
            if failed is None
            else cast(ClosedBy, tried.failures[failed].outcome),
            flushed=failed is not None and tried.failures[failed].flushed,
            tried=len(sizes),
            failures=len(tried.failures),
            given_up=tried.given_up,
            peaks=tried.peaks,
            implied_low=0 if self.is_contradicted else min(int(implied_low), cap),
            implied_high=None if np.isinf(implied_high) else int(implied_high),
            step=step_at(ran or failed or 1, max(self.tolerance, scatter))
            << max(0, tried.given_up - 1),
            spread_bytes=self.peaks.margin.spread_bytes,
            is_blurred=2 * scatter > self.tolerance,
        )

    def falls(self) -> list[tuple[BatchShape, BatchShape]]:
        """Return pairs of a shape that ran out of memory, in a fresh worker too, and a larger one that passed."""
        falls = []
        for shape, failure in self.failures.items():
            if (
                failure.outcome == "oom"
                and not failure.confirmation
                and self.is_dominated(shape)
            ):
                larger = next(
                    other
                    for other in self.of_shape
                    if other in self.passed and other.contains(shape)
                )
                falls.append((shape, larger))
        return falls

    def failures_left(self, anchor: Anchor) -> int:
        """Return how many more trials may fail here where failures are costly: 2 + log2(cap) minus those that did."""
        failed = sum(
            trial.outcome != "ok" and trial.shape == anchor.shape(trial.batch_size)
            for trial in self.trials
        )
        return 1 + self.cap(anchor).bit_length() - failed

    def next_multiple(self, bracket: Bracket) -> int | None:
        """Return the next multiple of the quantum, which needs no more memory than what is proven; None if closed."""
        size = bracket.proven
        above = size + -size % self.fit.quantum(size)
        if 0 < size < above < bracket.nearest_beyond:
            return above
        return None

    def closed_by(self, bracket: Bracket) -> ClosedBy | None:
        """Return what ends the search there; None if it goes on."""
        if bracket.passed >= bracket.cap:
            return "data"
        if bracket.failed == 1:
            return bracket.failed_by
        if self.next_multiple(bracket) is not None:
            return None
        step = max(bracket.step, self.fit.quantum(bracket.proven))
        is_end = self.is_end(bracket.anchor)
        if not is_end:
            # The proofs of longer lengths and the failures of shorter ones.
            if bracket.proven >= bracket.cap:
                return "data"
            # The proof of a longer length may come within a step of the failure of a shorter one.
            near = max(step, step_at(bracket.proven, self.tolerance))
            if bracket.proven and bracket.nearest_beyond - bracket.proven <= near:
                if (
                    bracket.failed_by == "oom"
                    and bracket.failed == bracket.nearest_beyond
                ):
                    return "oom"
                return "memory"
        if bracket.passed == 0:
            # A single example that leaves no margin.
            at_an_end = (
                bracket.ran >= bracket.cap or bracket.failed is not None or not is_end
            )
            if bracket.over_margin == 1 and at_an_end:
                return "memory"
            return None
        if bracket.failed is not None and bracket.failed - bracket.passed <= step:
            return bracket.failed_by
        if (
            bracket.over_margin is not None
            and bracket.over_margin - bracket.passed <= step
        ):
            if not is_end or bracket.ran >= bracket.cap:
                return "memory"
            # Less than one step above the margin is not worth a search.
            if bracket.failed is not None:
                return bracket.failed_by
        if not self.leaves_no_room(bracket):
            return None
        if not is_end:
            return "memory"
        return bracket.failed_by if bracket.is_blurred else None

    def leaves_no_room(self, bracket: Bracket) -> bool:
        """Return whether the peak of what passed there leaves no room for a step more."""
        peak = bracket.peak
        if peak is None:
            return False
        step = max(bracket.step, self.fit.quantum(bracket.proven))
        if self.fit.leaves_no_room(bracket, peak, step):
            return True
        # Where failures are dear, each example more is taken to need as much as those so far.
        room = self.fit.room_bytes - peak
        used = peak - (self.peaks.rest_bytes or 0)
        return self.settings.failures_are_dear and room * bracket.passed < used * step


# Guides the probe's search: where another measured length, or pair of length and target, is worth most.
#
# Sizes between measured lengths are those of the next longer one, so a table is as good as its ends are measured. For
# each number of buckets the guide compares the best table with the sizes that are proven and the best with those that
# may be possible (the model's, bounded by all that failed and all that was closed): the difference is at stake. Pairs
# of a length and a shorter target follow, for tables over two lengths.

# Lengths that stand for all: so many by where the data's total length lies, and as many by their logarithm.
_ENDS = 192
# A table may cost this much more than with all sizes known.
_AT_STAKE = 0.005
# A length is measured no nearer to another than this part of the gap between two, in the logarithm.
_APART = 0.3
# The same for max_batch_length, which serves frameworks that know no other size; for it lengths are added only up to
# so many times as many as span the data. Where memory grows in proportion to the length, each adds next to nothing.
_OF_MAX_BATCH_LENGTH = 0.03
_FOR_MAX_BATCH_LENGTH = 3
# Where targets are the same multiple of the length to within this, they say nothing that lengths do not say.
_PROPORTIONAL = 0.05
# Pairs of length and shorter target to measure: at these parts of the examples, in order of length, with these
# quantiles of the targets of the tenth of the examples just below.
_PARTS = (1.0, 0.75, 0.5, 0.25)
_QUANTILES = (0.5, 0.9)
_MOST_BELOW = 1 << 20
# Lengths to time with typical targets.
_MOST_TIMED = 16

# The share of a step's time that does not depend on its batch, in the cost that decides.
_OVERHEAD = 0.1
# After so many trials, and up to so many lengths, as multiples of the lengths that span the data, one is added only if
# more is at stake. The user's own number of lengths replaces both. Trials with shorter targets don't count: they
# correct the model, which may then put more at stake. This changes one of the 138 rows of `tests/benchmarks/laws.py`:
# "larger of length and twice target" on sentences loses 1.44% instead of 1.75%, with 2 trials more.
TRIALS = 2.5
_AT_STAKE_PAST_TRIALS = 0.015
_MOST_LENGTHS = 5


@dataclass(frozen=True, eq=False)
class Refinement:
    """Says where to measure next, for tables with these bucket counts; lengths are as batches are padded."""

    lengths: Lengths
    num_buckets: Sequence[int]

    def __call__(self, known: Knowledge) -> Anchor | None:
        """Return the length, or pair of length and target, that is worth most; None if no trial is worth its time."""
        settings = known.settings
        single = _single(known)
        at_stake = _least_at_stake(known, single)
        if at_stake is not None:
            ends = _Ends(self.lengths, self._spread_ends, known, single)
            length = ends.worst(self.num_buckets, at_stake)
            may_add_more = (
                at_stake == _AT_STAKE
                and len(single) < _FOR_MAX_BATCH_LENGTH * settings.num_lengths
            )
            if length is None and may_add_more:
                length = ends.for_max_batch_length()
            if length is not None:
                return known.anchor(length)
        for pair in self._pairs:
            is_new = pair not in known.anchors and pair != known.anchor(pair.length)
            if is_new and known.closed_by(known.bracket(pair)) is None:
                return pair
        return None

    def left_at_stake(self, known: Knowledge) -> float | None:
        """Return the relative cost still at stake; None if little, or not yet final."""
        single = _single(known)
        if _least_at_stake(known, single) == _AT_STAKE:
            return None
        lost, _ = _Ends(self.lengths, self._spread_ends, known, single).most_lost(
            self.num_buckets
        )
        if lost <= _AT_STAKE:
            return None
        return lost

    @cached_property
    def _pairs(self) -> list[Anchor]:
        """Pairs of a length and a shorter target; none if targets follow from the lengths."""
        runs = self.lengths.runs
        if runs.targets is None:
            return []
        ratio = runs.targets / runs.values
        if np.ptp(ratio) <= _PROPORTIONAL * ratio.max():
            return []
        count = self.lengths.count
        pairs = []
        for part in _PARTS:
            first = round((1 - part) * (count - 1))
            last = min(count, first + max(1, count // 10)) - 1
            # All of them, or as many as tell a quantile.
            below = np.linspace(first, last, min(last - first + 1, _MOST_BELOW))
            length = float(runs.values[runs.at(first)])
            targets = runs.targets[runs.at(below.round().astype(np.int64))]
            for quantile in _QUANTILES:
                target = float(np.quantile(targets, quantile, method="nearest"))
                pairs.append(Anchor(length, target))
        return pairs

    @cached_property
    def _spread_ends(self) -> FloatArray:
        """Lengths of the data that stand for all, ascending, the longest among them."""
        distinct = self.lengths.histogram.lengths
        totals = self.lengths.histogram.cumulative_total
        shares = np.arange(1, _ENDS + 1) / _ENDS * (1 - 1e-12)
        logs = np.log(distinct / distinct[0])
        chosen = np.union1d(
            np.searchsorted(totals, totals[-1] * shares),
            np.searchsorted(logs, logs[-1] * shares),
        )
        ends: FloatArray = distinct[chosen]
        return ends


def _single(known: Knowledge) -> list[Anchor]:
    """Return the anchors with the longest target at or below their length."""
    return [anchor for anchor in known.anchors if anchor == known.anchor(anchor.length)]


def _least_at_stake(known: Knowledge, single: Sequence[Anchor]) -> float | None:
    """Return how much must be at stake for another length to be worth its trials; None if no more may be added."""
    settings = known.settings
    if settings.max_lengths is not None:
        if len(single) < settings.max_lengths:
            return _AT_STAKE
        return None
    with_longest_targets = set(single)
    trials = sum(
        Anchor(trial.length, trial.target_length) in with_longest_targets
        for trial in known.trials
    )
    if trials < TRIALS * settings.num_lengths:
        return _AT_STAKE
    if len(single) < _MOST_LENGTHS * settings.num_lengths:
        return _AT_STAKE_PAST_TRIALS
    return None


def _example_costs(
    known: Knowledge, sizes: FloatArray, lengths: FloatArray, targets: FloatArray
) -> FloatArray:
    """Return what an example costs in a step of so many; a step costs 1 for a batch that fills the memory.

    What an example computes is taken to be in proportion to the memory it needs. Measured times would decide better
    where they are exact. But they scatter, and each length that they add by chance costs trials.
    """
    costs: FloatArray = np.ones(sizes.shape)
    model = known.fit.model
    if model is not None and known.fit.room_bytes > model.constant:
        room = known.fit.room_bytes - model.constant
        filled = sizes * model.per_example(lengths, targets) / room
        costs = _OVERHEAD + (1 - _OVERHEAD) * filled
    return costs / sizes


def with_typical_targets(
    lengths: Lengths, points: Sequence[FrontierPoint]
) -> list[BatchShape]:
    """Return the largest batches of up to 16 lengths with typical targets, the longest first, if those are shorter."""
    typical = TypicalTargets.of(lengths)
    if typical is None or lengths.runs.targets is None:
        return []
    are_whole = bool((lengths.runs.targets % 1 == 0).all())
    spread = np.linspace(0, len(points) - 1, min(len(points), _MOST_TIMED))
    shapes = []
    for index in np.unique(spread.round().astype(int))[::-1]:
        point = points[index]
        target = float(typical([point.batch_size], [point.length])[0])
        if are_whole:
            target = float(np.ceil(target))
        if target < (point.target_length or 0.0):
            shapes.append(BatchShape(point.batch_size, point.length, target))
    return shapes


class _Ends:
    """Where buckets may end: lengths that stand for all, the measured ones, and the next longer ones; shape (ends,).

    Attributes:
        histogram: The ends, and how many examples are nearest below each; `shortest` is the shortest of them.
        proven, possible: Batch sizes, at least 1; `now`, `best`: the cost of an example with them in a bucket to there.
        fillable: How many examples are at most that long.
        measured: Shape (measured,): the lengths that were tried, ascending.
        tolerance: Sizes that differ by no more than this share count as the same.
    """

    def __init__(
        self,
        lengths: Lengths,
        spread: FloatArray,
        known: Knowledge,
        single: Sequence[Anchor],
    ) -> None:
        distinct = lengths.histogram.lengths
        self.measured = np.unique([anchor.length for anchor in single])
        indices = np.flatnonzero(np.isin(distinct, self.measured))
        # The next longer one limits max_batch_length most, by the size of the length that was measured beyond it.
        ends = np.union1d(
            spread, distinct[np.minimum([indices, indices + 1], distinct.size - 1)]
        )
        end_indices = np.searchsorted(distinct, ends)
        targets = np.array([lengths.worst_target(end) or 0.0 for end in ends.tolist()])
        up_to = lengths.histogram.cumulative[end_indices]
        self.histogram = Histogram(ends, np.diff(up_to, prepend=0))
        self.shortest: FloatArray = distinct[
            np.concatenate(([0], end_indices[:-1] + 1))
        ]
        self.fillable = up_to.astype(np.float64)
        self.tolerance = known.settings.tolerance
        self.proven = np.maximum(1, known.proven_sizes(ends, targets))
        self.possible = np.maximum(self.proven, known.possible_sizes(ends, targets))
        proven = self.proven.astype(np.float64)
        self.now = _example_costs(known, proven, ends, targets)
        self.best = _example_costs(known, self.possible, ends, targets)

    def worst(self, num_buckets: Sequence[int], at_stake: float) -> float | None:
        """Return the end whose size decides most, in the table that loses most; None if none loses more than that."""
        lost, best_boundaries = self.most_lost(num_buckets)
        if lost <= at_stake:
            return None
        ends, counts = self._used(best_boundaries)
        gain = np.where(self._is_open[ends], counts * (self.now - self.best)[ends], 0.0)
        if gain.max() <= 0:
            return None
        return self._within_its_gap(int(ends[int(gain.argmax())]))

    def most_lost(self, num_buckets: Sequence[int]) -> tuple[float, FloatArray]:
        """Return how much more the table that loses most costs than the best possible, and the latter's boundaries."""
        proven_tables = optimal_boundaries(self.histogram, self.now, num_buckets)
        possible_tables = optimal_boundaries(self.histogram, self.best, num_buckets)

        def cost(boundaries: FloatArray, example_costs: FloatArray) -> float:
            ends, counts = self._used(boundaries)
            return float(np.sum(counts * example_costs[ends]))

        lost = []
        for proven, possible in zip(proven_tables, possible_tables, strict=True):
            lost.append(cost(proven, self.now) / cost(possible, self.best) - 1)
        worst = int(np.argmax(lost))
        return lost[worst], possible_tables[worst]

    def for_max_batch_length(self) -> float | None:
        """Return the middle of the lengths whose size holds max_batch_length down; None if it is high enough."""
        limited = self.proven < self.fillable
        now = np.where(limited, (self.proven + 1) * self.shortest, np.inf)
        best = np.where(
            self.possible < self.fillable, (self.possible + 1) * self.shortest, np.inf
        )
        if not limited.any() or now.min() >= (1 - _OF_MAX_BATCH_LENGTH) * best.min():
            return None
        return self._within_its_gap(int(now.argmin()), apart=0.5)

    def _within_its_gap(self, end: int, apart: float = _APART) -> float | None:
        """Return the open end nearest to this one that leaves a part of the gap between measured lengths on both sides.

        Where memory leaps between two lengths, the best ends lie at the very edge of what is known: to creep along it
        would take many trials. None if no end in the gap is open.
        """
        lengths = self.histogram.lengths
        right = int(np.searchsorted(self.measured, lengths[end]))
        if right == 0 or right == self.measured.size:
            if self._is_open[end]:
                return float(lengths[end])
            return None
        low = self.measured[right - 1]
        high = self.measured[right]
        inside = np.flatnonzero((lengths > low) & (lengths < high) & self._is_open)
        if not inside.size:
            return None
        span = np.log(high / low)
        wanted = np.clip(np.log(lengths[end] / low), apart * span, (1 - apart) * span)
        return float(
            lengths[
                inside[int(np.abs(np.log(lengths[inside] / low) - wanted).argmin())]
            ]
        )

    @cached_property
    def _is_open(self) -> BoolArray:
        step = np.maximum(1, np.floor(self.proven * self.tolerance))
        is_open: BoolArray = (
            np.minimum(self.possible, self.fillable) >= self.proven + step
        )
        return is_open

    def _used(self, boundaries: FloatArray) -> tuple[IntArray, IntArray]:
        ends = np.searchsorted(self.histogram.lengths, boundaries)
        return ends, np.diff(self.histogram.cumulative[ends], prepend=0)
