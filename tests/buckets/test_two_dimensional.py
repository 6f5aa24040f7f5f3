from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.buckets.optimal import optimal_table_2d
from batchtune.epochs.table import BucketTable
from batchtune.lengths import FloatArray, IntArray

Pair = tuple[float, float]


def pairs_of(table: BucketTable) -> list[Pair]:
    return list(zip(*(edges.tolist() for edges in table.pairs), strict=True))


# ---------------------------------------------------------------- the table


def strictly(pairs: list[Pair], length: float, target: float) -> int | None:
    """NeMo's rule in its strict mode, pair by pair."""
    own = min((of for of, _ in pairs if length <= of), default=None)
    return next(
        (i for i, (of, by) in enumerate(pairs) if of == own and target <= by), None
    )


# ---------------------------------------------------------------- the optimum


def sizes_up_to(budget: float) -> Callable[[FloatArray, FloatArray], IntArray]:
    return lambda of, by: np.maximum(1, budget // (of + by)).astype(np.int64)


def costs_up_to(budget: float) -> Callable[[FloatArray, FloatArray], FloatArray]:
    sizes = sizes_up_to(budget)
    return lambda of, by: 1 / sizes(of, by)


def looked_up(costs: FloatArray) -> Callable[[FloatArray, FloatArray], FloatArray]:
    """Costs by whole length (from 1) and whole target (from 0), without any order in them."""
    return lambda of, by: costs[of.astype(np.int64) - 1, by.astype(np.int64)]


def cost_of(
    table: BucketTable,
    lengths: FloatArray,
    targets: FloatArray,
    costs: Callable[..., FloatArray],
) -> float:
    return float(np.sum(costs(*table.pairs)[table.assign(lengths, targets)]))


def cuts(values: list[float], resolution: int) -> list[float]:
    """Where the values may be cut: all of them, or quantiles where there are too many."""
    if len(set(values)) <= resolution:
        return sorted(set(values))
    ordered = sorted(values)
    return sorted(
        {
            ordered[-(-len(values) * part // resolution) - 1]
            for part in range(1, resolution + 1)
        }
    )


def subsets(values: list[float]) -> Iterator[tuple[float, ...]]:
    for size in range(len(values) + 1):
        yield from combinations(values, size)


def least_by_brute_force(
    lengths: FloatArray,
    targets: FloatArray,
    costs: Callable[..., FloatArray],
    most: int,
    resolution: int,
) -> list[tuple[float, int]]:
    """For each of 1, …, most buckets: the least cost over all tables, and the fewest buckets that give it."""

    def of_bin(low: float, high: float) -> dict[int, float]:
        """By number of sub-bins: the least cost of the lengths in (low, high]."""
        inside = targets[(lengths > low) & (lengths <= high)]
        found: dict[int, float] = {}
        for inner in subsets(sorted(set(targets[targets < inside.max()].tolist()))):
            tops = np.array([*inner, inside.max()])
            each = costs(np.full(tops.size, high), tops)[np.searchsorted(tops, inside)]
            found[tops.size] = min(found.get(tops.size, np.inf), float(each.sum()))
        return found

    ends = cuts(lengths.tolist(), resolution)
    bins = {pair: of_bin(*pair) for pair in combinations([0.0, *ends], 2)}
    best: dict[int, float] = {}
    for inner in subsets(ends[:-1]):
        totals = {0: 0.0}
        for pair in zip([0.0, *inner], [*inner, ends[-1]], strict=True):
            sums: dict[int, float] = {}
            for (used, total), (more, cost) in (
                (a, b) for a in totals.items() for b in bins[pair].items()
            ):
                sums[used + more] = min(sums.get(used + more, np.inf), total + cost)
            totals = sums
        for used, total in totals.items():
            best[used] = min(best.get(used, np.inf), total)
    return [
        min((cost, used) for used, cost in best.items() if used <= limit)
        for limit in range(1, most + 1)
    ]


def made_case(rng: np.random.Generator, distinct: int) -> tuple[FloatArray, FloatArray]:
    count = int(rng.integers(1, 14))
    return rng.integers(1, distinct + 1, count).astype(float), rng.integers(
        0, distinct, count
    ).astype(float)


@pytest.mark.parametrize("resolution", [2, 3, 5])
def test_no_table_costs_less_and_fewer_buckets_win_a_tie(resolution: int) -> None:
    rng = np.random.default_rng(resolution)
    for _ in range(100):
        lengths, targets = made_case(rng, 5)
        costs = looked_up(rng.integers(0, 9, (5, 5)).astype(float))
        tables = optimal_table_2d(
            lengths, targets, costs, range(1, 9), resolution=resolution
        )
        found = [
            (cost_of(table, lengths, targets, costs), table.num_buckets)
            for table in tables
        ]
        assert found == least_by_brute_force(lengths, targets, costs, 8, resolution)


EXAMPLES = st.lists(
    st.tuples(st.integers(1, 60), st.integers(0, 40)), min_size=1, max_size=60
).map(lambda examples: np.array(examples, dtype=float).T)
RESOLUTIONS = st.sampled_from([1, 2, 7, 64])


@given(
    examples=EXAMPLES,
    resolution=RESOLUTIONS,
    budget=st.integers(1, 500),
    most=st.integers(1, 9),
)
@settings(deadline=None, max_examples=25)
def test_every_example_has_its_bucket_in_nemos_strict_mode_too(
    examples: FloatArray, resolution: int, budget: int, most: int
) -> None:
    lengths, targets = examples
    (table,) = optimal_table_2d(
        lengths, targets, costs_up_to(budget), [most], resolution=resolution
    )
    pairs = pairs_of(table)
    strict = [strictly(pairs, *example) for example in examples.T.tolist()]
    assert table.assign(lengths, targets).tolist() == strict
