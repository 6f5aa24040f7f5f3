"""The report as an HTML page."""

import base64
import gzip
import hashlib
import html
import json
import re
import sys
from functools import cache
from html.parser import HTMLParser

import pytest
from html_records import CONFIGS, full_results, hostile_full_results
from msgspec.structs import replace
from report_records import made_sweep
from reports.changed import run_of

from batchtune.reports.html import render

RESULTS = full_results()
VOID = {"meta", "link", "img", "br", "hr", "input"}
HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</style></title></pre></script><!--<script>alert(1)//",
    "{{ 7 * 7 }}{% raw %}' onload='alert(1)",
]


@cache
def whole_page():
    return render(RESULTS, CONFIGS)


class PageReader(HTMLParser):
    """Reads a page's elements, and checks on the way that each is closed in its place."""

    def __init__(self, page):
        super().__init__()
        self.elements = []
        self.text = []
        self.scripts = {}
        self.open = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            name = self.elements[-1][1].get("id") or "page"
            self.scripts[name] = self.scripts.get(name, "") + data
        else:
            self.text.append(data)

    def names(self):
        return {tag for tag, _ in self.elements}

    def attributes(self):
        return {name for _, attributes in self.elements for name in attributes}

    def policy(self):
        (policy,) = (found for _, found in self.elements if "http-equiv" in found)
        return policy["content"]


def plotly_of(page):
    return gzip.decompress(base64.b64decode(page.scripts["plotly"]))


@pytest.mark.parametrize("text", HOSTILE)
def test_no_string_of_a_result_file_becomes_markup(text):
    clean = PageReader(whole_page())
    hostile = PageReader(
        render(hostile_full_results(text), {text: f"\n{text}\n", "a": "", "b": ""})
    )
    assert hostile.names() == clean.names()
    assert hostile.attributes() == clean.attributes()
    assert text in "".join(hostile.text)


def test_no_string_of_a_file_becomes_markup_in_a_chart():
    text = "".join(
        [*HOSTILE, '<a href="https://example.com">x</a>', "\u2028&lt;b&gt;\u2029"]
    )
    data = PageReader(render(hostile_full_results(text))).scripts["figures"]
    assert not set("<>&\u2028\u2029") & set(data)
    shown = json.dumps(json.loads(data), ensure_ascii=False)
    assert not re.findall(r"<(?!/?b>|br>)", shown)


def test_the_page_needs_nothing_from_elsewhere():
    page = PageReader(whole_page())
    loading = {"link", "img", "iframe", "object", "embed", "base", "form"}
    assert not page.names() & loading
    assert not page.attributes() & {"src", "href", "style"}
    without_plotly = re.sub(r'(id="plotly">)[^<]*', r"\1", whole_page())
    assert not re.search(r"url\(|@import", without_plotly)


def test_the_policy_allows_only_the_pages_own_two_scripts():
    page = PageReader(whole_page())
    hashes = [
        base64.b64encode(hashlib.sha256(script).digest()).decode()
        for script in (plotly_of(page), page.scripts["page"].encode())
    ]
    assert page.policy() == (
        f"default-src 'none'; script-src 'sha256-{hashes[0]}' 'sha256-{hashes[1]}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def test_without_plotly_the_page_says_how_to_get_charts(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    page = PageReader(render(RESULTS, CONFIGS))
    assert page.names() == PageReader(whole_page()).names() - {"figure", "figcaption"}
    assert set(page.scripts) == {"page"} and page.policy().count("sha256-") == 1
    assert "pip install plotly" in "".join(page.text)


def test_the_page_of_a_very_long_run_is_under_6_mb():
    probe, sweep = RESULTS.probe, RESULTS.sweep
    trials = [replace(trial, error="x" * 1000) for trial in probe.trials] * 100
    long = run_of(
        probe=replace(probe, trials=trials), sweep=replace(sweep, rows=sweep.rows * 20)
    )
    page = render(long, CONFIGS)
    assert len(page.encode()) < 6_000_000
    assert f"1,000 of {len(trials):,} rows shown; all are in probe.json." in page


def test_the_recommended_row_is_marked_in_its_tables():
    page = PageReader(render(run_of(sweep=made_sweep())))
    assert page.elements.count(("tr", {"class": "marked"})) == 2


def test_each_chart_has_a_name_and_a_description():
    page = PageReader(whole_page())
    names = [
        found["aria-labelledby"]
        for _, found in page.elements
        if found.get("role") == "img"
    ]
    charts = ("sweep", "lengths", "stream", "frontier", "loader")
    assert names == [f"{name}-title {name}-description" for name in charts]
    ids = [found["id"] for _, found in page.elements if "id" in found]
    assert len(ids) == len(set(ids)) and set(" ".join(names).split()) <= set(ids)


def test_every_config_is_there_unchanged():
    page = html.unescape(whole_page())
    for name, text in CONFIGS.items():
        assert f">{name}</button>" in page
        # A parser drops the first line end inside <pre>.
        assert f'<pre tabindex="0">\n{text}</pre>' in page


def test_every_trial_and_the_settings_are_there_but_folded():
    page = PageReader(whole_page())
    folded = [attributes for tag, attributes in page.elements if tag == "details"]
    assert folded and not any("open" in attributes for attributes in folded)
    text = "".join(page.text)
    assert "Every trial" in text and "tolerance" in text
