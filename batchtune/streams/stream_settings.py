"""The settings of a stream's sweep, and a user's current way to batch one: SpeechBrain's, or batchtune's own stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, Literal

import msgspec

from batchtune.buckets.cautions import longer_than
from batchtune.buckets.current import table_holding_all
from batchtune.buckets.current_settings import (
    OPTION,
    YOURS,
    Boundaries,
    Given,
    Known,
    Length,
    Settings,
    Size,
    Sizes,
    read_settings,
)
from batchtune.configs import STREAM_LIMITS, Block, Recipe, entries
from batchtune.errors import UsageError
from batchtune.lengths import Lengths
from batchtune.results import Share, StreamAlgorithm
from batchtune.streams.bucketed import StreamBatching
from batchtune.streams.pivot import PivotSettings
from batchtune.streams.simulated import AnyBatching, Sharding
from batchtune.units import PER_SECOND, counts_samples, format_length, format_number

# Arguments of `indices_around_random_pivot`, and those of `dynamic_bucketed_batch` itself.
_SAMPLER_KEYS = (*STREAM_LIMITS, "max_batch_size", "max_padding_ratio")
_SAMPLE_LENGTHS = ("min_sample_len", "max_sample_len")
_PIVOT = "indices_around_random_pivot"
_MOST_RANKS = 16_384


@dataclass(frozen=True, slots=True)
class CurrentStream:
    """A user's current way to batch a stream, in the unit of the lengths.

    `settings` are the `current_settings` of `stream.json`; `notes` say what was assumed, and what may surprise, in
    sentences without a full stop.
    """

    batching: AnyBatching
    settings: dict[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """The settings of a stream's sweep, of shards as in `Sharding`; UsageError if a number is out of range.

    Attributes:
        buffer_sizes: The most examples that a worker holds to make batches of; no more than there are.
        shard_size: Examples of each shard, for a source that is not a set of shards.
        bytes_per_length: The memory that a unit of length takes in the buffer; None: by the unit.
    """

    world_size: int = 1
    workers: int = 1
    shuffle_shards: int = 100
    shuffle_buffer: int = 1000
    buffer_sizes: tuple[int | Literal["all"], ...] = (256, 1024, 4096)
    num_buckets: tuple[int, ...] = (4, 8, 12, 16, 20)
    max_batch_size: int | None = None
    shard_size: int = 1000
    bytes_per_length: float | None = None
    min_randomness: float | None = None
    seed: int = 0
    current: CurrentStream | None = None

    def __post_init__(self) -> None:
        _check_whole("--world-size", self.world_size, 1, _MOST_RANKS)
        _check_whole("--workers", self.workers, 0, 1024)
        _check_whole("--shuffle-shards", self.shuffle_shards, 0, 10**9)
        _check_whole("--shuffle-buffer", self.shuffle_buffer, 0, 10**9)
        _check_whole("--shard-size", self.shard_size, 1, 10**12)
        if self.max_batch_size is not None:
            _check_whole("--max-batch-size", self.max_batch_size, 1, 10**18)
        _check_positive("--bytes-per-length", self.bytes_per_length, 1e12)
        _check_positive("--min-randomness", self.min_randomness, 1)

    @property
    def readers(self) -> int:
        """Number of workers of all ranks."""
        return self.world_size * max(1, self.workers)

    @property
    def sharding(self) -> Sharding:
        """How shards come to workers."""
        return Sharding(
            world_size=self.world_size,
            workers=max(1, self.workers),
            shuffle_shards=self.shuffle_shards,
            shuffle_buffer=self.shuffle_buffer,
        )

    def record(self) -> dict[str, Any]:
        """Return them as `stream.json` holds them."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "current"}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _check_whole(name: str, number: int, least: int, most: int) -> None:
    if not least <= number <= most:
        raise UsageError(f"{name} must be from {least} to {most:,}, got {number:,}")


def _check_positive(name: str, number: float | None, most: float) -> None:
    if number is not None and not 0 < number <= most:
        raise UsageError(f"{name} must be above 0 and at most {most:g}, got {number:g}")


class CurrentSettings(Settings, frozen=True, kw_only=True):
    """Settings that make batches of a stream."""

    def current(self, given: Given[CurrentSettings], lengths: Lengths) -> CurrentStream:
        """Return the settings in the unit of the lengths; raise BatchtuneError if they are for others."""
        raise NotImplementedError


class PivotArguments(CurrentSettings, frozen=True, kw_only=True):
    """The arguments of `dynamic_bucketed_batch`, with those of its `sampler_kwargs`, or these alone."""

    NAME = "speechbrain"
    SIGNS = STREAM_LIMITS
    AROUND = ("buffersize", "drop_end", *_SAMPLE_LENGTHS, "sample_rate")
    INNER = "sampler_kwargs"

    target_batch_numel: Length
    max_batch_numel: Length | None = None
    max_batch_size: Size | None = None
    max_padding_ratio: Share | None = 0.2  # null turns it off; left out, it is SpeechBrain's default
    buffersize: Size | None = None
    drop_end: bool = False
    min_sample_len: Length | None = None
    max_sample_len: Length | None = None
    sample_rate: Length | None = None

    @classmethod
    def find(cls, recipe: Recipe) -> Block | None:
        """Return the training's settings: those passed to the function, if the file's top has them, too."""
        return recipe.stream_block(f"{OPTION} {recipe.name}:")

    @classmethod
    def check_block(cls, recipe: Recipe, block: Block) -> None:
        """Refuse unknown `sampler_kwargs`, as the function would, and another `sampler_fn`."""
        recipe.check_block(block)
        if block.keys[-1:] == (cls.INNER,):
            for key, node in block.settings.items():
                if key not in _SAMPLER_KEYS:
                    problem = f"{block.path}: unknown argument {key[:60]!r}"
                    raise recipe.wrong(node, problem, f"Known: {', '.join(_SAMPLER_KEYS)}.")
        for mapping in block.chain:
            function = entries(mapping).get("sampler_fn")
            if function is not None and _PIVOT not in f"{function.tag}{function.value}":
                problem = f"sampler_fn is not {_PIVOT}, so its batches can't be reproduced"
                raise recipe.wrong(function, problem, "Leave --current out.")

    def current(self, given: Given[CurrentSettings], lengths: Lengths) -> CurrentStream:
        """Return the arguments; numbers of samples become seconds."""
        arguments = msgspec.structs.asdict(self)
        del arguments["sample_rate"]
        if self.buffersize is None:
            del arguments["buffersize"]
        rate = self._rate(given, lengths)
        notes = []
        if rate is not None:
            for name in (*STREAM_LIMITS, *_SAMPLE_LENGTHS):
                if arguments[name] is not None:
                    arguments[name] *= PER_SECOND[lengths.unit] / rate
            notes.append(f"{YOURS} counts samples, read as {format_number(rate)} a second (sample_rate)")
        batching = PivotSettings(**arguments)
        notes += self._notes(batching, lengths)
        if given.from_file and self.buffersize is None:
            default = batching.buffersize
            notes.append(f"buffersize is not in {given.source}: SpeechBrain's default, {default}, is assumed")
        describe = "SpeechBrain's dynamic_bucketed_batch"
        for name in STREAM_LIMITS:
            if arguments[name] is not None:
                describe += f", {name}={format_length(arguments[name], lengths.unit)}"
        describe += f", buffersize={batching.buffersize}"
        if batching.drop_end:
            describe += ", drop_end=True"
        values = asdict(batching)
        if rate is not None:
            values["sample_rate"] = rate
        return CurrentStream(batching, given.record(describe, values), tuple(notes))

    def _rate(self, given: Given[CurrentSettings], lengths: Lengths) -> float | None:
        """Return how many samples a second the limits count; None if they count in the lengths' unit."""
        rate = self.sample_rate
        if lengths.unit not in PER_SECOND:
            if rate is not None and not given.from_file and lengths.unit != "samples":
                raise given.wrong(
                    f"sample_rate goes with lengths in seconds, but they count {lengths.unit}",
                    f"Give the limits in {lengths.unit}, without sample_rate.",
                )
            return None
        if lengths.unit == "ms":  # a batch holds about as many of them as of samples, so the size tells nothing
            return rate
        # A recipe's sample_rate says how its audio is read, whatever its limits count.
        limit = self.target_batch_numel if self.max_batch_numel is None else self.max_batch_numel
        if not counts_samples(limit, lengths.longest):
            return None if given.from_file else rate
        if rate is None:
            raise given.wrong(
                f"a limit of {format_number(limit)} seems to count samples, but the lengths {lengths.unit}",
                "Add sample_rate=16000 to the settings, or give the limits in the unit of the lengths.",
            )
        return rate

    def _notes(self, batching: PivotSettings, lengths: Lengths) -> Iterator[str]:
        target = batching.target_batch_numel
        limit = batching.max_batch_numel
        if limit is None:
            yield "without max_batch_numel, batches overshoot their target by up to one example"
        else:
            consequence = "SpeechBrain makes {each} a batch of one, however long"
            yield from longer_than(lengths, limit, f"max_batch_numel of {YOURS},", consequence)
            if target > limit:
                yield "target_batch_numel is above max_batch_numel, so that no batch reaches it"
        if target <= lengths.shortest:
            shown = format_length(target, lengths.unit)
            yield f"target_batch_numel is {shown}, no more than the shortest example: all batches hold one example"


class OwnStream(CurrentSettings, frozen=True, kw_only=True):
    """The settings of `batchtune.BucketedStream`."""

    NAME = "batchtune"
    SIGNS = ("bucket_batch_sizes", "buffer_size")

    algorithm: StreamAlgorithm = "bucket"
    buffer_size: Size
    bucket_boundaries: Boundaries
    bucket_batch_sizes: Sizes
    max_padding_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    shuffle: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.max_padding_ratio and self.algorithm != "pivot":
            raise ValueError(f"max_padding_ratio goes with the algorithm pivot, but algorithm is {self.algorithm}")

    def current(self, given: Given[CurrentSettings], lengths: Lengths) -> CurrentStream:
        """Return the settings; an example beyond the last boundary, which the stage refuses, is an error."""
        try:
            table = table_holding_all(self.bucket_boundaries, self.bucket_batch_sizes, lengths)
        except ValueError as error:
            raise given.wrong(str(error)) from error
        batching = StreamBatching(
            algorithm=self.algorithm,
            table=table,
            buffer_size=self.buffer_size,
            max_padding_ratio=self.max_padding_ratio,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
        )
        buffer = format_number(batching.buffer_size)
        describe = f"batchtune's BucketedStream, {batching.algorithm} with a buffer of {buffer}"
        if batching.drop_last:
            describe += ", drop_last=True"
        return CurrentStream(batching, given.record(describe, msgspec.to_builtins(self)))


_STREAMS: Known[CurrentSettings] = Known(
    kinds=(OwnStream, PivotArguments),
    hint=(
        f"Write {OPTION} key=value,key=value or the path of a SpeechBrain YAML. Known are the arguments of "
        f"SpeechBrain's dynamic_bucketed_batch ({', '.join(PivotArguments.__struct_fields__)}), and BucketedStream's "
        "bucket_boundaries, bucket_batch_sizes and buffer_size."
    ),
    lacking="settings of dynamic_bucketed_batch (target_batch_numel)",
)


def stream_current(text: str, lengths: Lengths) -> CurrentStream:
    """Read and check a user's current way to batch a stream, and turn it into the unit of the lengths.

    The text is as in `read_settings`; in a recipe, `buffersize` and others may also stand in a mapping around the one
    with `target_batch_numel`. Numbers may be products.

    SpeechBrain counts what `len_fn` returns, as a rule samples of audio. Limits that no batch of lengths in seconds
    can have are divided by `sample_rate`, which may stand among the settings; on the command line it always divides.

    Raises as `read_settings` does, also for lengths in another unit.
    """
    given = read_settings(text, _STREAMS)
    return given.settings.current(given, lengths)
