"""Boundaries that are evenly spaced: in length, in its logarithm, or in total length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from batchtune.buckets.strategies.base import Problem, Strategy
from batchtune.lengths import FloatArray


def _up_to(edges: FloatArray, longest: float) -> FloatArray:
    """Return upper edges without duplicates, the last one the longest length; rounding makes no bucket below it."""
    return np.unique(np.append(edges[edges < longest * (1 - 1e-12)], longest))


class Linear(Strategy):
    """Buckets of equal width."""

    def boundaries(self, problem: Problem, num_buckets: Sequence[int]) -> list[FloatArray]:
        """Cut the span from the shortest to the longest length into buckets of equal width."""
        shortest = float(problem.histogram.lengths[0])
        longest = float(problem.histogram.lengths[-1])
        return [_up_to(np.linspace(shortest, longest, n + 1)[1:], longest) for n in num_buckets]


class Exponential(Strategy):
    """Buckets of equal ratio."""

    def boundaries(self, problem: Problem, num_buckets: Sequence[int]) -> list[FloatArray]:
        """Cut the span from the shortest to the longest length into buckets of equal ratio."""
        shortest = float(problem.histogram.lengths[0])
        longest = float(problem.histogram.lengths[-1])
        return [_up_to(np.geomspace(shortest, longest, n + 1)[1:], longest) for n in num_buckets]


class Quantile(Strategy):
    """Buckets of the same total length, as NeMo and Lhotse estimate their duration bins."""

    def boundaries(self, problem: Problem, num_buckets: Sequence[int]) -> list[FloatArray]:
        """Give each bucket the same total length, as near as the lengths allow."""
        lengths = problem.histogram.lengths
        so_far = problem.histogram.cumulative_total
        shares = (so_far[-1] * np.arange(1, buckets) / buckets for buckets in num_buckets)
        return [_up_to(lengths[np.searchsorted(so_far, each)], float(lengths[-1])) for each in shares]
