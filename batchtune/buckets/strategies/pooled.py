"""Pools that are sorted by length, instead of buckets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from batchtune.buckets.strategies.base import Problem, Strategy
from batchtune.lengths import FloatArray, Lengths
from batchtune.results import Row


class Pooled(Strategy):
    """Pools: the boundaries are the lengths at which another number of examples fits."""

    in_pools = True

    def boundaries(self, problem: Problem, num_buckets: Sequence[int]) -> list[FloatArray]:
        """Return the longest lengths of each run of equal batch sizes, whatever the number asked for."""
        lengths = problem.histogram.lengths
        sizes = problem.batch_sizes
        return [lengths[np.append(np.flatnonzero(np.diff(sizes)), lengths.size - 1)] for _ in num_buckets]

    def cautions(self, lengths: Lengths, max_batch_length: float, rows: Sequence[Row]) -> Iterator[str]:
        """Warn of pools that are too small to fill a batch of typical examples."""
        median = float(lengths.values[lengths.count // 2])
        small = []
        for row in rows:
            assert row.pool_size is not None
            fits = row.batch_sizes[int(np.searchsorted(row.boundaries, median))]
            if row.pool_size < min(fits, lengths.count):
                small.append((row.pool_size, fits))
        if small:
            largest, fits = max(small)
            yield (
                f"pools of {largest:,} examples{' or fewer' if len(small) > 1 else ''} can't fill batches: {fits:,} "
                "examples of the median length fit in one"
            )
