"""What a strategy is given, and what it gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from batchtune.lengths import FloatArray, Histogram, IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """What boundaries are chosen for. The arrays have the shape (distinct lengths,), of a bucket that ends at each.

    Attributes:
        histogram: The distinct lengths and their counts.
        max_batch_length: The largest padded length that a batch may have.
        batch_sizes: Its batch size, at least 1.
        full_costs: What a full batch costs.
        single_costs: What a batch of one example costs.
    """

    histogram: Histogram
    max_batch_length: float
    batch_sizes: IntArray
    full_costs: FloatArray
    single_costs: FloatArray

    @property
    def example_costs(self) -> FloatArray:
        """What an example costs: its share of a full batch."""
        return self.full_costs / self.batch_sizes


class Strategy(Protocol):
    """A way to choose boundaries.

    Called with all bucket counts at once, since one run can answer them all. Gives one array of boundaries
    per count: strictly ascending, positive, the last at least the longest length, the same for the same
    problem.
    """

    def __call__(self, problem: Problem, num_buckets: Sequence[int]) -> list[FloatArray]:
        """The boundaries for each of the bucket counts."""
        ...


def merged_up_to(edges: FloatArray, longest: float) -> FloatArray:
    """Upper edges without duplicates, none beyond the longest length, the last exactly that.

    An edge that lies below the longest length by rounding alone is that length.
    """
    inner = edges[edges < longest * (1 - 1e-12)]
    return np.unique(np.append(inner, longest))
