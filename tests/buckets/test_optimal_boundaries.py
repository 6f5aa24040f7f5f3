from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchtune.buckets import optimal_boundaries
from batchtune.lengths import Histogram


def histogram_of(counts):
    return Histogram(np.arange(1.0, len(counts) + 1), np.array(counts, dtype=np.int64))


def cost_of(histogram, costs, boundaries):
    ends = np.searchsorted(histogram.lengths, boundaries)
    return float(np.sum(costs[ends] * np.diff(histogram.cumulative[ends], prepend=0)))


def by_brute_force(histogram, costs, most):
    """The least cost over all sets of at most `most` ends, and the fewest buckets that give it."""
    longest = len(costs) - 1
    return min(
        (cost_of(histogram, costs, histogram.lengths[[*inner, longest]]), size + 1)
        for size in range(most)
        for inner in combinations(range(longest), size)
    )


def several(low, high, distinct):
    return st.lists(st.integers(low, high), min_size=distinct, max_size=distinct)


# Costs that rise keep all ends, and small numbers make ties.
CASES = st.integers(1, 8).flatmap(
    lambda distinct: st.tuples(
        several(1, 9, distinct) | several(1, 200, distinct),
        several(0, 12, distinct) | several(0, 200, distinct).map(sorted),
    )
)


@given(case=CASES)
def test_no_boundaries_cost_less_and_fewer_buckets_win_a_tie(case):
    histogram = histogram_of(case[0])
    costs = np.array(case[1], dtype=float)
    asked = list(range(1, costs.size + 3))
    for most, boundaries in zip(
        asked, optimal_boundaries(histogram, costs, asked), strict=True
    ):
        found = cost_of(histogram, costs, boundaries), boundaries.size
        assert found == by_brute_force(histogram, costs, min(most, costs.size))
