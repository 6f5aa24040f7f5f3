"""The target length that a batch can be expected to have, and what that makes of the estimates."""

import numpy as np
import pytest

from batchtune.buckets.sweep import sweep
from batchtune.epochs import ON_ONE_RANK, RankSplit, ShuffleKey
from batchtune.epochs.batchers import Batching
from batchtune.epochs.expectation import expected_batches
from batchtune.epochs.measured_costs import Costs, TypicalTargets
from batchtune.epochs.table import BucketTable
from batchtune.lengths import Lengths
from batchtune.results import SweepSettings

RANDOM = np.random.default_rng(4)
PROMPTS = RANDOM.lognormal(5.5, 1.0, 6000).clip(1, 4000).round()
ANSWERS = RANDOM.lognormal(4.5, 1.0, 6000).clip(1, 2000).round()
CHAT = Lengths.of(PROMPTS, ANSWERS, unit="tokens")


def of_targets(batch_sizes, lengths, target_lengths):
    return 0.01 + 1e-5 * batch_sizes * (lengths + target_lengths)


TABLE = BucketTable(np.array([80.0, 200, 400, 900, 4000]), np.array([60, 25, 10, 5, 2]))


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epochs_estimate_is_what_its_real_batches_take(drop_last):
    real = []
    for seed in range(10):
        cut = Batching(TABLE).batcher(PROMPTS).cut(ShuffleKey(seed=seed), ON_ONE_RANK)
        shapes = cut.shapes(PROMPTS, ANSWERS)
        seconds = of_targets(shapes.batch_sizes, shapes.lengths, shapes.targets)
        if drop_last:
            seconds = seconds[np.isin(shapes.batch_sizes, TABLE.batch_sizes)]
        real.append(seconds.sum())
    dealing = RankSplit(drop_last=drop_last)
    expected = expected_batches(CHAT.histogram, TABLE, dealing)
    estimate = expected.seconds(of_targets, TypicalTargets.of(CHAT))
    assert estimate == pytest.approx(np.mean(real), rel=0.02)


def test_every_time_of_a_sweep_knows_of_the_targets():
    def of_lengths(sizes, lengths, targets=None):
        return of_targets(sizes, lengths, np.zeros_like(lengths))

    found, without = (
        sweep(
            CHAT,
            20_000,
            SweepSettings(num_buckets=(5,), strategies=("speechbrain", "optimal")),
            Costs(step_seconds=seconds),
        )
        for seconds in (of_targets, of_lengths)
    )
    for ours, theirs in zip(
        [*found.rows, *found.baselines, found.lower_bound],
        [*without.rows, *without.baselines, without.lower_bound],
        strict=True,
    ):
        assert ours.estimated_epoch_seconds > 1.1 * theirs.estimated_epoch_seconds
