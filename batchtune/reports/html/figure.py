"""A chart of the HTML report: what plotly.js is to draw, as data.

Result files may come from anywhere. Every string that reaches plotly.js goes through `label`, because plotly.js
reads a few HTML tags (links among them) in names and hover texts. Colours are the names of the page's CSS variables;
the page's script puts the colours in, so that one figure serves the light and the dark page.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from batchtune.reports.table import Table, clean, spread
from batchtune.units import format_number

T = TypeVar("T")
# Traces and layouts are as plotly.js takes them.
Trace = dict[str, Any]
Layout = dict[str, Any]
# x, y and hover text (from `hover`); None for x and y is a gap.
Point = tuple[float | None, float | None, str]

# The page has this many colours for series.
HUES = 7
# More points make no chart clearer, and the page larger.
MOST_POINTS = 400
# A longer name would leave no room for the chart; hover texts have it in full.
_NAME_CHARACTERS = 40
# Ticks of a logarithmic axis: plotly.js's own between powers of ten show one digit alone: 5 for 0.5 and for 500.
_LOG_TICKS = sorted([float(f"{digit}e{power}") for digit, power in itertools.product((1, 2, 5), range(-6, 10))])
# Only a damaged file holds values beyond these; they are not drawn.
_SMALLEST = 1e-9
_LARGEST = 1e15


@dataclass(frozen=True, slots=True)
class View:
    """One way to look at a figure; with several, the page has a button for each."""

    label: str
    data: list[Trace]
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """An interactive chart.

    Attributes:
        name: Distinguishes its elements on the page.
        caption: Describes the chart in a sentence, also for those who can't see it.
        views: At least one.
        table: The same in numbers, where no table of the page holds them.
    """

    name: str
    title: str
    caption: str
    views: tuple[View, ...]
    table: Table | None = None


def label(text: str) -> str:
    """Return one line of text that plotly.js shows unchanged: it reads tags and entities, and these are neither."""
    return html.escape(clean(text), quote=False)


def hover(title: str, *lines: str) -> str:
    """Return a hover text: a title in bold over lines, all of them escaped."""
    return "<br>".join([f"<b>{label(title)}</b>", *(label(line) for line in lines if line)])


def cell_lines(cells: Mapping[str, str | None]) -> list[str]:
    """Return a table's cells as the lines of a hover text."""
    return [f"{title}: {cell}" for title, cell in cells.items() if cell is not None]


def drawable(value: float | None, *, logarithmic: bool = False) -> bool:
    """Return whether a value can be drawn on a linear or a logarithmic axis."""
    return value is not None and (_SMALLEST if logarithmic else 0) <= value <= _LARGEST


def thinned(items: Sequence[T]) -> list[T]:
    """Return as many items as a chart may show, evenly spaced, both ends in."""
    return spread(items, MOST_POINTS)


def first_of_each(rows: Iterable[T], key: Callable[[T], Any], chosen: T | None) -> list[T]:
    """Return the first row of each key, the best where they are sorted so, or the chosen one, in order of the keys."""
    found: dict[Any, T] = {}
    for row in rows:
        if row is chosen:
            found[key(row)] = row
        found.setdefault(key(row), row)
    return [found[one] for one in sorted(found)]


def time_unit(seconds: float) -> tuple[float, str]:
    """Return the unit of a time axis that ends there, in seconds, and its name."""
    for unit_seconds, name in ((3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if seconds >= 2 * unit_seconds:
            return unit_seconds, name
    return 1e-3, "ms"


def length_unit(length: float, unit: str | None) -> tuple[float, str]:
    """Return the unit of an axis of summed lengths: seconds become minutes or hours, other units stay as they are."""
    return time_unit(length) if unit == "s" and length >= 120 else (1.0, unit or "")


def axis(title: str, unit: str | None = None, **settings: Any) -> Layout:
    """Return an axis with its title, and its unit, if any; the page's script adds its looks."""
    made: Layout = {"title": {"text": label(f"{title} ({unit})" if unit else title)}}
    if settings.get("type") == "log":
        made |= {"tickvals": _LOG_TICKS, "ticktext": [format_number(tick) for tick in _LOG_TICKS]}
    return made | settings


def points(name: str, values: Iterable[Point], color: str, **settings: Any) -> Trace:
    """Return a line or scatter trace; the values are in the order to connect them, the colour a CSS variable's name."""
    trace = {"type": "scatter", "mode": "lines+markers", **_series(name, values), **settings}
    return trace | {part: {"color": color} | trace.get(part, {}) for part in ("line", "marker")}


def bars(name: str, values: Iterable[tuple[Any, float, str]], color: str, **settings: Any) -> Trace:
    """Return a trace of bars, each with its place, height and hover text."""
    marker = {"color": color, **settings.pop("marker", {})}
    return {"type": "bar", **_series(name, values), "marker": marker, **settings}


def mark(name: str, point: Point, color: str, marker: Layout) -> Trace:
    """Return a trace of one point."""
    return points(name, [point], color, mode="markers", marker=marker)


def star(point: Point, name: str = "recommended") -> Trace:
    """Return the mark of the recommended row."""
    looks = {"symbol": "star", "size": 16, "line": {"color": "--paper", "width": 1.5}}
    return mark(name, point, "--accent", looks)


def level(name: str, value: float, x_axis: Layout, color: str, dash: str, text: str) -> Trace:
    """Return a line at one height, of many points, so that its text is shown wherever the pointer meets it."""
    low, high = x_axis["range"]
    places = np.linspace(low, high, 49)
    line = [(place, value, "") for place in (10**places if x_axis.get("type") == "log" else places).tolist()]
    return points(name, line, color, mode="lines", line={"width": 1.5, "dash": dash}, hovertext=text)


def above_scale(text: str, number: int = 0) -> Layout:
    """Return a note in a chart's upper left corner on a value that is too high to draw; others are above it."""
    return {
        "text": label(f"↑ {text}, above this scale"),
        **{"xref": "paper", "x": 0, "xanchor": "left", "xshift": 8},
        **{"yref": "paper", "y": 1, "yanchor": "top", "yshift": -18 * number},
        **{"showarrow": False, "font": {"size": 12, "color": "--faint"}},
    }


def log_range(values: Sequence[float]) -> list[float]:
    """Return the range of a logarithmic axis, with some room on both sides."""
    low = math.log10(min(values))
    high = math.log10(max(values))
    room = 0.06 * max(high - low, 0.02)
    return [low - room, high + room]


def _series(name: str, values: Iterable[tuple[Any, float | None, str]]) -> Trace:
    listed = list(values)
    return {
        "name": label(name if len(name) <= _NAME_CHARACTERS else f"{name[: _NAME_CHARACTERS - 1]}…"),
        "x": [_short(x) for x, _, _ in listed],
        "y": [_short(y) for _, y, _ in listed],
        "hovertext": [text for _, _, text in listed],
    }


def _short(value: Any) -> Any:
    """Return a float with 6 significant digits: a chart shows no more, and the page stays small."""
    return float(f"{value:.6g}") if isinstance(value, float) else value
