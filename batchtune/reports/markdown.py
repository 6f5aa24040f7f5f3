"""A run's report as Markdown, as GitHub, GitLab and editors show it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from batchtune.reports import RunResults
from batchtune.reports.page import Page, build_page
from batchtune.reports.section import Table

MAX_BYTES = 60_000
# How many rows of a table and sentences of a list to show: everything first, then fewer until it fits.
_SHORTER = (1_000_000, 50, 12, 3)
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
    blocks left out; a note says so.
    """
    page = build_page(results)
    for most in _SHORTER:
        blocks = list(_blocks(page, most))
        if _size(blocks) <= MAX_BYTES:
            return "\n\n".join(blocks) + "\n"
    while len(blocks) > 1 and _size(blocks) > MAX_BYTES - 100:
        blocks.pop()
    return (
        "\n\n".join(
            [*blocks, f"The rest is left out, as this would be too long: {_WHOLE}"]
        )
        + "\n"
    )


def _size(blocks: Sequence[str]) -> int:
    return sum(len(block.encode()) + 2 for block in blocks)


def _blocks(page: Page, most: int) -> Iterator[str]:
    """Yield headings, lists and tables, with at most `most` rows and sentences each."""
    yield f"# {escape(page.title)}"
    yield _bullets(page.lead, most)
    if page.warnings:
        yield f"## Warnings\n\n{_bullets(page.warnings, most)}"
    for section in page.sections:
        sentences = section.sentences[section.brief :]
        if sentences:
            yield f"## {escape(section.title)}\n\n{_bullets(sentences, most)}"
        for table in section.tables:
            if not table.folded:
                yield f"## {escape(table.title)}\n\n{_table(table, most)}"


def escape(text: str) -> str:
    """Return one line of text as Markdown that shows it unchanged, also inside a table's cell."""
    escaped = _MARKUP.sub(lambda match: f"\\{match[0]}", text)
    escaped = "".join(_HTML.get(char, char) for char in escaped)
    return _BLOCK_START.sub(
        lambda start: f"{start[0]}\\" if start[0][-1].isdigit() else f"\\{start[0]}",
        escaped,
    )


def _table(table: Table, most: int) -> str:
    """Return a table's first rows, and the marked one, with a note if these are not all."""
    alignment = [":--" if column in table.left else "--:" for column in table.columns]
    lines = [_line(map(escape, table.columns)), _line(alignment)]
    for index, row in enumerate(table.rows):
        cells = [escape(cell) for cell in row]
        if row[0] in _SIGNS:
            cells[0] = f"{_SIGNS[row[0]]} {cells[0]}"
        if index == table.marked:
            cells = [f"**{cell}**" for cell in cells]
            cells[0] = f"▶ {cells[0]}"
        if index < most or index == table.marked:
            lines.append(_line(cells))
    notes = [table.note] if table.note else []
    if most < len(table.rows):
        notes.append(f"{len(lines) - 2:,} of {len(table.rows):,} rows shown: {_WHOLE}")
    return "\n".join(lines) + "".join(f"\n\n{escape(note)}" for note in notes)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _bullets(sentences: Sequence[str], most: int) -> str:
    lines = [f"- {escape(sentence)}" for sentence in sentences[:most]]
    if len(sentences) > most:
        lines.append(f"- {len(sentences) - most:,} more: {_WHOLE}")
    return "\n".join(lines)
