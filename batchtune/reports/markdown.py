"""A run's report as Markdown, as GitHub, GitLab and editors show it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from batchtune.reports.page import Page, build_page
from batchtune.reports.run import RunResults
from batchtune.reports.table import Table
from batchtune.units import counted

MAX_BYTES = 60_000
# How many rows of a table and sentences of a list to show: everything first, then fewer until it fits.
_SHORTER = (1_000_000, 200, 100, 50, 25, 12, 6, 3)
_WHOLE = "`batchtune report --format html` shows all."
_SIGNS = {"holds": "✅", "fails": "❌", "error": "⚠️"}

# Markup anywhere in a line. An underscore inside a word is not markup; "://" makes a link.
_MARKUP = re.compile(r"[\\`*{}\[\]|~$]|(?<!\w)_|_(?!\w)|:(?=//)")
_HTML = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
# Markup at the beginning of a line: a heading, a list, a rule, a quotation.
_BLOCK_START = re.compile(r"^([#+\-=]|\d+(?=[.)](\s|$)))")


def render(results: RunResults) -> str:
    """Return the report as Markdown, verdicts and summary first; at most 60,000 bytes.

    GitHub takes 65,536 characters in a comment. Where all would be more, tables and lists are shortened, and the last
    sections left out; a note says so.
    """
    page = build_page(results)
    blocks: list[str] = []
    for most in _SHORTER:
        blocks = _blocks(page, most)
        if _size(blocks) <= MAX_BYTES:
            return "\n\n".join(blocks) + "\n"
    count = len(blocks)
    while len(blocks) > 1 and _size(blocks) > MAX_BYTES - 200:
        blocks.pop()
    note = f"{counted(count - len(blocks), 'section')} left out, as this would be too long: {_WHOLE}"
    return "\n\n".join([*blocks, note]) + "\n"


def _size(blocks: Sequence[str]) -> int:
    return sum(len(block.encode()) + 2 for block in blocks) - 1


def _blocks(page: Page, most: int) -> list[str]:
    """Return the report's sections, with at most `most` rows of each table and list."""
    blocks = [f"# {escape(page.title)}"]
    if page.verdicts is not None:
        rows = [(f"{_SIGNS[row[0]]} {row[0]}", *row[1:]) for row in page.verdicts.rows]
        blocks.append(_section(replace(page.verdicts, rows=tuple(rows)), most))
    blocks.append(_bullets(page.summary, most))
    if page.warnings:
        blocks.append(f"## Warnings\n\n{_bullets(page.warnings, most)}")
    facts = [[escape(name), escape(value)] for name, value in page.facts]
    blocks.append(f"## What was measured\n\n{_lines(('', ''), (':--', ':--'), facts)}")
    return blocks + [_section(table, most) for table in page.tables]


def escape(text: str) -> str:
    """Return one line of text as Markdown that shows it unchanged, also inside a table's cell."""
    escaped = _MARKUP.sub(lambda match: f"\\{match[0]}", text)
    escaped = "".join(_HTML.get(char, char) for char in escaped)
    return _BLOCK_START.sub(lambda start: f"{start[0]}\\" if start[0][-1].isdigit() else f"\\{start[0]}", escaped)


def _section(table: Table, most: int) -> str:
    """Return a table's first rows, and the marked one."""
    shown = list(range(len(table.rows)))[:most]
    notes = list(table.notes)
    if len(shown) < len(table.rows):
        notes.insert(0, f"{len(shown):,} of {len(table.rows):,} rows shown: {_WHOLE}")
        if table.marked is not None and table.marked >= most:
            shown[-1] = table.marked
    rows = []
    for index in shown:
        cells = [escape(cell) for cell in table.rows[index]]
        if index == table.marked:
            cells = [f"**{cell}**" for cell in cells]
            cells[0] = f"▶ {cells[0]}"
        rows.append(cells)
    header = [escape(column.title) for column in table.columns]
    alignment = ["--:" if column.numeric else ":--" for column in table.columns]
    blocks = [f"## {escape(table.title)}", _lines(header, alignment, rows)]
    if notes:
        blocks.append(" ".join(escape(note) for note in notes))
    return "\n\n".join(blocks)


def _lines(header: Iterable[str], alignment: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, alignment, *rows))


def _bullets(sentences: Sequence[str], most: int) -> str:
    lines = [f"- {escape(sentence)}" for sentence in sentences[:most]]
    if len(sentences) > most:
        lines.append(f"- {len(sentences) - most:,} more: {_WHOLE}")
    return "\n".join(lines)
