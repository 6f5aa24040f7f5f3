"""The boundaries that no others beat where a bucket may cost anything: its last, unfilled batch counts too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from batchtune.lengths import FloatArray, Histogram, IntArray

# Sums of the same costs in another order differ by rounding; what differs by less than this is a tie.
TIE = 1e-12


class BucketCosts(Protocol):
    """The cost of every bucket (u_i, u_j], for `num_ends` ends u_1 < u_2 < ... and u_0 below all lengths."""

    num_ends: int

    def up_to(self, end: int) -> FloatArray:
        """Return the cost of the bucket (u_i, u_end] for each i < end, shape (end,)."""
        ...


class BatchCounts:
    """Count the batches of a bucket: ceil(n / B) of its n examples, B being the batch size at its end."""

    def __init__(self, histogram: Histogram, ends: IntArray, batch_sizes: IntArray) -> None:
        """Take the ends that are allowed, as `few_ends` gives them, and the batch size at each."""
        self._counts = counts_up_to(histogram, ends)
        self._sizes = batch_sizes.tolist()
        self.num_ends = len(self._sizes)

    def up_to(self, end: int) -> FloatArray:
        """As for every `BucketCosts`."""
        batches = -((self._counts[:end] - self._counts[end]) // self._sizes[end - 1])
        return cast(FloatArray, batches.astype(np.float64))


def counts_up_to(histogram: Histogram, ends: IntArray) -> IntArray:
    """Return the number of examples up to each end, and 0 before the first: shape (ends + 1,)."""
    return cast(IntArray, np.concatenate(([0], histogram.cumulative[ends])).astype(np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class BestBuckets:
    """The cheapest buckets for each number of them.

    Attributes:
        totals: Shape (most,): the least cost in exactly 1, 2, ... buckets; infinite where there are fewer ends.
        previous: Shape (most, ends + 1): the end before each end in the cheapest buckets up to it, counted from 1
            (0: the bucket begins at the shortest length).
    """

    totals: FloatArray
    previous: npt.NDArray[np.int32]

    def improving(self, least_gain: float = TIE) -> list[int]:
        """Return the numbers of buckets that cost less than all fewer ones, by more than this share of the cost.

        1 is the first. Which these are up to any number does not depend on what is known beyond it.
        """
        found = [1]
        for buckets, total in enumerate(self.totals.tolist(), 1):
            if total < self.totals[found[-1] - 1] * (1 - least_gain):
                found.append(buckets)
        return found

    def ends(self, buckets: int) -> IntArray:
        """Return the ends of the cheapest so many buckets, counted from 0, ascending."""
        found = [self.previous.shape[1] - 1]
        for layer in range(buckets - 1, 0, -1):
            found.append(int(self.previous[layer, found[-1]]))
        return np.array(found[::-1], dtype=np.int64) - 1


def best_buckets(costs: BucketCosts, most: int) -> BestBuckets:
    """Find the cheapest buckets for each number of them up to `most`, at least 1 and no more than there are ends.

    Unlike the cost per example (`optimal_boundaries`), the cost of whole batches is no function of a bucket's end
    alone: each bucket adds a batch that is half empty on average. So more buckets are not always better, and no end
    can be left out beforehand. With c(i, j) the cost of the bucket (u_i, u_j], not negative and finite, the least cost
    of the examples up to u_j in exactly k buckets is f_k(j) = min over i < j of f_{k-1}(i) + c(i, j), for any c. It
    takes O(K·U²) steps, as array operations over i and k for each j, and O(K·U) numbers are kept.
    """
    ends = costs.num_ends
    layers = min(most, ends)
    least = np.full((layers + 1, ends + 1), np.inf)
    least[0, 0] = 0.0
    previous = np.zeros((layers, ends + 1), dtype=np.int32)
    scratch = np.empty(layers * ends)
    for end in range(1, ends + 1):
        # One contiguous block for each end: so that the minimum runs along memory, without a copy.
        reachable = min(layers, end)
        sums = scratch[: reachable * end].reshape(reachable, end)
        np.add(least[:reachable, :end], costs.up_to(end), out=sums)
        before = np.argmin(sums, axis=1)
        previous[:reachable, end] = before
        least[1 : reachable + 1, end] = sums[np.arange(reachable), before]
    return BestBuckets(least[1:, -1], previous)


def few_ends(histogram: Histogram, batch_sizes: IntArray, most: int) -> IntArray:
    """Return the indices of distinct lengths, ascending, that stand for all as ends; all where they are few.

    The longest length is one of them, and up to `most` / 2 lengths before which the batch size changes: the last of
    those that share a size holds all that its bucket can. The others share out the range of lengths, the number
    of examples and their total length: between two of them lie at most 18 / `most` of any of the three.

    Args:
        histogram: The distinct lengths and their counts.
        batch_sizes: Shape (distinct lengths,): of a bucket that ends there.
        most: At most so many ends, and at least 8.
    """
    lengths = histogram.lengths
    if lengths.size <= most:
        return np.arange(lengths.size)
    changes = np.flatnonzero(np.diff(batch_sizes))
    if changes.size > most // 2:
        changes = changes[np.linspace(0, changes.size - 1, most // 2).astype(np.int64)]
    place = (
        histogram.cumulative / histogram.count
        + histogram.cumulative_total / histogram.cumulative_total[-1]
        + (lengths - lengths[0]) / (lengths[-1] - lengths[0])
    )
    place *= (most - 2 - changes.size) / 3
    shared = np.flatnonzero(np.diff(np.ceil(place)))
    # Each takes the place of two others.
    lumps = np.flatnonzero(np.diff(place) >= 2) + 1
    return np.unique(np.concatenate((changes, shared, lumps, [lengths.size - 1])))
