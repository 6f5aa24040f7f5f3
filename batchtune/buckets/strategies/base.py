"""The base class of strategies, and the problem that they solve."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from batchtune.epochs.expectation import BatchCost
from batchtune.epochs.table import BucketTable
from batchtune.lengths import FloatArray, Histogram, IntArray, Lengths
from batchtune.results import Row


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProblemCosts:
    """The cost of a batch by its shape, and that of an epoch of such lengths with a table, as it is reported."""

    of_batch: BatchCost
    of_epoch: Callable[[Histogram, BucketTable], float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """The data and limits that boundaries are chosen for."""

    histogram: Histogram
    max_batch_length: float
    batch_sizes: IntArray  # shape (distinct lengths,): of a bucket that ends at each, at least 1, in any order
    costs: ProblemCosts | None = None  # to minimise; None: the number of batches


class Strategy(ABC):
    """A way to choose boundaries."""

    # Whether the boundaries depend on `Problem.batch_sizes`, so that each way to size buckets has its own.
    depends_on_sizes: ClassVar[bool] = False
    # Whether batches are made in sorted pools: a sweep varies their size, and boundaries only limit batch sizes.
    in_pools: ClassVar[bool] = False

    @abstractmethod
    def boundaries(self, problem: Problem, num_buckets: Sequence[int]) -> list[FloatArray]:
        """Return the boundaries for each of the bucket counts; all at once, since one run can answer them all.

        They are strictly ascending and positive, the last at least the longest length, and the same for the same
        problem.
        """

    def cautions(self, lengths: Lengths, max_batch_length: float, rows: Sequence[Row]) -> Iterator[str]:
        """Yield warnings about this strategy's rows, each without a full stop."""
        return iter(())

    def practice(self, num_buckets: int) -> str | None:
        """Return the name of this number of buckets if many train with it today, else None."""
        return None
