from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.batching.epochs import ON_ONE_RANK, Dealing, tally
from batchtune.tuning.randomness import BatchSizes, batch_size_statistics, learning_rate_hint, meeting_probability

BUCKETS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=6).filter(
    lambda buckets: any(count for count, _ in buckets)
)


def statistics_of(counts: list[int], batch_sizes: list[int], dealing: Dealing = ON_ONE_RANK) -> BatchSizes:
    return batch_size_statistics(tally(np.array(counts), np.array(batch_sizes), dealing))


@given(BUCKETS)
@settings(deadline=None, max_examples=200)
def test_the_statistics_are_those_of_the_batches_written_out(buckets: list[tuple[int, int]]) -> None:
    sizes = [min(size, count - start) for count, size in buckets for start in range(0, count, size)]
    found = statistics_of([count for count, _ in buckets], [size for _, size in buckets])
    assert (found.smallest, found.largest) == (min(sizes), max(sizes))
    assert found.mean == pytest.approx(np.mean(sizes), rel=1e-12)
    assert found.variation == pytest.approx(np.std(sizes) / np.mean(sizes), abs=1e-12)


def test_batches_of_one_size_have_no_variation() -> None:
    assert statistics_of([12, 24], [4, 4]).variation == 0


def test_a_batch_size_that_no_data_can_fill_is_no_batch() -> None:
    found = statistics_of([3, 0], [2**53, 2**53])
    assert (found.smallest, found.mean, found.largest, found.variation) == (3, 3.0, 3, 0.0)


def test_an_example_that_is_dealt_twice_counts_twice() -> None:
    found = statistics_of([3], [2], Dealing(world_size=4, same_bucket=True))
    assert (found.smallest, found.mean, found.largest) == (1, 1.0, 1)


def test_no_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one batch"):
        statistics_of([0, 0], [1, 1])


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any))
@settings(deadline=None, max_examples=100)
def test_the_meeting_probability_is_that_of_two_draws(counts: list[int]) -> None:
    buckets = [bucket for bucket, count in enumerate(counts) for _ in range(count)]
    same = np.mean([a == b for a, b in itertools.product(buckets, repeat=2)])
    assert meeting_probability(np.array(counts)) == pytest.approx(same)


def test_one_bucket_is_full_randomness() -> None:
    assert meeting_probability(np.array([0, 17])) == 1.0


def test_without_examples_nothing_meets() -> None:
    with pytest.raises(ValueError, match="at least one example"):
        meeting_probability(np.array([0]))


def test_the_learning_rate_follows_the_batch_size_by_both_rules() -> None:
    hint = learning_rate_hint("fixed-random", 16, 64)
    assert (hint.relative_to, hint.from_batch_size, hint.to_batch_size) == ("fixed-random", 16, 64)
    assert (hint.linear, hint.square_root) == (4, 2)


@given(st.floats(1, 1e4), st.floats(1, 1e4))
@settings(deadline=None, max_examples=50)
def test_there_and_back_the_learning_rate_is_the_same(before: float, after: float) -> None:
    there, back = learning_rate_hint("a", before, after), learning_rate_hint("b", after, before)
    assert there.linear * back.linear == pytest.approx(1)
    assert there.square_root**2 == pytest.approx(there.linear)


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf")])
def test_a_batch_size_that_is_none_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="positive and finite"):
        learning_rate_hint("current", wrong, 4)
