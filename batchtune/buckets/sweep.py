"""Compares strategies and bucket counts on one data set, and writes `sweep.json`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
from msgspec import structs

from batchtune.buckets.alternatives import (
    fixed_baselines,
    lower_bound,
    saturation,
    two_dimensional_rows,
)
from batchtune.buckets.cautions import cautions
from batchtune.buckets.current import Current, current_batching
from batchtune.buckets.current_settings import YOURS
from batchtune.buckets.distribution import bucket_uses, histogram_of, quantiles_of
from batchtune.buckets.epoch_cost import Priced, Pricing, with_equals
from batchtune.buckets.recommend import recommend, trade_off
from batchtune.buckets.strategies import STRATEGIES, Problem
from batchtune.buckets.sweep_settings import sizes_up_to
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
    Sizing,
    Sweep,
    SweepSettings,
    epoch_costs,
    meta_of,
    read_result,
    write_result,
)
from batchtune.run_folder import clear_run, holds_other_lengths

# So many sizes of pools are compared, from this many examples to all.
_POOL_SIZES = 8
_SMALLEST_POOL = 1000


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
    foreign, costs, max_batch_length = costs_in(
        folder, lengths, max_batch_length, force=force
    )
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
        costs = Costs() if probe is None else costs_of(probe)
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

    Padded lengths and times of bucket tables are expectations over shuffles; those of pools, and times on several
    ranks, are means over simulated epochs, which the seed decides. Calls `on_row` as `run_sweep` does. Raises
    UsageError if `max_batch_length` is not positive and finite.
    """
    if not (math.isfinite(max_batch_length) and max_batch_length > 0):
        raise UsageError(
            f"max_batch_length must be positive and finite, got {max_batch_length:g}"
        )
    settings = structs.replace(
        settings, strategies=settings.strategies or tuple(STRATEGIES)
    )
    is_padded = settings.multiple_of is not None
    limits = Limits(
        max_batch_length=max_batch_length,
        max_batch_size=settings.max_batch_size,
        frontier=costs.frontier,
    )
    if is_padded:
        limits = replace(
            limits,
            frontier=costs.continued_frontier or costs.frontier,
            measured_up_to=lengths.longest,
        )
    pricing = Pricing.of(lengths, max_batch_length, settings, costs)
    priced = []
    for one in _rows(pricing, limits, settings):
        priced.append(one)
        on_row(one.row)
    rows = with_equals(priced)
    baselines = fixed_baselines(pricing, limits)
    recommendation = recommend(
        rows, baselines, min_randomness=settings.min_randomness, few_shapes=is_padded
    )
    recommended = None
    if recommendation.row is not None:
        recommended = rows[recommendation.row]
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
        lower_bound=lower_bound(pricing, limits, [*rows, *baselines]),
        recommended=recommendation.row,
        recommended_table=recommendation.portable,
        reason=recommendation.reason,
        warnings=list(cautions(lengths, limits, rows)),
        trade_off=trade_off(epoch_costs(rows), [row.mates_again for row in rows]),
        saturation=saturation(
            pricing, limits, most_buckets, settings.throughput_fraction
        ),
        two_dimensional=two_dimensional_rows(pricing, limits, costs, rows),
        histogram=histogram_of(lengths),
        quantiles=quantiles_of(lengths),
    )
    if current is not None:
        swept = _with_current(swept, current, lengths, pricing, limits, priced)
    if recommended is None:
        return swept
    return structs.replace(
        swept,
        learning_rate=_learning_rate(swept.current, baselines[0], recommended),
        buckets=bucket_uses(lengths, pricing, recommended, costs.proven_by),
    )


def _rows(
    pricing: Pricing, limits: Limits, settings: SweepSettings
) -> Iterator[Priced]:
    problems = {sizing: _problem(pricing, limits, sizing) for sizing in limits.sizings}
    for name in settings.strategies:
        strategy = STRATEGIES[name]
        numbers = settings.num_buckets
        sizings = limits.sizings[:1]
        if strategy.depends_on_sizes:
            sizings = limits.sizings
        if (
            strategy.in_pools
        ):  # a sampler of our own runs them, which takes whatever is known to fit
            numbers = _pool_sizes(settings, pricing.lengths.count)
            sizings = limits.sizings[-1:]
        for sizing in sizings:
            tables = strategy.boundaries(problems[sizing], numbers)
            for number, boundaries in zip(numbers, tables, strict=True):
                if settings.multiple_of is not None:
                    boundaries = np.unique(padded_to(boundaries, settings.multiple_of))
                table = BucketTable(boundaries, limits.batch_sizes(boundaries, sizing))
                if (
                    strategy.in_pools
                ):  # the table says how many examples fit, `number` how large pools are
                    yield pricing.of_epochs(
                        name, sizing, pricing.best_cut(Batching(table, number))
                    )
                else:
                    yield pricing.of_table(name, sizing, number, table)


def _problem(pricing: Pricing, limits: Limits, sizing: Sizing) -> Problem:
    histogram = pricing.lengths.histogram
    step_seconds = pricing.step_seconds
    problem = Problem(
        histogram=histogram,
        max_batch_length=limits.max_batch_length,
        batch_sizes=limits.batch_sizes(histogram.lengths, sizing),
    )
    if step_seconds is None:
        return problem

    def epoch_cost(table: BucketTable) -> float:
        return pricing.table_seconds(
            expected_batches(histogram, table, pricing.ranks.dealing)
        )

    return replace(
        problem,
        batch_cost=batch_seconds(step_seconds, pricing.targets),
        epoch_cost=epoch_cost,
    )


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


def _with_current(
    swept: Sweep,
    current: Current,
    lengths: Lengths,
    pricing: Pricing,
    limits: Limits,
    priced: Sequence[Priced],
) -> Sweep:
    """Return the sweep with the user's own settings as a row, whose batches are padded as they come."""
    batching = current_batching(current, lengths)
    own = replace(pricing, lengths=lengths).priced(
        "current", current.settings.SIZING, batching
    )
    row = with_equals([*priced, own])[-1]
    fits = all_fit(limits, *batching.largest_batches(lengths.histogram))
    warnings = [*swept.warnings]
    if not fits:
        warnings.append(
            f"{YOURS} makes batches that are larger than what was found to fit (or than the max_batch_length that was "
            "given): its times are extrapolated, and it may run out of memory"
        )
    return structs.replace(
        swept,
        current=row,
        current_fits=fits,
        current_settings=current.record(
            current.settings.describe(lengths.unit), current.settings.record()
        ),
        warnings=[*warnings, *current.settings.cautions(lengths, row)],
        lower_bound=lower_bound(pricing, limits, [*swept.rows, *swept.baselines, row]),
    )


def _learning_rate(
    current: Row | None, baseline: Baseline, recommended: Row
) -> LearningRate:
    """Return how to scale a learning rate from the user's settings, or from a fixed batch size, by the rules in use.

    Linear: Goyal et al. 2017, "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour" (arXiv:1706.02677), for
    SGD. Square root: Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks"
    (arXiv:1404.5997), which keeps the variance of the update; Malladi et al. 2022, "On the SDEs and Scaling Rules for
    Adaptive Gradient Algorithms" (arXiv:2205.10287), derive it for Adam and RMSprop.
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


def all_fit(limits: Limits, batch_sizes: IntArray, longest: FloatArray) -> bool:
    """Return whether all these batches stay within the limits; a batch of one always does."""
    return bool(
        (
            (batch_sizes == 1)
            | (batch_sizes <= limits.batch_sizes(longest, limits.sizings[-1]))
        ).all()
    )
