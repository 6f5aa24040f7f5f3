"""The boundaries over one length that no others beat, by exact dynamic programmes.

They minimise the cost of an example or of whole buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchtune.epochs.expectation import BucketCosts
from batchtune.lengths import FloatArray, Histogram, IntArray

# Sums of the same costs in another order differ by rounding: smaller differences than this are ties.
TIE = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class BestBuckets:
    """The cheapest buckets for each number of them."""

    totals: FloatArray  # shape (max_buckets,): the least cost in 1, 2, ... buckets; infinite if there are fewer ends
    # For each number, shape (ends + 1,): the end before each end in the cheapest buckets up to it, counted from 1.
    previous: Sequence[IntArray] | npt.NDArray[np.int32]

    def improving(self, least_gain: float) -> list[int]:
        """Return the numbers of buckets, 1 first, that cost less than all fewer ones by more than this share.

        Which these are up to any number does not depend on what is known beyond it.
        """
        numbers = [1]
        for buckets, total in enumerate(self.totals.tolist(), 1):
            if total < self.totals[numbers[-1] - 1] * (1 - least_gain):
                numbers.append(buckets)
        return numbers

    def ends(self, buckets: int) -> IntArray:
        """Return the ends of this number of cheapest buckets, counted from 0, ascending."""
        ends = [self.previous[0].size - 1]
        for layer in range(buckets - 1, 0, -1):
            ends.append(int(self.previous[layer][ends[-1]]))
        return np.array(sorted(set(ends))) - 1  # an end before itself: fewer buckets


def fewest(totals: FloatArray) -> int:
    """Return the least number of buckets that ties with the least of the costs in 1, 2, ... buckets."""
    return 1 + int(np.argmax(totals <= totals.min() * (1 + TIE)))


def best_buckets(costs: BucketCosts, max_buckets: int) -> BestBuckets:
    """Find the cheapest buckets for each number of them up to `max_buckets`, at least 1, and to the number of ends.

    Unlike the cost per example (`optimal_boundaries`), the cost of whole batches depends on more than a bucket's end:
    each bucket adds a batch that is half empty on average. So more buckets are not always better, and no end can be
    left out beforehand. With c(i, j) the cost of the bucket (u_i, u_j], not negative and finite, the least cost of the
    examples up to u_j in exactly k buckets is f_k(j) = min over i < j of f_{k-1}(i) + c(i, j), for any c. It takes
    O(K·U²) steps, as array operations over i and k for each j, and O(K·U) memory.
    """
    ends = costs.num_ends
    layers = min(max_buckets, ends)
    lowest_costs = np.full((layers + 1, ends + 1), np.inf)
    lowest_costs[0, 0] = 0.0
    previous = np.zeros((layers, ends + 1), dtype=np.int32)
    scratch = np.empty(layers * ends)
    for end in range(1, ends + 1):
        # One contiguous block for each end: the minimum then runs along memory, without a copy.
        reachable = min(layers, end)
        sums = scratch[: reachable * end].reshape(reachable, end)
        np.add(lowest_costs[:reachable, :end], costs.up_to(end), out=sums)
        before = np.argmin(sums, axis=1)
        previous[:reachable, end] = before
        lowest_costs[1 : reachable + 1, end] = sums[np.arange(reachable), before]
    return BestBuckets(lowest_costs[1:, -1], previous)


def representative_ends(
    histogram: Histogram, batch_sizes: IntArray, max_ends: int
) -> IntArray:
    """Return the indices of at most `max_ends` distinct lengths, ascending, that stand for all as ends.

    The longest length is one of them, and up to `max_ends` / 2 lengths before which the batch size changes: the last of
    those that share a size holds all that its bucket can. The others share out the range of lengths, the number
    of examples and their total length: between two of them lie at most 18 / `max_ends` of any of the three.

    `batch_sizes`, shape (distinct lengths,), are those of buckets that end there; `max_ends` is at least 8.
    """
    lengths = histogram.lengths
    if lengths.size <= max_ends:
        return np.arange(lengths.size)
    changes = np.flatnonzero(np.diff(batch_sizes))
    if changes.size > max_ends // 2:
        changes = changes[
            np.linspace(0, changes.size - 1, max_ends // 2).astype(np.int64)
        ]
    place = (
        histogram.cumulative / histogram.count
        + histogram.cumulative_total / histogram.cumulative_total[-1]
        + (lengths - lengths[0]) / (lengths[-1] - lengths[0])
    )
    place *= (max_ends - 2 - changes.size) / 3
    shared = np.flatnonzero(np.diff(np.ceil(place)))
    # Each takes the place of two others.
    lumps = np.flatnonzero(np.diff(place) >= 2) + 1
    return np.unique(np.concatenate((changes, shared, lumps, [lengths.size - 1])))


def optimal_boundaries(
    histogram: Histogram, example_costs: FloatArray, num_buckets: Sequence[int]
) -> list[FloatArray]:
    """Return the boundaries that minimise the cost of all examples, for several bucket counts in one run.

    What an example costs depends on its bucket's end: a bucket (u_i, u_j] costs w_j·(C_j - C_i), where w are the
    example costs and C the number of examples up to a length. With f_k(j) the least cost of the examples up to u_j in
    at most k buckets, f_k(j) = w_j·C_j + min over i of (f_{k-1}(i) - w_j·C_i): the least of lines at w_j, read off the
    lower convex hull of the points (C_i, f_{k-1}(i)).

    Two facts make it O(K·U); both hold for any costs:

    - An end u_j with a later u_m that costs no more is never needed: extending the bucket to u_m (over whole
      buckets if they cost no less) is no dearer. So only ends with w_j < w_m for all m > j take part, and
      along those the costs rise strictly.
    - With rising costs, i > j never gives less than i = j (an empty bucket): each example between them costs
      more than w_j in f_{k-1}(i). So the minimum may run over all i, and one hull serves every j of a layer.

    Args:
        histogram: U distinct lengths and their counts.
        example_costs: Shape (U,), not negative and finite, in any order: what an example costs in a bucket that ends
            at that length.
        num_buckets: The largest number of buckets allowed, at least 1 each: for each the boundaries are returned, the
            last one the longest length. Of those that cost the same it is the fewest.
    """
    least_after = np.minimum.accumulate(example_costs[::-1])[::-1]
    ends = np.flatnonzero(np.append(example_costs[:-1] < least_after[1:], True))
    costs = example_costs[ends]
    counts = np.concatenate(([0], histogram.cumulative[ends])).astype(np.float64)
    own_ends = np.arange(1, counts.size)
    lowest_costs = np.concatenate(([0.0], costs * counts[1:]))
    totals = [lowest_costs[-1]]
    previous = [np.zeros(counts.size, dtype=np.int64)]
    for _ in range(min(max(num_buckets), ends.size) - 1):
        hull = _lower_hull(counts.tolist(), lowest_costs.tolist())
        slopes = np.diff(lowest_costs[hull]) / np.diff(counts[hull])
        # Rounding can make an end beyond one's own look equally cheap; it never is cheaper.
        before = np.minimum(hull[np.searchsorted(slopes, costs)], own_ends)
        lowest_costs = np.concatenate(
            ([0.0], lowest_costs[before] + costs * (counts[1:] - counts[before]))
        )
        totals.append(lowest_costs[-1])
        previous.append(np.concatenate(([0], before)))
    best = BestBuckets(np.array(totals), previous)
    return [
        histogram.lengths[ends[best.ends(fewest(best.totals[:limit]))]]
        for limit in num_buckets
    ]


def _lower_hull(x: list[float], y: list[float]) -> npt.NDArray[np.intp]:
    """Return the indices of the lower convex hull's vertices, for strictly ascending x (Andrew's monotone chain)."""
    hull: list[int] = []
    for i in range(len(x)):
        while len(hull) > 1:
            a = hull[-2]
            b = hull[-1]
            if (y[b] - y[a]) * (x[i] - x[b]) < (y[i] - y[b]) * (x[b] - x[a]):
                break
            hull.pop()
        hull.append(i)
    return np.array(hull, dtype=np.intp)
