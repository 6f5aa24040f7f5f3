from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.batching.optimal import optimal_boundaries
from batchtune.batching.remainders import optimal_boundaries_with_remainders
from batchtune.batching.table import batch_sizes_for
from batchtune.lengths import FloatArray, Histogram, IntArray, Lengths

DATA = Path(__file__).parents[3] / "shared" / "data"


def histogram_of(counts: IntArray) -> Histogram:
    return Histogram(np.arange(1.0, len(counts) + 1), np.asarray(counts, dtype=np.int64))


def bucket_cost(examples: int, size: int, full: float, single: float) -> float:
    """Batch by batch, as the examples are cut into them."""
    batches = [size] * (examples // size) + [examples % size] * (examples % size > 0)
    return sum(full if r == size else single + (r - 1) / (size - 1) * (full - single) for r in batches)


def cost_of(histogram: Histogram, sizes: IntArray, full: FloatArray, single: FloatArray, bounds: FloatArray) -> float:
    ends = np.searchsorted(histogram.lengths, bounds)
    examples = np.diff(histogram.cumulative[ends], prepend=0)
    return sum(
        bucket_cost(*bucket)
        for bucket in zip(examples.tolist(), sizes[ends].tolist(), full[ends], single[ends], strict=True)
    )


def number_of_batches(histogram: Histogram, sizes: IntArray, boundaries: FloatArray) -> int:
    ends = np.searchsorted(histogram.lengths, boundaries)
    return int(np.sum(-(-np.diff(histogram.cumulative[ends], prepend=0) // sizes[ends])))


def least_by_brute_force(
    counts: IntArray, sizes: IntArray, full: FloatArray, single: FloatArray
) -> list[tuple[float, int]]:
    """For each most = 1, 2, …: the least cost over all sets of ends, and the fewest buckets that give it."""
    up_to = np.concatenate(([0], np.cumsum(counts))).tolist()
    cost = {
        (i, j): bucket_cost(up_to[j] - up_to[i], int(sizes[j - 1]), full[j - 1], single[j - 1])
        for i, j in combinations(range(len(up_to)), 2)
    }
    found: list[tuple[float, int]] = []
    for size in range(len(counts)):
        best = found[-1] if found else (np.inf, 0)
        for inner in combinations(range(1, len(counts)), size):
            ends = (0, *inner, len(counts))
            best = min(best, (sum(cost[pair] for pair in pairwise(ends)), size + 1))
        found.append(best)
    return found


def test_no_other_boundaries_need_fewer_batches_and_fewer_buckets_win_a_tie() -> None:
    rng = np.random.default_rng(1)
    for _ in range(2000):
        distinct = int(rng.integers(1, 10))
        counts, sizes = rng.integers(1, 12, distinct), rng.integers(1, 14, distinct)
        one = np.ones(distinct)
        asked = range(1, distinct + 1)
        found = optimal_boundaries_with_remainders(histogram_of(counts), sizes, one, one, asked)
        costs = [(cost_of(histogram_of(counts), sizes, one, one, b), b.size) for b in found]
        assert costs == least_by_brute_force(counts, sizes, one, one)


def test_no_other_boundaries_cost_less_whatever_the_costs() -> None:
    rng = np.random.default_rng(2)
    for _ in range(2000):
        distinct = int(rng.integers(1, 10))
        counts, sizes = rng.integers(1, 30, distinct), rng.integers(1, 10, distinct)
        full, single = rng.gamma(1.0, 1.0, (2, distinct))
        asked = range(1, distinct + 1)
        found = optimal_boundaries_with_remainders(histogram_of(counts), sizes, full, single, asked)
        costs = [cost_of(histogram_of(counts), sizes, full, single, b) for b in found]
        least = [cost for cost, _ in least_by_brute_force(counts, sizes, full, single)]
        assert costs == pytest.approx(least, rel=1e-12)


def test_a_bucket_whose_only_gain_is_in_full_batches_is_not_made() -> None:
    histogram, sizes, one = histogram_of(np.array([3, 3])), np.array([8, 6]), np.ones(2)
    assert optimal_boundaries(histogram, 1 / sizes, [2])[0].tolist() == [1, 2]
    assert optimal_boundaries_with_remainders(histogram, sizes, one, one, [2])[0].tolist() == [2]


def test_without_remainders_it_is_the_programme_without_them() -> None:
    rng = np.random.default_rng(5)
    sizes = np.sort(rng.integers(1, 9, 40))[::-1].astype(np.int64)
    histogram, full = histogram_of(rng.integers(1, 5, 40) * 840), np.cumsum(rng.random(40)) + sizes
    relaxed = optimal_boundaries(histogram, full / sizes, range(1, 12))
    exact = optimal_boundaries_with_remainders(histogram, sizes, full, full / sizes, range(1, 12))
    for one, other in zip(relaxed, exact, strict=True):
        assert one.tolist() == other.tolist()


# Lengths, and a max_batch_length.
CASES = st.tuples(st.lists(st.integers(1, 400), min_size=1, max_size=80), st.integers(1, 2000))


@given(case=CASES)
@settings(deadline=None, max_examples=150)
def test_boundaries_are_examples_lengths_the_longest_is_the_last_and_a_bucket_more_costs_no_more(
    case: tuple[list[int], int],
) -> None:
    histogram = Lengths.of(case[0]).histogram
    sizes, one = batch_sizes_for(histogram.lengths, case[1]), np.ones(histogram.lengths.size)
    asked = range(1, 12)
    found = optimal_boundaries_with_remainders(histogram, sizes, one, one, asked)
    for most, boundaries in zip(asked, found, strict=True):
        assert boundaries.size <= most
        assert np.all(np.diff(boundaries) > 0)
        assert set(boundaries) <= set(case[0])
        assert boundaries[-1] == max(case[0])
    assert np.all(np.diff([number_of_batches(histogram, sizes, b) for b in found]) <= 0)


@given(case=CASES, power=st.integers(-20, 20), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=100)
def test_order_changes_nothing_and_scaling_lengths_with_max_batch_length_scales_the_boundaries(
    case: tuple[list[int], int], power: int, seed: int
) -> None:
    values, scale = np.array(case[0], dtype=float), 2.0**power

    def boundaries(lengths: FloatArray, max_batch_length: float) -> list[list[float]]:
        histogram = Lengths.of(lengths).histogram
        sizes, one = batch_sizes_for(histogram.lengths, max_batch_length), np.ones(histogram.lengths.size)
        found = optimal_boundaries_with_remainders(histogram, sizes, one, one, [1, 3, 8])
        return [b.tolist() for b in found]

    shuffled = np.random.default_rng(seed).permutation(values)
    scaled = boundaries(shuffled * scale, case[1] * scale)
    assert scaled == [[b * scale for b in each] for each in boundaries(values, case[1])]


def test_real_valued_costs_never_rise_with_the_number_of_buckets() -> None:
    rng = np.random.default_rng(4)
    histogram, sizes = histogram_of(rng.integers(1, 20, 300)), rng.integers(1, 40, 300)
    full, single = rng.random((2, 300))
    found = optimal_boundaries_with_remainders(histogram, sizes, full, single, range(1, 30))
    costs = np.array([cost_of(histogram, sizes, full, single, b) for b in found])
    assert np.all(np.diff(costs) <= 1e-12 * costs[:-1])


@pytest.mark.parametrize("counts", [[7], [1, 1], [4, 4, 4, 4, 4]])
def test_more_buckets_than_lengths_may_be_asked_for(counts: list[int]) -> None:
    histogram, one = histogram_of(np.array(counts)), np.ones(len(counts))
    sizes = np.arange(len(counts), 0, -1)
    found = optimal_boundaries_with_remainders(histogram, sizes, one, one, [len(counts), 50])
    assert found[0].tolist() == found[1].tolist()


def test_batches_larger_than_the_data_set_are_one_remainder() -> None:
    histogram = histogram_of(np.array([2, 3]))
    sizes, full, single = np.array([100, 100]), np.array([9.9, 9.9]), np.array([1.0, 1.0])
    (boundaries,) = optimal_boundaries_with_remainders(histogram, sizes, full, single, [2])
    assert boundaries.tolist() == [2]


def test_fewer_batches_than_without_remainders_on_librispeech() -> None:
    path = DATA / "librispeech-wav2vec-tsv" / "train.tsv"
    if not path.exists():
        pytest.skip(f"{path.parent.name} is not here")
    histogram = Lengths.of(np.loadtxt(path, skiprows=1, delimiter="\t", usecols=1) / 16_000).histogram
    sizes, one = batch_sizes_for(histogram.lengths, 600), np.ones(histogram.lengths.size)
    asked = [10, 15, 20]
    relaxed = [number_of_batches(histogram, sizes, b) for b in optimal_boundaries(histogram, 1 / sizes, asked)]
    exact = optimal_boundaries_with_remainders(histogram, sizes, one, one, asked)
    assert relaxed == [641, 631, 628]
    assert [number_of_batches(histogram, sizes, b) for b in exact] == [638, 627, 621]


@pytest.mark.parametrize(
    ("sizes", "full", "single", "num_buckets", "rule"),
    [
        ([1], [1, 1], [1, 1], [1], "1 batch sizes for 2 distinct lengths"),
        ([1, 1], [1], [1, 1], [1], "1 full costs for 2 distinct lengths"),
        ([1, 1], [1, 1], [1], [1], "1 single costs for 2 distinct lengths"),
        ([1, 0], [1, 1], [1, 1], [1], "batch sizes must be at least 1, got 0"),
        ([1, 1], [1, -1], [1, 1], [1], "finite and not negative"),
        ([1, 1], [1, 1], [1, np.inf], [1], "finite and not negative"),
        ([1, 1], [1, 1], [1, 1], [0], "bucket counts must be at least 1"),
        ([1, 1], [1, 1], [1, 1], [], "bucket counts must be at least 1"),
    ],
)
def test_misuse_is_refused_with_the_rule(
    sizes: list[int], full: list[float], single: list[float], num_buckets: list[int], rule: str
) -> None:
    arrays = np.array(sizes), np.array(full, dtype=float), np.array(single, dtype=float)
    with pytest.raises(ValueError, match=rule):
        optimal_boundaries_with_remainders(histogram_of(np.array([1, 1])), *arrays, num_buckets)
