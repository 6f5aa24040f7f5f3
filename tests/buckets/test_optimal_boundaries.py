from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.buckets.optimal import optimal_boundaries
from batchtune.lengths import FloatArray, Histogram, IntArray


def histogram_of(counts: list[int]) -> Histogram:
    return Histogram(np.arange(1.0, len(counts) + 1), np.array(counts, dtype=np.int64))


def cost_of(histogram: Histogram, costs: FloatArray, boundaries: FloatArray) -> float:
    ends = np.searchsorted(histogram.lengths, boundaries)
    return float(np.sum(costs[ends] * np.diff(histogram.cumulative[ends], prepend=0)))


def by_brute_force(
    histogram: Histogram, costs: FloatArray, most: int
) -> tuple[float, int]:
    """The least cost over all sets of at most `most` ends, and the fewest buckets that give it."""
    longest = len(costs) - 1
    return min(
        (cost_of(histogram, costs, histogram.lengths[[*inner, longest]]), size + 1)
        for size in range(most)
        for inner in combinations(range(longest), size)
    )


def by_plain_programme(costs: FloatArray, counts: IntArray, most: int) -> float:
    """The recurrence as it is written down, in O(K·U²)."""
    up_to = np.concatenate(([0], np.cumsum(counts)))
    least = np.full(up_to.size, np.inf)
    least[0] = 0
    best = np.inf
    for _ in range(most):
        least = np.array(
            [np.inf]
            + [
                min(least[:j] + costs[j - 1] * (up_to[j] - up_to[:j]))
                for j in range(1, up_to.size)
            ]
        )
        best = min(best, least[-1])
    return float(best)


CASES = st.integers(1, 8).flatmap(
    lambda distinct: st.tuples(
        st.lists(st.integers(1, 9), min_size=distinct, max_size=distinct),
        st.lists(st.integers(0, 12), min_size=distinct, max_size=distinct),
    )
)


@given(case=CASES)
@settings(deadline=None, max_examples=40)
def test_no_boundaries_cost_less_and_fewer_buckets_win_a_tie(
    case: tuple[list[int], list[int]],
) -> None:
    histogram = histogram_of(case[0])
    costs = np.array(case[1], dtype=float)
    asked = list(range(1, costs.size + 3))
    for most, boundaries in zip(
        asked, optimal_boundaries(histogram, costs, asked), strict=True
    ):
        found = cost_of(histogram, costs, boundaries), boundaries.size
        assert found == by_brute_force(histogram, costs, min(most, costs.size))


HARD = {
    "rising": lambda u: u,
    "rising by a hair": lambda u: 1 + 1e-9 * u,
    "steep": lambda u: np.exp(u / 20),
    "whole batch sizes": lambda u: 1 / np.maximum(1, np.floor(900 / u)),
    "noisy": lambda u: u * np.random.default_rng(8).uniform(0.5, 1.5, u.size),
    "falling": lambda u: 1 / u,
    "all the same": np.ones_like,
}


@pytest.mark.parametrize("costs_of", HARD.values(), ids=HARD)
def test_hard_costs_and_counts_agree_with_the_plain_programme(
    costs_of: Callable[[FloatArray], FloatArray],
) -> None:
    lengths = np.arange(1.0, 201)
    costs = np.asarray(costs_of(lengths), dtype=float)
    equal = np.ones(200)
    heavy = np.random.default_rng(9).pareto(0.7, 200) * 5 + 1
    for tail in (equal, heavy, 1e6 * np.exp(-lengths / 10) + 1):
        counts = tail.astype(np.int64)
        histogram = Histogram(lengths, counts)
        (boundaries,) = optimal_boundaries(histogram, costs, [6])
        assert cost_of(histogram, costs, boundaries) == pytest.approx(
            by_plain_programme(costs, counts, 6), rel=1e-12
        )
