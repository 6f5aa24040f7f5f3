"""A run's report as one page of HTML that needs nothing else: no script, no network, no fonts."""

from __future__ import annotations

from batchtune.reports import chart
from batchtune.reports.page import build_page
from batchtune.reports.run import RunResults


def render(results: RunResults) -> str:
    """The report as an HTML page; every string in it is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("batchtune.reports", package_path=""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    sweep, probe = results.sweep, results.probe
    charts = [
        chart.sweep_chart(sweep) if sweep is not None else None,
        chart.frontier_chart(probe) if probe is not None else None,
    ]
    return environment.get_template("page.html.j2").render(
        page=build_page(results),
        charts=[drawing for drawing in charts if drawing is not None],
        frame=chart,
    )
