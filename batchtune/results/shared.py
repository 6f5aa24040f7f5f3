"""Shared by all result files: batch shapes, number types, base records, lengths, device; reading and writing."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import msgspec

from batchtune.errors import ResultError, UsageError, invalid_field, shortened
from batchtune.files import read_regular, write_whole
from batchtune.records import LengthsSummary, Record, option_of

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


class Meta(Record, frozen=True, kw_only=True):
    """The kind and version of a result file."""

    format: str
    version: int
    batchtune: str


class Result(Record, frozen=True, kw_only=True):
    """Base of the files: `meta` comes first; FORMAT and VERSION say what it holds."""

    FORMAT: ClassVar[str]

    meta: Meta


class WorkloadRecord(Record, frozen=True, kw_only=True):
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
