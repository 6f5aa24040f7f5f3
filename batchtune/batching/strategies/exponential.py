"""Boundaries in a geometric series."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from batchtune.batching.strategies.base import Problem, Strategy, merged_up_to
from batchtune.lengths import FloatArray


class Exponential(Strategy):
    """Buckets of equal ratio."""

    def boundaries(self, problem: Problem, num_buckets: Sequence[int]) -> list[FloatArray]:
        """Cut the span from the shortest to the longest length into buckets of equal ratio."""
        shortest, longest = float(problem.histogram.lengths[0]), float(problem.histogram.lengths[-1])
        return [merged_up_to(np.geomspace(shortest, longest, n + 1)[1:], longest) for n in num_buckets]
