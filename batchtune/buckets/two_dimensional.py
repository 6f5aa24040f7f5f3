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
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from batchtune.buckets.optimal import fewest
from batchtune.epochs.table import BucketTable
from batchtune.lengths import FloatArray, IntArray

ExampleCostsOf = Callable[[FloatArray, FloatArray], FloatArray]
"""(boundaries, target boundaries) → what one example costs in each such bucket, element by element."""

# All targets are distinguished this many times finer than one bin's, as a bin has a small part of them.
_CELLS_PER_GRID_POINT = 16


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
    the best of all those whose

    - length boundaries are among at most `resolution` quantiles of the lengths and the `candidates`,
    - target boundaries in each bin are among at most `resolution` quantiles of the bin's own targets, and the largest
      of these. (Of more than 16·`resolution` distinct targets, quantiles are taken of targets rounded up to that many.)

    With no more distinct values than `resolution`, these are all tables, whatever the costs.

    Two programmes, one in the other: with c(u, v) the cost of one example, the examples of a bin (u_i, u_j] up to its
    target v_t cost, in exactly m sub-bins, g_m(t) = min over s < t of g_{m-1}(s) + c(u_j, v_t)·(number of targets in
    (v_s, v_t]); the examples up to u_j, in exactly k buckets, f_k(j) = min over i < j and m of f_{k-m}(i) + g_m(largest
    target of the bin). With E length ends and R = `resolution`, O(K·E²·R²) steps.

    If costs do not fall as a boundary rises, and `candidates` has the boundaries of a one-dimensional table, the result
    costs no more than that table with the same number of buckets: each of its buckets is a bin with one sub-bin.

    Args:
        lengths: Shape (examples,), positive and finite, in any order.
        targets: Shape (examples,), not negative and finite: the target length of the same example.
        costs: The cost of an example in a bucket, not negative and finite; called with two-dimensional arrays.
        num_buckets: The largest number of buckets allowed, at least 1 each: for each a table is returned, with batches
            of one. Of tables that cost the same it is the one with the fewest buckets.
        candidates: More length boundaries to choose from; the longest length not above each takes its place.
        resolution: The most quantiles, at least 1.
    """
    ends = _quantiles(lengths, resolution)
    if candidates is not None:
        distinct = np.unique(lengths)
        not_above = np.searchsorted(distinct, candidates, side="right") - 1
        ends = np.union1d(ends, distinct[not_above[not_above >= 0]])
    bins = _Bins(lengths, targets, ends, costs, resolution)
    most_buckets = max(num_buckets)
    of_bins = [bins.ending_at(end).least(most_buckets)[-1] for end in range(1, ends.size + 1)]
    # Row k: the least cost of the examples up to each end in exactly k buckets.
    lowest_costs = np.full((most_buckets + 1, ends.size + 1), np.inf)
    lowest_costs[0, 0] = 0.0
    for end, of_bin in enumerate(of_bins, 1):
        for sub_bins, each in enumerate(of_bin, 1):
            sums = lowest_costs[:-sub_bins, :end] + each
            lowest_costs[sub_bins:, end] = np.minimum(lowest_costs[sub_bins:, end], sums.min(axis=1))
    return [_table(bins, of_bins, lowest_costs, limit) for limit in num_buckets]


def _quantiles(values: FloatArray, most: int) -> FloatArray:
    """Return all distinct values if they are at most `most`, else up to `most` quantiles of them; ascending."""
    distinct = np.unique(values)
    if distinct.size <= most:
        return distinct
    return np.unique(np.sort(values)[_shares(np.array([values.size]), most)[0] - 1])


def _shares(totals: IntArray, parts: int) -> IntArray:
    """Return 1/parts, 2/parts, … of each total, rounded up, shape (totals, parts)."""
    return cast(IntArray, -(-totals[:, None] * np.arange(1, parts + 1) // parts))


@dataclass(frozen=True, slots=True, eq=False)
class _Cuts:
    """The places where the targets of some bins may be cut; all arrays have the shape (cuts, bins), contiguous."""

    tops: FloatArray  # target boundaries, ascending in each bin; the last is the largest target in the bin
    counts: IntArray  # number of the bin's examples up to that target
    costs: FloatArray  # of an example in a sub-bin that ends there
    usable: npt.NDArray[np.bool_]  # whether it is a boundary of its own: below the largest, above the one before

    def least(self, most: int) -> FloatArray:
        """Return the least cost up to each cut in exactly 1, 2, … sub-bins, shape (cuts, min(most, cuts), bins)."""
        cuts, bins = self.tops.shape
        lowest_costs = np.full((cuts, min(most, cuts), bins), np.inf)
        for cut in range(cuts):
            lowest_costs[cut, 0] = self.costs[cut] * self.counts[cut]
            if cut and lowest_costs.shape[1] > 1:
                sums = lowest_costs[:cut, :-1] + self.last_sub_bin(cut)[:, None, :]
                np.min(sums, axis=0, out=lowest_costs[cut, 1:])
            lowest_costs[cut, :, ~self.usable[cut]] = np.inf
        return lowest_costs

    def last_sub_bin(self, cut: int) -> FloatArray:
        """Return the cost of the sub-bin from each earlier cut up to this one, shape (cut, bins)."""
        return cast(FloatArray, self.costs[cut] * (self.counts[cut] - self.counts[:cut]))


class _Bins:
    """The examples counted by length and target, and the bins that they make.

    Ends are counted from 1; the end 0 is before the shortest length.
    """

    def __init__(
        self, lengths: FloatArray, targets: FloatArray, ends: FloatArray, costs: ExampleCostsOf, resolution: int
    ) -> None:
        self.ends = ends
        self._costs = costs
        self._resolution = resolution
        # Shape (tops,): targets, ascending, the largest last.
        self._tops = _quantiles(targets, _CELLS_PER_GRID_POINT * resolution)
        rows = np.searchsorted(ends, lengths)
        columns = np.searchsorted(self._tops, targets)
        counts = np.bincount(rows * self._tops.size + columns, minlength=ends.size * self._tops.size)
        counts = counts.reshape(ends.size, -1).cumsum(axis=0).cumsum(axis=1)
        # Shape (ends + 1, tops): number of examples up to the end before (first row: none) and up to the top.
        self._counts = np.pad(counts, ((1, 0), (0, 0))).astype(np.int64)
        # Shape (ends,): the largest target among the lengths between the end before and this end.
        self._largest = np.zeros(ends.size)
        np.maximum.at(self._largest, rows, targets)

    def ending_at(self, end: int, begin: int | None = None) -> _Cuts:
        """Return the cuts of the bins (u_i, u_end] for i = 0, …, end - 1, or for i = `begin` alone."""
        if begin is None:
            begins = slice(0, end)
        else:
            begins = slice(begin, begin + 1)
        up_to = self._counts[end] - self._counts[begins]
        largest = np.maximum.accumulate(self._largest[:end][::-1])[::-1][begins]
        cuts = _quantile_cells(up_to, self._resolution)
        usable = (self._tops[cuts] < largest[:, None]) & (np.diff(cuts, axis=1, prepend=-1) > 0)
        tops = _with_last(self._tops[cuts], largest)
        counts = _with_last(np.take_along_axis(up_to, cuts, axis=1), up_to[:, -1])
        costs = np.asarray(self._costs(np.full_like(tops, self.ends[end - 1]), tops), dtype=np.float64)
        return _Cuts(tops, counts, costs, _with_last(usable, np.ones_like(largest, dtype=bool)))


def _with_last(values: npt.NDArray[Any], last: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Append each bin's last cut: shape (cuts + 1, bins), contiguous, from shapes (bins, cuts) and (bins,)."""
    return np.ascontiguousarray(np.column_stack((values, last)).T)


def _quantile_cells(up_to: IntArray, most: int) -> IntArray:
    """Return the cells at which each bin's targets may be cut, shape (bins, cuts), ascending, some of them twice.

    They are all cells with examples if at most `most`, else that many quantiles. `up_to`, shape (bins, cells), is the
    number of the bin's examples in that cell and those before.
    """
    filled = np.cumsum(np.diff(up_to, axis=1, prepend=0) > 0, axis=1)
    weights = np.where(filled[:, -1:] <= most, filled, up_to)
    parts = min(most, int(filled[:, -1].max()))
    # All rows in one ascending line, each beginning where the one before ends, so that one search serves them all.
    begins = np.concatenate(([0], np.cumsum(weights[:, -1])[:-1]))[:, None]
    cells = np.searchsorted((weights + begins).ravel(), _shares(weights[:, -1], parts) + begins)
    return cast(IntArray, cells - np.arange(up_to.shape[0])[:, None] * up_to.shape[1])


def _table(bins: _Bins, of_bins: list[FloatArray], least: FloatArray, most: int) -> BucketTable:
    """Trace the best table of at most `most` buckets back from its last bucket; of equal ones the fewest."""
    buckets = fewest(least[1 : most + 1, -1])
    end = least.shape[1] - 1
    pairs: list[tuple[float, float]] = []
    while end > 0:
        # The same sums as before, to the bit, so their least is the one that was taken.
        sums = [least[buckets - sub_bins, :end] + each for sub_bins, each in enumerate(of_bins[end - 1][:buckets], 1)]
        more, begin = (int(i) for i in np.unravel_index(np.argmin(sums), (len(sums), end)))
        cuts = bins.ending_at(end, begin)
        up_to = cuts.least(more + 1)
        cut = cuts.tops.shape[0] - 1
        for before in range(more, -1, -1):
            pairs.append((bins.ends[end - 1], cuts.tops[cut, 0]))
            if before:
                cut = int(np.argmin(up_to[:cut, before - 1, 0] + cuts.last_sub_bin(cut)[:, 0]))
        end = begin
        buckets = buckets - more - 1
    boundaries, target_boundaries = np.array(pairs[::-1]).T.copy()
    return BucketTable(boundaries, np.ones(len(pairs), dtype=np.int64), target_boundaries)
