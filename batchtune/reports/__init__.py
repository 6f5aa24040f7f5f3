"""Results → terminal, Markdown, HTML, JSON: one module per format, each with `render(results) -> str`.

`run` reads the records, a module for each kind of result makes its `Section`, and `page` puts the sections together. A
format knows nothing else.
"""

from __future__ import annotations

from importlib import import_module

from batchtune.reports.run import RunResults, load_run

__all__ = ["FORMATS", "RunResults", "load_run", "render"]

# Format → the module that renders it, imported on first use: jinja2 and rich are slow to start.
FORMATS = {
    "terminal": "batchtune.reports.terminal",
    "markdown": "batchtune.reports.markdown",
    "html": "batchtune.reports.html",
    "json": "batchtune.reports.json_format",
}


def render(report_format: str, results: RunResults) -> str:
    """Return a run's report in one of the `FORMATS`; `terminal` gives plain text, 80 columns wide."""
    return str(import_module(FORMATS[report_format]).render(results))
