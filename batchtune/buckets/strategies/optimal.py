"""The boundaries that no others beat."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from batchtune.buckets.optimal import TIE, best_buckets, few_ends
from batchtune.buckets.strategies.base import Problem, Strategy
from batchtune.epochs.bucket_costs import BatchCounts, BucketCosts, ExpectedCosts
from batchtune.epochs.table import BucketTable
from batchtune.lengths import FloatArray, Histogram, IntArray

# The most lengths that may be ends of buckets, if batches are counted, and if they have a cost, which takes longer:
# the best table of 320 ends costs about 0.1% more than with all of them.
_MOST_ENDS = 4096
_MOST_COSTED_ENDS = 320
# With more distinct lengths, tables are compared by the means over about this many groups.
_MOST_SUMMED = 1 << 16
# One bucket more must gain at least this share of the cost to be looked at.
_LEAST_GAIN = 1e-4


class Optimal(Strategy):
    """The boundaries that no others beat."""

    depends_on_sizes = True

    def boundaries(self, problem: Problem, num_buckets: Sequence[int]) -> list[FloatArray]:
        """Minimise the cost of an epoch's batches, the last one of each bucket included, in at most that many buckets.

        Without a cost it is the number of batches, Σ ceil(n_b / B_b). With one, each batch costs by its expected
        longest, and the best tables of each number of buckets are then compared by their cost as it is reported, so
        allowing more buckets never costs more. Of equal ones the fewest buckets are taken.

        No other boundaries among the lengths give fewer batches, or cost less, up to 4,096 distinct lengths (320 with a
        cost), which may all be boundaries; of more, 4,096 (320 with a cost).
        """
        histogram = problem.histogram
        sizes = problem.batch_sizes
        costs = problem.costs
        ends = few_ends(histogram, sizes, _MOST_ENDS if costs is None else _MOST_COSTED_ENDS)
        of_buckets: BucketCosts
        if costs is None:
            of_buckets = BatchCounts(histogram, ends, sizes[ends])
        else:
            of_buckets = ExpectedCosts(histogram, ends, sizes[ends], costs.of_batch)
        best = best_buckets(of_buckets, max(num_buckets))
        improving = best.improving(TIE if costs is None or ends.size == histogram.lengths.size else _LEAST_GAIN)
        totals = [float(best.totals[buckets - 1]) for buckets in improving]
        if costs is not None:
            compared = _grouped(histogram, ends)
            chosen = (ends[best.ends(buckets)] for buckets in improving)
            totals = [
                costs.of_epoch(compared, BucketTable(histogram.lengths[chosen_ends], sizes[chosen_ends]))
                for chosen_ends in chosen
            ]
        boundaries = []
        for limit in num_buckets:
            _, buckets = min(pair for pair in zip(totals, improving, strict=True) if pair[1] <= limit)
            boundaries.append(histogram.lengths[ends[best.ends(buckets)]])
        return boundaries


def _grouped(histogram: Histogram, ends: IntArray) -> Histogram:
    """Group neighbours at their mean if the lengths are too many; no group reaches beyond an end."""
    if histogram.lengths.size <= _MOST_SUMMED:
        return histogram
    even = np.linspace(0, histogram.lengths.size - 1, _MOST_SUMMED).astype(np.int64)
    last = np.union1d(even, ends)
    first = np.concatenate(([0], last[:-1] + 1))
    counts = np.diff(histogram.cumulative[last], prepend=0)
    mean = np.diff(histogram.cumulative_total[last], prepend=0.0) / counts
    return Histogram(np.clip(mean, histogram.lengths[first], histogram.lengths[last]), counts)
