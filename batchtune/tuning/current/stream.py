"""A user's current way to batch a stream: SpeechBrain's `dynamic_bucketed_batch`, or a `stream.yaml`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from batchtune.batching.pivot import PivotSettings
from batchtune.batching.streams import StreamBatching
from batchtune.configs.recipes import STREAM_LIMITS, Block, stream_block
from batchtune.configs.references import References
from batchtune.errors import ResultError
from batchtune.lengths import Lengths
from batchtune.results import STREAM_ALGORITHMS, STREAM_CONFIG_FILE, StreamConfig
from batchtune.tuning.current.base import OPTION, YOURS, Settings, SettingsKind, longer_than, recorded
from batchtune.tuning.current.reading import Known, read_settings, unknown_settings
from batchtune.tuning.current.tables import checked_table, own_file, table_for
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

    def find(self, references: References) -> Block | None:
        """Find the training's settings: those passed to the function, if the file's top has them, too."""
        return stream_block(references.root, references.name, f"{OPTION} {references.name}:")

    def refusal(self, block: Block, name: str) -> ResultError | None:
        """Refuse unknown `sampler_kwargs`, as the function would, and another `sampler_fn`."""
        if block.keys[-1:] == (self.inner,):
            unknown = [key for key in block.settings if key not in _SAMPLER_KEYS]
            if unknown:
                problem, hint = unknown_settings(unknown, _SAMPLER_KEYS)
                line = block.settings[unknown[0]].line
                return ResultError(f"{name}, line {line}: {'.'.join(block.keys)}: {problem}", hint)
        for mapping in block.chain:
            other = mapping.get("sampler_fn")
            if other is not None and _PIVOT not in f"{other.tag}{other.value}":
                return ResultError(
                    f"{name}, line {other.line}: sampler_fn is not {_PIVOT}, so its batches can't be reproduced",
                    "Leave --current out.",
                )
        return None

    def read(self, settings: Settings) -> dict[str, object]:
        """Check the settings as `speechbrain.dataio.iterators` of SpeechBrain 1.1 takes them."""
        if not settings.has("target_batch_numel"):
            raise settings.wrong("target_batch_numel", "is missing", "SpeechBrain has no default for it.")
        ratio = settings.given(settings.number, "max_padding_ratio")
        if ratio and not 0 <= (value := settings.number("max_padding_ratio")) <= 1:
            raise settings.wrong("max_padding_ratio", f"must be from 0 to 1, got {value:g}")
        return {
            **settings.given(settings.length, *STREAM_LIMITS),
            **settings.given(settings.count, "max_batch_size", "buffersize"),
            # Left out, it is SpeechBrain's default; null turns it off.
            **({"max_padding_ratio": None} if "max_padding_ratio" in settings.values else {}),
            **ratio,
            **settings.given(settings.flag, "drop_end"),
            **settings.given(settings.length, *_SAMPLE_LENGTHS, "sample_rate"),
        }

    def current(self, settings: Settings, lengths: Lengths) -> CurrentStream:
        """Return the arguments; numbers of samples become seconds."""
        found: dict[str, Any] = self.read(settings)
        rate, notes = self._rate(found, settings, lengths), []
        found.pop("sample_rate", None)
        if rate is not None:
            per_sample = PER_SECOND[lengths.unit] / rate
            for name in found.keys() & {*STREAM_LIMITS, *_SAMPLE_LENGTHS}:
                found[name] *= per_sample
            notes.append(f"{YOURS} counts samples, read as {format_number(rate)} a second (sample_rate)")
        batching = PivotSettings(**found)
        notes += self._notes(batching, lengths)
        if settings.from_file and "buffersize" not in found:
            notes.append(f"buffersize is not in {settings.source}: SpeechBrain's default, 1024, is assumed")
        limits = [f"{name}={format_length(found[name], lengths.unit)}" for name in STREAM_LIMITS if name in found]
        others = [f"buffersize={batching.buffersize}", *(["drop_end=True"] if batching.drop_end else [])]
        describe = ", ".join(["SpeechBrain's dynamic_bucketed_batch", *limits, *others])
        values = {**asdict(batching), **({} if rate is None else {"sample_rate": rate})}
        return CurrentStream(batching, recorded(settings, self, describe, values), tuple(notes))

    def _rate(self, found: dict[str, Any], settings: Settings, lengths: Lengths) -> float | None:
        """Return how many samples a second the limits count; None if they count in the lengths' unit."""
        rate: float | None = found.get("sample_rate")
        if lengths.unit not in PER_SECOND:
            if rate is not None and not settings.from_file and lengths.unit != "samples":
                raise settings.wrong(
                    "sample_rate",
                    f"goes with lengths in seconds, but they count {lengths.unit}",
                    f"Give the limits in {lengths.unit}, without sample_rate.",
                )
            return None
        name = next(name for name in reversed(STREAM_LIMITS) if name in found)
        if lengths.unit == "ms":  # a batch holds about as many of them as of samples, so the size tells nothing
            return rate
        # A recipe's sample_rate says how its audio is read, whatever its limits count.
        if not counts_samples(found[name], lengths.longest):
            return None if settings.from_file else rate
        if rate is None:
            unit = "seconds" if lengths.unit == "s" else lengths.unit or "an unknown unit"
            raise settings.wrong(
                name,
                f"is {format_number(found[name])}, {found[name] / lengths.longest:,.0f} times the longest example of "
                f"{format_length(lengths.longest, lengths.unit)}: it seems to count samples, but the lengths {unit}",
                "Say how many samples a second has: add sample_rate=16000 to the settings. Or give the limits in the "
                "unit of the lengths.",
            )
        return rate

    def _notes(self, batching: PivotSettings, lengths: Lengths) -> Iterator[str]:
        target, most = batching.target_batch_numel, batching.max_batch_numel
        if most is None:
            yield "without max_batch_numel, batches overshoot their target by up to one example"
        else:
            consequence = "SpeechBrain makes {each} a batch of one, however long"
            yield from longer_than(lengths, most, f"max_batch_numel of {YOURS},", consequence)
            if target > most:
                yield "target_batch_numel is above max_batch_numel, so that no batch reaches it"
        if target <= lengths.values.min():
            shown = format_length(target, lengths.unit)
            yield f"target_batch_numel is {shown}, no more than the shortest example: all batches hold one example"


class OwnStream(StreamKind):
    """The settings of `batchtune.BucketedStream`, as in `stream.yaml`."""

    name = "batchtune"
    keys = (
        *("algorithm", "buffer_size", "bucket_boundaries", "bucket_batch_sizes", "max_padding_ratio"),
        *("shuffle", "drop_last", "unit", "max_batch_length"),
    )
    signs = ("bucket_batch_sizes", "buffer_size")

    def find(self, references: References) -> Block | None:
        """Take the file itself if it declares itself batchtune's."""
        return own_file(references, StreamConfig, STREAM_CONFIG_FILE)

    def read(self, settings: Settings) -> dict[str, object]:
        """Check the settings."""
        if not settings.has("buffer_size"):
            raise settings.wrong("buffer_size", "is missing", "Say how many examples a worker holds at most.")
        algorithm = settings.choice("algorithm", STREAM_ALGORITHMS) if settings.has("algorithm") else "bucket"
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
        found: dict[str, Any] = self.read(settings)
        batching = StreamBatching(
            algorithm=found["algorithm"],
            table=table_for(found, settings.source, lengths),
            buffer_size=found["buffer_size"],
            max_padding_ratio=found.get("max_padding_ratio"),
            shuffle=found["shuffle"],
            drop_last=found["drop_last"],
        )
        held = format_number(batching.buffer_size)
        describe = f"batchtune's BucketedStream, {batching.algorithm} with a buffer of {held}"
        describe += ", drop_last=True" if batching.drop_last else ""
        return CurrentStream(batching, recorded(settings, self, describe, found))


_NO_STREAM = "a setting of samplers with random access, which read no stream: `batchtune sweep-buckets` takes it"
_STREAMS: Known[StreamKind] = Known(
    kinds=(OwnStream(), PivotArguments()),
    how=(
        f"Write {OPTION} target_batch_numel=16000*45,max_batch_numel=16000*60,sample_rate=16000, or the path of a YAML "
        "file."
    ),
    settings=(
        "Known are the arguments of SpeechBrain's dynamic_bucketed_batch (target_batch_numel with max_batch_numel, "
        "max_batch_size, max_padding_ratio, buffersize, drop_end, min_sample_len, max_sample_len), and a stream.yaml."
    ),
    files="Give a SpeechBrain training YAML or a stream.yaml.",
    examples=PivotArguments.keys,
    refused=dict.fromkeys(("max_batch_length", "num_buckets", "batch_size", "bucket_duration_bins"), _NO_STREAM),
    incomplete={"max_batch_length": "has settings of a sampler with random access, but none of a stream"},
)


def stream_current(text: str, lengths: Lengths) -> CurrentStream:
    """Read and check a user's current way to batch a stream, and turn it into the unit of the lengths.

    The text is as in `read_settings`; the file is a SpeechBrain training YAML, where `buffersize` and others may also
    stand in a mapping around the one with `target_batch_numel`, or a stream.yaml. Numbers may be products.

    SpeechBrain counts what `len_fn` returns, as a rule samples of audio. Limits that no batch of lengths in seconds
    can have are divided by `sample_rate`, which may stand among the settings; on the command line it always divides.

    Raises as `read_current` does, also for lengths in another unit.
    """
    kind, settings = read_settings(text, _STREAMS)
    return kind.current(settings, lengths)
