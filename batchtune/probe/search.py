"""Chooses the batch shape to try next: a pure function of the trials so far.

The search has no state of its own: the same trials give the same proposal. So an interrupted search continues from its
journal, and a made device tests it without torch.

For each of a set of lengths it brackets the largest batch size that fits between one that passed and one that failed
(or what the data can fill). A model of the peak memory, fitted to all trials and corrected by the peaks at this length
and its neighbours, says where to try next; where that does not close in, bisection does. The set spans the data at
first; then lengths are added, one by one, where knowing more is worth most.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from batchtune.lengths import Lengths
from batchtune.probe.failures import message_verdict
from batchtune.probe.knowledge import Knowledge, SearchTask
from batchtune.probe.messages import IgnoresShape, NothingFits, TooLong, single_fails
from batchtune.probe.outcomes import (
    Anchor,
    Bracket,
    Outcomes,
    Shapes,
    between,
    ladder,
    step_at,
)
from batchtune.probe.settings import ProbeSettings
from batchtune.results import BatchShape, FrontierPoint, Trial

# Chooses the batch size to try next at one length: where the model puts the limit, within bisection's bounds.

# Where the model is far off, a size that is proven is run first if it is at least the guess divided by this.
_NEAR = 1.25
# Sizes from this part of the largest on lie close to it.
_CLOSE = 0.9
# Their peaks show how memory grows if they differ by this many margins.
_TELLING = 4
# Where failures are dear, more than one for so many lengths make the search aim lower.
_FEW_FAILURES = 3


def next_batch_size(known: Knowledge, anchor: Anchor) -> int | None:
    """Return the next batch size to try; None if the length and target are closed.

    A length takes at most 4 + log2(cap) batch sizes: a guess that would leave too much for the
    remaining trials to bisect is moved. Where failures are costly, at most 2 + log2(cap) fail
    instead, and the sizes go up by measured peaks.
    """
    bracket = known.bracket(anchor)
    if known.closed_by(bracket) is not None:
        return None
    is_full = bracket.is_blurred and known.leaves_no_room(bracket)
    over_margin = bracket.over_margin or math.inf
    if over_margin - bracket.passed <= bracket.step or (is_full and not bracket.failed):
        return _to_a_failure(known, bracket)
    guess = _within_reach(known, bracket, _guess(known, bracket))
    left = 4 + int(math.log2(bracket.cap)) - bracket.tried
    if known.is_end(anchor):
        left -= 1  # for a failure beyond what ran without a margin
    if (
        bracket.failed is None
        and known.task.rungs[bisect_right(known.task.rungs, bracket.cap) - 1]
        != bracket.cap
    ):
        left -= 1  # for the cap itself, which ends the length by a trial of its own
    if known.settings.failures_are_dear:
        guess = _up_by_peaks(known, bracket, guess)
        left = known.failures_left(anchor)
    high = bracket.beyond
    if (
        bracket.implied_high is not None
        and bracket.implied_high > bracket.passed + 1
        and not known.is_end(anchor)
    ):
        high = min(high, bracket.implied_high)
    rungs = between(known.task.rungs, bracket.passed, high)
    if rungs:
        told_apart = (1 << max(0, left - 1)) - 1  # rungs, by the trials after this one
        if not known.settings.failures_are_dear:
            # Too few trials are left where turns have reopened a length: bisect all the same.
            told_apart = max(told_apart, len(rungs) // 2)
        guess = max(guess, rungs[max(0, len(rungs) - 1 - told_apart)])
        guess = min(guess, rungs[min(len(rungs) - 1, told_apart)])
    return max(bracket.passed + 1, min(guess, bracket.beyond - 1))


def _up_by_peaks(known: Knowledge, bracket: Bracket, guess: int) -> int:
    """Return the guess, or a smaller size, so that few sizes fail and measured peaks lead to the limit.

    If the model is far off, a length starts with what is proven. Its first peak then leads on as if all memory beyond
    what is in use between trials grew with the batch, and less far where many sizes have failed.
    """
    if not bracket.peaks and bracket.implied_low and known.fit.is_misfit:
        return min(guess, bracket.implied_low)
    if len(bracket.peaks) != 1:
        return max(guess, _past_a_creep(known, bracket))
    size, peak = bracket.peaks[0]
    used = max(1, peak - (known.peaks.rest_bytes or 0))
    guess = min(guess, size + int((known.fit.room_bytes - peak) * size / used))
    if _FEW_FAILURES * (len(known.failures) - 1) >= len(known.anchors):
        guess -= (guess - size) // 4
    return guess


def _past_a_creep(known: Knowledge, bracket: Bracket) -> int:
    """Return the least size to try where nothing has failed yet, and the largest that passed lie close together.

    Each of them has shown that an example more takes less than those before had told. So the steps double, or lead to
    where memory is used up if it grows on as among them.
    """
    close = [peak for peak in bracket.peaks if peak[0] >= _CLOSE * bracket.passed]
    if bracket.beyond <= bracket.cap or len(close) < 3:
        return 0
    (first, low), *others, (last, high) = close
    doubled = last + (bracket.step << len(others))
    if high - low <= _TELLING * known.peaks.margin.bytes:
        return doubled
    need = (high - low) / (last - first)
    return max(doubled, last + int((known.fit.room_bytes - high) / need))


def _to_a_failure(known: Knowledge, bracket: Bracket) -> int:
    """Return a size that should fail: at the ends the search goes on until a batch does."""
    _, peak = bracket.peaks[-1]
    need = known.fit.need(bracket)
    room_bytes = known.peaks.limit_bytes + 2 * bracket.spread_bytes - peak
    room = math.ceil(room_bytes / need) if need else bracket.ran
    over_margin = sum(size > bracket.passed for size, _ in bracket.peaks)
    room = max(room, bracket.step << max(0, over_margin - 1))
    return min(bracket.ran + room, bracket.cap)


def _within_reach(known: Knowledge, bracket: Bracket, guess: int) -> int:
    """Keep the guess within what other lengths have shown, and at least a step from what this one has."""
    if bracket.implied_high is not None and bracket.passed < bracket.implied_high - 1:
        guess = min(guess, bracket.implied_high - 1)
    if bracket.implied_low < bracket.beyond:
        guess = max(guess, bracket.implied_low)
    if bracket.passed:
        guess = max(guess, bracket.passed + bracket.step)
    if bracket.failed is not None:
        back = max(bracket.step, step_at(bracket.failed, known.settings.tolerance))
        if bracket.flushed:
            back += back // 2
        elif not bracket.passed:  # step back further each time
            back <<= max(0, bracket.failures - 1)
        below = bracket.failed - back
        if bracket.passed:  # the middle ends a narrow bracket, whatever becomes of it
            below = max(below, (bracket.passed + bracket.failed) // 2)
        guess = min(guess, below)
    if bracket.over_margin is not None and bracket.is_blurred:
        guess = min(guess, bracket.over_margin - bracket.step)
    return max(bracket.passed + 1, min(guess, bracket.beyond - 1))


def _guess(known: Knowledge, bracket: Bracket) -> int:
    """Return the size to try by all that is known, whatever the bounds."""
    if (
        not bracket.given_up
        and bracket.failed is not None
        and not bracket.ran
        and bracket.implied_low
    ):
        if bracket.flushed:
            return bracket.failed - 1
        return max(bracket.implied_low, _little_below(known, bracket))
    multiple = known.next_multiple(bracket)
    if multiple is not None:
        return multiple
    if bracket.has_crept and bracket.beyond <= bracket.cap and not bracket.is_blurred:
        return _middle(known, bracket)
    guess = _by_peaks(known, bracket)
    quantum = known.fit.quantum(bracket.proven)
    if guess is not None and quantum > 1:
        guess = max(guess - guess % quantum, min(guess, bracket.passed + 1))
    if bracket.failed is None:
        return guess or max(1, bracket.passed * 2)
    if guess is None:
        return _middle(known, bracket)
    if not bracket.passed or guess < bracket.failed:
        return guess
    if bracket.flushed:  # the limit is near: it fits an emptied cache
        back = step_at(bracket.failed, known.tolerance)
        return bracket.failed - (back << (bracket.failures - 1))
    # A failure refutes the guess. Far below it, memory jumps, often just above the last size that passed.
    if (
        bracket.failed < 0.97 * guess
        and bracket.failures <= 2
        and not bracket.has_crept
    ):
        return bracket.proven + bracket.step
    return max(_middle(known, bracket), _little_below(known, bracket))


def _little_below(known: Knowledge, bracket: Bracket) -> int:
    """Return a size two steps below the first that failed in a cache, as sizes near the limit do; 0 for any other."""
    if known.peaks.overhead <= 1 or bracket.failures > 1 or bracket.failed is None:
        return 0
    return bracket.failed - 2 * step_at(bracket.failed, known.tolerance)


def _middle(known: Knowledge, bracket: Bracket) -> int:
    """Return the rung in the middle of what is open, by other lengths too where they leave any."""
    low = bracket.passed
    high = bracket.beyond
    if low < bracket.implied_low < high:
        low = bracket.implied_low
    if bracket.implied_high is not None and low < bracket.implied_high < high:
        high = bracket.implied_high
    open_rungs = between(known.task.rungs, low, high) or between(
        known.task.rungs, bracket.passed, bracket.beyond
    )
    if not open_rungs:
        return (bracket.passed + bracket.beyond) // 2
    return open_rungs[len(open_rungs) // 2]


def _by_peaks(known: Knowledge, bracket: Bracket) -> int | None:
    """Return the batch size at the limit by the peaks so far; None if bisection knows better."""
    fit = known.fit
    as_longer = _padded_as_longer(known, bracket)
    need = fit.need(bracket)
    if need is None or need <= 0:
        if bracket.tried:
            return _own_size(known, bracket) or _away_from_the_last(bracket)
        return as_longer or 1
    if bracket.peaks:
        return _beyond_last_peak(known, bracket, need)
    assert fit.model is not None
    # A little below the model's limit: a success closes the length, a failure does not.
    error = min(fit.error, 0.5)
    margin = max(error, known.tolerance / 2)
    size = max(
        1,
        min(
            int((fit.room_bytes - fit.model.constant) / need * (1 - margin)),
            bracket.cap,
        ),
    )
    # It takes two lengths to separate L from L².
    if as_longer is not None and (len(fit.excesses) < 2 or bracket.failures > 1):
        return min(size, as_longer)
    if (
        as_longer is not None
        and bracket.implied_low
        and size * bracket.implied_low > 1.1 * as_longer**2
    ):
        size = as_longer  # the need of an example can't fall faster than the square of its length
    if fit.is_misfit and bracket.implied_low and size <= _NEAR * bracket.implied_low:
        # Proven already: its own peak then shows where the limit is.
        return bracket.implied_low
    return size


def _beyond_last_peak(known: Knowledge, bracket: Bracket, need: float) -> int:
    """Return the size at which this length's largest peak, and the need of an example, reach the limit."""
    largest, peak = bracket.peaks[-1]
    fit = known.fit
    room = fit.room_at(bracket)
    # Half a step below the limit: peaks scatter, and a size that leaves too little is a trial lost.
    more = (room - peak) / need - (bracket.step - 1) / 2
    size = int(min(largest + more, 2.0 * bracket.cap))
    rest = fit.model.constant if fit.model else known.peaks.rest_bytes
    used = peak - (bracket.peaks[0][1] if rest is None else rest)
    # The slope of a batch that uses less is unknown: allocators round, and its peak is mostly constant.
    if used < 0.1 * (room - (peak - used)):
        return max(min(size, largest * 8), _own_size(known, bracket))
    return size


def _own_size(known: Knowledge, bracket: Bracket) -> int:
    """Return the training's own size after a batch of one: a probe that ends early then recommends no less; else 0."""
    return known.task.own_size if bracket.ran == 1 else 0


def _away_from_the_last(bracket: Bracket) -> int | None:
    """Return the size that is further away from what passed, or from what failed, than the last; None after both."""
    if bracket.passed and bracket.failed is None:
        return bracket.passed + (bracket.step << (bracket.tried - 1))
    if bracket.failed is not None and not bracket.passed:
        return bracket.failed - (bracket.step << (bracket.failures - 1))
    return None


def _padded_as_longer(known: Knowledge, bracket: Bracket) -> int | None:
    """Return the size with the padded length that passed at the next longer length: it needs no more memory."""
    anchor = bracket.anchor
    longer = [
        other
        for other in known.sizes
        if other.length > anchor.length and anchor.is_within(other)
    ]
    for other in sorted(longer):
        passed = known.bracket(other).passed
        if passed:
            size = int(passed * other.length / anchor.length)
            return max(1, min(size, bracket.cap))
    return None


# Sizes that differ by this factor take different memory or time.
_VERY_DIFFERENT = 8
_WORLDS_APART = 64
# On the CPU, equal batches differ by about this; this many times more examples would add more, whatever the model.
_HEAP_BYTES = 1 << 20

Refine = Callable[[Knowledge], "Anchor | None"]
"""Knowledge → where to measure next, or None if nothing more is worth it."""


@dataclass(frozen=True, slots=True)
class NextTrial:
    """The shape to try next; if `fresh`, in a new worker, where a failure is believed."""

    shape: BatchShape
    fresh: bool = False


class FrontierSearch:
    """Finds the largest batch size that fits: at lengths that span the data, then where `refine` says."""

    def __init__(
        self,
        lengths: Lengths,
        settings: ProbeSettings,
        limit_bytes: int,
        *,
        refine: Refine | None = None,
    ) -> None:
        rungs = ladder(
            settings.tolerance,
            min(lengths.count, settings.max_batch_size or lengths.count),
        )
        self.task = SearchTask(lengths, settings, limit_bytes, rungs)
        self._lengths = lengths
        self._num_lengths = min(settings.num_lengths, lengths.histogram.lengths.size)
        self._refine = refine
        self._basis: tuple[tuple[Trial, ...], tuple[Trial, ...]] | None = None
        self._latest = Knowledge(self.task, ())

    def known(self, trials: Sequence[Trial]) -> Knowledge:
        """Return the conclusions from the trials.

        Those from the same trials are kept: between two trials the search and its progress ask for them several times.
        """
        basis = (tuple(trials), tuple(self.task.steps))
        if self._basis != basis:
            self._latest = Knowledge(self.task, basis[0])
            self._basis = basis
        return self._latest

    def propose(self, trials: Sequence[Trial]) -> NextTrial | None:
        """Return what to try next, or None if all is known.

        Raises NothingFits, TooLong, IgnoresShape or another WorkloadError if the search can't go on.
        """
        known = self.known(trials)
        longest = known.anchor(self._lengths.longest)
        if longest.shape(1) in known.failures:
            return longest_that_fits(
                known,
                self._lengths,
                lambda length: known.anchor(length).shape(1),
                known.settings.workload,
            )
        if known.bracket(longest).passed == self._lengths.count:
            equal = self.equal_batches(known)
            if equal is not None:
                raise equal
        order = self._order(known)
        for anchor in order:
            wanted = self._at(known, anchor)
            if wanted is not None:
                return wanted
        if self._refine is None or order == [longest]:
            return None
        added = self._refine(known)
        if added is None:
            return None
        return self._at(known, added)

    def _at(self, known: Knowledge, anchor: Anchor) -> NextTrial | None:
        if known.settings.failures_are_dear and known.failures_left(anchor) < 1:
            return None
        for shape in map(anchor.shape, known.sizes.get(anchor, ())):
            if known.needs_retry(shape):
                return NextTrial(shape, fresh=True)
        batch_size = next_batch_size(known, anchor)
        # A shape that was tried shows nothing new, whatever memory did since: the search must not go in circles.
        if batch_size is None or anchor.shape(batch_size) in known.of_shape:
            return None
        return NextTrial(anchor.shape(batch_size))

    def equal_batches(self, known: Knowledge) -> IgnoresShape | None:
        """Return an error if the smallest and the largest batch of the longest example take the same; None if not.

        Memory may have a floor, and times a constant part: only the largest batch that the data can fill is proof that
        the shape is ignored.
        """
        longest = known.anchor(self._lengths.longest)
        peaks = known.bracket(longest).peaks
        if len(peaks) < 2:
            return None
        smallest = longest.shape(peaks[0][0])
        largest = longest.shape(peaks[-1][0])
        ratio = largest.batch_size / smallest.batch_size
        if not are_alike(known, (smallest, largest), ratio):
            return None
        equal = [known.passed_trial(shape) for shape in (smallest, largest)]
        return IgnoresShape(self._lengths, known.settings.workload, equal)

    # Results

    def frontier(
        self,
        trials: Sequence[Trial],
        confirmed: Collection[BatchShape] | None = None,
        *,
        joint: bool = False,
        unfinished: bool = False,
    ) -> list[FrontierPoint]:
        """Return the closed lengths, in ascending order, each with the longest target at or below it.

        With `confirmed`, only sizes count that one of these batches contains. If `joint`, return
        the pairs of a length and a shorter target instead. If the search is `unfinished`, lengths
        at which a larger size may fit count, too.
        """
        known = self.known(trials)
        points = []
        for anchor in sorted(self._order(known)):
            bracket = known.bracket(anchor)
            closed_by = known.closed_by(bracket)
            if closed_by is None and unfinished:
                closed_by = "time"
            elif closed_by is None and confirmed is not None:
                closed_by = bracket.failed_by or "memory"
            size = min(known.table_size(anchor), bracket.cap)
            if confirmed is not None:
                size = min(
                    size, int(Shapes(confirmed).largest_beyond(*anchor.arrays)[0])
                )
            if closed_by is not None and size < bracket.proven:
                closed_by = "memory"  # tables or turns have shown that
            is_joint = anchor != known.anchor(anchor.length)
            if closed_by is None or size == 0 or is_joint != joint:
                continue
            points.append(
                FrontierPoint(
                    length=anchor.length,
                    target_length=anchor.target_length,
                    batch_size=size,
                    closed_by=closed_by,
                    oom_batch_size=bracket.failed
                    if bracket.failed_by == "oom"
                    else None,
                    step_seconds=known.median_seconds(anchor.shape(size)),
                    peak_bytes=known.peaks.highest(anchor.shape(size)),
                    trial=known.proof(anchor.shape(size)),
                )
            )
        return points

    def does_not_fit(self, trials: Sequence[Trial]) -> bool:
        """Return whether one of the longest examples alone failed."""
        known = self.known(trials)
        return known.anchor(self._lengths.longest).shape(1) in known.failures

    def progress(self, trials: Sequence[Trial]) -> tuple[int, int]:
        """Return how many lengths are closed and how many there will be; or tried, for the longest that fits."""
        known = self.known(trials)
        if self.does_not_fit(trials):
            tried = sum(anchor.shape(1) in known.of_shape for anchor in known.anchors)
            return tried, max(
                tried, 2 + (self._lengths.histogram.lengths.size - 2).bit_length()
            )
        order = self._order(known)
        closed = sum(
            known.closed_by(known.bracket(anchor)) is not None for anchor in order
        )
        return closed, max(len(order), self._num_lengths)

    # Which lengths

    def _order(self, known: Knowledge) -> list[Anchor]:
        """Return where to probe, in order: the longest, the shortest, from the longer down, then what was added.

        Until the limit of the longest is known it is alone: the others are chosen by it.
        """
        longest = self._lengths.longest
        shortest = self._lengths.shortest
        first = known.anchor(longest)
        if longest == shortest:
            return [first]
        cap = known.cap(first)
        chosen_from = _first_failure(known.trials, longest)
        if chosen_from is None and first.shape(cap) in known.passed:
            chosen_from = cap
        if chosen_from is None:
            return [first]
        between = sorted(
            set(self._lengths_between(chosen_from)) - {longest, shortest}, reverse=True
        )
        spanning = [first, *(known.anchor(length) for length in (shortest, *between))]
        return [*spanning, *sorted(set(known.anchors) - set(spanning), reverse=True)]

    def _lengths_between(self, longest_batch_size: int) -> list[float]:
        """Return lengths of the data to probe between the shortest and the longest.

        They are spread half by the logarithm of the length, half by the data's total length. The lowest is where the
        data can just fill what memory allows: below, no batch can reach the limit.
        """
        histogram = self._lengths.histogram
        lengths = histogram.lengths
        wanted = self._num_lengths - 2
        if wanted < 1:
            return []
        filled = np.flatnonzero(
            histogram.cumulative * lengths >= longest_batch_size * lengths[-1]
        )
        first = min(
            max(1, int(filled[0]) if filled.size else 1), lengths.size - 1 - wanted
        )
        logs = np.log(lengths[first:] / lengths[first]) / np.log(
            lengths[-1] / lengths[first]
        )
        totals = histogram.cumulative_total[first:] - histogram.cumulative_total[first]
        marks = np.linspace(0, 1, wanted + 1)[:-1]
        indices = first + np.searchsorted(
            (logs + totals / totals[-1]) / 2, marks, side="left"
        )
        # Marks may fall on the same length: move the later ones up to the next free one, leaving room for the rest.
        chosen = [first - 1]
        for number, index in enumerate(indices.tolist()):
            chosen.append(
                min(max(index, chosen[-1] + 1), lengths.size - 1 - (wanted - number))
            )
        return [float(lengths[index]) for index in chosen[1:]]


def _first_failure(trials: Sequence[Trial], longest: float) -> int | None:
    """Return the first batch size that failed at the longest length: later trials must not change what it decides."""
    faults: set[int] = set()
    for trial in trials:
        if (
            trial.length != longest
            or trial.outcome in ("ok", "error")
            or trial.confirmation
        ):
            continue
        if trial.outcome == "oom" or trial.batch_size in faults:
            return trial.batch_size
        faults.add(trial.batch_size)
    return None


def longest_that_fits(
    known: Outcomes,
    lengths: Lengths,
    shape_of: Callable[[float], BatchShape],
    workload: str,
) -> NextTrial:
    """Bisect over the distinct lengths, one example at a time, for the longest that fits; raise what it shows.

    `shape_of` maps a length to the batch of one such example. Raises TooLong, NothingFits or WorkloadError.
    """
    limit_bytes = known.peaks.limit_bytes
    distinct = lengths.histogram.lengths
    # The shortest is tried second: if even that fails, no other needs a try.
    passed = -1
    failed = distinct.size
    index = distinct.size - 1
    while failed - passed > 1:
        shape = shape_of(float(distinct[index]))
        if known.needs_retry(shape):
            return NextTrial(shape, fresh=True)
        failure = known.failures.get(shape)
        if failure is None and shape not in known.passed:
            return NextTrial(shape)
        if failure is None:
            passed = index
        else:
            trial = failure
            failed = index
            if trial.outcome != "oom":
                raise single_fails(workload, trial)
        index = (
            0 if failed == distinct.size - 1 and passed < 0 else (passed + failed) // 2
        )
    if passed >= 0:
        raise TooLong(lengths, workload, limit_bytes, trial, float(distinct[passed]))
    if message_verdict(trial.error or "") == "disguised":
        raise single_fails(workload, trial)
    raise NothingFits(lengths, workload, limit_bytes, trial)


def are_alike(
    known: Outcomes, shapes: tuple[BatchShape, BatchShape], ratio: float
) -> bool:
    """Return whether a small and a large shape, of sizes in this ratio, take the same memory and time.

    Both must be the same: the peaks to within the margin, or to what a heap varies by, the times to within the cube
    root of the ratio, as a busy machine scatters them. The smallest model takes more than that for this many examples.
    """
    if ratio < _VERY_DIFFERENT or not known.passed.issuperset(shapes):
        return False
    low, high = map(known.peaks.highest, shapes)
    seconds, seconds_of_largest = map(known.median_seconds, shapes)
    if None in (low, high) or seconds is None or seconds_of_largest is None:
        return False
    if seconds_of_largest > seconds * ratio ** (1 / 3):
        return False
    varies_by = _HEAP_BYTES
    if ratio >= _WORLDS_APART:
        varies_by *= 4
    return abs((high or 0) - (low or 0)) <= max(varies_by, known.peaks.margin.bytes)
