"""Recommends one row of a sweep, and says why; compares all of them by speed and randomness."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from batchtune.results import Baseline, LearningRate, Row, epoch_costs, have_times
from batchtune.units import format_number, format_percent, format_seconds

# Rows within this share of the best are as good as the best: then fewer buckets decide.
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
    tables, pools = ([at for at, row in enumerate(rows) if (row.pool_size is None) is of] for of in (True, False))
    table = None
    reason = "no table was swept"
    if tables:
        found, reason = _best_table([rows[at] for at in tables], baselines, min_randomness)
        table = None if found is None else tables[found]
    fixed = min(baselines, key=lambda baseline: baseline.batches)
    costs = epoch_costs(rows)
    least = (min_randomness or 0.0) if table is None or min_randomness is not None else rows[table].randomness
    most = math.inf if table is None else costs[table] * (1 - _TOLERANCE)
    better = [
        at
        for at in pools
        if not few_shapes
        and rows[at].batches < fixed.batches
        and not rows[at].unproven
        and _is_random(rows[at], least)
        and costs[at] < most
    ]
    if not better:
        if not tables:
            reason = f"no pools can be recommended: {_why_no_pools(few_shapes, rows, fixed)}"
        return Recommendation(table, reason, table)
    best = min(costs[at] for at in better)
    near = [at for at in better if costs[at] <= best * (1 + _TOLERANCE)]
    chosen = min(near, key=lambda at: (rows[at].mates_again, costs[at]))
    row = rows[chosen]
    timed = have_times(rows)
    reason = _needs(row, timed, "take an estimated" if timed else "need")
    if table is not None:
        reason += (
            f", {1 - costs[chosen] / costs[table]:.1%} {'less' if timed else 'fewer'} than the best table "
            f"({_shown(rows[table], timed)}, {rows[table].sized_name}), and batch mates meet again in "
            f"{format_percent(row.mates_again)} of cases (with the table "
            f"{format_percent(rows[table].mates_again)})"
        )
    reason += f"; a fixed batch size of {fixed.batch_size} needs {format_number(fixed.batches)}"
    return Recommendation(chosen, reason, table)


def _why_no_pools(few_shapes: bool, rows: Sequence[Row], fixed: Baseline) -> str:
    if few_shapes:
        return "--multiple-of asks for few shapes, which pools can't promise"
    if not (fewer := [row for row in rows if row.batches < fixed.batches]):
        return f"none needs fewer batches than a fixed batch size of {fixed.batch_size}"
    if not (proven := [row for row in fewer if not row.unproven]):
        return "all that need fewer batches than a fixed batch size have batch sizes that were not run"
    return f"none is as random as --min-randomness asks; the most random are {_most_random(proven, ', with ')}"


def _most_random(rows: Sequence[Row], between: str) -> str:
    most = min(rows, key=lambda row: row.mates_again)
    return f"{most.sized_name}{between}{most.randomness:.3g}"


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
    # Sizes that were not run are taken only if there are no others.
    if proven := [index for index in fewer if not rows[index].unproven]:
        fewer = proven
    better = [index for index in fewer if _is_random(rows[index], min_randomness)]
    if fewer and not better:
        return None, (
            f"no table that needs fewer batches than a fixed batch size is as random as --min-randomness "
            f"{min_randomness:g} asks; the most random is {_most_random([rows[index] for index in fewer], ', ')}"
        )
    if not better:
        fewest = min(rows, key=lambda row: row.batches)
        return None, (
            f"no table needs fewer batches than a fixed batch size of {format_number(fixed.batch_size)}, which needs "
            f"{format_number(fixed.batches)}; {fewest.sized_name} needs {format_number(fewest.batches)}"
        )
    costs = epoch_costs(rows)
    timed = have_times(rows)

    def preference(index: int) -> tuple[int, bool]:
        return len(rows[index].boundaries), rows[index].sizing != "length"

    # Among equals the one with fewer buckets is the best: nothing is then left to trade.
    best = min(better, key=lambda index: (costs[index], *preference(index), index))
    near = [index for index in better if costs[index] <= costs[best] * (1 + _TOLERANCE)]
    chosen = min(near, key=lambda index: (preference(index)[0], costs[index], preference(index)[1], index))
    least = min(range(len(rows)), key=costs.__getitem__)
    barred = rows[least] if costs[least] < costs[best] else None
    reason = _compared(rows[chosen], rows[best], costs[chosen] / costs[best] - 1, timed, barred is not None)
    reason += f"; a fixed batch size of {fixed.batch_size} needs {format_number(fixed.batches)}"
    ours = rows[chosen].estimated_epoch_seconds
    faster = [
        f"{format_seconds(baseline.estimated_epoch_seconds)} {_HOW_FIXED[baseline.name]}"
        for baseline in baselines
        if ours is not None and baseline.estimated_epoch_seconds is not None and baseline.estimated_epoch_seconds < ours
    ]
    if faster:
        reason += f", but would take less time: an estimated {' and '.join(faster)}"
    if barred is not None:
        why = "has batch sizes that were not run"
        if barred.batches >= fixed.batches:
            why = "needs more batches than that"
        elif not _is_random(barred, min_randomness):
            why = "is less random than asked for"
        reason += f"; {barred.sized_name} would take {_shown(barred, timed)}{'' if timed else ' batches'}, but {why}"
    if not proven:
        which = "" if all(row.unproven for row in rows) else " that needs fewer batches"
        reason += f"; no table{which} has only sizes that were run"
    return chosen, reason


def _is_random(row: Row, min_randomness: float | None) -> bool:
    # A billionth less is a rounding error.
    return row.randomness >= (min_randomness or 0.0) * (1 - 1e-9)


def _shown(row: Row, timed: bool) -> str:
    """Return the cost that rows are compared by."""
    if timed and row.estimated_epoch_seconds is not None:
        return format_seconds(row.estimated_epoch_seconds)
    return format_number(row.batches)


def _needs(row: Row, timed: bool, verb: str) -> str:
    batches = f"{format_number(row.batches)} batches"
    return f"{row.sized_name} {verb} {f'{_shown(row, timed)} an epoch ({batches})' if timed else batches}"


def _compared(chosen: Row, best: Row, above: float, timed: bool, barred: bool) -> str:
    """Compare the chosen row with the best, which costs less by the part `above`."""
    start = _needs(chosen, timed, "takes an estimated" if timed else "needs")
    if chosen is best:
        which = "no other that may be recommended" if barred else "no table swept"
        return f"{start}, and {which} {'takes less time' if timed else 'needs fewer'}"
    how_far = (
        f"{above:.1%} above the best{' that may be recommended' if barred else ''}" if above else "as good as the best"
    )
    keep = ", and fewer buckets keep more randomness" if len(chosen.boundaries) < len(best.boundaries) else ""
    return f"{start}, {how_far} ({_shown(best, timed)}, {best.sized_name}){keep}"


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
