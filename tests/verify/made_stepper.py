"""A made device for verifications, which holds a known number of cells; and a probe of it."""

from itertools import islice

import numpy as np
import report_records
from hypothesis import strategies as st
from made_trials import altered, made_trial
from msgspec.structs import replace
from noted_device import NotedDevice
from report_records import made_sweep

from batchtune.exports.run_configs import sampler_config
from batchtune.results import (
    BatchShape,
    CostModel,
    Models,
    WorkloadRecord,
)
from batchtune.verify.plan import VerifyPlan, VerifySettings

MIB = 1 << 20
BASE_BYTES = 100 * MIB
LIMIT_BYTES = 1000 * MIB
SECONDS_PER_CELL = 1e-4
CONSTANT_SECONDS = 0.01


def cells(shape):
    return shape.padded_length + shape.batch_size * (shape.target_length or 0.0)


def need(shape):
    """One MiB a cell over a base."""
    return BASE_BYTES + int(cells(shape) * MIB)


def seconds(shape):
    return CONSTANT_SECONDS + SECONDS_PER_CELL * shape.padded_length


BOUNDARIES = [5.0, 12.0, 30.0]
FEW = st.lists(st.integers(1, 30), min_size=1, max_size=60)
SIZES = st.lists(st.integers(1, 9), min_size=3, max_size=3)


def made_plan(
    lengths,
    config,
    seed=0,
    stream=None,
):
    """The verification of a whole epoch."""
    return VerifyPlan(
        lengths=lengths,
        config=config,
        settings=VerifySettings(epoch=True, seed=seed),
        probe=made_probe(lengths),
        stream=stream,
    )


def epoch(plan, number=0):
    batches = len(plan.first_epoch)
    return list(
        islice(plan.shuffled_batches(), number * batches, (number + 1) * batches)
    )


def check_worst_batches(plan):
    """Check that no batch of an epoch needs more than a worst one.

    Of batches of one there may be two worst ones, each the longest in one way.
    """
    worst = [planned.shape for planned in plan.worst_batches]
    for planned in epoch(plan):
        shape = planned.shape
        assert plan.table.assign(np.array([shape.length])).tolist() == [planned.bucket]
        larger = [other for other in worst if other.batch_size >= shape.batch_size]
        assert any(other.length >= shape.length for other in larger)
        assert any(
            (other.target_length or 0.0) >= (shape.target_length or 0.0)
            for other in larger
        )


def made_stepper(
    *,
    limit_bytes=LIMIT_BYTES,
    slower=1.0,
    cache_bytes=0,
    retries=0,
    leak_bytes=0,
    fault=lambda shape, run: None,
):
    """A device whose steps take what `need` and `seconds` say.

    Its allocator's cache grows by `cache_bytes` with each step, and is emptied `retries` times in each.
    """

    def alter(reply, number):
        if reply.trial.outcome != "ok":
            return reply
        kept = leak_bytes + cache_bytes
        reserved_bytes = LIMIT_BYTES // 2 + kept * (number + 1)
        return altered(reply, reserved_bytes=reserved_bytes, alloc_retries=retries)

    return NotedDevice(
        alter,
        bytes_of=need,
        seconds_of=lambda shape: slower * seconds(shape),
        limit_bytes=limit_bytes,
        base_bytes=BASE_BYTES,
        leak_bytes=leak_bytes,
        fault=fault,
    )


def made_config(
    boundaries,
    sizes,
    *,
    multiple_of=None,
    **changes,
):
    table = {
        "max_batch_size": max(sizes),
        "num_buckets": len(sizes),
        "bucket_boundaries": boundaries,
        "bucket_batch_sizes": sizes,
    }
    made = sampler_config(made_sweep(timed=False))
    evidence = replace(made.evidence, multiple_of=multiple_of)
    given = {"unit": None, "max_batch_length": 900.0, "evidence": evidence}
    return replace(made, **{**given, **table, **changes})


def made_probe(lengths, *, timed=True):
    """What a probe of the made device finds."""
    time = CostModel(
        floor=0,
        constant=CONSTANT_SECONDS,
        linear=SECONDS_PER_CELL,
        quadratic=0,
        relative_error=0,
    )
    return replace(
        report_records.made_probe(),
        lengths=lengths.summary(),
        workload=WorkloadRecord(spec="made.py:Made", options={}),
        device=made_stepper().device,
        trials=[_trial(index, shape) for index, shape in enumerate(_TRIED)]
        if timed
        else [],
        models=Models(peak_bytes=None, step_seconds=time if timed else None),
    )


_TRIED = [
    BatchShape(size, length) for length in (1.0, 5.0, 10.0) for size in (1, 10, 80)
]


def _trial(index, shape):
    return made_trial(
        shape, index=index, steps=3, step_seconds=seconds(shape), peak_bytes=need(shape)
    )
