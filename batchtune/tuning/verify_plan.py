"""The plan of a verification: the workload and limit that were probed, the sampler, and its batches."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from batchtune.batching import epochs
from batchtune.batching.epochs import EpochShapes, Ordering
from batchtune.batching.layout import Dealing, lay_out
from batchtune.batching.table import BucketTable
from batchtune.errors import ResultError, UsageError
from batchtune.lengths import IntArray, Lengths
from batchtune.probe.settings import ProbeSettings
from batchtune.results import PROBE_FILE, RUN_FILE, LengthsSummary, Probe, ProbedWith, Run, WorkloadRecord, read_result
from batchtune.shapes import BatchShape
from batchtune.tuning.run_folder import describe_workload, other_lengths, workload_sha256
from batchtune.units import format_length, format_size
from batchtune.workloads import is_builtin, with_unit

DEFAULT_STEPS = 200
_OF_THE_LIMIT = ("memory_bytes", "memory_fraction", "reserve_bytes", "ddp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The training step that is verified, and where.

    Attributes:
        settings: The training step, its device and memory.
        limit_bytes: The limit that was probed; None: computed from the settings.
        notes: How this differs from what was probed, as sentences.
    """

    settings: ProbeSettings
    limit_bytes: int | None
    notes: tuple[str, ...]


def check_lengths(lengths: Lengths, fingerprint: str, source: Path, theirs: LengthsSummary | None = None) -> None:
    """Raise ResultError if a result is of other lengths than these."""
    if fingerprint == lengths.fingerprint:
        return
    again = "tune again for these lengths in another folder with --run."
    if theirs is not None and theirs.fingerprint == fingerprint:
        other = other_lengths(lengths, theirs)
        same = other.remedy or "Give the same manifest with the same options. "
        raise ResultError(f"{source} is of {other.what}", f"{same}Or {again}")
    raise ResultError(
        f"{source} is of other lengths than these ({lengths.count:,} up to "
        f"{format_length(lengths.longest, lengths.unit)})",
        "Give the same manifest with the same options (--length-key, --target-key, --length-scale, --min-length, "
        f"--max-length), or {again}",
    )


def subject_of(lengths: Lengths, probe: Probe | None, asked: Mapping[str, Any], folder: Path) -> Subject:
    """Return what was probed, with the settings that the user asked for in place of the probe's.

    `asked` has the fields of `ProbeSettings` that the user gave. Without `workload`, the probe's is taken if it is
    built in.

    Raises:
        UsageError: The user has to name the workload or its options, or a value is out of range.
    """
    before = None if probe is None else _probed(probe)
    workload = _workload(before, asked, folder)
    options = with_unit(workload.spec, workload.options, lengths.unit)
    named = {**asked, "workload": workload.spec, "options": options}
    settings = ProbeSettings(**named) if before is None else msgspec.structs.replace(before, **named)
    if probe is None or before is None:
        return Subject(settings=settings, limit_bytes=None, notes=())
    same_limit = all(getattr(settings, name) == getattr(before, name) for name in _OF_THE_LIMIT)
    limit = probe.device.limit_bytes if same_limit else None
    return Subject(settings=settings, limit_bytes=limit, notes=tuple(_notes(probe, settings, limit, folder)))


def _probed(probe: Probe) -> ProbeSettings:
    """Return the settings that the probe was run with."""
    recorded = msgspec.structs.asdict(msgspec.convert(probe.settings, ProbedWith))
    return ProbeSettings(workload=probe.workload.spec, options=probe.workload.options, **recorded)


def _workload(before: ProbeSettings | None, asked: Mapping[str, Any], folder: Path) -> WorkloadRecord:
    """Return the workload to run, named by the user; a built-in and its options may come from the record.

    Anything else in the record could be made to run any code, and so could options of it, such as a file to load.

    Raises:
        UsageError: The user has to name the workload, or the options that it was probed with.
    """
    spec, options = asked.get("workload"), asked.get("options")
    if spec is None:
        if before is None:
            raise UsageError(
                f"no training step to verify: {folder} holds no {PROBE_FILE}",
                "Name the one that you will train with --workload, such as --workload train.py:MyStep.",
            )
        spec = before.workload
        if not is_builtin(spec):
            raise UsageError(
                f"{folder / PROBE_FILE} says that {shlex.quote(spec)} was probed, and batchtune runs no code that "
                "only a file names",
                "If that is your training step, name it yourself: "
                f"--workload {shlex.quote(spec)}{_as_flags(options or before.options)}",
            )
    if options is not None:
        return WorkloadRecord(spec=spec, options=options)
    if before is None or spec != before.workload or not before.options:
        return WorkloadRecord(spec=spec, options={})
    if not is_builtin(spec):
        raise UsageError(
            f"{folder / PROBE_FILE} says that {spec} was probed with options, and batchtune passes none to your code "
            "that only a file names",
            f"Name them yourself:{_as_flags(before.options)}",
        )
    return WorkloadRecord(spec=spec, options=before.options)


def _as_flags(options: Mapping[str, Any]) -> str:
    """Return options as they are given on the command line, quoted for the shell: ` --set layers=12`."""

    def word(value: Any) -> str:
        return value if isinstance(value, str) else "none" if value is None else json.dumps(value)

    return "".join(f" --set {shlex.quote(f'{key}={word(value)}')}" for key, value in options.items())


def _notes(probe: Probe, settings: ProbeSettings, limit_bytes: int | None, folder: Path) -> Iterator[str]:
    now = WorkloadRecord(spec=settings.workload, options=settings.options)
    file = settings.workload.rpartition(":")[0]
    if now != probe.workload:
        yield (
            f"Warning: this verifies the workload {describe_workload(now)}, but {describe_workload(probe.workload)} "
            "was probed: batch sizes and times are the other's. If this is the one you train, probe again with --force."
        )
    elif (folder / RUN_FILE).exists():
        was, now_is = read_result(folder / RUN_FILE, Run).workload_sha256, workload_sha256(settings)
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
class Candidate:
    """The sampler that is verified, as `sampler.yaml` describes it.

    Attributes:
        table: Boundaries and batch sizes.
        max_batch_length: The largest padded length that the sweep allowed.
        ordering: The order of an epoch's batches.
        drop_last: Whether batches that are not full are left out.
        multiple_of: Batches are padded to a multiple of it; None: to their longest example.
    """

    table: BucketTable
    max_batch_length: float
    ordering: Ordering = "random"
    drop_last: bool = False
    multiple_of: float | None = None

    def padded(self, lengths: Lengths) -> Lengths:
        """Return the lengths as batches are padded to them."""
        return lengths if self.multiple_of is None else lengths.padded_to(self.multiple_of)

    def with_sizes(self, batch_sizes: IntArray) -> Candidate:
        """Return the same sampler with other batch sizes."""
        return replace(self, table=BucketTable(self.table.boundaries, batch_sizes))


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySettings:
    """How much to run, and how closely to look; exactly one of the first three.

    Attributes:
        steps: Shuffled steps to run; may be more than an epoch has.
        minutes: Run shuffled steps for so long.
        epoch: Run one epoch.
        seed: Seed of the shuffles.
        time_tolerance: How far the measured time may be from the estimate, as a fraction of it.
        step_timeout_seconds: Time limit of one step.

    Raises:
        UsageError: A value is out of range, or not exactly one duration is set.
    """

    steps: int | None = None
    minutes: float | None = None
    epoch: bool = False
    seed: int = 0
    time_tolerance: float = 0.10
    step_timeout_seconds: float = 300.0

    def __post_init__(self) -> None:
        if (self.steps is not None) + (self.minutes is not None) + self.epoch != 1:
            raise UsageError("how long to verify is not clear", "Give one of --steps, --minutes and --epoch.")
        if self.steps is not None and self.steps < 1:
            raise UsageError(f"the number of steps must be at least 1, got {self.steps}")
        if self.minutes is not None and not 0 < self.minutes < float("inf"):
            raise UsageError(f"the number of minutes must be positive and finite, got {self.minutes}")
        if self.seed < 0:
            raise UsageError(f"the seed of the shuffles must be at least 0, got {self.seed}")
        if not 0 < self.time_tolerance < float("inf"):
            raise UsageError(f"the time tolerance must be positive and finite, got {self.time_tolerance}")
        if not self.step_timeout_seconds > 0:
            raise UsageError(f"the time limit of a step must be positive, got {self.step_timeout_seconds}")

    def recorded(self) -> dict[str, Any]:
        """Return the settings as `verify.json` holds them."""
        names = ("steps", "minutes", "epoch", "seed", "time_tolerance")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyPlan:
    """The subject of a verification, and the probe to compare it with.

    Attributes:
        lengths: The data set.
        candidate: The sampler.
        settings: How much to run.
        probe: The source of the estimates; None: there are no estimates.
    """

    lengths: Lengths
    candidate: Candidate
    settings: VerifySettings
    probe: Probe | None = None


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """A batch to run, and its bucket."""

    shape: BatchShape
    bucket: int


def check_table(lengths: Lengths, table: BucketTable) -> None:
    """Raise ResultError if examples lie beyond the last boundary: no bucket would take them."""
    last = float(table.boundaries[-1])
    beyond = int(np.count_nonzero(lengths.values > last))
    if beyond:
        raise ResultError(
            f"the last of the bucket_boundaries is {format_length(last, lengths.unit)}, but {beyond:,} of "
            f"{lengths.count:,} examples are longer, up to {format_length(lengths.longest, lengths.unit)}",
            "Add a boundary that is at least as large, or leave out the longer ones with --max-length.",
        )


def worst_batches(
    lengths: Lengths, table: BucketTable, needs: Callable[[BatchShape], float] | None = None
) -> list[PlannedBatch]:
    """Return the largest batch that each bucket can form on these data, the one that needs most memory first.

    It has as many examples as the bucket's batch size and its data allow, and the longest length and the longest
    target in the bucket, which may belong to two examples. If batches hold a single example, the one with the longest
    length and the one with the longest target are tried. `needs` returns the memory that a shape needs; without it,
    the padded length decides.
    """
    needs = needs or (lambda shape: shape.padded_length)
    # values[i] <= boundary from here on, as the values descend.
    starts = lengths.count - np.searchsorted(lengths.values[::-1], table.boundaries, side="right")
    ends = np.concatenate(([lengths.count], starts[:-1]))
    found = [
        PlannedBatch(shape, bucket)
        for bucket in range(table.num_buckets)
        if starts[bucket] < ends[bucket]
        for shape in _worst_of(lengths, slice(starts[bucket], ends[bucket]), int(table.batch_sizes[bucket]))
    ]
    return sorted(found, key=lambda planned: needs(planned.shape), reverse=True)


def _worst_of(lengths: Lengths, part: slice, batch_size: int) -> list[BatchShape]:
    size, longest = min(batch_size, int(part.stop - part.start)), float(lengths.values[part.start])
    if lengths.targets is None:
        return [BatchShape(size, longest)]
    targets = lengths.targets[part]
    if size > 1:
        return [BatchShape(size, longest, float(targets.max()))]
    at = int(targets.argmax())
    alone = [
        BatchShape(1, longest, float(targets[0])),
        BatchShape(1, float(lengths.values[part][at]), float(targets[at])),
    ]
    return list(dict.fromkeys(alone))


def shuffled_epochs(lengths: Lengths, candidate: Candidate, seed: int) -> Iterator[EpochShapes]:
    """Yield epoch after epoch of the sampler's batches; each epoch has its own shuffle, from seed + epoch.

    Raises:
        ResultError: An epoch has no batch, because `drop_last` leaves out all that are not full.
    """
    epoch = 0
    while True:
        shapes = epoch_shapes(lengths, candidate, seed + epoch)
        if not len(shapes):
            raise ResultError(
                "drop_last leaves out every batch: no bucket holds enough examples to fill one",
                "Set drop_last: false in sampler.yaml, or make the batch sizes smaller.",
            )
        yield shapes
        epoch += 1


def epoch_shapes(lengths: Lengths, candidate: Candidate, seed: int) -> EpochShapes:
    """Return the shapes of one epoch's batches, drawn as `BucketBatchSampler` draws them."""
    dealing = Dealing(drop_last=candidate.drop_last)
    grouped = epochs.group(candidate.table.assign(lengths.values), candidate.table.num_buckets)
    layout = lay_out(grouped.counts, candidate.table.batch_sizes, dealing)
    drawing = epochs.Drawing(ordering=candidate.ordering, seed=seed)
    return epochs.simulate(grouped, layout, drawing, lengths.values, lengths.targets)


def batch_of(epoch: EpochShapes, index: int) -> PlannedBatch:
    """Return one batch of an epoch."""
    target = None if epoch.targets is None else float(epoch.targets[index])
    shape = BatchShape(int(epoch.batch_sizes[index]), float(epoch.lengths[index]), target)
    return PlannedBatch(shape, int(epoch.buckets[index]))
