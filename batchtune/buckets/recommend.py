"""Recommends one row of a sweep, and says why; compares all of them by speed and randomness."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from batchtune.results import Baseline, LearningRate, Row, epoch_costs, have_times
from batchtune.units import format_number, format_percent, format_seconds

# Among rows within this share of the best fewer buckets decide.
_TOLERANCE = 0.01
_HOW_FIXED = {
    "fixed-random": "with shuffled examples",
    "length-grouped": "with length-grouped batches",
    "fixed-sorted": "with examples sorted by length, where the same ones always share a batch",
}


class Recommendation(NamedTuple):
    """The positions of rows, and why, in a sentence without a full stop.

    Attributes:
        row: The recommended one; None where none can be recommended.
        reason: Why.
        portable: The best row that other samplers can run: a bucket table, or SpeechBrain's own algorithm.
    """

    row: int | None
    reason: str
    portable: int | None


def recommend(
    rows: Sequence[Row],
    baselines: Sequence[Baseline],
    *,
    min_randomness: float | None = None,
    few_shapes: bool = False,
) -> Recommendation:
    """Recommend the best bucket table, or pools that are faster at no less randomness.

    Pools too must need fewer batches than the fixed batch size and have only proven sizes, and cost at least 1% less
    than the table. They must be as random as `min_randomness` asks, or else as the table. Of those within 1% of the
    fastest the most random are taken; none with `few_shapes`, which pools can't promise.
    """
    tables = [index for index, row in enumerate(rows) if row.pool_size is None]
    pools = [index for index, row in enumerate(rows) if row.pool_size is not None]
    fixed = min(baselines, key=lambda baseline: baseline.batches)
    costs = epoch_costs(rows)
    table = None
    reason = f"no pools can be recommended: {_why_no_pools(few_shapes, rows, fixed)}"
    if tables:
        position, reason = _best_table([rows[index] for index in tables], baselines, min_randomness)
        table = None if position is None else tables[position]
    required_randomness = min_randomness
    highest_cost = math.inf
    if table is not None:
        highest_cost = costs[table] * (1 - _TOLERANCE)
        if min_randomness is None:
            required_randomness = rows[table].randomness
    better = [
        index
        for index in pools
        if not few_shapes
        and rows[index].batches < fixed.batches
        and not rows[index].unproven
        and _is_random(rows[index], required_randomness)
        and costs[index] < highest_cost
    ]
    if not better:
        return Recommendation(table, reason, table)
    lowest_cost = min(costs[index] for index in better)
    near = [index for index in better if costs[index] <= lowest_cost * (1 + _TOLERANCE)]
    chosen = min(near, key=lambda index: (rows[index].mates_again, costs[index]))
    row = rows[chosen]
    timed = have_times(rows)
    reason = _needs(row, "take an estimated" if timed else "need", timed=timed)
    if table is not None:
        saved = f"{1 - costs[chosen] / costs[table]:.1%} {'less' if timed else 'fewer'}"
        reason += (
            f", {saved} than the best table ({_shown_cost(rows[table], timed=timed)}, {rows[table].sized_name}), and "
            f"batch mates meet again in {format_percent(row.mates_again)} of cases (with the table "
            f"{format_percent(rows[table].mates_again)})"
        )
    reason += f"; a fixed batch size of {fixed.batch_size} needs {format_number(fixed.batches)}"
    return Recommendation(chosen, reason, table)


def _why_no_pools(few_shapes: bool, rows: Sequence[Row], fixed: Baseline) -> str:
    if few_shapes:
        return "--multiple-of asks for few shapes, which pools can't promise"
    fewer = [row for row in rows if row.batches < fixed.batches]
    if not fewer:
        return f"none needs fewer batches than a fixed batch size of {fixed.batch_size}"
    proven = [row for row in fewer if not row.unproven]
    if not proven:
        return "all that need fewer batches than a fixed batch size have batch sizes that were not run"
    most_random = _most_random(proven)
    return (
        "none is as random as --min-randomness asks; the most random are "
        f"{most_random.sized_name}, with {most_random.randomness:.3g}"
    )


def _most_random(rows: Iterable[Row]) -> Row:
    return min(rows, key=lambda row: row.mates_again)


def _best_table(
    rows: Sequence[Row], baselines: Sequence[Baseline], min_randomness: float | None
) -> tuple[int | None, str]:
    """Return the position of the table with the fewest buckets among the best, and why.

    It must need fewer batches than the fixed batch size, have only proven batch sizes (unless none such has), be as
    random as asked for, and lie within 1% of the lowest estimated time (number of batches if any time is unknown) of
    all such rows. Among rows with as many buckets the lower time or number decides, then the sizing `length`, which
    every framework can express, then the order. None if no row beats the baseline.
    """
    fixed = min(baselines, key=lambda baseline: baseline.batches)
    fewer = [index for index, row in enumerate(rows) if row.batches < fixed.batches]
    if not fewer:
        fewest = min(rows, key=lambda row: row.batches)
        return None, (
            f"no table needs fewer batches than a fixed batch size of {format_number(fixed.batch_size)}, which needs "
            f"{format_number(fixed.batches)}; {fewest.sized_name} needs {format_number(fewest.batches)}"
        )
    # Sizes that were not run are taken only if there are no others.
    proven = [index for index in fewer if not rows[index].unproven]
    allowed = proven or fewer
    better = [index for index in allowed if _is_random(rows[index], min_randomness)]
    if not better:
        most_random = _most_random(rows[index] for index in allowed)
        return None, (
            f"no table that needs fewer batches than a fixed batch size is as random as --min-randomness "
            f"{min_randomness:g} asks; the most random is {most_random.sized_name}, {most_random.randomness:.3g}"
        )
    costs = epoch_costs(rows)

    def by_cost(index: int) -> tuple[float, int, bool, int]:
        # Among equals the one with fewer buckets is the best: nothing is then left to trade.
        return costs[index], len(rows[index].boundaries), rows[index].sizing != "length", index

    def by_buckets(index: int) -> tuple[int, float, bool, int]:
        return len(rows[index].boundaries), costs[index], rows[index].sizing != "length", index

    best = min(better, key=by_cost)
    near = [index for index in better if costs[index] <= costs[best] * (1 + _TOLERANCE)]
    chosen = min(near, key=by_buckets)
    cheapest = min(range(len(rows)), key=costs.__getitem__)
    timed = have_times(rows)
    barred = rows[cheapest] if costs[cheapest] < costs[best] else None
    above = costs[chosen] / costs[best] - 1
    reason = _compared(rows[chosen], rows[best], above, timed=timed, barred=barred is not None)
    reason += f"; a fixed batch size of {fixed.batch_size} needs {format_number(fixed.batches)}"
    reason += _faster_baselines(rows[chosen], baselines)
    if barred is not None:
        unit = "" if timed else " batches"
        reason += f"; {barred.sized_name} would take {_shown_cost(barred, timed=timed)}{unit}, but "
        reason += _why_barred(barred, fixed, min_randomness)
    if not proven:
        which = "" if all(row.unproven for row in rows) else " that needs fewer batches"
        reason += f"; no table{which} has only sizes that were run"
    return chosen, reason


def _faster_baselines(chosen: Row, baselines: Sequence[Baseline]) -> str:
    """Return which fixed batch sizes would take less time, with a comma before; empty if none."""
    seconds = chosen.estimated_epoch_seconds
    if seconds is None:
        return ""
    faster = []
    for baseline in baselines:
        fixed_seconds = baseline.estimated_epoch_seconds
        if fixed_seconds is not None and fixed_seconds < seconds:
            faster.append(f"{format_seconds(fixed_seconds)} {_HOW_FIXED[baseline.name]}")
    if faster:
        return f", but would take less time: an estimated {' and '.join(faster)}"
    return ""


def _why_barred(row: Row, fixed: Baseline, min_randomness: float | None) -> str:
    if row.batches >= fixed.batches:
        return "needs more batches than that"
    if not _is_random(row, min_randomness):
        return "is less random than asked for"
    return "has batch sizes that were not run"


def _is_random(row: Row, min_randomness: float | None) -> bool:
    # A billionth less is a rounding error.
    return row.randomness >= (min_randomness or 0.0) * (1 - 1e-9)


def _shown_cost(row: Row, *, timed: bool) -> str:
    """Return the cost that rows are compared by."""
    if timed and row.estimated_epoch_seconds is not None:
        return format_seconds(row.estimated_epoch_seconds)
    return format_number(row.batches)


def _needs(row: Row, verb: str, *, timed: bool) -> str:
    need = f"{format_number(row.batches)} batches"
    if timed:
        need = f"{_shown_cost(row, timed=timed)} an epoch ({need})"
    return f"{row.sized_name} {verb} {need}"


def _compared(chosen: Row, best: Row, above: float, *, timed: bool, barred: bool) -> str:
    """Compare the chosen row with the best, which costs less by the part `above`."""
    start = _needs(chosen, "takes an estimated" if timed else "needs", timed=timed)
    if chosen is best:
        others = "no other that may be recommended" if barred else "no table swept"
        return f"{start}, and {others} {'takes less time' if timed else 'needs fewer'}"
    how_far = "within rounding of the best"
    if above:
        how_far = f"{above:.1%} above the best"
        if barred:
            how_far += " that may be recommended"
    keep = ""
    if len(chosen.boundaries) < len(best.boundaries):
        keep = ", and fewer buckets keep more randomness"
    return f"{start}, {how_far} ({_shown_cost(best, timed=timed)}, {best.sized_name}){keep}"


def learning_rate_hint(relative_to: str, from_batch_size: float, to_batch_size: float) -> LearningRate:
    """Return factors for the learning rate when the mean batch size changes, by the two rules in use.

    Linear: Goyal et al. 2017, "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour" (arXiv:1706.02677), for
    SGD. Square root: Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks"
    (arXiv:1404.5997), which keeps the variance of the update; Malladi et al. 2022, "On the SDEs and Scaling Rules for
    Adaptive Gradient Algorithms" (arXiv:2205.10287), derive it for Adam and RMSprop.
    """
    ratio = to_batch_size / from_batch_size
    return LearningRate(
        relative_to=relative_to,
        from_batch_size=from_batch_size,
        to_batch_size=to_batch_size,
        linear=ratio,
        square_root=math.sqrt(ratio),
    )


def trade_off(costs: Sequence[float], again: Sequence[float]) -> list[int]:
    """Return the rows that no other row beats in both cost and mates that meet `again`, the cheapest first.

    Costs rise strictly along them, and mates meet again strictly less often. Of equal rows only the first is returned.
    """
    curve: list[int] = []
    for index in sorted(range(len(costs)), key=lambda row: (costs[row], again[row], row)):
        if not curve or again[index] < again[curve[-1]]:
            curve.append(index)
    return curve
