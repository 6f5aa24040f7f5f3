"""Charts of a sweep: cost by number of buckets, and cost against randomness.

Each has a view by time, where all rows have one, and a view by batches; `timed` says which.
"""

from __future__ import annotations

from functools import partial
from itertools import cycle
from typing import Any

import numpy as np

from batchtune.reports.html.cost_scale import CostScale, Other, cost_words, drawn_cost, log_range, mark
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
    points,
    thinned,
)
from batchtune.reports.rows import (
    FIXED_BASELINE,
    current_name,
    format_share,
    knows_mates,
    mates_again,
    series_name,
    swept_kinds,
)
from batchtune.results import Baseline, Row, Sweep, cost_of
from batchtune.units import counted, format_length, format_percent, format_seconds

# Rows that cost no more than this, as a multiple of the fastest's, are in the close-up.
_NEAR = 1.15


def cost_figures(sweep: Sweep) -> list[Figure]:
    """Draw what an epoch costs, against the number of buckets and against randomness; none without rows."""
    measures = [True, False] if sweep.has_times else [False]
    tables, placed = ([timed for timed in measures if rows(sweep, timed)] for rows in (_tables, _placed_rows))
    figures = []
    if tables:
        best = min(_tables(sweep, tables[0]), key=lambda row: (drawn_cost(row, tables[0]), row.num_buckets))
        lowest = f"{series_name(best)} with {counted(best.num_buckets, 'bucket')}"
        costs = [
            (lowest, drawn_cost(best, tables[0])),
            *((other.name, other.cost) for other in _levels(sweep, tables[0])),
        ]
        (first, cost), *others = [(name, cost_words(cost, tables[0])) for name, cost in costs]
        figures.append(
            Figure(
                name="sweep",
                title="What an epoch costs, by number of buckets",
                caption=f"Lowest is {'; '.join([f'{first}: {cost}', *(f'{name} {words}' for name, words in others)])}.",
                views=tuple(_buckets_view(sweep, timed) for timed in tables),
            )
        )
    if placed:
        kinds = swept_kinds(sweep)
        point = {"tables": "a table", "pools": "a size of pools"}.get(kinds, "a table, or pools (diamonds)")
        random = "1 effective bucket: any two examples can meet in a batch"
        if knows_mates(sweep):
            random = "batch mates are less often mates again in the next epoch"
        figures.append(
            Figure(
                name="randomness",
                title="Speed against randomness",
                caption=f"Each point is {point}: lower is faster, further left is more random ({random}). Nothing "
                "swept is both faster and more random than what lies on the line.",
                views=(*_randomness_views(sweep, placed[0]), *(_randomness_view(sweep, timed) for timed in placed[1:])),
            )
        )
    return figures


def _rows(sweep: Sweep, timed: bool) -> list[Row]:
    return [
        row
        for row in sweep.rows
        if drawable(row.effective_buckets) and drawable(drawn_cost(row, timed), logarithmic=True)
    ]


def _tables(sweep: Sweep, timed: bool) -> list[Row]:
    return [row for row in _rows(sweep, timed) if row.pool_size is None]


def _placed_rows(sweep: Sweep, timed: bool) -> list[Row]:
    return [row for row in _rows(sweep, timed) if _place(sweep, row) is not None]


def _place(sweep: Sweep, one: Row | Baseline) -> float | None:
    """Return where something lies in randomness: per cent of batch mates that meet again, or its effective buckets.

    None where that is not known, or it has no mates.
    """
    if knows_mates(sweep):
        again = 100 * (mates_again(sweep, one) or 0.0)
        return again if drawable(again, logarithmic=True) else None
    if isinstance(one, Row):
        return one.effective_buckets if drawable(one.effective_buckets) else None
    return 1.0 if one.name == FIXED_BASELINE else None  # any two examples can meet in a batch drawn at random


def _others(sweep: Sweep, timed: bool) -> list[Other]:
    """Return what the rows are compared with, without those of unknown cost."""
    others = [
        Other(one.name, drawn_cost(one, timed), dash, randomness=_place(sweep, one), symbol="x")
        for one, dash in zip(sweep.baselines, cycle(("dash", "dashdot")), strict=False)
    ]
    if (current := sweep.current) is not None:
        symbol = "square-x-open" if sweep.current_fits is False else "square"
        place = _place(sweep, current)
        others.append(
            Other(current_name(sweep), drawn_cost(current, timed), "longdash", randomness=place, symbol=symbol)
        )
    others.append(Other("lower bound", drawn_cost(sweep.lower_bound, timed), "dot"))
    return [other for other in others if drawable(other.cost, logarithmic=True)]


def _placed_others(sweep: Sweep, timed: bool) -> list[Other]:
    return [other for other in _others(sweep, timed) if other.randomness is not None]


def _levels(sweep: Sweep, timed: bool) -> list[Other]:
    """Return what is drawn as a line where the axis is the number of buckets: recommended pools, too."""
    row, others = sweep.recommended_row, _others(sweep, timed)
    if row is None or row.pool_size is None or not drawable(drawn_cost(row, timed), logarithmic=True):
        return others
    return [
        Other(f"recommended: {row.name}", drawn_cost(row, timed), "solid", _hues(sweep)[series_name(row)]),
        *others,
    ]


def _hues(sweep: Sweep) -> dict[str, str]:
    """Return the colour of each series, the same in all charts."""
    names = dict.fromkeys(map(series_name, sweep.rows))
    return {name: f"--hue-{number % HUES}" for number, name in enumerate(names)}


class _Chart(CostScale):
    """The rows on a scale of costs, and what they are compared with."""

    def __init__(self, sweep: Sweep, rows: list[Row], others: list[Other], *, timed: bool, by_randomness: bool) -> None:
        super().__init__([drawn_cost(row, timed) for row in rows], others, timed=timed)
        self.sweep, self.rows, self.by_randomness = sweep, rows, by_randomness

    def place(self, row: Row) -> Point:
        x = _place(self.sweep, row) if self.by_randomness else row.num_buckets
        return x, drawn_cost(row, self.timed) / self.size, _row_text(row, self.sweep, self.timed)

    def strategies(self, **style: Any) -> list[Trace]:
        """Draw the rows of each strategy and sizing, by size; pools as diamonds."""
        traces = []
        for name, hue in _hues(self.sweep).items():
            members = [row for row in self.rows if series_name(row) == name]
            shown = thinned(sorted(members, key=lambda row: row.pool_size or row.num_buckets))
            looks = dict(style)
            if shown and shown[0].pool_size is not None:
                looks["marker"] = {**style.get("marker", {}), "symbol": "diamond", "size": 10}
            if shown:
                traces.append(points(name, map(self.place, shown), hue, **looks))
        return traces

    def drawn(self, x_axis: Layout, data: list[Trace]) -> View:
        """Return the view, with the mark of the recommended row."""
        row = self.sweep.recommended_row
        return self.view(x_axis, data, self.place(row) if row is not None and row in self.rows else None)


def _buckets_view(sweep: Sweep, timed: bool) -> View:
    chart = _Chart(sweep, _tables(sweep, timed), _levels(sweep, timed), timed=timed, by_randomness=False)
    counts = [row.num_buckets for row in chart.rows]
    span = min(counts) - 0.5, max(counts) + 0.5
    data = chart.levels(chart.others, np.linspace(*span, 49).tolist())
    few: Layout = {"dtick": 1} if max(counts) - min(counts) <= 20 else {}
    x_axis = axis("number of buckets", range=list(span), tickformat=",d", **few)
    return chart.drawn(x_axis, data + chart.strategies())


def _randomness_view(sweep: Sweep, timed: bool) -> View:
    chart = _Chart(sweep, _placed_rows(sweep, timed), _placed_others(sweep, timed), timed=timed, by_randomness=True)
    data, by_mates = [], knows_mates(sweep)
    curve = [sweep.rows[index] for index in sweep.trade_off if sweep.rows[index] in chart.rows]
    # The curve was found by the cost that the sweep recommends by; by another it is none.
    if len(curve) > 1 and timed == sweep.has_times:
        dotted = {"mode": "lines", "line": {"width": 1.5, "dash": "dot"}, "hoverinfo": "skip"}
        name = "no table beats these" if swept_kinds(sweep) == "tables" else "nothing beats these"
        data.append(points(name, thinned(sorted(map(chart.place, curve))), "--faint", **dotted))
    data += chart.strategies(mode="markers", marker={"size": 7, "opacity": 0.85})
    data += chart.marks(chart.others, partial(_random, by_mates=by_mates))
    if sweep.knee is not None and sweep.rows[sweep.knee] in chart.rows:
        ring = {"symbol": "circle-open", "size": 17, "line": {"color": "--ink", "width": 2}}
        data.append(mark("knee", chart.place(sweep.rows[sweep.knee]), "--ink", ring))
    x_axis = axis("effective buckets")
    if by_mates:
        x_axis = axis("batch mates that meet again (%)", type="log")
    return chart.drawn(x_axis, data)


def _randomness_views(sweep: Sweep, timed: bool) -> list[View]:
    """Return the view of all rows, and one of the fastest rows alone, if the others press them flat."""
    whole, rows = _randomness_view(sweep, timed), _placed_rows(sweep, timed)
    lowest = min(drawn_cost(row, timed) for row in rows)
    near = [row for row in rows if drawn_cost(row, timed) <= lowest * _NEAR]
    if not knows_mates(sweep) or len(near) in (1, len(rows)):
        return [whole]
    size = _Chart(sweep, rows, _placed_others(sweep, timed), timed=timed, by_randomness=True).size
    places, costs = [_place(sweep, row) or 0.0 for row in near], [drawn_cost(row, timed) / size for row in near]
    x_axis, y_axis = whole.layout["xaxis"], whole.layout["yaxis"]
    few: Layout = {"tickvals": None, "ticktext": None, "nticks": 8}
    layout = {
        "xaxis": {**x_axis, "range": log_range(places)},
        "yaxis": {**y_axis, "range": log_range(costs), **few},
        "annotations": [],
    }
    return [whole, View(f"{whole.label}, close up", whole.data, layout)]


def _random(place: float, *, by_mates: bool) -> str:
    return f"{format_share(place / 100)} of batch mates meet again" if by_mates else f"{place:.1f} effective buckets"


def _row_text(row: Row, sweep: Sweep, timed: bool) -> str:
    costs = [
        cost_words(drawn_cost(row, kind), kind) for kind in (timed, not timed) if cost_of(row, timed=kind) is not None
    ]
    if row.estimated_epoch_error_seconds is not None and timed:
        costs[0] += f" ± {format_seconds(row.estimated_epoch_error_seconds)}"
    again, title = mates_again(sweep, row), f"{series_name(row)}, {counted(row.num_buckets, 'bucket')}"
    if row.pool_size is not None:
        title = row.name
    if row.batches_deviation is not None:
        costs[-1] += f" ± {row.batches_deviation:.2g} from epoch to epoch"
    return hover(
        title,
        *costs,
        f"padding {format_percent(row.padding_ratio)}",
        f"mean batch {row.mean_batch_size:.1f}, {row.effective_buckets:.1f} effective buckets",
        "" if again is None else _random(100 * again, by_mates=True),
        f"largest batch {format_length(row.largest_padded_length, sweep.lengths.unit)}",
    )
