"""A user's current way to batch a stream: SpeechBrain's `dynamic_bucketed_batch`, or batchtune's own stage."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from batchtune.buckets.current.base import OPTION, YOURS, Settings, SettingsKind, longer_than, recorded
from batchtune.buckets.current.reading import Known, read_settings, unknown_settings
from batchtune.buckets.current.tables import checked_table, table_for
from batchtune.configs import STREAM_LIMITS, Block, Recipe, entries
from batchtune.lengths import Lengths
from batchtune.results import STREAM_ALGORITHMS
from batchtune.streams.bucketed import StreamBatching
from batchtune.streams.pivot import PivotSettings
from batchtune.units import PER_SECOND, counts_samples, format_length, format_number

# Arguments of `indices_around_random_pivot`, and those of `dynamic_bucketed_batch` itself.
_SAMPLER_KEYS = (*STREAM_LIMITS, "max_batch_size", "max_padding_ratio")
_SAMPLE_LENGTHS = ("min_sample_len", "max_sample_len")
_OUTER_KEYS = ("buffersize", "drop_end", *_SAMPLE_LENGTHS)
_PIVOT = "indices_around_random_pivot"


@dataclass(frozen=True, slots=True)
class CurrentStream:
    """A user's current way to batch a stream, in the unit of the lengths.

    `settings` are the `current_settings` of `stream.json`; `notes` say what was assumed, and what may surprise, in
    sentences without a full stop.
    """

    batching: PivotSettings | StreamBatching
    settings: dict[str, Any]
    notes: tuple[str, ...] = ()


class StreamKind(SettingsKind):
    """Settings that make batches of a stream."""

    @abstractmethod
    def current(self, settings: Settings, lengths: Lengths) -> CurrentStream:
        """Return the settings, checked, in the unit of the lengths; raise BatchtuneError if they are for others."""


class PivotArguments(StreamKind):
    """The arguments of `dynamic_bucketed_batch`, with those of its `sampler_kwargs`, or these alone."""

    name = "speechbrain"
    keys = (*_SAMPLER_KEYS, *_OUTER_KEYS, "sample_rate")
    signs = STREAM_LIMITS
    inherited = (*_OUTER_KEYS, "sample_rate")
    inner = "sampler_kwargs"

    def find(self, recipe: Recipe) -> Block | None:
        """Return the training's settings: those passed to the function, if the file's top has them, too."""
        return recipe.stream_block(f"{OPTION} {recipe.name}:")

    def check_block(self, recipe: Recipe, block: Block) -> None:
        """Refuse unknown `sampler_kwargs`, as the function would, and another `sampler_fn`."""
        super().check_block(recipe, block)
        if block.keys[-1:] == (self.inner,):
            unknown = [key for key in block.settings if key not in _SAMPLER_KEYS]
            if unknown:
                problem, hint = unknown_settings(unknown, _SAMPLER_KEYS)
                raise recipe.wrong(block.settings[unknown[0]], f"{block.path}: {problem}", hint)
        for mapping in block.chain:
            function = entries(mapping).get("sampler_fn")
            if function is not None and _PIVOT not in f"{function.tag}{function.value}":
                problem = f"sampler_fn is not {_PIVOT}, so its batches can't be reproduced"
                raise recipe.wrong(function, problem, "Leave --current out.")

    def read(self, settings: Settings) -> dict[str, object]:
        """Check the settings as `speechbrain.dataio.iterators` of SpeechBrain 1.1 takes them."""
        if not settings.has("target_batch_numel"):
            raise settings.wrong("target_batch_numel", "is missing", "SpeechBrain has no default for it.")
        checked = settings.given(settings.length, *STREAM_LIMITS, *_SAMPLE_LENGTHS, "sample_rate")
        checked |= settings.given(settings.count, "max_batch_size", "buffersize")
        checked |= settings.given(settings.flag, "drop_end")
        if settings.has("max_padding_ratio"):
            ratio = settings.number("max_padding_ratio")
            if not 0 <= ratio <= 1:
                raise settings.wrong("max_padding_ratio", f"must be from 0 to 1, got {ratio:g}")
            checked["max_padding_ratio"] = ratio
        elif "max_padding_ratio" in settings.values:  # null turns it off; left out, it is SpeechBrain's default
            checked["max_padding_ratio"] = None
        return checked

    def current(self, settings: Settings, lengths: Lengths) -> CurrentStream:
        """Return the arguments; numbers of samples become seconds."""
        arguments: dict[str, Any] = self.read(settings)
        rate = self._rate(arguments, settings, lengths)
        arguments.pop("sample_rate", None)
        notes = []
        if rate is not None:
            per_sample = PER_SECOND[lengths.unit] / rate
            for name in arguments.keys() & {*STREAM_LIMITS, *_SAMPLE_LENGTHS}:
                arguments[name] *= per_sample
            notes.append(f"{YOURS} counts samples, read as {format_number(rate)} a second (sample_rate)")
        batching = PivotSettings(**arguments)
        notes += self._notes(batching, lengths)
        if settings.from_file and "buffersize" not in arguments:
            notes.append(f"buffersize is not in {settings.source}: SpeechBrain's default, 1024, is assumed")
        given = [name for name in STREAM_LIMITS if name in arguments]
        words = ["SpeechBrain's dynamic_bucketed_batch"]
        words += [f"{name}={format_length(arguments[name], lengths.unit)}" for name in given]
        words.append(f"buffersize={batching.buffersize}")
        if batching.drop_end:
            words.append("drop_end=True")
        values = asdict(batching)
        if rate is not None:
            values["sample_rate"] = rate
        return CurrentStream(batching, recorded(settings, self, ", ".join(words), values), tuple(notes))

    def _rate(self, arguments: dict[str, Any], settings: Settings, lengths: Lengths) -> float | None:
        """Return how many samples a second the limits count; None if they count in the lengths' unit."""
        rate: float | None = arguments.get("sample_rate")
        if lengths.unit not in PER_SECOND:
            if rate is not None and not settings.from_file and lengths.unit != "samples":
                raise settings.wrong(
                    "sample_rate",
                    f"goes with lengths in seconds, but they count {lengths.unit}",
                    f"Give the limits in {lengths.unit}, without sample_rate.",
                )
            return None
        name = "max_batch_numel" if "max_batch_numel" in arguments else "target_batch_numel"
        if lengths.unit == "ms":  # a batch holds about as many of them as of samples, so the size tells nothing
            return rate
        # A recipe's sample_rate says how its audio is read, whatever its limits count.
        limit = arguments[name]
        if not counts_samples(limit, lengths.longest):
            return None if settings.from_file else rate
        if rate is None:
            unit = "seconds" if lengths.unit == "s" else lengths.unit
            raise settings.wrong(
                name,
                f"is {format_number(limit)}, {limit / lengths.longest:,.0f} times the longest example of "
                f"{format_length(lengths.longest, lengths.unit)}: it seems to count samples, but the lengths {unit}",
                "Say how many samples a second has: add sample_rate=16000 to the settings. Or give the limits in the "
                "unit of the lengths.",
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
        if target <= lengths.values.min():
            shown = format_length(target, lengths.unit)
            yield f"target_batch_numel is {shown}, no more than the shortest example: all batches hold one example"


class OwnStream(StreamKind):
    """The settings of `batchtune.BucketedStream`."""

    name = "batchtune"
    keys = (
        "algorithm",
        "buffer_size",
        "bucket_boundaries",
        "bucket_batch_sizes",
        "max_padding_ratio",
        "shuffle",
        "drop_last",
    )
    signs = ("bucket_batch_sizes", "buffer_size")

    def read(self, settings: Settings) -> dict[str, object]:
        """Check the settings."""
        if not settings.has("buffer_size"):
            raise settings.wrong("buffer_size", "is missing", "Say how many examples a worker holds at most.")
        algorithm = "bucket"
        if settings.has("algorithm"):
            algorithm = settings.choice("algorithm", STREAM_ALGORITHMS)
        ratio = settings.given(settings.number, "max_padding_ratio")
        if ratio and algorithm != "pivot":
            raise settings.wrong("max_padding_ratio", f"goes with the algorithm pivot, but algorithm is {algorithm}")
        return {
            "algorithm": algorithm,
            "buffer_size": settings.count("buffer_size"),
            **checked_table(settings),
            **ratio,
            "shuffle": settings.flag("shuffle"),
            "drop_last": settings.flag("drop_last", False),
        }

    def current(self, settings: Settings, lengths: Lengths) -> CurrentStream:
        """Return the settings; an example beyond the last boundary, which the stage refuses, is an error."""
        arguments: dict[str, Any] = self.read(settings)
        batching = StreamBatching(
            algorithm=arguments["algorithm"],
            table=table_for(arguments, settings.source, lengths),
            buffer_size=arguments["buffer_size"],
            max_padding_ratio=arguments.get("max_padding_ratio"),
            shuffle=arguments["shuffle"],
            drop_last=arguments["drop_last"],
        )
        buffer = format_number(batching.buffer_size)
        describe = f"batchtune's BucketedStream, {batching.algorithm} with a buffer of {buffer}"
        if batching.drop_last:
            describe += ", drop_last=True"
        return CurrentStream(batching, recorded(settings, self, describe, arguments))


_NO_STREAM = "a setting of samplers with random access, which read no stream: `batchtune sweep-buckets` takes it"
_STREAMS: Known[StreamKind] = Known(
    kinds=(OwnStream(), PivotArguments()),
    how=(
        f"Write {OPTION} target_batch_numel=16000*45,max_batch_numel=16000*60,sample_rate=16000, or the path of a YAML "
        "file."
    ),
    settings=(
        "Known are the arguments of SpeechBrain's dynamic_bucketed_batch (target_batch_numel with max_batch_numel, "
        "max_batch_size, max_padding_ratio, buffersize, drop_end, min_sample_len, max_sample_len), and "
        "BucketedStream's bucket_boundaries, bucket_batch_sizes and buffer_size."
    ),
    lacking="settings of dynamic_bucketed_batch (target_batch_numel)",
    refused=dict.fromkeys(("max_batch_length", "num_buckets", "batch_size"), _NO_STREAM),
)


def stream_current(text: str, lengths: Lengths) -> CurrentStream:
    """Read and check a user's current way to batch a stream, and turn it into the unit of the lengths.

    The text is as in `read_settings`; in a recipe, `buffersize` and others may also stand in a mapping around the one
    with `target_batch_numel`. Numbers may be products.

    SpeechBrain counts what `len_fn` returns, as a rule samples of audio. Limits that no batch of lengths in seconds
    can have are divided by `sample_rate`, which may stand among the settings; on the command line it always divides.

    Raises as `read_current` does, also for lengths in another unit.
    """
    kind, settings = read_settings(text, _STREAMS)
    return kind.current(settings, lengths)
