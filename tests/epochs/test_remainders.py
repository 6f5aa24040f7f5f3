from __future__ import annotations

import numpy as np

from batchtune.buckets.optimal import (
    best_buckets,
    optimal_boundaries,
    representative_ends,
)
from batchtune.epochs.expectation import BatchCounts
from batchtune.epochs.table import batch_sizes_for
from batchtune.lengths import FloatArray, Histogram, IntArray, Lengths


def histogram_of(counts: IntArray) -> Histogram:
    return Histogram(
        np.arange(1.0, len(counts) + 1), np.asarray(counts, dtype=np.int64)
    )


def fewest_batches(
    histogram: Histogram, sizes: IntArray, num_buckets: int
) -> FloatArray:
    """The boundaries of the fewest buckets, at most so many, that give the fewest batches."""
    ends = np.arange(histogram.lengths.size)
    best = best_buckets(BatchCounts(histogram, ends, sizes), num_buckets)
    return histogram.lengths[best.ends(best.improving()[-1])]


def number_of_batches(
    histogram: Histogram, sizes: IntArray, boundaries: FloatArray
) -> int:
    ends = np.searchsorted(histogram.lengths, boundaries)
    return int(
        np.sum(-(-np.diff(histogram.cumulative[ends], prepend=0) // sizes[ends]))
    )


def test_a_bucket_whose_only_gain_is_in_full_batches_is_not_made() -> None:
    histogram = histogram_of(np.array([3, 3]))
    sizes = np.array([8, 6])
    assert optimal_boundaries(histogram, 1 / sizes, [2])[0].tolist() == [1, 2]
    assert fewest_batches(histogram, sizes, 2).tolist() == [2]


def test_batches_larger_than_the_data_set_are_one_remainder() -> None:
    assert fewest_batches(
        histogram_of(np.array([2, 3])), np.array([2**53, 2**53]), 2
    ).tolist() == [2]


def test_a_few_ends_give_as_few_batches_as_all() -> None:
    rng = np.random.default_rng(7)
    histogram = Lengths.of((rng.gamma(6, 2, 15_000) * 16_000).round()).histogram
    sizes = batch_sizes_for(histogram.lengths, 4000 * 16_000)
    ends = representative_ends(histogram, sizes, 4096)
    assert histogram.lengths.size > 4 * ends.size
    asked = [2, 5, 10, 20]
    relaxed = [
        number_of_batches(histogram, sizes, b)
        for b in optimal_boundaries(histogram, 1 / sizes, asked)
    ]
    found = best_buckets(BatchCounts(histogram, ends, sizes[ends]), 20)
    assert relaxed == [78, 56, 55, 55]
    # With each of the 14,587 lengths as an end, which takes ten times as long, it is the same.
    assert [found.totals[:most].min() for most in asked] == [77, 55, 50, 48]
