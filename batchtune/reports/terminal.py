"""A run's report on a terminal: readable at a glance in 80 columns, and without colour."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace

from rich import box
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Column as RichColumn
from rich.table import Table as RichTable
from rich.text import Text

from batchtune.reports.page import (
    Page,
    build_brief_page,
    build_brief_verification_page,
    build_page,
    build_verification_page,
)
from batchtune.reports.run import RunResults
from batchtune.reports.table import TIMES, UNKNOWN, Column, Table

_WIDTH = 80
# So many sentences of the summary follow the first one at the top; the rest comes after the tables, under "More".
_BULLETS = 7
# A table of few, narrow columns and more rows than this is set in several blocks side by side.
_FOLD_ROWS = 6
_FOLD_BLOCKS = 2
# Of the brief report, on a screen of 80 columns; its first warning is shown in any case.
_BRIEF_LINES = 20
# Of the gate's verdicts, by their first cell.
_OUTCOME_STYLES = {"holds": "green", "fails": "bold red", "error": "bold yellow"}

# What stands for our own signs where the terminal's encoding has none of them.
_PLAIN = str.maketrans({"▶": ">", TIMES: "x", UNKNOWN: "-", "…": "...", "µ": "u", "“": '"', "”": '"', "\ufffd": "?"})


def render(results: RunResults, *, full: bool = True) -> str:
    """Return the report as plain text, 80 columns wide, whatever the environment says of colours and widths.

    Args:
        results: What the run folder holds.
        full: All of it, rather than what fits on a screen.
    """
    stream = io.StringIO()
    console = Console(
        file=stream, width=_WIDTH, color_system=None, force_terminal=False, legacy_windows=False, _environ={}
    )
    render_terminal(results, console, full=full)
    return "".join(f"{line.rstrip()}\n" for line in stream.getvalue().splitlines())


def render_terminal(results: RunResults, console: Console, *, full: bool) -> None:
    """Print the report; colours and width are the console's."""
    if full:
        _render_page(build_page(results), console)
    else:
        _render_brief(build_brief_page(results), console)


def render_verification(results: RunResults, console: Console, *, full: bool) -> None:
    """Print what the run's verification showed; colours and width are the console's."""
    if full:
        _render_page(build_verification_page(results), console)
    else:
        _render_brief(build_brief_verification_page(results), console)


def _render_brief(page: Page, console: Console) -> None:
    """Print what fits on a screen: a headline, a table, a few sentences, the first warnings, what to do next."""
    before: list[RenderableType] = []
    if page.verdicts is not None:
        before += [_verdicts(page.verdicts, console), ""]
    before += [_text(page.summary[0], console, "bold"), ""]
    for table in page.tables:
        before += [*_with_words(table, console), ""]
    if page.summary[1:]:
        before.append(_bullets(page.summary[1:], "-", console))
    after: list[RenderableType] = [""] if page.summary[1:] or page.warnings else []
    after += _steps(page.next_steps, console)
    room = _BRIEF_LINES - sum(_height(part, console) for part in (*before, *after))
    console.print(Group(*before, *_first_warnings(page.warnings, room, console), *after), crop=False)


def _height(part: RenderableType, console: Console) -> int:
    return len(console.render_lines(part, pad=False))


def _first_warnings(warnings: Sequence[str], room: int, console: Console) -> list[RenderableType]:
    """Lay out the first warning, the next ones while there is room, and how many more there are."""
    bullets = [_bullets([warning], "!", console, style="yellow") for warning in warnings]
    count = len(warnings)
    while count > 1 and sum(_height(bullet, console) for bullet in bullets[:count]) + (count < len(warnings)) > room:
        count -= 1
    shown: list[RenderableType] = [*bullets[:count]]
    if left := len(warnings) - count:
        more = f"{left} more {'warning' if left == 1 else 'warnings'}: --full shows {'it' if left == 1 else 'them'}."
        shown.append(_bullets([more], "!", console, style="yellow"))
    return shown


def _steps(steps: Sequence[tuple[str, str]], console: Console) -> list[RenderableType]:
    """Lay out commands, unbroken so that they can be copied, each with its purpose next to it, or below a long one."""
    gap, width, rest = 2, 0, 0
    for command, purpose in sorted(steps, key=lambda step: len(step[0])):
        if len(command) + gap + max(rest, len(purpose)) <= console.width:
            width, rest = len(command), max(rest, len(purpose))
    lines: list[RenderableType] = []
    for command, purpose in steps:
        what_for = _text(purpose, console, "dim")
        if len(command) <= width:
            lines.append(_text(f"{command:{width + gap}}", console, "bold") + what_for)
        else:
            whole = _text(command, console, "bold")
            whole.no_wrap, whole.overflow = True, "ignore"
            lines += [whole, Padding(what_for, (0, 0, 0, gap))]
    return lines


def _render_page(page: Page, console: Console) -> None:
    console.print(_text(page.title, console, "bold"))
    console.print()
    if page.verdicts is not None:
        console.print(_verdicts(page.verdicts, console))
        console.print()
    headline, bullets, more = page.summary[0], page.summary[1 : _BULLETS + 1], page.summary[_BULLETS + 1 :]
    console.print(_text(headline, console, "bold"))
    if bullets:
        console.print()
        console.print(_bullets(bullets, "-", console))
    console.print()
    console.print(_facts(page.facts, console))
    for table in page.tables:
        console.print()
        for part in _with_words(table, console):
            console.print(part, crop=False)
    if more:
        console.print()
        console.print(_text("More", console, "bold"))
        console.print(_bullets(more, "-", console))
    if page.warnings:
        console.print()
        console.print(_text("Warnings", console, "bold yellow"))
        console.print(_bullets(page.warnings, "!", console))


def _verdicts(verdicts: Table, console: Console) -> RichTable:
    rich_table = _lay_out(verdicts, console, one_line=True, padding=1)
    for row, cells in zip(rich_table.rows, verdicts.rows, strict=True):
        row.style = _OUTCOME_STYLES[cells[0]]
    return rich_table


def _facts(facts: Sequence[tuple[str, str]], console: Console) -> RichTable:
    grid = RichTable.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for name, value in facts:
        grid.add_row(_text(name, console), _text(value, console))
    return grid


def _bullets(sentences: Sequence[str], bullet: str, console: Console, style: str = "") -> RichTable:
    grid = RichTable.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True, style=style)
    grid.add_column(overflow="fold")
    for sentence in sentences:
        grid.add_row(bullet, _text(sentence, console))
    return grid


def _with_words(table: Table, console: Console) -> list[RenderableType]:
    """Lay out a table as airy as the width allows, with its title above and its notes below.

    Where it is too wide even with its words below each other, columns are left out, and a note names them; those that
    tell rows apart never are: beyond that, lines are wider than the terminal.
    """
    rich_table, left_out = _fitted(table, console)
    title = [_text(table.title, console, "bold")] if table.title else []
    notes = [*([f"Left out, as too wide: {', '.join(left_out)}."] if left_out else []), *table.notes]
    return [*title, rich_table, *(_text(note, console, "dim") for note in notes)]


def _fitted(table: Table, console: Console) -> tuple[RichTable, list[str]]:
    """Return the table laid out for the width, and the titles of the columns that it has no room for."""
    if any(column.wraps for column in table.columns):
        return _lay_out(table, console, one_line=True, padding=1), []
    left_out: list[str] = []
    for candidate in (fold(table), table):
        for one_line, padding in ((True, 1), (False, 1), (False, 0)):
            rich_table = _lay_out(candidate, console, one_line=one_line, padding=padding)
            if _width(rich_table, console) <= console.width:
                return rich_table, left_out
    while True:
        narrowest = _width(_lay_out(_stacked(table), console, one_line=False, padding=0), console)
        rich_table = _lay_out(table, console, one_line=False, padding=0)
        if narrowest <= console.width:
            return rich_table, left_out
        last = max(range(len(table.columns)), key=lambda index: table.columns[index].leaves)
        if not table.columns[last].leaves:
            rich_table.width = narrowest
            return rich_table, left_out
        left_out.append(table.columns[last].title)
        table = _without(table, last)


def _stacked(table: Table) -> Table:
    """Return the table with the words of its texts below each other."""
    rows = (
        tuple(
            cell if column.numeric else "\n".join(cell.split()) for cell, column in zip(row, table.columns, strict=True)
        )
        for row in table.rows
    )
    return replace(table, rows=tuple(rows))


def _without(table: Table, index: int) -> Table:
    columns, rows = (*table.columns[:index], *table.columns[index + 1 :]), table.rows
    return replace(table, columns=columns, rows=tuple((*row[:index], *row[index + 1 :]) for row in rows))


def _width(rich_table: RichTable, console: Console) -> int:
    unlimited = console.options.update(max_width=10_000)
    return Measurement.get(console, unlimited, rich_table).maximum


def _lay_out(table: Table, console: Console, *, one_line: bool, padding: int) -> RichTable:
    rich_table = RichTable(
        *(_rich_column(column, console, one_line) for column in table.columns),
        box=box.SIMPLE_HEAD,
        padding=(0, padding, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for index, row in enumerate(table.rows):
        if index == table.break_before:
            rich_table.add_section()
        cells: list[RenderableType] = [_text(cell, console) for cell in row]
        if table.marked is not None:
            mark = "▶" if index == table.marked else " "
            numeric = table.columns[0].numeric
            cells[0] = _text(f"{mark} {row[0]}", console) if numeric else _beside(_text(mark, console), cells[0])
        rich_table.add_row(*cells, style="bold green" if index == table.marked else "")
    return rich_table


def _beside(mark: Text, cell: RenderableType) -> RichTable:
    """Return the cell with room before it for the mark, also before its second line."""
    grid = RichTable.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column()
    grid.add_row(mark, cell)
    return grid


def _rich_column(column: Column, console: Console, one_line: bool) -> RichColumn:
    # Only text may be broken into lines where the width is short: a number without its end is another number.
    return RichColumn(
        header=_text(column.title if one_line else "\n".join(column.title.split()), console),
        justify="right" if column.numeric else "left",
        vertical="top" if one_line else "bottom",
        no_wrap=column.numeric,
        overflow="fold",
    )


def fold(table: Table) -> Table:
    """Return a long table of three columns or fewer in two blocks side by side, the first to be read first.

    Other tables come back as they are.
    """
    if len(table.columns) > 3 or len(table.rows) <= _FOLD_ROWS or any(c.wraps for c in table.columns):
        return table
    height = -(-len(table.rows) // _FOLD_BLOCKS)
    empty = ("",) * len(table.columns)
    cells = table.rows + (empty,) * (height * _FOLD_BLOCKS - len(table.rows))
    rows = (
        tuple(cell for block in range(_FOLD_BLOCKS) for cell in cells[row + block * height]) for row in range(height)
    )
    return replace(table, columns=table.columns * _FOLD_BLOCKS, rows=tuple(rows), marked=None, break_before=None)


def _text(text: str, console: Console, style: str = "") -> Text:
    """Return text without markup, and without what the terminal's encoding can't write."""
    try:
        text.encode(console.encoding)
    except UnicodeEncodeError:
        text = text.translate(_PLAIN).encode(console.encoding, "replace").decode(console.encoding)
    return Text(text, style=style, overflow="fold")
