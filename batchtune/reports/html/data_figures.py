"""Charts of the data and the measurements: the lengths, the padding of the recommended buckets, the frontier."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from batchtune.reports.html.figure import (
    Figure,
    Layout,
    Point,
    View,
    axis,
    bars,
    drawable,
    hover,
    length_unit,
    points,
    thinned,
)
from batchtune.reports.table import format_shape, make_table
from batchtune.results import FrontierPoint, Probe, Sweep, Trial
from batchtune.units import counted, format_length, format_number, format_seconds, format_size

_CURVE_POINTS = 120
# How an outcome is drawn: name in the legend, symbol, its size, colour, outcomes.
_OUTCOMES = (
    ("passed", "circle", 6, "--hue-1", ("ok",)),
    ("out of memory", "x", 8, "--hue-0", ("oom",)),
    ("failed otherwise", "triangle-up", 6, "--hue-5", ("timeout", "crash", "error")),
)


def histogram_figure(sweep: Sweep) -> Figure | None:
    """Draw how many examples have which length, with the recommended boundaries; None without a histogram."""
    bins = [b for b in sweep.histogram if drawable(b.from_) and drawable(b.to) and drawable(b.count) and b.to > b.from_]
    if not bins:
        return None
    unit = sweep.lengths.unit
    row = sweep.recommended_row
    shown = thinned(bins)
    # Bins that widen are spaced by their logarithm.
    logarithmic = bins[0].from_ > 0 and (bins[-1].to - bins[-1].from_) > 1.5 * (bins[0].to - bins[0].from_)
    values = []
    rows = []
    for one in shown:
        middle = math.sqrt(one.from_ * one.to) if logarithmic else (one.from_ + one.to) / 2
        low = format_length(one.from_, unit)
        high = format_length(one.to, unit)
        values.append((middle, one.count, hover(f"{low} to {high}", counted(one.count, "example"))))
        rows.append({"over": low, "up to": high, "examples": f"{one.count:,}"})
    # plotly.js takes widths in the axis' own measure, also on a logarithmic one.
    widths = [float(f"{0.94 * (one.to - one.from_):.6g}") for one in shown]
    data = [bars("examples", values, "--hue-1", width=widths, marker={"opacity": 0.65})]
    title = "Lengths"
    half = ""
    most = ""
    ends = ""
    if row is not None and row.pool_size is None:
        title, ends = f"{title}, and where the buckets end", " The lines are the boundaries of the recommended buckets."
        table = zip(range(1, len(row.boundaries) + 1), row.boundaries, row.batch_sizes, strict=True)
        lines: list[Point] = []
        for number, end, size in thinned([one for one in table if drawable(one[1], logarithmic=logarithmic)]):
            text = hover(f"bucket {number}: up to {format_length(end, unit)}", f"batch size {format_number(size)}")
            # Many points, so that the pointer meets the line.
            lines += [*((end, step / 12, text) for step in range(13)), (None, None, "")]
        data.append(points("bucket boundaries", lines, "--accent", mode="lines", yaxis="y2", line={"width": 1}))
    layout = {
        "xaxis": axis("length", unit, type="log" if logarithmic else "linear"),
        "yaxis": axis("examples", rangemode="tozero"),
        # Boundaries keep their height when the reader zooms into the bars.
        "yaxis2": {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
        "barmode": "overlay",
    }
    if len(sweep.quantiles) == 1001:
        half = f": half of them up to {format_length(sweep.quantiles[500], unit)}"
        most = f", 99% up to {format_length(sweep.quantiles[990], unit)}"
    longest = f", the longest {format_length(sweep.lengths.max, unit)}."
    return Figure(
        name="histogram",
        title=title,
        caption=f"{counted(sweep.lengths.count, 'example')}{half}{most}{longest}{ends}",
        views=(View("examples", data, layout),),
        table=make_table("Lengths", rows),
    )


def frontier_figure(probe: Probe) -> Figure | None:
    """Draw the frontier, the trials and the limit, by batch size and by padded length; None without a frontier."""
    frontier = [p for p in probe.frontier if drawable(p.length, logarithmic=True) and p.batch_size >= 1]
    frontier = sorted((p for p in frontier if drawable(p.batch_size)), key=lambda point: point.length)
    if not frontier:
        return None
    unit = probe.lengths.unit
    series = list(_series(probe, frontier))
    size, size_name = length_unit(max(point.batch_size * point.length for point in frontier), unit)
    sizes = [points(name, shapes, color, **style) for name, shapes, color, style in series]
    padded = [
        points(name, [(length, batch * length / size, text) for length, batch, text in shapes], color, **style)
        for name, shapes, color, style in series
    ]
    x_axis = axis("length", unit, type="log")
    y_axis = axis("batch size × length", size_name, rangemode="tozero")
    limited = [point for point in frontier if point.closed_by != "data"]
    shapes = [format_shape(point.batch_size, point.length, unit) for point in limited]
    ends = f"From {shapes[0]} to {shapes[-1]}" if shapes else "No batch that the data fill reaches the limit"
    failed = sum(trial.outcome == "oom" for trial in probe.trials) or "none"
    filled = len(frontier) - len(limited)
    more = f" At {counted(filled, 'length')} the data fill no larger batch; more may fit." if filled and limited else ""
    return Figure(
        name="frontier",
        title="Frontier: the largest batch, by length",
        caption=f"{ends}: found in {counted(len(probe.trials), 'trial')}, {failed} of them out of memory.{more}",
        views=(
            View("batch size", sizes, {"xaxis": x_axis, "yaxis": axis("batch size", type="log")}),
            View("padded length", padded, {"xaxis": x_axis, "yaxis": y_axis}),
        ),
    )


def _along(frontier: list[FrontierPoint]) -> list[float]:
    """Return lengths from the shortest to the longest, evenly spaced on a logarithmic axis."""
    return [float(one) for one in np.geomspace(frontier[0].length, frontier[-1].length, _CURVE_POINTS)]


def _series(
    probe: Probe, frontier: list[FrontierPoint]
) -> Iterator[tuple[str, Sequence[tuple[float, float, str]], str, Layout]]:
    """Yield the limits, the frontier and the trials: name, (length, batch size, hover text) of each shape, looks."""
    unit = probe.lengths.unit
    limit = probe.max_batch_length
    if drawable(limit, logarithmic=True) and frontier[0].length < frontier[-1].length:
        sizes = [(length, limit / length) for length in _along(frontier) if limit >= length]
        name = f"max_batch_length = {format_length(limit, unit)}"
        shapes = [(length, size, hover(name, format_shape(size, length, unit))) for length, size in sizes]
        if len(shapes) > 1:
            yield name, shapes, "--faint", {"mode": "lines", "line": {"width": 1.5, "dash": "dot"}}
    for of_data, name, mode, marker in (
        (False, "largest that fits", "lines+markers", {"size": 8}),
        (True, "all that the data fill, more may fit", "markers", {"symbol": "diamond-open", "size": 11}),
    ):
        members = thinned([point for point in frontier if (point.closed_by == "data") == of_data])
        if members:
            shapes = [(p.length, p.batch_size, _frontier_text(p, unit)) for p in members]
            yield name, shapes, "--hue-4", {"mode": mode, "marker": marker}
    for name, symbol, symbol_size, color, outcomes in _OUTCOMES:
        shapes = []
        for trial in thinned(probe.trials):
            if trial.outcome in outcomes and drawable(trial.length, logarithmic=True) and trial.batch_size >= 1:
                title = f"trial {trial.index}: {format_shape(trial.batch_size, trial.length, unit)}"
                shapes.append((trial.length, trial.batch_size, hover(title, trial.outcome, *_costs(trial))))
        if shapes:
            marker = {"symbol": symbol, "size": symbol_size, "opacity": 0.75}
            yield name, shapes, color, {"mode": "markers", "marker": marker}


def _frontier_text(point: FrontierPoint, unit: str | None) -> str:
    shape = format_shape(point.batch_size, point.length, unit)
    title = f"largest: {shape}"
    why = f"closed by {point.closed_by}"
    if point.closed_by == "data":
        title = f"all that the data fill: {shape}"
        why = "no more examples are this short, or --max-batch-size allows no more"
    elif point.oom_batch_size is not None:
        why += f" at {format_number(point.oom_batch_size)}"
    return hover(title, why, "" if point.trial is None else f"proven by trial {point.trial}", *_costs(point))


def _costs(measured: FrontierPoint | Trial) -> Iterator[str]:
    if measured.target_length is not None:
        yield f"target length {format_number(measured.target_length)}"
    if measured.peak_bytes is not None:
        yield f"peak memory {format_size(measured.peak_bytes)}"
    if measured.step_seconds is not None:
        yield f"step time {format_seconds(measured.step_seconds)}"
