"""Batches from pools that are sorted by length."""

from itertools import pairwise

import numpy as np
import pytest
from drawn_batches import (
    BOUNDARIES,
    DRAWINGS,
    IN_POOLS,
    LENGTHS,
    RANKS,
    SIZES,
    batches_of_all_ranks,
)
from hypothesis import given
from hypothesis import strategies as st

from batchtune.epochs import ON_ONE_RANK, RankSplit, ShuffleKey
from batchtune.epochs.batchers import Batching
from batchtune.epochs.table import BucketTable

IN_ORDER = ShuffleKey(shuffle=False)


def batching_of(sizes, pool_size, overhead=None):
    return Batching(BucketTable(BOUNDARIES, np.array(sizes)), pool_size, overhead)


def pools_of(lengths, batching):
    """The batches of each pool on one rank, in the order in which they are cut; the data are not shuffled."""
    ends = np.cumsum([part.size for part in pool_slices(lengths, batching)])
    pools = [[] for _ in ends]
    for batch in batches_of_all_ranks(lengths, batching, ON_ONE_RANK, IN_ORDER)[1][0]:
        pools[np.searchsorted(ends, batch[0], side="right")].append(batch)
    return pools


def pool_slices(values, batching):
    return np.array_split(values, -(-values.size // batching.pool_size))


def fits(batching, length):
    return batching.table.batch_sizes[np.searchsorted(BOUNDARIES, length)]


def least_cost(lengths, batching, overhead):
    """What the cheapest cut of one pool costs, of all sizes of batches."""
    ordered = np.sort(lengths)[::-1]
    least = np.zeros(ordered.size + 1)
    for first in range(ordered.size - 1, -1, -1):
        sizes = np.arange(
            1, 1 + min(fits(batching, ordered[first]), ordered.size - first)
        )
        least[first] = overhead + (ordered[first] * sizes + least[first + sizes]).min()
    return least[0]


@given(LENGTHS, SIZES, st.integers(1, 80), DRAWINGS)
def test_without_rests_all_batches_are_full(lengths, sizes, pool_size, drawing):
    batching = batching_of(sizes, pool_size, 10.0)
    whole = {pool.size for pool in pool_slices(lengths, batching)}
    for batch in batches_of_all_ranks(
        lengths, batching, RankSplit(drop_last=True), drawing
    )[1][0]:
        assert len(batch) == fits(batching, lengths[batch].max()) or len(batch) in whole


@given(LENGTHS, IN_POOLS, RANKS, DRAWINGS)
def test_ranks_have_neighbours_of_a_pool_with_same_bucket(
    lengths, batching, world_size, drawing
):
    dealing = RankSplit(world_size=world_size, same_bucket=True)
    for step in zip(
        *batches_of_all_ranks(lengths, batching, dealing, drawing)[1], strict=True
    ):
        sizes = [len(batch) for batch in step]
        assert max(sizes) - min(sizes) <= 1
        # The next rank's are no longer, but for examples that are dealt twice.
        if sum(sizes) == len({example for batch in step for example in batch}):
            edges = [(lengths[batch].max(), lengths[batch].min()) for batch in step]
            assert all(first[1] >= second[0] for first, second in pairwise(edges))


@given(LENGTHS, SIZES, st.integers(1, 80))
def test_a_pool_is_filled_batch_by_batch_from_the_longest(lengths, sizes, pool_size):
    batching = batching_of(sizes, pool_size)
    slices = pool_slices(np.arange(lengths.size), batching)
    for examples, pool in zip(slices, pools_of(lengths, batching), strict=True):
        left = sorted(examples.tolist(), key=lambda example: -lengths[example])
        for batch in pool:
            assert batch == left[: fits(batching, lengths[left[0]])]
            left = left[len(batch) :]
        assert not left


@given(LENGTHS, SIZES, st.integers(1, 80), st.floats(0, 100))
def test_with_an_overhead_no_other_cut_costs_less(lengths, sizes, pool_size, overhead):
    batching = batching_of(sizes, pool_size, overhead)
    for part, pool in zip(
        pool_slices(lengths, batching), pools_of(lengths, batching), strict=True
    ):
        cost = sum(overhead + len(batch) * lengths[batch].max() for batch in pool)
        assert cost == pytest.approx(least_cost(part, batching, overhead))


def test_large_batches_are_cut_nearly_as_cheaply_as_can_be():
    lengths = np.random.default_rng(0).gamma(4, 2, 3000).clip(0.5, 30)
    batching = batching_of([700, 500, 300], 3000, 150.0)
    (pool,) = pools_of(lengths, batching)
    cost = sum(150.0 + len(batch) * lengths[batch].max() for batch in pool)
    assert cost == pytest.approx(least_cost(lengths, batching, 150.0), rel=1e-3)


@pytest.mark.parametrize(
    ("pool_size", "sizes"), [(10, [9, 8, 8]), (25, [25]), (10**12, [25])]
)
def test_pools_are_of_one_size_and_no_larger_than_asked_for(pool_size, sizes):
    cut = (
        batching_of([1, 1, 1], pool_size)
        .batcher(np.arange(1.0, 26.0))
        .cut(IN_ORDER, ON_ONE_RANK)
    )
    falls = np.flatnonzero(np.diff(cut.examples) > 0) + 1
    assert np.diff([0, *falls, 25]).tolist() == sizes
