"""Charts of what an epoch costs, in time or in batches, with one way to batch or another."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from batchtune.reports.html.figure import (
    HUES,
    Layout,
    Point,
    Trace,
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
from batchtune.results import Costed, Row, StreamRow, cost_of
from batchtune.units import format_number, format_seconds

T = TypeVar("T", bound=Row | StreamRow)

# Alternatives are drawn while the rows have at least half of the scale; rows that cost about the same need no more.
_LEAST_SPREAD = 1.5
POINTS: dict[str, Any] = {"mode": "markers", "marker": {"size": 7, "opacity": 0.85}}


@dataclass(frozen=True, slots=True)
class Other:
    """An alternative to the rows: a point, if its place on the other axis is known, or else a line at its cost."""

    name: str
    cost: float
    dash: str
    color: str = "--faint"
    place: float | None = None
    symbol: str = ""


class CostChart(ABC, Generic[T]):
    """Rows and their alternatives on a logarithmic scale of costs, of which the rows take up most.

    Attributes:
        others: The alternatives to draw; those that cost so much more that the rows would look flat are named instead.
        size: Of the axis: costs are divided by it.
    """

    def __init__(
        self, rows: list[T], place: Callable[[T], float | None], others: Iterable[Other], chosen: T | None, timed: bool
    ) -> None:
        """Choose the scale for the costs of the rows, at least one; `chosen` is the recommended one."""
        self.rows = rows
        self.place = place
        self.chosen = chosen
        self.timed = timed
        costs = [drawn_cost(row, timed) for row in rows]
        shown = [other for other in others if drawable(other.cost, logarithmic=True)]
        highest = max(costs) * max(max(costs) / min(costs), _LEAST_SPREAD)
        self.others = [other for other in shown if other.cost <= highest]
        self._above = [other for other in shown if other.cost > highest]
        self._costs = [*costs, *(other.cost for other in self.others)]
        self.size, self._unit = time_unit(max(self._costs)) if timed else (1.0, "")

    @property
    @abstractmethod
    def hues(self) -> dict[str, str]:
        """The colour of each series, by its name."""

    @abstractmethod
    def series(self, row: T) -> str:
        """Return the name of a row's series."""

    @abstractmethod
    def text(self, row: T) -> str:
        """Return a row's hover text."""

    def looks(self, row: T, style: Layout) -> Layout:
        """Return how the series of a row is drawn."""
        return style

    def place_words(self, place: float) -> str:
        """Describe where an alternative lies; empty: its cost says enough."""
        return ""

    def point(self, row: T) -> Point:
        """Return a row's point."""
        return self.place(row), drawn_cost(row, self.timed) / self.size, self.text(row)

    def view(self, x_axis: Layout, below: Iterable[Trace] = (), above: Iterable[Trace] = (), **style: Any) -> View:
        """Draw each series, the alternatives, other traces below and above these, and the recommended row's mark."""
        data = [
            level(other.name, other.cost / self.size, x_axis, other.color, other.dash, self._text(other))
            for other in self.others
            if other.place is None
        ]
        data += [*below, *self._series(style)]
        for other in self.others:
            if other.place is not None:
                text = self._text(other, self.place_words(other.place))
                marker = {"symbol": other.symbol, "size": 11}
                data.append(mark(other.name, (other.place, other.cost / self.size, text), "--ink", marker))
        data += above
        if self.chosen is not None and self.chosen in self.rows:
            data.append(star(self.point(self.chosen)))
        notes = [
            above_scale(f"{other.name}: {cost_words(other.cost, self.timed)}", number)
            for number, other in enumerate(self._above)
        ]
        low = math.log10(min(self._costs) / self.size)
        high = math.log10(max(self._costs) / self.size)
        span = max(high - low, 0.02)
        # Below a factor of ten, plotly.js finds the better ticks.
        ticks: Layout = {} if span >= 1 else {"tickvals": None, "ticktext": None, "nticks": 8}
        around = [low - 0.06 * span, high + (0.06 + 0.08 * len(notes)) * span]
        title = "estimated time of one epoch" if self.timed else "batches of one epoch"
        y_axis = axis(title, self._unit, type="log", range=around, **ticks)
        layout = {"xaxis": x_axis, "yaxis": y_axis, "annotations": notes}
        return View("time" if self.timed else "batches", data, layout)

    def _series(self, style: Layout) -> Iterator[Trace]:
        for name, hue in self.hues.items():
            if members := thinned([row for row in self.rows if self.series(row) == name]):
                yield points(name, map(self.point, members), hue, **self.looks(members[0], style))

    def _text(self, other: Other, *words: str) -> str:
        return hover(other.name, cost_words(other.cost, self.timed), *words)


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
    costs = [(name, cost), *((other.name, other.cost) for other in others if drawable(other.cost, logarithmic=True))]
    return f"Lowest is {'; '.join(f'{name}: {cost_words(cost, timed)}' for name, cost in costs)}."
