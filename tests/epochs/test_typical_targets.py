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
PROMPTS = np.clip(np.exp(RANDOM.normal(5.5, 1.0, 6000)), 1, 4000).round()
ANSWERS = np.clip(np.exp(RANDOM.normal(4.5, 1.0, 6000)), 1, 2000).round()
CHAT = Lengths.of(PROMPTS, ANSWERS, unit="tokens")
FEW = ("speechbrain", "optimal")


def of_targets(
    batch_sizes,
    lengths,
    target_lengths=None,
):
    return 0.01 + 1e-5 * np.asarray(batch_sizes) * (
        np.asarray(lengths) + np.asarray(target_lengths)
    )


def batches_of_one_epoch(seed):
    """Sizes, longest lengths and longest targets of the batches of a shuffled epoch."""
    drawing = ShuffleKey(seed=seed)
    cut = Batching(TABLE).batcher(PROMPTS).cut(drawing, ON_ONE_RANK)
    shapes = cut.shapes(PROMPTS, ANSWERS)
    return shapes.batch_sizes, shapes.lengths, shapes.targets


TABLE = BucketTable(np.array([80.0, 200, 400, 900, 4000]), np.array([60, 25, 10, 5, 2]))


def estimated_seconds(dealing):
    expected = expected_batches(CHAT.histogram, TABLE, dealing)
    targets = TypicalTargets.of(CHAT)
    return expected.seconds(of_targets, targets)


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epochs_estimate_is_what_its_real_batches_take(drop_last):
    real = []
    for seed in range(10):
        batches = batches_of_one_epoch(seed)
        seconds = of_targets(*batches)
        if drop_last:
            seconds = seconds[np.isin(batches[0], TABLE.batch_sizes)]
        real.append(seconds.sum())
    estimate = estimated_seconds(RankSplit(drop_last=drop_last))
    assert estimate == pytest.approx(np.mean(real), rel=0.02)


def test_every_time_of_a_sweep_knows_of_the_targets():
    def of_lengths(sizes, lengths, targets=None):
        return of_targets(sizes, lengths, np.zeros_like(lengths))

    found, without = (
        sweep(
            CHAT,
            20_000,
            SweepSettings(num_buckets=(5,), strategies=FEW),
            Costs(step_seconds=seconds),
        )
        for seconds in (of_targets, of_lengths)
    )
    for ours, theirs in zip(
        [*found.rows, *found.baselines, found.lower_bound],
        [*without.rows, *without.baselines, without.lower_bound],
        strict=True,
    ):
        assert (ours.estimated_epoch_seconds or 0) > (
            theirs.estimated_epoch_seconds or 0
        ) * 1.1
