"""The boundaries that no others beat."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from batchtune.batching.bucket_costs import MOST_EXACT, ExactCosts, SmoothCosts
from batchtune.batching.remainders import TIE, BatchCounts, BucketCosts, best_buckets, few_ends
from batchtune.batching.strategies.base import Problem, ProblemCosts, Strategy
from batchtune.batching.table import BucketTable
from batchtune.lengths import FloatArray, Histogram, IntArray

# Of more distinct lengths, so many stand for all as ends of buckets: of batches that are counted, and of
# batches with a cost, which takes longer. Time grows with their square.
_MOST_ENDS, _MOST_COSTED_ENDS = 4096, 2048
# Of more distinct lengths, tables are compared by their means over about so many groups.
_MOST_SUMMED = 1 << 16
# A bucket more that seems to gain less than this share of the cost is not looked at.
_LEAST_GAIN = 1e-4


class Optimal(Strategy):
    """The boundaries that no others beat."""

    depends_on_sizes = True

    def boundaries(self, problem: Problem, num_buckets: Sequence[int]) -> list[FloatArray]:
        """Minimise the cost of an epoch's batches, the last one of each bucket included, in at most that many buckets.

        Without a cost it is the number of batches, Σ ceil(n_b / B_b). With one, each batch costs by its expected
        longest: exactly up to 96 distinct lengths; of more, `SmoothCosts` estimates it. The best tables of each number
        of buckets are then compared by their cost as it is reported, so more buckets allowed never cost more. Of equal
        ones the fewest buckets are taken.

        With the number of batches, or with exact costs, no other boundaries among the lengths cost less. Of more than
        4,096 distinct lengths (2,048 with a cost), that many are allowed as boundaries.
        """
        most = _MOST_ENDS if problem.costs is None else _MOST_COSTED_ENDS
        ends = few_ends(problem.histogram, problem.batch_sizes, most)
        best = best_buckets(_bucket_costs(problem, ends), max(num_buckets))
        lengths = problem.histogram.lengths[ends]
        if problem.costs is None:
            improving = best.improving()
            totals = [float(best.totals[buckets - 1]) for buckets in improving]
        else:
            improving = best.improving(_LEAST_GAIN if lengths.size > MOST_EXACT else TIE)
            compared = _grouped(problem.histogram, ends)
            totals = [_cost(problem, problem.costs, compared, ends[best.ends(buckets)]) for buckets in improving]
        chosen = [_cheapest(improving, totals, number) for number in num_buckets]
        return [lengths[best.ends(buckets)] for buckets in chosen]


def _bucket_costs(problem: Problem, ends: IntArray) -> BucketCosts:
    if problem.costs is None:
        return BatchCounts(problem.histogram, ends, problem.batch_sizes[ends])
    if problem.histogram.lengths.size <= MOST_EXACT:
        return ExactCosts(problem.histogram, problem.batch_sizes, problem.costs.of_batch)
    return SmoothCosts(problem.histogram, ends, problem.batch_sizes[ends], problem.costs.of_batch)


def _grouped(histogram: Histogram, ends: IntArray) -> Histogram:
    """Groups of neighbours, each as long as its mean, where lengths are too many; none reaches beyond an end."""
    if histogram.lengths.size <= _MOST_SUMMED:
        return histogram
    even = np.linspace(0, histogram.lengths.size - 1, _MOST_SUMMED).astype(np.int64)
    last = np.union1d(even, ends)
    first = np.concatenate(([0], last[:-1] + 1))
    counts = np.diff(histogram.cumulative[last], prepend=0)
    mean = np.diff(histogram.cumulative_total[last], prepend=0.0) / counts
    return Histogram(np.clip(mean, histogram.lengths[first], histogram.lengths[last]), counts)


def _cost(problem: Problem, costs: ProblemCosts, histogram: Histogram, ends: IntArray) -> float:
    return costs.of_epoch(histogram, BucketTable(problem.histogram.lengths[ends], problem.batch_sizes[ends]))


def _cheapest(buckets: Sequence[int], totals: Sequence[float], most: int) -> int:
    """Of ascending numbers of buckets up to `most`, the one that costs least; of equal ones the first."""
    return min((total, number) for total, number in zip(totals, buckets, strict=True) if number <= most)[1]
