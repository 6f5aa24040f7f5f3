"""Pools that are sorted by length, instead of buckets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from batchtune.batching.strategies.base import Problem, Strategy
from batchtune.lengths import FloatArray


class Pooled(Strategy):
    """Pools: the boundaries are the lengths at which another number of examples fits."""

    in_pools = True

    def boundaries(self, problem: Problem, num_buckets: Sequence[int]) -> list[FloatArray]:
        """Return the longest lengths of each run of equal batch sizes, whatever the number asked for."""
        lengths, sizes = problem.histogram.lengths, problem.batch_sizes
        return [lengths[np.append(np.flatnonzero(np.diff(sizes)), lengths.size - 1)] for _ in num_buckets]
