"""The HTML report in a real browser: what it draws, what its buttons do, and what it does not do."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from html_records import CONFIGS, hostile_full_results
from msgspec.structs import replace
from report_records import made_sweep
from reports.changed import run_of

from batchtune.reports.html import figures, render

pytestmark = pytest.mark.process
HOSTILE = (
    "</script></pre></style><script>window.broken=1</script>"
    "<img src=x onerror='window.broken=1'><a href='https://example.com'>a</a>"
)
WITHOUT_CHARTS = run_of(sweep=replace(made_sweep(), rows=[], recommended=None))
QUIET = [
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@cache
def shown():
    """A run with all that a page can show, whose every string is HTML and script."""
    return hostile_full_results(HOSTILE)


@cache
def whole_page():
    return render(shown(), {**CONFIGS, "hostile": HOSTILE})


@cache
def chromium():
    """An installed Chromium that starts; a stub that asks to install another package does not."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    for path in filter(None, map(shutil.which, names)):
        version = [path, "--version"]
        started = subprocess.run(version, capture_output=True, check=False, timeout=60)
        if started.returncode == 0:
            return path
    return None


pytest.importorskip(
    "playwright",
    reason="playwright is not installed: the HTML report is not tested in a browser",
)


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    if chromium() is None:
        pytest.skip(
            "Chromium is not installed: the HTML report is not tested in a browser"
        )
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium(), args=QUIET)
        yield started
        started.close()


@dataclass(slots=True)
class Opened:
    """A report in the browser, and all that it complained of."""

    page: Any
    complaints: list[str] = field(default_factory=list)

    def count(self, selector):
        return self.page.locator(selector).count()


@pytest.fixture(scope="module")
def opened(browser, tmp_path_factory):
    """`opened(text, **context)`: a page of this text, opened from a file as a reader would."""

    @contextmanager
    def opened(text, *, drawn=True, **settings):
        path = tmp_path_factory.mktemp("page") / "report.html"
        path.write_text(text, encoding="utf-8")
        viewport = {"width": 960, "height": 900}
        context = browser.new_context(viewport=viewport, **settings)
        report = Opened(context.new_page())
        complain = report.complaints.append
        report.page.on("console", lambda message: complain(message.text))
        report.page.on("pageerror", lambda error: complain(str(error)))
        report.page.on("dialog", lambda dialog: complain(dialog.message))
        report.page.goto(path.as_uri())
        if drawn:
            report.page.wait_for_selector("html[data-drawn]", state="attached")
        yield report
        context.close()

    return opened


@pytest.fixture(scope="module")
def light(opened):
    """A whole run's report, shared: who changes it changes it back."""
    with opened(whole_page(), color_scheme="light") as report:
        yield report


def test_every_trace_and_point_of_every_chart_is_drawn(light):
    for figure in figures(shown()):
        for kind, layer in (("scatter", ".scatterlayer"), ("bar", ".barlayer")):
            traces = [
                trace
                for trace in figure.data
                if trace["type"] == kind and trace.get("visible") != "legendonly"
            ]
            points = sum(
                len(trace["x"])
                for trace in traces
                if "markers" in trace.get("mode", "markers")
            )
            drawn = f"#plot-{figure.name} {layer}"
            assert light.count(f"{drawn} .trace") == len(traces), figure.name
            assert light.count(f"{drawn} .point") == points, figure.name


def test_strings_of_html_and_script_are_shown_as_text(light):
    legend = light.page.locator("#plot-sweep .legendtext").all_text_contents()
    assert HOSTILE in legend
    light.page.locator("#plot-sweep").scroll_into_view_if_needed()
    last = light.page.locator("#plot-sweep .scatterlayer .trace").last
    last.locator(".point").hover(force=True)
    hovered = light.page.locator("#plot-sweep .hoverlayer .hovertext").first
    assert HOSTILE in hovered.text_content()
    assert light.page.evaluate("window.broken") is None
    assert light.count("a, img, iframe") == 0
    assert HOSTILE in light.page.locator(".config pre").all_text_contents()
    assert light.complaints == []


def test_the_button_copies_the_config_without_a_clipboard_too(opened):
    forbid = """() => {
        navigator.clipboard.writeText = () => Promise.reject(new Error("forbidden"));
        for (const button of document.querySelectorAll(".copy")) button.textContent = "Copy";
    }"""
    keep = "() => { window.setTimeout = () => 0; }"  # "Copied" stays until it is read
    permissions = ["clipboard-read", "clipboard-write"]
    with opened(
        render(WITHOUT_CHARTS, CONFIGS), drawn=False, permissions=permissions
    ) as report:
        for before in (keep, forbid):
            report.page.evaluate(before)
            for name, text in CONFIGS.items():
                report.page.locator("[data-config]", has_text=name).click()
                report.page.locator(".copy:visible").click()
                report.page.locator(".copy:visible", has_text="Copied").wait_for()
                assert pasted(report.page) == text
        assert report.complaints == []


def pasted(page):
    """What the clipboard holds, as a reader would find out."""
    page.evaluate(
        "document.body.append(Object.assign(document.createElement('textarea'), {id: 'pasted'}))"
    )
    page.locator("#pasted").focus()
    page.keyboard.press("Control+V")
    value = page.locator("#pasted").input_value()
    page.evaluate("document.getElementById('pasted').remove()")
    return value


def test_the_policy_stops_what_escaping_would_have_let_through(opened):
    text = render(WITHOUT_CHARTS).replace(
        "<main>",
        "<main><script>window.broken=1</script><img src='https://a.invalid/x'>",
    )
    with opened(text, drawn=False) as report:
        assert report.page.evaluate("window.broken") is None
        assert "Content Security Policy" in str(report.complaints)


def test_nothing_is_wider_than_the_window(light):
    for width in (390, 960):
        light.page.set_viewport_size({"width": width, "height": 800})
        assert light.page.locator("main").bounding_box()["width"] <= width
        for figure in figures(shown()):
            room = light.page.locator(f"#plot-{figure.name}").bounding_box()
            drawn = f"#plot-{figure.name} .main-svg[width='{room['width']:g}']"
            light.page.locator(drawn).first.wait_for(state="attached")
        assert light.page.evaluate("document.scrollingElement.scrollWidth") <= width


def test_without_scripts_everything_but_the_charts_can_be_read(opened):
    with opened(whole_page(), drawn=False, java_script_enabled=False) as report:
        assert report.page.locator(".no-charts").is_visible()
        assert report.count(".config:visible") == len(CONFIGS) + 1
        assert report.count("button:visible") == report.count(".plot:visible") == 0
