"""Batches from pools that are sorted by length."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.epochs import batch_order as epochs
from batchtune.epochs.batch_order import Cut, Drawing, EpochBatches
from batchtune.epochs.batchers import Batching
from batchtune.epochs.layout import Dealing
from batchtune.epochs.table import BucketTable
from batchtune.lengths import FloatArray, Lengths

BOUNDARIES = np.array([5.0, 12.0, 30.0])
LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=70).map(lambda values: np.array(values, dtype=np.float64))
SIZES = st.lists(st.integers(1, 9), min_size=3, max_size=3)
OVERHEADS = st.one_of(st.none(), st.floats(0, 100))


def batching_of(sizes: list[int], pool_size: int, overhead: float | None = None) -> Batching:
    return Batching(BucketTable(BOUNDARIES, np.array(sizes)), pool_size, overhead)


BATCHINGS = st.builds(batching_of, SIZES, st.integers(1, 80), OVERHEADS)
# Longer examples never fit more often, as on every device.
REAL = st.builds(batching_of, SIZES.map(lambda sizes: sorted(sizes)[::-1]), st.integers(1, 80), OVERHEADS)
DEALINGS = st.builds(Dealing, world_size=st.integers(1, 5), same_bucket=st.booleans(), drop_last=st.booleans())
DRAWINGS = st.builds(
    Drawing,
    shuffle=st.booleans(),
    ordering=st.sampled_from(epochs.ORDERINGS),
    seed=st.integers(0, 2**70),
    epoch=st.integers(0, 9),
)


def cut(lengths: FloatArray, batching: Batching, dealing: Dealing = Dealing(), drawing: Drawing = Drawing()) -> Cut:  # noqa: B008 - both are frozen
    return batching.batcher(lengths).cut(drawing, dealing)


def of_all_ranks(lengths: FloatArray, batching: Batching, dealing: Dealing, drawing: Drawing) -> list[EpochBatches]:
    found = cut(lengths, batching, dealing, drawing)
    return [epochs.assemble(found, drawing, rank=rank, lengths=lengths) for rank in range(dealing.world_size)]


def pools_of(lengths: FloatArray, batching: Batching, drawing: Drawing) -> list[list[list[int]]]:
    """The batches of each pool on one rank, in the order in which they are cut."""
    found = cut(lengths, batching, drawing=drawing)
    ends = np.cumsum([part.size for part in pool_slices(lengths, batching)])
    pools: list[list[list[int]]] = [[] for _ in ends]
    for start, size in zip(found.layout.starts.tolist(), found.layout.batch_sizes.tolist(), strict=True):
        pools[int(np.searchsorted(ends, start, side="right"))].append(found.examples[start : start + size].tolist())
    return pools


def pool_slices(lengths: npt.NDArray[Any], batching: Batching) -> list[npt.NDArray[Any]]:
    assert batching.pool_size is not None
    return np.array_split(lengths, -(-lengths.size // batching.pool_size))


def fits(batching: Batching, length: float) -> int:
    return int(batching.table.batch_sizes[np.searchsorted(BOUNDARIES, length)])


@given(LENGTHS, SIZES, st.integers(1, 80), DRAWINGS)
@settings(deadline=None, max_examples=25)
def test_without_rests_all_batches_are_full(
    lengths: FloatArray, sizes: list[int], pool_size: int, drawing: Drawing
) -> None:
    batching = batching_of(sizes, pool_size, 10.0)
    whole = {pool.size for pool in pool_slices(lengths, batching)}
    for batch in of_all_ranks(lengths, batching, Dealing(drop_last=True), drawing)[0]:
        assert len(batch) == fits(batching, lengths[batch].max()) or len(batch) in whole


@given(LENGTHS, REAL, DEALINGS, DRAWINGS)
@settings(deadline=None, max_examples=40)
def test_a_batch_holds_no_more_than_fit_with_its_longest(
    lengths: FloatArray, batching: Batching, dealing: Dealing, drawing: Drawing
) -> None:
    ranks = of_all_ranks(lengths, batching, dealing, drawing)
    sizes, longest = batching.largest_batches(Lengths.of(lengths).histogram)
    most = dict(zip(batching.table.assign(longest).tolist(), sizes.tolist(), strict=True))
    for batch in (batch for rank in ranks for batch in rank):
        bucket = int(np.searchsorted(BOUNDARIES, lengths[batch].max()))
        assert 1 <= len(batch) <= most[bucket] <= batching.table.batch_sizes[bucket]


@given(LENGTHS, REAL, st.integers(1, 5), DRAWINGS)
@settings(deadline=None, max_examples=25)
def test_ranks_have_neighbours_of_a_pool_with_same_bucket(
    lengths: FloatArray, batching: Batching, world_size: int, drawing: Drawing
) -> None:
    ranks = of_all_ranks(lengths, batching, Dealing(world_size=world_size, same_bucket=True), drawing)
    for step in zip(*ranks, strict=True):
        sizes = [len(batch) for batch in step]
        assert max(sizes) - min(sizes) <= 1
        # The next rank's are no longer, but for examples that are dealt twice.
        if sum(sizes) == len({example for batch in step for example in batch}):
            edges = [(lengths[batch].max(), lengths[batch].min()) for batch in step]
            assert all(first[1] >= second[0] for first, second in pairwise(edges))


@given(LENGTHS, SIZES, st.integers(1, 80), DRAWINGS)
@settings(deadline=None, max_examples=40)
def test_a_pool_is_filled_batch_by_batch_from_the_longest(
    lengths: FloatArray, sizes: list[int], pool_size: int, drawing: Drawing
) -> None:
    batching = batching_of(sizes, pool_size)
    for pool in pools_of(lengths, batching, drawing):
        left = [example for batch in pool for example in batch]
        assert lengths[left].tolist() == sorted(lengths[left], reverse=True)
        for batch in pool:
            assert batch == left[: fits(batching, lengths[left[0]])]
            left = left[len(batch) :]


@given(LENGTHS, SIZES, st.integers(1, 80), st.floats(0, 100), DRAWINGS)
@settings(deadline=None, max_examples=40)
def test_with_an_overhead_no_other_cut_costs_less(
    lengths: FloatArray, sizes: list[int], pool_size: int, overhead: float, drawing: Drawing
) -> None:
    batching = batching_of(sizes, pool_size, overhead)
    for pool in pools_of(lengths, batching, drawing):
        cost = sum(overhead + len(batch) * lengths[batch].max() for batch in pool)
        ordered = [float(lengths[example]) for batch in pool for example in batch]
        least = [0.0] * (len(ordered) + 1)
        for at in range(len(ordered) - 1, -1, -1):
            most = min(fits(batching, ordered[at]), len(ordered) - at)
            least[at] = min(overhead + size * ordered[at] + least[at + size] for size in range(1, most + 1))
        assert cost == pytest.approx(least[0])


def test_large_batches_are_cut_nearly_as_cheaply_as_can_be() -> None:
    lengths = np.random.default_rng(0).gamma(4, 2, 3000).clip(0.5, 30)
    batching = batching_of([700, 500, 300], 3000, 150.0)
    ordered = np.sort(lengths)[::-1]
    least = np.zeros(ordered.size + 1)
    for at in range(ordered.size - 1, -1, -1):
        ends = np.arange(at + 1, at + 1 + min(fits(batching, ordered[at]), ordered.size - at))
        least[at] = 150.0 + (ordered[at] * (ends - at) + least[ends]).min()
    (pool,) = pools_of(lengths, batching, Drawing())
    assert sum(150.0 + len(batch) * lengths[batch].max() for batch in pool) == pytest.approx(least[0], rel=1e-3)


@given(LENGTHS, BATCHINGS)
@settings(deadline=None, max_examples=25)
def test_without_shuffle_pools_come_in_the_order_of_the_data(lengths: FloatArray, batching: Batching) -> None:
    (only,) = of_all_ranks(lengths, batching, Dealing(), Drawing(shuffle=False))
    read = [example for batch in only for example in batch]
    for pool in pool_slices(np.arange(lengths.size), batching):
        first = int(pool[0])
        assert read[first : first + pool.size] == sorted(pool.tolist(), key=lambda example: -lengths[example])


def test_pools_are_of_one_size_and_no_larger_than_asked_for() -> None:
    ones = batching_of([1, 1, 1], 30)
    equal = cut(np.full(100, 3.0), ones, drawing=Drawing(shuffle=False))
    assert equal.examples.tolist() == list(range(100))
    rising = cut(np.arange(1.0, 26.0), replace(ones, pool_size=10), drawing=Drawing(shuffle=False))
    falls = np.flatnonzero(np.diff(rising.examples) > 0) + 1
    assert np.diff([0, *falls, 25]).tolist() == [9, 8, 8]


@pytest.mark.parametrize("pool_size", [50, 10**12])
def test_a_pool_larger_than_the_data_is_the_data(pool_size: int) -> None:
    lengths = np.linspace(1, 10, 50)
    (pool,) = pools_of(lengths, batching_of([4, 3, 2], pool_size), Drawing())
    assert sorted(example for batch in pool for example in batch) == list(range(50))
    assert lengths[[batch[0] for batch in pool]].tolist() == sorted(lengths[[b[0] for b in pool]], reverse=True)


def test_many_different_lengths_are_sorted_alike() -> None:
    random = np.random.default_rng(2)
    lengths = random.permutation(np.arange(1.0, 150_001.0)) / 5000
    found = cut(lengths, batching_of([9, 6, 3], 40_000))
    for pool in np.array_split(lengths[found.examples], 4):
        assert (np.diff(pool) < 0).all()


def test_large_pools_are_filled_whatever_a_batch_costs() -> None:
    lengths = np.random.default_rng(0).integers(1, 30, 30_000).astype(np.float64)
    filled, costed = (cut(lengths, batching_of([9, 5, 2], 30_000, overhead)) for overhead in (None, 20.0))
    assert filled.layout.starts.tolist() == costed.layout.starts.tolist()
