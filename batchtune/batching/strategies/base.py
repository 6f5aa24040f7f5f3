"""What a strategy is given, and what it gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from batchtune.batching.bucket_costs import ShapeCost
from batchtune.batching.table import BucketTable
from batchtune.lengths import FloatArray, Histogram, IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProblemCosts:
    """What batches cost.

    Attributes:
        of_batch: The cost of batches by their shapes.
        of_epoch: The cost of an epoch of such lengths with a table, as it is reported: on one rank, the sum over its
            batches.
    """

    of_batch: ShapeCost
    of_epoch: Callable[[Histogram, BucketTable], float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """What boundaries are chosen for.

    Attributes:
        histogram: The distinct lengths and their counts.
        max_batch_length: The largest padded length that a batch may have.
        batch_sizes: Shape (distinct lengths,): the batch size of a bucket that ends at each, at least 1, in any order.
        costs: What is to be as low as possible; None: the number of batches.
    """

    histogram: Histogram
    max_batch_length: float
    batch_sizes: IntArray
    costs: ProblemCosts | None = None


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
