"""Made lengths as those of read speech, what a probe would have measured of them, and sweeps of them."""

import numpy as np

from batchtune import BucketBatchSampler
from batchtune.buckets.current import read_current
from batchtune.buckets.sweep import sweep
from batchtune.epochs.measured_costs import Costs
from batchtune.lengths import Lengths
from batchtune.results import SweepSettings

LONG_SPEECH = np.random.default_rng(5).gamma(6, 2, 1500).round(1) + 0.5
SPEECH = LONG_SPEECH[:700]


def frontier(lengths):
    return np.maximum(1, 400 / lengths**0.9).astype(np.int64)


def step_seconds(batch_sizes, lengths):
    return 0.02 + 1e-3 * batch_sizes * lengths


NONE_KNOWN = Costs()
PROBED = Costs(
    frontier=frontier,
    continued_frontier=frontier,
    step_seconds=step_seconds,
    device_name="made",
)


def swept(lengths, limit=300, costs=NONE_KNOWN, current=None, **settings):
    """A sweep of lengths, in seconds unless they say otherwise, beside current settings that are written out."""
    if not isinstance(lengths, Lengths):
        lengths = Lengths.of(lengths, unit="s")
    given = current and read_current(current)
    return sweep(lengths, limit, SweepSettings(**settings), costs, given)


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
