"""A run's report as GitHub Markdown, for a pull request's comment or a file beside the code."""

from __future__ import annotations

import re
from collections.abc import Iterable

from batchtune.reports.page import build_page
from batchtune.reports.run import RunResults
from batchtune.reports.table import Table

# What Markdown reads as markup anywhere in a line. An underscore inside a word is none; "://" makes a link.
_MARKUP = re.compile(r"[\\`*{}\[\]|~$]|(?<!\w)_|_(?!\w)|:(?=//)")
_HTML = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
# What Markdown reads as markup at the beginning of a line: a heading, a list, a rule, a quotation.
_BLOCK_START = re.compile(r"^([#+\-=]|\d+(?=[.)](\s|$)))")


def render(results: RunResults) -> str:
    """The report as Markdown, summary first."""
    page = build_page(results)
    blocks = [f"# {escape(page.title)}", _bullets(page.summary)]
    if page.warnings:
        blocks += ["## Warnings", _bullets(page.warnings)]
    blocks += ["## What was measured", _table(("", ""), (":--", ":--"), page.facts)]
    for table in page.tables:
        blocks += _section(table)
    return "\n\n".join(blocks) + "\n"


def escape(text: str) -> str:
    """One line of text as Markdown that shows it unchanged, also inside a table's cell."""
    escaped = _MARKUP.sub(lambda match: f"\\{match[0]}", text)
    escaped = "".join(_HTML.get(char, char) for char in escaped)
    return _BLOCK_START.sub(lambda match: _escape_start(match[0]), escaped)


def _escape_start(start: str) -> str:
    return f"{start}\\" if start[-1].isdigit() else f"\\{start}"


def _section(table: Table) -> list[str]:
    rows = [
        [f"**{escape(cell)}**" if index == table.marked else escape(cell) for cell in row]
        for index, row in enumerate(table.rows)
    ]
    if table.marked is not None:
        rows[table.marked][0] = f"▶ {rows[table.marked][0]}"
    header = [escape(column.title) for column in table.columns]
    alignment = ["--:" if column.numeric else ":--" for column in table.columns]
    notes = [" ".join(escape(note) for note in table.notes)] if table.notes else []
    return [f"## {escape(table.title)}", _lines(header, alignment, rows), *notes]


def _table(header: Iterable[str], alignment: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    return _lines(header, alignment, [[escape(cell) for cell in row] for row in rows])


def _lines(header: Iterable[str], alignment: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, alignment, *rows))


def _bullets(sentences: Iterable[str]) -> str:
    return "\n".join(f"- {escape(sentence)}" for sentence in sentences)
