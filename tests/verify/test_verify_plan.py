"""The batches that a verification runs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from verify.made_stepper import (
    BOUNDARIES,
    FEW,
    SIZES,
    check_worst_batches,
    epoch,
    made_config,
    made_plan,
)

from batchtune.epochs.expectation import expected_batches
from batchtune.errors import ResultError
from batchtune.lengths import Lengths
from batchtune.results import BatchShape
from batchtune.verify.plan import PlannedBatch


def planned(
    lengths,
    sizes,
    boundaries=BOUNDARIES,
    seed=0,
    **changes,
):
    return made_plan(lengths, made_config(boundaries, sizes, **changes), seed)


def shapes(batches):
    return [batch.shape for batch in batches]


@given(FEW, SIZES, st.integers(0, 5))
def test_an_epoch_is_that_of_the_sampler(values, sizes, seed):
    lengths = Lengths.of(values, [value % 7 for value in values])
    plan = planned(lengths, sizes, seed=seed)
    batches = epoch(plan)
    expected = expected_batches(lengths.histogram, plan.table)
    assert len(batches) == expected.tally.batches
    for bucket, count in enumerate(expected.counts):
        assert (
            sum(batch.shape.batch_size for batch in batches if batch.bucket == bucket)
            == count
        )
    check_worst_batches(plan)


def test_drop_last_that_leaves_nothing_is_an_error():
    with pytest.raises(ResultError, match="leaves out every batch"):
        planned(Lengths.of([3.0]), [4], [3.0], drop_last=True)


def test_a_seed_gives_one_epoch_and_the_next_epoch_another():
    lengths = Lengths.of(range(1, 31))
    plan = planned(lengths, [3, 3, 3], seed=7)
    assert shapes(epoch(plan)) == shapes(epoch(plan)) != shapes(epoch(plan, 1))
    assert shapes(epoch(plan, 1)) == shapes(epoch(planned(lengths, [3, 3, 3], seed=8)))


@pytest.mark.parametrize(("ordering", "sign"), [("ascending", 1), ("descending", -1)])
def test_batches_come_in_the_samplers_order(ordering, sign):
    plan = planned(Lengths.of(range(1, 31)), [3, 3, 3], batch_ordering=ordering)
    assert (np.diff([sign * shape.length for shape in shapes(epoch(plan))]) >= 0).all()


def test_the_worst_batch_is_full_with_its_longest_example():
    worst = planned(Lengths.of([1.0, 4.0, 4.0, 11.0]), [2, 8, 4]).worst_batches
    assert worst == [
        PlannedBatch(BatchShape(1, 11.0), 1),
        PlannedBatch(BatchShape(2, 4.0), 0),
    ]


def test_of_batches_of_one_those_are_tried_that_exist():
    worst = planned(Lengths.of([1.0, 4.0], [90, 3]), [1], [5.0]).worst_batches
    assert set(shapes(worst)) == {BatchShape(1, 4.0, 3.0), BatchShape(1, 1.0, 90.0)}


def test_examples_beyond_the_last_boundary_are_an_error():
    with pytest.raises(ResultError, match="2 of 3 examples are longer, up to 31"):
        planned(Lengths.of([5.0, 30.5, 31.0]), [1, 1, 1])
