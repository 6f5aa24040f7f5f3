"""Boundaries that share out the total length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from batchtune.batching.strategies.base import Problem, Strategy, merged_up_to
from batchtune.lengths import FloatArray


class Quantile(Strategy):
    """Buckets of the same total length, as NeMo and Lhotse estimate their duration bins."""

    def boundaries(self, problem: Problem, num_buckets: Sequence[int]) -> list[FloatArray]:
        """Give each bucket the same total length, as near as the lengths allow."""
        lengths, so_far = problem.histogram.lengths, problem.histogram.cumulative_total
        boundaries = []
        for buckets in num_buckets:
            shares = so_far[-1] * np.arange(1, buckets) / buckets
            boundaries.append(merged_up_to(lengths[np.searchsorted(so_far, shares)], float(lengths[-1])))
        return boundaries
