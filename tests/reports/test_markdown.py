"""The report as Markdown."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from msgspec import structs
from report_records import hostile_results, made_probe, made_sweep

from batchtune.reports import RunResults, markdown
from batchtune.reports.markdown import MAX_BYTES, escape, render
from batchtune.reports.section import clean
from batchtune.results import Verdict

RESULTS = RunResults(name="librispeech-100", probe=made_probe(), sweep=made_sweep())

# The rules of GitHub's Markdown that its own are not: tables, strikethrough; raw HTML is on, as there.
PARSER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])


def shown_text(inline):
    """What a reader sees of inline Markdown; markup in it fails the test."""
    children = inline.children or []
    assert {child.type for child in children} <= {"text", "text_special"}, children
    return "".join(child.content for child in children)


SIGNS = st.text(
    alphabet=st.sampled_from("ab_*`|<>&;#[]()!~\\-+=.$:/1 \"'{}@^%"), min_size=1
).map(clean)


def inlines(text):
    """What a reader sees of each piece of inline Markdown."""
    return [shown_text(token) for token in PARSER.parse(text) if token.type == "inline"]


@given(SIGNS)
def test_any_text_is_shown_unchanged_in_a_table_cell(text):
    table = f"| a | b |\n| :-- | --: |\n| {escape(text)} | end |"
    assert inlines(table) == ["a", "b", text, "end"]


@given(SIGNS.filter(bool))
def test_any_text_is_shown_unchanged_in_a_list(text):
    assert inlines(f"- {escape(text)}") == [text]


def test_an_address_is_not_made_a_link():
    assert escape("see https://example.org") == "see https\\://example.org"


def test_the_recommended_row_is_marked_and_bold():
    cells = ["optimal", "13", "±8.1%", "634", "3.1%", "4.09%", "3 min 20 s"]
    row = " | ".join(f"**{cell}**" for cell in cells)
    assert f"| ▶ {row} |" in render(RESULTS).splitlines()


def test_no_string_becomes_html_or_another_cell_of_a_row():
    tokens = PARSER.parse(render(hostile_results("a|b\n\n<b>`c`</b>\\|")))
    kinds = [token.type for token in tokens]
    inner = {child.type for token in tokens for child in token.children or []}
    assert not {*kinds, *inner} & {"html_block", "html_inline"}
    assert kinds.count("table_open") == 6
    rows = " ".join(kinds).split("tr_open")[1:]
    widths = {row.count("td_open") + row.count("th_open") for row in rows}
    assert widths == {8, 3, 5}


def judged(count=3):
    outcomes = ("holds", "fails", "error")
    return tuple(
        Verdict(
            rule=f"batches > {number}",
            outcome=outcomes[number % 3],
            value=634,
            limit=1.0,
            message="batches is | 634",
        )
        for number in range(count)
    )


def test_verdicts_come_first_as_a_table_with_signs():
    lines = render(replace(RESULTS, verdicts=judged())).splitlines()
    start = lines.index("## Rules")
    said = "- Rules: 1 of 3 hold. Failing: batches &gt; 1. 1 can't be judged."
    assert lines[2] == said
    assert lines[start : start + 7] == [
        "## Rules",
        "",
        "| verdict | fails if | found |",
        "| :-- | :-- | :-- |",
        "| ⚠️ error | batches &gt; 2 | batches is \\| 634 |",
        "| ❌ fails | batches &gt; 1 | batches is \\| 634 |",
        "| ✅ holds | batches &gt; 0 | batches is \\| 634 |",
    ]


def huge_results(text, rows):
    results = hostile_results(text)
    row = results.sweep.rows[0]
    table = structs.replace(
        row,
        boundaries=[float(n) for n in range(1, rows + 1)],
        batch_sizes=[1] * rows,
        num_buckets=rows,
    )
    sweep = structs.replace(
        results.sweep,
        rows=[table] * rows,
        recommended=rows - 1,
        warnings=[text] * rows,
        trade_off=[],
    )
    return replace(results, sweep=sweep, verdicts=judged(rows))


@pytest.mark.parametrize(
    ("text", "rows"), [("&" * 400, 40), ("🦊|<b>" * 80, 40), ("漢" * 400, 1500)]
)
def test_no_report_is_larger_than_github_takes_in_a_comment(text, rows):
    assert len(render(huge_results(text, rows)).encode()) <= MAX_BYTES


def test_what_is_left_out_of_a_long_report_is_told():
    text = render(huge_results("batches", 1500))
    assert "of 1,500 rows shown" in text
    assert "| ⚠️ error | batches &gt; 2 |" in text


def test_a_report_that_is_cut_keeps_its_verdicts_and_says_so(monkeypatch):
    monkeypatch.setattr(markdown, "MAX_BYTES", 3000)
    text = render(huge_results("batches", 40))
    assert len(text.encode()) <= 3000
    assert "## Rules" in text
    assert text.splitlines()[-1].startswith(
        "The rest is left out, as this would be too long"
    )
