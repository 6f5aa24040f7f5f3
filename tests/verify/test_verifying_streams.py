"""The verification of a stream's batches, on a made device."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from streamed_records import made_stream
from verify.made_stepper import (
    BOUNDARIES,
    SIZES,
    check_worst_batches,
    made_plan,
    made_stepper,
)

from batchtune.exports.run_configs import stream_config
from batchtune.lengths import Lengths
from batchtune.results import StreamedWith, WorkloadRecord
from batchtune.streams.simulated import StoredStream
from batchtune.verify import verify

VALUES = np.random.default_rng(0).integers(1, 31, 2000).astype(np.float64)
SHARDING = StreamedWith(workers=2, shuffle_shards=4, shuffle_buffer=0)
ALGORITHMS = st.sampled_from(["bucket", "pivot"])


def planned(
    values=VALUES,
    sizes=None,
    targets=None,
    **changes,
):
    """A plan for shards of 5 examples."""
    lengths = Lengths.of(values, targets)
    config = replace(
        stream_config(made_stream()),
        unit=None,
        bucket_boundaries=BOUNDARIES,
        bucket_batch_sizes=sizes or [180, 75, 30],
        max_padding_ratio=None,
        **{"buffer_size": 300, **changes},
    )
    whole, rest = divmod(lengths.count, 5)
    stored = StoredStream(
        lengths=np.asarray(values, dtype=np.float64),
        targets=None if targets is None else np.asarray(targets, dtype=np.float64),
        sizes=[5] * whole + [rest] * bool(rest),
        sharding=SHARDING,
        scale=np.ones(SHARDING.workers),
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
    assert (found.holds, found.failures, found.warnings) == (True, [], [])
    assert (found.algorithm, found.buffer_size, found.worst_steps) == (
        algorithm,
        300,
        6,
    )
    assert (found.settings["workers"], found.settings["shuffle_shards"]) == (2, 4)
    assert found.measured_epoch_seconds == pytest.approx(
        found.estimated_epoch_seconds, rel=0.02
    )
    epoch = stepper.shapes[6 : 6 + found.steps]
    assert sum(shape.batch_size for shape in epoch) == VALUES.size
