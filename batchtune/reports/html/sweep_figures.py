"""Charts of a sweep: cost by number of buckets, and cost against randomness.

Each has a view by time, where all rows have one, and a view by batches; `timed` says which.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np

from batchtune.reports.html.figure import (
    HUES,
    Figure,
    Layout,
    Point,
    Trace,
    View,
    axis,
    drawable,
    hover,
    label,
    points,
    thinned,
    time_unit,
)
from batchtune.reports.rows import FIXED_BASELINE, current_name, series_name
from batchtune.results import Baseline, LowerBound, Row, Sweep, cost_of
from batchtune.units import counted, format_length, format_number, format_percent, format_seconds

# What is compared is drawn while the rows have at least half of the scale; rows that cost about the same need no more.
_LEAST_SPREAD = 1.5


@dataclass(frozen=True, slots=True)
class _Other:
    """What the rows are compared with: a line at its cost, or a point at its effective buckets, if it has any."""

    name: str
    cost: float
    dash: str
    effective: float | None = None
    symbol: str = ""


def cost_figures(sweep: Sweep) -> list[Figure]:
    """Draw what an epoch costs, against the number of buckets and against effective buckets; none without rows."""
    measures = [timed for timed in (True, False) if (sweep.has_times or not timed) and _rows(sweep, timed)]
    if not measures:
        return []
    timed = measures[0]
    best = min(_rows(sweep, timed), key=lambda row: (_cost(row, timed), row.num_buckets))
    lowest = f"{series_name(best)} with {counted(best.num_buckets, 'bucket')}: {_words(_cost(best, timed), timed)}"
    others = [f"{other.name} {_words(other.cost, timed)}" for other in _others(sweep, timed)]
    return [
        Figure(
            name="sweep",
            title="What an epoch costs, by number of buckets",
            caption=f"Lowest is {'; '.join([lowest, *others])}.",
            views=tuple(_buckets_view(sweep, timed) for timed in measures),
        ),
        Figure(
            name="randomness",
            title="Speed against randomness",
            caption="Each point is a table: lower is faster, further left is more random (1 effective bucket: any two "
            "examples can meet in a batch). No table swept is both faster and more random than one on the line.",
            views=tuple(_randomness_view(sweep, timed) for timed in measures),
        ),
    ]


def _rows(sweep: Sweep, timed: bool) -> list[Row]:
    return [
        row for row in sweep.rows if drawable(row.effective_buckets) and drawable(_cost(row, timed), logarithmic=True)
    ]


def _cost(costed: Row | Baseline | LowerBound, timed: bool) -> float:
    """Return the cost; NaN, which is not drawable, where it is unknown."""
    cost = cost_of(costed, timed=timed)
    return math.nan if cost is None else cost


def _words(cost: float, timed: bool) -> str:
    return format_seconds(cost) if timed else f"{format_number(cost)} batches"


def _others(sweep: Sweep, timed: bool) -> list[_Other]:
    """Return what the rows are compared with, without those of unknown cost."""
    others = [
        # Any two examples can meet in a batch drawn at random.
        _Other(one.name, _cost(one, timed), dash, 1.0 if one.name == FIXED_BASELINE else None, "x")
        for one, dash in zip(sweep.baselines, cycle(("dash", "dashdot")), strict=False)
    ]
    if (current := sweep.current) is not None:
        effective = current.effective_buckets if drawable(current.effective_buckets) else None
        symbol = "square-x-open" if sweep.current_fits is False else "square"
        others.append(_Other(current_name(sweep), _cost(current, timed), "longdash", effective, symbol))
    others.append(_Other("lower bound", _cost(sweep.lower_bound, timed), "dot"))
    return [other for other in others if drawable(other.cost, logarithmic=True)]


class _Chart:
    """The rows on a scale of costs, and what they are compared with."""

    def __init__(self, sweep: Sweep, timed: bool, others: list[_Other], x: Callable[[Row], float]) -> None:
        self.sweep, self.timed, self.x, self.rows = sweep, timed, x, _rows(sweep, timed)
        costs = [_cost(row, timed) for row in self.rows]
        # Higher costs would press the rows flat, also on a logarithmic axis.
        highest = max(costs) * max(max(costs) / min(costs), _LEAST_SPREAD)
        self.others = [other for other in others if other.cost <= highest]
        self.above = [other for other in others if other.cost > highest]
        self.costs = costs + [other.cost for other in self.others]
        self.size, self.unit = time_unit(max(self.costs)) if timed else (1.0, "")

    def place(self, row: Row) -> Point:
        return self.x(row), _cost(row, self.timed) / self.size, _row_text(row, self.sweep, self.timed)

    def strategies(self, **style: Any) -> list[Trace]:
        """Draw the rows of each strategy and sizing, by number of buckets."""
        groups: dict[str, list[Row]] = {}
        for row in self.rows:
            groups.setdefault(series_name(row), []).append(row)
        shown = [thinned(sorted(members, key=lambda row: row.num_buckets)) for members in groups.values()]
        return [
            points(name, map(self.place, members), f"--hue-{number % HUES}", **style)
            for number, (name, members) in enumerate(zip(groups, shown, strict=True))
        ]

    def view(self, x_axis: Layout, data: list[Trace], *, notes_at_left: bool) -> View:
        """Return the view, with the mark of the recommended row over everything else."""
        if (row := self.sweep.recommended_row) is not None and row in self.rows:
            star = {"symbol": "star", "size": 16, "line": {"color": "--paper", "width": 1.5}}
            data.append(_mark("recommended", self.place(row), "--accent", star))
        notes = [
            {
                "text": label(f"↑ {other.name}: {_words(other.cost, self.timed)}, above this scale"),
                **({"xref": "paper", "x": 0} if notes_at_left else {"xref": "x", "x": other.effective}),
                **{"xanchor": "left", "xshift": 8, "yref": "paper", "y": 1, "yanchor": "top", "yshift": -18 * number},
                **{"showarrow": False, "font": {"size": 12, "color": "--faint"}},
            }
            for number, other in enumerate(self.above)
        ]
        low, high = math.log10(min(self.costs) / self.size), math.log10(max(self.costs) / self.size)
        span = max(high - low, 0.02)
        # Below a factor of ten, plotly.js finds the better ticks.
        ticks: Layout = {} if span >= 1 else {"tickvals": None, "ticktext": None, "nticks": 8}
        around = [low - 0.06 * span, high + (0.06 + 0.08 * len(notes)) * span]
        title = "estimated time of one epoch" if self.timed else "batches of one epoch"
        y_axis = axis(title, self.unit, type="log", range=around, **ticks)
        layout = {"xaxis": x_axis, "yaxis": y_axis, "annotations": notes}
        return View("time" if self.timed else "batches", data, layout)


def _buckets_view(sweep: Sweep, timed: bool) -> View:
    chart = _Chart(sweep, timed, _others(sweep, timed), lambda row: row.num_buckets)
    counts = [row.num_buckets for row in chart.rows]
    span = min(counts) - 0.5, max(counts) + 0.5
    data = []
    for other in chart.others:
        # Of many points, to show the value wherever the pointer meets the line.
        level = [(x, other.cost / chart.size, "") for x in np.linspace(*span, 49).tolist()]
        text, line = hover(other.name, _words(other.cost, timed)), {"width": 1.5, "dash": other.dash}
        data.append(points(other.name, level, "--faint", mode="lines", line=line, hovertext=text))
    few: Layout = {"dtick": 1} if max(counts) - min(counts) <= 20 else {}
    x_axis = axis("number of buckets", range=list(span), tickformat=",d", **few)
    return chart.view(x_axis, data + chart.strategies(), notes_at_left=True)


def _randomness_view(sweep: Sweep, timed: bool) -> View:
    others = [other for other in _others(sweep, timed) if other.effective is not None]
    chart = _Chart(sweep, timed, others, lambda row: row.effective_buckets)
    data = []
    curve = [sweep.rows[index] for index in sweep.trade_off]
    # The curve was found by the cost that the sweep recommends by; by another it is none.
    if len(curve) > 1 and timed == sweep.has_times:
        places = sorted(chart.place(row) for row in curve if drawable(_cost(row, timed), logarithmic=True))
        dotted = {"mode": "lines", "line": {"width": 1.5, "dash": "dot"}, "hoverinfo": "skip"}
        data.append(points("no table beats these", thinned(places), "--faint", **dotted))
    data += chart.strategies(mode="markers", marker={"size": 7, "opacity": 0.85})
    for other in chart.others:
        text = hover(other.name, _words(other.cost, timed), f"{other.effective:.1f} effective buckets")
        marker = {"symbol": other.symbol, "size": 11}
        data.append(_mark(other.name, (other.effective, other.cost / chart.size, text), "--ink", marker))
    if sweep.knee is not None and sweep.rows[sweep.knee] in chart.rows:
        ring = {"symbol": "circle-open", "size": 17, "line": {"color": "--ink", "width": 2}}
        data.append(_mark("knee", chart.place(sweep.rows[sweep.knee]), "--ink", ring))
    return chart.view(axis("effective buckets"), data, notes_at_left=False)


def _mark(name: str, point: Point, color: str, marker: Layout) -> Trace:
    return points(name, [point], color, mode="markers", marker=marker)


def _row_text(row: Row, sweep: Sweep, timed: bool) -> str:
    costs = [_words(_cost(row, kind), kind) for kind in (timed, not timed) if cost_of(row, timed=kind) is not None]
    if row.estimated_epoch_error_seconds is not None and timed:
        costs[0] += f" ± {format_seconds(row.estimated_epoch_error_seconds)}"
    return hover(
        f"{series_name(row)}, {counted(row.num_buckets, 'bucket')}",
        *costs,
        f"padding {format_percent(row.padding_ratio)}",
        f"mean batch {row.mean_batch_size:.1f}, {row.effective_buckets:.1f} effective buckets",
        f"largest batch {format_length(row.largest_padded_length, sweep.lengths.unit)}",
    )
