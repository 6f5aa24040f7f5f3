"""What the trials so far say of each batch shape and each length; derived from them, never stored."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np

from batchtune.lengths import FloatArray, IntArray, Lengths
from batchtune.probe.dominance import Anchor, Shapes, as_arrays
from batchtune.probe.ladder import step_at
from batchtune.results import ClosedBy, CostModel, Margin, Trial
from batchtune.shapes import BatchShape

PeakFit = Callable[
    [Sequence[float], Sequence[float], Sequence[float], "Sequence[float] | None"],
    "CostModel | None",
]
"""(batch sizes, lengths, peaks, target lengths) → the fitted model, or None where there are too few."""

# A success closes a length where the measured peak leaves less room than one step more needs. What it needs is known
# to a few per cent; where a step is many examples, that much of it is one too.
_SURE_OF_NEED = 0.9
_MANY = 10
# So well a length's own peaks and the model have to agree on what an example needs.
_AGREEMENT = 0.25
# A shape that takes at least this share of the memory tells what an example needs; a smaller one mostly what is there
# without any. So far the model may be set right by it.
_TELLING_SHARE = 0.3
_MOST_CORRECTION = 2.0
# Where the model misses what was measured by more than this, a length's own peaks count alone. So many lengths with
# several batch sizes tell what a batch of nothing would take; a peak of so much of the room is nearly at the limit.
_MISFIT = 0.02
_INTERCEPTS = 2
_NEARLY_FULL = 0.8
# With room for so many examples more, a failure of one more is a leap.
_LEAP = 2.0
# The margin: so many times the widest spread that was seen, and this part of the limit.
_SPREADS = 1.1
_LEAST_MARGIN = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    """How to search.

    Attributes:
        num_lengths: How many lengths to span the data with, the shortest and the longest among them.
        max_lengths: How many may be probed in all, with those that are added where tables need them.
        tolerance: How far below the true limit a batch size may be, as a share of it; one example at least.
        max_batch_size: Never try more examples; None: what the data can fill.
        limit_bytes: Memory limit that is enforced on the device.
    """

    num_lengths: int
    tolerance: float
    max_batch_size: int | None
    limit_bytes: int
    max_lengths: int = 64


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
        """The smallest difference in batch size that matters.

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


class Evidence:
    """What follows from a list of trials.

    A shape is proven if a trial ran that is no smaller in any respect, and that leaves the margin free: memory is
    taken to grow with batch size, length and target. Where a failure shows that it does not, the failure counts: it
    rules out all that is no smaller in any respect, whatever passed there.

    Args:
        lengths: The data set.
        settings: How to search.
        trials: In the order in which they were run.
        fit: Fits the model of peak memory.
        spread_bytes: By how much peaks of equal batches were seen to differ outside of the trials.
        first_step_bytes: By how much the first step of a process was seen to exceed later ones.
        confirmed: The shapes that may count as proven; None: all.
    """

    def __init__(
        self,
        lengths: Lengths,
        settings: SearchSettings,
        trials: Sequence[Trial],
        fit: PeakFit,
        *,
        spread_bytes: int = 0,
        first_step_bytes: int = 0,
        confirmed: Collection[BatchShape] | None = None,
    ) -> None:
        self.lengths = lengths
        self.settings = settings
        self.trials = trials
        self._fit = fit
        self._spread_bytes = spread_bytes
        self._first_step_bytes = first_step_bytes
        self.confirmed = confirmed
        self._by_shape: dict[BatchShape, list[Trial]] = defaultdict(list)
        self._sizes: dict[Anchor, list[int]] = defaultdict(list)
        self._first_of_worker: set[int] = set()
        worker: int | None = None
        for trial in trials:
            if trial.worker is not None and trial.worker != worker and not trial.confirmation:
                worker = trial.worker
                self._first_of_worker.add(trial.index)
            if trial.outcome == "error":  # the workload's own; it was shown, mended and runs anew
                continue
            shape = BatchShape(trial.batch_size, trial.length, trial.target_length)
            if shape not in self._by_shape:
                self._sizes[Anchor(trial.length, trial.target_length)].append(trial.batch_size)
            self._by_shape[shape].append(trial)
        self._brackets: dict[Anchor, Bracket] = {}

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
        """A length with the longest target at or below it."""
        return Anchor(length, self.lengths.worst_target(length))

    # What happened to one shape

    def tried(self, shape: BatchShape) -> int:
        """How many trials a shape had."""
        return len(self._by_shape.get(shape, ()))

    def passes(self, shape: BatchShape) -> int:
        """How many trials of a shape passed."""
        return sum(trial.outcome == "ok" for trial in self._by_shape.get(shape, ()))

    def failure(self, shape: BatchShape) -> Trial | None:
        """The trial that rules a shape out.

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
        """A batch size here that is tried once more, in a fresh worker, before its failure is believed.

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
        """Whether a shape passed that is at least as large in every respect, and larger in one."""
        return self._ran.exceeds(shape)

    def highest_peak(self, shape: BatchShape) -> int | None:
        """The highest peak that was measured for a shape; None where none is known."""
        return max(self._peaks(shape), default=None)

    def peak_range(self, shape: BatchShape, others: Sequence[int] = ()) -> int:
        """By how much the peaks of a shape's trials, and others of it, differ."""
        peaks = [*self._peaks(shape), *others]
        return max(peaks) - min(peaks) if peaks else 0

    def _peaks(self, shape: BatchShape) -> list[int]:
        """The highest and the lowest peak of each of a shape's trials.

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
        """Whether it ran, did not fail as well, and leaves the margin free."""
        if not self.passes(shape) or self.failure(shape) is not None:
            return False
        if self.confirmed is not None and shape not in self.confirmed:
            return False
        lowest = min(self._peaks(shape), default=None)
        return lowest is None or lowest + self.margin.bytes <= self.settings.limit_bytes

    def median_seconds(self, shape: BatchShape) -> float | None:
        """The median step time of a shape; None where none is known."""
        times = [trial.step_seconds for trial in self._by_shape[shape] if trial.step_seconds is not None]
        return float(np.median(times)) if times else None

    def proof(self, anchor: Anchor, batch_size: int) -> int | None:
        """The index of the trial that proves this size here: the smallest shape that is no smaller."""
        found = [
            (shape.padded_length, trial.index)
            for shape, trials in self._by_shape.items()
            if shape.batch_size >= batch_size and anchor.is_within(Anchor(shape.length, shape.target_length))
            if self.is_proven(shape)
            for trial in trials
            if trial.outcome == "ok"
        ]
        return min(found)[1] if found else None

    @cached_property
    def margin(self) -> Margin:
        """What a proven batch leaves free."""
        ranges, repetitions = [self._spread_bytes], 0
        for trials in self._by_shape.values():
            shape = BatchShape(trials[0].batch_size, trials[0].length, trials[0].target_length)
            peaks = self._peaks(shape)
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
        at_least = max(_SPREADS * max(ranges), float(self._first_step_bytes))
        return Margin(
            bytes=int(at_least + _LEAST_MARGIN * self.settings.limit_bytes) if self.knows_peaks else 0,
            spread_bytes=max(ranges),
            first_step_bytes=self._first_step_bytes,
            repetitions=repetitions,
        )

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

    # What is known of many lengths at once

    def proven_sizes(self, lengths: FloatArray, targets: FloatArray | None = None) -> IntArray:
        """The largest batch size that is proven; 0 where none is.

        Where a shape failed though a larger one passed, the largest that ran below it.

        Args:
            lengths: Shape (n,).
            targets: Shape (n,); None: the data have none.
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
        """As `proven_sizes`, by the trials at the next longer length that was tried alone."""
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

    def possible_sizes(self, lengths: FloatArray, targets: FloatArray | None = None) -> FloatArray:
        """The largest batch size that may fit, by all that is known: the model, what failed and what was closed.

        Args:
            lengths: Shape (n,).
            targets: Shape (n,); None: the data have none.

        Returns:
            Shape (n,), no less than the proven ones; else no more than there are examples.
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
        if self.model is not None and self._excesses:
            need = self.model.per_example(lengths, 0.0 if targets is None else targets) * self._least_excess(lengths)
            with np.errstate(divide="ignore"):
                sizes = (self.room_bytes - self.model.constant) / need * (1 + min(self.model.relative_error, 0.5))
            if self.model.floor <= self.room_bytes:
                np.minimum(most, sizes, out=most)
        cap = min(self.lengths.count, self.settings.max_batch_size or np.inf)
        possible: FloatArray = np.maximum(proven, np.floor(np.minimum(most, cap)))
        return possible

    def _least_excess(self, lengths: FloatArray) -> FloatArray:
        """The lesser of what the nearest telling lengths on either side say of the model."""
        known = sorted(self._excesses.items())
        at = np.array([length for length, _ in known])
        values = np.clip([excess for _, excess in known], 1 / _MOST_CORRECTION, _MOST_CORRECTION)
        above = np.searchsorted(at, lengths)
        least: FloatArray = np.minimum(values[np.maximum(above - 1, 0)], values[np.minimum(above, at.size - 1)])
        return least

    # What is known at one length

    def cap(self, anchor: Anchor) -> int:
        """The largest batch size that the data can fill with examples that are no longer, in either length."""
        count = self.lengths.count_within(anchor.length, anchor.target_length)
        return min(count, self.settings.max_batch_size or count)

    def bracket(self, anchor: Anchor) -> Bracket:
        """What is known there."""
        if anchor not in self._brackets:
            self._brackets[anchor] = self._bracket(anchor)
        return self._brackets[anchor]

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
            need = self._own_need(bracket) or (self.model and self._need_by_model(bracket))
            if need and self.room_bytes - peak > max(_LEAP, failed - bracket.passed) * need:
                leaps.append(bracket.passed)
        return leaps

    def next_multiple(self, bracket: Bracket) -> int | None:
        """The next multiple of the quantum, which needs as much as what is proven; None where that is one, or all."""
        size = max(bracket.passed, bracket.surely)
        above = size + -size % self.quantum(size)
        beyond = min(bracket.beyond, bracket.hardly or bracket.beyond)
        return above if 0 < size < above < beyond else None

    def is_end(self, anchor: Anchor) -> bool:
        """Whether it is the longest or the shortest length, with the longest target there: both go on to a failure."""
        ends = (self.lengths.longest, self.lengths.shortest)
        return anchor.length in ends and anchor == self.anchor(anchor.length)

    def closed_by(self, bracket: Bracket) -> ClosedBy | None:
        """What ends the search there; None where it goes on."""
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
        """What one more example needs, where that is sure enough to close a length without a failure.

        Where memory grows in leaps, neither two peaks side by side nor a model through them tell the next step: they
        must agree with each other, or the model must be finer than the step.
        """
        if self.model is None or bracket.peak is None:
            return None
        by_model = self._need_by_model(bracket)
        if len(bracket.peaks) >= 2:
            own = self._own_need(bracket)
            if own is not None and abs(own - by_model) <= _AGREEMENT * by_model:
                return min(own, by_model)
        nearly_full = self.is_misfit and self.intercept is not None and bracket.peak >= _NEARLY_FULL * self.room_bytes
        sure = nearly_full or self.model.relative_error * bracket.peak <= by_model * step
        return by_model if sure else None

    def need(self, bracket: Bracket) -> float | None:
        """Bytes that one more example of this length needs: by its own trials, else by the model; None: unknown."""
        if (own := self._own_need(bracket)) is not None:
            return own
        known = [self._need_by_model(bracket)] if self.model is not None else []
        if len(bracket.peaks) == 1 and self.rest_bytes is not None:
            (size, peak) = bracket.peaks[0]
            if self.model is None or self._excess(size, bracket.anchor, peak) is None:
                # All that the step took beyond what is there at rest: no less than what the examples need.
                known.append((peak - self.rest_bytes) / size)
        return max(known, default=None)

    def _own_need(self, bracket: Bracket) -> float | None:
        """By two of this length's own peaks, the largest and one well below it; None where they do not tell."""
        if len(bracket.peaks) < 2:
            return None
        (small, low), (large, high) = bracket.peaks[0], bracket.peaks[-1]
        if len(bracket.peaks) > 2 and bracket.peaks[-2][0] * 2 <= large:
            small, low = bracket.peaks[-2]
        return (high - low) / (large - small) if high > low else None

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
            if (need := self._own_need(bracket)) is not None:
                size, peak = bracket.peaks[-1]
                found.append(peak - need * size)
        return float(np.median(found)) if len(found) >= _INTERCEPTS else None

    def _need_by_model(self, bracket: Bracket) -> float:
        assert self.model is not None
        if self.is_misfit and self.intercept is not None and bracket.peaks and bracket.peaks[-1][1] > self.intercept:
            size, peak = bracket.peaks[-1]
            if peak >= self.intercept + _TELLING_SHARE * (self.settings.limit_bytes - self.intercept):
                return (peak - self.intercept) / size
        need = self.model.per_example(bracket.anchor.length, bracket.anchor.target_length or 0.0)
        if bracket.peaks:
            size, peak = bracket.peaks[-1]
            return need * _bounded(self._excess(size, bracket.anchor, peak))
        return need * self._correction(bracket.anchor.length)

    def _excess(self, size: int, anchor: Anchor, peak: float) -> float | None:
        """How many times what the model says the examples of a shape really took; None where that is not told."""
        model = self.model
        assert model is not None
        said = size * model.per_example(anchor.length, anchor.target_length or 0.0)
        telling = model.constant + _TELLING_SHARE * (self.settings.limit_bytes - model.constant)
        if said <= 0 or peak < telling or model.constant + said <= model.floor * 1.05:
            return None
        return (peak - model.constant) / said

    def _correction(self, length: float) -> float:
        """What the nearest lengths on either side say of the model, between them by the logarithm of the length."""
        known = sorted(self._excesses.items())
        below = [item for item in known if item[0] < length]
        above = [item for item in known if item[0] > length]
        if not below or not above:
            return _bounded(above[0][1] if above else below[-1][1] if below else None)
        (short, low), (long, high) = below[-1], above[0]
        share = np.log(length / short) / np.log(long / short)
        return _bounded(float(low + share * (high - low)))

    @property
    def telling_lengths(self) -> int:
        """At how many lengths a shape has passed that tells what an example needs: two separate L from L²."""
        return len(self._excesses)

    @cached_property
    def _excesses(self) -> dict[float, float]:
        """Length → what its largest shape says of the model; where there are several targets, of the longest."""
        found: dict[float, float] = {}
        for anchor in sorted(self._sizes, key=lambda anchor: anchor.target_length or 0.0):
            peaks = self.bracket(anchor).peaks
            if peaks and (excess := self._excess(peaks[-1][0], anchor, peaks[-1][1])) is not None:
                found[anchor.length] = excess
        return found

    @cached_property
    def usable_bytes(self) -> float:
        """The memory that batches can really use: below the limit where shapes fail before they reach it.

        An allocator that can't use every last byte (fragments, large blocks) shows at the ends, where the search
        always goes on until a shape fails: two lengths must show it, and the more generous one counts.
        """
        limit = float(self.settings.limit_bytes)
        ends = []
        for anchor in self._sizes:
            bracket = self.bracket(anchor)
            near = bracket.failed is not None and bracket.failed - bracket.ran <= step_at(
                bracket.ran, self.settings.tolerance
            )
            if near and bracket.failed_by == "oom" and not bracket.given_up and len(bracket.peaks) > 1:
                assert bracket.failed is not None
                largest, last_peak = bracket.peaks[-1]
                ends.append(last_peak + (self._own_need(bracket) or 0.0) * (bracket.failed - largest))
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
        return self._fit(
            [shape.batch_size for shape, _ in found],
            [shape.length for shape, _ in found],
            [peak for _, peak in found],
            self._targets_of([shape.target_length for shape, _ in found]),
        )

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
        return self._fit(
            [1.0] * len(found),
            [anchor.length for anchor, _ in found],
            [share for _, share in found],
            self._targets_of([anchor.target_length for anchor, _ in found]),
        )

    @cached_property
    def rest_bytes(self) -> int | None:
        """In use between trials: the parameters, the optimizer's state; None where it is not known."""
        known = [trial.rest_bytes for trial in self.trials if trial.outcome == "ok" and trial.rest_bytes is not None]
        return min(known, default=None)

    def _targets_of(self, targets: Sequence[float | None]) -> list[float] | None:
        return None if self.lengths.targets is None else [target or 0.0 for target in targets]

    @cached_property
    def knows_peaks(self) -> bool:
        """Whether the system tells peaks; also where nothing has passed yet."""
        passed = [shape for shape in self._by_shape if self.passes(shape)]
        return not passed or any(self.highest_peak(shape) is not None for shape in passed)


def _bounded(excess: float | None) -> float:
    return 1.0 if excess is None else min(max(excess, 1 / _MOST_CORRECTION), _MOST_CORRECTION)
