"""Results → terminal, Markdown, HTML, JSON: one module per format, each with `render(results) -> str`.

A format knows nothing but the records: `run` reads them, `page` puts together what
the section on each kind of result says.
"""

from __future__ import annotations

from importlib import import_module

from batchtune.reports.page import summary_sentences
from batchtune.reports.run import RunResults, load_run

__all__ = ["FORMATS", "RunResults", "load_run", "render", "summary_sentences"]

# Format → the module that renders it, imported on first use: jinja2 and rich are slow to start.
FORMATS = {
    "terminal": "batchtune.reports.terminal",
    "markdown": "batchtune.reports.markdown",
    "html": "batchtune.reports.html",
    "json": "batchtune.reports.json_format",
}


def render(report_format: str, results: RunResults) -> str:
    """Return a run's report in one of the `FORMATS`; `terminal` gives plain text, 80 columns wide.

    Raises:
        ValueError: An unknown format.
    """
    if report_format not in FORMATS:
        raise ValueError(f"report_format must be one of {', '.join(FORMATS)}, got {report_format!r}")
    return str(import_module(FORMATS[report_format]).render(results))
