"""The batches that a verification runs."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tuning.made_stepper import made_candidate

from batchtune.batching.epochs import EpochShapes
from batchtune.batching.expectation import expected_batches
from batchtune.errors import ResultError
from batchtune.lengths import Lengths
from batchtune.probe.confirmation import alternating
from batchtune.shapes import BatchShape
from batchtune.tuning.verify_plan import (
    PlannedBatch,
    batch_of,
    check_table,
    epoch_shapes,
    shuffled_epochs,
    worst_batches,
)

FEW = st.lists(st.integers(1, 30), min_size=1, max_size=60)
SIZES = st.lists(st.integers(1, 9), min_size=3, max_size=3)
BOUNDARIES = [5.0, 12.0, 30.0]


def shapes(batches: EpochShapes) -> list[tuple[int, float]]:
    return list(zip(batches.batch_sizes.tolist(), batches.lengths.tolist(), strict=True))


@given(FEW, SIZES, st.integers(0, 5))
def test_an_epoch_has_every_example_once(values: list[int], sizes: list[int], seed: int) -> None:
    lengths, candidate = Lengths.of(values), made_candidate(BOUNDARIES, sizes)
    batches = epoch_shapes(lengths, candidate, seed)
    for bucket, count in enumerate(candidate.table.counts(lengths.histogram)):
        assert batches.batch_sizes[batches.buckets == bucket].sum() == count


@given(FEW, SIZES)
def test_an_epoch_has_as_many_batches_as_a_sampler_makes(values: list[int], sizes: list[int]) -> None:
    lengths, candidate = Lengths.of(values), made_candidate(BOUNDARIES, sizes)
    assert (
        len(epoch_shapes(lengths, candidate, 0)) == expected_batches(lengths.histogram, candidate.table).tally.batches
    )


@given(FEW, SIZES)
def test_a_batch_is_as_long_as_an_example_of_its_bucket(values: list[int], sizes: list[int]) -> None:
    lengths, candidate = Lengths.of(values), made_candidate(BOUNDARIES, sizes)
    batches = epoch_shapes(lengths, candidate, 0)
    assert set(batches.lengths) <= set(map(float, values))
    assert np.array_equal(candidate.table.assign(batches.lengths), batches.buckets)


@given(FEW, SIZES)
def test_no_batch_is_larger_than_the_worst_of_its_bucket(values: list[int], sizes: list[int]) -> None:
    lengths, candidate = Lengths.of(values, [value % 7 for value in values]), made_candidate(BOUNDARIES, sizes)
    worst = worst_batches(lengths, candidate.table)
    batches = epoch_shapes(lengths, candidate, 3)
    for index in range(len(batches)):
        batch = batch_of(batches, index)
        assert any(covers(planned, batch) for planned in worst)


def covers(worst: PlannedBatch, batch: PlannedBatch) -> bool:
    ours, theirs = worst.shape, batch.shape
    assert ours.target_length is not None and theirs.target_length is not None
    # Of batches of one there may be two worst ones, each the longest in one way.
    alone = ours.batch_size == theirs.batch_size == 1
    at_least = (ours.length >= theirs.length, ours.target_length >= theirs.target_length)
    return (
        worst.bucket == batch.bucket
        and ours.batch_size >= theirs.batch_size
        and (any(at_least) if alone else all(at_least))
    )


def test_all_batches_but_one_of_a_bucket_are_full() -> None:
    lengths = Lengths.of([3.0] * 10)
    assert sorted(epoch_shapes(lengths, made_candidate([3.0], [4]), 0).batch_sizes.tolist()) == [2, 4, 4]


def test_drop_last_leaves_the_remainders_out() -> None:
    lengths = Lengths.of([3.0] * 10)
    assert epoch_shapes(lengths, made_candidate([3.0], [4], drop_last=True), 0).batch_sizes.tolist() == [4, 4]


def test_drop_last_that_leaves_nothing_is_an_error() -> None:
    with pytest.raises(ResultError, match="leaves out every batch"):
        next(shuffled_epochs(Lengths.of([3.0]), made_candidate([3.0], [4], drop_last=True), 0))


def test_a_seed_gives_one_epoch_and_the_next_epoch_another() -> None:
    lengths, candidate = Lengths.of(range(1, 31)), made_candidate(BOUNDARIES, [3, 3, 3])
    first, second = islice(shuffled_epochs(lengths, candidate, 7), 2)
    assert shapes(first) == shapes(next(shuffled_epochs(lengths, candidate, 7)))
    assert shapes(first) != shapes(second)
    assert shapes(second) == shapes(next(shuffled_epochs(lengths, candidate, 8)))


@pytest.mark.parametrize(("ordering", "sign"), [("ascending", 1), ("descending", -1)])
def test_batches_come_in_the_samplers_order(ordering: str, sign: int) -> None:
    candidate = made_candidate(BOUNDARIES, [3, 3, 3], ordering=ordering)
    longest = sign * epoch_shapes(Lengths.of(range(1, 31)), candidate, 0).lengths
    assert (np.diff(longest) >= 0).all()


def test_a_batchs_target_is_the_longest_of_its_own_examples() -> None:
    lengths = Lengths.of([1.0, 2.0, 9.0, 10.0], [50, 40, 8, 9])
    batches = epoch_shapes(lengths, made_candidate([5.0, 10.0], [2, 2]), 0)
    assert {batch.shape for batch in (batch_of(batches, 0), batch_of(batches, 1))} == {
        BatchShape(2, 2.0, 50.0),
        BatchShape(2, 10.0, 9.0),
    }


def test_the_worst_batch_is_full_with_its_longest_example() -> None:
    lengths = Lengths.of([1.0, 4.0, 4.0, 11.0])
    worst = worst_batches(lengths, made_candidate(BOUNDARIES, [2, 8, 4]).table)
    assert worst == [PlannedBatch(BatchShape(1, 11.0), 1), PlannedBatch(BatchShape(2, 4.0), 0)]


def test_the_worst_batch_has_the_longest_target_of_its_bucket() -> None:
    lengths = Lengths.of([1.0, 4.0, 4.0], [90, 3, 5])
    assert [planned.shape for planned in worst_batches(lengths, made_candidate([5.0], [2]).table)] == [
        BatchShape(2, 4.0, 90.0)
    ]


def test_of_batches_of_one_those_are_tried_that_exist() -> None:
    lengths = Lengths.of([1.0, 4.0], [90, 3])
    assert {planned.shape for planned in worst_batches(lengths, made_candidate([5.0], [1]).table)} == {
        BatchShape(1, 4.0, 3.0),
        BatchShape(1, 1.0, 90.0),
    }


def test_the_batch_that_needs_most_comes_first() -> None:
    lengths = Lengths.of([2.0] * 50 + [20.0])
    candidate = made_candidate([2.0, 20.0], [30, 1])
    assert worst_batches(lengths, candidate.table)[0].bucket == 0
    assert worst_batches(lengths, candidate.table, lambda shape: shape.length)[0].bucket == 1


@pytest.mark.parametrize(("count", "order"), [(1, [0]), (2, [0, 1]), (5, [0, 4, 1, 3, 2]), (4, [0, 3, 1, 2])])
def test_large_and_small_alternate(count: int, order: list[int]) -> None:
    batches = [PlannedBatch(BatchShape(1, 1.0), bucket) for bucket in range(count)]
    assert [batch.bucket for batch in alternating(batches)] == order


def test_examples_beyond_the_last_boundary_are_an_error() -> None:
    with pytest.raises(ResultError, match="2 of 3 examples are longer, up to 31"):
        check_table(Lengths.of([5.0, 30.5, 31.0]), made_candidate(BOUNDARIES, [1, 1, 1]).table)
