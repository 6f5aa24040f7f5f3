"""A run's report on a terminal: readable at a glance in 80 columns, and without colour."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from rich import box
from rich.align import VerticalAlignMethod
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from batchtune.reports.page import Page, build_page, build_verification_page
from batchtune.reports.run import RunResults
from batchtune.reports.table import TIMES, UNKNOWN, Fact, Table
from batchtune.units import counted

_WIDTH = 80
# The most lines of a brief report at 80 columns; its first warning is always shown.
_BRIEF_LINES = 20
# Tables of more columns are set close, with the words of their titles below each other.
_AIRY_COLUMNS = 6
# A longer word, such as a path in an error message, may be broken.
_MOST_UNBROKEN = 24
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
    _Layout(console).print(build_page(results), full=full)


def render_verification(results: RunResults, console: Console, *, full: bool) -> None:
    """Print what the run's verification showed; colours and width are the console's."""
    _Layout(console).print(build_verification_page(results), full=full)


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

    def print(self, page: Page, *, full: bool) -> None:
        parts = self.whole(page) if full else self.brief(page)
        self.console.print(Group(*parts), crop=False)

    def whole(self, page: Page) -> list[RenderableType]:
        parts: list[RenderableType] = [self.text(page.title, "bold"), "", *self.verdicts(page)]
        parts += [self.text(page.lead[0], "bold"), "", self.bullets([*page.lead[1:], *page.details], "-")]
        parts += ["", self.facts(page.facts)]
        for table in page.tables:
            parts += ["", *self.table(table)]
        if page.warnings:
            parts += ["", self.text("Warnings", "bold yellow"), self.bullets(page.warnings, "!")]
        return parts

    def brief(self, page: Page) -> list[RenderableType]:
        """Lay out what fits on a screen: a headline, a table, a few sentences, the first warnings, what to do next."""
        before: list[RenderableType] = [*self.verdicts(page), self.text(page.lead[0], "bold"), ""]
        tables = [table for table in page.tables if table.brief]
        for table in tables:
            title = table.title if len(tables) > 1 else ""
            before += [*self.table(replace(table, title=title)), ""]
        if page.lead[1:]:
            before.append(self.bullets(page.lead[1:], "-"))
        after: list[RenderableType] = []
        if page.lead[1:] or page.warnings:
            after.append("")
        after += self.steps(page.next_steps)
        room = _BRIEF_LINES - self.height([*before, *after])
        return [*before, *self.first_warnings(page.warnings, room), *after]

    def height(self, parts: Iterable[RenderableType]) -> int:
        return sum(len(self.console.render_lines(part, pad=False)) for part in parts)

    def first_warnings(self, warnings: Sequence[str], room: int) -> list[RenderableType]:
        """Lay out the first warning, the next ones while there is room, and the number of the others."""
        for count in range(len(warnings), 0, -1):
            texts = list(warnings[:count])
            left = len(warnings) - count
            if left:
                texts.append(f"{counted(left, 'more warning')}: --full shows {'it' if left == 1 else 'them'}.")
            shown = self.bullets(texts, "!", "yellow")
            if count == 1 or self.height([shown]) <= room:
                return [shown]
        return []

    def steps(self, steps: Sequence[Fact]) -> list[RenderableType]:
        """Lay out commands, unbroken so that they can be copied, each with its purpose to the right, or below it."""
        width = max(len(command) for command, _ in steps) + 2
        if width + max(len(purpose) for _, purpose in steps) > self.console.width:
            width = 0
        lines: list[RenderableType] = []
        for command, purpose in steps:
            shown = Text(command, "bold", no_wrap=True, overflow="ignore")
            gap = max(2, width - len(command))
            if len(command) + gap + len(purpose) <= self.console.width:
                lines.append(shown + " " * gap + self.text(purpose, "dim"))
            else:
                lines += [shown, Padding(self.text(purpose, "dim"), (0, 0, 0, 2))]
        return lines

    def verdicts(self, page: Page) -> list[RenderableType]:
        if page.verdicts is None:
            return []
        rich_table = self.laid_out(page.verdicts)
        for row, cells in zip(rich_table.rows, page.verdicts.rows, strict=True):
            row.style = _OUTCOME_STYLES[cells[0]]
        return [rich_table, ""]

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
        """Lay out a table, with its title above and its notes below."""
        title = [self.text(table.title, "bold")] if table.title else []
        return [*title, self.laid_out(table), *(self.text(note, "dim") for note in table.notes)]

    def laid_out(self, table: Table) -> RichTable:
        is_wide = len(table.columns) > _AIRY_COLUMNS
        padding = 0 if is_wide else 1
        rich_table = RichTable(box=box.SIMPLE_HEAD, padding=(0, padding, 0, 0), pad_edge=False, show_edge=False)
        rows = [list(row) for row in table.rows]
        if table.marked is not None:
            for index, row in enumerate(rows):
                row[0] = f"{'▶' if index == table.marked else ' '} {row[0]}"
        vertical: VerticalAlignMethod = "top" if any(column.wraps for column in table.columns) else "bottom"
        least_width = 0
        for column, *cells in zip(table.columns, *rows, strict=True):
            # Only between words may a cell be broken: a number without its end is another number.
            words = column.title.split()
            parts = [*words, *cells] if column.numeric else " ".join([*words, *cells]).split()
            min_width = min(_MOST_UNBROKEN, max(map(len, parts), default=1))
            if table.marked is not None and not rich_table.columns:
                min_width += 2
            least_width += min_width + 1 + padding
            rich_table.add_column(
                self.text("\n".join(words) if is_wide else column.title),
                justify="right" if column.numeric else "left",
                vertical=vertical,
                no_wrap=is_wide and column.numeric,
                overflow="fold",
                min_width=min_width,
            )
        least_width -= 1 + padding  # the last column has no gap
        if least_width > self.console.width:  # lines are wider than the terminal then
            rich_table.width = least_width
        for index, row in enumerate(rows):
            if index == table.break_before:
                rich_table.add_section()
            style = "bold green" if index == table.marked else ""
            rich_table.add_row(*(self.text(cell) for cell in row), style=style)
        return rich_table
