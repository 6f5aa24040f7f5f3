"""How sentences compare what epochs cost, whatever makes their batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from batchtune.reports.rows import CURRENT
from batchtune.results import Baseline, Costed, Row, StreamRow, StreamSweep, Sweep, cost_of
from batchtune.units import format_number, format_percent, format_ratio, format_seconds

AS_FAST = "as fast as"


def joined(start: str, joint: str, others: Sequence[str]) -> str:
    """Return a sentence; the others follow the joint."""
    *first, last = others or [""]
    listed = f"{', '.join(first)} and {last}" if first else last
    return f"{start}{joint if others else ''}{listed}."


def batches_words(count: int) -> str:
    """Return `1 batch`, `634 batches`."""
    return "1 batch" if count == 1 else f"{format_number(count)} batches"


def fewer(ours: int, theirs: int) -> str:
    """Return `38.0% fewer batches`."""
    if ours == theirs:
        return "no fewer batches"
    return f"{format_percent(abs(1 - ours / theirs))} {'fewer' if ours < theirs else 'more'} batches"


def speed(our_seconds: float, their_seconds: float) -> str:
    """Return `1.34 times faster than`."""
    if our_seconds == 0 or format_ratio(their_seconds / our_seconds) == "1.00":
        return AS_FAST
    if our_seconds < their_seconds:
        return f"{format_ratio(their_seconds / our_seconds)} times faster than"
    return f"{format_ratio(our_seconds / their_seconds)} times slower than"


def advantage(row: Row | StreamRow, others: Sequence[tuple[str, Costed]]) -> str:
    """Say how a row compares with the first of the others: `: 1.34 times faster than NAME`; empty without any."""
    if not others:
        return ""
    (name, other), *_ = others
    ours, theirs = row.estimated_epoch_seconds, other.estimated_epoch_seconds
    if ours is not None and theirs:
        faster, also = speed(ours, theirs), ""
        if faster != AS_FAST and type(other) is type(row) and row.equal_to_best and other.equal_to_best:
            also = ", but the estimates may be off by as much"
        return f": {faster} {name}{also}"
    return f": {fewer(row.batches, other.batches)} than with {name}" if other.batches else ""


def is_better(one: Costed, other: Costed) -> bool:
    """Return whether one costs less, in time where both are known, else in batches."""
    timed = one.estimated_epoch_seconds is not None and other.estimated_epoch_seconds is not None
    return (cost_of(one, timed=timed) or 0.0) < (cost_of(other, timed=timed) or 0.0)


def padding(row: Row | StreamRow, others: Sequence[tuple[str, Row | StreamRow | Baseline]]) -> str:
    """Say how much is padding, and how much with the others."""
    against = [f"{format_percent(other.padding_ratio)} with {name}" for name, other in others]
    return joined(f"Padding is {format_percent(row.padding_ratio)} of all cells", ", against ", against)


def time_error(row: Row | StreamRow, besides: str = "") -> Iterator[str]:
    """Say how exactly the time is known, if it is; `besides` ends the sentence."""
    if row.estimated_epoch_seconds and row.estimated_epoch_error_seconds is not None:
        error = format_percent(2 * row.estimated_epoch_error_seconds / row.estimated_epoch_seconds)
        yield f"The measured steps give the time to within {error} (two standard errors){besides}."


def savings(
    sweep: Sweep | StreamSweep, row: Row | StreamRow, others: Sequence[tuple[str, Costed]], what: str
) -> list[str]:
    """Say what an epoch needs with the recommended row, and how much less that is than with the others, by name.

    `what` was compared, such as `tables`.
    """
    source, ranks = (sweep.current_settings or {}).get("source"), sweep.world_size
    named = {CURRENT: f"{CURRENT} ({source})"} if source and source != "--current" else {}
    needs = [f"{named.get(name, name)} needs {format_number(other.batches)}" for name, other in others]
    seconds = row.estimated_epoch_seconds
    if seconds is None:
        cost = f"Step times are not known, so {what} are compared by batches"
        saved = [f"{fewer(row.batches, other.batches)} than with {name}" for name, other in others if other.batches]
    else:
        cost = f"One epoch is estimated at {format_seconds(seconds)}"
        times = [(name, other.estimated_epoch_seconds) for name, other in others]
        saved = [f"{speed(seconds, time)} {name} ({format_seconds(time)})" for name, time in times if time]
    on_ranks = f" on {format_number(ranks)} ranks" if ranks > 1 else ""
    return [joined(f"An epoch{on_ranks} needs {batches_words(row.batches)}", "; ", needs), joined(cost, ": ", saved)]
