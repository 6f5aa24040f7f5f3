"""A run's report on a terminal: readable at a glance in 80 columns, and without colour."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from batchtune.reports import RunResults
from batchtune.reports.page import Page, build_page
from batchtune.reports.section import TIMES, UNKNOWN, Table
from batchtune.units import counted

# The most lines of a brief report at 80 columns; its first warning is always shown.
_BRIEF_LINES = 20
_MARK = "▶"
# A longer word, such as a path in an error message, may be broken.
_MOST_UNBROKEN = 20
# Columns for a command; the purpose of a longer one follows it, or stands below if the terminal is too narrow for both.
_COMMAND = 42
# Styles of the gate's verdicts, by their first cell.
_OUTCOME_STYLES = {"holds": "green", "fails": "bold red", "error": "bold yellow"}
# For a terminal whose encoding lacks our own signs.
_PLAIN = str.maketrans(
    {
        _MARK: ">",
        TIMES: "x",
        UNKNOWN: "-",
        "…": ".",
        "µ": "u",
        "±": "~",
        "█": "#",
        "\ufffd": "?",
    }
)


def render(results: RunResults, *, full: bool = True) -> str:
    """Return the report as plain text, 80 columns wide, whatever the environment says of colours and widths."""
    console = Console(
        file=io.StringIO(),
        width=80,
        color_system=None,
        force_terminal=False,
        _environ={},
    )
    return text_of(build_page(results), console, full=full)


def text_of(page: Page, console: Console, *, full: bool) -> str:
    """Return a page as text of the console's width, colours and encoding; no line ends in spaces."""
    parts = _whole(page, console)
    if not full:
        parts = _brief(page, console)
    text = _printed(parts, console)
    try:
        text.encode(console.encoding)
    except UnicodeEncodeError:
        return (
            text.translate(_PLAIN)
            .encode(console.encoding, "replace")
            .decode(console.encoding)
        )
    return text


def _printed(parts: Sequence[RenderableType], console: Console) -> str:
    with console.capture() as capture:
        console.print(Group(*parts), crop=False)
    return "".join(f"{line.rstrip()}\n" for line in capture.get().split("\n")[:-1])


def _whole(page: Page, console: Console) -> list[RenderableType]:
    """Lay out all but what is folded."""
    parts: list[RenderableType] = [Text(page.title, "bold")]
    if page.lead:
        parts += ["", Text(page.lead[0], "bold"), "", _bullets(page.lead[1:], "-")]
    for section in page.sections:
        sentences = section.sentences[section.brief :]
        if sentences:
            parts += ["", Text(section.title, "bold"), _bullets(sentences, "-")]
        for table in section.tables:
            if not table.folded:
                parts += ["", *_table(table, console)]
    if page.warnings:
        parts += ["", Text("Warnings", "bold yellow"), _bullets(page.warnings, "!")]
    return parts


def _brief(page: Page, console: Console) -> list[RenderableType]:
    """Lay out what fits on a screen: the headline, its tables, a few sentences, the first warnings, what to do next."""
    headline, *others = page.lead
    before: list[RenderableType] = [Text(headline, "bold"), ""]
    for section in page.sections:
        for table in section.tables:
            if table.brief and section.brief:
                before += [*_table(table, console, folds=False)[1:], ""]
    if others:
        before.append(_bullets(others, "-"))
    after: list[RenderableType] = [""]
    for command, purpose in page.next_steps:  # unbroken, so that it can be copied
        gap = "  "
        if len(command) + len(gap) + len(purpose) > console.width:
            gap = "\n    "
        line = Text.assemble(
            (command.ljust(_COMMAND), "bold"),
            gap,
            (purpose, "dim"),
            no_wrap=True,
            overflow="ignore",
        )
        after.append(line)
    room = _BRIEF_LINES - _height([*before, *after], console)
    return [*before, *_first_warnings(page.warnings, room, console), *after]


def _first_warnings(
    warnings: Sequence[str], room: int, console: Console
) -> list[RenderableType]:
    """Lay out the first warning, the next ones while there is room, and the number of the others."""
    for count in range(len(warnings), 0, -1):
        texts = list(warnings[:count])
        if count < len(warnings):
            texts.append(
                f"{counted(len(warnings) - count, 'more warning')}: --full shows all."
            )
        bullets = _bullets(texts, "!")
        if count == 1 or _height([bullets], console) <= room:
            return [bullets]
    return []


def _height(parts: Sequence[RenderableType], console: Console) -> int:
    return _printed(parts, console).count("\n")


def _bullets(sentences: Sequence[str], bullet: str) -> RichTable:
    grid = RichTable.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    for sentence in sentences:
        grid.add_row(bullet, Text(sentence))
    return grid


def _table(
    table: Table, console: Console, *, folds: bool = True
) -> list[RenderableType]:
    """Lay out a table, with its title above and its note below; without spare columns where they don't fit.

    If it folds, names are broken before that.
    """
    rich_table = RichTable(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    marks = [""] * len(table.rows)
    if table.marked is not None:
        marks = ["  "] * len(table.rows)
        marks[table.marked] = f"{_MARK} "
    rows = [
        (mark + first, *others)
        for mark, (first, *others) in zip(marks, table.rows, strict=True)
    ]
    for column, *cells in zip(table.columns, *rows, strict=True):
        if column in table.left:
            longest = max(map(len, " ".join([column, *cells]).split()), default=0)
            rich_table.add_column(
                Text(column),
                overflow="fold",
                min_width=min(_MOST_UNBROKEN, longest + 2),
            )
        else:
            rich_table.add_column(
                Text(column.replace(" ", "\n")), justify="right", no_wrap=True
            )
    for index, row in enumerate(rows):
        style = _OUTCOME_STYLES.get(row[0], "")
        if index == table.marked:
            style = "bold green"
        rich_table.add_row(*map(Text, row), style=style)
    narrowest, whole = Measurement.get(
        console, console.options.update(max_width=1000), rich_table
    )
    if table.spare and (narrowest if folds else whole) > console.width:
        return _table(table.narrower(), console, folds=folds)
    if narrowest > console.width:  # lines are wider than the terminal then
        rich_table.width = narrowest
    parts: list[RenderableType] = [Text(table.title, "bold"), rich_table]
    if table.note:
        parts.append(Text(table.note, "dim"))
    return parts
