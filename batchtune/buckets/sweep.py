"""Compares strategies and bucket counts on one data set, and writes `sweep.json`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
from msgspec import structs

from batchtune.buckets.alternatives import fixed_baselines, lower_bound, saturation, two_dimensional_rows
from batchtune.buckets.cautions import cautions, limit_unit_hint
from batchtune.buckets.current import Current, current_batching
from batchtune.buckets.current_settings import YOURS
from batchtune.buckets.distribution import bucket_uses, histogram_of, quantiles_of
from batchtune.buckets.epoch_cost import EpochTime, Pricing, SamplerCost, with_equals
from batchtune.buckets.recommend import learning_rate_hint, recommend, trade_off
from batchtune.buckets.strategies import STRATEGIES, Problem, ProblemCosts
from batchtune.buckets.sweep_settings import SweepSettings, sizes_up_to
from batchtune.epochs.batchers import Batching
from batchtune.epochs.expectation import expected_batches
from batchtune.epochs.measured_costs import Costs, batch_seconds, capped, costs_of
from batchtune.epochs.table import BucketTable, Limits
from batchtune.errors import ResultError, UsageError
from batchtune.lengths import FloatArray, IntArray, Lengths, padded_to
from batchtune.results import (
    PROBE_FILE,
    SWEEP_FILE,
    Baseline,
    LearningRate,
    Probe,
    Row,
    Sweep,
    epoch_costs,
    meta_of,
    read_result,
    write_result,
)
from batchtune.run_folder import clear_run, holds_other_lengths

# So many sizes of pools are compared, from this many examples to all.
_POOL_SIZES = 8
_SMALLEST_POOL = 1000
# Aim pools at this part of the largest allowed share of mates that meet again, as chance may add to it.
_BELOW = 0.97


def run_sweep(
    lengths: Lengths,
    settings: SweepSettings,
    folder: Path,
    *,
    max_batch_length: float | None = None,
    current: Current | None = None,
    force: bool = False,
    on_row: Callable[[Row], None] = lambda row: None,
) -> Sweep:
    """Sweep bucket counts and strategies with the run folder's probe, if it has one, and write `sweep.json`.

    `max_batch_length` goes before the probe's; `force` discards results of other data in the folder; `on_row` is
    called with each row as soon as it is known. Raises ResultError if the folder holds results of other data, or if
    max_batch_length is neither given nor measured.
    """
    foreign, costs, max_batch_length = costs_in(folder, lengths, max_batch_length, force=force)
    swept = sweep(lengths, max_batch_length, settings, costs, current, on_row)
    if foreign:
        clear_run(folder)
    write_result(folder / SWEEP_FILE, swept)
    return swept


def costs_in(
    folder: Path, lengths: Lengths, max_batch_length: float | None, *, force: bool
) -> tuple[bool, Costs, float]:
    """Return whether the folder holds results of other data, the costs of its probe, and max_batch_length."""
    foreign = holds_other_lengths(lengths, folder, force=force)
    probe = None
    if not foreign and (folder / PROBE_FILE).exists():
        probe = read_result(folder / PROBE_FILE, Probe)
    if max_batch_length is not None:
        if probe is None:
            costs = Costs()
        else:
            costs = costs_of(probe)
        return foreign, capped(costs, max_batch_length), max_batch_length
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
    current: Current | None = None,
    on_row: Callable[[Row], None] = lambda row: None,
) -> Sweep:
    """Work out the cost of an epoch with every strategy and bucket count, and recommend one.

    Padded lengths and times of bucket tables are exact expectations over shuffles; those of pools, and times on several
    ranks, are means over simulated epochs, which the seed decides. Calls `on_row` as `run_sweep` does. Raises
    UsageError if `max_batch_length` is not positive and finite.
    """
    settings = structs.replace(settings, strategies=settings.strategies or tuple(STRATEGIES))
    if not (math.isfinite(max_batch_length) and max_batch_length > 0):
        raise UsageError(f"max_batch_length must be positive and finite, got {max_batch_length:g}")
    is_padded = settings.multiple_of is not None
    limits = _limits(lengths, max_batch_length, settings, costs)
    pricing = Pricing.of(lengths, max_batch_length, settings, costs)
    priced = []
    for row, cost in _rows(pricing, limits, settings):
        priced.append((row, cost.time))
        on_row(row)
    baselines = fixed_baselines(pricing, limits)
    if not settings.pool_sizes and not is_padded:
        pools = _pools_between(pricing, [row for row, _ in priced], baselines, settings)
        if pools is not None:
            row, cost = pools
            priced.append((row, cost.time))
            on_row(row)
    rows = with_equals(priced)
    current_row = None
    if current is not None:
        current_row = _CurrentRow.of(current, lengths, pricing, limits, priced)
    index, reason, best_table = recommend(rows, baselines, min_randomness=settings.min_randomness, few_shapes=is_padded)
    recommended = None if index is None else rows[index]
    if recommended is None:
        wrong_unit = limit_unit_hint(lengths, max_batch_length)
        if wrong_unit is not None:
            reason = f"{wrong_unit}. As it is, {reason}"
    warnings = [*cautions(lengths, limits, settings.num_buckets, rows), *_ranks_cautions(pricing)]
    compared: list[Row | Baseline] = [*rows, *baselines]
    if current_row is not None:
        warnings += current_row.cautions(lengths)
        compared.append(current_row.row)
    most_buckets = max(settings.num_buckets)
    if recommended is not None and recommended.pool_size is None:
        most_buckets = len(recommended.boundaries)
    swept = Sweep(
        meta=meta_of(Sweep),
        lengths=lengths.summary(),
        max_batch_length=max_batch_length,
        settings=msgspec.json.decode(msgspec.json.encode(settings)),
        device_name=costs.device_name,
        rows=rows,
        baselines=baselines,
        lower_bound=lower_bound(pricing, limits, compared),
        recommended=index,
        recommended_table=best_table,
        reason=reason,
        warnings=warnings,
        trade_off=trade_off(epoch_costs(rows), [row.mates_again or 0.0 for row in rows]),
        saturation=saturation(pricing, limits, most_buckets, settings.throughput_fraction),
        two_dimensional=two_dimensional_rows(pricing, limits, costs, rows),
        histogram=histogram_of(lengths),
        quantiles=quantiles_of(lengths),
    )
    if current_row is not None:
        swept = structs.replace(
            swept,
            current=current_row.row,
            current_fits=current_row.fits,
            current_settings=current_row.settings.record(
                current_row.settings.settings.describe(lengths.unit), current_row.settings.settings.record()
            ),
        )
    if recommended is not None:
        swept = structs.replace(
            swept,
            learning_rate=_learning_rate(current_row, baselines[0], recommended),
            buckets=bucket_uses(lengths, pricing, recommended, costs.proven_by),
        )
    return swept


def _limits(lengths: Lengths, max_batch_length: float, settings: SweepSettings, costs: Costs) -> Limits:
    if settings.multiple_of is None:
        return Limits(
            max_batch_length=max_batch_length, max_batch_size=settings.max_batch_size, frontier=costs.frontier
        )
    return Limits(
        max_batch_length=max_batch_length,
        max_batch_size=settings.max_batch_size,
        frontier=costs.continued_frontier or costs.frontier,
        measured_up_to=lengths.longest,
    )


def _learning_rate(current: _CurrentRow | None, baseline: Baseline, recommended: Row) -> LearningRate:
    """Return how to scale a learning rate from the user's settings, or from a fixed batch size."""
    if current is not None:
        return learning_rate_hint("current", current.row.mean_batch_size, recommended.mean_batch_size)
    return learning_rate_hint(baseline.name, float(baseline.batch_size), recommended.mean_batch_size)


@dataclass(frozen=True, slots=True, eq=False)
class _CurrentRow:
    """The user's own settings as a row.

    Attributes:
        fits: Whether its batches stay within the limits.
    """

    settings: Current
    row: Row
    fits: bool

    @classmethod
    def of(
        cls,
        settings: Current,
        lengths: Lengths,
        pricing: Pricing,
        limits: Limits,
        priced: Sequence[tuple[Row, EpochTime | None]],
    ) -> _CurrentRow:
        """Return what the settings cost next to the rows; their batches are padded as they come."""
        batching = current_batching(settings, lengths)
        unpadded = replace(pricing, lengths=lengths, total=lengths.total)
        cost = unpadded.cost_of(batching)
        row = unpadded.row("current", settings.settings.SIZING, batching.table.num_buckets, batching, cost)
        fits = all_fit(limits, *batching.largest_batches(lengths.histogram))
        return cls(settings, with_equals([*priced, (row, cost.time)])[-1], fits)

    def cautions(self, lengths: Lengths) -> Iterator[str]:
        """Yield warnings about the settings, each without a full stop."""
        if not self.fits:
            yield (
                f"{YOURS} makes batches that are larger than what was found to fit (or than the max_batch_length that "
                "was given): its times are extrapolated, and it may run out of memory"
            )
        yield from self.settings.settings.cautions(lengths, self.row)


def _rows(pricing: Pricing, limits: Limits, settings: SweepSettings) -> Iterator[tuple[Row, SamplerCost]]:
    histogram = pricing.lengths.histogram
    step_seconds = pricing.step_seconds
    problem_costs = None
    if step_seconds is not None:
        problem_costs = ProblemCosts(
            of_batch=batch_seconds(step_seconds, pricing.targets),
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
        numbers = settings.num_buckets
        if strategy.in_pools:
            numbers = _pool_sizes(settings, pricing.lengths.count)
        sizings = limits.sizings if strategy.depends_on_sizes else limits.sizings[:1]
        if strategy.in_pools:  # a sampler of our own runs them, which takes whatever is known to fit
            sizings = limits.sizings[-1:]
        for sizing in sizings:
            tables = strategy.boundaries(problems[sizing], numbers)
            for number, boundaries in zip(numbers, tables, strict=True):
                if settings.multiple_of is not None:
                    boundaries = np.unique(padded_to(boundaries, settings.multiple_of))
                table = BucketTable(boundaries, limits.batch_sizes(boundaries, sizing))
                if strategy.in_pools:  # the table says how many examples fit, `number` how large pools are
                    batching, cost = pricing.best_cut(Batching(table, number))
                    yield pricing.row(name, sizing, table.num_buckets, batching, cost), cost
                else:
                    cost = pricing.of_table(table)
                    yield pricing.row(name, sizing, number, Batching(table), cost), cost


def _pool_sizes(settings: SweepSettings, count: int) -> tuple[int, ...]:
    """Return the sizes of pools to compare: those asked for, or evenly spaced in their logarithm."""
    if settings.pool_sizes:
        return tuple(sizes_up_to(count, settings.pool_sizes))
    if count <= _SMALLEST_POOL:
        return (count,)
    between = np.geomspace(_SMALLEST_POOL, count, _POOL_SIZES)[:-1]
    sizes = [count, *(min(int(float(f"{size:.2g}")), count) for size in between[::-1])]
    # Two sizes that give as many pools give the same pools.
    return tuple(sorted({-(-count // size): size for size in sizes}.values()))


def _pools_between(
    pricing: Pricing, swept: Sequence[Row], baselines: list[Baseline], settings: SweepSettings
) -> tuple[Row, SamplerCost] | None:
    """Price the largest pools that are random enough to be recommended, if they lie between two that were swept.

    From one size to the next, mates meet again about in proportion to a power of the pool size.
    """
    table = recommend(swept, baselines, min_randomness=settings.min_randomness).portable
    if settings.min_randomness is not None:
        most_again = 1 - settings.min_randomness
    elif table is not None:
        most_again = swept[table].mates_again or 0.0
    else:
        return None
    pools = sorted((row for row in swept if row.pool_size), key=lambda row: row.pool_size or 0)
    aim = most_again * _BELOW
    count = pricing.lengths.count
    for low, high in itertools.pairwise(pools):
        size = low.pool_size or 1
        again = low.mates_again or 0.0
        next_size = high.pool_size or 1
        next_again = high.mates_again or 0.0
        if not 0 < again < aim < most_again < next_again:
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
