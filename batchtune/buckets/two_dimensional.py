"""The tables over length and target length that no others beat, by an exact dynamic programme.

They are those that NVIDIA NeMo takes as `bucket_duration_bins: [[4.1, 30], [4.1, 48], [8.0, 51], …]`, ascending pairs
of (largest duration, largest number of tokens), with one entry of `bucket_batch_size` each. It finds an example's
bucket in `find_smallest_bucket` of nemo/collections/common/data/lhotse/sampling.py (NVIDIA/NeMo, commit 23d2d02):

- strict (`bucketing_2d_strict_mode: true`, the default): of the pairs with the smallest duration that is not below the
  example's, the first whose number of tokens is not below the example's; without one, the example is left out;
- otherwise: the first pair with neither number below the example's, which may be one of longer examples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import numpy as np

from batchtune.buckets.optimal import fewest
from batchtune.epochs.batchers import Batching
from batchtune.epochs.measured_costs import Costs
from batchtune.epochs.pricing import Pricing
from batchtune.epochs.simulation import MOST_SIMULATED
from batchtune.epochs.table import BucketTable, Limits
from batchtune.lengths import FloatArray, IntArray
from batchtune.results import Row, TwoDimensionalRow

_ANY_BATCH_SIZE = 2**53

ExampleCostsOf = Callable[[FloatArray, FloatArray], FloatArray]
"""(boundaries, target boundaries) → what one example costs in each such bucket, element by element."""
# Target boundaries are chosen from at most so many quantiles of the targets.
_TOPS = 64


def two_dimensional_rows(
    pricing: Pricing, limits: Limits, costs: Costs, rows: Sequence[Row]
) -> list[TwoDimensionalRow]:
    """Return the best tables over both lengths, next to the best over length alone with as many buckets.

    Times and numbers of batches are those of simulated epochs on one rank, the same shuffles for both. Compared are
    the rows with the fewest and the most buckets among those with boundaries for the frontier. Without such rows,
    targets or a joint frontier the list is empty.
    """
    joint = costs.joint_frontier
    step_seconds = pricing.step_seconds
    lengths = pricing.lengths
    by_count = {
        row.num_buckets: row
        for row in rows
        if row.sizing == "frontier" and not row.uses_pools
    }
    if joint is None or not lengths.has_targets or not by_count:
        return []
    sample = lengths.evenly(MOST_SIMULATED)
    assert sample.targets is not None
    compared = [by_count[count] for count in sorted({min(by_count), max(by_count)})]

    def sizes(long: FloatArray, target: FloatArray) -> IntArray:
        return np.minimum(joint(long, target), limits.max_batch_size or _ANY_BATCH_SIZE)

    def example_costs(long: FloatArray, target: FloatArray) -> FloatArray:
        batch = sizes(long, target).astype(np.float64)
        if step_seconds is None:
            return 1 / batch
        return step_seconds(batch, long, target) / batch

    tables = optimal_table_2d(
        sample.values,
        sample.targets,
        example_costs,
        [row.num_buckets for row in compared],
        candidates=np.unique(
            np.concatenate([costs.joint_lengths, *(row.boundaries for row in compared)])
        ),
    )
    tables_compared = []
    for row, unsized in zip(compared, tables, strict=True):
        table = replace(unsized, batch_sizes=sizes(*unsized.pairs))
        flat_batches, flat_seconds = pricing.on_one_rank(Batching.of(row))
        batches, seconds = pricing.on_one_rank(Batching(table))
        proven = costs.joint_proven and costs.joint_proven(*table.pairs)
        tables_compared.append(
            TwoDimensionalRow(
                num_buckets=row.num_buckets,
                buckets=list(
                    zip(*(edges.tolist() for edges in table.pairs), strict=True)
                ),
                batch_sizes=table.batch_sizes.tolist(),
                batches=batches,
                estimated_epoch_seconds=seconds,
                one_dimensional_batches=flat_batches,
                one_dimensional_epoch_seconds=flat_seconds,
                unproven=None
                if proven is None
                else int(np.count_nonzero(table.batch_sizes > proven)),
            )
        )
    return tables_compared


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
    max_buckets = max(num_buckets)
    # For each end, shape (sub-bins, begins): the least cost of the bins that end there.
    of_bins = [
        bins.ending_at(end, slice(0, end)).lowest_costs(max_buckets)[-1]
        for end in range(1, ends.size + 1)
    ]
    # Row k: the least cost of the examples up to each end in exactly k buckets.
    lowest_costs = np.full((max_buckets + 1, ends.size + 1), np.inf)
    lowest_costs[0, 0] = 0.0
    for end, of_bin in enumerate(of_bins, 1):
        for sub_bins, each in enumerate(of_bin, 1):
            sums = lowest_costs[:-sub_bins, :end] + each
            lowest_costs[sub_bins:, end] = np.minimum(
                lowest_costs[sub_bins:, end], sums.min(axis=1)
            )
    return [_traced_table(bins, of_bins, lowest_costs, limit) for limit in num_buckets]


def _quantiles(values: FloatArray, max_count: int) -> FloatArray:
    """Return all distinct values, or up to `max_count` quantiles of them if they are more; ascending."""
    distinct = np.unique(values)
    if distinct.size <= max_count:
        return distinct
    ranks = -(-values.size * np.arange(1, max_count + 1) // max_count)
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
        costs = self._costs(np.full_like(tops, self.ends[end - 1]), tops)
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

    def lowest_costs(self, max_sub_bins: int) -> FloatArray:
        """Return the least cost up to each cut in exactly 1, 2, … sub-bins, shape (cuts, sub-bins, bins)."""
        cuts, bins = self.tops.shape
        lowest_costs = np.full((cuts, min(max_sub_bins, cuts), bins), np.inf)
        for cut in range(cuts):
            last = self.last_sub_bin(cut)
            lowest_costs[cut, 0] = last[0]
            if cut:
                sums = lowest_costs[:cut, :-1] + last[1:, np.newaxis]
                lowest_costs[cut, 1:] = sums.min(axis=0)
        return lowest_costs


def _traced_table(
    bins: _Bins, of_bins: list[FloatArray], lowest_costs: FloatArray, max_buckets: int
) -> BucketTable:
    """Trace the best table of at most `max_buckets` buckets back from its last bucket; of equal ones the fewest."""
    buckets = fewest(lowest_costs[1 : max_buckets + 1, -1])
    end = lowest_costs.shape[1] - 1
    pairs: list[tuple[float, float]] = []
    while end > 0:
        # The same sums as before, to the bit, so their least is the one that was taken.
        sums = [
            lowest_costs[buckets - sub_bins, :end] + each
            for sub_bins, each in enumerate(of_bins[end - 1][:buckets], 1)
        ]
        more, begin = (
            int(i) for i in np.unravel_index(np.argmin(sums), (len(sums), end))
        )
        cuts = bins.ending_at(end, slice(begin, begin + 1))
        up_to = cuts.lowest_costs(more + 1)
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
