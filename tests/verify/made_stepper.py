"""A made device for verifications: it holds a known number of cells, and goes wrong on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

import msgspec
import numpy as np
from made_trials import made_trial, ran

from batchtune.lengths import Lengths
from batchtune.probe.requests import Ran
from batchtune.results import (
    BatchShape,
    CostModel,
    Device,
    FrontierPoint,
    Meta,
    Models,
    Probe,
    SamplerConfig,
    SamplerEvidence,
    Trial,
    WorkloadRecord,
)
from batchtune.verify.plan import PlannedBatch, VerifyPlan

MIB = 1 << 20
BASE_BYTES = 100 * MIB
LIMIT_BYTES = 1000 * MIB
SECONDS_PER_CELL = 1e-4
CONSTANT_SECONDS = 0.01


def made_device(**changes: object) -> Device:
    made: dict[str, object] = {
        "kind": "cuda",
        "name": "made",
        "total_bytes": 2 * LIMIT_BYTES,
        "limit_bytes": LIMIT_BYTES,
        "driver": None,
        "torch": "2.13.0",
        "allocator": "native",
        "other_processes": 0,
    }
    return Device(**{**made, **changes})  # type: ignore[arg-type]


def cells(shape: BatchShape) -> float:
    return shape.padded_length + shape.batch_size * (shape.target_length or 0.0)


def need(shape: BatchShape) -> int:
    """One MiB a cell over a base."""
    return BASE_BYTES + int(cells(shape) * MIB)


def seconds(shape: BatchShape) -> float:
    return CONSTANT_SECONDS + SECONDS_PER_CELL * shape.padded_length


def epoch(plan: VerifyPlan, number: int = 0) -> list[PlannedBatch]:
    batches = len(plan.first_epoch)
    return list(
        islice(plan.shuffled_batches(), number * batches, (number + 1) * batches)
    )


def check_worst_batches(plan: VerifyPlan) -> None:
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


@dataclass
class MadeStepper:
    """Runs steps that take what `need` and `seconds` say.

    Attributes:
        limit_bytes: More runs out of memory.
        slower: Every step takes so many times longer.
        leak_bytes: In use between steps, more with each.
        cache_bytes: Held by the allocator, more with each step.
        retries: Of every step.
        fails: What a step does instead, or None; told the shape and the number of steps so far in this worker.
        starts: How many steps had run before each start.
    """

    limit_bytes: int = LIMIT_BYTES
    device: Device = field(default_factory=made_device)
    slower: float = 1.0
    leak_bytes: int = 0
    cache_bytes: int = 0
    retries: int = 0
    fails: Callable[[BatchShape, int], Ran | None] = lambda shape, step: None
    workers: int = 0
    steps: int = 0
    shapes: list[BatchShape] = field(default_factory=list)
    released: list[bool] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    def start(self) -> Device:
        self.workers += 1
        self.starts.append(len(self.shapes))
        self.steps = 0
        return self.device

    def step(self, shape: BatchShape, *, release: bool = False) -> Ran:
        self.shapes.append(shape)
        self.released.append(release)
        self.steps += 1
        failed = self.fails(shape, self.steps)
        if failed is not None:
            return failed
        kept = self.leak_bytes * self.steps
        peak = need(shape) + kept
        if peak > self.limit_bytes:
            return ran(shape, "oom", error="CUDA out of memory")
        return ran(
            shape,
            step_seconds=seconds(shape) * self.slower,
            peak_bytes=peak,
            reserved_bytes=LIMIT_BYTES // 2 + kept + self.cache_bytes * self.steps,
            rest_bytes=BASE_BYTES + kept,
            alloc_retries=self.retries,
        )


def made_config(
    boundaries: list[float],
    sizes: list[int],
    *,
    multiple_of: float | None = None,
    **changes: object,
) -> SamplerConfig:
    made = SamplerConfig(
        format=SamplerConfig.FORMAT,
        version=SamplerConfig.VERSION,
        unit=None,
        max_batch_length=900.0,
        max_batch_size=max(sizes),
        num_buckets=len(sizes),
        bucket_boundaries=boundaries,
        bucket_batch_sizes=sizes,
        shuffle=True,
        batch_ordering="random",
        drop_last=False,
        seed=0,
        evidence=SamplerEvidence(
            fingerprint="0" * 64,
            device=None,
            batches=1,
            padding_ratio=0.0,
            estimated_epoch_seconds=None,
            multiple_of=multiple_of,
        ),
    )
    return msgspec.structs.replace(made, **changes)


def made_probe(lengths: Lengths, *, timed: bool = True) -> Probe:
    """What a probe of the made device finds: 900 cells at every length."""
    points = [
        FrontierPoint(
            length=length,
            target_length=None,
            batch_size=int(900 / length),
            closed_by="memory",
            oom_batch_size=None,
            step_seconds=None,
            peak_bytes=None,
        )
        for length in (lengths.shortest, lengths.longest)
    ]
    time = CostModel(
        floor=0,
        constant=CONSTANT_SECONDS,
        linear=SECONDS_PER_CELL,
        quadratic=0,
        relative_error=0,
    )
    return Probe(
        meta=Meta(format="batchtune/probe", version=1, batchtune="0"),
        lengths=lengths.summary(),
        workload=WorkloadRecord(spec="made.py:Made", options={}),
        device=made_device(),
        settings={
            "device": "auto",
            "memory_bytes": None,
            "memory_fraction": 0.9,
            "seed": 0,
        },
        trials=[_trial(index, shape) for index, shape in enumerate(_TRIED)]
        if timed
        else [],
        frontier=points,
        models=Models(
            peak_bytes=CostModel(
                floor=0, constant=BASE_BYTES, linear=MIB, quadratic=0, relative_error=0
            ),
            step_seconds=time if timed else None,
        ),
        max_batch_length=900.0,
    )


_TRIED = [
    BatchShape(size, length) for length in (1.0, 5.0, 10.0) for size in (1, 10, 80)
]


def _trial(index: int, shape: BatchShape) -> Trial:
    return made_trial(
        shape, index=index, steps=3, step_seconds=seconds(shape), peak_bytes=need(shape)
    )
