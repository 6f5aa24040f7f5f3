"""The boundaries that no others beat."""

from __future__ import annotations

from collections.abc import Sequence

from batchtune.batching.optimal import optimal_boundaries
from batchtune.batching.strategies.base import Problem
from batchtune.lengths import FloatArray


def optimal(problem: Problem, num_buckets: Sequence[int]) -> list[FloatArray]:
    """Minimises the cost of all examples, exactly; at most that many buckets."""
    return optimal_boundaries(problem.histogram, problem.example_costs, num_buckets)
