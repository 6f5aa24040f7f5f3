from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.epochs.expectation import (
    Tally,
    expected_batches,
    log_orders,
    tally,
)
from batchtune.epochs.layout import Dealing, lay_out
from batchtune.epochs.table import BucketTable
from batchtune.lengths import FloatArray, Lengths


def step_seconds(batch_sizes: FloatArray, lengths: FloatArray) -> FloatArray:
    return np.maximum(
        2.0, 0.5 + 0.3 * batch_sizes * lengths + 0.01 * batch_sizes * lengths**2
    )


def table_of(boundaries: list[float], batch_sizes: list[int]) -> BucketTable:
    return BucketTable(
        np.array(boundaries, dtype=float), np.array(batch_sizes, dtype=np.int64)
    )


def by_enumeration(values: list[float], batch_size: int) -> tuple[float, float]:
    """Mean padded length and mean time over every order of the examples."""
    orders = list(permutations(values))
    padded = seconds = 0.0
    for order in orders:
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            padded += len(batch) * max(batch)
            seconds += float(
                step_seconds(np.float64(len(batch)), np.float64(max(batch)))
            )
    return padded / len(orders), seconds / len(orders)


@given(
    st.lists(st.integers(1, 8).map(float), min_size=1, max_size=6), st.integers(1, 8)
)
@settings(deadline=None, max_examples=25)
def test_the_expectations_are_the_means_over_all_orders(
    values: list[float], batch_size: int
) -> None:
    batches = expected_batches(
        Lengths.of(values).histogram, table_of([max(values)], [batch_size])
    )
    assert (batches.padded_length, batches.sum_of(step_seconds)) == pytest.approx(
        by_enumeration(values, batch_size)
    )


@given(
    st.lists(st.integers(1, 8).map(float), min_size=1, max_size=6),
    st.integers(1, 4),
    st.builds(Dealing, world_size=st.integers(1, 5), same_bucket=st.booleans()),
)
@settings(deadline=None, max_examples=25)
def test_on_several_ranks_too_they_are_the_means_over_all_orders(
    values: list[float], batch_size: int, dealing: Dealing
) -> None:
    layout = lay_out(np.array([len(values)]), np.array([batch_size]), dealing)
    cuts = [
        (start, start + size)
        for start, size in zip(layout.starts, layout.batch_sizes, strict=True)
    ]
    padded = [
        sum((end - start) * max(order[start:end]) for start, end in cuts)
        for order in permutations(values)
    ]
    table = table_of([max(values)], [batch_size])
    assert expected_batches(
        Lengths.of(values).histogram, table, dealing
    ).padded_length == pytest.approx(np.mean(padded))


@given(st.lists(st.floats(0.1, 1e4), min_size=1, max_size=300), st.integers(1, 400))
@settings(deadline=None, max_examples=30)
def test_the_expected_batches_add_up_to_the_batches(
    values: list[float], batch_size: int
) -> None:
    batches = expected_batches(
        Lengths.of(values).histogram, table_of([max(values)], [batch_size])
    )
    assert batches.numbers.sum() == pytest.approx(batches.tally.batches)


def test_a_million_examples_lose_no_precision_that_matters() -> None:
    values = np.random.default_rng(0).integers(1, 1000, 1_000_000).astype(float)
    batches = expected_batches(Lengths.of(values).histogram, table_of([1000], [37]))
    assert batches.numbers.sum() == pytest.approx(-(-1_000_000 // 37), rel=1e-12)
    # The mean of the longest of 37 out of 1..999, drawn with as good as no depletion.
    levels = np.arange(1, 1000)
    mean = float(np.sum(1 - ((levels - 1) / 999) ** 37))
    assert batches.padded_length / 1_000_000 == pytest.approx(mean, rel=1e-3)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.tuples(st.integers(0, 400), st.integers(1, 12)), min_size=1, max_size=5
    ),
    st.integers(2, 6),
    st.booleans(),
    st.booleans(),
)
def test_batches_on_ranks_are_counted_as_they_are_laid_out(
    buckets: list[tuple[int, int]], world_size: int, same: bool, drop_last: bool
) -> None:
    counts, sizes = np.array(buckets).T
    dealing = Dealing(world_size=world_size, same_bucket=same, drop_last=drop_last)
    layout = lay_out(counts, sizes, dealing)
    laid_out = Tally.of(layout.buckets, layout.batch_sizes)
    counted = tally(counts, sizes, dealing)
    for name in ("buckets", "batch_sizes", "numbers"):
        assert getattr(counted, name).tolist() == getattr(laid_out, name).tolist()


@pytest.mark.parametrize("count", [5, 4_194_303, 4_194_400, 10**7, 10**10])
@pytest.mark.parametrize("drawn", [0, 1, 2, 5, 96])
def test_orders_of_very_many_examples_are_counted_exactly(
    count: int, drawn: int
) -> None:
    drawn = min(drawn, count)
    exact = sum(math.log(count - index) for index in range(drawn))
    found = log_orders(np.array([count]), np.array([drawn]))
    assert found[0] == pytest.approx(exact, rel=1e-9, abs=1e-6)
