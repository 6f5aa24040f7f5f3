"""The device that was measured, what was learned of a script that used it, and the base of files that hold both."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from batchtune.allocators import NATIVE, setting_for
from batchtune.records import (
    Amount,
    ByteChange,
    Bytes,
    Count,
    Length,
    LengthsSummary,
    Positive,
    Record,
    Share,
    Size,
    TargetLength,
)
from batchtune.results.shared import BatchShape, Result, WorkloadRecord
from batchtune.units import counted

EQUAL_TWINS = 0.02
"""Made batches prove nothing if they allocate less than the script's own by more than this share."""
WRONG_TWINS = 0.05
"""Nor if they differ by more than this share; then a probe continues only with force."""

SAME_GRADIENT = 0.01
"""Gradients of a step are the same if they differ by at most this share: half precision rounds to 0.4%."""


class Twin(Record, frozen=True, kw_only=True):
    """A batch of a script's own, and one made with the same shape: what a step with each allocated at its peak."""

    batch_size: Size
    length: Length
    target_length: TargetLength | None
    own_bytes: Bytes
    made_bytes: Bytes
    sequences: tuple[Size, ...] | None = None

    @property
    def shape(self) -> BatchShape:
        """The shape of both."""
        return BatchShape(
            self.batch_size, self.length, self.target_length, self.sequences
        )

    @property
    def difference(self) -> float:
        """How much more the made one allocates, relative to the script's own; 0 within 1 MiB, which heaps vary by."""
        more = self.made_bytes - self.own_bytes
        if abs(more) <= 1 << 20:
            return 0.0
        return more / max(1, self.own_bytes)


class OwnBatches(Record, frozen=True, kw_only=True):
    """The batches of an epoch as a training makes them now: those of its own batch sampler, or recorded ones.

    Attributes:
        sampler: The name of its class; `a recorded training` if it was not watched itself.
        ranks: Number of ranks; each counts with as many batches as the first one makes.
        batches, padded_length: Of all ranks, for as many examples as the data has.
        shapes: Of all batches, or of some that stand for them: evenly spaced in the order of their padded lengths.
        mates_again, effective_buckets: As for a row of a sweep.
    """

    sampler: str
    ranks: Size
    batches: Size
    padded_length: Positive
    shapes: Annotated[list[BatchShape], msgspec.Meta(min_length=1)]
    mates_again: Share | None = None
    effective_buckets: Amount | None = None


class StepGradient(Record, frozen=True, kw_only=True):
    """How the gradient of one optimizer step depends on the micro-batches that its examples are cut into.

    Differences are relative: the norm of the difference of two gradients / the norm of the first, as the optimizers get
    them, with dropout off. None: not measured, for the reason in `unknown`, or because the differences before say
    enough.

    Attributes:
        again: Between the script's own micro-batches and the same ones in reverse order: rounding and chance.
        any_counts: Between the script's own micro-batches and ones of similar lengths.
        equal_counts: Between the script's own micro-batches and ones of equally many examples.
        mates: The part of a micro-batch's gradient that no weighted mean of its halves' gradients gives: 0, unless the
            loss depends on which examples share a micro-batch.
        batch_norm: Modules that normalise over a micro-batch, by kind: `3 × BatchNorm1d`.
    """

    unknown: str | None = None
    again: Amount | None = None
    any_counts: Amount | None = None
    equal_counts: Amount | None = None
    mates: Amount | None = None
    batch_norm: list[str] = msgspec.field(default_factory=list)

    def of_cut(self, *, equal_counts: bool) -> float | None:
        """Return the difference to micro-batches of the same number of examples, or of any; None if unknown."""
        if equal_counts and self.equal_counts is not None:
            return self.equal_counts
        return self.any_counts

    @property
    def is_random(self) -> bool:
        """Whether the same micro-batches give another gradient each time."""
        return (self.again or 0.0) > SAME_GRADIENT


class Script(Record, frozen=True, kw_only=True):
    """What was learned of a training script and of its batches.

    Attributes:
        batches: A line for each part of a batch: `sig: [B, 16000·L] float32`.
        loader: The class of the data set and its number of examples, as text.
        per_unit: Size of the batch's length axis for one unit of the manifest.
        target_per_unit: The same for targets; None without them.
        offset, target_offset: What each axis has in addition, such as 1 for an end token.
        accumulation: How many batches an optimizer step trains on; on average, if `steps_vary`.
        look_ahead: How many batches the loop fetches before it trains on them.
        twins: Peaks of its own batches and of made ones; empty if they were compared earlier.
        packed: Whether its batches are packed: rows of sequences without padding.
        batch_size: Of its own batches, on each rank; None unless they are drawn at random, all of one size. The order
            of a stream is assumed to be random.
        own_batches: In other cases, what its own batch sampler makes, if the manifest's rows are its examples.
        gradient: How its loss depends on the cut of a step; None where a step is one batch, or if measured earlier.
        optimizers: The classes of those that have stepped.
        steps_vary: Whether steps train on different numbers of batches, because they end by time, tokens or loss.
    """

    batches: list[str]
    loader: str
    per_unit: float
    target_per_unit: float | None
    accumulation: Size
    look_ahead: Count
    offset: int = 0
    target_offset: int = 0
    twins: list[Twin] = msgspec.field(default_factory=list)
    packed: bool = False
    batch_size: Size | None = None
    own_batches: OwnBatches | None = None
    gradient: StepGradient | None = None
    optimizers: list[str] = msgspec.field(default_factory=list)
    steps_vary: bool = False

    @property
    def why_unproven(self) -> str | None:
        """Why no measured size is proven, if the script's own batches take other memory than made ones."""
        for twin in self.twins:
            if not -EQUAL_TWINS <= twin.difference <= WRONG_TWINS:
                return (
                    f"a batch of {twin.shape} that was measured allocates {twin.difference:+.1%} compared with the "
                    "script's own, so training may run out of memory where the probe did not"
                )
        return None


class DeviceProcess(Record, frozen=True, kw_only=True):
    """A process that uses a device; None for what the driver does not report."""

    pid: Count
    used_bytes: Bytes | None


class RankDevice(Record, frozen=True, kw_only=True):
    """The device of one of several ranks.

    Attributes:
        limit_bytes: What this rank could use; the smallest of all ranks is enforced on all.
        outside_bytes: As that of `Device`, NCCL's buffers included: a step has run before.
        base_bytes: In use before any trial: parameters, gradients and the optimizer's state, or this rank's share.
    """

    rank: Count
    host: str
    name: str
    limit_bytes: Bytes
    outside_bytes: ByteChange | None
    base_bytes: Bytes


class Device(Record, frozen=True, kw_only=True):
    """The device that was measured, and the limit enforced on it. None: the system can't tell.

    Attributes:
        limit_bytes: Available to the workload, after all that is kept free.
        other_processes: How many other processes used the device at the start.
        processes: Those, each with its memory.
        uuid: Of the GPU or the MIG instance.
        free_bytes: Of the device, before this process used it.
        mig: Whether it is a part of a GPU (Multi-Instance GPU).
        ecc: Whether its memory corrects errors, which takes some of it.
        outside_bytes: Held by this process outside torch's allocator: the context, the libraries' workspaces.
        reserve_bytes: Kept free at the user's request, or for NCCL if ranks are simulated.
        ddp_bytes: Kept free for the gradient buckets of DistributedDataParallel.
        allocator: How torch took the memory: `native`, `expandable` (segments), or the name of another backend. None
            where there is no choice.
        allocator_settings: The user's other settings for it, as PYTORCH_ALLOC_CONF holds them; empty without any.
        allocator_problem: Why expandable segments, though wanted, are not used.
        settings: Name → value of environment variables, TF32, cudnn.benchmark, deterministic algorithms and whatever
            else affects memory and time, after the workload's setup.
        processors: Available to the worker; None on a GPU, as are the next two.
        load_average: Of the last minute, before the workload was built.
        other_processors: Processors used by other programs while the workload was built, on average.
        script: What was learned of the training script that used it; None for a workload.
        ranks: Of a training on several ranks, each one's device. The other fields then hold the worst of any rank.
        world_size, nnodes: How many ranks trained together, and on how many machines.
        backend: Of their process group, such as `nccl`; None without one.
        simulated: Whether one process stood for all ranks, under a process group that communicates nothing.
    """

    kind: str
    name: str
    total_bytes: Bytes
    limit_bytes: Bytes
    driver: str | None
    torch: str
    allocator: str | None
    other_processes: Count | None
    processes: list[DeviceProcess] | None = None
    uuid: str | None = None
    free_bytes: Bytes | None = None
    mig: bool | None = None
    ecc: bool | None = None
    outside_bytes: ByteChange | None = None
    reserve_bytes: Bytes = 0
    ddp_bytes: Bytes = 0
    allocator_settings: str = ""
    allocator_problem: str | None = None
    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    processors: Count | None = None
    load_average: Amount | None = None
    other_processors: Amount | None = None
    script: Script | None = None
    ranks: list[RankDevice] = msgspec.field(default_factory=list)
    world_size: Size = 1
    nnodes: Size = 1
    backend: str | None = None
    simulated: bool = False

    @property
    def allocator_setting(self) -> str:
        """The setting for training to take memory as the probe did, `NAME=VALUE`; empty if that is torch's default."""
        if self.allocator in (None, NATIVE):
            return ""
        return setting_for(
            str(self.allocator),
            self.torch,
            {"PYTORCH_ALLOC_CONF": self.allocator_settings},
        )

    @property
    def training_notes(self) -> list[str]:
        """What training needs to take memory as the probe did: sentences without a full stop; empty by default."""
        if not self.allocator_setting:
            return []
        return [
            f"Train with {self.allocator_setting}, as it was measured: without it, batches that fit may run out of "
            "memory"
        ]

    @property
    def whose(self) -> str:
        """Continue what holds for this device: ` for each of 8 ranks`; empty without ranks."""
        return f" for each of {self._ranks_in_words}" if self._has_ranks else ""

    @property
    def text(self) -> str:
        """The device's name, and how many ranks trained together: `NVIDIA H100, 16 ranks on 2 machines`."""
        return f"{self.name}, {self._ranks_in_words}" if self._has_ranks else self.name

    @property
    def accumulation(self) -> int:
        """How many batches a step of a trial trains on: those of an optimizer step of an unchanged script; else one."""
        if self.script is None:
            return 1
        return self.script.accumulation

    @property
    def fragments(self) -> bool:
        """Whether freed memory stays in segments that another shape may not fit into: CUDA's native allocator."""
        return self.kind == "cuda" and self.allocator == "native"

    @property
    def _has_ranks(self) -> bool:
        return self.simulated or bool(self.ranks)

    @property
    def _ranks_in_words(self) -> str:
        words = counted(self.world_size, "rank")
        if self.nnodes > 1:
            words += f" on {counted(self.nnodes, 'machine')}"
        return f"{words} (simulated)" if self.simulated else words


class Measured(Result, frozen=True, kw_only=True):
    """Base of the files that hold measurements of a workload on a device."""

    lengths: LengthsSummary
    workload: WorkloadRecord
    device: Device
    settings: dict[str, Any]
