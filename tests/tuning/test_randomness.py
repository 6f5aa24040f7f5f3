from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.tuning.randomness import batch_size_statistics, learning_rate_hint, meeting_probability

BUCKETS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=6).filter(
    lambda buckets: any(count for count, _ in buckets)
)


@given(BUCKETS)
@settings(deadline=None, max_examples=200)
def test_the_statistics_are_those_of_the_batches_written_out(buckets: list[tuple[int, int]]) -> None:
    sizes = [min(size, count - start) for count, size in buckets for start in range(0, count, size)]
    counts, batch_sizes = np.array(buckets, dtype=np.int64).T
    found = batch_size_statistics(counts, batch_sizes)
    assert (found.smallest, found.largest) == (min(sizes), max(sizes))
    assert found.mean == pytest.approx(np.mean(sizes), rel=1e-12)
    assert found.variation == pytest.approx(np.std(sizes) / np.mean(sizes), abs=1e-12)


def test_batches_of_one_size_have_no_variation() -> None:
    assert batch_size_statistics(np.array([12, 24]), np.array([4, 4])).variation == 0


def test_a_batch_size_that_no_data_can_fill_is_no_batch() -> None:
    found = batch_size_statistics(np.array([3, 0]), np.array([2**53, 2**53]))
    assert (found.smallest, found.mean, found.largest, found.variation) == (3, 3.0, 3, 0.0)


@pytest.mark.parametrize(
    ("counts", "sizes", "message"),
    [([0, 0], [1, 1], "at least one example"), ([1], [1, 2], "2 batch sizes for 1"), ([1], [0], "at least 1, got 0")],
)
def test_what_is_no_epoch_is_refused(counts: list[int], sizes: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batch_size_statistics(np.array(counts), np.array(sizes))


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
