"""The settings of a stream's sweep, and a user's current way to batch one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import msgspec

from batchtune.buckets.advice import longer_than
from batchtune.buckets.current_settings import (
    OPTION,
    YOURS,
    Given,
    Known,
    Length,
    Settings,
    Size,
    read_settings,
)
from batchtune.configs import STREAM_LIMITS, Block, Recipe, entries
from batchtune.errors import UsageError, invalid_field
from batchtune.lengths import Lengths
from batchtune.results import Share, StreamedWith
from batchtune.streams.pivot import PivotSettings
from batchtune.units import PER_SECOND, counts_samples, format_length, format_number

_SAMPLE_LENGTHS = ("min_sample_len", "max_sample_len")
_PIVOT = "indices_around_random_pivot"


@dataclass(frozen=True, slots=True)
class CurrentStream:
    """A user's current way to batch a stream, in the unit of the lengths.

    `settings` are the `current_settings` of `stream.json`; `notes` say what was assumed, and what may surprise, in
    sentences without a full stop.
    """

    batching: PivotSettings
    settings: dict[str, Any]
    notes: tuple[str, ...] = ()


class StreamSettings(StreamedWith, frozen=True, kw_only=True):
    """The settings of a stream's sweep, from the command line to `stream.json`.

    Attributes:
        buffer_sizes: The most examples that a worker holds to make batches of; no more than there are.
        bytes_per_length: The memory that a unit of length takes in the buffer; None: by the unit.
    """

    buffer_sizes: tuple[Size | Literal["all"], ...] = (256, 1024, 4096)
    num_buckets: tuple[Size, ...] = (4, 8, 12, 16, 20)
    max_batch_size: Size | None = None
    bytes_per_length: Annotated[float, msgspec.Meta(gt=0, le=1e12)] | None = None
    min_randomness: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None

    @classmethod
    def checked(cls, **values: Any) -> StreamSettings:
        """Return the settings; UsageError if a number is out of range."""
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise UsageError(
                f"--{invalid_field(error).replace('_', '-', 2)}"
            ) from error

    @property
    def readers(self) -> int:
        """Number of workers of all ranks."""
        return self.world_size * max(1, self.workers)


class PivotArguments(Settings, frozen=True, kw_only=True):
    """The arguments of `dynamic_bucketed_batch`, with those of its `sampler_kwargs`, or these alone."""

    NAME = "speechbrain"
    SIGNS = STREAM_LIMITS
    AROUND = ("buffersize", "drop_end", *_SAMPLE_LENGTHS, "sample_rate")

    target_batch_numel: Length
    max_batch_numel: Length | None = None
    max_batch_size: Size | None = None
    max_padding_ratio: Share | None = (
        0.2  # null turns it off; left out, it is SpeechBrain's default
    )
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
        """Refuse another `sampler_fn`."""
        recipe.check_block(block)
        for mapping in block.chain:
            function = entries(mapping).get("sampler_fn")
            if function is not None and _PIVOT not in f"{function.tag}{function.value}":
                problem = (
                    f"sampler_fn is not {_PIVOT}, so its batches can't be reproduced"
                )
                raise recipe.wrong(function, problem, "Leave --current out.")

    def current(self, given: Given[PivotArguments], lengths: Lengths) -> CurrentStream:
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
            notes.append(
                f"{YOURS} counts samples, read as {format_number(rate)} a second (sample_rate)"
            )
        batching = PivotSettings(**arguments)
        if batching.max_batch_numel is not None:
            consequence = "SpeechBrain makes each a batch of one, however long"
            notes += longer_than(
                lengths,
                batching.max_batch_numel,
                f"max_batch_numel of {YOURS},",
                consequence,
            )
        if given.from_file and self.buffersize is None:
            default = batching.buffersize
            notes.append(
                f"buffersize is not in {given.source}: SpeechBrain's default, {default}, is assumed"
            )
        target = format_length(batching.target_batch_numel, lengths.unit)
        settings = f"target_batch_numel={target}, buffersize={batching.buffersize}"
        describe = f"SpeechBrain's dynamic_bucketed_batch, {settings}"
        values = asdict(batching)
        if rate is not None:
            values["sample_rate"] = rate
        return CurrentStream(batching, given.record(describe, values), tuple(notes))

    def _rate(self, given: Given[PivotArguments], lengths: Lengths) -> float | None:
        """Return how many samples a second the limits count; None if they count in the lengths' unit."""
        rate = self.sample_rate
        if lengths.unit not in PER_SECOND:
            if rate is not None and not given.from_file and lengths.unit != "samples":
                raise given.wrong(
                    f"sample_rate goes with lengths in seconds, but they count {lengths.unit}",
                    f"Give the limits in {lengths.unit}, without sample_rate.",
                )
            return None
        if (
            lengths.unit == "ms"
        ):  # a batch holds about as many of them as of samples, so the size tells nothing
            return rate
        # A recipe's sample_rate says how its audio is read, whatever its limits count.
        limit = (
            self.target_batch_numel
            if self.max_batch_numel is None
            else self.max_batch_numel
        )
        if not counts_samples(limit, lengths.longest):
            return None if given.from_file else rate
        if rate is None:
            raise given.wrong(
                f"a limit of {format_number(limit)} seems to count samples, but the lengths {lengths.unit}",
                "Add sample_rate=16000 to the settings, or give the limits in the unit of the lengths.",
            )
        return rate


_STREAMS: Known[PivotArguments] = Known(
    kinds=(PivotArguments,),
    hint=(
        f"Write {OPTION} key=value,key=value or the path of a SpeechBrain YAML. Known are the arguments of "
        f"SpeechBrain's dynamic_bucketed_batch: {', '.join(PivotArguments.__struct_fields__)}."
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
