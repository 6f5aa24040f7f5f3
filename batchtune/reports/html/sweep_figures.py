"""Charts of a sweep: cost by number of buckets, and cost against randomness.

Each has a view by time, where all rows have one, and a view by batches; `timed` says which.
"""

from __future__ import annotations

import math
from itertools import cycle

from batchtune.reports.html.cost_chart import Other, Way, cost_view, cost_words, drawn_cost, hues, lowest_cost
from batchtune.reports.html.figure import Figure, Layout, axis, drawable, hover
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
    drawn = [_buckets_figure(sweep), _randomness_figure(sweep)]
    return [figure for figure in drawn if figure.views]


def _measures(sweep: Sweep) -> list[bool]:
    return [True, False] if sweep.has_times else [False]


def _buckets_figure(sweep: Sweep) -> Figure:
    captions = []
    views = []
    colors = hues(map(series_name, sweep.rows))
    for timed in _measures(sweep):
        tables = [row for row in _rows(sweep, timed) if row.pool_size is None]
        if not tables:
            continue
        counts = [row.num_buckets for row in tables]
        ticks: Layout = {"dtick": 1} if max(counts) - min(counts) <= 20 else {}
        x_axis = axis("number of buckets", range=[min(counts) - 0.5, max(counts) + 0.5], tickformat=",d", **ticks)
        ways = [_way(sweep, row, row.num_buckets, timed) for row in tables]
        others = _levels(sweep, timed)
        views.append(cost_view(ways, others, x_axis, colors, timed=timed, connected=True))
        best = min(tables, key=lambda row: (drawn_cost(row, timed), row.num_buckets))
        name = f"{series_name(best)} with {counted(best.num_buckets, 'bucket')}"
        captions.append(lowest_cost(name, drawn_cost(best, timed), others, timed))
    return Figure(
        name="sweep",
        title="What an epoch costs, by number of buckets",
        caption="".join(captions[:1]),
        views=tuple(views),
    )


def _randomness_figure(sweep: Sweep) -> Figure:
    kinds = swept_kinds(sweep)
    views = []
    colors = hues(map(series_name, sweep.rows))
    for timed in _measures(sweep):
        ways = []
        curve = []
        on_curve = {id(sweep.rows[index]) for index in sweep.trade_off}
        for row in _rows(sweep, timed):
            place = _place(sweep, row)
            if place is not None:
                ways.append(_way(sweep, row, place, timed))
                if id(row) in on_curve:
                    curve.append(ways[-1])
        # The sweep found the curve by the cost that it recommends by; by the other one it means nothing.
        if len(curve) == 1 or timed != sweep.has_times:
            curve = []
        if ways:
            view = cost_view(
                ways,
                [other for other in _others(sweep, timed) if other.place is not None],
                axis("batch mates that meet again (%)", type="log"),
                colors,
                timed=timed,
                connected=False,
                curve=curve,
                curve_name="no table beats these" if kinds == "tables" else "nothing beats these",
            )
            views.append(view)
    point = {"tables": "a table", "pools": "a size of pools"}.get(kinds, "a table, or pools (diamonds)")
    return Figure(
        name="randomness",
        title="Speed against randomness",
        caption=f"Each point is {point}: lower is faster, further left is more random (batch mates are "
        "less often mates again in the next epoch). Nothing swept is both faster and more random than what "
        "lies on the line.",
        views=tuple(views),
    )


def _rows(sweep: Sweep, timed: bool) -> list[Row]:
    known = [row for row in sweep.rows if drawable(row.effective_buckets)]
    drawn = [row for row in known if drawable(drawn_cost(row, timed), logarithmic=True)]
    return sorted(drawn, key=lambda row: row.pool_size or row.num_buckets)


def _place(sweep: Sweep, costed: Row | Baseline) -> float | None:
    """Return the per cent of batch mates that meet again; None where that is not known, or it has no mates."""
    again = 100 * (mates_again(sweep, costed) or 0.0)
    return again if drawable(again, logarithmic=True) else None


def _others(sweep: Sweep, timed: bool) -> list[Other]:
    """Return the baselines and the user's settings, at their places."""
    others = []
    for baseline, dash in zip(sweep.baselines, cycle(("dash", "dashdot", "longdashdot")), strict=False):
        others.append(_other(sweep, baseline, baseline.name, timed, dash, "x"))
    if sweep.current is not None:
        symbol = "square-x-open" if sweep.current_fits is False else "square"
        others.append(_other(sweep, sweep.current, current_name(sweep), timed, "longdash", symbol))
    return others


def _other(sweep: Sweep, costed: Row | Baseline, name: str, timed: bool, dash: str, symbol: str) -> Other:
    place = _place(sweep, costed)
    detail = "" if place is None else _place_words(place)
    return Other(name=name, cost=drawn_cost(costed, timed), dash=dash, place=place, symbol=symbol, detail=detail)


def _levels(sweep: Sweep, timed: bool) -> list[Other]:
    """Return the alternatives as lines, with the bound and recommended pools."""
    levels = []
    row = sweep.recommended_row
    if row is not None and row.pool_size is not None:
        hue = hues(map(series_name, sweep.rows))[series_name(row)]
        levels.append(Other(name=f"recommended: {row.name}", cost=drawn_cost(row, timed), dash="solid", color=hue))
    levels += [Other(name=other.name, cost=other.cost, dash=other.dash) for other in _others(sweep, timed)]
    levels.append(Other(name="lower bound", cost=drawn_cost(sweep.lower_bound, timed), dash="dot"))
    return levels


def _way(sweep: Sweep, row: Row, place: float, timed: bool) -> Way:
    kinds = [kind for kind in (timed, not timed) if not math.isnan(drawn_cost(row, kind))]
    costs = [cost_words(drawn_cost(row, kind), kind) for kind in kinds]
    if row.estimated_epoch_error_seconds is not None and timed:
        costs[0] += f" ± {format_seconds(row.estimated_epoch_error_seconds)}"
    if row.batches_deviation is not None:
        costs[-1] += f" ± {row.batches_deviation:.2g} from epoch to epoch"
    again = mates_again(sweep, row)
    title = f"{series_name(row)}, {counted(row.num_buckets, 'bucket')}"
    text = hover(
        title if row.pool_size is None else row.name,
        *costs,
        f"padding {format_percent(row.padding_ratio)}",
        f"mean batch {row.mean_batch_size:.1f}, {row.effective_buckets:.1f} effective buckets",
        "" if again is None else _place_words(100 * again),
        f"largest batch {format_length(row.largest_padded_length, sweep.lengths.unit)}",
    )
    return Way(
        series=series_name(row),
        place=place,
        cost=drawn_cost(row, timed),
        text=text,
        symbol="" if row.pool_size is None else "diamond",
        chosen=row is sweep.recommended_row,
    )


def _place_words(place: float) -> str:
    return f"{format_share(place / 100)} of batch mates meet again"
