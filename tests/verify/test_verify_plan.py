"""The batches that a verification runs, in buckets and in pools."""

import pytest
from hypothesis import example, given
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

from batchtune import BucketBatchSampler, PooledBatchSampler
from batchtune.errors import ResultError
from batchtune.lengths import Lengths
from batchtune.results import BatchShape
from batchtune.verify.plan import PlannedBatch


def planned(lengths, sizes, boundaries=BOUNDARIES, seed=0, **changes):
    return made_plan(lengths, made_config(boundaries, sizes, **changes), seed)


def shapes(batches):
    return [batch.shape for batch in batches]


@pytest.mark.parametrize("made", [BucketBatchSampler, PooledBatchSampler])
@given(
    FEW,
    SIZES,
    st.integers(1, 70),
    st.sampled_from([None, 3.0]),
    st.booleans(),
    st.sampled_from(["random", "ascending", "descending"]),
    st.integers(0, 2),
)
def test_epochs_are_those_of_the_sampler(
    made, values, sizes, pool_size, overhead, drop_last, ordering, number
):
    lengths = Lengths.of(values)
    options = {"drop_last": drop_last, "batch_ordering": ordering}
    kind = {}
    if made is PooledBatchSampler:
        options |= {"pool_size": pool_size, "batch_overhead": overhead}
        kind = {"sampler": "pooled"}
    table = {"bucket_boundaries": BOUNDARIES, "bucket_batch_sizes": sizes}
    sampler = made(lengths.values, seed=3 + number, **table, **options)
    if not len(sampler):
        with pytest.raises(ResultError, match="leaves out every batch"):
            planned(lengths, sizes, **kind, **options)
        return
    expected = [
        BatchShape(len(batch), float(lengths.values[batch].max())) for batch in sampler
    ]
    plan = planned(lengths, sizes, seed=3, **kind, **options)
    assert shapes(epoch(plan, number)) == expected


@pytest.mark.parametrize("kind", [{}, {"sampler": "pooled"}], ids=["buckets", "pools"])
@given(FEW, SIZES, st.integers(1, 70))
@example([1, 1, 6], [1, 2, 1], 2)  # the shorter half of a batch is of a lower bucket
def test_no_batch_needs_more_than_a_worst_one(kind, values, sizes, pool_size):
    lengths = Lengths.of(values, [value % 7 for value in values])
    if kind:
        kind = {**kind, "pool_size": pool_size}
    check_worst_batches(planned(lengths, sizes, **kind))


def test_the_worst_batch_is_full_with_its_longest_example():
    worst = planned(Lengths.of([1.0, 4.0, 4.0, 11.0]), [2, 8, 4]).worst_batches
    assert worst == [
        PlannedBatch(BatchShape(1, 11.0), 1),
        PlannedBatch(BatchShape(2, 4.0), 0),
    ]


def test_the_worst_batch_holds_no_more_than_a_pool():
    lengths = Lengths.of([2.0] * 20 + [8.0, 9.0, 20.0], [90] + [5] * 19 + [7, 6, 8])
    plan = planned(lengths, [30, 4, 1], sampler="pooled", pool_size=10)
    assert set(shapes(plan.worst_batches)) == {
        BatchShape(10, 2.0, 90.0),
        BatchShape(4, 9.0, 90.0),
        BatchShape(1, 20.0, 8.0),
    }


def test_of_batches_of_one_those_are_tried_that_exist():
    worst = planned(Lengths.of([1.0, 4.0], [90, 3]), [1], [5.0]).worst_batches
    assert set(shapes(worst)) == {BatchShape(1, 4.0, 3.0), BatchShape(1, 1.0, 90.0)}


def test_examples_beyond_the_last_boundary_are_an_error():
    with pytest.raises(
        ResultError, match=r"sampler\.yaml: .* 2 of 3 examples are longer"
    ):
        planned(Lengths.of([5.0, 30.5, 31.0]), [1, 1, 1])
