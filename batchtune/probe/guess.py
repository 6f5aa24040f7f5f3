"""Where at one length to try next: where the model of the memory says the limit is, within bisection's bounds."""

from __future__ import annotations

import math

from batchtune.probe.dominance import Anchor
from batchtune.probe.findings import Findings
from batchtune.probe.ladder import Ladder
from batchtune.probe.needs import Bracket

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
# What an example needs falls no faster than the square of its length, but for this factor: more is no model's word.
_STEEPEST = 1.1
# Peaks that differ by no more than this part are the same.
_SAME = 1e-4


def next_batch_size(findings: Findings, ladder: Ladder, anchor: Anchor) -> int | None:
    """Return the next batch size to try; None where the length and target are closed.

    A length takes at most 3 + log2(cap) batch sizes, and one more at the ends beyond what leaves no margin, wherever
    the model leads: a guess that would leave more to bisect than the trials that are left can tell apart is moved
    until it does not.
    """
    bracket = findings.bracket(anchor)
    if findings.closed_by(bracket) is not None:
        return None
    if bracket.tight is not None and bracket.tight - bracket.passed <= bracket.step(findings.settings.tolerance):
        return _to_a_failure(findings, bracket)
    guess = _within_reach(findings, bracket, _guess(findings, ladder, bracket))
    left = 3 + int(math.log2(bracket.cap)) - bracket.tried
    if bracket.failed is None and not ladder.has(bracket.cap):
        left -= 1  # for the cap itself, which ends the length by a trial of its own
    guess = ladder.within(guess, bracket.passed, _high(findings, bracket), left)
    return max(bracket.passed + 1, min(guess, bracket.beyond - 1))


def _high(findings: Findings, bracket: Bracket) -> int:
    """Return the smallest batch size that is out of the question, by what failed at shorter lengths too."""
    if bracket.hardly is None or bracket.hardly <= bracket.passed + 1 or findings.is_end(bracket.anchor):
        return bracket.beyond
    return min(bracket.beyond, bracket.hardly)


def _to_a_failure(findings: Findings, bracket: Bracket) -> int:
    """Go beyond what ran without a margin: at the ends the search goes on until a batch fails."""
    peak, need = bracket.peaks[-1][1], findings.need(bracket)
    flat = len(bracket.peaks) > 1 and math.isclose(bracket.peaks[-2][1], peak, rel_tol=_SAME)
    room = bracket.ran if flat or not need else math.ceil((findings.task.limit_bytes - peak) / need)
    size = bracket.ran + max(bracket.step(findings.settings.tolerance), room)
    return max(bracket.ran + 1, min(size, bracket.cap, (bracket.failed or bracket.cap + 1) - 1))


def _within_reach(findings: Findings, bracket: Bracket, guess: int) -> int:
    """Return the guess, off what other lengths have shown already, and one step at least off what this one has."""
    if bracket.hardly is not None and bracket.passed < bracket.hardly - 1:
        guess = min(guess, bracket.hardly - 1)
    if bracket.surely < bracket.beyond:
        guess = max(guess, bracket.surely)
    step = bracket.step(findings.settings.tolerance)
    guess = max(guess, bracket.passed + step if bracket.passed else 1)
    if bracket.failed is not None:
        # Where nothing passed yet the guess was wrong: step back further each time.
        back = step if bracket.passed else step << max(0, bracket.failures - 1)
        guess = min(guess, bracket.failed - back)
    return max(bracket.passed + 1, min(guess, bracket.beyond - 1))


def _guess(findings: Findings, ladder: Ladder, bracket: Bracket) -> int:
    if bracket.misled >= _MISLED and bracket.passed and not bracket.given_up:
        return _middle(ladder, bracket)
    if bracket.failed is not None and not bracket.ran and bracket.surely and not bracket.given_up:
        return bracket.surely
    if (multiple := findings.next_multiple(bracket)) is not None:
        return multiple
    quantum = findings.quantum(max(bracket.passed, bracket.surely))
    if quantum == 1 and (beyond_plateau := _beyond_plateau(ladder, bracket)) is not None:
        return beyond_plateau
    guess = _by_peaks(findings, bracket) if findings.knows_peaks else _by_limits(findings, bracket)
    if guess is not None and quantum > 1:
        guess = max(guess - guess % quantum, min(guess, bracket.passed + 1))
    if bracket.failed is None:
        return guess if guess is not None else max(1, bracket.passed * 2)
    # A guess at or beyond what has failed is refuted.
    refuted = guess is not None and bracket.passed > 0 and guess >= bracket.failed
    if refuted and guess is not None and bracket.failed < _LEAP * guess and bracket.failures == 1:
        # Where memory leaps, it does so just above what passed as often as not.
        return max(bracket.passed, bracket.surely) + max(1, bracket.step(findings.settings.tolerance))
    return _middle(ladder, bracket) if guess is None or refuted else guess


def _beyond_plateau(ladder: Ladder, bracket: Bracket) -> int | None:
    """Return where to go from two batch sizes that took the same; None where there are none at the limit.

    Where memory grows in leaps, one example more or less seldom tells anything.
    """
    if len(bracket.peaks) < 2 or not math.isclose(bracket.peaks[-1][1], bracket.peaks[-2][1], rel_tol=_SAME):
        return None
    (smaller, _), (larger, _) = bracket.peaks[-2:]
    if bracket.tight is not None:
        return _middle(ladder, bracket)
    return larger + 2 * (larger - smaller) if bracket.failed is None else math.isqrt(larger * bracket.failed)


def _middle(ladder: Ladder, bracket: Bracket) -> int:
    """Return the middle of what other lengths leave open, else of what this one does."""
    low, high = bracket.passed, bracket.beyond
    if low < bracket.surely < high:
        low = bracket.surely
    if bracket.hardly is not None and low < bracket.hardly < high:
        high = bracket.hardly
    rungs = ladder.between(low, high) or ladder.between(bracket.passed, bracket.beyond)
    return ladder.rung(rungs[len(rungs) // 2]) if rungs else (bracket.passed + bracket.beyond) // 2


def _by_peaks(findings: Findings, bracket: Bracket) -> int | None:
    """Return the batch size at the limit by the peaks so far; None where nothing is known of what an example needs."""
    need = findings.need(bracket)
    if need is None or need <= 0:
        return 1 if bracket.passed == 0 else None
    room, model = findings.room_bytes, findings.model
    if not bracket.peaks:
        assert model is not None
        # A little below where the model puts the limit: a success closes the length, a failure does not.
        margin = max(min(model.relative_error, 0.5), findings.settings.tolerance / 2)
        size = max(1, min(int((room - model.constant) / need * (1 - margin)), bracket.cap))
        safe = _safe(findings, bracket)
        if safe is not None and (findings.telling_lengths < 2 or bracket.failures >= _MISLED - 1):
            size = min(size, safe)
        elif safe is not None and bracket.surely and size * bracket.surely > _STEEPEST * safe**2:
            size = safe
        if findings.is_misfit and bracket.surely and size <= _WORTH_A_TRIAL * bracket.surely:
            return bracket.surely
        return size
    largest, peak = bracket.peaks[-1]
    size = int(min(largest + (room - peak) / need, 2.0 * bracket.cap))
    rest = model.constant if model else findings.rest_bytes
    used = peak - (bracket.peaks[0][1] if rest is None else rest)
    if used < _KNOWN_SHARE * (room - (peak - used)):
        size = min(size, largest * _GROWTH)
    return size


def _safe(findings: Findings, bracket: Bracket) -> int | None:
    """As much padded length as passed at the next longer length: an example needs no more for each unit of length."""
    here = bracket.anchor
    longer = [
        other
        for other in findings.brackets
        if other.passed and other.anchor.length > here.length and here.is_within(other.anchor)
    ]
    if not longer:
        return None
    nearest = min(longer, key=lambda other: other.anchor)
    return max(1, min(int(nearest.passed * nearest.anchor.length / here.length), bracket.cap))


def _by_limits(findings: Findings, bracket: Bracket) -> int | None:
    """The batch size at the limit by those that were found at other lengths, then away from it in growing steps."""
    model = findings.inverse_model
    step = bracket.step(findings.settings.tolerance)
    if model is None or (bracket.passed and bracket.failed is not None):
        return None
    if bracket.tried == 0:
        share = model.constant + model.per_example(bracket.anchor.length, bracket.anchor.target_length or 0.0)
        return max(1, min(int(1 / share), bracket.cap)) if share > 0 else None
    if bracket.failed is None:
        return bracket.passed + (step << (bracket.tried - 1))
    return bracket.failed - (step << (bracket.failures - 1))
