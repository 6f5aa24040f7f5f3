"""A user's current settings, the table that they make, and the hooks of each kind of settings."""

from __future__ import annotations

import math
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from batchtune.configs import Block, Recipe
from batchtune.epochs.batchers import Batching
from batchtune.errors import BatchtuneError, ResultError, UsageError
from batchtune.lengths import Lengths
from batchtune.results import Row, Sizing
from batchtune.units import format_length

OPTION = "--current"
HOW = "Write --current max_batch_length=600,num_buckets=200, --current batch_size=16, or the path of a YAML file."
YOURS = "your current config"
_MOST_BUCKETS = 100_000
# No length is outside this range, in any unit; beyond it, boundaries would overflow or coincide.
_SHORTEST = 1e-9
_LONGEST = 1e15
_LARGEST_BATCH_SIZE = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Current:
    """Batching settings as a user has them, checked but not yet applied to lengths.

    `given` are the settings as they were read, `settings` the checked ones as plain values.
    """

    kind: TableKind
    given: Settings
    settings: Mapping[str, Any]

    def table(self, lengths: Lengths) -> CurrentTable:
        """Return the batches that the settings make of these lengths.

        Raises ResultError if they are for other lengths, or make no table.
        """
        try:
            return self.kind.table(self, lengths)
        except ValueError as error:
            raise ResultError(f"{self.given.source}: the settings make no bucket table: {error}", HOW) from error

    def record(self, table: CurrentTable) -> dict[str, Any]:
        """Return the `current_settings` of `sweep.json`."""
        return recorded(self.given, self.kind, table.describe, self.settings)

    def cautions(self, table: CurrentTable, lengths: Lengths, row: Row) -> Iterator[str]:
        """Yield warnings about the table, sentences without a full stop."""
        yield from self.kind.cautions(self.settings, lengths, row)
        yield from table.notes


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentTable:
    """The batches that current settings make.

    Attributes:
        describe: The settings in a few words.
        sizing: `length` if batch sizes come from one max_batch_length, else `frontier`: sizes per bucket.
        notes: Why the framework's own batches may differ; sentences without a full stop.
        cap: The setting that caps the examples in a batch besides their length, and its value.
    """

    batching: Batching
    describe: str
    sizing: Sizing = "frontier"
    notes: tuple[str, ...] = ()
    cap: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Plain values by name; the methods check them and raise a BatchtuneError that says where a wrong one stands.

    `source` is `--current` or the file's name without its folders, `key_path` the place in the file (None for the top
    level), `lines` the line of each key there (None for `--current`). A key without a value is None.
    """

    values: Mapping[str, Any]
    source: str = OPTION
    key_path: str | None = None
    lines: Mapping[str, int] | None = None

    @property
    def from_file(self) -> bool:
        """Whether they come from a file rather than from the command line."""
        return self.lines is not None

    def has(self, name: str) -> bool:
        """Whether there is a value, other than null."""
        return self.values.get(name) is not None

    def wrong(self, name: str | None, problem: str, hint: str | None = None) -> BatchtuneError:
        """Return the error to raise: where, what, and what to do."""
        line = None if self.lines is None or name is None else self.lines.get(name)
        where = self.source if line is None else f"{self.source}, line {line}"
        path = ".".join(part for part in (self.key_path, name) if part)
        kind = ResultError if self.from_file else UsageError
        return kind(f"{where}: {path} {problem}" if path else f"{where}: {problem}", hint)

    def given(self, check: Callable[[str], object], *names: str) -> dict[str, object]:
        """Return those of these settings that have a value, each checked by one of the methods below."""
        return {name: check(name) for name in names if self.has(name)}

    def number(self, name: str) -> float:
        """Return any number, infinity included."""
        value = self.values[name]
        if not _is_number(value) or math.isnan(value):
            raise self.wrong(name, f"must be a number, got {_shown(value)}")
        return float(value)

    def amount(self, name: str) -> float:
        """Return a length, or 0."""
        value = self.number(name)
        if not 0 <= value <= _LONGEST:
            raise self.wrong(name, f"must be from 0 to {_LONGEST:g}, got {value:g}")
        return value

    def length(self, name: str) -> float:
        """Return a positive length."""
        return self._length(name, self.values[name])

    def lengths(self, name: str) -> list[float]:
        """Return a list of lengths in strictly ascending order."""
        lengths = [self._length(name, value, f"entry {number} ") for number, value in self._entries(name)]
        for number, (before, after) in enumerate(pairwise(lengths), 2):
            if after == before:
                raise self.wrong(name, f"repeats {after:g} as entry {number}", "Give each boundary once.")
            if after < before:
                problem = f"does not ascend: entry {number} is {after:g}, after {before:g}"
                raise self.wrong(name, problem, "Write boundaries in ascending order.")
        return lengths

    def count(self, name: str) -> int:
        """Return a whole number from 1."""
        return self._count(name, self.values[name])

    def bucket_count(self, name: str) -> int:
        """Return a number of buckets."""
        return self._count(name, self.values[name], _MOST_BUCKETS)

    def counts(self, name: str) -> list[int]:
        """Return a list of whole numbers from 1."""
        return [self._count(name, value, entry=f"entry {number} ") for number, value in self._entries(name)]

    def choice(self, name: str, known: Sequence[str]) -> str:
        """Return one of the known words."""
        value = self.values[name]
        if not isinstance(value, str) or value not in known:
            raise self.wrong(name, f"must be one of {', '.join(known)}")
        return value

    def flag(self, name: str, default: bool = True) -> bool:
        """Return true or false; `default` if it is not set."""
        value = self.values[name] if self.has(name) else default
        if not isinstance(value, bool):
            raise self.wrong(name, f"must be true or false, got {_shown(value)}")
        return value

    def _entries(self, name: str) -> Iterator[tuple[int, Any]]:
        value = self.values[name]
        if _is_number(value) and not self.from_file:  # `--current bucket_boundaries=10` is a list of one
            value = [value]
        if not isinstance(value, list):
            raise self.wrong(name, f"must be a list of numbers, got {_shown(value)}")
        if not value:
            raise self.wrong(name, "is an empty list")
        if len(value) > _MOST_BUCKETS:
            raise self.wrong(name, f"has {len(value):,} entries; {_MOST_BUCKETS:,} is the most")
        return enumerate(value, 1)

    def _length(self, name: str, value: Any, entry: str = "") -> float:
        if not _is_number(value):
            raise self.wrong(name, f"{entry}must be a number, got {_shown(value)}")
        if not _SHORTEST <= value <= _LONGEST:
            raise self.wrong(name, f"{entry}must be positive and finite ({_SHORTEST:g} to {_LONGEST:g}), got {value:g}")
        return float(value)

    def _count(self, name: str, value: Any, most: int = _LARGEST_BATCH_SIZE, entry: str = "") -> int:
        if not _is_number(value) or not math.isfinite(value) or value != int(value):
            raise self.wrong(name, f"{entry}must be a whole number, got {_shown(value)}")
        if not 1 <= value <= most:
            raise self.wrong(name, f"{entry}must be from 1 to {most:,}, got {value:g}")
        return int(value)


class SettingsKind(ABC):
    """One kind of settings: what they are called, where a recipe has them, and how they are checked.

    Attributes:
        name: Its name in `sweep.json` or `stream.json`.
        keys: All settings that it may have; any of `signs` gives the kind away.
        inherited: Settings that may also stand in a mapping around; the innermost counts.
        inner: If a mapping that `--current FILE:KEY.PATH` names has this key, the settings are those in its mapping.
    """

    name: ClassVar[str]
    keys: ClassVar[tuple[str, ...]]
    signs: ClassVar[tuple[str, ...]]
    inherited: ClassVar[tuple[str, ...]] = ()
    inner: ClassVar[str | None] = None

    def find(self, recipe: Recipe) -> Block | None:
        """Return the settings of the training in a recipe; None without any, or for a kind that recipes don't have.

        Raises ResultError if there are several.
        """
        return None

    def check_block(self, recipe: Recipe, block: Block) -> None:
        """Raise ResultError if a block of a recipe can't be reproduced."""
        recipe.check_block(block)

    @abstractmethod
    def read(self, settings: Settings) -> dict[str, object]:
        """Return the settings, checked; raises BatchtuneError if they are wrong, or make no bucket table."""


class TableKind(SettingsKind):
    """Settings that make a bucket table."""

    @abstractmethod
    def table(self, current: Current, lengths: Lengths) -> CurrentTable:
        """Return the batches that the settings make; raises ResultError or ValueError if they make none."""

    def cautions(self, settings: Mapping[str, Any], lengths: Lengths, row: Row) -> Iterable[str]:
        """Return warnings about the row of the sweep."""
        return ()


def recorded(settings: Settings, kind: SettingsKind, describe: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as `sweep.json` and `stream.json` keep them, with their source."""
    record: dict[str, Any] = {"source": settings.source}
    if settings.key_path is not None:
        record["key_path"] = settings.key_path
    return {**record, "kind": kind.name, "describe": describe, **values}


def longer_than(lengths: Lengths, limit: float, name: str, consequence: str) -> Iterator[str]:
    """Warn of examples beyond a limit; `consequence` may say {each} for "it" or "each of them"."""
    overlong = int(np.count_nonzero(lengths.values > limit))
    if overlong == 0:
        return
    examples = "examples are"
    each = "each of them"
    if overlong == 1:
        examples = "example is"
        each = "it"
    shown = format_length(limit, lengths.unit)
    longest = format_length(lengths.longest, lengths.unit)
    then = consequence.format(each=each)
    yield f"{overlong:,} {examples} longer than {name} {shown} (the longest is {longest}): {then}"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _shown(value: object) -> str:
    """Quote a value in a message, cut if it is long: a list of aliases might never end."""
    if value is None:
        return "nothing"
    shown = reprlib.Repr()
    shown.maxlevel = 2
    shown.maxlist = 3
    shown.maxstring = 60
    shown.maxlong = 40
    return shown.repr(value)
