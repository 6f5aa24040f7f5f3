"""Other choices than a table at the largest max_batch_length: a smaller one, and tables over two lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from batchtune.batching import epochs
from batchtune.batching.batchers import Batching
from batchtune.batching.expectation import expected_batches
from batchtune.batching.layout import ON_ONE_RANK, tally
from batchtune.batching.optimal import optimal_boundaries
from batchtune.batching.table import BucketTable, Limits
from batchtune.batching.two_dimensional import optimal_table_2d
from batchtune.lengths import FloatArray, Histogram, IntArray, Lengths
from batchtune.results import Row, Saturation, SaturationPoint, TwoDimensionalRow
from batchtune.tuning.costs import Costs, batch_seconds
from batchtune.tuning.epoch_cost import EpochCost, Pricing
from batchtune.tuning.sweep_settings import ONE_RANK

# Values of max_batch_length that are compared; fewer where rounding makes some equal.
_POINTS = 24
# Different lengths that are distinguished; of more, the longest of each group of neighbours stands for it.
_MOST_LENGTHS = 4096
# Shuffles to average over: an epoch has many batches, so they differ little.
_SHUFFLES = 3


def saturation(pricing: Pricing, limits: Limits, num_buckets: int, fraction: float) -> Saturation | None:
    """Return the throughput of the optimal table (over full batches) at values of max_batch_length up to the largest.

    The values are evenly spaced in their logarithm, from the longest length, below which an example would not fit
    into its batch, to the largest, which is one of them exactly. Where the longest length is no less than that, it is
    the only one. Batch sizes are those that max_batch_length gives, and no more than the frontier and max_batch_size
    allow.

    Of more than 4096 distinct lengths, neighbours are taken to be as long as the longest of them: a few ten-thousandths
    of the range are added to them, and nothing changes in which bucket they are.

    The table has at most `num_buckets`; the smallest max_batch_length is named that reaches the `fraction` of the best
    throughput among the points. None without step times.
    """
    if pricing.step_seconds is None:
        return None
    cost = batch_seconds(pricing.step_seconds, pricing.targets)
    histogram = _at_most(pricing.lengths.histogram, _MOST_LENGTHS)
    fits = None if limits.frontier is None else limits.batch_sizes(histogram.lengths, "frontier")
    found = []
    for max_batch_length in _values(pricing.lengths, limits.max_batch_length):
        sizes = replace(limits, max_batch_length=max_batch_length).batch_sizes(histogram.lengths, "length")
        if fits is not None:
            sizes = np.minimum(sizes, fits)
        whole = sizes.astype(np.float64)
        seconds = np.asarray(cost(whole, histogram.lengths), dtype=np.float64)
        (boundaries,) = optimal_boundaries(histogram, seconds / whole, [num_buckets])
        table = BucketTable(boundaries, sizes[np.searchsorted(histogram.lengths, boundaries)])
        dealt = tally(table.counts(histogram), table.batch_sizes, pricing.ranks.dealing)
        epoch_seconds = pricing.epoch_seconds(expected_batches(histogram, table))
        found.append(
            SaturationPoint(
                max_batch_length=max_batch_length,
                batches=dealt.batches,
                mean_batch_size=dealt.mean_batch_size,
                estimated_epoch_seconds=epoch_seconds,
                throughput=pricing.lengths.total / epoch_seconds,
            )
        )
    enough = fraction * max(point.throughput for point in found)
    return Saturation(
        num_buckets=num_buckets,
        points=found,
        fraction=fraction,
        max_batch_length=next(point.max_batch_length for point in found if point.throughput >= enough),
    )


def _values(lengths: Lengths, largest: float) -> list[float]:
    """Values of max_batch_length in ascending order, but for the ends in four digits, as whole as the lengths are."""
    if lengths.longest >= largest:
        return [largest]
    between = [float(f"{value:.4g}") for value in np.geomspace(lengths.longest, largest, _POINTS)[1:-1]]
    if (lengths.histogram.lengths % 1 == 0).all():
        between = [float(round(value)) for value in between]
    inside = {value for value in between if lengths.longest < value < largest}
    return [lengths.longest, *sorted(inside), largest]


def _at_most(histogram: Histogram, most: int) -> Histogram:
    """At most so many distinct lengths: each group of neighbours as long as its longest.

    So what a bucket up to there holds is exact. A group spans about 2 / `most` of the range at most, and but for its
    last length as small a part of the examples.
    """
    if histogram.lengths.size <= most:
        return histogram
    span = histogram.lengths - histogram.lengths[0]
    place = histogram.cumulative / histogram.count + span / span[-1]
    last = np.append(np.flatnonzero(np.diff(np.ceil(place * ((most - 1) / 2)))), span.size - 1)
    counts = np.diff(histogram.cumulative[last], prepend=0)
    return Histogram(histogram.lengths[last], cast(IntArray, counts))


def two_dimensional_rows(
    pricing: Pricing, limits: Limits, costs: Costs, rows: Sequence[Row]
) -> list[TwoDimensionalRow]:
    """Return the best tables over both lengths, next to the best over length alone with as many buckets.

    Times and numbers of batches are those of simulated epochs on one rank, the same shuffles for both. Of the rows
    whose boundaries were chosen for the frontier, those with the fewest and the most buckets are compared with. Without
    targets, without a joint frontier or such a row the list is empty.
    """
    joint, step_seconds, lengths = costs.joint_frontier, pricing.step_seconds, pricing.lengths
    by_count = {row.num_buckets: row for row in rows if row.sizing == "frontier" and row.pool_size is None}
    if joint is None or lengths.targets is None or not by_count:
        return []
    compared = [by_count[count] for count in sorted({min(by_count), max(by_count)})]

    def sizes(long: FloatArray, target: FloatArray) -> IntArray:
        found = joint(long, target)
        return found if limits.max_batch_size is None else np.minimum(found, limits.max_batch_size)

    def example_costs(long: FloatArray, target: FloatArray) -> FloatArray:
        batch = sizes(long, target).astype(np.float64)
        return 1 / batch if step_seconds is None else step_seconds(batch, long, target) / batch

    tables = optimal_table_2d(
        lengths.values,
        lengths.targets,
        example_costs,
        [row.num_buckets for row in compared],
        candidates=np.unique(np.concatenate([costs.joint_lengths, *(row.boundaries for row in compared)])),
    )
    found = []
    for row, unsized in zip(compared, tables, strict=True):
        table = replace(unsized, batch_sizes=sizes(*unsized.pairs))
        one, both = _simulated(BucketTable.of(row.boundaries, row.batch_sizes), pricing), _simulated(table, pricing)
        proven = costs.joint_proven and costs.joint_proven(*table.pairs)
        found.append(
            TwoDimensionalRow(
                num_buckets=row.num_buckets,
                buckets=list(zip(*(edges.tolist() for edges in table.pairs), strict=True)),
                batch_sizes=table.batch_sizes.tolist(),
                batches=both.tally.batches,
                estimated_epoch_seconds=both.seconds,
                one_dimensional_batches=one.tally.batches,
                one_dimensional_epoch_seconds=one.seconds,
                unproven=None if proven is None else int(np.count_nonzero(table.batch_sizes > proven)),
            )
        )
    return found


def _simulated(table: BucketTable, pricing: Pricing) -> EpochCost:
    lengths = pricing.lengths
    batcher = Batching(table).batcher(lengths.values, lengths.targets)
    drawings = [epochs.Drawing(epoch=epoch) for epoch in range(_SHUFFLES)]
    cuts = [(batcher.cut(drawing, ON_ONE_RANK), drawing) for drawing in drawings]
    shapes = [epochs.simulate(cut, drawing, lengths.values, lengths.targets) for cut, drawing in cuts]
    return replace(pricing, ranks=ONE_RANK).of_shapes(shapes)
