"""Recommends one row of a sweep, and says why; compares rows by speed and randomness; warns about data and tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from batchtune.buckets import STRATEGIES
from batchtune.epochs.table import Limits
from batchtune.lengths import Lengths
from batchtune.results import (
    AnyRow,
    AnySweep,
    Baseline,
    Costed,
    LearningRate,
    PackedRow,
    Row,
    StreamRow,
    Sweep,
    cost_of,
    have_times,
)
from batchtune.units import (
    counted,
    format_length,
    format_number,
    format_percent,
    format_seconds,
)

SweptRow = TypeVar("SweptRow", Row, StreamRow, PackedRow)

# Rows that cost at most this share more than the cheapest are as good as that.
TOLERANCE = 0.01
# With a larger share of mates that meet again, the batches of all epochs are nearly the same.
_SAME_EVERY_EPOCH = 0.5
# A smaller share of the cost is no gain.
_NOTHING = 1e-3
# Where the number of steps is kept, a row may have this share more of them than another.
_MORE_STEPS = 0.1


class Recommendation(NamedTuple):
    """The positions of the recommended rows, and why.

    Attributes:
        row: The recommended one; None where none can be recommended.
        reason: Why, in a sentence without a full stop.
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
    steps_kept: bool = False,
    timed: bool = True,
) -> Recommendation:
    """Recommend the best bucket table, or pools that are faster at no less randomness.

    The recommended row must cost less than the shuffled fixed batch size: in estimated time; in
    batches if times are unknown, or not to be compared (`timed`).

    The table is the one with the fewest buckets within 1% of the lowest cost. It must have only
    proven sizes (unless no such table has), and be as random as asked for. Among tables with
    equally many buckets the lower cost decides, then the sizing `length`, which every framework can
    express, then the order.

    Pools too must have only proven sizes, and cost at least 1% less than the table. They must be as
    random as `min_randomness` asks, or else as the table; where no table can be recommended, as the
    cheapest one. Of the pools within 1% of the fastest, the most random are taken. With
    `few_shapes`, which pools can't promise, none are.

    A row that keeps the examples of each optimizer step goes before all others: the first, if there are several.

    With `steps_kept`, a row may make up to 10% more batches than the one with the fewest, and
    without times padded lengths are compared, also with the fixed batch size if it makes as few
    batches.
    """
    fixed = min(baselines, key=lambda baseline: baseline.batches)
    timed = timed and have_times(rows)
    compares_fixed = timed and have_times([fixed])
    cost = partial(cost_of, timed=timed, steps_kept=steps_kept)
    because = partial(
        _reason, cost=cost, fixed=fixed, steps_kept=steps_kept, timed=timed
    )
    for index, row in enumerate(rows):
        if row.keeps_examples:
            return Recommendation(index, _why_same(row, timed), None)
    better = [
        row
        for row in rows
        if _beats(row, fixed, timed=compares_fixed, steps_kept=steps_kept)
    ]
    allowed = [row for row in better if not row.uses_pools]
    allowed = [row for row in proven_or_all(allowed) if _is_random(row, min_randomness)]
    if steps_kept:
        allowed = _with_few_steps(allowed)

    def size(row: Row) -> tuple[int, float, bool]:
        return len(row.boundaries), cost(row), row.sizing != "length"

    table = best_of(allowed, cost, size)
    portable = None
    if table is not None:
        portable = rows.index(table)
    pools = None
    if not few_shapes:
        pools = _best_pools(rows, better, cost, table, min_randomness, steps_kept)
    if pools is not None:
        reason = because(pools, table, "than the best table")
        reason += (
            f"; two examples of a batch share one again in the next epoch in {format_percent(pools.known_mates_again)} "
            "of cases"
        )
        if table is not None:
            reason += f" (with the table {format_percent(table.known_mates_again)})"
        return Recommendation(rows.index(pools), reason, portable)
    if table is None:
        reason = _why_none(
            rows, better, fixed, steps_kept=steps_kept, timed=compares_fixed
        )
        return Recommendation(None, reason, None)
    # Among equals the one with fewer buckets is the best: nothing is then left to trade.
    cheapest = min(allowed, key=lambda row: (cost(row), *size(row)))
    reason = because(table, cheapest, "than the best")
    for baseline in baselines:
        seconds = baseline.estimated_epoch_seconds
        if timed and seconds is not None and seconds < cost(table):
            reason += f"; {baseline.name} takes less time: an estimated {format_seconds(seconds)}"
    return Recommendation(portable, reason, portable)


def proven_or_all(rows: Sequence[SweptRow]) -> Sequence[SweptRow]:
    """Return the rows whose batches are all proven to fit; without any, all rows."""
    return [row for row in rows if not row.unproven] or rows


def best_of(
    rows: Sequence[SweptRow],
    cost: Callable[[SweptRow], float],
    preference: Callable[[SweptRow], tuple[float, ...]],
    spread: Callable[[SweptRow], float] = lambda row: 0.0,
) -> SweptRow | None:
    """Return the row of least `preference` among those that cost at most 1% more than the cheapest; None without rows.

    Rows whose cost differs by no more than the `spread` of both, in the unit of the cost, count as
    equal, too.
    """
    cheapest = min(rows, key=cost, default=None)
    if cheapest is None:
        return None
    lowest = cost(cheapest)
    equal = [
        row
        for row in rows
        if cost(row) - lowest <= max(TOLERANCE * lowest, spread(row) + spread(cheapest))
    ]
    return min(equal, key=preference)


def _beats(row: Row, fixed: Baseline, *, timed: bool, steps_kept: bool) -> bool:
    """Return whether an epoch of a row costs less than one of the fixed batch size, shuffled."""
    if timed:
        return cost_of(row, timed=True) < cost_of(fixed, timed=True)
    if steps_kept and close_in_steps(fixed, row):
        return row.padded_length < fixed.padded_length
    return row.batches < fixed.batches


def close_in_steps(costed: Costed, other: Costed) -> bool:
    """Return whether the first makes at most 10% more batches than the other."""
    return costed.batches <= other.batches * (1 + _MORE_STEPS)


def _with_few_steps(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with at most 10% more batches than the one with the fewest."""
    fewest = min(rows, key=lambda row: row.batches, default=None)
    return [row for row in rows if fewest is not None and close_in_steps(row, fewest)]


def _best_pools(
    rows: Sequence[Row],
    better: Sequence[Row],
    cost: Callable[[Row], float],
    table: Row | None,
    min_randomness: float | None,
    steps_kept: bool,
) -> Row | None:
    """Return the pools to prefer to the table, if any of those that are `better` than a fixed batch size."""
    reference = table
    highest_cost = math.inf
    if table is not None:
        highest_cost = cost(table) * (1 - TOLERANCE)
    else:
        tables = [row for row in rows if not row.uses_pools]
        reference = min(tables, key=cost, default=None)
    if min_randomness is None and reference is not None:
        min_randomness = reference.randomness
    pools = [row for row in better if row.uses_pools and not row.unproven]
    if steps_kept:
        pools = _with_few_steps([row for row in (table, *pools) if row is not None])
    pools = [
        row
        for row in pools
        if row.uses_pools
        and cost(row) < highest_cost
        and _is_random(row, min_randomness)
    ]
    return best_of(pools, cost, lambda row: (row.known_mates_again, cost(row)))


def _is_random(row: Row, min_randomness: float | None) -> bool:
    # A billionth less is a rounding error.
    return 1 - row.known_mates_again >= (min_randomness or 0.0) * (1 - 1e-9)


def _reason(
    chosen: Row,
    other: Row | None,
    than: str,
    *,
    cost: Callable[[Row], float],
    fixed: Baseline,
    steps_kept: bool,
    timed: bool,
) -> str:
    """Say what an epoch needs with the chosen row, next to another row and a fixed batch size."""
    verb = "takes" if timed else "needs"
    if chosen.uses_pools:
        verb = verb.removesuffix("s")
    reason = f"{chosen.sized_name} {verb} {shown_cost(chosen, timed, steps_kept)}"
    if other is chosen:
        least = "needs fewer"
        if timed:
            least = "takes less"
        elif steps_kept:
            least = "pads less"
        reason += f", and no table that may be recommended {least}"
    elif other is not None:
        change = cost(chosen) / cost(other) - 1
        how_much = f"{abs(change):.1%} {'more' if change > 0 else 'less'}"
        shown = shown_cost(other, timed, steps_kept)
        reason += f", {how_much} {than} ({other.sized_name}: {shown})"
        if not chosen.uses_pools:
            reason += ", and fewer buckets keep more randomness"
    return f"{reason}; a fixed batch size of {fixed.batch_size} needs {format_number(fixed.batches)} batches"


def _why_same(row: Row, timed: bool) -> str:
    """Say what an epoch needs with the chosen row, whose steps keep their examples."""
    assert row.pool_size is not None
    return (
        f"each optimizer step keeps its {counted(row.pool_size, 'example')}; in {row.name} that takes "
        f"{shown_cost(row, timed, steps_kept=True)}"
    )


def keeping_reason(sweep: AnySweep, row: AnyRow, *, timed: bool) -> str:
    """Say that the user's own config costs no more than the best row, and what both cost."""
    assert sweep.current is not None
    kept = keeps_steps(sweep)
    own, best = (shown_cost(each, timed, kept) for each in (sweep.current, row))
    return f"keep your current config: it takes {own}; {row.sized_name} {best}"


def shown_cost(row: AnyRow, timed: bool, steps_kept: bool) -> str:
    """Return what an epoch takes: its estimated time, or its batches; with their padding if their number is kept."""
    batches = f"{format_number(row.batches)} batches"
    if timed and row.estimated_epoch_seconds is not None:
        return f"an estimated {format_seconds(row.estimated_epoch_seconds)} an epoch ({batches})"
    if steps_kept:
        return f"{batches} an epoch, with {format_percent(row.padding_ratio)} padding"
    return f"{batches} an epoch"


def _why_none(
    rows: Sequence[Row],
    better: Sequence[Row],
    fixed: Baseline,
    *,
    steps_kept: bool,
    timed: bool,
) -> str:
    """Say why no row is recommended."""
    if not rows:
        return "no padded batches are compared (--strategy packed)"
    size = format_number(fixed.batch_size)
    if better:
        most_random = min(better, key=lambda row: row.known_mates_again)
        return (
            "no row with proven sizes costs less than a fixed batch size and is as random, with as few shapes, as "
            f"asked; the most random is {most_random.sized_name}, {1 - most_random.known_mates_again:.3g}"
        )
    if timed:
        fastest = min(rows, key=lambda row: cost_of(row, timed=True))
        times = [
            format_seconds(cost_of(costed, timed=True)) for costed in (fixed, fastest)
        ]
        return (
            f"no row takes less time than a fixed batch size of {size}, an estimated {times[0]}; "
            f"{fastest.sized_name} takes {times[1]}"
        )
    if steps_kept:
        return f"no row pads less than a fixed batch size of {size} with as many steps"
    fewest = min(rows, key=lambda row: row.batches)
    return (
        f"no row needs fewer batches than a fixed batch size of {size}, which needs {format_number(fixed.batches)}; "
        f"{fewest.sized_name} would make {format_number(fewest.batches)}"
    )


def keeps_steps(sweep: AnySweep) -> bool:
    """Return whether an epoch keeps its optimizer steps, so that padded lengths compare where times are not known."""
    same = isinstance(sweep, Sweep) and sweep.settings.keep == "same"
    return same or sweep.min_steps is not None


def keeps_current(sweep: AnySweep, row: AnyRow, *, timed: bool) -> bool:
    """Return whether the user's own config fits, and a row costs no less than that."""
    current = sweep.current
    if current is None or sweep.current_fits is False:
        return False
    kept = keeps_steps(sweep)
    own, found = (
        cost_of(costed, timed=timed, steps_kept=kept) for costed in (current, row)
    )
    close = row.keeps_examples or close_in_steps(current, row)
    if kept and not timed and not close:
        return False
    if abs(own - found) <= _NOTHING * own:
        return True
    if timed and row.equal_to_best and current.equal_to_best:
        return False
    return own < found


def learning_rate(
    current: Row | None, baseline: Baseline, recommended: Row
) -> LearningRate:
    """Return how to scale a learning rate from the user's settings, or from a fixed batch size, by the rules in use.

    Linear: Goyal et al. 2017, "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour" (arXiv:1706.02677), for
    SGD. Square root: Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks"
    (arXiv:1404.5997), which keeps the variance of the update; Malladi et al. 2022, "On the SDEs and Scaling Rules for
    Adaptive Gradient Algorithms" (arXiv:2205.10287), derive it for Adam and RMSprop. Marek et al. 2025, "Small Batch
    Size Training for Language Models" (arXiv:2507.07101), keep the half-life of Adam's beta2 in tokens.
    """
    relative_to = baseline.name
    before = float(baseline.batch_size)
    if current is not None:
        relative_to = "current"
        before = current.mean_batch_size
    ratio = recommended.mean_batch_size / before
    return LearningRate(
        relative_to=relative_to,
        from_batch_size=before,
        to_batch_size=recommended.mean_batch_size,
        linear=ratio,
        square_root=math.sqrt(ratio),
    )


def scaled_far(rate: LearningRate | None) -> Iterator[str]:
    """Warn if a step has over 4 times the examples of the user's own: no rule for the learning rate is sure then."""
    if rate is not None and rate.relative_to == "current" and rate.linear > 4:
        yield (
            f"a step has {rate.linear:.3g} times the examples of yours: beyond 4 times, rules for "
            "the learning rate often fail. Compare the losses of short trainings, or keep your steps (--keep steps)"
        )


def kept_steps(min_steps: int | None, share: float) -> str:
    """Return the end of a reason: that batches are smaller for --min-steps; empty if they are as large as fits."""
    if min_steps is None or share == 1.0:
        return ""
    return (
        "; batches are smaller than what fits, so that an epoch keeps at least "
        f"{counted(min_steps, 'optimizer step')}"
    )


def trade_off(costs: Sequence[float], again: Sequence[float]) -> list[int]:
    """Return the rows that no other row beats in both cost and mates that meet `again`, the cheapest first.

    Costs rise strictly along them, and mates meet again strictly less often. Of equal rows only the first is returned.
    """
    curve: list[int] = []
    for index in sorted(range(len(costs)), key=lambda row: (costs[row], again[row])):
        if not curve or again[index] < again[curve[-1]]:
            curve.append(index)
    return curve


# Sources: `DynamicBatchSampler` of SpeechBrain 1.1 (batch size at least 1, and 1 beyond the last boundary);
# `TimeConstraint` of Lhotse 1.33 and `NumElementsBatchSampler` of ESPnet (an example is added first, and closes the
# batch if it then exceeds); `data_utils_fast.pyx` of fairseq (asserts that none is above max_tokens);
# `BucketingFilter` of NeMo.
_OVERLONG = (
    "where it sets the batch size (SpeechBrain, batchtune's sampler), each becomes a batch of one; Lhotse and "
    "ESPnet make batches that exceed it, fairseq stops with an error; NeMo with bucket_batch_size drops only what "
    "is longer than its last bin"
)
# How to turn lengths into seconds; where the unit does not say it, as they are most often.
_TO_SECONDS = {"ms": "1/1000", "samples": "1/16000", "frames": "1/100"}


def cautions(
    lengths: Lengths, limits: Limits, fitting: Limits, rows: Sequence[Row]
) -> Iterator[str]:
    """Yield the warnings of a sweep, each at most once however many rows it concerns.

    `fitting` are the limits before batches were made smaller to keep the number of steps.
    """
    unit = limit_unit_hint(lengths, fitting.max_batch_length)
    if unit is not None:
        yield unit
    yield from longer_than(
        lengths, fitting.max_batch_length, "max_batch_length", _OVERLONG
    )
    limit = limits.max_batch_length
    for name, strategy in STRATEGIES.items():
        yield from strategy.cautions(
            lengths, limit, [row for row in rows if row.strategy == name]
        )
    if rows and all(row.unproven for row in rows):
        yield (
            "every row has batch sizes that are not proven to fit, the recommended one too: run its batches with "
            "`batchtune verify` before you train with them"
        )


def too_few_examples(lengths: Lengths, row: Row) -> Iterator[str]:
    """Warn of a recommended row whose batches are nearly the same in every epoch, as few examples make few batches."""
    if row.known_mates_again <= _SAME_EVERY_EPOCH:
        return
    yield (
        f"{counted(lengths.count, 'example')} are too few for {row.name}: two examples of a batch share one again in "
        f"the next epoch in {format_percent(row.known_mates_again)} of cases, so its batches are nearly the same. "
        "Fewer buckets (--num-buckets), or more optimizer steps (--min-steps), mix them better"
    )


def longer_than(
    lengths: Lengths, limit: float, name: str, consequence: str
) -> Iterator[str]:
    """Warn of examples beyond a limit, and say what becomes of them."""
    overlong = lengths.count_beyond(limit)
    if overlong:
        shown = format_length(limit, lengths.unit)
        longest = format_length(lengths.longest, lengths.unit)
        yield f"{counted(overlong, 'example')} longer than {name} {shown} (the longest is {longest}): {consequence}"


def workload_unit_hint(lengths: Lengths, workload: str) -> str | None:
    """Return a hint, in full sentences, where one example does not fit and the workload may expect seconds.

    None if the lengths are in seconds, or in a unit that is not time; a built-in workload knows the
    unit.
    """
    if lengths.unit not in _TO_SECONDS or workload.startswith("builtin:"):
        return None
    return (
        f"Is the unit right? The workload is given lengths up to {format_length(lengths.longest, lengths.unit)}. If it "
        f"expects seconds, convert them, for example with --length-scale {_TO_SECONDS[lengths.unit]} --unit s."
    )


def limit_unit_hint(lengths: Lengths, max_batch_length: float) -> str | None:
    """Return a doubt about the unit of max_batch_length, without a full stop; None if it is plausible."""
    runs = lengths.runs
    median = float(runs.values[runs.at(lengths.count // 2)])
    if max_batch_length >= median:
        return None
    doubt = "It may be in another unit"
    if lengths.unit is not None:
        doubt = f"Is it in another unit? The lengths are in {lengths.unit}"
    return (
        f"max_batch_length {format_length(max_batch_length, lengths.unit)} is shorter than the median example "
        f"({format_length(median, lengths.unit)}). {doubt}"
    )
