"""A chart of the HTML report: what plotly.js is to draw, as data.

Result files may come from anywhere. Every string that reaches plotly.js goes through `label`, because plotly.js
reads a few HTML tags (links among them) in names and hover texts. Colours are the names of the page's CSS variables;
the page's script puts the colours in, so that one figure serves the light and the dark page.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from batchtune.reports.page import clean
from batchtune.reports.table import Table

T = TypeVar("T")
Trace = dict[str, Any]
Layout = dict[str, Any]

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif'
# The page has this many colours for series.
HUES = 6
# A chart with more points is no clearer; the page's size is bounded by it.
MOST_POINTS = 400
# A longer name would leave no room for the chart; hover texts have it in full.
_NAME_CHARACTERS = 40
# Only a damaged file holds values beyond these; they are not drawn.
_SMALLEST, _LARGEST = 1e-9, 1e15


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One way to look at a figure; the page has a button for each where there are several.

    Attributes:
        label: On its button.
        data: Traces, as plotly.js takes them.
        layout: Layout, as plotly.js takes it.
    """

    label: str
    data: list[Trace]
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """An interactive chart.

    Attributes:
        name: Distinguishes its elements on the page.
        title: Its heading.
        caption: What it shows, in a sentence; also for those who can't see it.
        views: At least one.
        table: The same in numbers, where no table of the page holds them.
    """

    name: str
    title: str
    caption: str
    views: tuple[View, ...]
    table: Table | None = None


def label(text: str) -> str:
    """One line of text that plotly.js shows unchanged: it reads tags and entities, and these are neither."""
    return html.escape(clean(text), quote=False)


def hover(title: str, *lines: str) -> str:
    """A hover text: a title in bold over lines, all of them escaped."""
    return "<br>".join([f"<b>{label(title)}</b>", *(label(line) for line in lines if line)])


def short(value: float) -> float:
    """A value with 6 significant digits: a chart shows no more, and the page stays small."""
    return float(f"{value:.6g}")


def drawable(value: float | None, *, logarithmic: bool = False) -> bool:
    """Whether a value can be drawn on a linear or a logarithmic axis."""
    return value is not None and (_SMALLEST if logarithmic else 0) <= value <= _LARGEST


def thinned(items: Sequence[T], keep: Iterable[int] = (), most: int = MOST_POINTS) -> list[T]:
    """At most so many items, evenly spaced, both ends in; and those at the indices `keep`."""
    if len(items) <= most:
        return list(items)
    chosen = {round(step * (len(items) - 1) / (most - 1)) for step in range(most)}
    return [items[index] for index in sorted(chosen.union(keep))]


def time_unit(seconds: float) -> tuple[float, str]:
    """The unit of a time axis that ends there, in seconds, and its name."""
    for unit_seconds, name in ((3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if seconds >= 2 * unit_seconds:
            return unit_seconds, name
    return 1e-3, "ms"


def length_unit(length: float, unit: str | None) -> tuple[float, str]:
    """The unit of an axis of summed lengths: seconds become minutes or hours, other units stay as they are."""
    if unit == "s" and length >= 120:
        return time_unit(length)
    return 1.0, unit or ""


def axis_title(what: str, unit: str | None) -> str:
    """An axis' title, with its unit where there is one."""
    return label(f"{what} ({unit})" if unit else what)


def axis(title: str, **settings: Any) -> Layout:
    """An axis in the page's colours."""
    made: Layout = {
        "title": {"text": title, "standoff": 12, "font": {"size": 12.5}},
        "automargin": True,
        "gridcolor": "--grid",
        "linecolor": "--line",
        "tickcolor": "--line",
        "zeroline": False,
    }
    if settings.get("type") == "log":
        made |= {"dtick": "D2", "exponentformat": "none"}
    return made | settings


def layout(x_axis: Layout, y_axis: Layout, **settings: Any) -> Layout:
    """A layout in the page's colours, without a title: the page has it as a heading."""
    made: Layout = {
        "font": {"family": FONT, "size": 12.5, "color": "--faint"},
        "paper_bgcolor": "--paper",
        "plot_bgcolor": "--paper",
        "margin": {"l": 8, "r": 12, "t": 8, "b": 8, "pad": 0},
        "hoverlabel": {
            "bgcolor": "--card",
            "bordercolor": "--line",
            "font": {"family": FONT, "size": 12.5, "color": "--ink"},
            "align": "left",
            "namelength": 0,
        },
        "hovermode": "closest",
        "legend": {
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": 1.02,
            "yanchor": "bottom",
            "font": {"color": "--ink"},
            "bgcolor": "--paper",
        },
        "showlegend": True,
        "xaxis": x_axis | {"showgrid": x_axis.get("showgrid", False), "ticks": "outside", "showline": True},
        "yaxis": y_axis,
    }
    return made | settings


def points(
    name: str,
    values: Iterable[tuple[float, float, str]],
    *,
    color: str,
    mode: str = "lines+markers",
    marker: Trace | None = None,
    **settings: Any,
) -> Trace:
    """A line or scatter trace.

    Args:
        name: In the legend.
        values: x, y and hover text (from `hover`) of each point.
        color: Name of a CSS variable of the page.
        mode: Plotly's: `lines`, `markers` or `lines+markers`.
        marker: Overrides of the marker.
        settings: Further attributes of the trace.
    """
    listed = list(values)
    trace: Trace = {
        "type": "scatter",
        "name": label(name if len(name) <= _NAME_CHARACTERS else f"{name[: _NAME_CHARACTERS - 1]}…"),
        "mode": mode,
        "x": [short(x) for x, _, _ in listed],
        "y": [short(y) for _, y, _ in listed],
        "hovertext": [text for _, _, text in listed],
        "hoverinfo": "text",
        "line": {"color": color, "width": 2},
        "marker": {"color": color, "size": 6} | (marker or {}),
    }
    return trace | settings


def beyond(text: str, place: int, x: float | None = None) -> Layout:
    """A note at the upper edge of a chart, for what lies above its scale.

    Args:
        text: Name and value.
        place: How many notes are above it.
        x: Where it would be; the left edge unless given.
    """
    at = {"xref": "paper", "x": 0} if x is None else {"xref": "x", "x": x}
    return at | {
        "text": label(f"↑ {text}, above this scale"),
        "xanchor": "left",
        "xshift": 8,
        "yref": "paper",
        "y": 1,
        "yanchor": "top",
        "yshift": -18 * place,
        "showarrow": False,
        "font": {"size": 12, "color": "--faint"},
    }


def level(name: str, value: float, x_range: tuple[float, float], text: str, *, dash: str) -> Trace:
    """A horizontal line to compare with, which tells its value wherever the pointer meets it."""
    low, high = x_range
    steps = 48 if high > low else 1
    xs = [low + (high - low) * step / steps for step in range(steps + 1)]
    return points(
        name,
        [(x, value, "") for x in xs],
        color="--faint",
        mode="lines",
        line={"color": "--faint", "width": 1.5, "dash": dash},
        hovertext=text,
    )


def recommended_mark(x: float, y: float, text: str) -> Trace:
    """The mark of the recommended row, drawn over everything else."""
    star = {"symbol": "star", "size": 16, "color": "--accent", "line": {"color": "--paper", "width": 1.5}}
    return points("recommended", [(x, y, text)], color="--accent", mode="markers", marker=star)


def log_space(low: float, high: float, count: int) -> list[float]:
    """So many values from low to high at a constant ratio.

    Raises:
        ValueError: Not 0 < low <= high.
    """
    if not 0 < low <= high:
        raise ValueError(f"a logarithmic range is positive and ascending, got {low} and {high}")
    ratio = math.log(high / low)
    return [low * math.exp(ratio * step / (count - 1)) for step in range(count)]
