"""The bucket tables over length and target length that no others beat.

NVIDIA NeMo takes such tables as `bucket_duration_bins: [[4.1, 30], [4.1, 48], [8.0, 51], …]`, ascending pairs of
(largest duration, largest number of tokens), with one entry of `bucket_batch_size` each. It finds an example's bucket
in `find_smallest_bucket` of nemo/collections/common/data/lhotse/sampling.py (NVIDIA/NeMo, commit 23d2d02):

- strict (`bucketing_2d_strict_mode: true`, the default): of the pairs with the smallest duration that is not below the
  example's, the first whose number of tokens is not below the example's; without one, the example is left out;
- otherwise: the first pair with neither number below the example's, which may be one of longer examples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import numpy as np

from batchtune.buckets.optimal import fewest
from batchtune.epochs.table import BucketTable
from batchtune.lengths import FloatArray, IntArray

ExampleCostsOf = Callable[[FloatArray, FloatArray], FloatArray]
"""(boundaries, target boundaries) → what one example costs in each such bucket, element by element."""
# Target boundaries are chosen from at most so many quantiles of the targets.
_TOPS = 64


def optimal_table_2d(
    lengths: FloatArray,
    targets: FloatArray,
    costs: ExampleCostsOf,
    num_buckets: Sequence[int],
    *,
    candidates: FloatArray | None = None,
    resolution: int = 64,
) -> list[BucketTable]:
    """Return the tables that minimise the cost of all examples, for several bucket counts in one run.

    The lengths are cut into bins, and each bin's targets into as many sub-bins as pay there. The last sub-bin of a bin
    ends at the largest target in it, so every example has its bucket, with and without NeMo's strict mode. The table is
    the best of all those whose length boundaries are among at most `resolution` quantiles of the lengths and the
    `candidates`, and whose other target boundaries are among at most 64 quantiles of the targets. With no more
    distinct values, these are all tables, whatever the costs.

    Two programmes, one in the other: with c(u, v) the cost of one example, the examples of a bin (u_i, u_j] up to its
    target v_t cost, in exactly m sub-bins, g_m(t) = min over s < t of g_{m-1}(s) + c(u_j, v_t)·(number of targets in
    (v_s, v_t]); the examples up to u_j, in exactly k buckets, f_k(j) = min over i < j and m of f_{k-m}(i) + g_m(largest
    target of the bin). With E length ends and R quantiles, O(K·E²·R²) steps.

    If costs do not fall as a boundary rises, and `candidates` has the boundaries of a one-dimensional table, the result
    costs no more than that table with the same number of buckets: each of its buckets is a bin with one sub-bin.

    Args:
        lengths: Shape (examples,), positive and finite, in any order.
        targets: Shape (examples,), not negative and finite: the target length of the same example.
        costs: The cost of an example in a bucket, not negative and finite; called with two-dimensional arrays.
        num_buckets: The largest number of buckets allowed, at least 1 each: for each a table is returned, with batches
            of one. Of tables that cost the same it is the one with the fewest buckets.
        candidates: More length boundaries to choose from; the longest length not above each takes its place.
        resolution: The most quantiles of the lengths, at least 1.
    """
    ends = _quantiles(lengths, resolution)
    if candidates is not None:
        distinct = np.unique(lengths)
        not_above = np.searchsorted(distinct, candidates, side="right") - 1
        ends = np.union1d(ends, distinct[not_above[not_above >= 0]])
    bins = _Bins(lengths, targets, ends, costs)
    most = max(num_buckets)
    # For each end, shape (sub-bins, begins): the least cost of the bins that end there.
    of_bins = [
        bins.ending_at(end, slice(0, end)).least(most)[-1]
        for end in range(1, ends.size + 1)
    ]
    # Row k: the least cost of the examples up to each end in exactly k buckets.
    lowest_costs = np.full((most + 1, ends.size + 1), np.inf)
    lowest_costs[0, 0] = 0.0
    for end, of_bin in enumerate(of_bins, 1):
        for sub_bins, each in enumerate(of_bin, 1):
            sums = lowest_costs[:-sub_bins, :end] + each
            lowest_costs[sub_bins:, end] = np.minimum(
                lowest_costs[sub_bins:, end], sums.min(axis=1)
            )
    return [_table(bins, of_bins, lowest_costs, limit) for limit in num_buckets]


def _quantiles(values: FloatArray, most: int) -> FloatArray:
    """Return all distinct values if they are at most `most`, else up to `most` quantiles of them; ascending."""
    distinct = np.unique(values)
    if distinct.size <= most:
        return distinct
    ranks = -(-values.size * np.arange(1, most + 1) // most)
    return np.unique(np.sort(values)[ranks - 1])


class _Bins:
    """The examples counted by length and target, and the bins (u_begin, u_end] that they make.

    Ends are counted from 1; the end 0 is before the shortest length. In each bin a sub-bin may end at each of the tops,
    or at the bin's largest target where that is below the top.
    """

    def __init__(
        self,
        lengths: FloatArray,
        targets: FloatArray,
        ends: FloatArray,
        costs: ExampleCostsOf,
    ) -> None:
        self.ends = ends
        self._costs = costs
        self._tops = _quantiles(targets, _TOPS)
        rows = np.searchsorted(ends, lengths)
        columns = np.searchsorted(self._tops, targets) + 1
        counts = np.zeros((ends.size + 1, self._tops.size + 1), dtype=np.int64)
        np.add.at(counts, (rows + 1, columns), 1)
        # Shape (ends + 1, tops + 1): number of examples up to the end and the top; the first are none.
        self._counts = counts.cumsum(axis=0).cumsum(axis=1)
        # Shape (ends,): the largest target among the lengths between the end before and this end.
        self._largest = np.zeros(ends.size)
        np.maximum.at(self._largest, rows, targets)

    def ending_at(self, end: int, begins: slice) -> _Cuts:
        """Return the cuts of the bins that begin there and end here."""
        largest = np.maximum.accumulate(self._largest[:end][::-1])[::-1][begins]
        tops = np.minimum(self._tops[:, np.newaxis], largest)
        costs = np.asarray(
            self._costs(np.full_like(tops, self.ends[end - 1]), tops), dtype=np.float64
        )
        return _Cuts(tops, (self._counts[end] - self._counts[begins]).T.copy(), costs)


class _Cuts(NamedTuple):
    """Where the targets of some bins may be cut; arrays of the shape (cuts, bins), `counts` with a first row of 0."""

    tops: FloatArray  # ascending in each bin; the last is the largest target in the bin
    counts: IntArray  # number of the bin's examples up to that target
    costs: FloatArray  # of an example in a sub-bin that ends there

    def last_sub_bin(self, cut: int) -> FloatArray:
        """Return the cost of the sub-bin up to this cut, from the bin's beginning and each earlier cut."""
        return cast(
            FloatArray,
            self.costs[cut] * (self.counts[cut + 1] - self.counts[: cut + 1]),
        )

    def least(self, most: int) -> FloatArray:
        """Return the least cost up to each cut in exactly 1, 2, … sub-bins, shape (cuts, min(most, cuts), bins)."""
        cuts, bins = self.tops.shape
        lowest_costs = np.full((cuts, min(most, cuts), bins), np.inf)
        for cut in range(cuts):
            last = self.last_sub_bin(cut)
            lowest_costs[cut, 0] = last[0]
            if cut:
                sums = lowest_costs[:cut, :-1] + last[1:, np.newaxis]
                lowest_costs[cut, 1:] = sums.min(axis=0)
        return lowest_costs


def _table(
    bins: _Bins, of_bins: list[FloatArray], least: FloatArray, most: int
) -> BucketTable:
    """Trace the best table of at most `most` buckets back from its last bucket; of equal ones the fewest."""
    buckets = fewest(least[1 : most + 1, -1])
    end = least.shape[1] - 1
    pairs: list[tuple[float, float]] = []
    while end > 0:
        # The same sums as before, to the bit, so their least is the one that was taken.
        sums = [
            least[buckets - sub_bins, :end] + each
            for sub_bins, each in enumerate(of_bins[end - 1][:buckets], 1)
        ]
        more, begin = (
            int(i) for i in np.unravel_index(np.argmin(sums), (len(sums), end))
        )
        cuts = bins.ending_at(end, slice(begin, begin + 1))
        up_to = cuts.least(more + 1)
        cut = cuts.tops.shape[0] - 1
        for before in range(more, -1, -1):
            pairs.append((bins.ends[end - 1], cuts.tops[cut, 0]))
            if before:
                cut = int(
                    np.argmin(
                        up_to[:cut, before - 1, 0] + cuts.last_sub_bin(cut)[1:, 0]
                    )
                )
        end = begin
        buckets = buckets - more - 1
    boundaries, target_boundaries = np.array(pairs[::-1]).T.copy()
    return BucketTable(
        boundaries, np.ones(len(pairs), dtype=np.int64), target_boundaries
    )
