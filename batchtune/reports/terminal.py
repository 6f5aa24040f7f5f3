"""A run's report on a terminal: readable at a glance in 80 columns, and without colour."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from rich import box
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Column as RichColumn
from rich.table import Table as RichTable
from rich.text import Text

from batchtune.reports.page import Page, build_page, build_verification_page
from batchtune.reports.run import RunResults
from batchtune.reports.table import TIMES, UNKNOWN, Column, Fact, Table
from batchtune.units import counted

_WIDTH = 80
# How many sentences of the summary follow the first one at the top; the rest comes after the tables, under "More".
_BULLETS = 7
# A table of few, narrow columns and more rows than this is set in two blocks side by side.
_FOLD_ROWS = 6
# The most lines of a brief report at 80 columns; its first warning is always shown.
_BRIEF_LINES = 20
# Styles of the gate's verdicts, by their first cell.
_OUTCOME_STYLES = {"holds": "green", "fails": "bold red", "error": "bold yellow"}
# For a terminal whose encoding lacks our own signs.
_PLAIN = str.maketrans(
    {"▶": ">", TIMES: "x", UNKNOWN: "-", "…": "...", "µ": "u", "±": "+-", "“": '"', "”": '"', "\ufffd": "?"}
)


def render(results: RunResults, *, full: bool = True) -> str:
    """Return the report as plain text, 80 columns wide, whatever the environment says of colours and widths."""
    stream = io.StringIO()
    console = Console(
        file=stream, width=_WIDTH, color_system=None, force_terminal=False, legacy_windows=False, _environ={}
    )
    render_terminal(results, console, full=full)
    return "".join(f"{line.rstrip()}\n" for line in stream.getvalue().splitlines())


def render_terminal(results: RunResults, console: Console, *, full: bool) -> None:
    """Print the report; colours and width are the console's."""
    _Layout(console).print(build_page(results, brief=not full))


def render_verification(results: RunResults, console: Console, *, full: bool) -> None:
    """Print what the run's verification showed; colours and width are the console's."""
    _Layout(console).print(build_verification_page(results, brief=not full))


def render_facts(groups: Mapping[str, Sequence[Fact]], console: Console) -> None:
    """Print lists of facts, each under its title."""
    layout = _Layout(console)
    parts: list[RenderableType] = []
    for title, facts in groups.items():
        if parts:
            parts.append("")
        if title:
            parts.append(layout.text(title, "bold"))
        parts.append(layout.facts(facts, indent=2 if title else 0))
    console.print(Group(*parts), crop=False)


class _Layout:
    """Lays out the parts of a page for a console's width and encoding."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def print(self, page: Page) -> None:
        parts = self.brief(page) if page.next_steps else self.whole(page)
        self.console.print(Group(*parts), crop=False)

    def whole(self, page: Page) -> list[RenderableType]:
        parts: list[RenderableType] = [self.text(page.title, "bold"), ""]
        if page.verdicts is not None:
            parts += [self.verdicts(page.verdicts), ""]
        bullets, more = page.summary[1 : _BULLETS + 1], page.summary[_BULLETS + 1 :]
        parts.append(self.text(page.summary[0], "bold"))
        if bullets:
            parts += ["", self.bullets(bullets, "-")]
        parts += ["", self.facts(page.facts)]
        for table in page.tables:
            parts += ["", *self.table(table)]
        if more:
            parts += ["", self.text("More", "bold"), self.bullets(more, "-")]
        if page.warnings:
            parts += ["", self.text("Warnings", "bold yellow"), self.bullets(page.warnings, "!")]
        return parts

    def brief(self, page: Page) -> list[RenderableType]:
        """Lay out what fits on a screen: a headline, a table, a few sentences, the first warnings, what to do next."""
        before: list[RenderableType] = [] if page.verdicts is None else [self.verdicts(page.verdicts), ""]
        before += [self.text(page.summary[0], "bold"), ""]
        for table in page.tables:
            before += [*self.table(table), ""]
        if page.summary[1:]:
            before.append(self.bullets(page.summary[1:], "-"))
        after: list[RenderableType] = [""] if page.summary[1:] or page.warnings else []
        after += self.steps(page.next_steps)
        room = _BRIEF_LINES - self.height([*before, *after])
        return [*before, *self.first_warnings(page.warnings, room), *after]

    def height(self, parts: Iterable[RenderableType]) -> int:
        return sum(len(self.console.render_lines(part, pad=False)) for part in parts)

    def first_warnings(self, warnings: Sequence[str], room: int) -> list[RenderableType]:
        """Lay out the first warning, the next ones while there is room, and the number of the others."""
        count = len(warnings)
        shown: list[RenderableType] = [self.bullets([text], "!", "yellow") for text in warnings]
        while count > 1 and self.height(shown) > room:
            count -= 1
            left = len(warnings) - count
            more = f"{counted(left, 'more warning')}: --full shows {'it' if left == 1 else 'them'}."
            shown = [*shown[:count], self.bullets([more], "!", "yellow")]
        return shown

    def steps(self, steps: Sequence[Fact]) -> list[RenderableType]:
        """Lay out commands, unbroken so that they can be copied, each with its purpose to the right, or below it."""
        gap, width, rest = 2, 0, 0
        for command, purpose in sorted(steps, key=lambda step: len(step[0])):
            rest = max(rest, len(purpose))
            if len(command) + gap + rest <= self.console.width:
                width = len(command)
        lines: list[RenderableType] = []
        for command, purpose in steps:
            what_for = self.text(purpose, "dim")
            if len(command) <= width:
                lines.append(self.text(f"{command:{width + gap}}", "bold") + what_for)
            else:
                whole = self.text(command, "bold")
                whole.no_wrap, whole.overflow = True, "ignore"
                lines += [whole, Padding(what_for, (0, 0, 0, gap))]
        return lines

    def verdicts(self, verdicts: Table) -> RichTable:
        rich_table = self.lay_out(verdicts, one_line=True, padding=1)
        for row, cells in zip(rich_table.rows, verdicts.rows, strict=True):
            row.style = _OUTCOME_STYLES[cells[0]]
        return rich_table

    def facts(self, facts: Sequence[Fact], indent: int = 0) -> RenderableType:
        grid = RichTable.grid(padding=(0, 2, 0, 0))
        grid.add_column(no_wrap=True, style="dim")
        grid.add_column(overflow="fold")
        for name, value in facts:
            grid.add_row(self.text(name), self.text(value))
        return Padding(grid, (0, 0, 0, indent))

    def bullets(self, sentences: Sequence[str], bullet: str, style: str = "") -> RichTable:
        grid = RichTable.grid(padding=(0, 1, 0, 0))
        grid.add_column(no_wrap=True, style=style)
        grid.add_column(overflow="fold")
        for sentence in sentences:
            grid.add_row(bullet, self.text(sentence))
        return grid

    def text(self, text: str, style: str = "") -> Text:
        """Return text without markup, and without what the terminal's encoding can't write."""
        try:
            text.encode(self.console.encoding)
        except UnicodeEncodeError:
            text = text.translate(_PLAIN).encode(self.console.encoding, "replace").decode(self.console.encoding)
        return Text(text, style=style, overflow="fold")

    def table(self, table: Table) -> list[RenderableType]:
        """Lay out a table as airy as the width allows, with its title above and its notes below.

        Where it is too wide even with its words below each other, columns are left out, and a note names them; those
        that tell rows apart never are: beyond that, lines are wider than the terminal.
        """
        rich_table, left_out = self.fitted(table)
        title = [self.text(table.title, "bold")] if table.title else []
        notes = [*([f"Left out, as too wide: {', '.join(left_out)}."] if left_out else []), *table.notes]
        return [*title, rich_table, *(self.text(note, "dim") for note in notes)]

    def fitted(self, table: Table) -> tuple[RichTable, list[str]]:
        """Return the table laid out for the width, and the titles of the columns that it has no room for."""
        if any(column.wraps for column in table.columns):
            return self.lay_out(table, one_line=True, padding=1), []
        for candidate in (fold(table), table):
            for one_line, padding in ((True, 1), (False, 1), (False, 0)):
                rich_table = self.lay_out(candidate, one_line=one_line, padding=padding)
                if self.measured(rich_table) <= self.console.width:
                    return rich_table, []
        left_out: list[str] = []
        while True:
            columns, rows = table.columns, table.rows
            rich_table = self.lay_out(table, one_line=False, padding=0)
            stacked = replace(table, rows=tuple(tuple(map(_stacked, row, columns)) for row in rows))
            narrowest = self.measured(self.lay_out(stacked, one_line=False, padding=0))
            if narrowest <= self.console.width:
                return rich_table, left_out
            last = max(range(len(columns)), key=lambda index: columns[index].leaves)
            if not columns[last].leaves:
                rich_table.width = narrowest
                return rich_table, left_out
            left_out.append(columns[last].title)
            rows = tuple((*row[:last], *row[last + 1 :]) for row in rows)
            table = replace(table, columns=(*columns[:last], *columns[last + 1 :]), rows=rows)

    def measured(self, rich_table: RichTable) -> int:
        return Measurement.get(self.console, self.console.options.update(max_width=10_000), rich_table).maximum

    def lay_out(self, table: Table, *, one_line: bool, padding: int) -> RichTable:
        rich_table = RichTable(box=box.SIMPLE_HEAD, padding=(0, padding, 0, 0), pad_edge=False, show_edge=False)
        for column in table.columns:
            # Only text may be broken into lines where the width is short: a number without its end is another number.
            rich_table.add_column(
                self.text(column.title if one_line else "\n".join(column.title.split())),
                justify="right" if column.numeric else "left",
                vertical="top" if one_line else "bottom",
                no_wrap=column.numeric,
                overflow="fold",
            )
        for index, row in enumerate(table.rows):
            if index == table.break_before:
                rich_table.add_section()
            cells: list[RenderableType] = [self.text(cell) for cell in row]
            if table.marked is not None:
                mark = "▶" if index == table.marked else " "
                if table.columns[0].numeric:
                    cells[0] = self.text(f"{mark} {row[0]}")
                else:  # room for the mark also before the cell's second line
                    grid = RichTable.grid(RichColumn(no_wrap=True), RichColumn(), padding=(0, 1, 0, 0))
                    grid.add_row(self.text(mark), cells[0])
                    cells[0] = grid
            rich_table.add_row(*cells, style="bold green" if index == table.marked else "")
        return rich_table


def _stacked(cell: str, column: Column) -> str:
    """Return the words of a text below each other; a number as it is."""
    return cell if column.numeric else "\n".join(cell.split())


def fold(table: Table) -> Table:
    """Return a long table of three columns or fewer in two blocks side by side, the first to be read first.

    Other tables come back as they are.
    """
    if len(table.columns) > 3 or len(table.rows) <= _FOLD_ROWS or any(c.wraps for c in table.columns):
        return table
    height = -(-len(table.rows) // 2)
    right = (*table.rows[height:], ("",) * len(table.columns))
    rows = tuple((*left, *right[index]) for index, left in enumerate(table.rows[:height]))
    return replace(table, columns=table.columns * 2, rows=rows, marked=None, break_before=None)
