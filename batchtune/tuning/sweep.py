"""Compares strategies and bucket counts on one data set, and writes `sweep.json`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from batchtune.batching.batchers import Batching
from batchtune.batching.expectation import expected_batches
from batchtune.batching.strategies import STRATEGIES, Problem, ProblemCosts
from batchtune.batching.table import BucketTable, Limits
from batchtune.errors import ResultError, UsageError
from batchtune.lengths import FloatArray, IntArray, Lengths, padded_to
from batchtune.results import (
    PROBE_FILE,
    SWEEP_FILE,
    Baseline,
    Probe,
    Row,
    Sweep,
    epoch_costs,
    meta_of,
    read_result,
    write_result,
)
from batchtune.tuning.alternatives import fixed_baselines, lower_bound, saturation, two_dimensional_rows
from batchtune.tuning.cautions import cautions, limit_unit_hint
from batchtune.tuning.costs import Costs, batch_seconds, capped, costs_of
from batchtune.tuning.current.base import YOURS, CurrentTable
from batchtune.tuning.distribution import bucket_uses, histogram_of, quantiles_of
from batchtune.tuning.epoch_cost import EpochCost, Pricing, with_equals
from batchtune.tuning.recommend import learning_rate_hint, recommend, trade_off
from batchtune.tuning.run_folder import clear_run, holds_other_lengths
from batchtune.tuning.sweep_settings import SweepSettings

# Aim pools at this part of the largest allowed share of mates that meet again, as chance may add to it.
_BELOW = 0.97


def run_sweep(
    lengths: Lengths,
    settings: SweepSettings,
    folder: Path,
    *,
    max_batch_length: float | None = None,
    force: bool = False,
    on_row: Callable[[Row], None] = lambda row: None,
) -> Sweep:
    """Sweep bucket counts and strategies with the run folder's probe, if it has one, and write `sweep.json`.

    `max_batch_length` goes before the probe's; `force` discards results of other data in the folder; `on_row` is
    called with each row as soon as it is known. Raises ResultError if the folder holds results of other data, or if
    max_batch_length is neither given nor measured.
    """
    foreign, costs, max_batch_length = costs_in(folder, lengths, max_batch_length, force=force)
    found = sweep(lengths, max_batch_length, settings, costs, on_row)
    if foreign:
        clear_run(folder)
    write_result(folder / SWEEP_FILE, found)
    return found


def costs_in(
    folder: Path, lengths: Lengths, max_batch_length: float | None, *, force: bool
) -> tuple[bool, Costs, float]:
    """Return whether the folder holds results of other data, the costs of its probe, and max_batch_length."""
    foreign = holds_other_lengths(lengths, folder, force=force)
    probe = None if foreign or not (folder / PROBE_FILE).exists() else read_result(folder / PROBE_FILE, Probe)
    if max_batch_length is not None:
        return foreign, capped(costs_of(probe) if probe else Costs(), max_batch_length), max_batch_length
    if probe is None:
        raise ResultError(
            f"how large a batch may be is not known: {folder} holds no {PROBE_FILE}",
            "Measure it with `batchtune probe-oom`, or give it with --max-batch-length.",
        )
    return foreign, costs_of(probe), probe.max_batch_length


def sweep(
    lengths: Lengths,
    max_batch_length: float,
    settings: SweepSettings,
    costs: Costs,
    on_row: Callable[[Row], None] = lambda row: None,
) -> Sweep:
    """Work out the cost of an epoch with every strategy and bucket count, and recommend one.

    Padded lengths and times of bucket tables are exact expectations over shuffles, those of pools means over simulated
    epochs, which the seed decides. Calls `on_row` as `run_sweep` does. Raises UsageError if `max_batch_length` is not
    positive and finite.
    """
    if not (math.isfinite(max_batch_length) and max_batch_length > 0):
        raise UsageError(f"max_batch_length must be positive and finite, got {max_batch_length:g}")
    is_padded = settings.multiple_of is not None
    limits = Limits(
        max_batch_length=max_batch_length,
        max_batch_size=settings.max_batch_size,
        frontier=(costs.continued_frontier or costs.frontier) if is_padded else costs.frontier,
        measured_up_to=lengths.longest if is_padded else None,
    )
    pricing = Pricing.of(lengths, max_batch_length, settings, costs)
    priced = []
    for row, cost in _rows(pricing, limits, settings):
        priced.append((row, cost))
        on_row(row)
    baselines = fixed_baselines(pricing, limits)
    if not (settings.pool_sizes or is_padded) and (more := _pools_between(pricing, priced, baselines, settings)):
        priced.append(more)
        on_row(more[0])
    rows = with_equals(priced)
    current, table, now, fits = settings.current, None, None, None
    if current is not None:  # its batches are padded as they come
        table = current.table(lengths)
        fits = all_fit(limits, *table.batching.largest_batches(lengths.histogram))
        unpadded = replace(pricing, lengths=lengths, total=lengths.total)
        cost = unpadded.cost_of(table.batching)
        row = unpadded.row("current", table.sizing, table.batching.table.num_buckets, table.batching, cost)
        now = with_equals([*priced, (row, cost)])[-1]
    index, reason, best_table = recommend(rows, baselines, min_randomness=settings.min_randomness, few_shapes=is_padded)
    recommended = None if index is None else rows[index]
    wrong_unit = limit_unit_hint(lengths, max_batch_length) if recommended is None else None
    warnings = [*cautions(lengths, limits, settings.num_buckets, rows), *_ranks_cautions(pricing)]
    if current is not None and table is not None and now is not None:
        warnings += _current_cautions(settings, table, lengths, now, recommended, fits=bool(fits))
    before = ("current", now.mean_batch_size) if now else (baselines[0].name, float(baselines[0].batch_size))
    is_table = recommended is not None and recommended.pool_size is None
    most_buckets = len(recommended.boundaries) if recommended and is_table else max(settings.num_buckets)
    return Sweep(
        meta=meta_of(Sweep),
        lengths=lengths.summary(),
        max_batch_length=max_batch_length,
        settings=settings.record(),
        device_name=costs.device_name,
        rows=rows,
        baselines=baselines,
        lower_bound=lower_bound(pricing, limits, [*rows, *baselines, *([now] if now else [])]),
        recommended=index,
        recommended_table=best_table,
        reason=f"{wrong_unit}. As it is, {reason}" if wrong_unit else reason,
        warnings=warnings,
        current=now,
        current_fits=fits,
        current_settings=None if current is None or table is None else current.record(table),
        trade_off=trade_off(epoch_costs(rows), [row.mates_again or 0.0 for row in rows]),
        saturation=saturation(pricing, limits, most_buckets, settings.throughput_fraction),
        learning_rate=None if recommended is None else learning_rate_hint(*before, recommended.mean_batch_size),
        two_dimensional=two_dimensional_rows(pricing, limits, costs, rows),
        histogram=histogram_of(lengths),
        quantiles=quantiles_of(lengths),
        buckets=[] if recommended is None else bucket_uses(lengths, pricing, recommended, costs.proven_by),
    )


def _rows(pricing: Pricing, limits: Limits, settings: SweepSettings) -> Iterator[tuple[Row, EpochCost]]:
    histogram, step_seconds = pricing.lengths.histogram, pricing.step_seconds
    problem_costs = None
    if step_seconds is not None:

        def of_batch(batch_sizes: FloatArray, lengths: FloatArray, above: FloatArray | None = None) -> FloatArray:
            seconds = batch_seconds(step_seconds, pricing.targets, None if above is None else lambda _: above)
            return np.asarray(seconds(batch_sizes, lengths), dtype=np.float64)

        problem_costs = ProblemCosts(
            of_batch=of_batch,
            of_epoch=lambda some, table: pricing.table_seconds(expected_batches(some, table, pricing.ranks.dealing)),
        )
    problems = {
        sizing: Problem(
            histogram=histogram,
            max_batch_length=limits.max_batch_length,
            batch_sizes=limits.batch_sizes(histogram.lengths, sizing),
            costs=problem_costs,
        )
        for sizing in limits.sizings
    }
    for name in settings.strategies:
        strategy = STRATEGIES[name]
        numbers = settings.numbers(strategy, pricing.lengths.count)
        sizings = limits.sizings if strategy.depends_on_sizes else limits.sizings[:1]
        if strategy.in_pools:  # a sampler of our own runs them, which takes whatever is known to fit
            sizings = limits.sizings[-1:]
        for sizing in sizings:
            found = strategy.boundaries(problems[sizing], numbers)
            for number, boundaries in zip(numbers, found, strict=True):
                if settings.multiple_of is not None:
                    boundaries = np.unique(padded_to(boundaries, settings.multiple_of))
                table = BucketTable(boundaries, limits.batch_sizes(boundaries, sizing))
                if strategy.in_pools:  # the table says how many examples fit, `number` how large pools are
                    batching, cost = pricing.best_cut(Batching(table, number))
                    yield pricing.row(name, sizing, table.num_buckets, batching, cost), cost
                else:
                    cost = pricing.of_table(table)
                    yield pricing.row(name, sizing, number, Batching(table), cost), cost


def _pools_between(
    pricing: Pricing, priced: list[tuple[Row, EpochCost]], baselines: list[Baseline], settings: SweepSettings
) -> tuple[Row, EpochCost] | None:
    """Price the largest pools that are random enough to be recommended, if they lie between two that were swept.

    From one size to the next, mates meet again about in proportion to a power of the pool size.
    """
    rows = [row for row, _ in priced]
    table = recommend(rows, baselines, min_randomness=settings.min_randomness).portable
    if settings.min_randomness is not None:
        most = 1 - settings.min_randomness
    elif table is not None:
        most = rows[table].mates_again or 0.0
    else:
        return None
    pools = sorted((row for row in rows if row.pool_size), key=lambda row: row.pool_size or 0)
    aim, count = most * _BELOW, pricing.lengths.count
    for low, high in itertools.pairwise(pools):
        (size, again), (next_size, next_again) = ((one.pool_size or 1, one.mates_again or 0.0) for one in (low, high))
        if not 0 < again < aim < most < next_again:
            continue
        part = math.log(aim / again) / math.log(next_again / again)
        # Only the number of pools matters: all are of one size.
        number = math.ceil(count / (size * (next_size / size) ** part))
        if -(-count // next_size) < number < -(-count // size):
            table_of_sizes = BucketTable.of(low.boundaries, low.batch_sizes)
            batching = Batching(table_of_sizes, -(-count // number))
            if low.batch_overhead is not None:
                batching, cost = pricing.best_cut(batching)
            else:  # where cutting smaller pools for the least cost gains too little, it gains less here
                cost = pricing.cost_of(batching)
            return pricing.row(low.strategy, low.sizing, low.num_buckets, batching, cost), cost
    return None


def all_fit(limits: Limits, batch_sizes: IntArray, longest: FloatArray) -> bool:
    """Return whether all these batches stay within the limits; a batch of one always does."""
    return bool(((batch_sizes == 1) | (batch_sizes <= limits.batch_sizes(longest, limits.sizings[-1]))).all())


def _ranks_cautions(pricing: Pricing) -> Iterator[str]:
    ranks = pricing.ranks
    if ranks.same_bucket and ranks.world_size == 1:
        yield "--same-bucket says nothing about one rank: give their number with --world-size"
    if pricing.step_seconds is None and ranks.world_size > 1:
        yield (
            f"what it costs that {ranks.world_size:,} ranks wait for each other is not known without step times: "
            "`batchtune probe-oom` measures them"
        )


def _current_cautions(
    settings: SweepSettings, table: CurrentTable, lengths: Lengths, now: Row, recommended: Row | None, *, fits: bool
) -> Iterator[str]:
    current = settings.current
    assert current is not None
    if not fits:
        yield (
            f"{YOURS} makes batches that are larger than what was found to fit (or than the max_batch_length that "
            "was given): its times are extrapolated, and it may run out of memory"
        )
    if settings.multiple_of is not None:
        yield f"{YOURS} is counted as its batches come, not padded to multiples as the others are"
    yield from current.cautions(table, lengths, now)
    name, most = table.cap or ("", math.inf)
    if recommended is not None and max(recommended.batch_sizes) > most:
        swept = "" if settings.max_batch_size is None else f" (--max-batch-size {settings.max_batch_size})"
        yield (
            f"{name} of {YOURS} allows {most:,} examples in a batch, the recommendation up to "
            f"{max(recommended.batch_sizes):,}{swept}: to keep your limit, sweep with --max-batch-size {most}"
        )
