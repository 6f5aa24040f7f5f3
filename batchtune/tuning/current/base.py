"""Settings as a user has them, the table that they make, and the hooks that each kind of settings has."""

from __future__ import annotations

import math
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

from batchtune.batching.table import BucketTable
from batchtune.configs.recipes import Block
from batchtune.configs.references import References
from batchtune.errors import BatchtuneError, ResultError, UsageError
from batchtune.lengths import Lengths
from batchtune.results import Sizing

OPTION = "--current"
MOST_BUCKETS = 100_000
# Nothing that is batched is longer or shorter, in any unit; beyond, boundaries would overflow or coincide.
_SHORTEST, _LONGEST = 1e-9, 1e15
_LARGEST_BATCH_SIZE = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Current:
    """Batching settings as a user has them, checked but not yet applied to lengths.

    Attributes:
        kind: The name of their kind.
        settings: By name, plain values that JSON can hold.
        source: `--current`, or the file's name without its folders.
        key_path: Where in the file; None for the top level and for `--current`.
        notes: What the settings say that is not reproduced, sentences without a full stop.
    """

    kind: str
    settings: Mapping[str, Any]
    source: str
    key_path: str | None = None
    notes: tuple[str, ...] = ()

    def record(self, found: CurrentTable) -> dict[str, Any]:
        """Return what `sweep.json` keeps as `current_settings`."""
        place = {} if self.key_path is None else {"key_path": self.key_path}
        return {"source": self.source, **place, "kind": self.kind, "describe": found.describe, **self.settings}


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentTable:
    """The batches that current settings make, as a table that can be evaluated.

    Attributes:
        table: Covers all of `lengths`.
        lengths: The examples that the settings keep; the given object itself where they keep all.
        sizing: `length` if batch sizes come from one max_batch_length, else `frontier`: sizes per bucket.
        max_batch_length: As the settings have it; None where they have none.
        describe: The settings in a few words.
        exact: Whether the framework makes these very numbers of batches.
        notes: Why not, or what to know; sentences without a full stop.
        left_out: Reason → number of examples that the settings leave out; empty where they keep all.
    """

    table: BucketTable
    lengths: Lengths
    sizing: Sizing
    max_batch_length: float | None
    describe: str
    exact: bool
    notes: tuple[str, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def note(self) -> str | None:
        """All notes as one text; None without any."""
        return "; ".join(self.notes) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Plain values by name, with checked access: a wrong value raises a BatchtuneError that says where it stands.

    Attributes:
        values: Numbers, words, lists of numbers; None for a key without a value.
        source: `--current`, or the file's name.
        key_path: Where in the file; None for the top level and for `--current`.
        lines: The line of each key in a file; None for `--current`.
    """

    values: Mapping[str, Any]
    source: str = OPTION
    key_path: str | None = None
    lines: Mapping[str, int] | None = None

    @property
    def from_file(self) -> bool:
        """Whether they come from a file, and not from the command line."""
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

    def length(self, name: str) -> float:
        """Return a length: a positive number, within what any unit needs."""
        return self._length(name, self.values[name])

    def lengths(self, name: str) -> list[float]:
        """Return a list of lengths in strictly ascending order; a message names the entry, counted from 1."""
        found = [self._length(name, value, entry) for entry, value in self._entries(name)]
        for number, (before, after) in enumerate(pairwise(found), 2):
            if after == before:
                raise self.wrong(name, f"repeats {after:g} as entry {number}", "Give each boundary once.")
            if after < before:
                problem = f"does not ascend: entry {number} is {after:g}, after {before:g}"
                raise self.wrong(name, problem, "Write boundaries in ascending order.")
        return found

    def count(self, name: str, most: int = _LARGEST_BATCH_SIZE) -> int:
        """Return a whole number from 1 to `most`."""
        return self._count(name, self.values[name], most)

    def counts(self, name: str) -> list[int]:
        """Return a list of whole numbers from 1; a message names the entry, counted from 1."""
        return [self._count(name, value, _LARGEST_BATCH_SIZE, entry) for entry, value in self._entries(name)]

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

    def _entries(self, name: str) -> list[tuple[str, Any]]:
        value = self.values[name]
        # `--current bucket_boundaries=10` is a list of one.
        if _is_number(value) and not self.from_file:
            return [("entry 1 ", value)]
        if not isinstance(value, list):
            raise self.wrong(name, f"must be a list of numbers, got {_shown(value)}")
        if not value:
            raise self.wrong(name, "is an empty list")
        if len(value) > MOST_BUCKETS:
            raise self.wrong(name, f"has {len(value):,} entries; {MOST_BUCKETS:,} is the most")
        return [(f"entry {number} ", entry) for number, entry in enumerate(value, 1)]

    def _length(self, name: str, value: Any, entry: str = "") -> float:
        if not _is_number(value):
            raise self.wrong(name, f"{entry}must be a number, got {_shown(value)}")
        if not (value > 0 and math.isfinite(value)):
            raise self.wrong(name, f"{entry}must be positive and finite, got {value:g}")
        if not _SHORTEST <= value <= _LONGEST:
            raise self.wrong(name, f"{entry}must be from {_SHORTEST:g} to {_LONGEST:g}, got {value:g}")
        return float(value)

    def _count(self, name: str, value: Any, most: int, entry: str = "") -> int:
        if not _is_number(value) or not math.isfinite(value) or value != int(value):
            raise self.wrong(name, f"{entry}must be a whole number, got {_shown(value)}")
        if not 1 <= value <= most:
            raise self.wrong(name, f"{entry}must be from 1 to {most:,}, got {value:g}")
        return int(value)


class SettingsKind(ABC):
    """One kind of settings: where a file has them, how they are checked, and the table that they make.

    Attributes:
        name: Its name in `sweep.json`.
        keys: All settings that it may have.
        signs: Any of these says that settings are of this kind.
        inherited: Those that also count from the file's top.
    """

    name: ClassVar[str]
    keys: ClassVar[tuple[str, ...]]
    signs: ClassVar[tuple[str, ...]]
    inherited: ClassVar[tuple[str, ...]] = ()

    def claims(self, names: Collection[str], path: Sequence[str] = ()) -> bool:
        """Return whether settings with these names, at this path of keys in a file, are of this kind."""
        return not set(self.signs).isdisjoint(names)

    @abstractmethod
    def find(self, references: References) -> Block | None:
        """Find the settings of the training in a file; None if it holds none of this kind.

        Raises:
            ResultError: Several are there, or the file is not one to take settings from.
        """

    @abstractmethod
    def read(self, settings: Settings) -> dict[str, object]:
        """Return the settings, checked.

        Raises:
            BatchtuneError: One is missing or wrong, or they ask for batches that no table can express.
        """

    def notes(self, settings: Settings) -> Sequence[str]:
        """Return what the settings say that is not reproduced, as sentences without a full stop."""
        return ()

    @abstractmethod
    def table(self, current: Current, lengths: Lengths) -> CurrentTable:
        """Return the batches that the settings make of these lengths.

        Raises:
            ResultError: The settings are for other lengths: other units, or none is left.
            ValueError: They make no table.
        """


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _shown(value: object) -> str:
    """Quote a value in a message, cut if it is long: entries that are aliases of lists would never end."""
    if value is None:
        return "nothing"
    shown = reprlib.Repr()
    shown.maxlevel, shown.maxlist, shown.maxstring, shown.maxlong = 2, 3, 60, 40
    return shown.repr(value)
