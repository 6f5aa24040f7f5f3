"""A table of strings, as every format for people renders it."""

from __future__ import annotations

from dataclasses import dataclass

UNKNOWN = "\u2013"  # an en dash: unknown, or no question here; never 0
TIMES = "\u00d7"  # the multiplication sign


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        title: Its heading.
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
        title: Its heading.
        columns: One entry a column.
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
