from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.batching.expectation import BatchCost, expected_batches
from batchtune.batching.table import BucketTable, batch_sizes_for
from batchtune.lengths import FloatArray, Lengths
from batchtune.results import RankTimes
from batchtune.tuning.rank_times import rank_times

SPEECH = np.random.default_rng(2).gamma(5, 2, 3000).round(2) + 1


def cost(batch_sizes: FloatArray, lengths: FloatArray) -> FloatArray:
    return 0.5 + 0.01 * batch_sizes * lengths + 0.003 * lengths**2


def table_of(boundaries: list[float], batch_sizes: list[int]) -> BucketTable:
    return BucketTable(np.array(boundaries, dtype=float), np.array(batch_sizes, dtype=np.int64))


def quantile_table(values: FloatArray, buckets: int, max_batch_length: float = 200.0) -> BucketTable:
    boundaries = np.append(np.quantile(values, np.arange(1, buckets) / buckets), values.max())
    return BucketTable(boundaries, batch_sizes_for(boundaries, max_batch_length))


def bumpy(batch_sizes: FloatArray, lengths: FloatArray) -> FloatArray:
    """Measured times need not grow with the length."""
    return cost(batch_sizes, lengths) * (1 + 0.3 * np.sin(3 * lengths))


def times(
    values: FloatArray | list[float], table: BucketTable, world_size: int, accumulate: int = 1, cost: BatchCost = cost
) -> RankTimes:
    histogram = Lengths.of(values).histogram
    return rank_times(expected_batches(histogram, table), cost, world_size, accumulate)


def seconds_of(batches: list[tuple[float, ...]]) -> list[float]:
    return [float(cost(np.float64(len(batch)), np.float64(max(batch)))) for batch in batches]


def all_shuffles(buckets: list[list[float]]) -> Iterator[tuple[tuple[float, ...], ...]]:
    return itertools.product(*(itertools.permutations(bucket) for bucket in buckets))


def cut(order: tuple[float, ...], size: int) -> list[tuple[float, ...]]:
    return [order[start : start + size] for start in range(0, len(order), size)]


def same_bucket_by_enumeration(buckets: list[list[float]], sizes: list[int], world_size: int) -> float:
    epochs = []
    for shuffle in all_shuffles(buckets):
        epoch = 0.0
        for order, size in zip(shuffle, sizes, strict=True):
            for step in cut(order, world_size * size):
                fullest = -(-len(step) // world_size)
                epoch += float(cost(np.float64(fullest), np.float64(max(step))))
        epochs.append(epoch)
    return float(np.mean(epochs))


TINY = {
    "short": st.lists(st.integers(1, 4).map(float), min_size=1, max_size=5),
    "long": st.lists(st.integers(7, 9).map(float), min_size=1, max_size=3),
    "sizes": st.tuples(st.integers(1, 3), st.integers(1, 2)),
    "world_size": st.integers(2, 4),
}


@given(**TINY)
@settings(deadline=None, max_examples=40)
def test_same_bucket_dealing_of_tiny_epochs_by_enumeration(
    short: list[float], long: list[float], sizes: tuple[int, int], world_size: int
) -> None:
    found = times(short + long, table_of([4, 9], list(sizes)), world_size).same_bucket_epoch_seconds
    assert found == pytest.approx(same_bucket_by_enumeration([short, long], list(sizes), world_size))


def dealt(values: FloatArray, table: BucketTable, random: np.random.Generator, cost: BatchCost = cost) -> FloatArray:
    """The times of one epoch's batches, in the order in which they are dealt."""
    assigned, seconds = table.assign(values), []
    for bucket, size in enumerate(table.batch_sizes.tolist()):
        order = random.permutation(values[assigned == bucket])
        longest = [order[start : start + size] for start in range(0, order.size, size)]
        seconds += [float(cost(np.float64(part.size), part.max())) for part in longest]
    return random.permutation(np.array(seconds))


@pytest.mark.parametrize(("world_size", "cost"), [(2, cost), (8, cost), (24, cost), (8, bumpy)])
def test_independent_dealing_is_the_mean_of_epochs_really_dealt(world_size: int, cost: BatchCost) -> None:
    table, random = quantile_table(SPEECH, 5), np.random.default_rng(world_size)
    epochs = []
    for _ in range(60):
        seconds = dealt(SPEECH, table, random, cost)
        steps = seconds[: seconds.size // world_size * world_size].reshape(-1, world_size).max(axis=1)
        epochs.append(steps.mean() * -(-seconds.size // world_size))
    error = np.std(epochs) / np.sqrt(len(epochs))
    found = times(SPEECH, table, world_size, cost=cost).independent_epoch_seconds
    assert abs(found - np.mean(epochs)) < 4 * error
    assert error < 0.003 * found


@pytest.mark.parametrize(("world_size", "accumulate"), [(2, 2), (8, 4), (2, 16)])
def test_accumulated_gradients_match_the_mean_of_dealt_epochs(world_size: int, accumulate: int) -> None:
    values = np.random.default_rng(9).gamma(5, 2, 128 * 30)
    boundaries = np.append(np.sort(values)[128 * 18 - 1], values.max())
    table = BucketTable(boundaries, np.array([18, 12]))  # 128 full batches of either
    random, epochs = np.random.default_rng(accumulate), []
    for _ in range(60):
        steps = dealt(values, table, random).reshape(-1, world_size, accumulate).sum(axis=2).max(axis=1)
        epochs.append(steps.sum())
    error = np.std(epochs) / np.sqrt(len(epochs))
    found = times(values, table, world_size, accumulate).independent_epoch_seconds
    assert abs(found - np.mean(epochs)) < 4 * error + 0.001 * found


@given(st.lists(st.floats(0.5, 60), min_size=1, max_size=60), st.integers(1, 4), st.integers(1, 5))
@settings(deadline=None, max_examples=40)
def test_one_rank_never_waits(values: list[float], buckets: int, accumulate: int) -> None:
    boundaries = max(values) * np.arange(1, buckets + 1) / buckets
    table = BucketTable(np.append(boundaries[:-1], max(values)), batch_sizes_for(boundaries, 100))
    histogram = Lengths.of(values).histogram
    plain = expected_batches(histogram, table).sum_of(cost)
    found = times(values, table, 1, accumulate)
    assert found.without_waiting_epoch_seconds == plain
    assert found.independent_epoch_seconds == plain
    assert found.same_bucket_epoch_seconds == plain


def test_without_waiting_the_time_is_shared_out() -> None:
    table = quantile_table(SPEECH, 4)
    alone = times(SPEECH, table, 1).without_waiting_epoch_seconds
    assert times(SPEECH, table, 8).without_waiting_epoch_seconds == pytest.approx(alone / 8)


def test_more_ranks_wait_more() -> None:
    values = SPEECH[:2560]
    table = BucketTable(np.array([values.max()]), np.array([10]))  # 256 batches
    found = [times(values, table, world_size) for world_size in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
    waiting = [one.independent_epoch_seconds / one.without_waiting_epoch_seconds for one in found]
    assert waiting == sorted(waiting)
    assert waiting[-1] > waiting[0]


def test_the_more_batches_are_accumulated_the_less_ranks_wait() -> None:
    table = quantile_table(SPEECH, 4)
    found = [times(SPEECH, table, 4, accumulate).independent_epoch_seconds for accumulate in (1, 2, 4, 16)]
    assert found == sorted(found, reverse=True)
    assert found[-1] > times(SPEECH, table, 4).without_waiting_epoch_seconds


@pytest.mark.parametrize(("world_size", "buckets"), [(2, 3), (8, 8)])
def test_batches_of_the_same_bucket_wait_less(world_size: int, buckets: int) -> None:
    found = times(SPEECH, quantile_table(SPEECH, buckets), world_size)
    assert found.without_waiting_epoch_seconds < found.same_bucket_epoch_seconds < found.independent_epoch_seconds


def test_batches_that_all_take_as_long_never_wait() -> None:
    for accumulate in (1, 3):
        found = times([5.0] * 240, table_of([5], [10]), 8, accumulate)
        assert found.independent_epoch_seconds == pytest.approx(found.without_waiting_epoch_seconds)
        assert found.same_bucket_epoch_seconds == pytest.approx(found.without_waiting_epoch_seconds)


def test_few_lengths_stand_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(4).gamma(5, 2, 20_000)
    table = quantile_table(values, 6)
    about = times(values, table, 8)
    monkeypatch.setattr("batchtune.tuning.rank_times._LENGTHS_OF_RANKS", values.size)
    exact = times(values, table, 8)
    assert about.independent_epoch_seconds == pytest.approx(exact.independent_epoch_seconds, rel=3e-4)


def test_fewer_batches_than_ranks_are_one_step_of_the_longest() -> None:
    found = times([1, 2, 3], table_of([3], [1]), 500)
    assert found.independent_epoch_seconds == pytest.approx(float(cost(np.float64(1), np.float64(3))))


def test_batch_sizes_that_no_data_can_fill_do_no_harm() -> None:
    found = times([1, 2, 3], table_of([3], [2**53]), 4)
    longest = float(cost(np.float64(3), np.float64(3)))
    assert found.independent_epoch_seconds == pytest.approx(longest)
    assert found.same_bucket_epoch_seconds == pytest.approx(float(cost(np.float64(1), np.float64(3))))
