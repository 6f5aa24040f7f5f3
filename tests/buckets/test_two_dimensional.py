from itertools import combinations, pairwise, product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchtune.buckets import optimal_table_2d
from batchtune.epochs.table import BucketTable


def pairs_of(table):
    return list(zip(*(edges.tolist() for edges in table.pairs), strict=True))


def strictly(pairs, length, target):
    """NeMo's rule in its strict mode, pair by pair."""
    own = min((of for of, _ in pairs if length <= of), default=None)
    return next(
        (i for i, (of, by) in enumerate(pairs) if of == own and target <= by), None
    )


def costs_up_to(budget):
    return lambda of, by: 1 / np.maximum(1, budget // (of + by))


def looked_up(costs):
    """Costs by whole length (from 1) and whole target (from 0), without any order in them."""
    return lambda of, by: costs[of.astype(np.int64) - 1, by.astype(np.int64)]


def cost_of(
    table,
    lengths,
    targets,
    costs,
):
    return float(np.sum(costs(*table.pairs)[table.assign(lengths, targets)]))


def table_of(pairs):
    boundaries, tops = np.array(pairs).T
    return BucketTable(boundaries, np.ones(len(pairs), dtype=np.int64), tops)


def subsets(values):
    for size in range(len(values) + 1):
        yield from combinations(values, size)


def tables(lengths, targets):
    """All tables whose boundaries are lengths and targets that occur."""
    for inner in subsets(sorted({*lengths.tolist()} - {lengths.max()})):
        ends = [*inner, float(lengths.max())]
        tops_of_bins = []
        for low, high in pairwise([0.0, *ends]):
            inside = targets[(lengths > low) & (lengths <= high)]
            smaller = sorted({*targets[targets < inside.max()].tolist()})
            tops_of_bins.append(
                [(*tops, float(inside.max())) for tops in subsets(smaller)]
            )
        for chosen in product(*tops_of_bins):
            yield [
                (end, top)
                for end, tops in zip(ends, chosen, strict=True)
                for top in tops
            ]


def made_case(rng):
    count = int(rng.integers(1, 14))
    lengths = rng.integers(1, 4, count).astype(float)
    return lengths, rng.integers(0, 4, count).astype(float)


def test_no_table_costs_less_and_fewer_buckets_win_a_tie():
    rng = np.random.default_rng(2)
    for _ in range(30):
        lengths, targets = made_case(rng)
        costs = looked_up(rng.integers(0, 9, (3, 4)).astype(float))
        least = {}
        for pairs in tables(lengths, targets):
            cost = cost_of(table_of(pairs), lengths, targets, costs)
            least[len(pairs)] = min(cost, least.get(len(pairs), np.inf))
        found = optimal_table_2d(lengths, targets, costs, range(1, 9))
        for most, table in enumerate(found, 1):
            best = min((cost, used) for used, cost in least.items() if used <= most)
            cost = cost_of(table, lengths, targets, costs)
            assert (cost, table.num_buckets) == best


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
def test_every_example_has_its_bucket_in_nemos_strict_mode_too(
    examples, resolution, budget, most
):
    lengths, targets = examples
    (table,) = optimal_table_2d(
        lengths, targets, costs_up_to(budget), [most], resolution=resolution
    )
    pairs = pairs_of(table)
    strict = [strictly(pairs, *example) for example in examples.T.tolist()]
    assert table.assign(lengths, targets).tolist() == strict
