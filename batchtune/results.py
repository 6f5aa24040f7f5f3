"""The result files: typed records and their versioned JSON.

A run folder holds `run.json` (what the trials were measured for), `trials.jsonl`, `probe.json`, `sweep.json` and
`sampler.yaml`. Units are in the names; what is unknown is None (`null`), never 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import msgspec

from batchtune.errors import ResultError
from batchtune.files import write_whole

RUN_FILE = "run.json"
TRIALS_FILE = "trials.jsonl"
PROBE_FILE = "probe.json"
SWEEP_FILE = "sweep.json"
SAMPLER_FILE = "sampler.yaml"

Outcome = Literal["ok", "oom", "timeout", "crash", "error"]
ClosedBy = Literal["oom", "memory", "data", "timeout", "crash"]
Sizing = Literal["length", "frontier"]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the records: frozen, named fields."""


class Meta(Record, frozen=True, kw_only=True):
    """What a result file is."""

    format: str
    version: int
    batchtune: str


class LengthsSummary(Record, frozen=True, kw_only=True):
    """The data set that a result is about."""

    count: int
    total: float
    min: float
    max: float
    unit: str | None
    fingerprint: str


class Trial(Record, frozen=True, kw_only=True):
    """One batch shape measured on the device.

    Attributes:
        index: Position in `trials.jsonl`, from 0.
        outcome: `ok`, or why not.
        steps: Training steps that were run to their end.
        step_seconds: Median time of the measured steps (the first is a warm-up).
        peak_bytes: Most memory in use during the trial.
        reserved_bytes: Most memory held by the allocator, its cache included.
        alloc_retries: How often the allocator had to empty its cache to go on.
        error: The error's message where the outcome is not `ok`.
        elapsed_seconds: Wall time of the trial, batch making and worker start included.
    """

    index: int
    batch_size: int
    length: float
    target_length: float | None
    outcome: Outcome
    steps: int
    step_seconds: float | None
    peak_bytes: int | None
    reserved_bytes: int | None
    alloc_retries: int | None
    error: str | None
    elapsed_seconds: float


class WorkloadRecord(Record, frozen=True, kw_only=True):
    """The training step that was measured."""

    spec: str
    options: dict[str, Any]


class Device(Record, frozen=True, kw_only=True):
    """The device that was measured, and the limit that was enforced on it."""

    kind: str
    name: str
    total_bytes: int
    limit_bytes: int
    driver: str | None
    torch: str
    allocator: str
    other_processes: int | None


class FrontierPoint(Record, frozen=True, kw_only=True):
    """The largest batch size that fits at one length.

    Attributes:
        closed_by: What ends it: `oom` (one step more was seen to run out), `memory` (the measured peak leaves
            less room than one step more needs, by the fit), `data` (the data can't fill more), or `timeout` and
            `crash` (one step more failed so, twice).
        oom_batch_size: The smallest batch size that was seen to run out; None unless one was.
    """

    length: float
    target_length: float | None
    batch_size: int
    closed_by: ClosedBy
    oom_batch_size: int | None
    step_seconds: float | None
    peak_bytes: int | None


class CostModel(Record, frozen=True, kw_only=True):
    """cost = max(floor, constant + linear·B·L + quadratic·B·L²) for batch size B and length L.

    Attributes:
        relative_error: Root mean square of (fit / measured - 1) over the trials it was fitted to.
    """

    floor: float
    constant: float
    linear: float
    quadratic: float
    relative_error: float


class Models(Record, frozen=True, kw_only=True):
    """The fitted models; None where there were too few measurements."""

    peak_bytes: CostModel | None
    step_seconds: CostModel | None


class Result(Record, frozen=True, kw_only=True):
    """Base of the files: `meta` comes first; FORMAT and VERSION say what it must hold."""

    FORMAT: ClassVar[str]
    VERSION: ClassVar[int] = 1

    meta: Meta


class Run(Result, frozen=True, kw_only=True):
    """What a run folder's trials were measured for: they count only where all of this is the same.

    Attributes:
        workload_sha256: Of the workload's file; None where it is no file. A change is told, but does not undo the
            trials: it may have been a comment, or the mending of what stopped the probe.
    """

    FORMAT: ClassVar[str] = "batchtune/run"

    lengths: LengthsSummary
    workload: WorkloadRecord
    device: Device
    settings: dict[str, Any]
    workload_sha256: str | None = None


class Probe(Result, frozen=True, kw_only=True):
    """`probe.json`: what fits, and what a batch costs."""

    FORMAT: ClassVar[str] = "batchtune/probe"

    lengths: LengthsSummary
    workload: WorkloadRecord
    device: Device
    settings: dict[str, Any]
    trials: list[Trial]
    frontier: list[FrontierPoint]
    models: Models
    max_batch_length: float


class Row(Record, frozen=True, kw_only=True):
    """One bucket table of a sweep and what one epoch with it costs.

    Attributes:
        num_buckets: What was asked for; used_buckets: how many hold an example.
        boundaries, batch_sizes: The table, one entry a bucket; the boundary is an inclusive upper edge.
        batches: Batches of one epoch, `drop_last` off.
        padded_length: Cells of the epoch's batches, expected over shuffles.
        padding_ratio: Padded cells / all cells.
        fill: True length / (batches × max_batch_length).
        largest_padded_length: Of any batch that this table can form on these data.
        effective_buckets: 1 / Σ p², p the share of the examples in each bucket.
    """

    strategy: str
    sizing: Sizing
    num_buckets: int
    used_buckets: int
    boundaries: list[float]
    batch_sizes: list[int]
    batches: int
    padded_length: float
    padding_ratio: float
    fill: float
    mean_batch_size: float
    largest_padded_length: float
    effective_buckets: float
    estimated_epoch_seconds: float | None


class Baseline(Record, frozen=True, kw_only=True):
    """A fixed batch size, the largest that fits the longest examples."""

    name: str
    batch_size: int
    batches: int
    padded_length: float
    padding_ratio: float
    estimated_epoch_seconds: float | None


class LowerBound(Record, frozen=True, kw_only=True):
    """What no bucket table can beat."""

    batches: int
    padded_length: float
    estimated_epoch_seconds: float | None


class Sweep(Result, frozen=True, kw_only=True):
    """`sweep.json`: the bucket tables compared."""

    FORMAT: ClassVar[str] = "batchtune/sweep"

    lengths: LengthsSummary
    max_batch_length: float
    settings: dict[str, Any]
    device_name: str | None
    rows: list[Row]
    baselines: list[Baseline]
    lower_bound: LowerBound
    recommended: int | None
    reason: str
    warnings: list[str]

    @property
    def recommended_row(self) -> Row | None:
        """The recommended row, or None where no row beats the baseline."""
        return None if self.recommended is None else self.rows[self.recommended]


class Percentiles(Record, frozen=True, kw_only=True):
    """How long examples are: percentiles 0, 50, 95, 99, 99.9 and 100 by nearest rank: each one occurs."""

    min: float
    median: float
    p95: float
    p99: float
    p999: float
    max: float


class HistogramBin(Record, frozen=True, kw_only=True):
    """The examples with lengths in (from, to]: `from` is an exclusive lower edge, `to` an inclusive upper one."""

    from_: float = msgspec.field(name="from")
    to: float
    count: int


class Scan(Result, frozen=True, kw_only=True):
    """What `batchtune scan` found out about a data set's lengths.

    Attributes:
        sources: Where the lengths come from, as the user named it.
        distinct: Number of different lengths.
        targets: Of the target lengths; None where there are none.
        histogram: Bins that cover all lengths, the longest first; even or log-spaced.
        left_out: Reason → number of examples that were left out.
        notes: What the reader found out.
        warnings: What looks wrong or wasteful, each with its remedy.
    """

    FORMAT: ClassVar[str] = "batchtune/scan"

    sources: list[str]
    lengths: LengthsSummary
    distinct: int
    percentiles: Percentiles
    targets: Percentiles | None
    histogram: list[HistogramBin]
    left_out: dict[str, int]
    notes: list[str]
    warnings: list[str]


R = TypeVar("R", bound=Result)


def meta_of(kind: type[Result]) -> Meta:
    """The `meta` that a newly written file of this kind carries."""
    from batchtune import __version__

    return Meta(format=kind.FORMAT, version=kind.VERSION, batchtune=__version__)


def encode(result: Result) -> bytes:
    """A result as the bytes of its file."""
    return msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"


def write_result(path: Path, result: Result) -> None:
    """Writes a result file, whole or not at all.

    Raises:
        ResultError: The file can't be written.
    """
    write_whole(path, encode(result))


class _Envelope(msgspec.Struct):
    meta: Meta


def read_result(path: Path, kind: type[R]) -> R:
    """Reads a result file and checks that it is of this kind and no newer than known.

    Raises:
        ResultError: Missing, unreadable, not of this kind, newer, or damaged; the message names the field.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ResultError(f"{path} does not exist") from None
    except OSError as error:
        raise ResultError(f"{path} can't be read: {error.strerror or error}") from error
    try:
        meta = msgspec.json.decode(data, type=_Envelope).meta
        if meta.format != kind.FORMAT:
            raise ResultError(f"{path} is a {meta.format!r} file; a {kind.FORMAT!r} file is needed here")
        if meta.version > kind.VERSION:
            raise ResultError(
                f"{path} has version {meta.version} of {meta.format!r}, written by batchtune {meta.batchtune}; "
                f"this batchtune knows versions up to {kind.VERSION}",
                "Install a newer batchtune.",
            )
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ResultError(f"{path} is damaged: {error}", "Make it anew with the command that wrote it.") from error
