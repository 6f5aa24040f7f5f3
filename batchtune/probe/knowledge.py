"""What is known from the trials: the shapes that are proven or ruled out, the bounds at each length, which are done."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import cast

import numpy as np

from batchtune.lengths import FloatArray, IntArray, Lengths
from batchtune.probe.bounds import Anchor, Bracket, Shapes, step_at
from batchtune.probe.margin import SCATTER, Peaks
from batchtune.probe.memory_fit import MemoryFit
from batchtune.probe.outcomes import Outcomes
from batchtune.probe.settings import ProbeSettings
from batchtune.results import BatchShape, ClosedBy, Trial


@dataclass(slots=True)
class SearchTask:
    """The goal of a search: the data, the memory, and the steps that were run in turns so far."""

    lengths: Lengths
    settings: ProbeSettings
    limit_bytes: int
    rungs: Sequence[int]  # the batch sizes that the tolerance tells apart
    steps: list[Trial] = field(default_factory=list)


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
        super().__init__(alone, Peaks(task.limit_bytes, trials, task.steps))
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
        """The model of memory, and how much of it batches can use."""
        passed = [shape for shape in self.of_shape if shape in self.passed]
        return MemoryFit(self.peaks, passed, list(self.brackets.values()))

    @property
    def tolerance(self) -> float:
        """The difference in batch size that matters, as a fraction."""
        return self.peaks.told_apart(self.settings.tolerance)

    # Where sizes are searched

    @property
    def anchors(self) -> list[Anchor]:
        """Where a largest batch size was searched: wherever a trial ran for more than its time."""
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
        """Return how many more trials may fail here where failures are dear: 2 + log2(cap) less those that did."""
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
