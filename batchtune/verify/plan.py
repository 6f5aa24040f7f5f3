"""Plans a verification: the workload and limit that were probed, the sampler, and its batches."""

from __future__ import annotations

import itertools
import json
import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from batchtune.epochs import batch_order
from batchtune.epochs.batch_order import EpochShapes
from batchtune.epochs.batchers import Batcher, Batching
from batchtune.epochs.cost_model import predict
from batchtune.epochs.layout import Dealing
from batchtune.epochs.table import BucketTable
from batchtune.errors import ResultError, UsageError
from batchtune.lengths import IntArray, Lengths
from batchtune.probe.journal import workload_sha256
from batchtune.probe.settings import ProbeSettings
from batchtune.results import (
    PROBE_FILE,
    RUN_FILE,
    SAMPLER_FILE,
    STREAM_CONFIG_FILE,
    CostModel,
    Probe,
    ProbedWith,
    Run,
    SamplerConfig,
    StreamConfig,
    WorkloadRecord,
    read_result,
)
from batchtune.shapes import BatchShape
from batchtune.streams.simulated import StoredStream, stream_epoch
from batchtune.units import format_length, format_size
from batchtune.workloads import is_builtin, with_unit

DEFAULT_STEPS = 200
_OF_THE_LIMIT = ("memory_bytes", "memory_fraction", "reserve_bytes", "ddp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The training step to verify, and how it differs from the probed one; without a limit the settings give it."""

    settings: ProbeSettings
    limit_bytes: int | None
    notes: tuple[str, ...]


def subject_of(lengths: Lengths, probe: Probe | None, asked: Mapping[str, Any], folder: Path) -> Subject:
    """Return what was probed, with the `ProbeSettings` fields that the user `asked` for in place of the probe's.

    Without a workload among them, the probe's is taken if it is built in. Raises UsageError if the user has to name the
    workload or its options, or if a value is out of range.
    """
    workload = _workload(None if probe is None else probe.workload, asked, folder)
    options = with_unit(workload.spec, workload.options, lengths.unit)
    if probe is None:
        recorded = ProbedWith()
    else:
        recorded = msgspec.convert(probe.settings, ProbedWith)
    named = {**msgspec.structs.asdict(recorded), **asked, "workload": workload.spec, "options": options}
    settings = ProbeSettings(**named)
    if probe is None:
        return Subject(settings=settings, limit_bytes=None, notes=())
    same_limit = all(getattr(settings, name) == getattr(recorded, name) for name in _OF_THE_LIMIT)
    limit = probe.device.limit_bytes if same_limit else None
    return Subject(settings=settings, limit_bytes=limit, notes=tuple(_notes(probe, settings, limit, folder)))


def _workload(probed: WorkloadRecord | None, asked: Mapping[str, Any], folder: Path) -> WorkloadRecord:
    """Return the workload to run, named by the user; only a built-in and its options may come from the record.

    Anything else in the record could be made to run any code, and so could options, such as a file to load.
    """
    spec = asked.get("workload")
    options = asked.get("options")
    if spec is None:
        if probed is None:
            raise UsageError(
                f"no training step to verify: {folder} holds no {PROBE_FILE}",
                "Name the one that you will train with --workload, such as --workload train.py:MyStep.",
            )
        spec = probed.spec
        if not is_builtin(spec):
            raise UsageError(
                f"{folder / PROBE_FILE} says that {shlex.quote(spec)} was probed, and batchtune runs no code that "
                "only a file names",
                "If that is your training step, name it yourself: "
                f"--workload {shlex.quote(spec)}{_as_flags(options or probed.options)}",
            )
    if options is not None:
        return WorkloadRecord(spec=spec, options=options)
    if probed is None or spec != probed.spec or not probed.options:
        return WorkloadRecord(spec=spec, options={})
    if not is_builtin(spec):
        raise UsageError(
            f"{folder / PROBE_FILE} says that {spec} was probed with options, and batchtune passes none to your code "
            "that only a file names",
            f"Name them yourself:{_as_flags(probed.options)}",
        )
    return probed


def _as_flags(options: Mapping[str, Any]) -> str:
    """Return options as they are given on the command line, quoted for the shell: ` --set layers=12`."""

    def word(value: Any) -> str:
        if isinstance(value, str):
            return value
        if value is None:
            return "none"
        return json.dumps(value)

    return "".join(f" --set {shlex.quote(f'{key}={word(value)}')}" for key, value in options.items())


def _notes(probe: Probe, settings: ProbeSettings, limit_bytes: int | None, folder: Path) -> Iterator[str]:
    now = WorkloadRecord(spec=settings.workload, options=settings.options)
    file = settings.workload.rpartition(":")[0]
    if now != probe.workload:
        yield (
            f"Warning: this verifies the workload {now.words}, but {probe.workload.words} was probed: batch sizes and "
            "times are the other's. If this is the one you train, probe again with --force."
        )
    elif (folder / RUN_FILE).exists():
        was = read_result(folder / RUN_FILE, Run).workload_sha256
        now_is = workload_sha256(settings)
        if was is not None and now_is is None:
            yield (
                f"Warning: {file} is not here. Run this in the folder in which the probe was run, or name the workload "
                "with --workload."
            )
        elif was != now_is:
            yield (
                f"Warning: {file} has changed since it was probed. If the verification fails, probe again with --force."
            )
    if limit_bytes is None:
        yield (
            f"Warning: the memory settings differ from the probe's (a limit of "
            f"{format_size(probe.device.limit_bytes)}): this verifies that the batches fit into the new limit."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySettings:
    """How much to run, and how closely to look; UsageError if a value is out of range.

    Attributes:
        steps: Number of shuffled steps, which may be more than an epoch has; None: one epoch.
        time_tolerance: The largest deviation of the measured time from the estimate, as a fraction of it.
    """

    steps: int | None = DEFAULT_STEPS
    seed: int = 0
    time_tolerance: float = 0.10
    step_timeout_seconds: float = 300.0

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise UsageError(f"the number of steps must be at least 1, got {self.steps}")
        if self.seed < 0:
            raise UsageError(f"the seed of the shuffles must be at least 0, got {self.seed}")
        if not 0 < self.time_tolerance < math.inf:
            raise UsageError(f"the time tolerance must be positive and finite, got {self.time_tolerance}")
        if not self.step_timeout_seconds > 0:
            raise UsageError(f"the time limit of a step must be positive, got {self.step_timeout_seconds}")


class PlannedBatch(NamedTuple):
    """A batch to run, and its bucket."""

    shape: BatchShape
    bucket: int


@dataclass(frozen=True, kw_only=True)
class VerifyPlan:
    """The sampler to verify, how much to run, and the probe to compare with; or, with a `stream`, its `stream.yaml`.

    Raises ResultError if the last boundary is below the longest length, or `drop_last` leaves out every batch.
    """

    lengths: Lengths
    config: SamplerConfig | StreamConfig
    settings: VerifySettings
    probe: Probe | None = None
    stream: StoredStream | None = None

    def __post_init__(self) -> None:
        lengths = self.padded
        last = self.config.bucket_boundaries[-1]
        if beyond := int(np.count_nonzero(lengths.values > last)):
            raise ResultError(
                f"the last of the bucket_boundaries is {format_length(last, lengths.unit)}, but {beyond:,} of "
                f"{lengths.count:,} examples are longer, up to {format_length(lengths.longest, lengths.unit)}",
                "Add a boundary that is at least as large, or leave out the longer ones with --max-length.",
            )
        if not len(self.first_epoch):
            group = "bucket" if self.batching.pool_size is None else "pool"
            file = SAMPLER_FILE
            if self.stream is not None:
                group = "worker"
                file = STREAM_CONFIG_FILE
            raise ResultError(
                f"drop_last leaves out every batch: no {group} holds enough examples to fill one",
                f"Set drop_last: false in {file}, or make the batch sizes smaller.",
            )

    @cached_property
    def table(self) -> BucketTable:
        """The sampler's table."""
        return BucketTable.of(self.config.bucket_boundaries, self.config.bucket_batch_sizes)

    @property
    def batching(self) -> Batching:
        """How the sampler makes batches; as in pools, those of a stream may hold examples of shorter buckets."""
        if isinstance(self.config, StreamConfig):
            return Batching(self.table, self.config.buffer_size)
        return Batching(self.table, self.config.pool_size, self.config.batch_overhead)

    @cached_property
    def padded(self) -> Lengths:
        """The lengths as batches are padded to them."""
        multiple = self.config.evidence.multiple_of
        if multiple is None:
            return self.lengths
        return self.lengths.padded_to(multiple)

    @cached_property
    def counts(self) -> IntArray:
        """Shape (buckets,): how many examples each bucket holds."""
        return self.table.counts(self.padded.histogram)

    @cached_property
    def first_epoch(self) -> EpochShapes:
        """The shapes of the first epoch's batches."""
        return self._epoch_shapes(0)

    def _epoch_shapes(self, epoch: int) -> EpochShapes:
        if isinstance(self.config, StreamConfig):
            assert self.stream is not None
            return stream_epoch(self.stream, self.config, epoch)
        drawing = batch_order.Drawing(ordering=self.config.batch_ordering, seed=self.settings.seed + epoch)
        cut = self._batcher.cut(drawing, Dealing(drop_last=self.config.drop_last))
        return batch_order.simulate(cut, drawing, self.padded.values, self.padded.targets)

    @cached_property
    def _batcher(self) -> Batcher:
        return self.batching.batcher(self.padded.values)

    def worst_batches(self, memory: CostModel | None = None) -> list[PlannedBatch]:
        """Return the largest batch of each bucket that these data can form, the one that needs most memory first.

        It has the longest length and the longest target in the bucket, which may belong to two examples: if batches
        hold a single one, both are tried. Without a model of `memory`, the padded length decides.
        """
        lengths = self.padded.values
        targets = self.padded.targets
        sizes, longest = self.batching.largest_batches(self.padded.histogram)
        worst = []
        for bucket, size, length in zip(
            self.table.assign(longest).tolist(), sizes.tolist(), longest.tolist(), strict=True
        ):
            if targets is None:
                shapes = [BatchShape(size, length)]
            else:
                start = lengths.size - int(np.searchsorted(lengths[::-1], length, side="right"))  # the values descend
                end = start + int(self.counts[bucket])
                if self.batching.pool_size is not None and size > 1:
                    end = lengths.size  # its others may be shorter than those of the bucket
                longest_target = start + int(targets[start:end].argmax())
                pairs = [(start, longest_target)]
                if size == 1:
                    pairs = [(start, start), (longest_target, longest_target)]
                shapes = [
                    BatchShape(size, float(lengths[longest_example]), float(targets[other]))
                    for longest_example, other in pairs
                ]
            worst += [PlannedBatch(shape, bucket) for shape in dict.fromkeys(shapes)]

        def need(batch: PlannedBatch) -> float:
            shape = batch.shape
            if memory is None:
                return shape.padded_length
            return float(predict(memory, shape.batch_size, shape.length, shape.target_length))

        return sorted(worst, key=need, reverse=True)

    def shuffled_batches(self) -> Iterator[PlannedBatch]:
        """Yield epoch after epoch of batches, as the sampler draws them with seed, seed + 1 and so on.

        Of a stream, all ranks' batches come in turn, as each rank's workers deliver theirs.
        """
        for epoch in itertools.count():
            shapes = self._epoch_shapes(epoch) if epoch else self.first_epoch
            if shapes.targets is None:
                targets = itertools.repeat(None)
            else:
                targets = shapes.targets.tolist()
            columns = (shapes.batch_sizes.tolist(), shapes.lengths.tolist(), targets, shapes.buckets.tolist())
            for size, length, target, bucket in zip(*columns, strict=False):
                yield PlannedBatch(BatchShape(size, length, target), bucket)
