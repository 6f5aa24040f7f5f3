"""The padded length by examples, which is taken where lengths seldom repeat, against the one by distinct lengths."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.batching.expectation import ExpectedBatches, expected_batches
from batchtune.batching.layout import Dealing
from batchtune.batching.table import BucketTable
from batchtune.lengths import Histogram, Lengths

DROPPING = Dealing(drop_last=True)


def by_examples(expected: ExpectedBatches) -> float:
    with patch("batchtune.batching.expectation._MOST_EXAMPLES_PER_LENGTH", np.inf):
        return replace(expected).padded_length


def histogram_of(values: list[float]) -> Histogram:
    return Lengths.of(values).histogram


@given(
    values=st.lists(st.floats(0.1, 100) | st.integers(1, 9).map(float), min_size=1, max_size=120),
    boundaries=st.sets(st.integers(1, 99), max_size=8),
    batch_sizes=st.lists(st.integers(1, 40), min_size=9, max_size=9),
    dealing=st.builds(Dealing, world_size=st.integers(1, 9), same_bucket=st.booleans()),
)
@settings(deadline=None, max_examples=25)
def test_both_ways_give_the_same(
    values: list[float], boundaries: set[int], batch_sizes: list[int], dealing: Dealing
) -> None:
    ends = np.array([*sorted(boundaries), 100.0])
    table = BucketTable(ends, np.array(batch_sizes[: ends.size], dtype=np.int64))
    expected = expected_batches(histogram_of(values), table, dealing)
    assert by_examples(expected) == pytest.approx(expected.sum_of(np.multiply), rel=1e-11)


@pytest.mark.parametrize("distinct", [True, False])
def test_both_ways_give_the_same_with_many_examples(distinct: bool) -> None:
    values = np.random.default_rng(1).lognormal(2, 0.6, 50_001)
    histogram = Lengths.of(values if distinct else values.round(3)).histogram
    for batch_size in (1, 7, 300, 70_000):
        table = BucketTable(np.array([5.0, 8.0, 1000.0]), np.array([batch_size, 30, batch_size]))
        expected = expected_batches(histogram, table)
        assert expected.padded_length == by_examples(expected)
        assert expected.padded_length == pytest.approx(expected.sum_of(np.multiply), rel=1e-9)


def test_without_remainders_full_batches_alone_count() -> None:
    histogram = histogram_of([1.0, 2.0, 3.0])
    table = BucketTable(np.array([3.0]), np.array([2]))
    expected = expected_batches(histogram, table)
    full_alone = expected_batches(histogram, table, DROPPING)
    assert full_alone.padded_length == pytest.approx(2 * (2 + 3 + 3) / 3)
    assert expected.padded_length == pytest.approx(full_alone.padded_length + 2)
