"""Strings and tables as every format for people shows them."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from batchtune.errors import without_commands
from batchtune.results import Row, StreamRow, Trial, VerifyFailure
from batchtune.units import format_length, format_number, format_ratio

V = TypeVar("V")
Fact = tuple[str, str]
"""A name and a value, or a command and its purpose."""

UNKNOWN = "\u2013"  # an en dash: unknown, or no question here; never 0
TIMES = "\u00d7"  # the multiplication sign
_MAX_TEXT = 400
_MAX_FAILURES = 10
_MAX_LIMITS = 24


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        numeric: Whether it is set to the right, with digits of one width.
        wraps: Whether it holds sentences, which may be broken into lines.
    """

    title: str
    numeric: bool = True
    wraps: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of strings.

    Attributes:
        rows: One tuple a row, as long as `columns`.
        notes: Sentences that explain it, shown below.
        marked: Index of the row to set off from the others, or None.
        break_before: Index of the row that begins another group, or None.
        brief: Whether a brief report shows it, too.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    marked: int | None = None
    break_before: int | None = None
    brief: bool = False


def make_table(
    title: str,
    rows: Sequence[Mapping[str, str | None]],
    notes: Iterable[str] = (),
    marked: int | None = None,
    break_before: int | None = None,
    *,
    names: Collection[str] = (),
    texts: Collection[str] = (),
    brief: bool = False,
) -> Table:
    """Return a table of clean strings.

    Args:
        title: Shown above it.
        rows: At least one. Each declares the columns: title → cell. None is unknown; a column without a known cell is
            left out.
        notes: Sentences shown below.
        marked: Index of the row to set off.
        break_before: Index of the row that begins another group.
        names: The columns that hold names, not numbers.
        texts: The columns that hold sentences.
        brief: Whether a brief report shows it.
    """
    titles = [title for title in rows[0] if any(row[title] is not None for row in rows)]
    columns = [
        Column(clean(title), numeric=title not in names and title not in texts, wraps=title in texts)
        for title in titles
    ]
    cells = [tuple(clean(row[title] or UNKNOWN) for title in titles) for row in rows]
    return Table(
        title=clean(title),
        columns=tuple(columns),
        rows=tuple(cells),
        notes=tuple(map(clean, notes)),
        marked=marked,
        break_before=break_before,
        brief=brief,
    )


def limits_table(title: str, row: Row | StreamRow, unit: str | None, file: str, notes: Iterable[str] = ()) -> Table:
    """Lay out how many examples a batch holds, by its longest."""
    buckets = list(zip(row.boundaries, row.batch_sizes, strict=True))
    rows = [
        {
            "up to": format_length(boundary, unit),
            "batch size": format_number(size),
            "largest batch": format_length(boundary * size, unit),
        }
        for boundary, size in spread(buckets, _MAX_LIMITS)
    ]
    return make_table(f"{title} ({row.name})", rows, [*shown_of(len(rows), len(buckets), " lengths", file), *notes])


def failures_table(title: str, failures: Sequence[Trial | VerifyFailure], unit: str | None, file: str) -> list[Table]:
    """Lay out the first of the batches that failed; no table without any."""
    rows = [
        {
            "batch shape": format_shape(failure.batch_size, failure.length, unit),
            "bucket": str(failure.bucket + 1) if isinstance(failure, VerifyFailure) else None,
            "outcome": "out of memory" if failure.outcome == "oom" else failure.outcome,
            "message": failure.error or UNKNOWN,
        }
        for failure in failures[:_MAX_FAILURES]
    ]
    if not rows:
        return []
    notes = shown_of(len(rows), len(failures), "", file)
    return [make_table(title, rows, notes, names=["batch shape", "outcome"], texts=["message"])]


def clean(text: str) -> str:
    """Return one line of text that can do nothing to the place where it is shown.

    Result files may come from anywhere: white space of any kind becomes one space, control and formatting
    characters (terminal escapes, changes of writing direction) become U+FFFD, text that GitHub would take for a
    command is parted, and text longer than 400 characters is cut with an ellipsis.
    """
    line = without_commands(" ".join(text.split()))
    line = "".join("\ufffd" if unicodedata.category(char) in ("Cc", "Cf", "Cs") else char for char in line)
    return line if len(line) <= _MAX_TEXT else line[: _MAX_TEXT - 1] + "…"


def known(value: V | None, words: Callable[[V], str]) -> str | None:
    """Return a value in words; None where it is unknown."""
    return None if value is None else words(value)


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
    """Return at most `most` items, evenly spaced, both ends in; and those at the indices `keep`."""
    if len(items) <= most:
        return list(items)
    chosen = {round(step * (len(items) - 1) / (most - 1)) for step in range(most)}
    return [item for index, item in enumerate(items) if index in chosen or index in keep]
