"""The time of an epoch on several ranks that wait for each other, against the real sampler."""

import numpy as np
import pytest
from buckets.speech import epochs_of

from batchtune.epochs import RankSplit
from batchtune.epochs.pricing import Pricing
from batchtune.epochs.table import BucketTable, batch_sizes_for
from batchtune.lengths import Lengths

RANDOM = np.random.default_rng(4)
PROMPTS = np.exp(RANDOM.normal(6.5, 1.0, 8000)).clip(16, 4000).round()
ANSWERS = np.exp(RANDOM.normal(5.0, 0.9, 8000)).clip(1, 1500).round()
CHAT = Lengths.of(PROMPTS, ANSWERS)


def step_seconds(sizes, lengths, targets=0.0):
    return 0.02 + 1e-6 * sizes * (lengths + 3 * targets)


def estimated(lengths, table, dealing):
    pricing = Pricing(
        lengths=lengths,
        total=lengths.total,
        max_batch_length=16_000,
        step_seconds=step_seconds,
        dealing=dealing,
    )
    return pricing.of_table("made", "length", 1, table).time


def really_dealt(table, dealing):
    """The mean time of epochs of the real sampler, each step as long as its slowest rank."""
    seconds = []
    for ranks in epochs_of(table, PROMPTS, dealing, 4):
        of_ranks = []
        for batches in ranks:
            shapes = [
                (len(batch), PROMPTS[batch].max(), ANSWERS[batch].max())
                for batch in batches
            ]
            of_ranks.append(step_seconds(*np.array(shapes).T))
        seconds.append(np.max(of_ranks, axis=0).sum())
    return float(np.mean(seconds))


@pytest.mark.parametrize("same_bucket", [False, True])
def test_ranks_wait_for_long_targets_as_in_real_epochs(same_bucket):
    boundaries = np.quantile(PROMPTS, np.arange(1, 11) / 10)
    table = BucketTable(boundaries, batch_sizes_for(boundaries, 16_000))
    dealing = RankSplit(world_size=8, same_bucket=same_bucket)
    time = estimated(CHAT, table, dealing)
    real = really_dealt(table, dealing)
    assert time.seconds == pytest.approx(real, rel=0.02)
    assert 0 < time.chance < 0.02 * real


@pytest.mark.parametrize("accumulate", [1, 3])
def test_batches_that_all_take_as_long_never_wait(accumulate):
    dealing = RankSplit(world_size=8, accumulate=accumulate)
    table = BucketTable.of([5], [10])
    ranks = estimated(Lengths.of([5.0] * 240), table, dealing).ranks
    without = pytest.approx(ranks.without_waiting_epoch_seconds)
    assert ranks.independent_epoch_seconds == without
    assert ranks.same_bucket_epoch_seconds == without
