from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.buckets.optimal import best_buckets, few_ends
from batchtune.epochs.bucket_costs import ExactCosts, SmoothCosts
from batchtune.epochs.expectation import expected_batches
from batchtune.epochs.table import BucketTable, batch_sizes_for
from batchtune.lengths import FloatArray, Histogram, IntArray, Lengths


def constant_and_cells(sizes: FloatArray, lengths: FloatArray, above: FloatArray | None = None) -> FloatArray:
    return 0.005 + 1e-4 * sizes * lengths


def cells(sizes: FloatArray, lengths: FloatArray, above: FloatArray | None = None) -> FloatArray:
    return sizes * lengths


def quadratic(sizes: FloatArray, lengths: FloatArray, above: FloatArray | None = None) -> FloatArray:
    return 0.005 + 1e-4 * (sizes * lengths) ** 0.9 + 1e-6 * sizes * lengths**2


def in_tiles(sizes: FloatArray, lengths: FloatArray, above: FloatArray | None = None) -> FloatArray:
    return 0.002 + 0.001 * np.ceil(sizes / 8) * np.ceil(lengths / 20)


COSTS = [constant_and_cells, cells, quadratic, in_tiles]


def reported(histogram: Histogram, first: int, end: int, size: int, cost: Callable[..., FloatArray]) -> float:
    """The cost of the bucket that holds the distinct lengths first : end, from the tables' own sum."""
    inside = Histogram(histogram.lengths[first:end], histogram.counts[first:end])
    below = histogram.lengths[first - 1] if first else 0.0
    table = BucketTable(inside.lengths[-1:], np.array([size]))

    def in_this_bucket(sizes: FloatArray, lengths: FloatArray) -> FloatArray:
        return cost(sizes, lengths, np.full(lengths.shape, below))

    return expected_batches(inside, table).sum_of(in_this_bucket)


@given(
    counts=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    seed=st.integers(0, 2**32),
    cost=st.sampled_from([*COSTS, lambda sizes, lengths, above: sizes * lengths + above**2]),
)
@settings(deadline=None, max_examples=25)
def test_exact_costs_are_those_that_are_reported(counts: list[int], seed: int, cost: Callable[..., FloatArray]) -> None:
    rng = np.random.default_rng(seed)
    histogram = Histogram(np.cumsum(rng.gamma(1, 1, len(counts)) + 0.1), np.array(counts))
    sizes = rng.integers(1, 20, len(counts))
    costs = ExactCosts(histogram, sizes, cost)
    for end in range(1, len(counts) + 1):
        expected = [reported(histogram, first, end, int(sizes[end - 1]), cost) for first in range(end)]
        assert costs.up_to(end) == pytest.approx(expected, rel=1e-9)


RNG = np.random.default_rng(0)
DATA = {
    "speech": RNG.gamma(6, 7, 20_000).round() + 1,
    "heavy tail": (RNG.pareto(1.2, 20_000) * 3 + 1).clip(max=110).round(),
    "lumps": np.concatenate((RNG.integers(1, 120, 3000), np.full(2000, 120), np.full(1500, 60), [121, 300])) * 1.0,
    "few": RNG.gamma(4, 17, 400).round() + 1,
}
SIZES: dict[str, Callable[[FloatArray], IntArray]] = {
    "small batches": lambda lengths: batch_sizes_for(lengths, 4 * lengths[-1]),
    "large batches": lambda lengths: batch_sizes_for(lengths, 40 * lengths[-1]),
    "in steps": lambda lengths: np.maximum(1, batch_sizes_for(lengths, 9 * lengths[-1]) // 8 * 8),
    "at random": lambda lengths: np.random.default_rng(1).integers(1, 300, lengths.size),
}


class Solved:
    """Costs that are worked out once."""

    def __init__(self, costs: ExactCosts | SmoothCosts) -> None:
        self.num_ends = costs.num_ends
        self._found = [costs.up_to(end) for end in range(1, costs.num_ends + 1)]

    def up_to(self, end: int) -> FloatArray:
        return self._found[end - 1]

    def total(self, ends: IntArray) -> float:
        starts = np.concatenate(([0], ends[:-1] + 1))
        return float(sum(self._found[end][start] for start, end in zip(starts, ends, strict=True)))


@pytest.mark.parametrize(
    ("data", "sized"),
    [
        ("speech", "small batches"),
        ("speech", "at random"),
        ("heavy tail", "small batches"),
        ("heavy tail", "in steps"),
        ("lumps", "large batches"),
        ("lumps", "at random"),
        ("few", "in steps"),
    ],
)
def test_the_best_buckets_by_estimate_are_near_the_best(data: str, sized: str) -> None:
    histogram = Lengths.of(DATA[data]).histogram
    sizes = SIZES[sized]
    lengths = histogram.lengths
    smooth = 0.004 if data == "few" else 0.001
    for cost, bound in ((constant_and_cells, smooth), (cells, smooth), (quadratic, smooth), (in_tiles, 0.012)):
        exact = Solved(ExactCosts(histogram, sizes(lengths), cost))
        estimated = SmoothCosts(histogram, np.arange(lengths.size), sizes(lengths), cost)
        least = best_buckets(exact, 20)
        found = best_buckets(estimated, 20)
        for buckets in (1, 2, 5, 10, 20):
            assert exact.total(found.ends(buckets)) <= least.totals[buckets - 1] * (1 + bound)
            assert found.totals[buckets - 1] == pytest.approx(exact.total(found.ends(buckets)), rel=0.03)


def test_estimates_from_a_sample_are_close_to_the_full_sum() -> None:
    histogram = Lengths.of(np.random.default_rng(2).gamma(4, 3, 30_000) + 0.5).histogram
    sizes = batch_sizes_for(histogram.lengths, 300)
    ends = few_ends(histogram, sizes, 600)
    sizes = sizes[ends]
    costs = SmoothCosts(histogram, ends, sizes, quadratic)
    all_of_them = costs.up_to(ends.size)[0]
    for end in (3, 20, 150, 300, ends.size):
        found = costs.up_to(end)
        for start in {0, end // 3, end // 2, max(end - 20, 0), end - 1}:
            first = int(ends[start - 1]) + 1 if start else 0
            expected = reported(histogram, first, int(ends[end - 1]) + 1, int(sizes[end - 1]), quadratic)
            assert found[start] == pytest.approx(expected, rel=2e-3, abs=1e-5 * all_of_them)
