"""Charts of a sweep: cost by number of buckets, and cost against randomness.

Each has a view by time, where all rows have one, and a view by batches; `timed` says which.
"""

from __future__ import annotations

import math

from batchtune.reports.html.figure import (
    HUES,
    Figure,
    Layout,
    Trace,
    View,
    axis,
    beyond,
    drawable,
    hover,
    level,
    points,
    recommended_mark,
    thinned,
    time_unit,
)
from batchtune.reports.summary import FIXED_BASELINE
from batchtune.reports.tables import current_name, series_name
from batchtune.results import Baseline, LowerBound, Row, Sweep, cost_of
from batchtune.units import counted, format_length, format_number, format_percent, format_seconds

# What is compared is drawn while the rows have at least half of the scale; rows that cost about the same need no more.
_LEAST_SPREAD = 1.5


def buckets_figure(sweep: Sweep) -> Figure | None:
    """Draw time and batches of an epoch against the number of buckets; None without rows."""
    measures = _measures(sweep)
    if not measures:
        return None
    return Figure(
        name="sweep",
        title="What an epoch costs, by number of buckets",
        caption=_describe_sweep(sweep, measures[0]),
        views=tuple(_buckets_view(sweep, timed) for timed in measures),
    )


def randomness_figure(sweep: Sweep) -> Figure | None:
    """Draw cost against effective buckets, with the curve that no table beats; None without rows."""
    measures = _measures(sweep)
    if not measures:
        return None
    return Figure(
        name="randomness",
        title="Speed against randomness",
        caption=(
            "Each point is a table: lower is faster, further left is more random (1 effective bucket: any two "
            "examples can meet in a batch). No table swept is both faster and more random than one on the line."
        ),
        views=tuple(_randomness_view(sweep, timed) for timed in measures),
    )


def _measures(sweep: Sweep) -> list[bool]:
    """Return which of time (True) and batches (False) the sweep's rows can be compared by."""
    return [timed for timed in (True, False) if (sweep.has_times or not timed) and _drawable_rows(sweep, timed)]


def _cost(costed: Row | Baseline | LowerBound, timed: bool) -> float:
    """Return the cost; NaN, which is not drawable, where it is unknown."""
    cost = cost_of(costed, timed=timed)
    return math.nan if cost is None else cost


def _words(cost: float, timed: bool) -> str:
    return format_seconds(cost) if timed else f"{format_number(cost)} batches"


def _drawable_rows(sweep: Sweep, timed: bool) -> list[Row]:
    return [
        row for row in sweep.rows if drawable(row.effective_buckets) and drawable(_cost(row, timed), logarithmic=True)
    ]


def _highest(rows: list[Row], timed: bool) -> float:
    """Return the highest cost to draw: higher ones would press the rows flat, also on a logarithmic axis."""
    costs = [_cost(row, timed) for row in rows]
    return max(costs) * max(max(costs) / min(costs), _LEAST_SPREAD)


def _groups(rows: list[Row]) -> list[tuple[str, str, list[Row]]]:
    """Return name, colour and rows of each strategy and sizing, by number of buckets."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(series_name(row), []).append(row)
    return [
        (name, f"--hue-{number % HUES}", thinned(sorted(members, key=lambda row: row.num_buckets)))
        for number, (name, members) in enumerate(groups.items())
    ]


def _buckets_view(sweep: Sweep, timed: bool) -> View:
    rows, levels = _drawable_rows(sweep, timed), _levels(sweep, timed)
    highest = _highest(rows, timed)
    shown = [one for one in levels if one[1] <= highest]
    costs = [_cost(row, timed) for row in rows] + [cost for _, cost, _ in shown]
    size, unit = time_unit(max(costs)) if timed else (1.0, "")
    counts = [row.num_buckets for row in rows]
    span = (min(counts) - 0.5, max(counts) + 0.5)

    def place(row: Row) -> tuple[float, float, str]:
        return row.num_buckets, _cost(row, timed) / size, _row_text(row, sweep, timed)

    data = [level(name, cost / size, span, hover(name, _words(cost, timed)), dash=dash) for name, cost, dash in shown]
    data += [points(name, map(place, members), color=color) for name, color, members in _groups(rows)]
    if (recommended := sweep.recommended_row) in rows and recommended is not None:
        data.append(recommended_mark(*place(recommended)))
    above = [f"{name}: {_words(cost, timed)}" for name, cost, _ in levels if cost > highest]
    few: Layout = {"dtick": 1} if max(counts) - min(counts) <= 20 else {}
    layout = {
        "xaxis": axis("number of buckets", range=list(span), tickformat=",d", **few),
        "yaxis": _cost_axis(timed, unit, [cost / size for cost in costs], len(above)),
        "annotations": [beyond(text, number) for number, text in enumerate(above)],
    }
    return View(label="time" if timed else "batches", data=data, layout=layout)


def _randomness_view(sweep: Sweep, timed: bool) -> View:
    rows, others = _drawable_rows(sweep, timed), _points_beside(sweep, timed)
    highest = _highest(rows, timed)
    shown = [one for one in others if one[2] <= highest]
    costs = [_cost(row, timed) for row in rows] + [cost for _, _, cost, _ in shown]
    size, unit = time_unit(max(costs)) if timed else (1.0, "")

    def place(row: Row) -> tuple[float, float, str]:
        return row.effective_buckets, _cost(row, timed) / size, _row_text(row, sweep, timed)

    data: list[Trace] = []
    curve = [sweep.rows[index] for index in sweep.trade_off]
    # The curve was found by the cost that the sweep recommends by; by another it is none.
    if len(curve) > 1 and timed == sweep.has_times:
        line = sorted(place(row) for row in curve if drawable(_cost(row, timed), logarithmic=True))
        dotted = {"width": 1.5, "dash": "dot"}
        data.append(
            points("no table beats these", thinned(line), color="--faint", mode="lines", line=dotted, hoverinfo="skip")
        )
    marker: Trace = {"size": 7, "opacity": 0.85}
    for name, color, members in _groups(rows):
        data.append(points(name, map(place, members), color=color, mode="markers", marker=marker))
    for name, effective, cost, symbol in shown:
        text = hover(name, _words(cost, timed), f"{effective:.1f} effective buckets")
        marker = {"symbol": symbol, "size": 11}
        data.append(points(name, [(effective, cost / size, text)], color="--ink", mode="markers", marker=marker))
    if sweep.knee is not None and sweep.rows[sweep.knee] in rows:
        circle = {"symbol": "circle-open", "size": 17, "line": {"color": "--ink", "width": 2}}
        data.append(points("knee", [place(sweep.rows[sweep.knee])], color="--ink", mode="markers", marker=circle))
    if (recommended := sweep.recommended_row) in rows and recommended is not None:
        data.append(recommended_mark(*place(recommended)))
    above = [(f"{name}: {_words(cost, timed)}", x) for name, x, cost, _ in others if cost > highest]
    layout = {
        "xaxis": axis("effective buckets"),
        "yaxis": _cost_axis(timed, unit, [cost / size for cost in costs], len(above)),
        "annotations": [beyond(text, number, x) for number, (text, x) in enumerate(above)],
    }
    return View(label="time" if timed else "batches", data=data, layout=layout)


def _cost_axis(timed: bool, unit: str, costs: list[float], notes: int) -> Layout:
    """Return a logarithmic axis, as tables may differ by several times.

    Args:
        timed: Whether it shows time.
        unit: Of the time.
        costs: What is drawn, in that unit.
        notes: How many lines of text need room at the upper edge.
    """
    low, high = math.log10(min(costs)), math.log10(max(costs))
    span = max(high - low, 0.02)
    # Below a factor of ten, plotly.js finds the better ticks.
    ticks: Layout = {} if span >= 1 else {"tickvals": None, "ticktext": None, "nticks": 8}
    return axis(
        "estimated time of one epoch" if timed else "batches of one epoch",
        unit,
        type="log",
        range=[low - 0.06 * span, high + (0.06 + 0.08 * notes) * span],
        **ticks,
    )


def _levels(sweep: Sweep, timed: bool) -> list[tuple[str, float, str]]:
    """Return what the rows are compared with: name, cost, dash of its line; without those of unknown cost."""
    dashes = ("dash", "dashdot")
    costed: list[tuple[str, Row | Baseline | LowerBound, str]] = [
        (baseline.name, baseline, dashes[number % 2]) for number, baseline in enumerate(sweep.baselines)
    ]
    if sweep.current is not None:
        costed.append((current_name(sweep), sweep.current, "longdash"))
    costed.append(("lower bound", sweep.lower_bound, "dot"))
    known = [(name, _cost(item, timed), dash) for name, item, dash in costed]
    return [one for one in known if drawable(one[1], logarithmic=True)]


def _points_beside(sweep: Sweep, timed: bool) -> list[tuple[str, float, float, str]]:
    """Return name, effective buckets, cost and symbol of what has a place next to the tables."""
    found = [
        # Any two examples can meet in a batch drawn at random.
        (baseline.name, 1.0, _cost(baseline, timed), "x")
        for baseline in sweep.baselines
        if baseline.name == FIXED_BASELINE
    ]
    current = sweep.current
    if current is not None and drawable(current.effective_buckets):
        symbol = "square-x-open" if sweep.current_fits is False else "square"
        found.append((current_name(sweep), current.effective_buckets, _cost(current, timed), symbol))
    return [one for one in found if drawable(one[2], logarithmic=True)]


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


def _describe_sweep(sweep: Sweep, timed: bool) -> str:
    best = min(_drawable_rows(sweep, timed), key=lambda row: (_cost(row, timed), row.num_buckets))
    lowest = f"{series_name(best)} with {counted(best.num_buckets, 'bucket')}: {_words(_cost(best, timed), timed)}"
    others = "; ".join(f"{name} {_words(cost, timed)}" for name, cost, _ in _levels(sweep, timed))
    return f"Lowest is {lowest}" + (f"; {others}." if others else ".")
