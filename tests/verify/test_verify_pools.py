"""The verification of batches that are cut from pools, on a made device."""

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

from batchtune import PooledBatchSampler
from batchtune.errors import ResultError
from batchtune.lengths import Lengths
from batchtune.results import BatchShape


def planned(lengths, sizes, **changes):
    return made_plan(
        lengths, made_config(BOUNDARIES, sizes, sampler="pooled", **changes)
    )


@given(FEW, SIZES, st.integers(1, 70), st.sampled_from([None, 3.0]), st.booleans())
def test_an_epoch_is_that_of_the_sampler(values, sizes, pool_size, overhead, drop_last):
    lengths = Lengths.of(values)
    sampler = PooledBatchSampler(
        lengths.values,
        pool_size=pool_size,
        bucket_boundaries=BOUNDARIES,
        bucket_batch_sizes=sizes,
        batch_overhead=overhead,
        drop_last=drop_last,
    )
    options = {
        "pool_size": pool_size,
        "batch_overhead": overhead,
        "drop_last": drop_last,
    }
    if not len(sampler):
        with pytest.raises(ResultError, match="leaves out every batch"):
            planned(lengths, sizes, **options)
        return
    expected = [
        BatchShape(len(batch), float(lengths.values[batch].max())) for batch in sampler
    ]
    assert [
        batch.shape for batch in epoch(planned(lengths, sizes, **options))
    ] == expected


@given(FEW, SIZES, st.integers(1, 70))
@example([1, 1, 6], [1, 2, 1], 2)  # the shorter half of a batch is of a lower bucket
def test_no_batch_needs_more_than_a_worst_one(values, sizes, pool_size):
    check_worst_batches(
        planned(
            Lengths.of(values, [value % 7 for value in values]),
            sizes,
            pool_size=pool_size,
        )
    )


def test_the_worst_batch_holds_no_more_than_a_pool():
    lengths = Lengths.of([2.0] * 20 + [8.0, 9.0, 20.0], [90] + [5] * 19 + [7, 6, 8])
    worst = {
        one.shape for one in planned(lengths, [30, 4, 1], pool_size=10).worst_batches
    }
    assert worst == {
        BatchShape(10, 2.0, 90.0),
        BatchShape(4, 9.0, 90.0),
        BatchShape(1, 20.0, 8.0),
    }
