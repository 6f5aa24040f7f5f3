"""Charts of what an epoch costs, in time or in batches, with one way to batch or another."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from batchtune.reports.html.figure import (
    HUES,
    Layout,
    Point,
    View,
    above_scale,
    axis,
    drawable,
    hover,
    level,
    mark,
    points,
    star,
    thinned,
    time_unit,
)
from batchtune.results import Costed, cost_of
from batchtune.units import format_number, format_seconds

# Alternatives are drawn while the rows have at least half of the scale; rows that cost about the same need no more.
_LEAST_SPREAD = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A swept row in a chart.

    Attributes:
        series: Rows of one series have one colour.
        place: On the axis that is not the cost's.
        text: Its hover text.
        symbol: Its series is drawn by it; empty: by dots.
        chosen: Whether it is recommended.
    """

    series: str
    place: float
    cost: float
    text: str
    symbol: str = ""
    chosen: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """An alternative to the rows: a point, if its place on the other axis is known, or else a line at its cost.

    Attributes:
        detail: A line of its hover text.
    """

    name: str
    cost: float
    dash: str
    color: str = "--faint"
    place: float | None = None
    symbol: str = ""
    detail: str = ""


def cost_view(
    ways: Sequence[Way],
    others: Iterable[Other],
    x_axis: Layout,
    colors: dict[str, str],
    *,
    timed: bool,
    connected: bool,
    curve: Sequence[Way] = (),
    curve_name: str = "",
) -> View:
    """Draw rows, at least one, and their alternatives on a logarithmic scale of costs, of which the rows take up most.

    Alternatives that cost so much more that the rows would look flat are named instead. `colors` are those of the
    series, in their order; `connected` draws each series as a line, and a dotted line goes through the `curve`.
    """
    costs = [way.cost for way in ways]
    highest = max(costs) * max(max(costs) / min(costs), _LEAST_SPREAD)
    comparable = [other for other in others if drawable(other.cost, logarithmic=True)]
    shown = [other for other in comparable if other.cost <= highest]
    costs += [other.cost for other in shown]
    size, unit = time_unit(max(costs)) if timed else (1.0, "")

    def point(way: Way) -> Point:
        return way.place, way.cost / size, way.text

    data = []
    for other in shown:
        if other.place is None:
            text = _other_text(other, timed)
            data.append(level(other.name, other.cost / size, x_axis, other.color, other.dash, text))
    if curve:
        dotted = {"width": 1.5, "dash": "dot"}
        line = thinned(sorted(map(point, curve)))
        data.append(points(curve_name, line, "--faint", mode="lines", line=dotted, hoverinfo="skip"))
    for name, color in colors.items():
        members = thinned([way for way in ways if way.series == name])
        if members:
            data.append(points(name, map(point, members), color, **_looks(members[0], connected)))
    for other in shown:
        if other.place is not None:
            place = (other.place, other.cost / size, _other_text(other, timed))
            data.append(mark(other.name, place, "--ink", {"symbol": other.symbol, "size": 11}))
    data += [star(point(way)) for way in ways if way.chosen]
    above = [other for other in comparable if other.cost > highest]
    notes = []
    for number, other in enumerate(above):
        notes.append(above_scale(f"{other.name}: {cost_words(other.cost, timed)}", number))
    low = math.log10(min(costs) / size)
    high = math.log10(max(costs) / size)
    span = max(high - low, 0.02)
    # Below a factor of ten, plotly.js finds the better ticks.
    ticks: Layout = {} if span >= 1 else {"tickvals": None, "ticktext": None, "nticks": 8}
    around = [low - 0.06 * span, high + (0.06 + 0.08 * len(notes)) * span]
    title = "estimated time of one epoch" if timed else "batches of one epoch"
    y_axis = axis(title, unit, type="log", range=around, **ticks)
    layout = {"xaxis": x_axis, "yaxis": y_axis, "annotations": notes}
    return View("time" if timed else "batches", data, layout)


def _looks(way: Way, connected: bool) -> dict[str, Any]:
    if connected:
        return {}
    marker: Layout = {"size": 7, "opacity": 0.85}
    if way.symbol:
        marker |= {"symbol": way.symbol, "size": 10}
    return {"mode": "markers", "marker": marker}


def _other_text(other: Other, timed: bool) -> str:
    return hover(other.name, cost_words(other.cost, timed), other.detail)


def hues(names: Iterable[str]) -> dict[str, str]:
    """Return the colour of each series, the same in all charts."""
    return {name: f"--hue-{number % HUES}" for number, name in enumerate(dict.fromkeys(names))}


def drawn_cost(costed: Costed, timed: bool) -> float:
    """Return the cost; NaN, which is not drawable, where it is unknown."""
    cost = cost_of(costed, timed=timed)
    return math.nan if cost is None else cost


def cost_words(cost: float, timed: bool) -> str:
    """Return `12.3 s`, or `634 batches`."""
    return format_seconds(cost) if timed else f"{format_number(cost)} batches"


def lowest_cost(name: str, cost: float, others: Iterable[Other], timed: bool) -> str:
    """Return a caption's first sentence: the row that costs least, and its alternatives."""
    costs = [f"{name}: {cost_words(cost, timed)}"]
    comparable = [other for other in others if drawable(other.cost, logarithmic=True)]
    costs += [f"{other.name}: {cost_words(other.cost, timed)}" for other in comparable]
    return f"Lowest is {'; '.join(costs)}."
