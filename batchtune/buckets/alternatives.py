"""Compares a sweep's tables with fixed batch sizes, a lower bound and tables over two lengths.

Also makes batches smaller where an epoch must keep its number of optimizer steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from batchtune.buckets.optimal import optimal_table_2d
from batchtune.epochs.batchers import Batching
from batchtune.epochs.layout import (
    ON_ONE_RANK,
    EpochBatches,
    RankSplit,
    lay_out,
    shapes_of,
)
from batchtune.epochs.measured_costs import (
    Costs,
    batch_seconds,
    share_of,
)
from batchtune.epochs.pricing import Pricing
from batchtune.epochs.simulation import simulate_length_grouped
from batchtune.epochs.table import BucketTable, Limits, batch_sizes_for
from batchtune.errors import UsageError
from batchtune.lengths import FloatArray, IntArray, Lengths
from batchtune.results import Baseline, Keep, LowerBound, Row, TwoDimensionalRow
from batchtune.units import counted

_ANY_BATCH_SIZE = 2**53
# Halvings of the range in which a share is searched.
_HALVINGS = 30
# Shuffles to average over: an epoch has many batches, so they differ little.
_SHUFFLES = 3
# Lengths and shares of the batch sizes at which throughput is compared.
_OF_THROUGHPUT = 128
_SHARES = 128
# Of more examples, so many that are evenly spaced in order of length stand for all.
_MOST_SIMULATED = 1 << 24


def two_dimensional_rows(
    pricing: Pricing, limits: Limits, costs: Costs, rows: Sequence[Row]
) -> list[TwoDimensionalRow]:
    """Return the best tables over both lengths, next to the best over length alone with as many buckets.

    Times and numbers of batches are those of simulated epochs on one rank, the same shuffles for both. Compared are
    the rows with the fewest and the most buckets among those with boundaries for the frontier. Without such rows,
    targets or a joint frontier the list is empty.
    """
    joint = costs.joint_frontier
    step_seconds = pricing.step_seconds
    lengths = pricing.lengths
    by_count = {
        row.num_buckets: row
        for row in rows
        if row.sizing == "frontier" and not row.uses_pools
    }
    if joint is None or not lengths.has_targets or not by_count:
        return []
    sample = lengths.evenly(_MOST_SIMULATED)
    assert sample.targets is not None
    compared = [by_count[count] for count in sorted({min(by_count), max(by_count)})]

    def sizes(long: FloatArray, target: FloatArray) -> IntArray:
        return np.minimum(joint(long, target), limits.max_batch_size or _ANY_BATCH_SIZE)

    def example_costs(long: FloatArray, target: FloatArray) -> FloatArray:
        batch = sizes(long, target).astype(np.float64)
        if step_seconds is None:
            return 1 / batch
        return step_seconds(batch, long, target) / batch

    tables = optimal_table_2d(
        sample.values,
        sample.targets,
        example_costs,
        [row.num_buckets for row in compared],
        candidates=np.unique(
            np.concatenate([costs.joint_lengths, *(row.boundaries for row in compared)])
        ),
    )
    tables_compared = []
    for row, unsized in zip(compared, tables, strict=True):
        table = replace(unsized, batch_sizes=sizes(*unsized.pairs))
        flat_batches, flat_seconds = _simulated(Batching.of(row), pricing)
        batches, seconds = _simulated(Batching(table), pricing)
        proven = costs.joint_proven and costs.joint_proven(*table.pairs)
        tables_compared.append(
            TwoDimensionalRow(
                num_buckets=row.num_buckets,
                buckets=list(
                    zip(*(edges.tolist() for edges in table.pairs), strict=True)
                ),
                batch_sizes=table.batch_sizes.tolist(),
                batches=batches,
                estimated_epoch_seconds=seconds,
                one_dimensional_batches=flat_batches,
                one_dimensional_epoch_seconds=flat_seconds,
                unproven=None
                if proven is None
                else int(np.count_nonzero(table.batch_sizes > proven)),
            )
        )
    return tables_compared


def _simulated(batching: Batching, pricing: Pricing) -> tuple[int, float | None]:
    """Return the number of batches of an epoch on one rank, and its mean time over a few shuffles."""
    lengths = pricing.lengths.evenly(_MOST_SIMULATED)
    scale = pricing.lengths.count / lengths.count
    batcher = batching.batcher(lengths.values, lengths.targets)
    shapes = [
        shapes_of(cut, drawing, lengths)
        for drawing, cut in batcher.first_epochs(_SHUFFLES, ON_ONE_RANK)
    ]
    _, seconds = replace(pricing, dealing=ON_ONE_RANK).mean_cost(shapes, scale)
    return round(len(shapes[0]) * scale), seconds


def fixed_baselines(
    pricing: Pricing, limits: Limits, fewest: int = 1
) -> list[Baseline]:
    """Return the costs of the largest fixed batch size that fits the longest examples and makes `fewest` batches.

    The examples are shuffled, sorted by length, or grouped as Transformers' `group_by_length` does. Every rank has as
    many batches, as for the rows: the first are split in two until that is so. All examples are of one bucket, so the
    batches are also those of ranks that take the same bucket, but for the cut of the last ones. The frontier decides
    what fits, without one max_batch_length.
    """
    lengths = pricing.lengths
    longest = lengths.histogram.lengths[-1:]
    size = int(limits.largest_sizes(longest)[0])
    if fewest > 1:
        size = max(1, min(size, (lengths.count - 1) // (fewest - 1)))
    table = BucketTable(longest, np.array([size]))
    independent = replace(pricing, dealing=replace(pricing.dealing, same_bucket=False))
    shuffled = independent.of_table("fixed", "length", 1, table).row
    in_order = lengths.evenly(_MOST_SIMULATED)
    layout = lay_out(
        np.array([in_order.count]),
        table.batch_sizes,
        RankSplit(world_size=pricing.dealing.world_size),
    )
    cut = EpochBatches(np.arange(in_order.count), layout)
    shapes = cut.shapes(in_order.values, in_order.targets)
    scale, grouped = simulate_length_grouped(
        lengths, size, pricing.dealing, pricing.seed
    )
    costs = {
        "fixed-random": (shuffled.padded_length, shuffled.estimated_epoch_seconds),
        "fixed-sorted": pricing.mean_cost([shapes], lengths.count / in_order.count),
        "length-grouped": pricing.mean_cost(grouped, scale),
    }
    deviations = {"fixed-random": shuffled.step_tokens_deviation}
    return [
        Baseline(
            name=name,
            batch_size=size,
            batches=shuffled.batches,
            padded_length=padded_length,
            padding_ratio=pricing.padding_ratio(padded_length),
            estimated_epoch_seconds=seconds,
            steps=shuffled.steps,
            step_tokens_deviation=deviations.get(name),
        )
        for name, (padded_length, seconds) in costs.items()
    ]


def lower_bound(
    pricing: Pricing,
    limits: Limits,
    compared: Sequence[Row | Baseline],
    fewest: int = 1,
) -> LowerBound:
    """Return the bound that no bucket table can beat under these limits.

    An example takes at least the share of a batch that it would take among examples of its own length, or of a longer
    example if that is smaller (a frontier need not be monotone). Every rank has as many batches, and none ever waits.
    The time per example is taken to be least in a batch of the largest size, its half, its quarter and so on; and the
    epoch's is no higher than any of those `compared`, as measured step times need not be that regular. At least
    `fewest` batches are asked for.
    """
    histogram = pricing.lengths.histogram
    ranks = pricing.dealing.world_size
    sizes = [limits.batch_sizes(histogram.lengths, sizing) for sizing in limits.sizings]
    whole = np.max(sizes, axis=0).astype(np.float64)
    # A batch can't be filled better than to max_batch_length exactly; whole examples reach that only by luck.
    capacity = np.maximum(whole, limits.max_batch_length / histogram.lengths)
    if limits.max_batch_size is not None:
        capacity = np.minimum(capacity, limits.max_batch_size)
    shares = float(np.sum(histogram.counts / _greatest_from_here_on(capacity)))
    seconds = [
        other.estimated_epoch_seconds
        for other in compared
        if other.estimated_epoch_seconds is not None
    ]
    if pricing.step_seconds is not None:
        largest = _greatest_from_here_on(whole)
        halvings = np.arange(np.ceil(np.log2(largest.max())) + 1)[:, np.newaxis]
        size = np.maximum(1.0, np.floor(largest / 2**halvings))
        shapes = [size, np.broadcast_to(histogram.lengths, size.shape)]
        targets = pricing.targets
        # A batch's longest is at least the mean of its examples' targets.
        if targets is not None:
            shapes.append(np.broadcast_to(targets.means, size.shape))
        lowest = np.min(pricing.step_seconds(*shapes) / size, axis=0)
        seconds.append(
            float(np.sum(histogram.counts * -_greatest_from_here_on(-lowest))) / ranks
        )
    return LowerBound(
        # Rounding must not make it one too many.
        batches=ranks
        * max(-(-fewest // ranks), math.ceil(shares / ranks * (1 - 1e-12))),
        padded_length=pricing.total,
        estimated_epoch_seconds=min(seconds, default=None),
    )


def share_for(lengths: Lengths, limits: Limits, fewest: int) -> float:
    """Return the largest share of the batch sizes that fit with which no way to batch has fewer batches than `fewest`.

    An example takes at least the share of a batch that it would take among as many of its own length as may be in one,
    or of a longer example.
    """
    histogram = lengths.histogram
    fits: IntArray = np.zeros(histogram.lengths.size, dtype=np.int64)
    if limits.frontier is not None:
        fits = limits.frontier(histogram.lengths)

    def has_enough(share: float) -> bool:
        by_length = batch_sizes_for(histogram.lengths, share * limits.max_batch_length)
        sizes = np.maximum(by_length, share_of(fits, share)).astype(np.float64)
        if limits.max_batch_size is not None:
            sizes = np.minimum(sizes, limits.max_batch_size)
        return bool(
            # Rounding must not make it one too many.
            np.sum(histogram.counts / _greatest_from_here_on(sizes)) * (1 - 1e-12)
            > fewest - 1
        )

    if has_enough(1.0):
        return 1.0
    share = 0.0
    too_large = 1.0
    for _ in range(_HALVINGS):
        middle = (share + too_large) / 2
        if has_enough(middle):
            share = middle
        else:
            too_large = middle
    return share


def share_within(
    fraction: float, pricing: Pricing, limits: Limits, keep: Keep
) -> float:
    """Return the smallest share of the batch sizes that fit with which full batches reach a part of the throughput.

    It is that of the best share, in examples a second, by the times of batches of equal lengths. Raises UsageError if
    these are not known, or steps are kept.
    """
    if keep != "nothing":
        raise UsageError(
            f"--throughput-fraction makes batches smaller, but --keep {keep} already decides their size",
            "Leave out one of the two, or add --keep nothing.",
        )
    if pricing.step_seconds is None:
        raise UsageError(
            "--throughput-fraction needs step times, and none are known",
            "Measure them with `batchtune probe-oom`, or leave it out.",
        )
    lengths = pricing.lengths.evenly(_OF_THROUGHPUT)
    fits = limits.largest_sizes(lengths.values)
    cost = batch_seconds(pricing.step_seconds, pricing.targets)
    shares = np.geomspace(1 / fits.max(), 1.0, _SHARES)
    seconds = []
    for share in shares:
        sizes = share_of(fits, share).astype(np.float64)
        seconds.append(float((cost(sizes, lengths.values) / sizes).sum()))
    best = min(seconds)
    reaching = [seconds_of_share * fraction <= best for seconds_of_share in seconds]
    return float(shares[reaching.index(True)])


def check_min_steps(min_steps: int, lengths: Lengths, dealing: RankSplit) -> None:
    """Raise UsageError if not even batches of one make so many optimizer steps."""
    if fewest_batches(min_steps, dealing) <= lengths.count:
        return
    ranks = ""
    if dealing.world_size * dealing.accumulate > 1:
        ranks = f" on {counted(dealing.world_size, 'rank')}, with an accumulation of {dealing.accumulate:,}"
    raise UsageError(
        f"--min-steps {min_steps}: an epoch of {counted(lengths.count, 'example')} has at most "
        f"{counted(dealing.steps(lengths.count), 'optimizer step')}{ranks}, with batches of one",
        "Lower it.",
    )


def fewest_batches(min_steps: int, dealing: RankSplit) -> int:
    """Return the fewest batches of an epoch, over all ranks, that make so many optimizer steps."""
    return (min_steps - 1) * dealing.world_size * dealing.accumulate + 1


def _greatest_from_here_on(values: FloatArray) -> FloatArray:
    return np.maximum.accumulate(values[::-1])[::-1]
