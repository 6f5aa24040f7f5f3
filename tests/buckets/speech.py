"""Made lengths as those of read speech, and what a probe would have measured of them."""

import numpy as np

from batchtune import BucketBatchSampler
from batchtune.epochs.measured_costs import Costs

LONG_SPEECH = np.random.default_rng(5).gamma(6, 2, 1500).round(1) + 0.5
SPEECH = LONG_SPEECH[:700]


def frontier(lengths):
    return np.maximum(1, 400 / lengths**0.9).astype(np.int64)


def step_seconds(batch_sizes, lengths):
    return 0.02 + 1e-3 * batch_sizes * lengths


PROBED = Costs(
    frontier=frontier,
    continued_frontier=frontier,
    step_seconds=step_seconds,
    device_name="made",
)


def epochs_of(table, values, dealing, number):
    """The batches that each rank's sampler makes, epoch by epoch."""
    samplers = [
        BucketBatchSampler(
            values,
            bucket_boundaries=table.boundaries,
            bucket_batch_sizes=table.batch_sizes,
            rank=rank,
            world_size=dealing.world_size,
            same_bucket=dealing.same_bucket,
        )
        for rank in range(dealing.world_size)
    ]
    for _ in range(number):
        yield [list(sampler) for sampler in samplers]
