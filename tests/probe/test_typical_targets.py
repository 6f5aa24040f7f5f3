"""The target length that a batch can be expected to have, and what that makes of the estimates."""

from __future__ import annotations

import numpy as np
import pytest

from batchtune.buckets.epoch_cost import estimated_epoch_seconds
from batchtune.buckets.sweep import sweep
from batchtune.buckets.sweep_settings import SweepSettings
from batchtune.epochs.measured_costs import Costs, TypicalTargets
from batchtune.epochs.table import BucketTable
from batchtune.lengths import FloatArray, Lengths

RANDOM = np.random.default_rng(4)
PROMPTS = np.clip(np.exp(RANDOM.normal(5.5, 1.0, 6000)), 1, 4000).round()
ANSWERS = np.clip(np.exp(RANDOM.normal(4.5, 1.0, 6000)), 1, 2000).round()
CHAT = Lengths.of(PROMPTS, ANSWERS, unit="tokens")
FEW = ("speechbrain", "optimal")


def of_targets(batch_sizes: FloatArray, lengths: FloatArray, target_lengths: FloatArray | None = None) -> FloatArray:
    assert target_lengths is not None
    return 0.01 + 1e-5 * np.asarray(batch_sizes) * (np.asarray(lengths) + np.asarray(target_lengths))


def batches_of_one_epoch(table: BucketTable, seed: int) -> list[tuple[int, float, float]]:
    """(size, longest length, longest target) of each batch of a shuffled epoch."""
    random = np.random.default_rng(seed)
    buckets = np.searchsorted(table.boundaries, PROMPTS)
    batches = []
    for bucket, size in enumerate(table.batch_sizes):
        examples = random.permutation(np.flatnonzero(buckets == bucket))
        cut = [examples[start : start + size] for start in range(0, examples.size, size)]
        batches += [(len(batch), PROMPTS[batch].max(), ANSWERS[batch].max()) for batch in cut]
    return batches


TABLE = BucketTable(np.array([80.0, 200, 400, 900, 4000]), np.array([60, 25, 10, 5, 2]))


@pytest.mark.parametrize("bucket", [0, 2, 4])
def test_it_is_the_mean_longest_target_of_real_batches(bucket: int) -> None:
    edges = [0.0, *TABLE.boundaries.tolist()]
    size = int(TABLE.batch_sizes[bucket])
    batches = [batch for seed in range(40) for batch in batches_of_one_epoch(TABLE, seed)]
    ours = [batch for batch in batches if edges[bucket] < batch[1] <= edges[bucket + 1] and batch[0] == size]
    _, longest, targets = (np.array(column) for column in zip(*ours, strict=True))
    typical = TypicalTargets.of(CHAT)
    assert typical is not None
    assert typical(size, longest, edges[bucket]).mean() == pytest.approx(targets.mean(), rel=0.05)


def test_larger_batches_have_longer_targets() -> None:
    typical = TypicalTargets.of(CHAT)
    assert typical is not None
    found = typical(np.array([1, 2, 8, 64, 1000]), 300.0)
    assert found.tolist() == sorted(found.tolist())
    assert found[-1] <= CHAT.worst_target(300.0) * (1 + 1e-9)


def test_only_examples_of_the_bucket_count() -> None:
    lengths = Lengths.of([1.0] * 50 + [2.0] * 50, [100.0] * 50 + [7.0] * 50)
    typical = TypicalTargets.of(lengths)
    assert typical is not None
    assert typical(4, np.array([2.0, 1.0]), np.array([1.0, 0.0])).tolist() == pytest.approx([7, 100])


def test_without_a_bucket_the_nearest_examples_count() -> None:
    typical = TypicalTargets.of(Lengths.of(np.arange(1.0, 1001), np.arange(1.0, 1001)))
    assert typical is not None
    assert 940 < float(typical(4, 1000.0)) <= 1000


def test_looking_up_many_lengths_is_as_good_as_each_by_itself() -> None:
    typical = TypicalTargets.of(CHAT)
    assert typical is not None
    lengths = np.linspace(1, 4000, 30_000)
    index = np.searchsorted(TABLE.boundaries, lengths)
    above = np.concatenate(([0.0], TABLE.boundaries))[index]
    sizes = TABLE.batch_sizes[index]
    together = typical(sizes, lengths, above)
    some = np.arange(0, 30_000, 101)
    each = np.array([float(typical(sizes[i], lengths[i], above[i])) for i in some])
    assert np.mean(np.abs(together[some] / each - 1)) < 0.005


def test_a_data_set_without_targets_has_no_typical_ones() -> None:
    assert TypicalTargets.of(Lengths.of([1, 2, 3])) is None


def test_an_epochs_estimate_is_what_its_real_batches_take() -> None:
    real = [sum(float(of_targets(*batch)) for batch in batches_of_one_epoch(TABLE, seed)) for seed in range(10)]
    assert estimated_epoch_seconds(CHAT, TABLE, of_targets) == pytest.approx(np.mean(real), rel=0.02)


def test_the_estimate_leaves_out_what_drop_last_drops() -> None:
    real = [
        sum(float(of_targets(*batch)) for batch in batches_of_one_epoch(TABLE, seed) if batch[0] in TABLE.batch_sizes)
        for seed in range(10)
    ]
    estimate = estimated_epoch_seconds(CHAT, TABLE, of_targets, drop_last=True)
    assert estimate == pytest.approx(np.mean(real), rel=0.02)
    assert estimate < estimated_epoch_seconds(CHAT, TABLE, of_targets)


def test_every_time_of_a_sweep_knows_of_the_targets() -> None:
    def of_lengths(sizes: FloatArray, lengths: FloatArray, targets: FloatArray | None = None) -> FloatArray:
        return of_targets(sizes, lengths, np.zeros_like(lengths))

    found, without = (
        sweep(CHAT, 20_000, SweepSettings(num_buckets=(5,), strategies=FEW), Costs(step_seconds=seconds))
        for seconds in (of_targets, of_lengths)
    )
    for ours, theirs in zip(
        [*found.rows, *found.baselines, found.lower_bound],
        [*without.rows, *without.baselines, without.lower_bound],
        strict=True,
    ):
        assert (ours.estimated_epoch_seconds or 0) > (theirs.estimated_epoch_seconds or 0) * 1.1


def test_no_row_beats_the_bound_with_targets() -> None:
    found = sweep(CHAT, 20_000, SweepSettings(num_buckets=(10, 20), strategies=FEW), Costs(step_seconds=of_targets))
    least = min(other.estimated_epoch_seconds or 0 for other in (*found.rows, *found.baselines))
    assert least >= (found.lower_bound.estimated_epoch_seconds or 0) > 0.5 * least


def test_the_sorted_baseline_uses_its_own_batches_targets() -> None:
    lengths = Lengths.of([10, 10, 6, 6, 2], [1, 9, 4, 3, 5])
    found = sweep(lengths, 20, SweepSettings(num_buckets=(2,)), Costs(step_seconds=of_targets))
    expected = [of_targets(2, 10, 9), of_targets(2, 6, 4), of_targets(1, 2, 5)]
    assert found.baselines[1].estimated_epoch_seconds == pytest.approx(float(np.sum(expected)))
