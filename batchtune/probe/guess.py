"""Says which batch size to try next at one length: where the model puts the limit, within bisection's bounds."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from batchtune.probe.findings import Bracket, Findings, step_at
from batchtune.probe.outcomes import Anchor

# A growth beyond this factor is not extrapolated while the batch has used too little of the memory for its slope
# to be known: allocators round, and the peak of a small batch is mostly constant.
_GROWTH = 8
_KNOWN_SHARE = 0.1
# So many failures at one length show that the model does not hold there.
_MISLED = 3
# Where the model is a misfit, a length begins with a batch that is proven already: its own peak then says where the
# limit is. But not where the model puts that so many times as high.
_WORTH_A_TRIAL = 2.5
# A batch that fails this far below where a length's own peaks put the limit: memory leaps.
_LEAP = 0.97
# The need of an example falls no faster than the square of its length, but for this factor: a model must not say more.
_STEEPEST = 1.1
# Peaks that differ by no more than this part are the same.
_SAME = 1e-4


def ladder(tolerance: float, top: int) -> Sequence[int]:
    """Return batch sizes from 1 to `top`, each about `tolerance` (as a share) above the one before, one at least.

    Between two neighbours nothing needs to be tried, so bisection over n rungs takes n.bit_length() trials at most.
    """
    if tolerance * top < 2:
        return range(1, top + 1)
    rungs = [1]
    while (rung := rungs[-1] + step_at(rungs[-1], tolerance)) <= top:
        rungs.append(rung)
    return rungs


def between(rungs: Sequence[int], low: int, high: int) -> Sequence[int]:
    """Return the rungs strictly between two batch sizes."""
    return rungs[bisect_right(rungs, low) : bisect_left(rungs, high)]


def within(rungs: Sequence[int], guess: int, trials: int) -> int:
    """Return the batch size next to `guess` after which, whatever its outcome, `trials - 1` can bisect the rest.

    If there is none, the middle rung. `rungs`, and the guess, lie between what passed (or 0) and what failed.
    """
    if not rungs:
        return guess
    most = (1 << max(0, trials - 1)) - 1  # rungs that the trials after this one can tell apart
    if len(rungs) > 2 * most + 1:
        return rungs[len(rungs) // 2]
    # Off the rungs a guess leaves as many on one side as the rung below it, on the other one as that above.
    return min(max(guess, rungs[max(0, len(rungs) - 1 - most)]), rungs[min(len(rungs) - 1, most)])


def next_batch_size(findings: Findings, anchor: Anchor) -> int | None:
    """Return the next batch size to try; None if the length and target are closed.

    A length takes at most 3 + log2(cap) batch sizes, and one more at the ends beyond what leaves no margin: a guess
    that would leave more to bisect than the remaining trials can tell apart is moved.
    """
    bracket = findings.bracket(anchor)
    if findings.closed_by(bracket) is not None:
        return None
    if bracket.tight is not None and bracket.tight - bracket.passed <= bracket.step:
        return _to_a_failure(findings, bracket)
    guess = _within_reach(bracket, _guess(findings, bracket))
    left = 3 + int(math.log2(bracket.cap)) - bracket.tried
    rungs = findings.task.rungs
    if bracket.failed is None and rungs[bisect_right(rungs, bracket.cap) - 1] != bracket.cap:
        left -= 1  # for the cap itself, which ends the length by a trial of its own
    high = bracket.beyond
    if bracket.hardly is not None and bracket.hardly > bracket.passed + 1 and not findings.is_end(anchor):
        high = min(high, bracket.hardly)
    guess = within(between(rungs, bracket.passed, high), guess, left)
    return max(bracket.passed + 1, min(guess, bracket.beyond - 1))


def _to_a_failure(findings: Findings, bracket: Bracket) -> int:
    """Go beyond what ran without a margin: at the ends the search goes on until a batch fails."""
    peak, need = bracket.peaks[-1][1], findings.need(bracket)
    room = bracket.ran if _is_flat(bracket) or not need else math.ceil((findings.task.limit_bytes - peak) / need)
    size = bracket.ran + max(bracket.step, room)
    return max(bracket.ran + 1, min(size, bracket.cap, (bracket.failed or bracket.cap + 1) - 1))


def _within_reach(bracket: Bracket, guess: int) -> int:
    """Return the guess, off what other lengths have shown already, and one step at least off what this one has."""
    if bracket.hardly is not None and bracket.passed < bracket.hardly - 1:
        guess = min(guess, bracket.hardly - 1)
    if bracket.surely < bracket.beyond:
        guess = max(guess, bracket.surely)
    guess = max(guess, bracket.passed + bracket.step if bracket.passed else 1)
    if bracket.failed is not None:
        # If nothing passed yet the guess was wrong: step back further each time.
        back = bracket.step if bracket.passed else bracket.step << max(0, bracket.failures - 1)
        guess = min(guess, bracket.failed - back)
    return max(bracket.passed + 1, min(guess, bracket.beyond - 1))


def _guess(findings: Findings, bracket: Bracket) -> int:
    rungs = findings.task.rungs
    if not bracket.given_up:
        if bracket.misled >= _MISLED and bracket.passed:
            return _middle(rungs, bracket)
        if bracket.failed is not None and not bracket.ran and bracket.surely:
            return bracket.surely
    if (multiple := findings.next_multiple(bracket)) is not None:
        return multiple
    quantum = findings.quantum(bracket.proven)
    if quantum == 1 and _is_flat(bracket):
        # Where memory grows in leaps, one example more or less seldom tells anything.
        (smaller, _), (larger, _) = bracket.peaks[-2:]
        if bracket.tight is not None:
            return _middle(rungs, bracket)
        return larger + 2 * (larger - smaller) if bracket.failed is None else math.isqrt(larger * bracket.failed)
    guess = _by_peaks(findings, bracket) if findings.knows_peaks else _by_limits(findings, bracket)
    if guess is not None and quantum > 1:
        guess = max(guess - guess % quantum, min(guess, bracket.passed + 1))
    if bracket.failed is None:
        return guess if guess is not None else max(1, bracket.passed * 2)
    if guess is None or not bracket.passed or guess < bracket.failed:
        return _middle(rungs, bracket) if guess is None else guess
    # A guess at or beyond what has failed is refuted. Where memory leaps, it does so just above what passed as often
    # as not.
    if bracket.failed < _LEAP * guess and bracket.failures == 1:
        return bracket.proven + bracket.step
    return _middle(rungs, bracket)


def _is_flat(bracket: Bracket) -> bool:
    return len(bracket.peaks) > 1 and math.isclose(bracket.peaks[-2][1], bracket.peaks[-1][1], rel_tol=_SAME)


def _middle(rungs: Sequence[int], bracket: Bracket) -> int:
    low, high = bracket.passed, bracket.beyond
    if low < bracket.surely < high:
        low = bracket.surely
    if bracket.hardly is not None and low < bracket.hardly < high:
        high = bracket.hardly
    open_rungs = between(rungs, low, high) or between(rungs, bracket.passed, bracket.beyond)
    return open_rungs[len(open_rungs) // 2] if open_rungs else (bracket.passed + bracket.beyond) // 2


def _by_peaks(findings: Findings, bracket: Bracket) -> int | None:
    """Return the batch size at the limit by the peaks so far; None if the need of an example is unknown."""
    need = findings.need(bracket)
    if need is None or need <= 0:
        return 1 if bracket.passed == 0 else None
    room, model = findings.room_bytes, findings.model
    if bracket.peaks:
        largest, peak = bracket.peaks[-1]
        size = int(min(largest + (room - peak) / need, 2.0 * bracket.cap))
        rest = model.constant if model else findings.rest_bytes
        used = peak - (bracket.peaks[0][1] if rest is None else rest)
        return min(size, largest * _GROWTH) if used < _KNOWN_SHARE * (room - (peak - used)) else size
    assert model is not None
    # A little below where the model puts the limit: a success closes the length, a failure does not.
    margin = max(min(model.relative_error, 0.5), findings.settings.tolerance / 2)
    size = max(1, min(int((room - model.constant) / need * (1 - margin)), bracket.cap))
    safe = _safe(findings, bracket)
    # It takes two lengths to separate L from L².
    if safe is not None and (len(findings.excesses) < 2 or bracket.failures >= _MISLED - 1):
        size = min(size, safe)
    elif safe is not None and bracket.surely and size * bracket.surely > _STEEPEST * safe**2:
        size = safe
    if findings.is_misfit and bracket.surely and size <= _WORTH_A_TRIAL * bracket.surely:
        return bracket.surely
    return size


def _safe(findings: Findings, bracket: Bracket) -> int | None:
    """As much padded length as passed at the next longer length: an example needs no more for each unit of length."""
    here = bracket.anchor
    others = (other for other in findings.brackets if other.passed and other.anchor.length > here.length)
    longer = [(*other.anchor, other.passed) for other in others if here.is_within(other.anchor)]
    if not longer:
        return None
    length, _, passed = min(longer)
    return max(1, min(int(passed * length / here.length), bracket.cap))


def _by_limits(findings: Findings, bracket: Bracket) -> int | None:
    """The batch size at the limit by those that were found at other lengths, then away from it in growing steps."""
    model = findings.inverse_model
    if model is None or (bracket.passed and bracket.failed is not None):
        return None
    if bracket.tried == 0:
        share = model.constant + model.per_example(bracket.anchor.length, bracket.anchor.target_length or 0.0)
        return max(1, min(int(1 / share), bracket.cap)) if share > 0 else None
    if bracket.failed is None:
        return bracket.passed + (bracket.step << (bracket.tried - 1))
    return bracket.failed - (bracket.step << (bracket.failures - 1))
