"""Shared by all result files: batch shapes, base records, lengths, the device and script; reading and writing."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

import msgspec

from batchtune.allocators import NATIVE, setting_for
from batchtune.errors import ResultError, UsageError, invalid_field, shortened
from batchtune.files import read_regular, write_whole
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
    option_of,
)
from batchtune.units import counted

if TYPE_CHECKING:
    from typing_extensions import Self

# Why a probe tried no larger batch: `FrontierPoint` describes them.
ClosedBy = Literal["oom", "memory", "data", "timeout", "crash", "time"]


S = TypeVar("S")

_LARGEST_BATCH = 4e18  # examples that a 64-bit integer can count


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The shape of a batch: padded, or packed.

    Attributes:
        batch_size: Number of examples, at least 1.
        length: Length of the longest example, in the manifest's unit; in a padded batch, all are padded to it. A float
            even where lengths are whole: sizes of tensors take `int(shape.length)`.
        target_length: Length of the longest target (such as the tokens of a transcript); None without targets.
        sequences: Of a packed batch, the length of each of its examples, in tokens, the longest first; they stand in
            one row without padding. None: the batch is padded.
    """

    batch_size: int
    length: float
    target_length: float | None = None
    sequences: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        if not self.length > 0:
            raise ValueError(f"length must be positive, got {self.length}")

    @classmethod
    def packed(cls, lengths: Iterable[int]) -> Self:
        """Return the shape of a packed batch of sequences with these lengths, at least one."""
        sequences = tuple(sorted(lengths, reverse=True))
        return cls(len(sequences), float(sequences[0]), sequences=sequences)

    @property
    def padded_length(self) -> float:
        """Batch size × length of the longest example; of a packed batch its tokens."""
        if self.sequences is not None:
            return float(self.tokens)
        return self.batch_size * self.length

    @property
    def tokens(self) -> int:
        """The tokens of a packed batch, Σ L."""
        return sum(self._row)

    @property
    def squared_tokens(self) -> int:
        """The sum of the squared lengths of a packed batch, Σ L²."""
        return sum(length * length for length in self._row)

    @property
    def _row(self) -> tuple[int, ...]:
        if self.sequences is None:
            raise ValueError("a padded batch has no sequences")
        return self.sequences

    def contains(self, other: BatchShape) -> bool:
        """Return whether it is at least as large in every respect, and larger in one.

        Packed batches are compared by tokens, Σ L², number of sequences and longest sequence, and never with padded
        ones.
        """
        no_less = (
            self.batch_size >= other.batch_size
            and self.length >= other.length
            and (self.target_length or 0.0) >= (other.target_length or 0.0)
        )
        if self.sequences is None or other.sequences is None:
            return no_less and self.sequences is other.sequences and self != other
        return (
            no_less
            and self.tokens >= other.tokens
            and self.squared_tokens >= other.squared_tokens
            and self != other
        )

    def __str__(self) -> str:
        if self.sequences is None:
            return f"{self.batch_size} × {self.length:g}"
        return f"{self.tokens:,} tokens in {self.batch_size:,} sequences up to {self.length:g}"


class Meta(Record):
    """The kind and version of a result file."""

    format: str
    version: int
    batchtune: str


class Result(Record):
    """Base of the files: `meta` comes first; FORMAT and VERSION say what it holds."""

    FORMAT: ClassVar[str]

    meta: Meta


class WorkloadRecord(Record):
    """The training step that was measured.

    Attributes:
        spec: As --workload takes it; for a training script that runs unchanged, its command.
        command: The words of that command; None for a workload.
    """

    spec: str
    options: dict[str, Any]
    command: list[str] | None = None

    @property
    def words(self) -> str:
        """The step for people: `train.py:MyStep layers=4`."""
        return self.spec + "".join(
            f" {key}={value}" for key, value in self.options.items()
        )


def wrong_limit(max_batch_length: float, lengths: LengthsSummary) -> Iterator[str]:
    """Yield what is wrong with a max_batch_length for these lengths."""
    if max_batch_length > _LARGEST_BATCH * lengths.min:
        yield f"max_batch_length is {max_batch_length}, for lengths from {lengths.min}"


def wrong_table(
    boundaries: Sequence[float], batch_sizes: Sequence[int]
) -> Iterator[str]:
    """Yield what is wrong with a bucket table."""
    if len(boundaries) != len(batch_sizes):
        yield f"it has {len(boundaries)} boundaries and {len(batch_sizes)} batch sizes"
    if not boundaries:
        yield "boundaries is empty"
    if any(before >= after for before, after in itertools.pairwise(boundaries)):
        yield "boundaries do not ascend"


def row_at(rows: Sequence[S], index: int | None) -> S | None:
    """Return the row at an index; None without one."""
    if index is None:
        return None
    return rows[index]


def wrong_rows(rows: Sequence[Record], **indices: int | None) -> Iterator[str]:
    """Yield what is wrong with the named indices of rows."""
    for name, index in indices.items():
        if index is not None and index >= len(rows):
            yield f"{name} is {index}, but rows are 0 to {len(rows) - 1}"


def wrong_settings(settings: dict[str, Any], kind: type[Record]) -> Iterator[str]:
    """Yield what is wrong with the settings of a probe or a sweep."""
    try:
        msgspec.convert(settings, kind)
    except msgspec.ValidationError as error:
        yield f"settings: {error}"


def checked(kind: type[S], values: Mapping[str, Any]) -> S:
    """Return a user's settings; UsageError, which names the option, for one of another type or out of range."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        field, _, problem = invalid_field(error).partition(": ")
        option = option_of(field)
        hint = f"Give another value, or leave {option} out."
        raise UsageError(f"{option}: {problem}", hint) from error


RUN_FILE = "run.json"
TRIALS_FILE = "trials.jsonl"
PROBE_FILE = "probe.json"
SWEEP_FILE = "sweep.json"
SAMPLER_FILE = "sampler.yaml"
VERIFY_FILE = "verify.json"
STREAM_FILE = "stream.json"
STREAM_CONFIG_FILE = "stream.yaml"
LOADER_FILE = "loader.json"
LOADER_CONFIG_FILE = "loader.yaml"
TRAINING_FILE = "training.jsonl"
OWN_LENGTHS_FILE = "lengths.parquet"  # of a script's own data set, in its order
RUN_FILES = (
    RUN_FILE,
    TRIALS_FILE,
    PROBE_FILE,
    SWEEP_FILE,
    SAMPLER_FILE,
    VERIFY_FILE,
    STREAM_FILE,
    STREAM_CONFIG_FILE,
    LOADER_FILE,
    LOADER_CONFIG_FILE,
    TRAINING_FILE,
)

R = TypeVar("R", bound=Result)

MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding raises for bytes that are not JSON of the expected type."""

# Legal in JSON, but terminals act on it (control characters, changes of writing direction), or GitHub (commands).
_ACTIVE = re.compile("[\x7f-\x9f\u2028-\u202e\u2066-\u2069]|(?<=##)\\[")


def meta_of(kind: type[Result]) -> Meta:
    """Return the `meta` of a new file of this kind."""
    from batchtune import __version__

    return Meta(format=kind.FORMAT, version=kind.VERSION, batchtune=__version__)


def encode(result: Result) -> bytes:
    """Return a result as the bytes of its file, harmless in a terminal or a log."""
    text = msgspec.json.format(msgspec.json.encode(result), indent=2)
    return (
        _ACTIVE.sub(lambda match: f"\\u{ord(match[0]):04x}", text.decode()).encode()
        + b"\n"
    )


def write_result(path: Path, result: Result) -> None:
    """Write a result file into a run folder, whole or not at all; a link in its place is not followed."""
    write_whole(path, encode(result), follow=False)


# Of a result file; a sweep of all bucket counts up to 1000 takes less.
LARGEST_BYTES = 256 << 20


# What makes a damaged result file again, where `tune` is not the shortest way. Trials without a run.json start over.
_COMMANDS = {
    RUN_FILE: "tune --force",
    SWEEP_FILE: "sweep-buckets",
    VERIFY_FILE: "verify",
    STREAM_FILE: "sweep-stream",
    LOADER_FILE: "tune-loader",
}


class _Envelope(msgspec.Struct):
    meta: Meta


def read_result(path: Path, kind: type[R]) -> R:
    """Read a result file, and check its kind, its version and its numbers.

    Raises:
        ResultError: Missing, unreadable, of another kind, too new, edited or damaged; the message names the field.
    """
    command = _COMMANDS.get(path.name, "tune")
    again = f"Remove it, and create it again with `batchtune {command}`."
    data = read_regular(path, LARGEST_BYTES, again)
    try:
        check_meta(data, kind, str(path))
        result = msgspec.json.decode(data, type=kind)
    except MALFORMED as error:
        problem = invalid_field(error)
        raise ResultError(f"{path} is edited or damaged: {problem}", again) from error
    for problem in _problems(result):
        raise ResultError(f"{path} is edited or damaged: {problem}", again)
    return result


def read_if_written(path: Path, kind: type[R]) -> R | None:
    """Read a result file as `read_result` does; None if it does not exist."""
    return read_result(path, kind) if path.exists() else None


def check_meta(data: bytes, kind: type[Result], place: str) -> None:
    """Raise ResultError if JSON is of another kind, or too new; `place` says where it is. May raise DecodeError."""
    meta = msgspec.json.decode(data, type=_Envelope).meta
    if meta.format != kind.FORMAT:
        raise ResultError(
            f"{place} is a {shortened(meta.format)} file; a {kind.FORMAT!r} file is needed here"
        )
    if meta.version > kind.VERSION:
        raise ResultError(
            f"{place} has version {meta.version} of {shortened(meta.format)}, written by batchtune "
            f"{shortened(meta.batchtune)}; this batchtune knows versions up to {kind.VERSION}",
            "Install a newer batchtune.",
        )


def _problems(record: Record, place: str = "") -> Iterator[str]:
    """Yield what is wrong with the records in a record, then with itself: its own checks rely on theirs."""
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if isinstance(value, Record):
            yield from _problems(value, f"{place}{name}: ")
        elif isinstance(value, list) and value and isinstance(value[0], Record):
            for index, entry in enumerate(value):
                yield from _problems(entry, f"{place}{name}, entry {index}: ")
    yield from (f"{place}{problem}" for problem in record.problems())


EQUAL_TWINS = 0.02
"""Made batches prove nothing if they allocate less than the script's own by more than this share."""
WRONG_TWINS = 0.05
"""Nor if they differ by more than this share; then a probe continues only with force."""

SAME_GRADIENT = 0.01
"""Gradients of a step are the same if they differ by at most this share: half precision rounds to 0.4%."""


class Twin(Record):
    """A script's own batch, and a made one of the same shape: the peak memory of a step with each."""

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


class OwnBatches(Record):
    """The batches of an epoch as training makes them now: those of its own batch sampler, or recorded ones.

    Attributes:
        sampler: The name of its class; `a recorded training` if it was not watched itself.
        ranks: Number of ranks; each counts with as many batches as the first one makes.
        batches, padded_length: Those of all ranks, for as many examples as the data has.
        shapes: Shapes of all batches, or of some that stand for them: evenly spaced in the order of
            their padded lengths.
        mates_again, effective_buckets: As for a row of a sweep.
    """

    sampler: str
    ranks: Size
    batches: Size
    padded_length: Positive
    shapes: Annotated[list[BatchShape], msgspec.Meta(min_length=1)]
    mates_again: Share | None = None
    effective_buckets: Amount | None = None


class StepGradient(Record):
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
    batch_norm: list[str] = []

    def of_cut(self, *, equal_counts: bool) -> float | None:
        """Return the difference to micro-batches of the same number of examples, or of any; None if unknown."""
        if equal_counts and self.equal_counts is not None:
            return self.equal_counts
        return self.any_counts

    @property
    def is_random(self) -> bool:
        """Whether the same micro-batches give another gradient each time."""
        return (self.again or 0.0) > SAME_GRADIENT


class Script(Record):
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
        batch_size: Size of its own batches, on each rank; None unless they are drawn at random, all
            of one size. The order of a stream is assumed to be random.
        own_batches: In other cases, what its own batch sampler makes, if the manifest's rows are its examples.
        gradient: How its loss depends on the cut of a step; None where a step is one batch, or if measured earlier.
        optimizers: The classes of those that have stepped.
        steps_vary: Whether steps train on different numbers of batches, because they end by time, tokens or loss.
        streams: Whether its data set is a stream, or makes whole batches: `batchtune run` can't choose among those.
    """

    batches: list[str]
    loader: str
    per_unit: float
    target_per_unit: float | None
    accumulation: Size
    look_ahead: Count
    offset: int = 0
    target_offset: int = 0
    twins: list[Twin] = []
    packed: bool = False
    batch_size: Size | None = None
    own_batches: OwnBatches | None = None
    gradient: StepGradient | None = None
    optimizers: list[str] = []
    steps_vary: bool = False
    streams: bool = False

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


class DeviceProcess(Record):
    """A process that uses a device; None for what the driver does not report."""

    pid: Count
    used_bytes: Bytes | None


class RankDevice(Record):
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


class Device(Record):
    """The device that was measured, and the limit enforced on it. None: the system can't tell.

    Attributes:
        limit_bytes: Available to the workload, after all that is kept free.
        other_processes: How many other processes used the device at the start.
        processes: Those, each with its memory.
        uuid: UUID of the GPU or the MIG instance.
        free_bytes: Free memory of the device, before this process used it.
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
        load_average: That of the last minute, before the workload was built.
        other_processors: Processors used by other programs while the workload was built, on average.
        script: What was learned of the training script that used it; None for a workload.
        ranks: On several ranks, each one's device. The other fields then hold the worst of any
            rank.
        world_size, nnodes: How many ranks trained together, and on how many machines.
        backend: Backend of their process group, such as `nccl`; None without one.
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
    settings: dict[str, Any] = {}
    processors: Count | None = None
    load_average: Amount | None = None
    other_processors: Amount | None = None
    script: Script | None = None
    ranks: list[RankDevice] = []
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


class Measured(Result):
    """Base of the files that hold measurements of a workload on a device."""

    lengths: LengthsSummary
    workload: WorkloadRecord
    device: Device
    settings: dict[str, Any]
