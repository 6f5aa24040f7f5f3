"""Sections: what a report says on one result, before any format. A format knows nothing else."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from batchtune.errors import without_commands
from batchtune.units import format_length, format_number, format_ratio

V = TypeVar("V")
Cells = Mapping[str, str | None]
"""A row of a table: title of the column → cell; None is unknown."""

UNKNOWN = "\u2013"  # an en dash: unknown, or no question here; never 0
TIMES = "\u00d7"  # the multiplication sign
_MAX_TEXT = 400
_MAX_ROWS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of clean strings.

    Attributes:
        columns: The title of each.
        rows: One tuple a row, as long as `columns`.
        left: The columns that hold names or sentences; the others hold numbers, set to the right.
        marked: Index of the row to set off from the others, or None.
        note: Says how many rows are not shown; empty if all are.
        brief: Whether a brief report shows it, too.
        folded: Whether it is so long that only a page that can fold it shows it.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: frozenset[str] = frozenset()
    marked: int | None = None
    note: str = ""
    brief: bool = False
    folded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """What a report says on one result.

    Attributes:
        sentences: Say what to set, then what supports it, most important first.
        brief: How many of the sentences a brief report shows; with 0 it shows none of the tables either.
        warnings: Each with its remedy; first those of batches that are not safe.
        next_steps: A command, or a file, and its purpose, in the order to take them.
    """

    title: str
    sentences: Sequence[str]
    brief: int = 1
    tables: Sequence[Table] = ()
    warnings: Sequence[str] = ()
    next_steps: Sequence[tuple[str, str]] = ()


def make_table(
    title: str,
    rows: Sequence[Cells],
    *,
    left: Collection[str] = (),
    marked: int | None = None,
    file: str = "",
    most: int = _MAX_ROWS,
    of: int = 0,
    brief: bool = False,
    folded: bool = False,
) -> Table:
    """Return a table of clean strings, of at most `most` rows and the marked one.

    Args:
        title: Shown above it.
        rows: At least one, each with the same columns; a column without a known cell is left out.
        left: The columns that hold names or sentences.
        marked: Index of the row to set off.
        file: Holds the rows that are not shown.
        most: How many rows to show, evenly spaced.
        of: How many rows the file has, if these are chosen from them.
        brief: Whether a brief report shows it.
        folded: Whether only a page that can fold it shows it.
    """
    columns = [
        column for column in rows[0] if any(row[column] is not None for row in rows)
    ]
    shown = spread(len(rows), most, marked)
    note = ""
    total = max(of, len(rows))
    if len(shown) < total:
        note = f"{len(shown):,} of {total:,} rows shown; all are in {file}."
    return Table(
        title=clean(title),
        columns=tuple(map(clean, columns)),
        rows=tuple(
            tuple(clean(rows[index][column] or UNKNOWN) for column in columns)
            for index in shown
        ),
        left=frozenset(map(clean, left)),
        marked=None if marked is None else shown.index(marked),
        note=note,
        brief=brief,
        folded=folded,
    )


def settings_table(title: str, settings: Mapping[str, Any]) -> Table:
    """Return settings as a file records them, as a folded table."""
    rows = [{"name": name, "value": str(value)} for name, value in settings.items()]
    return make_table(title, rows, left=["name", "value"], folded=True)


def spread(count: int, most: int, keep: int | None = None) -> list[int]:
    """Return at most `most` of `count` indices, evenly spaced, both ends in; and the one to `keep`."""
    if count <= most:
        return list(range(count))
    chosen = {round(step * (count - 1) / (most - 1)) for step in range(most)}
    if keep is not None:
        chosen.add(keep)
    return sorted(chosen)


def clean(text: str) -> str:
    """Return one line of text that can do nothing to the place where it is shown.

    Result files may come from anywhere: white space of any kind becomes one space, control and formatting
    characters (terminal escapes, changes of writing direction) become U+FFFD, text that GitHub would take for a
    command is parted, and text longer than 400 characters is cut with an ellipsis.
    """
    line = without_commands(" ".join(text.split()))
    line = "".join(
        "\ufffd" if unicodedata.category(char) in ("Cc", "Cf", "Cs") else char
        for char in line
    )
    return line if len(line) <= _MAX_TEXT else line[: _MAX_TEXT - 1] + "…"


def known(value: V | None, words: Callable[[V], str]) -> str | None:
    """Return a value in words; None where it is unknown."""
    return None if value is None else words(value)


def format_times(cost: float | None, reference: float | None) -> str | None:
    """Return a cost as a multiple of a reference, `1.34×`; None where one is unknown or 0."""
    return f"{format_ratio(cost / reference)}{TIMES}" if cost and reference else None


def format_share(share: float) -> str:
    """Return a share, which may be small, as per cent with 3 significant digits: `12.9%`, `0.0946%`."""
    return "less than 0.001%" if 0 < share < 1e-5 else f"{100 * share:.3g}%"


def format_shape(batch_size: float, length: float, unit: str | None) -> str:
    """Return a batch shape: `165 × 10.5 s`."""
    return f"{format_number(batch_size)} {TIMES} {format_length(length, unit)}"
