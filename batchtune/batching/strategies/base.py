"""What a strategy is given, and what it gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from batchtune.lengths import FloatArray, Histogram


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """What boundaries are chosen for.

    Attributes:
        histogram: The distinct lengths and their counts.
        max_batch_length: The largest padded length that a batch may have.
        example_costs: Shape (distinct lengths,): what an example costs in a bucket that ends at that length.
    """

    histogram: Histogram
    max_batch_length: float
    example_costs: FloatArray


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
    """Upper edges without duplicates, none beyond the longest length, the last exactly that."""
    return np.unique(np.append(np.minimum(edges, longest), longest))
