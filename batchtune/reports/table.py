"""Strings and tables as every format for people shows them."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from batchtune.errors import without_commands
from batchtune.units import format_length, format_number, format_ratio

V = TypeVar("V")

UNKNOWN = "\u2013"  # an en dash: unknown, or no question here; never 0
TIMES = "\u00d7"  # the multiplication sign
_MAX_TEXT = 400


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        numeric: Set to the right, with digits of one width.
        wraps: Holds running text that may be broken into lines.
        leaves: Whether and when a narrow terminal leaves it out: the highest first; 0: never, as it tells rows apart.
    """

    title: str
    numeric: bool = True
    wraps: bool = False
    leaves: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of strings.

    Attributes:
        rows: One tuple a row, as long as `columns`.
        notes: Sentences that explain it, shown below.
        marked: Index of the row to set off from the others, or None.
        break_before: Index of the row that begins another group, or None.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    marked: int | None = None
    break_before: int | None = None


def make_table(
    title: str,
    columns: Sequence[Column | None],
    rows: Iterable[Sequence[str]],
    notes: Iterable[str] = (),
    marked: int | None = None,
    break_before: int | None = None,
) -> Table:
    """Return a table of clean strings, without the columns that are None."""
    kept = [index for index, column in enumerate(columns) if column is not None]
    return Table(
        title=clean(title),
        columns=tuple(column for column in columns if column is not None),
        rows=tuple(tuple(clean(row[index]) for index in kept) for row in rows),
        notes=tuple(map(clean, notes)),
        marked=marked,
        break_before=break_before,
    )


def clean(text: str) -> str:
    """Return one line of text that can do nothing to the place where it is shown.

    Result files may come from anywhere: white space of any kind becomes one space, control and formatting
    characters (terminal escapes, changes of writing direction) become U+FFFD, text that GitHub would take for a
    command is parted, and text longer than 400 characters is cut with an ellipsis.
    """
    line = without_commands(" ".join(text.split()))
    line = "".join("\ufffd" if unicodedata.category(char) in ("Cc", "Cf", "Cs") else char for char in line)
    return line if len(line) <= _MAX_TEXT else line[: _MAX_TEXT - 1] + "…"


def cell(value: V | None, words: Callable[[V], str]) -> str:
    """Return a value as a cell: in words, or a dash where it is unknown."""
    return UNKNOWN if value is None else words(value)


def format_times(baseline_cost: float | None, cost: float | None) -> str | None:
    """Return the baseline's cost as a multiple of the cost, `1.34×`; None where one is unknown or 0."""
    return f"{format_ratio(baseline_cost / cost)}{TIMES}" if baseline_cost and cost else None


def format_shape(batch_size: float, length: float, unit: str | None) -> str:
    """Return a batch shape: `165 × 10.5 s`."""
    return f"{format_number(batch_size)} {TIMES} {format_length(length, unit)}"


def shown_of(shown: int, of: int, what: str, file: str) -> tuple[str, ...]:
    """Return the note of a table that shows only some of its rows; none where it shows all."""
    return (f"{shown} of {of}{what} shown; all are in {file}.",) if shown < of else ()


def spread(items: Sequence[V], most: int, keep: Iterable[int | None] = ()) -> list[V]:
    """Return at most so many items, evenly spaced, both ends in; and those at the indices `keep`."""
    if len(items) <= most:
        return list(items)
    chosen = {round(step * (len(items) - 1) / (most - 1)) for step in range(most)}
    return [item for index, item in enumerate(items) if index in chosen or index in keep]
