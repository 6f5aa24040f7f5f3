"""The frontier between the lengths that were measured."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.epochs.frontier import Frontier, largest_max_batch_length
from batchtune.lengths import Lengths
from batchtune.results import ClosedBy, FrontierPoint


def point(
    length: float, batch_size: int, *, closed_by: ClosedBy = "oom", target: float | None = None, peak: int | None = None
) -> FrontierPoint:
    return FrontierPoint(
        length=length,
        target_length=target,
        batch_size=batch_size,
        closed_by=closed_by,
        oom_batch_size=None,
        step_seconds=None,
        peak_bytes=peak,
    )


@given(
    st.lists(st.tuples(st.integers(1, 100), st.integers(1, 400)), min_size=1, max_size=8, unique_by=lambda row: row[0])
)
@settings(deadline=None, max_examples=30)
def test_between_measured_lengths_the_next_longer_size_holds(rows: list[tuple[int, int]]) -> None:
    lengths = sorted(length for length, _ in rows)
    sizes = sorted((size for _, size in rows), reverse=True)
    frontier = Frontier.of([point(*row) for row in zip(lengths, sizes, strict=True)])
    for length in np.linspace(0.5, lengths[-1], 50):
        following = next(size for longest, size in zip(lengths, sizes, strict=True) if length <= longest)
        assert frontier(length) == frontier.proven(length) == following


def test_beyond_the_longest_measured_length_nothing_is_proven() -> None:
    frontier = Frontier.of([point(5, 9), point(10, 4)])
    assert frontier([10, 11]).tolist() == [4, 1]
    assert frontier.proven([10, 11]).tolist() == [4, 0]
    assert frontier.continued([10, 12, 40]).tolist() == [4, 2, 1]


@given(
    st.lists(st.tuples(st.integers(1, 100), st.integers(1, 400)), min_size=2, max_size=8, unique_by=lambda row: row[0])
)
@settings(deadline=None, max_examples=30)
def test_no_length_gets_more_than_a_shorter_one_was_seen_to_hold(rows: list[tuple[int, int]]) -> None:
    rows = sorted(rows)
    frontier = Frontier.of([point(length, size) for length, size in rows])
    for (shorter, few), (longer, _) in itertools.combinations(rows, 2):
        assert (frontier([shorter, longer]) <= few).all()


def test_a_length_limited_by_data_does_not_limit_longer_ones() -> None:
    frontier = Frontier.of([point(1, 2, closed_by="data"), point(10, 90)])
    assert frontier([1, 5, 10]).tolist() == [90, 90, 90]


def test_max_batch_length_knows_of_a_length_that_holds_fewer() -> None:
    lengths = Lengths.of([5.0] * 100 + [7.0] * 100 + [10.0] * 100)
    monotone = Frontier.of([point(5, 40), point(10, 20)])
    dip = Frontier.of([point(5, 10), point(10, 20)])
    assert largest_max_batch_length(monotone, lengths.histogram) == 146  # 147 would be 21 of length 7
    assert largest_max_batch_length(dip, lengths.histogram) == 54  # 55 would be 11 of length 5


@pytest.mark.parametrize("sizes", [[40, 20], [10, 20], [30, 8, 12], [7, 7, 7]], ids=str)
def test_batches_of_max_batch_length_fit_at_every_length(sizes: list[int]) -> None:
    points = [point(5.0 * (1 + index), size) for index, size in enumerate(sizes)]
    values = np.linspace(5, 5 * len(sizes), 41)
    frontier = Frontier.of(points)
    limit = largest_max_batch_length(frontier, Lengths.of(np.repeat(values, 50)).histogram)
    assert (np.maximum(1, (limit / values).astype(int)) <= frontier(values)).all()


def test_a_batch_size_capped_by_the_user_is_not_a_memory_limit() -> None:
    lengths = Lengths.of([5.0] * 100 + [10.0] * 100)
    capped = Frontier.of([point(5.0, 60), point(10.0, 60)])
    assert largest_max_batch_length(capped, lengths.histogram) == 304  # 305 would be 61 of length 5
    assert largest_max_batch_length(capped, lengths.histogram, max_batch_size=60) == 600


def test_a_length_that_the_time_left_open_lowers_no_other() -> None:
    frontier = Frontier.of([point(7, 6, closed_by="time"), point(533, 183)])
    assert frontier([7, 500]).tolist() == [183, 183]
