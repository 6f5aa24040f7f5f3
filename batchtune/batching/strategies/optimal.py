"""The boundaries that no others beat."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from batchtune.batching.optimal import optimal_boundaries
from batchtune.batching.remainders import optimal_boundaries_with_remainders
from batchtune.batching.strategies.base import Problem
from batchtune.lengths import FloatArray

# Up to here the last, unfilled batch of each bucket is counted: pairs of distinct lengths are what that takes.
_MOST_EXAMPLES, _MOST_DISTINCT = 20_000, 8_192
# Of more examples it is counted where there are fewer batches than so many times the buckets.
_FEW_BATCHES = 10


def optimal(problem: Problem, num_buckets: Sequence[int]) -> list[FloatArray]:
    """Minimises the cost of all examples, exactly; at most that many buckets.

    On small data sets, where the last batch of each bucket matters, it is the cost of all batches, Σ ceil(n_b / B_b)
    of them; else each example costs its share of a full batch, as if all were full.
    """
    if _remainders_matter(problem, max(num_buckets)):
        return optimal_boundaries_with_remainders(
            problem.histogram, problem.batch_sizes, problem.full_costs, problem.single_costs, num_buckets
        )
    return optimal_boundaries(problem.histogram, problem.example_costs, num_buckets)


def _remainders_matter(problem: Problem, most_buckets: int) -> bool:
    histogram = problem.histogram
    if histogram.lengths.size > _MOST_DISTINCT:
        return False
    full_batches = float(np.sum(histogram.counts / problem.batch_sizes))
    return histogram.count <= _MOST_EXAMPLES or full_batches < _FEW_BATCHES * most_buckets
