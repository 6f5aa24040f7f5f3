"""A chart's scale of costs, in time or in batches, and what the rows on it are compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from batchtune.reports.html.figure import Layout, Point, Trace, View, axis, drawable, hover, label, points, time_unit
from batchtune.results import Costed, cost_of
from batchtune.units import format_number, format_seconds

# What is compared is drawn while the rows have at least half of the scale; rows that cost about the same need no more.
_LEAST_SPREAD = 1.5


@dataclass(frozen=True, slots=True)
class Other:
    """What the rows are compared with: a line at its cost, or a point where it lies in randomness, if that is known."""

    name: str
    cost: float
    dash: str
    color: str = "--faint"
    randomness: float | None = None
    symbol: str = ""


class CostScale:
    """A logarithmic scale of costs that the rows have most of.

    Attributes:
        others: What is drawn next to the rows; what costs so much more that it would press them flat is named above.
        size, unit: Of the axis: costs are divided by size.
    """

    def __init__(self, costs: Sequence[float], others: Iterable[Other], *, timed: bool) -> None:
        """Choose the scale for the costs of the rows, at least one."""
        shown = [other for other in others if drawable(other.cost, logarithmic=True)]
        # Higher costs would press the rows flat, also on a logarithmic axis.
        highest = max(costs) * max(max(costs) / min(costs), _LEAST_SPREAD)
        self.timed = timed
        self.others = [other for other in shown if other.cost <= highest]
        self._above = [other for other in shown if other.cost > highest]
        self._costs = [*costs, *(other.cost for other in self.others)]
        self.size, self.unit = time_unit(max(self._costs)) if timed else (1.0, "")

    def levels(self, others: Iterable[Other], places: Sequence[float]) -> list[Trace]:
        """Draw each as a line at its cost; of many places, to show it wherever the pointer meets the line."""
        traces = []
        for other in others:
            level: list[Point] = [(place, other.cost / self.size, "") for place in places]
            text, line = hover(other.name, cost_words(other.cost, self.timed)), {"width": 1.5, "dash": other.dash}
            traces.append(points(other.name, level, other.color, mode="lines", line=line, hovertext=text))
        return traces

    def view(self, x_axis: Layout, data: list[Trace], recommended: Point | None = None) -> View:
        """Return the view of these traces, the recommended row's mark over them, with a note on what is above."""
        if recommended is not None:
            looks = {"symbol": "star", "size": 16, "line": {"color": "--paper", "width": 1.5}}
            data = [*data, mark("recommended", recommended, "--accent", looks)]
        notes = [
            {
                "text": label(f"↑ {other.name}: {cost_words(other.cost, self.timed)}, above this scale"),
                **{"xref": "paper", "x": 0, "xanchor": "left", "xshift": 8},
                **{"yref": "paper", "y": 1, "yanchor": "top", "yshift": -18 * number},
                **{"showarrow": False, "font": {"size": 12, "color": "--faint"}},
            }
            for number, other in enumerate(self._above)
        ]
        low, high = math.log10(min(self._costs) / self.size), math.log10(max(self._costs) / self.size)
        span = max(high - low, 0.02)
        # Below a factor of ten, plotly.js finds the better ticks.
        ticks: Layout = {} if span >= 1 else {"tickvals": None, "ticktext": None, "nticks": 8}
        around = [low - 0.06 * span, high + (0.06 + 0.08 * len(notes)) * span]
        title = "estimated time of one epoch" if self.timed else "batches of one epoch"
        y_axis = axis(title, self.unit, type="log", range=around, **ticks)
        layout = {"xaxis": x_axis, "yaxis": y_axis, "annotations": notes}
        return View("time" if self.timed else "batches", data, layout)

    def marks(self, others: Iterable[Other], words: Callable[[float], str] | None = None) -> Iterator[Trace]:
        """Draw each as a point where it lies in randomness, which `words` describe."""
        for other in others:
            if other.randomness is not None:
                said = [] if words is None else [words(other.randomness)]
                text = hover(other.name, cost_words(other.cost, self.timed), *said)
                marker = {"symbol": other.symbol, "size": 11}
                yield mark(other.name, (other.randomness, other.cost / self.size, text), "--ink", marker)


def drawn_cost(costed: Costed, timed: bool) -> float:
    """Return the cost; NaN, which is not drawable, where it is unknown."""
    cost = cost_of(costed, timed=timed)
    return math.nan if cost is None else cost


def cost_words(cost: float, timed: bool) -> str:
    """Return `12.3 s`, or `634 batches`."""
    return format_seconds(cost) if timed else f"{format_number(cost)} batches"


def log_range(values: Sequence[float]) -> list[float]:
    """Return the range of a logarithmic axis, with some room on both sides."""
    low, high = math.log10(min(values)), math.log10(max(values))
    room = 0.06 * max(high - low, 0.02)
    return [low - room, high + room]


def mark(name: str, point: Point, color: str, marker: Layout) -> Trace:
    """Return a trace of one point."""
    return points(name, [point], color, mode="markers", marker=marker)
