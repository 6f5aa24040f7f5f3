"""Chooses one row of a sweep, and says why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchtune.results import Baseline, Row
from batchtune.units import format_number, format_seconds

TOLERANCE = 0.01
"""Rows within this part of the best are as good as the best: then fewer buckets decide."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The row to use.

    Attributes:
        index: Its position among the rows, or None where no row beats the baseline.
        reason: Why, in a sentence without a full stop.
    """

    index: int | None
    reason: str


def recommend(
    rows: Sequence[Row], baselines: Sequence[Baseline], *, min_randomness: float | None = None
) -> Recommendation:
    """Recommends the row with the fewest buckets among the best.

    It must need fewer batches than the fixed batch size, have only batch sizes that are proven (unless none such has),
    be as random as asked for, and lie within 1% of the lowest estimated time (number of batches where any time is
    unknown) of all rows that do and are. Among rows with as many buckets the lower time or number decides, then the
    sizing `length`, which every framework can express, then the order.

    Args:
        rows: The rows of a sweep, at least one.
        baselines: Its baselines, at least one.
        min_randomness: The least 1 / effective buckets, or None.
    """
    fixed = min(baselines, key=lambda baseline: baseline.batches)
    fewer = [index for index, row in enumerate(rows) if row.batches < fixed.batches]
    # Sizes that were not run are taken only where there are no others.
    if proven := [index for index in fewer if not rows[index].unproven]:
        fewer = proven
    better = [index for index in fewer if _is_random(rows[index], min_randomness or 0.0)]
    if not better:
        return Recommendation(None, _why_none(rows, [rows[index] for index in fewer], fixed, min_randomness))
    timed = all(row.estimated_epoch_seconds is not None for row in rows)
    costs = {index: _cost(rows[index], timed) for index in better}
    # Among equals the one with fewer buckets is the best: nothing is then left to trade.
    best = min(better, key=lambda index: (costs[index], _preference(rows[index]), index))
    near = [index for index in better if costs[index] <= costs[best] * (1 + TOLERANCE)]
    chosen = min(near, key=lambda index: (_buckets(rows[index]), costs[index], rows[index].sizing != "length", index))
    barred = [row for index, row in enumerate(rows) if index not in costs and _cost(row, timed) < costs[best]]
    others = _faster_baselines(rows[chosen], baselines) + _why_barred(barred, fixed, timed, min_randomness)
    reason = _reason(rows[chosen], rows[best], fixed, timed, others, barred=bool(barred))
    return Recommendation(chosen, reason + ("" if proven else _nothing_proven(rows)))


def _why_none(rows: Sequence[Row], fewer: Sequence[Row], fixed: Baseline, min_randomness: float | None) -> str:
    if fewer:
        most = max(fewer, key=lambda row: 1 / row.effective_buckets)
        return (
            f"no table that needs fewer batches than a fixed batch size is as random as --min-randomness "
            f"{min_randomness:g} asks; the most random is {_name(most)}, {1 / most.effective_buckets:.2g}"
        )
    fewest = min(rows, key=lambda row: row.batches)
    return (
        f"no table needs fewer batches than a fixed batch size of {format_number(fixed.batch_size)}, which needs "
        f"{format_number(fixed.batches)}; {_name(fewest)} needs {format_number(fewest.batches)}"
    )


def _is_random(row: Row, min_randomness: float) -> bool:
    # A billionth less is as random: a single bucket's 1 may come with rounding errors.
    return 1 / row.effective_buckets >= min_randomness * (1 - 1e-9)


def _buckets(row: Row) -> int:
    return len(row.boundaries)


def _preference(row: Row) -> tuple[int, bool]:
    return _buckets(row), row.sizing != "length"


def _cost(row: Row, timed: bool) -> float:
    if timed and row.estimated_epoch_seconds is not None:
        return row.estimated_epoch_seconds
    return float(row.batches)


def _name(row: Row) -> str:
    buckets = f"{_buckets(row)} bucket{'' if _buckets(row) == 1 else 's'}"
    return f"{row.strategy} with {buckets}" + (" sized by the frontier" if row.sizing == "frontier" else "")


def _nothing_proven(rows: Sequence[Row]) -> str:
    """What to know where a table is recommended whose sizes were not all run."""
    which = "" if all(row.unproven for row in rows) else " that needs fewer batches"
    return f"; no table{which} has only sizes that were run"


def _why_barred(barred: Sequence[Row], fixed: Baseline, timed: bool, min_randomness: float | None) -> str:
    """What beats the recommended row, but may not be recommended; empty where nothing does."""
    if not barred:
        return ""
    least = min(barred, key=lambda row: _cost(row, timed))
    cost = format_seconds(_cost(least, timed)) if timed else f"{format_number(least.batches)} batches"
    if least.batches >= fixed.batches:
        what = "needs more batches than that"
    elif min_randomness is not None and not _is_random(least, min_randomness):
        what = "is less random than asked for"
    else:
        what = "has batch sizes that were not run"
    return f"; {_name(least)} would take {cost}, but {what}"


def _faster_baselines(chosen: Row, baselines: Sequence[Baseline]) -> str:
    """Where the fixed batch size takes less time than the recommended row; empty where it does not."""
    ours = chosen.estimated_epoch_seconds
    times = [(baseline.estimated_epoch_seconds, _HOW_FIXED[baseline.name]) for baseline in baselines]
    faster = [
        f"{format_seconds(time)} {how}" for time, how in times if time is not None and ours is not None and time < ours
    ]
    return f", but would take less time: an estimated {' and '.join(faster)}" if faster else ""


_HOW_FIXED = {
    "fixed-random": "with shuffled examples",
    "fixed-sorted": "with examples sorted by length, where the same ones always share a batch",
}


def _reason(chosen: Row, best: Row, fixed: Baseline, timed: bool, others: str, *, barred: bool) -> str:
    if timed and chosen.estimated_epoch_seconds is not None:
        seconds = format_seconds(chosen.estimated_epoch_seconds)
        needs = f"takes an estimated {seconds} an epoch ({format_number(chosen.batches)} batches)"
        least = format_seconds(_cost(best, timed))
    else:
        needs, least = f"needs {format_number(chosen.batches)} batches", f"{format_number(best.batches)}"
    start = f"{_name(chosen)} {needs}"
    against = f"a fixed batch size of {fixed.batch_size} needs {format_number(fixed.batches)}{others}"
    if chosen is best:
        which = "no other that may be recommended" if barred else "no table swept"
        return f"{start}, and {which} {'takes less time' if timed else 'needs fewer'}; {against}"
    above = _cost(chosen, timed) / _cost(best, timed) - 1
    how_far = (
        f"{above:.1%} above the best{' that may be recommended' if barred else ''}" if above else "as good as the best"
    )
    keep = ", and fewer buckets keep more randomness" if _buckets(chosen) < _buckets(best) else ""
    return f"{start}, {how_far} ({least}, {_name(best)}){keep}; {against}"
