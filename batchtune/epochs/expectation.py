"""The cost of an epoch's batches on average over all shuffles, exactly and without shuffling.

On one rank a bucket of n examples gives floor(n / B) batches of B and one of the remainder; on several, `tally` counts
the batches of each size. In a uniform shuffle each batch is a uniformly drawn subset, so P(longest of s ≤ x) =
C(c, s) / C(n, s) with c the number of the bucket's examples up to x; as expectations are linear, sums over batches
follow from that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import cast

import numpy as np
import numpy.typing as npt

from batchtune.epochs.layout import ON_ONE_RANK, Dealing, Tally, tally
from batchtune.epochs.table import BucketTable
from batchtune.lengths import FloatArray, Histogram, IntArray

BatchCost = Callable[[FloatArray, FloatArray], FloatArray]
"""(batch sizes, lengths of their longest examples) → cost of each batch, element by element."""


@dataclass(frozen=True, eq=False)
class ExpectedBatches:
    """The expected number of batches of each size with each length as their longest, over shuffles."""

    histogram: Histogram
    table: BucketTable
    tally: Tally

    @property
    def lengths(self) -> FloatArray:
        """Shape (distinct lengths,), ascending."""
        return self.histogram.lengths

    @cached_property
    def kinds(self) -> tuple[tuple[IntArray, FloatArray], ...]:
        """For each kind of batch in the tally two arrays of the shape (distinct lengths,).

        Their size in the length's bucket, and how many of them are expected to have it as their longest.
        """
        edges = self.table.edges(self.histogram)
        counts = self.table.counts(self.histogram)
        per_bucket = np.diff(edges)
        in_bucket = np.repeat(counts, per_bucket)
        at_most = self.histogram.cumulative - np.repeat(np.cumsum(counts) - counts, per_bucket)
        logs = log_factorials_up_to(self.histogram.count)
        kinds = []
        for sizes, numbers in zip(self.tally.batch_sizes, self.tally.numbers, strict=True):
            drawn = np.repeat(sizes, per_bucket)
            within = all_within(at_most, in_bucket, drawn, logs)
            shorter = np.concatenate(([0.0], within[:-1]))
            shorter[edges[:-1][per_bucket > 0]] = 0.0
            kinds.append((drawn, np.repeat(numbers, per_bucket) * np.maximum(within - shorter, 0.0)))
        return tuple(kinds)

    @cached_property
    def batches(self) -> FloatArray:
        """How many batches are expected to have each length as their longest, shape (distinct lengths,)."""
        return cast(FloatArray, sum(batches for _, batches in self.kinds))

    def sum_of(self, cost: BatchCost) -> float:
        """Return the expected sum of a cost over the epoch's batches."""
        (sizes, batches), *others = self.kinds
        total = float(np.sum(batches * np.asarray(cost(sizes.astype(np.float64), self.lengths))))
        for numbers, (sizes, batches) in zip(self.tally.numbers[1:], others, strict=True):
            used = np.repeat(numbers > 0, np.diff(self.table.edges(self.histogram)))
            if used.any():
                costs = np.asarray(cost(sizes[used].astype(np.float64), self.lengths[used]))
                total += float(np.sum(batches[used] * costs))
        return total

    @cached_property
    def padded_length(self) -> float:
        """The expected sum of the batches' padded lengths."""
        return self.sum_of(np.multiply)

    def group_starts(self, most: int) -> npt.NDArray[np.intp]:
        """Return where groups of neighbouring lengths begin, so that one length can stand for each group.

        None reaches across buckets or spans more than 2 / `most` of the lengths' range, and besides its first length
        each has at most 2 / `most` of the batches. They are at most `most`, and one more for each bucket; up to `most`
        lengths each is its own group.
        """
        lengths = self.lengths
        if lengths.size <= most:
            return np.arange(lengths.size)
        batches = np.cumsum(self.batches)
        place = batches / batches[-1] + (lengths - lengths[0]) / (lengths[-1] - lengths[0])
        changes = np.flatnonzero(np.diff(np.floor(place * (most / 2)))) + 1
        edges = np.searchsorted(lengths, self.table.boundaries, side="right")
        return np.unique(np.concatenate(([0], changes, edges[edges < lengths.size])))

    def representatives(self, most: int) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return batch sizes, longest lengths and expected numbers of shapes that stand for all batches.

        There is one for each kind of batch in each of the groups that `group_starts` makes.
        """
        starts = self.group_starts(most)
        last = np.append(starts[1:], self.lengths.size) - 1
        sizes = []
        lengths = []
        counts = []
        for size, batches in self.kinds:
            count = np.add.reduceat(batches, starts)
            used = count > 0
            mean = np.add.reduceat(batches * self.lengths, starts)[used] / count[used]
            # Rounding must not carry a mean beyond its group, into another bucket.
            lengths.append(np.clip(mean, self.lengths[starts[used]], self.lengths[last[used]]))
            sizes.append(size[starts[used]].astype(np.float64))
            counts.append(count[used])
        return np.concatenate(sizes), np.concatenate(lengths), np.concatenate(counts)


def expected_batches(histogram: Histogram, table: BucketTable, dealing: Dealing = ON_ONE_RANK) -> ExpectedBatches:
    """Return the batches to expect when each bucket's examples are shuffled and cut into batches.

    Raises ValueError if the longest length is beyond the last boundary.
    """
    return ExpectedBatches(histogram, table, tally(table.counts(histogram), table.batch_sizes, dealing))


def all_within(within: IntArray, count: IntArray, drawn: IntArray, log_factorials: FloatArray) -> FloatArray:
    """Return P(all of `drawn` out of `count` lie among the first `within`): C(within, drawn) / C(count, drawn)."""
    possible = drawn <= within
    drawable = np.where(possible, drawn, 0)
    # Grouped so that within = count cancels: the last probability of a bucket is exactly 1.
    log_ratio = (log_factorials[within] - log_factorials[within - drawable]) - (
        log_factorials[count] - log_factorials[count - drawable]
    )
    return np.where(possible, np.exp(log_ratio), 0.0)


@lru_cache(maxsize=1)  # the tables of a sweep are all for the same number of examples
def log_factorials_up_to(largest: int) -> FloatArray:
    """Return the logarithms of 0!, 1!, 2! and so on, shape (largest + 1,)."""
    from scipy.special import gammaln

    values = gammaln(np.arange(1.0, largest + 2))
    values.flags.writeable = False
    return cast(FloatArray, values)
