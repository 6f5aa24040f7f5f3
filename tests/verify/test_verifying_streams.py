"""The verification of a stream's batches, on a made device."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from verify.made_stepper import (
    BOUNDARIES,
    SIZES,
    check_worst_batches,
    epoch,
    made_config,
    made_plan,
    made_stepper,
)

from batchtune.errors import ResultError
from batchtune.lengths import Lengths
from batchtune.results import StreamConfig, StreamedWith, WorkloadRecord
from batchtune.streams.simulated import StoredStream
from batchtune.verify import verify

VALUES = np.random.default_rng(0).integers(1, 31, 2000).astype(np.float64)
SHARDING = StreamedWith(workers=2, shuffle_shards=4, shuffle_buffer=0)
ALGORITHMS = st.sampled_from(["bucket", "pivot"])


def planned(
    values=VALUES,
    sizes=None,
    targets=None,
    sharding=SHARDING,
    **changes,
):
    """A plan for shards of 5 examples."""
    lengths = Lengths.of(values, targets)
    config = StreamConfig(
        format=StreamConfig.FORMAT,
        version=1,
        unit=None,
        max_batch_length=900.0,
        bucket_boundaries=BOUNDARIES,
        bucket_batch_sizes=sizes or [180, 75, 30],
        max_padding_ratio=None,
        shuffle=True,
        batches_per_epoch=None,
        seed=0,
        evidence=made_config(BOUNDARIES, [1, 1, 1]).evidence,
        **{"algorithm": "bucket", "buffer_size": 300, "drop_last": False, **changes},
    )
    whole, rest = divmod(lengths.count, 5)
    stored = StoredStream(
        lengths=np.asarray(values, dtype=np.float64),
        targets=None if targets is None else np.asarray(targets, dtype=np.float64),
        sizes=[5] * whole + [rest] * bool(rest),
        sharding=sharding,
        scale=np.ones(sharding.world_size * sharding.workers),
        seed=0,
    )
    return made_plan(lengths, config, stream=stored)


def verified(stepper, plan):
    workload = WorkloadRecord(spec="made.py:Made", options={})
    return verify(stepper, plan, workload, on_progress=lambda progress: None)


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=80),
    SIZES,
    st.integers(1, 30),
    ALGORITHMS,
)
def test_no_batch_needs_more_than_a_worst_one(values, sizes, buffer_size, algorithm):
    targets = [value % 7 for value in values]
    check_worst_batches(
        planned(values, sizes, targets, buffer_size=buffer_size, algorithm=algorithm)
    )


@pytest.mark.parametrize("algorithm", ["bucket", "pivot"])
def test_what_fits_and_takes_as_long_as_estimated_holds(algorithm):
    plan, stepper = planned(algorithm=algorithm), made_stepper()
    found = verified(stepper, plan)
    assert (found.holds, found.reasons, found.failures, found.warnings) == (
        True,
        [],
        [],
        [],
    )
    assert (found.algorithm, found.buffer_size, found.pool_size, found.worst_steps) == (
        algorithm,
        300,
        None,
        6,
    )
    assert (found.settings["workers"], found.settings["shuffle_shards"]) == (2, 4)
    assert found.measured_epoch_seconds == pytest.approx(
        found.estimated_epoch_seconds, rel=0.02
    )
    epoch = stepper.shapes[6 : 6 + found.steps]
    assert sum(shape.batch_size for shape in epoch) == VALUES.size


def test_ranks_take_their_workers_batches_in_turn():
    # One example is a batch, so its length, which no other has, names it.
    values = np.arange(1.0, 31.0)
    plan = planned(
        values,
        [1, 1, 1],
        sharding=StreamedWith(
            world_size=2, workers=2, shuffle_shards=0, shuffle_buffer=0
        ),
        buffer_size=1,
    )
    # Shards 0 to 5 are those of rank 0, worker 0; rank 1, worker 0; rank 0, worker 1; rank 1, worker 1; and again.
    assert [batch.shape.length for batch in epoch(plan)][:6] == [
        1.0,
        6.0,
        11.0,
        16.0,
        2.0,
        7.0,
    ]


def test_a_worker_without_a_full_batch_is_an_error():
    with pytest.raises(ResultError, match="leaves out every batch"):
        planned(VALUES[:40], drop_last=True)
