from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.buckets.optimal import best_buckets, representative_ends
from batchtune.epochs.expectation import ExpectedCosts, expected_batches
from batchtune.epochs.measured_costs import BatchCost
from batchtune.epochs.table import BucketTable, batch_sizes_for
from batchtune.lengths import FloatArray, Histogram, IntArray, Lengths


def constant_and_cells(sizes: FloatArray, lengths: FloatArray) -> FloatArray:
    return 0.005 + 1e-4 * sizes * lengths


def cells(sizes: FloatArray, lengths: FloatArray) -> FloatArray:
    return sizes * lengths


def quadratic(sizes: FloatArray, lengths: FloatArray) -> FloatArray:
    return 0.005 + 1e-4 * (sizes * lengths) ** 0.9 + 1e-6 * sizes * lengths**2


def in_tiles(sizes: FloatArray, lengths: FloatArray) -> FloatArray:
    return 0.002 + 0.001 * np.ceil(sizes / 8) * np.ceil(lengths / 20)


COSTS = [constant_and_cells, cells, quadratic, in_tiles]


def reported(
    histogram: Histogram, first: int, end: int, size: int, cost: BatchCost
) -> float:
    """The cost of the bucket that holds the distinct lengths first : end, from the tables' own sum."""
    inside = Histogram(histogram.lengths[first:end], histogram.counts[first:end])
    return expected_batches(
        inside, BucketTable(inside.lengths[-1:], np.array([size]))
    ).sum_of(cost)


@given(
    counts=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    seed=st.integers(0, 2**32),
    cost=st.sampled_from(COSTS),
)
@settings(deadline=None, max_examples=25)
def test_exact_costs_are_those_that_are_reported(
    counts: list[int], seed: int, cost: BatchCost
) -> None:
    rng = np.random.default_rng(seed)
    histogram = Histogram(
        np.cumsum(rng.gamma(1, 1, len(counts)) + 0.1), np.array(counts)
    )
    sizes = rng.integers(1, 20, len(counts))
    costs = ExpectedCosts(histogram, np.arange(len(counts)), sizes, cost)
    for end in range(1, len(counts) + 1):
        expected = [
            reported(histogram, first, end, int(sizes[end - 1]), cost)
            for first in range(end)
        ]
        assert costs.up_to(end) == pytest.approx(expected, rel=1e-9)


SIZES: dict[str, Callable[[FloatArray], IntArray]] = {
    "small batches": lambda lengths: batch_sizes_for(lengths, 4 * lengths[-1]),
    "in steps": lambda lengths: np.maximum(
        1, batch_sizes_for(lengths, 40 * lengths[-1]) // 8 * 8
    ),
}


@pytest.mark.parametrize("sized", SIZES)
def test_the_best_of_few_ends_is_near_the_best_of_all(sized: str) -> None:
    histogram = Lengths.of(
        np.random.default_rng(0).gamma(6, 14, 20_000).round()
    ).histogram
    sizes = SIZES[sized](histogram.lengths)
    least = best_buckets(
        ExpectedCosts(histogram, np.arange(sizes.size), sizes, quadratic), 20
    )
    ends = representative_ends(histogram, sizes, 200)
    found = best_buckets(ExpectedCosts(histogram, ends, sizes[ends], quadratic), 20)
    for buckets in (1, 2, 5, 10, 20):
        chosen = ends[found.ends(buckets)]
        total = expected_batches(
            histogram, BucketTable(histogram.lengths[chosen], sizes[chosen])
        ).sum_of(quadratic)
        assert total <= 1.003 * least.totals[buckets - 1]
        assert found.totals[buckets - 1] == pytest.approx(total, rel=0.01)
