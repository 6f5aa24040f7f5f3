"""Charts of a sweep: cost by number of buckets, and cost against randomness.

Each has a view by time, where all rows have one, and a view by batches; `timed` says which.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle

from batchtune.reports.html.cost_chart import POINTS, CostChart, Other, cost_words, drawn_cost, hues, lowest_cost
from batchtune.reports.html.figure import Figure, Layout, View, axis, drawable, hover, points, thinned
from batchtune.reports.rows import (
    current_name,
    format_share,
    mates_again,
    series_name,
    swept_kinds,
)
from batchtune.results import Baseline, Row, Sweep
from batchtune.units import counted, format_length, format_percent, format_seconds


def cost_figures(sweep: Sweep) -> list[Figure]:
    """Draw what an epoch costs, against the number of buckets and against randomness; none without rows."""
    measures = [True, False] if sweep.has_times else [False]
    tables, placed = ([timed for timed in measures if rows(sweep, timed)] for rows in (_tables, _placed_rows))
    figures = []
    if tables:
        timed = tables[0]
        best = min(_tables(sweep, timed), key=lambda row: (drawn_cost(row, timed), row.num_buckets))
        name = f"{series_name(best)} with {counted(best.num_buckets, 'bucket')}"
        figures.append(
            Figure(
                name="sweep",
                title="What an epoch costs, by number of buckets",
                caption=lowest_cost(name, drawn_cost(best, timed), _others(sweep, timed, placed=False), timed),
                views=tuple(_buckets_view(sweep, timed) for timed in tables),
            )
        )
    if placed:
        kinds = swept_kinds(sweep)
        point = {"tables": "a table", "pools": "a size of pools"}.get(kinds, "a table, or pools (diamonds)")
        figures.append(
            Figure(
                name="randomness",
                title="Speed against randomness",
                caption=f"Each point is {point}: lower is faster, further left is more random (batch mates are "
                "less often mates again in the next epoch). Nothing swept is both faster and more random than what "
                "lies on the line.",
                views=tuple(_randomness_view(sweep, timed) for timed in placed),
            )
        )
    return figures


def _rows(sweep: Sweep, timed: bool) -> list[Row]:
    known = [row for row in sweep.rows if drawable(row.effective_buckets)]
    drawn = [row for row in known if drawable(drawn_cost(row, timed), logarithmic=True)]
    return sorted(drawn, key=lambda row: row.pool_size or row.num_buckets)


def _tables(sweep: Sweep, timed: bool) -> list[Row]:
    return [row for row in _rows(sweep, timed) if row.pool_size is None]


def _placed_rows(sweep: Sweep, timed: bool) -> list[Row]:
    return [row for row in _rows(sweep, timed) if _place(sweep, row) is not None]


def _place(sweep: Sweep, one: Row | Baseline) -> float | None:
    """Return the per cent of batch mates that meet again; None where that is not known, or it has no mates."""
    again = 100 * (mates_again(sweep, one) or 0.0)
    return again if drawable(again, logarithmic=True) else None


def _others(sweep: Sweep, timed: bool, *, placed: bool) -> list[Other]:
    """Return the alternatives: as points, if `placed`, or else as lines, with the bound and recommended pools."""
    found = [
        Other(one.name, drawn_cost(one, timed), dash, place=_place(sweep, one), symbol="x")
        for one, dash in zip(sweep.baselines, cycle(("dash", "dashdot", "longdashdot")), strict=False)
    ]
    if (current := sweep.current) is not None:
        symbol = "square-x-open" if sweep.current_fits is False else "square"
        cost = drawn_cost(current, timed)
        place = _place(sweep, current)
        found.append(Other(current_name(sweep), cost, "longdash", place=place, symbol=symbol))
    if placed:
        return [other for other in found if other.place is not None]
    lines = [replace(other, place=None) for other in found]
    lines.append(Other("lower bound", drawn_cost(sweep.lower_bound, timed), "dot"))
    row = sweep.recommended_row
    if row is not None and row.pool_size is not None:
        hue = hues(map(series_name, sweep.rows))[series_name(row)]
        lines.insert(0, Other(f"recommended: {row.name}", drawn_cost(row, timed), "solid", hue))
    return lines


class _Chart(CostChart[Row]):
    def __init__(
        self, sweep: Sweep, rows: list[Row], place: Callable[[Row], float | None], *, timed: bool, placed: bool
    ) -> None:
        super().__init__(rows, place, _others(sweep, timed, placed=placed), sweep.recommended_row, timed)
        self.sweep = sweep

    @property
    def hues(self) -> dict[str, str]:
        return hues(map(series_name, self.sweep.rows))

    def series(self, row: Row) -> str:
        return series_name(row)

    def looks(self, row: Row, style: Layout) -> Layout:
        """Draw pools as diamonds."""
        if row.pool_size is None:
            return style
        return {**style, "marker": {**style.get("marker", {}), "symbol": "diamond", "size": 10}}

    def text(self, row: Row) -> str:
        sweep = self.sweep
        kinds = [kind for kind in (self.timed, not self.timed) if not math.isnan(drawn_cost(row, kind))]
        costs = [cost_words(drawn_cost(row, kind), kind) for kind in kinds]
        if row.estimated_epoch_error_seconds is not None and self.timed:
            costs[0] += f" ± {format_seconds(row.estimated_epoch_error_seconds)}"
        if row.batches_deviation is not None:
            costs[-1] += f" ± {row.batches_deviation:.2g} from epoch to epoch"
        again = mates_again(sweep, row)
        title = f"{series_name(row)}, {counted(row.num_buckets, 'bucket')}"
        return hover(
            title if row.pool_size is None else row.name,
            *costs,
            f"padding {format_percent(row.padding_ratio)}",
            f"mean batch {row.mean_batch_size:.1f}, {row.effective_buckets:.1f} effective buckets",
            "" if again is None else self.place_words(100 * again),
            f"largest batch {format_length(row.largest_padded_length, sweep.lengths.unit)}",
        )

    def place_words(self, place: float) -> str:
        return f"{format_share(place / 100)} of batch mates meet again"


def _buckets_view(sweep: Sweep, timed: bool) -> View:
    rows = _tables(sweep, timed)
    counts = [row.num_buckets for row in rows]
    few: Layout = {"dtick": 1} if max(counts) - min(counts) <= 20 else {}
    x_axis = axis("number of buckets", range=[min(counts) - 0.5, max(counts) + 0.5], tickformat=",d", **few)
    return _Chart(sweep, rows, lambda row: row.num_buckets, timed=timed, placed=False).view(x_axis)


def _randomness_chart(sweep: Sweep, timed: bool) -> _Chart:
    return _Chart(sweep, _placed_rows(sweep, timed), partial(_place, sweep), timed=timed, placed=True)


def _randomness_view(sweep: Sweep, timed: bool) -> View:
    chart = _randomness_chart(sweep, timed)
    below = []
    curve = [sweep.rows[index] for index in sweep.trade_off if sweep.rows[index] in chart.rows]
    # The sweep found the curve by the cost that it recommends by; by the other one it means nothing.
    if len(curve) > 1 and timed == sweep.has_times:
        dotted = {"mode": "lines", "line": {"width": 1.5, "dash": "dot"}, "hoverinfo": "skip"}
        name = "no table beats these" if swept_kinds(sweep) == "tables" else "nothing beats these"
        below = [points(name, thinned(sorted(map(chart.point, curve))), "--faint", **dotted)]
    x_axis = axis("batch mates that meet again (%)", type="log")
    return chart.view(x_axis, below, **POINTS)
