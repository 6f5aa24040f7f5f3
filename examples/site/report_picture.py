"""Makes `examples/report.png`, the report of a run as a page: `python examples/site/report_picture.py RUN`.

RUN is the folder of the command on the start page. Needs Chromium. `--width 390` shows the page as a telephone does.
"""

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

PICTURE = Path(__file__).parents[1] / "report.png"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("--width", type=int, default=1000)
    parser.add_argument("--height", type=int, default=2050)
    parser.add_argument("-o", "--output", type=Path, default=PICTURE)
    arguments = parser.parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        parser.exit(1, "Chromium is not installed\n")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        report = ["batchtune", "report", "-o", page, arguments.run]
        subprocess.run(report, check=True)
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/profile",
            # Until the charts are drawn.
            "--virtual-time-budget=20000",
            f"--window-size={arguments.width},{arguments.height}",
            f"--screenshot={arguments.output.absolute()}",
        ]
        subprocess.run([browser, *options, page.as_uri()], check=True)


if __name__ == "__main__":
    main()
