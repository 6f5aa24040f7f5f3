"""How sentences compare what epochs cost, whatever makes their batches."""

from __future__ import annotations

from collections.abc import Sequence

from batchtune.results import Costed
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


def advantage(row: Costed, name: str, other: Costed, *, equal: bool) -> str:
    """Say how a row compares with another, `: 1.34 times faster than NAME`; equal: they may cost the same."""
    ours, theirs = row.estimated_epoch_seconds, other.estimated_epoch_seconds
    if ours is not None and theirs:
        faster = speed(ours, theirs)
        also = ", but the estimates may be off by as much" if equal and faster != AS_FAST else ""
        return f": {faster} {name}{also}"
    return f": {fewer(row.batches, other.batches)} than with {name}" if other.batches else ""


def savings(
    row: Costed, others: Sequence[tuple[str, Costed]], *, ranks: int, current: tuple[str, str | None], what: str
) -> list[str]:
    """Say what an epoch needs, and how much less that is than with the others.

    Args:
        row: The recommended one.
        others: Each with its name.
        ranks: Number of ranks whose batches are counted.
        current: The name of the user's own config among the others, and where it was read, if it was in a file.
        what: What was compared, such as `tables`.
    """
    name_of_current, source = current
    named = {name_of_current: f"{name_of_current} ({source})"} if source and source != "--current" else {}
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
