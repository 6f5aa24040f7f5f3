"""How fast the HTML report opens in Chromium, with 10M examples and with 10,000.

`python tests/benchmarks/html_page.py`

Wall times, in seconds, from the start of the navigation: until the text is painted (first contentful paint), until
the page is loaded, and until all charts are drawn. Needs playwright and an installed Chromium.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1]))

from html_records import CONFIGS, full_results

from batchtune.reports.html import render

RUNS = 7
COUNTS = (10_000, 10_000_000)
_TIMES = """() => [
    performance.getEntriesByName('first-contentful-paint')[0].startTime,
    performance.getEntriesByType('navigation')[0].loadEventEnd,
    performance.now(),
]"""


def opening(browser: Browser, page_file: Path) -> list[float]:
    """Seconds until painted, loaded, drawn."""
    context = browser.new_context(viewport={"width": 960, "height": 900})
    page = context.new_page()
    page.goto(page_file.as_uri())
    page.wait_for_selector("html[data-drawn]", state="attached")
    times = [milliseconds / 1000 for milliseconds in page.evaluate(_TIMES)]
    context.close()
    return times


def main() -> None:
    """Opens both in turn and prints medians and the ratio of the time until all is drawn, as JSON."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        pages = {count: Path(folder) / f"{count}.html" for count in COUNTS}
        for count, path in pages.items():
            path.write_text(render(full_results(count), CONFIGS), encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--disable-gpu"])
        runs: dict[int, list[list[float]]] = {count: [] for count in COUNTS}
        for _ in range(RUNS):
            for count, path in pages.items():
                runs[count].append(opening(browser, path))
        browser.close()
        medians = {count: [statistics.median(each) for each in zip(*runs[count], strict=True)] for count in COUNTS}
        result = {
            str(count): {
                "page_bytes": pages[count].stat().st_size,
                **{name: round(value, 2) for name, value in zip(("painted", "loaded", "drawn"), times, strict=True)},
            }
            for count, times in medians.items()
        }
    small, large = (medians[count][-1] for count in COUNTS)
    print(json.dumps({**result, "drawn_ratio": round(large / small, 2)}))


if __name__ == "__main__":
    main()
