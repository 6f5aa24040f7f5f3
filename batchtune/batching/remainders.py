"""The boundaries that no others beat where the last batch of a bucket, which is seldom full, counts too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np

from batchtune.lengths import FloatArray, Histogram, IntArray

# Sums of the same costs in another order differ by rounding; what differs by less than this is a tie.
_TIE = 1e-12


def optimal_boundaries_with_remainders(
    histogram: Histogram,
    batch_sizes: IntArray,
    full_costs: FloatArray,
    single_costs: FloatArray,
    num_buckets: Sequence[int],
) -> list[FloatArray]:
    """The boundaries that minimise the cost of an epoch's batches, for several bucket counts in one run.

    A bucket of n examples in batches of B gives floor(n / B) full batches and, where it does not divide, one of
    the remainder. A batch of r out of B examples costs single + (r - 1)/(B - 1)·(full - single): what is known
    of a batch of one and of a full one, and linear between them. With full = single = 1 the sum is the number of
    batches, Σ ceil(n / B).

    Unlike the cost per example (`optimal_boundaries`), this is no function of a bucket's end alone: each bucket
    adds a batch that is half empty on average. So more buckets are not always better, and no end can be left out
    beforehand. With c(i, j) the cost of the bucket from behind u_i up to u_j, the least cost of the examples up
    to u_j in exactly k buckets is f_k(j) = min over i < j of f_{k-1}(i) + c(i, j), for any c. It takes
    O(K·U²) steps, as array operations over i and k for each j, and O(K·U) numbers are kept.

    Args:
        histogram: U distinct lengths and their counts.
        batch_sizes: Shape (U,), at least 1 each: the batch size of a bucket that ends at that length. It need
            not be monotone.
        full_costs: Shape (U,), not negative and finite: what a full batch costs there.
        single_costs: Shape (U,), not negative and finite: what a batch of one example costs there.
        num_buckets: The largest number of buckets allowed, at least 1 each.

    Returns:
        For each entry of `num_buckets` the boundaries: ascending, all of them lengths of examples, the last
        one the longest. Where fewer buckets cost the same, fewer are given.

    Raises:
        ValueError: An array has another shape, a batch size or a bucket count is below 1, or a cost is negative
            or not finite.
    """
    _check(histogram, batch_sizes, full_costs, single_costs, num_buckets)
    # From 1: the count up to the end before the first is 0.
    counts = np.concatenate(([0], histogram.cumulative)).astype(np.int64)
    costs = _BucketCosts(counts, batch_sizes, full_costs, single_costs)
    least = _solve(costs, min(max(num_buckets), histogram.lengths.size))
    return [histogram.lengths[_ends(costs, least, most) - 1] for most in num_buckets]


def _check(
    histogram: Histogram,
    batch_sizes: IntArray,
    full_costs: FloatArray,
    single_costs: FloatArray,
    num_buckets: Sequence[int],
) -> None:
    for name, values in (("batch sizes", batch_sizes), ("full costs", full_costs), ("single costs", single_costs)):
        if values.shape != histogram.lengths.shape:
            raise ValueError(f"{values.size} {name} for {histogram.lengths.size} distinct lengths")
    if batch_sizes.min() < 1:
        raise ValueError(f"batch sizes must be at least 1, got {batch_sizes.min()}")
    for costs in (full_costs, single_costs):
        if not (np.isfinite(costs).all() and costs.min() >= 0):
            raise ValueError("batch costs must be finite and not negative")
    if not num_buckets or min(num_buckets) < 1:
        raise ValueError(f"bucket counts must be at least 1, got {list(num_buckets)}")


class _BucketCosts:
    """What the bucket from behind one end up to another costs; ends are counted from 1."""

    def __init__(self, counts: IntArray, sizes: IntArray, full: FloatArray, single: FloatArray) -> None:
        self.counts = counts
        self._sizes, self._full, self._single = sizes.tolist(), full.tolist(), single.tolist()
        self._slopes = ((full - single) / np.maximum(sizes - 1, 1)).tolist()

    def up_to(self, end: int) -> FloatArray:
        """Shape (end,): the cost of the bucket (u_i, u_end] for each i < end."""
        size, single, slope = self._sizes[end - 1], self._single[end - 1], self._slopes[end - 1]
        examples = self.counts[end] - self.counts[:end]
        full = examples // size
        rest = examples - full * size
        partial = np.where(rest > 0, single + slope * (rest - 1), 0.0)
        return cast(FloatArray, full * self._full[end - 1] + partial)


def _solve(costs: _BucketCosts, most: int) -> FloatArray:
    """Shape (most + 1, ends + 1): the least cost of the examples up to each end in exactly that many buckets."""
    ends = costs.counts.size - 1
    least = np.full((most + 1, ends + 1), np.inf)
    least[0, 0] = 0.0
    scratch = np.empty(most * ends)
    for end in range(1, ends + 1):
        # One contiguous block for each end: so that the minimum runs along memory, without a copy.
        sums = scratch[: most * end].reshape(most, end)
        np.add(least[:-1, :end], costs.up_to(end), out=sums)
        np.min(sums, axis=1, out=least[1:, end])
    return least


def _ends(costs: _BucketCosts, least: FloatArray, most: int) -> IntArray:
    """The ends (from 1) of the best at most `most` buckets, as few as cost the same."""
    totals = least[1 : most + 1, -1]
    buckets = 1 + int(np.flatnonzero(totals <= totals.min() * (1 + _TIE))[0])
    return np.array(list(_backwards(costs, least, buckets))[::-1], dtype=np.int64)


def _backwards(costs: _BucketCosts, least: FloatArray, buckets: int) -> Iterator[int]:
    end = least.shape[1] - 1
    for before in range(buckets - 1, -1, -1):
        yield end
        # The very sums that `_solve` compared, so the least of them is the one that it took.
        end = int(np.argmin(least[before, :end] + costs.up_to(end)))
