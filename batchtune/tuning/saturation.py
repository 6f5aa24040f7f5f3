"""The throughput by max_batch_length: beyond some value a larger one saves next to nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np

from batchtune.batching.expectation import expected_batches
from batchtune.batching.layout import tally
from batchtune.batching.optimal import optimal_boundaries
from batchtune.batching.table import BucketTable, Limits
from batchtune.lengths import Histogram, IntArray, Lengths
from batchtune.results import Saturation, SaturationPoint
from batchtune.tuning.epoch_cost import Pricing
from batchtune.tuning.targets import batch_seconds

# Values of max_batch_length that are compared; fewer where rounding makes some equal.
_POINTS = 24
# Different lengths that are distinguished; of more, the longest of each group of neighbours stands for it.
_MOST_LENGTHS = 4096


def saturation(pricing: Pricing, limits: Limits, num_buckets: int, fraction: float) -> Saturation | None:
    """Return the throughput of the optimal table (over full batches) at values of max_batch_length up to the largest.

    The values are evenly spaced in their logarithm, from the longest length, below which an example would not fit
    into its batch, to the largest, which is one of them exactly. Where the longest length is no less than that, it is
    the only one. Batch sizes are those that max_batch_length gives, and no more than the frontier and max_batch_size
    allow.

    Of more than 4096 distinct lengths, neighbours are taken to be as long as the longest of them: a few ten-thousandths
    of the range are added to them, and nothing changes in which bucket they are.

    Args:
        pricing: Of the data set.
        limits: Their max_batch_length is the largest of the values.
        num_buckets: The most buckets that the optimal table may have, at least 1.
        fraction: Of the best throughput among the points that the smallest max_batch_length must reach.

    Returns:
        None without step times.
    """
    if pricing.step_seconds is None:
        return None
    histogram = _at_most(pricing.lengths.histogram, _MOST_LENGTHS)
    fits = None if limits.frontier is None else limits.batch_sizes(histogram.lengths, "frontier")

    def point(max_batch_length: float) -> SaturationPoint:
        sizes = replace(limits, max_batch_length=max_batch_length).batch_sizes(histogram.lengths, "length")
        if fits is not None:
            sizes = np.minimum(sizes, fits)
        return _point(pricing, histogram, sizes, max_batch_length, num_buckets)

    found = [point(value) for value in _values(pricing.lengths, limits.max_batch_length)]
    enough = fraction * max(point.throughput for point in found)
    return Saturation(
        num_buckets=num_buckets,
        points=found,
        fraction=fraction,
        max_batch_length=next(point.max_batch_length for point in found if point.throughput >= enough),
    )


def _point(
    pricing: Pricing, histogram: Histogram, sizes: IntArray, max_batch_length: float, num_buckets: int
) -> SaturationPoint:
    assert pricing.step_seconds is not None
    whole = sizes.astype(np.float64)
    seconds = batch_seconds(pricing.step_seconds, pricing.targets)(whole, histogram.lengths)
    (boundaries,) = optimal_boundaries(histogram, np.asarray(seconds, dtype=np.float64) / whole, [num_buckets])
    table = BucketTable(boundaries, sizes[np.searchsorted(histogram.lengths, boundaries)])
    dealt = tally(table.counts(histogram), table.batch_sizes, pricing.ranks.dealing)
    epoch_seconds = pricing.epoch_seconds(expected_batches(histogram, table))
    return SaturationPoint(
        max_batch_length=max_batch_length,
        batches=dealt.batches,
        mean_batch_size=dealt.mean_batch_size,
        estimated_epoch_seconds=epoch_seconds,
        throughput=pricing.lengths.total / epoch_seconds,
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
