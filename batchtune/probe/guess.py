"""Chooses the batch size to try next at one length: where the model puts the limit, within bisection's bounds."""

from __future__ import annotations

import math
from bisect import bisect_right

from batchtune.probe.bounds import Anchor, Bracket, between, step_at
from batchtune.probe.knowledge import Knowledge

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

    A length takes at most 4 + log2(cap) batch sizes: a guess that would leave too much for the remaining trials to
    bisect is moved. Where failures are dear, at most 2 + log2(cap) fail instead, and the sizes go up by measured peaks.
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
        return bracket.implied_low
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
    return _middle(known, bracket)


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
            return _away_from_the_last(bracket)
        return as_longer or 1
    if bracket.peaks:
        return _beyond_last_peak(known, bracket, need)
    assert fit.model is not None
    # A little below the model's limit: a success closes the length, a failure does not.
    error = min(fit.model.relative_error, 0.5)
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
    room = fit.room_bytes
    # Half a step below the limit: peaks scatter, and a size that leaves too little is a trial lost.
    more = (room - peak) / need - (bracket.step - 1) / 2
    size = int(min(largest + more, 2.0 * bracket.cap))
    rest = fit.model.constant if fit.model else known.peaks.rest_bytes
    used = peak - (bracket.peaks[0][1] if rest is None else rest)
    # The slope of a batch that uses less is unknown: allocators round, and its peak is mostly constant.
    if used < 0.1 * (room - (peak - used)):
        return min(size, largest * 8)
    return size


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
