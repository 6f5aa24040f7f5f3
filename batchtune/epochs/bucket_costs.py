"""The cost of every bucket that ends at a given length: its batches, counted, or by their expected longest example."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import cast

import numpy as np

from batchtune.epochs.expectation import BatchCost, all_within, log_factorials_up_to
from batchtune.lengths import FloatArray, Histogram, IntArray

# The cost of the last batch of a bucket is looked up among this many sizes; up to about 45 each has its own.
_TABLED_SIZES = 256


class BucketCosts(ABC):
    """The cost of every bucket (u_i, u_j], for `num_ends` ends u_1 < u_2 < ... and u_0 below all lengths.

    `ends` are indices of distinct lengths, as `few_ends` returns them, `batch_sizes` of buckets that end there.
    """

    def __init__(self, histogram: Histogram, ends: IntArray, batch_sizes: IntArray) -> None:
        self.num_ends = ends.size
        # Shape (ends + 1,): the number of examples up to each end.
        self._counts = np.concatenate(([0], histogram.cumulative[ends])).astype(np.int64)
        # No batch is larger than the data set.
        self._sizes = np.minimum(batch_sizes, histogram.count + 1)

    @abstractmethod
    def up_to(self, end: int) -> FloatArray:
        """Return the cost of the bucket (u_i, u_end] for each i < end, shape (end,)."""


class BatchCounts(BucketCosts):
    """The number of batches of a bucket: ceil(n / B) of its n examples, with the batch size B at its end."""

    def up_to(self, end: int) -> FloatArray:
        """As for every `BucketCosts`."""
        batches = -((self._counts[:end] - self._counts[end]) // self._sizes[end - 1])
        return cast(FloatArray, batches.astype(np.float64))


class ExpectedCosts(BucketCosts):
    """The sum of the cost over every length that can be the longest of a batch, as `ExpectedBatches.sum_of` does.

    It is exact if all lengths are ends. If not, all lengths between two ends count as their mean. It takes O(U²) steps
    for each of U ends.
    """

    def __init__(self, histogram: Histogram, ends: IntArray, batch_sizes: IntArray, cost: BatchCost) -> None:
        super().__init__(histogram, ends, batch_sizes)
        totals = np.diff(histogram.cumulative_total[ends], prepend=0.0)
        self._lengths = totals / np.diff(self._counts)
        self._cost = cost
        self._log_factorials = log_factorials_up_to(histogram.count)
        largest = min(int(self._sizes.max()), histogram.count)
        self._tabled = np.unique(np.geomspace(1, largest, _TABLED_SIZES).round())
        sizes = np.repeat(self._tabled, ends.size)
        costs = np.asarray(cost(sizes, np.tile(self._lengths, self._tabled.size)), dtype=np.float64)
        self._table = costs.reshape(self._tabled.size, ends.size)

    def up_to(self, end: int) -> FloatArray:
        """As for every `BucketCosts`."""
        examples = self._counts[end] - self._counts[:end]
        size = self._sizes[end - 1]
        batches = examples // size
        full = int(np.count_nonzero(batches))  # the first buckets, which hold the most examples, have full batches
        costs = np.asarray(self._cost(np.full(end, float(size)), self._lengths[:end]), dtype=np.float64)
        total = np.zeros(end)
        total[:full] = batches[:full] * (self._longest(end, np.full(full, size)) @ costs)
        rests = examples % size
        rows = np.searchsorted((self._tabled[1:] + self._tabled[:-1]) / 2, rests)
        total += np.where(rests > 0, np.sum(self._longest(end, rests) * self._table[rows, :end], axis=1), 0.0)
        return total

    def _longest(self, end: int, drawn: IntArray) -> FloatArray:
        """Return P(the longest of a batch lies behind each end), shape (buckets, end), of the buckets (u_i, u_end]."""
        firsts = self._counts[: drawn.size, np.newaxis]
        within = np.maximum(self._counts[: end + 1] - firsts, 0)
        upper = all_within(within, self._counts[end] - firsts, drawn[:, np.newaxis], self._log_factorials)
        return np.diff(upper, axis=1)
