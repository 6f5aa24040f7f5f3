"""A run's report as one page of HTML that needs nothing else: no network, no fonts, no other files.

The page carries plotly.js and a small script of its own (`page.js`), both allowed by their hashes alone; its Content
Security Policy forbids everything else, so that no string of a result file can become code or load anything, even
where escaping had a hole. plotly.js is in it compressed and is started after the page has been shown: it takes a
browser longer than all the rest. Without the package plotly (the extra `html`) the page has no charts, and says so.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

import msgspec

from batchtune.reports import RunResults
from batchtune.reports.html.charts import figures
from batchtune.reports.page import build_page

if TYPE_CHECKING:
    from jinja2 import Template

# These, and `<`, could end or open something inside a script element; all are inside JSON's strings.
_ESCAPES = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}


def render(results: RunResults, configs: Mapping[str, str] | None = None) -> str:
    """Return the report as an HTML page; every string in it is escaped.

    Args:
        results: The run folder's results.
        configs: Name of a framework, or of `sampler.yaml` → the config to copy, in the order to show them.
    """
    from markupsafe import Markup

    drawn = figures(results)
    script = _asset("page.js")
    plotly = ""
    sources = [_source(script)]
    missing = missing_charts(results)
    if missing:
        drawn = []
    elif drawn:
        plotly, source = _plotly()
        sources.insert(0, source)
    data = {
        figure.name: {"data": figure.data, "layout": figure.layout} for figure in drawn
    }
    # Nothing may be loaded, and no script may run but these. Plotly.js styles elements in place, and before its
    # version 4 decodes an image that it holds in itself.
    policy = (
        f"default-src 'none'; script-src {' '.join(sources)}; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return _template("page.html.j2").render(
        page=build_page(results),
        figures=drawn,
        missing_charts=missing,
        configs=configs or {},
        policy=policy,
        style=Markup(_asset("page.css")),
        data=Markup(msgspec.json.encode(data).decode().translate(_ESCAPES)),
        plotly=plotly,
        script=Markup(script),
    )


def missing_charts(results: RunResults) -> str | None:
    """Return why the page lacks charts that it would have, and how to get them; None if it lacks none."""
    if not figures(results) or _is_installed():
        return None
    return (
        "The charts need plotly, which is not installed: pip install plotly, and write the page again. The tables hold "
        "the same numbers."
    )


def render_for_notebook(results: RunResults) -> str:
    """Return the report's first sentences and its tables as a piece of HTML without styles, which a notebook has."""
    return _template("notebook.html.j2").render(page=build_page(results))


def _template(name: str) -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("batchtune.reports.html", package_path=""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    ).get_template(name)


def _is_installed() -> bool:
    try:
        import plotly  # noqa: F401 -- to see whether it is there
    except ImportError:
        return False
    return True


@cache
def _plotly() -> tuple[str, str]:
    """Return plotly.js, compressed, in base64, and its hash for the policy; the same bytes each time."""
    from plotly.offline import get_plotlyjs

    script = str(get_plotlyjs())
    return base64.b64encode(gzip.compress(script.encode(), mtime=0)).decode(), _source(
        script
    )


def _asset(name: str) -> str:
    return files("batchtune.reports.html").joinpath(name).read_text(encoding="utf-8")


def _source(script: str) -> str:
    """Return the hash by which a policy knows a script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
