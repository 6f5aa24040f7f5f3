"""The frontier between the shapes that were measured."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchtune.epochs.measured_costs import Frontier, largest_max_batch_length
from batchtune.lengths import Lengths
from batchtune.results import FrontierPoint


def point(length, batch_size, closed_by="oom"):
    return FrontierPoint(
        length=length,
        target_length=None,
        batch_size=batch_size,
        closed_by=closed_by,
        oom_batch_size=None,
        step_seconds=None,
        peak_bytes=None,
    )


ROWS = st.lists(
    st.tuples(st.integers(1, 100), st.integers(1, 400)),
    min_size=1,
    max_size=8,
    unique_by=lambda row: row[0],
).map(sorted)


@given(ROWS)
def test_no_length_gets_more_than_a_shorter_one_was_seen_to_hold(rows):
    frontier = Frontier.of([point(length, size) for length, size in rows])
    for (shorter, few), (longer, _) in itertools.combinations(rows, 2):
        assert (frontier([shorter, longer]) <= few).all()


def test_beyond_the_longest_measured_length_nothing_is_proven():
    frontier = Frontier.of([point(5, 9), point(10, 4)])
    assert frontier([10, 11]).tolist() == [4, 1]
    assert frontier.proven([10, 11]).tolist() == [4, 0]
    assert frontier.continued([10, 12, 40]).tolist() == [4, 2, 1]


@pytest.mark.parametrize("closed_by", ["data", "time"])
def test_a_length_that_memory_did_not_limit_lowers_no_other(closed_by):
    frontier = Frontier.of([point(1, 2, closed_by), point(10, 90)])
    assert frontier([1, 5, 10]).tolist() == [90, 90, 90]


@pytest.mark.parametrize(
    ("lengths", "sizes", "cap", "limit"),
    [
        ((5, 7, 10), (40, 20), None, 146),
        ((5, 10), (10, 20), None, 54),
        ((5, 10), (60, 60), None, 304),
        ((5, 10), (60, 60), 60, 600),
    ],
)
def test_max_batch_length_is_the_largest_that_fits(lengths, sizes, cap, limit):
    # One more would be 21 of length 7, 11 of length 5, and 61 of length 5, but for a cap, which is no memory limit.
    histogram = Lengths.of(lengths * 100).histogram
    frontier = Frontier.of([point(5, sizes[0]), point(10, sizes[1])])
    assert largest_max_batch_length(frontier, histogram, cap) == limit
