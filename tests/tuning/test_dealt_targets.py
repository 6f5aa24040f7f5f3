"""Several ranks that wait for each other where targets vary within a bucket: estimates against the real sampler."""

from __future__ import annotations

import numpy as np
import pytest

from batchtune import BucketBatchSampler
from batchtune.batching.batchers import Batching
from batchtune.batching.table import BucketTable
from batchtune.lengths import FloatArray, Lengths
from batchtune.tuning.costs import TypicalTargets
from batchtune.tuning.epoch_cost import Pricing
from batchtune.tuning.sweep_settings import Ranks

RANDOM = np.random.default_rng(4)
PROMPTS = np.exp(RANDOM.normal(6.5, 1.0, 8000)).clip(16, 4000).round()
ANSWERS = np.exp(RANDOM.normal(5.0, 0.9, 8000)).clip(1, 1500).round()
LENGTHS = Lengths.of(PROMPTS, ANSWERS)
BOUNDARIES = np.append(np.quantile(PROMPTS, np.arange(1, 10) / 10), PROMPTS.max())
TABLE = BucketTable(BOUNDARIES, np.maximum(1, 16_000 / BOUNDARIES).astype(np.int64))


def step_seconds(sizes: FloatArray, lengths: FloatArray, targets: FloatArray) -> FloatArray:
    return 0.02 + 1e-6 * sizes * (lengths + 3 * targets)


def really_dealt(world_size: int, same_bucket: bool) -> float:
    """The mean time of epochs of the real sampler, each step as long as its slowest rank."""
    seconds = []
    for epoch in range(4):
        of_ranks = []
        for rank in range(world_size):
            sampler = BucketBatchSampler(
                LENGTHS.values,
                bucket_boundaries=TABLE.boundaries,
                bucket_batch_sizes=TABLE.batch_sizes,
                seed=9,
                epoch=epoch,
                rank=rank,
                world_size=world_size,
                same_bucket=same_bucket,
            )
            targets = LENGTHS.targets
            assert targets is not None
            shapes = [(len(batch), LENGTHS.values[batch].max(), targets[batch].max()) for batch in sampler]
            of_ranks.append(step_seconds(*np.array(shapes).T))
        seconds.append(np.max(of_ranks, axis=0).sum())
    return float(np.mean(seconds))


@pytest.mark.parametrize("same_bucket", [False, True])
def test_ranks_wait_for_long_targets_as_in_real_epochs(same_bucket: bool) -> None:
    pricing = Pricing(
        lengths=LENGTHS,
        total=LENGTHS.total,
        max_batch_length=16_000,
        step_seconds=step_seconds,
        targets=TypicalTargets.of(LENGTHS),
        ranks=Ranks(world_size=8, same_bucket=same_bucket),
    )
    estimated = pricing.cost_of(Batching(TABLE)).seconds
    assert estimated == pytest.approx(really_dealt(8, same_bucket), rel=0.02)
