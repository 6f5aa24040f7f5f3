"""Made lengths as those of read speech, and what a probe would have measured of them."""

from __future__ import annotations

import numpy as np

from batchtune.epochs.measured_costs import Costs
from batchtune.lengths import FloatArray, IntArray

SPEECH = np.random.default_rng(5).gamma(6, 2, 1500).round(1) + 0.5


def frontier(lengths: FloatArray) -> IntArray:
    return np.maximum(1, 400 / lengths**0.9).astype(np.int64)


def step_seconds(batch_sizes: FloatArray, lengths: FloatArray) -> FloatArray:
    return 0.02 + 1e-3 * batch_sizes * lengths


PROBED = Costs(
    frontier=frontier,
    continued_frontier=frontier,
    step_seconds=step_seconds,
    device_name="made",
)
