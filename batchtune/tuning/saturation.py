"""How throughput grows with max_batch_length: from where on a larger one brings next to nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from batchtune.batching import epochs
from batchtune.batching.epochs import ON_ONE_RANK, Dealing
from batchtune.batching.expectation import ExpectedBatches, expected_batches
from batchtune.batching.limits import Limits
from batchtune.batching.optimal import optimal_boundaries
from batchtune.batching.table import BucketTable
from batchtune.errors import UsageError
from batchtune.lengths import Histogram, IntArray, Lengths
from batchtune.results import Saturation, SaturationPoint
from batchtune.tuning.estimates import StepSeconds, batch_seconds, epoch_seconds
from batchtune.tuning.targets import TypicalTargets

EpochSeconds = Callable[[ExpectedBatches, BucketTable], float]
"""The batches of a table, and the table → the time of an epoch."""

# Different lengths that are told apart; of more, the longest of each group of neighbours stands for it.
_MOST_LENGTHS = 4096


def saturation(
    lengths: Lengths,
    limits: Limits,
    step_seconds: StepSeconds | None,
    targets: TypicalTargets | None,
    num_buckets: int,
    *,
    fraction: float = 0.95,
    points: int = 24,
    epoch: EpochSeconds | None = None,
    dealing: Dealing = ON_ONE_RANK,
) -> Saturation | None:
    """The throughput of the optimal table (over full batches) at values of max_batch_length up to the largest allowed.

    The values are evenly spaced in their logarithm, from the longest length, below which an example would not fit
    into its batch, to the largest, which is one of them exactly. Where the longest length is no less than that, it is
    the only one. Batch sizes are those that max_batch_length gives, and no more than the frontier and max_batch_size
    allow.

    Of more than 4096 distinct lengths, neighbours are taken to be as long as the longest of them: a few ten-thousandths
    of the range are added to them, and nothing changes in which bucket they are.

    Args:
        lengths: The data set.
        limits: Their max_batch_length is the largest of the values.
        step_seconds: The time of one step, or None.
        targets: Of the data set, where it has any.
        num_buckets: The most buckets that the optimal table may have, at least 1.
        fraction: Of the best throughput among the points that the smallest max_batch_length must reach.
        epoch: The time of an epoch, on several ranks for instance; None: the sum over its batches.
        dealing: How the batches of all ranks are cut, which are counted.
        points: How many values to compare, at least 2; fewer where rounding makes some equal.

    Returns:
        None without step times.

    Raises:
        UsageError: `fraction` is not above 0 and at most 1.
        ValueError: `points` is below 2, or `num_buckets` below 1.
    """
    if not 0 < fraction <= 1:
        raise UsageError(
            f"the fraction of the best throughput must be above 0 and at most 1, got {fraction:g}",
            "0.95 asks for the smallest max_batch_length that reaches 95% of it.",
        )
    if points < 2:
        raise ValueError(f"points must be at least 2, got {points}")
    if step_seconds is None:
        return None
    histogram = _at_most(lengths.histogram, _MOST_LENGTHS)
    fits = None if limits.frontier is None else limits.batch_sizes(histogram.lengths, "frontier")
    known = step_seconds

    def summed(expected: ExpectedBatches, table: BucketTable) -> float:
        return epoch_seconds(expected, table, known, targets)

    data = _Data(histogram, lengths.total, step_seconds, targets, fits, epoch or summed, dealing)
    found = [
        _point(data, replace(limits, max_batch_length=value), num_buckets)
        for value in _values(lengths, limits.max_batch_length, points)
    ]
    enough = fraction * max(point.throughput for point in found)
    return Saturation(
        num_buckets=num_buckets,
        points=found,
        fraction=fraction,
        max_batch_length=next(point.max_batch_length for point in found if point.throughput >= enough),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Data:
    """What all points have in common.

    Attributes:
        total: True length of all examples.
        fits: Shape (distinct lengths,): the largest batch size by the frontier; None without one.
    """

    histogram: Histogram
    total: float
    step_seconds: StepSeconds
    targets: TypicalTargets | None
    fits: IntArray | None
    epoch: EpochSeconds
    dealing: Dealing


def _point(data: _Data, limits: Limits, num_buckets: int) -> SaturationPoint:
    ends = data.histogram.lengths
    sizes = limits.batch_sizes(ends, "length")
    if data.fits is not None:
        sizes = np.minimum(sizes, data.fits)
    whole = sizes.astype(np.float64)
    each = np.asarray(batch_seconds(data.step_seconds, data.targets)(whole, ends), dtype=np.float64) / whole
    (boundaries,) = optimal_boundaries(data.histogram, each, [num_buckets])
    table = BucketTable(boundaries, sizes[np.searchsorted(ends, boundaries)])
    tally = epochs.tally(table.counts(data.histogram), table.batch_sizes, data.dealing)
    seconds = data.epoch(expected_batches(data.histogram, table), table)
    return SaturationPoint(
        max_batch_length=limits.max_batch_length,
        batches=tally.batches,
        mean_batch_size=tally.examples / tally.batches,
        estimated_epoch_seconds=seconds,
        throughput=data.total / seconds,
    )


def _values(lengths: Lengths, largest: float, points: int) -> list[float]:
    """Values of max_batch_length in ascending order, but for the ends in four digits, as whole as the lengths are."""
    if lengths.longest >= largest:
        return [largest]
    between = [float(f"{value:.4g}") for value in np.geomspace(lengths.longest, largest, points)[1:-1]]
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
