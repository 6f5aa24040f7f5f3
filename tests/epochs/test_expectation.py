from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.epochs.expectation import (
    expected_batches,
)
from batchtune.epochs.layout import Dealing, lay_out
from batchtune.epochs.table import BucketTable
from batchtune.lengths import FloatArray, Lengths


def step_seconds(batch_sizes: FloatArray, lengths: FloatArray) -> FloatArray:
    return np.maximum(
        2.0, 0.5 + 0.3 * batch_sizes * lengths + 0.01 * batch_sizes * lengths**2
    )


@given(
    st.lists(st.integers(1, 8).map(float), min_size=1, max_size=6),
    st.integers(1, 8),
    st.builds(Dealing, world_size=st.integers(1, 5), same_bucket=st.booleans()),
)
@settings(deadline=None, max_examples=40)
def test_the_expectations_are_the_means_over_all_orders(
    values: list[float], batch_size: int, dealing: Dealing
) -> None:
    layout = lay_out(np.array([len(values)]), np.array([batch_size]), dealing)
    cuts = list(zip(layout.starts, layout.starts + layout.batch_sizes, strict=True))
    longest = np.array(
        [
            [max(order[start:end]) for start, end in cuts]
            for order in permutations(values)
        ]
    )
    table = BucketTable.of([max(values)], [batch_size])
    batches = expected_batches(Lengths.of(values).histogram, table, dealing)
    seconds = step_seconds(layout.batch_sizes, longest).sum(axis=1)
    assert batches.padded_length == pytest.approx(longest.mean(0) @ layout.batch_sizes)
    assert batches.sum_of(step_seconds) == pytest.approx(seconds.mean())


def test_a_million_examples_lose_no_precision_that_matters() -> None:
    values = np.random.default_rng(0).integers(1, 1000, 1_000_000).astype(float)
    batches = expected_batches(
        Lengths.of(values).histogram, BucketTable.of([1000], [37])
    )
    assert batches.numbers.sum() == pytest.approx(-(-1_000_000 // 37), rel=1e-12)
    # The mean of the longest of 37 out of 1..999, drawn with as good as no depletion.
    levels = np.arange(1, 1000)
    mean = float(np.sum(1 - ((levels - 1) / 999) ** 37))
    assert batches.padded_length / 1_000_000 == pytest.approx(mean, rel=1e-3)
