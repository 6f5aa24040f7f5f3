"""The time of an epoch on several ranks that wait for each other, against the real sampler."""

from __future__ import annotations

import numpy as np
import pytest

from batchtune import BucketBatchSampler
from batchtune.buckets.epoch_cost import Pricing
from batchtune.epochs.layout import Dealing
from batchtune.epochs.table import BucketTable, batch_sizes_for
from batchtune.lengths import FloatArray, Lengths
from batchtune.results import RankTimes

RANDOM = np.random.default_rng(4)
PROMPTS = np.exp(RANDOM.normal(6.5, 1.0, 8000)).clip(16, 4000).round()
ANSWERS = np.exp(RANDOM.normal(5.0, 0.9, 8000)).clip(1, 1500).round()
CHAT = Lengths.of(PROMPTS, ANSWERS)
SPEECH = np.random.default_rng(2).gamma(5, 2, 3000).round(2) + 1


def step_seconds(
    sizes: FloatArray, lengths: FloatArray, targets: FloatArray | float = 0.0
) -> FloatArray:
    return 0.02 + 1e-6 * sizes * (lengths + 3 * targets)


def quantile_table(
    values: FloatArray, buckets: int, max_batch_length: float
) -> BucketTable:
    boundaries = np.append(
        np.quantile(values, np.arange(1, buckets) / buckets), values.max()
    )
    return BucketTable(boundaries, batch_sizes_for(boundaries, max_batch_length))


def times(
    values: FloatArray | list[float],
    table: BucketTable,
    world_size: int,
    accumulate: int = 1,
    same_bucket: bool = False,
) -> RankTimes:
    dealing = Dealing(
        world_size=world_size, accumulate=accumulate, same_bucket=same_bucket
    )
    lengths = Lengths.of(values)
    pricing = Pricing(
        lengths=lengths,
        total=lengths.total,
        max_batch_length=300,
        step_seconds=step_seconds,
        dealing=dealing,
    )
    time = pricing.of_table("made", "length", 1, table).time
    assert time is not None and time.ranks is not None
    return time.ranks


def really_dealt(table: BucketTable, world_size: int, same_bucket: bool) -> float:
    """The mean time of epochs of the real sampler, each step as long as its slowest rank."""
    targets = CHAT.targets
    assert targets is not None
    seconds = []
    for epoch in range(4):
        of_ranks = []
        for rank in range(world_size):
            sampler = BucketBatchSampler(
                CHAT.values,
                bucket_boundaries=table.boundaries,
                bucket_batch_sizes=table.batch_sizes,
                seed=9,
                epoch=epoch,
                rank=rank,
                world_size=world_size,
                same_bucket=same_bucket,
            )
            shapes = [
                (len(batch), CHAT.values[batch].max(), targets[batch].max())
                for batch in sampler
            ]
            of_ranks.append(step_seconds(*np.array(shapes).T))
        seconds.append(np.max(of_ranks, axis=0).sum())
    return float(np.mean(seconds))


@pytest.mark.parametrize("same_bucket", [False, True])
def test_ranks_wait_for_long_targets_as_in_real_epochs(same_bucket: bool) -> None:
    table = quantile_table(PROMPTS, 10, 16_000)
    pricing = Pricing(
        lengths=CHAT,
        total=CHAT.total,
        max_batch_length=16_000,
        step_seconds=step_seconds,
        dealing=Dealing(world_size=8, same_bucket=same_bucket),
    )
    time = pricing.of_table("made", "length", 1, table).time
    assert time is not None
    real = really_dealt(table, 8, same_bucket)
    assert time.seconds == pytest.approx(real, rel=0.02)
    assert 0 < time.chance < 0.02 * real


@pytest.mark.parametrize(("world_size", "buckets"), [(2, 3), (8, 8)])
def test_batches_of_the_same_bucket_wait_less(world_size: int, buckets: int) -> None:
    found = times(
        SPEECH * 100, quantile_table(SPEECH * 100, buckets, 20_000), world_size
    )
    assert (
        found.without_waiting_epoch_seconds
        < found.same_bucket_epoch_seconds
        < found.independent_epoch_seconds
    )


def test_batches_that_all_take_as_long_never_wait() -> None:
    for accumulate in (1, 3):
        found = times([5.0] * 240, BucketTable.of([5], [10]), 8, accumulate)
        assert found.independent_epoch_seconds == pytest.approx(
            found.without_waiting_epoch_seconds
        )
        assert found.same_bucket_epoch_seconds == pytest.approx(
            found.without_waiting_epoch_seconds
        )
