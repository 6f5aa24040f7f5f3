"""The report as an HTML page."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from report_records import hostile_results, made_probe, made_sweep

from batchtune.reports import RunResults
from batchtune.reports.html import render

RESULTS = RunResults(name="librispeech-100", probe=made_probe(), sweep=made_sweep())
VOID = {"meta", "link", "img", "br", "hr", "input"}


class PageReader(HTMLParser):
    """Reads a page's elements, and checks on the way that each is closed in its place."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def names(self) -> set[str]:
        return {tag for tag, _ in self.elements}

    def attributes(self) -> set[str]:
        return {name for _, attributes in self.elements for name in attributes}


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        "</style></title><script>alert(1)</script>",
        "' onload='alert(1)",
        "{{ 7 * 7 }}{% raw %}",
    ],
)
def test_no_string_of_a_result_file_becomes_markup(text: str) -> None:
    clean, hostile = PageReader(render(RESULTS)), PageReader(render(hostile_results(text)))
    assert hostile.names() == clean.names()
    assert hostile.attributes() == clean.attributes()
    assert text in "".join(hostile.text)


def test_the_page_needs_nothing_from_elsewhere() -> None:
    page = PageReader(render(RESULTS))
    assert not page.names() & {"script", "link", "img", "iframe", "object"}
    assert not page.attributes() & {"src", "href"}
    assert "url(" not in render(RESULTS) and "@import" not in render(RESULTS)


def test_the_summary_leads_the_page() -> None:
    assert render(RESULTS).index("Set 13 buckets (optimal)") < render(RESULTS).index("<table")


def test_the_recommended_row_is_marked() -> None:
    rows = [attributes for tag, attributes in PageReader(render(RESULTS)).elements if tag == "tr"]
    assert sum(attributes.get("class") == "marked" for attributes in rows) == 1


def test_each_chart_is_named_and_described_for_those_who_cannot_see_it() -> None:
    elements = PageReader(render(RESULTS)).elements
    names = [attributes["aria-labelledby"] for tag, attributes in elements if tag == "svg"]
    assert names == ["sweep-title sweep-description", "frontier-title frontier-description"]
    ids = {attributes.get("id") for _, attributes in elements}
    assert {name for pair in names for name in str(pair).split()} <= ids


def test_the_page_is_dark_where_the_reader_prefers_it() -> None:
    assert "prefers-color-scheme: dark" in render(RESULTS)
