"""What the sweep compared: cost by number of buckets, and cost against randomness."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from batchtune.reports.html.figure import (
    HUES,
    Figure,
    Layout,
    Trace,
    View,
    axis,
    axis_title,
    beyond,
    drawable,
    hover,
    layout,
    level,
    points,
    recommended_mark,
    thinned,
    time_unit,
)
from batchtune.reports.summary import FIXED_BASELINE
from batchtune.reports.tables import current_name, series_name
from batchtune.results import Baseline, LowerBound, Row, Sweep
from batchtune.units import counted, format_length, format_number, format_percent, format_seconds

Costed = Row | Baseline | LowerBound

# What is compared is drawn while the rows have at least half of the scale; rows that cost about the same need no more.
_LEAST_SPREAD = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measure:
    """What rows are compared by.

    Attributes:
        label: On the view's button.
        axis: What the axis shows.
        cost: Of a row, a baseline or the bound; None where it is unknown.
        words: A cost for a person.
        timed: Whether it is a time, in seconds.
    """

    label: str
    axis: str
    cost: Callable[[Costed], float | None]
    words: Callable[[float], str]
    timed: bool


_TIME = _Measure(
    label="time",
    axis="estimated time of one epoch",
    cost=lambda costed: costed.estimated_epoch_seconds,
    words=format_seconds,
    timed=True,
)
_BATCHES = _Measure(
    label="batches",
    axis="batches of one epoch",
    cost=lambda costed: costed.batches,
    words=lambda cost: f"{format_number(cost)} batches",
    timed=False,
)


def buckets_figure(sweep: Sweep) -> Figure | None:
    """Time and batches of an epoch against the number of buckets; None without rows."""
    views = tuple(_buckets_view(sweep, measure) for measure in _measures(sweep))
    if not views:
        return None
    return Figure(
        name="sweep",
        title="What an epoch costs, by number of buckets",
        caption=_describe_sweep(sweep),
        views=views,
    )


def randomness_figure(sweep: Sweep) -> Figure | None:
    """Cost against effective buckets, with the curve that no table beats; None without rows."""
    views = tuple(_randomness_view(sweep, measure) for measure in _measures(sweep))
    if not views:
        return None
    return Figure(
        name="randomness",
        title="Speed against randomness",
        caption=(
            "Each point is a table: lower is faster, further left is more random (1 effective bucket: any two "
            "examples can meet in a batch). No table swept is both faster and more random than one on the line."
        ),
        views=views,
    )


def _measures(sweep: Sweep) -> Iterator[_Measure]:
    """What the sweep's rows can be compared by: time where it is known, and batches."""
    for measure in (_TIME, _BATCHES):
        known = sweep.has_times if measure.timed else bool(sweep.rows)
        if known and _drawable_rows(sweep, measure):
            yield measure


def _drawable_rows(sweep: Sweep, measure: _Measure) -> list[Row]:
    return [
        row
        for row in sweep.rows
        if row.num_buckets >= 1 and drawable(row.effective_buckets) and drawable(measure.cost(row), logarithmic=True)
    ]


def _highest(rows: list[Row], measure: _Measure) -> float:
    """The highest cost that is drawn: what is higher would press the rows flat, also on a logarithmic axis."""
    costs = [measure.cost(row) or 0.0 for row in rows]
    return max(costs) * max(max(costs) / min(costs), _LEAST_SPREAD)


def _groups(sweep: Sweep, measure: _Measure) -> list[tuple[str, str, list[Row]]]:
    """Name, colour and rows of each strategy and sizing, by number of buckets."""
    groups: dict[str, list[Row]] = {}
    for row in _drawable_rows(sweep, measure):
        groups.setdefault(series_name(row), []).append(row)
    return [
        (name, f"--hue-{number % HUES}", thinned(sorted(rows, key=lambda row: row.num_buckets)))
        for number, (name, rows) in enumerate(groups.items())
    ]


def _buckets_view(sweep: Sweep, measure: _Measure) -> View:
    rows = _drawable_rows(sweep, measure)
    highest = _highest(rows, measure)
    levels = [level for level in _levels(sweep, measure) if level[1] <= highest]
    above = [level for level in _levels(sweep, measure) if level[1] > highest]
    costs = [measure.cost(row) or 0.0 for row in rows] + [cost for _, cost, _ in levels]
    size, unit = _scale(measure, costs)
    counts = [row.num_buckets for row in rows]
    span = (min(counts) - 0.5, max(counts) + 0.5)
    data = [level(name, cost / size, span, hover(name, measure.words(cost)), dash=dash) for name, cost, dash in levels]
    for name, color, members in _groups(sweep, measure):
        values = [(row.num_buckets, (measure.cost(row) or 0) / size, _row_text(row, sweep, measure)) for row in members]
        data.append(points(name, values, color=color))
    mark = sweep.recommended_row
    cost = None if mark is None else measure.cost(mark)
    if mark is not None and mark in rows and cost is not None:
        data.append(recommended_mark(mark.num_buckets, cost / size, _row_text(mark, sweep, measure)))
    few = {"dtick": 1} if max(counts) - min(counts) <= 20 else {}
    notes = [beyond(f"{name}: {measure.words(cost)}", place) for place, (name, cost, _) in enumerate(above)]
    shown = layout(
        axis("number of buckets", range=list(span), tickformat=",d", **few),
        _cost_axis(axis_title(measure.axis, unit), [cost / size for cost in costs], len(notes)),
        annotations=notes,
    )
    return View(label=measure.label, data=data, layout=shown)


def _randomness_view(sweep: Sweep, measure: _Measure) -> View:
    rows = _drawable_rows(sweep, measure)
    highest, beside = _highest(rows, measure), _points_beside(sweep, measure)
    others, above = [p for p in beside if p[2] <= highest], [p for p in beside if p[2] > highest]
    costs = [measure.cost(row) or 0.0 for row in rows] + [cost for _, _, cost, _ in others]
    size, unit = _scale(measure, costs)

    def place(row: Row) -> tuple[float, float, str]:
        return row.effective_buckets, (measure.cost(row) or 0) / size, _row_text(row, sweep, measure)

    data: list[Trace] = []
    curve = [sweep.rows[index] for index in sweep.trade_off if 0 <= index < len(sweep.rows)]
    # The curve was found by the cost that the sweep recommends by; by another it is none.
    if len(curve) > 1 and measure.timed == sweep.has_times:
        line = sorted(
            (place(row) for row in curve if drawable(measure.cost(row), logarithmic=True)), key=lambda point: point[0]
        )
        data.append(
            points("no table beats these", thinned(line), color="--faint", mode="lines")
            | {"line": {"color": "--faint", "width": 1.5, "dash": "dot"}, "hoverinfo": "skip"}
        )
    for name, color, members in _groups(sweep, measure):
        marker = {"size": 7, "opacity": 0.85}
        data.append(points(name, map(place, members), color=color, mode="markers", marker=marker))
    for name, effective, cost, symbol in others:
        text = hover(name, measure.words(cost), f"{effective:.1f} effective buckets")
        data.append(
            points(
                name,
                [(effective, cost / size, text)],
                color="--ink",
                mode="markers",
                marker={"symbol": symbol, "size": 11},
            )
        )
    if sweep.knee is not None and 0 <= sweep.knee < len(sweep.rows) and sweep.rows[sweep.knee] in rows:
        circle = {"symbol": "circle-open", "size": 17, "line": {"color": "--ink", "width": 2}}
        data.append(points("knee", [place(sweep.rows[sweep.knee])], color="--ink", mode="markers", marker=circle))
    if sweep.recommended_row is not None and sweep.recommended_row in rows:
        data.append(recommended_mark(*place(sweep.recommended_row)))
    notes = [beyond(f"{name}: {measure.words(cost)}", place, x) for place, (name, x, cost, _) in enumerate(above)]
    shown = layout(
        axis("effective buckets"),
        _cost_axis(axis_title(measure.axis, unit), [cost / size for cost in costs], len(notes)),
        annotations=notes,
    )
    return View(label=measure.label, data=data, layout=shown)


def _cost_axis(title: str, costs: list[float], notes: int) -> Layout:
    """Logarithmic, as tables may differ by several times.

    Args:
        title: With the unit.
        costs: What is drawn, in that unit.
        notes: How many lines of text need room at the upper edge.
    """
    low, high = math.log10(min(costs)), math.log10(max(costs))
    span = max(high - low, 0.02)
    made = axis(title, type="log", range=[low - 0.06 * span, high + (0.06 + 0.08 * notes) * span])
    # Below a factor of ten, plotly.js finds the better ticks.
    return made | ({} if span >= 1 else {"dtick": None, "nticks": 8})


def _scale(measure: _Measure, costs: list[float]) -> tuple[float, str]:
    return time_unit(max(costs)) if measure.timed else (1.0, "")


def _levels(sweep: Sweep, measure: _Measure) -> list[tuple[str, float, str]]:
    """What the rows are compared with: name, cost, dash of its line; those of unknown cost are left out."""
    dashes = ("dash", "dashdot")
    costed: list[tuple[str, Costed, str]] = [
        (baseline.name, baseline, dashes[number % 2]) for number, baseline in enumerate(sweep.baselines)
    ]
    if sweep.current is not None:
        costed.append((current_name(sweep), sweep.current, "longdash"))
    costed.append(("lower bound", sweep.lower_bound, "dot"))
    known = [(name, measure.cost(item), dash) for name, item, dash in costed]
    return [(name, cost, dash) for name, cost, dash in known if cost is not None and drawable(cost, logarithmic=True)]


def _points_beside(sweep: Sweep, measure: _Measure) -> list[tuple[str, float, float, str]]:
    """Name, effective buckets, cost and symbol of what has a place beside the tables."""
    found: list[tuple[str, float, float | None, str]] = [
        # Any two examples can meet in a batch drawn at random.
        (baseline.name, 1.0, measure.cost(baseline), "x")
        for baseline in sweep.baselines
        if baseline.name == FIXED_BASELINE
    ]
    if sweep.current is not None and drawable(sweep.current.effective_buckets):
        symbol = "square-x-open" if sweep.current_fits is False else "square"
        found.append((current_name(sweep), sweep.current.effective_buckets, measure.cost(sweep.current), symbol))
    return [
        (name, x, cost, symbol)
        for name, x, cost, symbol in found
        if cost is not None and drawable(cost, logarithmic=True)
    ]


def _row_text(row: Row, sweep: Sweep, measure: _Measure) -> str:
    cost = measure.cost(row)
    others = [other for other in (_TIME, _BATCHES) if other is not measure]
    costs = [measure.words(cost) if cost is not None else ""]
    costs += [other.words(value) for other in others if (value := other.cost(row)) is not None]
    if row.estimated_epoch_error_seconds is not None and measure.timed:
        costs[0] += f" ± {format_seconds(row.estimated_epoch_error_seconds)}"
    return hover(
        f"{series_name(row)}, {counted(row.num_buckets, 'bucket')}",
        *costs,
        f"padding {format_percent(row.padding_ratio)}",
        f"mean batch {row.mean_batch_size:.1f}, {row.effective_buckets:.1f} effective buckets",
        f"largest batch {format_length(row.largest_padded_length, sweep.lengths.unit)}",
    )


def _describe_sweep(sweep: Sweep) -> str:
    measure = next(_measures(sweep))
    best = min(_drawable_rows(sweep, measure), key=lambda row: (measure.cost(row) or 0.0, row.num_buckets))
    others = "; ".join(f"{name} {measure.words(cost)}" for name, cost, _ in _levels(sweep, measure))
    lowest = f"{series_name(best)} with {counted(best.num_buckets, 'bucket')}: {measure.words(measure.cost(best) or 0)}"
    return f"Lowest is {lowest}" + (f"; {others}." if others else ".")
