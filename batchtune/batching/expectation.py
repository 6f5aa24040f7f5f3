"""What an epoch's batches cost on average over all shuffles, exactly and without shuffling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import numpy as np

from batchtune.batching.table import BucketTable
from batchtune.lengths import FloatArray, Histogram, IntArray

BatchCost = Callable[[FloatArray, FloatArray], FloatArray]
"""(batch sizes, lengths of their longest examples) → cost of each batch, element by element."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpectedBatches:
    """How many batches of each size have each length as their longest, on average over shuffles.

    All arrays have the shape (distinct lengths,).

    Attributes:
        lengths: The distinct lengths, ascending.
        batch_sizes: Batch size of the length's bucket.
        full_batches: Expected number of full batches whose longest example has this length.
        remainders: Size of the bucket's last batch where it is not full, else 0.
        remainder_batches: Probability that the bucket's last batch, where not full, has this longest length.
    """

    lengths: FloatArray
    batch_sizes: IntArray
    full_batches: FloatArray
    remainders: IntArray
    remainder_batches: FloatArray

    def sum_of(self, cost: BatchCost) -> float:
        """The expected sum of a cost over the epoch's batches."""
        full = np.asarray(cost(self.batch_sizes.astype(np.float64), self.lengths))
        total = float(np.sum(self.full_batches * full))
        some = self.remainders > 0
        if some.any():
            rest = np.asarray(cost(self.remainders[some].astype(np.float64), self.lengths[some]))
            total += float(np.sum(self.remainder_batches[some] * rest))
        return total

    @property
    def padded_length(self) -> float:
        """The expected sum of the batches' padded lengths."""
        return self.sum_of(np.multiply)


def expected_batches(histogram: Histogram, table: BucketTable) -> ExpectedBatches:
    """The batches to expect when each bucket's examples are shuffled and cut into batches.

    A bucket of n examples gives floor(n / B) batches of B and one of the remainder. In a uniform shuffle each
    of them is a uniformly drawn subset, so P(longest of s ≤ x) = C(c, s) / C(n, s) with c the number of the
    bucket's examples up to x; expectations are linear, so that says all about sums over batches.

    Args:
        histogram: The distinct lengths and their counts.
        table: Its last boundary is at least the longest length.

    Raises:
        ValueError: The longest length is beyond the last boundary.
    """
    edges, counts = table.edges(histogram), table.counts(histogram)
    per_bucket = np.diff(edges)
    sizes, in_bucket = np.repeat(table.batch_sizes, per_bucket), np.repeat(counts, per_bucket)
    remainders = in_bucket % sizes
    up_to = np.concatenate(([0], histogram.cumulative))
    at_most = histogram.cumulative - np.repeat(up_to[edges[:-1]], per_bucket)
    firsts = edges[:-1][per_bucket > 0]
    log_factorials = _log_factorials(histogram.count)

    def longest_probability(drawn: IntArray) -> FloatArray:
        within = _all_within(at_most, in_bucket, drawn, log_factorials)
        shorter = np.concatenate(([0.0], within[:-1]))
        shorter[firsts] = 0.0
        return np.maximum(within - shorter, 0.0)

    return ExpectedBatches(
        lengths=histogram.lengths,
        batch_sizes=sizes,
        full_batches=(in_bucket // sizes) * longest_probability(sizes),
        remainders=remainders,
        remainder_batches=longest_probability(remainders) * (remainders > 0),
    )


def _all_within(within: IntArray, count: IntArray, drawn: IntArray, log_factorials: FloatArray) -> FloatArray:
    """C(within, drawn) / C(count, drawn): P(all of `drawn` out of `count` lie among the first `within`)."""
    possible = drawn <= within
    some = np.where(possible, drawn, 0)
    # Grouped so that within = count cancels exactly: the last probability of a bucket is 1, not nearly 1.
    log_ratio = (log_factorials[within] - log_factorials[within - some]) - (
        log_factorials[count] - log_factorials[count - some]
    )
    return np.where(possible, np.exp(log_ratio), 0.0)


@lru_cache(maxsize=1)  # the tables of a sweep are all for the same number of examples
def _log_factorials(largest: int) -> FloatArray:
    """Shape (largest + 1,): the logarithms of 0!, 1!, 2! and so on."""
    from scipy.special import gammaln

    values = gammaln(np.arange(1.0, largest + 2))
    values.flags.writeable = False
    return cast(FloatArray, values)
