"""Settings by name, with checked access: each wrong value gives one message that says where it stands."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from batchtune.errors import BatchtuneError

# Nothing that is batched is longer or shorter, in any unit; beyond, boundaries would overflow or coincide.
_SHORTEST, _LONGEST = 1e-9, 1e15
MOST_BUCKETS = 100_000
_LARGEST_BATCH_SIZE = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Plain values by name, and where each stands.

    Attributes:
        values: Numbers, words, lists of numbers, None where a key is there without a value.
        source: `--current`, or the file's name.
        key_path: Where in the file; None for the top level and for `--current`.
        lines: Of each key, in a file.
        error: What to raise.
        notes: What was seen beside the settings.
    """

    values: Mapping[str, Any]
    source: str
    error: type[BatchtuneError]
    key_path: str | None = None
    lines: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def has(self, name: str) -> bool:
        """Whether there is a value, other than null."""
        return self.values.get(name) is not None

    def wrong(self, name: str | None, problem: str, hint: str | None = None) -> BatchtuneError:
        """The error to raise: where, what, and what to do."""
        where = self.source
        if name is not None and name in self.lines:
            where += f", line {self.lines[name]}"
        path = ".".join(part for part in (self.key_path, name) if part)
        return self.error(f"{where}: {path} {problem}" if path else f"{where}: {problem}", hint)

    def only(self, names: Collection[str]) -> dict[str, Any]:
        """The values of these names that are there, in this order."""
        return {name: self.values[name] for name in names if self.has(name)}

    def length(self, name: str) -> float:
        """A length: a positive number.

        Raises:
            BatchtuneError: It is none, or beyond what any unit needs.
        """
        return self._length(name, self.values[name])

    def lengths(self, name: str) -> list[float]:
        """A list of lengths in strictly ascending order.

        Raises:
            BatchtuneError: Not such a list; the message names the entry, counted from 1.
        """
        entries = self._entries(name)
        found = [self._length(name, entry, index) for index, entry in enumerate(entries, 1)]
        for index in range(1, len(found)):
            if found[index] == found[index - 1]:
                raise self.wrong(name, f"repeats {found[index]:g} as entry {index + 1}", "Give each boundary once.")
            if found[index] < found[index - 1]:
                raise self.wrong(
                    name,
                    f"does not ascend: entry {index + 1} is {found[index]:g}, after {found[index - 1]:g}",
                    "Write boundaries in ascending order.",
                )
        return found

    def count(self, name: str, most: int = _LARGEST_BATCH_SIZE) -> int:
        """A whole number from 1 to `most`.

        Raises:
            BatchtuneError: It is none.
        """
        return self._count(name, self.values[name], most)

    def counts(self, name: str) -> list[int]:
        """A list of whole numbers from 1.

        Raises:
            BatchtuneError: Not such a list; the message names the entry, counted from 1.
        """
        entries = enumerate(self._entries(name), 1)
        return [self._count(name, entry, _LARGEST_BATCH_SIZE, index) for index, entry in entries]

    def flag(self, name: str, default: bool) -> bool:
        """True or false; `default` where it is not set.

        Raises:
            BatchtuneError: It is something else.
        """
        if not self.has(name):
            return default
        value = self.values[name]
        if not isinstance(value, bool):
            raise self.wrong(name, f"must be true or false, got {_shown(value)}")
        return value

    def number(self, name: str) -> float:
        """Any number, infinity included.

        Raises:
            BatchtuneError: It is none, or not a number (nan).
        """
        value = self.values[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
            raise self.wrong(name, f"must be a number, got {_shown(value)}")
        return float(value)

    def _entries(self, name: str) -> list[Any]:
        value = self.values[name]
        # `--current bucket_boundaries=10` is a list of one.
        if isinstance(value, (int, float)) and not isinstance(value, bool) and name not in self.lines:
            return [value]
        if not isinstance(value, list):
            raise self.wrong(name, f"must be a list of numbers, got {_shown(value)}")
        if not value:
            raise self.wrong(name, "is an empty list")
        if len(value) > MOST_BUCKETS:
            raise self.wrong(name, f"has {len(value):,} entries; {MOST_BUCKETS:,} is the most")
        return value

    def _length(self, name: str, value: Any, index: int | None = None) -> float:
        entry = _entry(index)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(name, f"{entry}must be a number, got {_shown(value)}")
        if not (value > 0 and math.isfinite(value)):
            raise self.wrong(name, f"{entry}must be positive and finite, got {value:g}")
        if not _SHORTEST <= value <= _LONGEST:
            raise self.wrong(name, f"{entry}must be from {_SHORTEST:g} to {_LONGEST:g}, got {value:g}")
        return float(value)

    def _count(self, name: str, value: Any, most: int, index: int | None = None) -> int:
        numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not numeric or not math.isfinite(value) or value != int(value):
            raise self.wrong(name, f"{_entry(index)}must be a whole number, got {_shown(value)}")
        if not 1 <= value <= most:
            raise self.wrong(name, f"{_entry(index)}must be from 1 to {most:,}, got {value:g}")
        return int(value)


def _entry(index: int | None) -> str:
    return "" if index is None else f"entry {index} "


def _shown(value: object) -> str:
    """A value in a message, cut where it is long: entries that are aliases of lists would never end."""
    if value is None:
        return "nothing"
    shown = reprlib.Repr()
    shown.maxlevel, shown.maxlist, shown.maxstring, shown.maxlong = 2, 3, 60, 40
    return shown.repr(value)
