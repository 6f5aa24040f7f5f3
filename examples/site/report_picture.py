"""Makes `examples/report.png`, the report of a run as a page: `python examples/site/report_picture.py RUN`.

RUN is the folder of the command on the start page. Needs Chromium, and playwright of the test extra. `--width 390`
shows the page as a telephone does.
"""

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

PICTURE = Path(__file__).parents[1] / "report.png"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("--width", type=int, default=1000)
    parser.add_argument("--height", type=int, default=2700)
    parser.add_argument("-o", "--output", type=Path, default=PICTURE)
    arguments = parser.parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = Path(folder) / "report.html"
        report = ["batchtune", "report", "-o", page, arguments.run]
        subprocess.run(report, check=True)
        chromium = playwright.chromium.launch(executable_path=browser)
        shown = chromium.new_page(
            viewport={"width": arguments.width, "height": arguments.height}
        )
        shown.goto(page.as_uri())
        shown.wait_for_selector("svg.main-svg", timeout=120_000)
        shown.wait_for_load_state("networkidle")
        shown.screenshot(path=arguments.output)
        chromium.close()


if __name__ == "__main__":
    main()
