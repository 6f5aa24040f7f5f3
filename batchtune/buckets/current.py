"""A user's current settings of a sampler with random access, read from `--current`, and the batches that they make.

The settings are written out, or come from a SpeechBrain recipe, whose values are never executed.
"""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, TypeVar

import msgspec
import numpy as np

from batchtune.buckets import capped_by_num_buckets
from batchtune.buckets.advice import longer_than
from batchtune.configs import (
    BUCKETS,
    LIMITS,
    Recipe,
    RecipeBlock,
    entries,
    product_of,
    read_text,
    scalar_value,
    word_or_number,
)
from batchtune.epochs.batchers import Batching
from batchtune.epochs.pricing import Pricing, TimedRow
from batchtune.epochs.recorded import accumulation_of, recorded
from batchtune.epochs.table import BucketTable, speechbrain_table
from batchtune.errors import (
    BatchtuneError,
    ResultError,
    UsageError,
    invalid_field,
    printable,
    shortened,
)
from batchtune.lengths import Lengths
from batchtune.results import (
    TRAINING_FILE,
    Ordering,
    OwnBatches,
    Record,
    Recording,
    Row,
    Script,
    SettingSize,
    Sizing,
    TrainingStep,
    last_recording,
)
from batchtune.units import counted, format_length

OPTION = "--current"
YOURS = "your current config"
_PAIRS = re.compile(r"\s*[A-Za-z_]\w*\s*=", re.ASCII)
_LONGEST_TEXT = 1_000_000
# Written with colons between the numbers; one number alone is a list, too.
_LISTS = ("bucket_boundaries", "bucket_batch_sizes")
# As SpeechBrain called them before 1.0.
_OLD_NAMES = {"max_batch_len": "max_batch_length", "shuffle_ex": "shuffle"}

# No length is outside this range, in any unit; beyond it, boundaries would overflow or coincide.
SettingLength = Annotated[float, msgspec.Meta(ge=1e-9, le=1e15)]
Boundaries = Annotated[
    list[SettingLength], msgspec.Meta(min_length=1, max_length=100_000)
]
SettingSizes = Annotated[
    list[SettingSize], msgspec.Meta(min_length=1, max_length=100_000)
]


class Settings(Record, forbid_unknown_fields=True):
    """Base of the kinds of settings; the fields are what a user may set.

    Attributes:
        NAME: The kind's name in `sweep.json` or `stream.json`.
        SIGNS: Any of these settings gives the kind away.
        AROUND: Settings that may also stand in an enclosing mapping; the innermost one counts.
    """

    NAME: ClassVar[str]
    SIGNS: ClassVar[tuple[str, ...]]
    AROUND: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def find(cls, recipe: Recipe) -> RecipeBlock | None:
        """Return the settings of the training in a recipe; None without any, ResultError if there are several."""
        return None

    @classmethod
    def check_block(cls, recipe: Recipe, block: RecipeBlock) -> None:
        """Raise ResultError if a block of a recipe can't be reproduced."""
        recipe.check_block(block)


AnySettings = TypeVar("AnySettings", bound=Settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known(Generic[AnySettings]):
    """The kinds of settings that a command takes; the first that fits is taken.

    Attributes:
        hint: How to write settings, and which are known, in full sentences.
        lacking: What a recipe without such settings lacks.
    """

    kinds: Sequence[type[AnySettings]]
    hint: str
    lacking: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenSettings(Generic[AnySettings]):
    """Settings as a user gave them: `source` is `--current` or the file's name, `key_path` the place in the file.

    `names` are the settings that the user wrote; all others have their defaults.
    """

    settings: AnySettings
    source: str
    names: frozenset[str] = frozenset()
    key_path: str | None = None

    @property
    def from_file(self) -> bool:
        """Whether they come from a file rather than from the command line."""
        return self.source != OPTION

    def wrong(self, problem: str, hint: str | None = None) -> BatchtuneError:
        """Return the error to raise about them."""
        return _wrong(self.source, self.key_path, problem, hint)

    def record(self, describe: str, values: dict[str, Any]) -> dict[str, Any]:
        """Return them as `sweep.json` and `stream.json` keep them."""
        record: dict[str, Any] = {"source": self.source}
        if self.key_path is not None:
            record["key_path"] = self.key_path
        return {**record, "kind": self.settings.NAME, "describe": describe, **values}


def read_settings(text: str, known: Known[AnySettings]) -> GivenSettings[AnySettings]:
    """Read and check settings.

    The text is `key=value,key=value` (a list is written with colons, `bucket_boundaries=2:4:8.5`), the path of a
    SpeechBrain recipe, or `PATH:KEY.PATH` for a block within one. Raises UsageError if it is neither, or settings are
    wrong, and ResultError if the file can't be read, holds no settings of a known kind, or wrong ones.
    """
    if os.path.exists(text):
        return _of_file(Path(text), None, known)
    path, _, key_path = text.rpartition(":")
    if path and os.path.exists(path):
        return _of_file(Path(path), key_path, known)
    if not _PAIRS.match(text) or len(text) > _LONGEST_TEXT:
        raise UsageError(
            f"{OPTION}: {text[:200]!r} is neither a file nor key=value settings",
            known.hint,
        )
    return _written_out(text, known)


def _of_file(
    file: Path, key_path: str | None, known: Known[AnySettings]
) -> GivenSettings[AnySettings]:
    """Read the training's settings from a recipe, at `key_path` or where they are found; other keys may be code."""
    recipe = Recipe.parse(
        read_text(file, file.name, "Give a SpeechBrain training YAML."), file.name
    )
    file_format = entries(recipe.root).get("format")
    if file_format is not None and str(scalar_value(file_format)).startswith(
        "batchtune/"
    ):
        raise ResultError(
            f"{file.name} is a config that batchtune wrote, and {OPTION} FILE reads a SpeechBrain recipe",
            known.hint,
        )
    kind, block = _settings_in(recipe, key_path, known)
    kind.check_block(recipe, block)
    values = {}
    for key, node in block.settings.items():
        if _OLD_NAMES.get(key, key) in kind.__struct_fields__:
            values[key] = recipe.value(node)
    for key in kind.AROUND:
        nearest = block.nearest(key)
        if nearest is not None:
            values[key] = recipe.value(nearest)
    return _checked(kind, values, file.name, printable(block.path) or None, known)


def _settings_in(
    recipe: Recipe, key_path: str | None, known: Known[AnySettings]
) -> tuple[type[AnySettings], RecipeBlock]:
    """Return the kind of the training's settings, or of those at a path of keys, and their place in the recipe."""
    for kind in known.kinds:
        if key_path is None:
            block = kind.find(recipe)
        else:
            block = recipe.block_at(key_path, kind.SIGNS)
        if block is not None:
            return kind, block
    if key_path is None:
        raise ResultError(
            f"{recipe.name} has no {known.lacking}",
            f"{known.hint} Or say where: {OPTION} {recipe.name}:KEY.PATH.",
        )
    raise ResultError(
        f"{recipe.name} has no known batching settings at {shortened(key_path)}",
        known.hint,
    )


def _written_out(text: str, known: Known[AnySettings]) -> GivenSettings[AnySettings]:
    values: dict[str, Any] = {}
    for pair in text.split(","):
        name, separator, value = (part.strip() for part in pair.partition("="))
        if not separator or not name or name in values:
            raise UsageError(
                f"{OPTION}: {pair.strip()[:60]!r} is not key=value, or the key is given twice",
                known.hint,
            )
        values[name] = _value(name, value)
    for kind in known.kinds:
        if not values.keys().isdisjoint(kind.SIGNS):
            return _checked(kind, values, OPTION, None, known)
    raise UsageError(
        f"{OPTION}: {printable(', '.join(values))[:200]} says nothing about the batches",
        known.hint,
    )


def _value(name: str, text: str) -> Any:
    """Return a number or a product of numbers, true, false, None, a list written with colons, or the word itself."""
    if name in _LISTS:
        return [word_or_number(part.strip()) for part in text.split(":")]
    if text.lower() == "none":
        return None
    product = product_of([word_or_number(factor.strip()) for factor in text.split("*")])
    return word_or_number(text) if product is None else product


def _checked(
    kind: type[AnySettings],
    values: dict[str, Any],
    source: str,
    key_path: str | None,
    known: Known[AnySettings],
) -> GivenSettings[AnySettings]:
    renamed = {}
    for name, value in values.items():
        whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
        renamed[_OLD_NAMES.get(name, name)] = int(value) if whole else value
    try:
        settings = msgspec.convert(renamed, kind)
    except msgspec.ValidationError as error:
        raise _wrong(source, key_path, invalid_field(error), known.hint) from error
    return GivenSettings(
        settings=settings, names=frozenset(renamed), source=source, key_path=key_path
    )


def _wrong(
    source: str, key_path: str | None, problem: str, hint: str | None
) -> BatchtuneError:
    kind = UsageError if source == OPTION else ResultError
    where = source if key_path is None else f"{source}: {key_path}"
    return kind(f"{where}: {problem}", hint)


_LARGEST_NUM_BUCKETS = 100_000
# Recorded batches may be padded to a multiple, or hold a few tokens more than their longest example.
_LITTLE_PADDING = 1.05


class TableSettings(Settings):
    """Settings that make a bucket table.

    Attributes:
        SIZING: `length` if batch sizes come from one max_batch_length, else `frontier`: sizes per bucket.
    """

    SIZING: ClassVar[Sizing] = "frontier"

    @property
    def random_batch_size(self) -> int | None:
        """Examples in each batch, if batches are random or assumed to be; else None."""
        return None

    @property
    def unknown_sampler(self) -> str | None:
        """The sampler whose order is not known and is assumed to be random; None if it is known."""
        return None

    @property
    def accumulate(self) -> int | None:
        """How many batches an optimizer step has, where the settings say so."""
        return None

    def batching(self, lengths: Lengths) -> Batching:
        """Return the batches that the settings make; raises ValueError if they make none."""
        raise NotImplementedError

    def priced(self, pricing: Pricing, batching: Batching) -> TimedRow:
        """Return the row of these batches in a sweep."""
        return pricing.priced("current", self.SIZING, batching)

    def describe(self, unit: str | None) -> str:
        """Return the settings in a few words."""
        raise NotImplementedError

    def cautions(self, lengths: Lengths, row: Row) -> Iterator[str]:
        """Yield warnings about the row of the sweep, sentences without a full stop."""
        return iter(())

    def record(self) -> dict[str, Any]:
        """Return what was set, as plain values."""
        return {
            name: value
            for name, value in msgspec.to_builtins(self).items()
            if value is not None
        }


class OwnTable(TableSettings):
    """Boundaries and a batch size for each, as batchtune's own sampler takes them, or the same with pools."""

    NAME = "batchtune"
    SIGNS = ("bucket_batch_sizes",)

    bucket_boundaries: Boundaries
    bucket_batch_sizes: SettingSizes
    pool_size: SettingSize | None = None
    batch_overhead: Annotated[float, msgspec.Meta(ge=0, le=1e15)] | None = None

    def __post_init__(self) -> None:
        if self.batch_overhead and self.pool_size is None:
            raise ValueError("batch_overhead goes with pool_size")

    def batching(self, lengths: Lengths) -> Batching:
        """Return the table itself; an example beyond its last boundary, which the sampler refuses, is an error."""
        table = BucketTable.of(self.bucket_boundaries, self.bucket_batch_sizes)
        last = self.bucket_boundaries[-1]
        if lengths.longest > last:
            raise ValueError(
                f"the longest example ({format_length(lengths.longest, lengths.unit)}) is beyond the last boundary "
                f"{format_length(last, lengths.unit)}, so batchtune's sampler would refuse it"
            )
        return Batching(table, self.pool_size, self.batch_overhead)

    def describe(self, unit: str | None) -> str:
        """Return the number of buckets, or the size of the pools."""
        if self.pool_size is not None:
            return f"batchtune's sampler, pools of {counted(self.pool_size, 'example')}"
        return f"batchtune's sampler, {counted(len(self.bucket_boundaries), 'bucket')}"


class SpeechBrainSettings(TableSettings):
    """The arguments of SpeechBrain's DynamicBatchSampler; batchtune takes its shuffled batches, none dropped."""

    NAME = "speechbrain"
    SIGNS = (*LIMITS, "bucket_boundaries")
    SIZING = "length"

    max_batch_length: SettingLength
    num_buckets: Annotated[int, msgspec.Meta(ge=1, le=_LARGEST_NUM_BUCKETS)] | None = (
        None
    )
    bucket_boundaries: Boundaries | None = None
    max_batch_ex: SettingSize | None = None
    shuffle: bool | None = None
    batch_ordering: Ordering | None = None
    drop_last: bool | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.num_buckets is None and self.bucket_boundaries is None:
            raise ValueError(
                "needs num_buckets or bucket_boundaries, as today's DynamicBatchSampler does"
            )
        boundaries = self.bucket_boundaries or []
        if boundaries != sorted(set(boundaries)):
            raise ValueError("bucket_boundaries must ascend")

    @classmethod
    def find(cls, recipe: Recipe) -> RecipeBlock | None:
        """Return the training's block; None if `dynamic_batching` turns it off."""
        switch = entries(recipe.root).get("dynamic_batching")
        if switch is not None and recipe.value(switch) is False:
            return None
        return recipe.training_block(LIMITS, BUCKETS)

    def batching(self, lengths: Lengths) -> Batching:
        """Return the buckets that SpeechBrain makes of these lengths, exactly."""
        table = speechbrain_table(
            lengths.histogram,
            self.max_batch_length,
            num_buckets=self.num_buckets,
            bucket_boundaries=self.bucket_boundaries,
            max_batch_ex=self.max_batch_ex,
        )
        return Batching(table)

    def describe(self, unit: str | None) -> str:
        """Return the arguments that decide the table."""
        words = f"SpeechBrain, max_batch_length={format_length(self.max_batch_length, unit)}"
        if self.bucket_boundaries is not None:
            words += f", {len(self.bucket_boundaries)} bucket_boundaries"
        else:
            words += f", num_buckets={self.num_buckets}"
        if self.max_batch_ex is not None:
            words += f", max_batch_ex={self.max_batch_ex}"
        return words

    def cautions(self, lengths: Lengths, row: Row) -> Iterator[str]:
        """Warn of examples beyond max_batch_length, and of buckets that keep batches small."""
        limit = self.max_batch_length
        yield from longer_than(
            lengths,
            limit,
            f"max_batch_length of {YOURS},",
            "SpeechBrain makes each a batch of one",
        )
        # Given boundaries stay where they are when max_batch_length is raised.
        if self.bucket_boundaries is None:
            yield from capped_by_num_buckets(lengths, limit, [row], YOURS)
        if max(row.batch_sizes) == 1 and self.max_batch_ex != 1:
            yield (
                f"{YOURS} makes batches of one example, because its smallest boundary, "
                f"{format_length(row.boundaries[0], lengths.unit)}, is more than half of max_batch_length "
                f"{format_length(limit, lengths.unit)}"
            )


class FixedSize(TableSettings):
    """A fixed batch size."""

    NAME = "fixed"
    SIGNS = ("batch_size",)

    batch_size: SettingSize

    @property
    def random_batch_size(self) -> int | None:
        """The batch size."""
        return self.batch_size

    def batching(self, lengths: Lengths) -> Batching:
        """Return one bucket up to the longest length."""
        return Batching(
            BucketTable(np.array([lengths.longest]), np.array([self.batch_size]))
        )

    def describe(self, unit: str | None) -> str:
        """Return the batch size."""
        return f"fixed batches of {self.batch_size:,}"


class VaryingSteps(FixedSize):
    """A fixed batch size of a script whose optimizer steps have different numbers of batches."""

    @property
    def random_batch_size(self) -> None:
        """None, as the examples of a step are not known."""

    def cautions(self, lengths: Lengths, row: Row) -> Iterator[str]:
        """Warn that steps can't be kept."""
        yield (
            "the script's optimizer steps train on different numbers of batches (they may end by time, tokens or "
            "loss): their examples can't be kept, and their number is estimated from a few"
        )


class CountedBatches(TableSettings):
    """What a script's own batch sampler makes."""

    NAME = "counted"

    own: OwnBatches

    @property
    def random_batch_size(self) -> int:
        """The mean batch size."""
        return round(statistics.mean(shape.batch_size for shape in self.own.shapes))

    @property
    def unknown_sampler(self) -> str:
        """The sampler's name."""
        return self.own.sampler

    def batching(self, lengths: Lengths) -> Batching:
        """Return the largest batch for each longest example; it may hold any shorter ones."""
        sizes: dict[float, int] = {}
        for shape in self.own.shapes:
            sizes[shape.length] = max(shape.batch_size, sizes.get(shape.length, 1))
        boundaries = np.array(sorted(sizes))
        table = BucketTable(boundaries, np.array([sizes[edge] for edge in boundaries]))
        return Batching(table.extended_to(lengths.longest), pool_size=lengths.count)

    def priced(self, pricing: Pricing, batching: Batching) -> TimedRow:
        """Return the row of the batches that were counted."""
        return pricing.of_own(self.own, batching)

    def describe(self, unit: str | None) -> str:
        """Return whose batches they are."""
        words = f"batches by {self.own.sampler}, counted over an epoch"
        if self.own.ranks > 1:
            words += f" on rank 0, times {self.own.ranks} ranks"
        return words

    def record(self) -> dict[str, Any]:
        """Return the name of the sampler."""
        return {"sampler": self.own.sampler}


class RecordedBatches(TableSettings):
    """What a recorded training made, in place of a script's own batch sampler."""

    NAME = "recorded"

    steps: list[TrainingStep]

    @property
    def accumulate(self) -> int | None:
        """The number of batches that most steps have."""
        return accumulation_of(self.steps)

    def counted(self, lengths: Lengths) -> CountedBatches:
        """Return the recorded batches as an epoch's; raises ValueError if they are of other data, or packed."""
        own = recorded(self.steps, lengths)
        if own is None:
            raise ValueError(
                "the last training recorded there made no padded batches of these lengths: it had other data, or packed"
            )
        return CountedBatches(own=own)

    def batching(self, lengths: Lengths) -> Batching:
        """Return the largest batch for each longest example."""
        return self.counted(lengths).batching(lengths)

    def priced(self, pricing: Pricing, batching: Batching) -> TimedRow:
        """Return the row of the batches that were recorded."""
        return self.counted(pricing.lengths).priced(pricing, batching)

    def cautions(self, lengths: Lengths, row: Row) -> Iterator[str]:
        """Warn of batches that are longer than any example."""
        recorded_lengths = [
            shape.length for step in self.steps for shape in step.batches
        ]
        longest = max(recorded_lengths)
        beyond = sum(
            length > _LITTLE_PADDING * lengths.longest for length in recorded_lengths
        )
        if beyond:
            yield (
                f"{beyond:,} of {counted(len(recorded_lengths), 'recorded batch')} are longer than any example, up to "
                f"{format_length(longest, lengths.unit)}, and the longest example is "
                f"{format_length(lengths.longest, lengths.unit)}: either the training pads beyond its longest example, "
                "or it had other data. Then record it anew with this data, or leave --current out"
            )

    def describe(self, unit: str | None) -> str:
        """Return what was recorded."""
        return f"the recorded training, of {counted(len(self.steps), 'step')}"

    def record(self) -> dict[str, Any]:
        """Return the number of steps."""
        return {"steps": len(self.steps)}


Current = GivenSettings[TableSettings]
_TABLES: Known[TableSettings] = Known(
    kinds=(OwnTable, SpeechBrainSettings, FixedSize),
    hint=(
        f"Write {OPTION} key=value,key=value or the path of a SpeechBrain YAML. Known are max_batch_length with "
        "num_buckets or bucket_boundaries (and max_batch_ex), bucket_boundaries with bucket_batch_sizes, and "
        "batch_size. Any other batches are recorded with `batchtune record -- COMMAND`, and compared with --current "
        "RUN/training.jsonl."
    ),
    lacking="settings of a DynamicBatchSampler (max_batch_length with num_buckets or bucket_boundaries)",
)


def read_current(text: str) -> Current:
    """Read and check a user's current batching settings; raises as `read_settings` does.

    The path of a `training.jsonl`, also under another name, stands for the last training recorded there.
    """
    path = Path(text)
    if path.suffix == ".jsonl":
        return _of_recording(last_recording(path), path)
    return read_settings(text, _TABLES)


def fixed_batches(
    batch_size: int, source: str, kind: type[FixedSize] = FixedSize
) -> Current:
    """Return random batches of one size as a user's settings; `source` says where they stand."""
    return GivenSettings(settings=kind(batch_size=batch_size), source=source)


def _of_recording(recording: Recording, path: Path) -> Current:
    settings = RecordedBatches(steps=recording.steps)
    return GivenSettings(settings=settings, source=path.name)


def known_recording(path: Path, lengths: Lengths) -> Current | None:
    """Return a file's last recording; None unless it has padded batches of these lengths, not batchtune's."""
    if not path.exists():
        return None
    last = last_recording(path)
    if last.start.tuned or recorded(last.steps, lengths) is None:
        return None
    return _of_recording(last, path)


def known_current(
    given: Current | None, script: Script | None, folder: Path, lengths: Lengths
) -> Current | None:
    """Return what the user gave, else a script's own batches, else those of a recording in the run folder."""
    known = given
    if known is None and script is not None:
        known = own_current(script)
    if known is None:
        known = known_recording(folder / TRAINING_FILE, lengths)
    return known


def own_current(script: Script) -> Current | None:
    """Return an unchanged script's own batches, if they are known: drawn at random, all of one size, or counted."""
    source = "as the script's DataLoader has it"
    if script.batch_size is not None:
        kind = VaryingSteps if script.steps_vary else FixedSize
        return fixed_batches(script.batch_size, source, kind)
    if script.own_batches is None:
        return None
    return GivenSettings(settings=CountedBatches(own=script.own_batches), source=source)


def current_batching(current: Current, lengths: Lengths) -> Batching:
    """Return the batches that the settings make of these lengths; BatchtuneError if they make none."""
    try:
        return current.settings.batching(lengths)
    except ValueError as error:
        raise current.wrong(
            str(error), "Give others, or leave --current out."
        ) from error
