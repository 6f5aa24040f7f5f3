"""What the probe measured: the frontier, the trials around it, and where the model of memory reaches the limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from batchtune.reports.html.figure import Figure, Layout, View, axis, drawable, hover, length_unit, points, thinned
from batchtune.reports.table import format_shape
from batchtune.results import FrontierPoint, Probe, Trial
from batchtune.units import counted, format_length, format_number, format_seconds, format_size

_CURVE_POINTS = 120
# How an outcome is drawn: name in the legend, symbol, its size, colour, outcomes.
_OUTCOMES = (
    ("passed", "circle", 6, "--hue-1", ("ok",)),
    ("out of memory", "x", 8, "--hue-0", ("oom",)),
    ("failed otherwise", "triangle-up", 6, "--hue-5", ("timeout", "crash", "error")),
)
# Length, batch size and hover text.
_Shape = tuple[float, float, str]


def frontier_figure(probe: Probe) -> Figure | None:
    """Draw the frontier, the trials and the limit, by batch size and by padded length; None without a frontier."""
    frontier = sorted(
        (
            p
            for p in probe.frontier
            if drawable(p.length, logarithmic=True) and 1 <= p.batch_size and drawable(p.batch_size)
        ),
        key=lambda point: point.length,
    )
    if not frontier:
        return None
    unit, series = probe.lengths.unit, list(_series(probe, frontier))
    size, size_name = length_unit(max(point.batch_size * point.length for point in frontier), unit)
    sizes = [points(name, shapes, color, **style) for name, shapes, color, style in series]
    padded = [
        points(name, [(length, batch * length / size, text) for length, batch, text in shapes], color, **style)
        for name, shapes, color, style in series
    ]
    x_axis = axis("length", unit, type="log")
    y_axis = axis("batch size × length", size_name, rangemode="tozero")
    return Figure(
        name="frontier",
        title="Frontier: the largest batch, by length",
        caption=_describe(probe, frontier),
        views=(
            View("batch size", sizes, {"xaxis": x_axis, "yaxis": axis("batch size", type="log")}),
            View("padded length", padded, {"xaxis": x_axis, "yaxis": y_axis}),
        ),
    )


def limit_curve(probe: Probe, frontier: list[FrontierPoint]) -> list[tuple[float, float]]:
    """Return length and batch size at which the fitted peak memory reaches the limit; empty without a usable fit.

    From peak = constant + batch size · per example. Where memory depends on target lengths, only the frontier's own
    points are known with their targets.
    """
    model = probe.models.peak_bytes
    if model is None or not frontier:
        return []
    room = probe.device.limit_bytes - model.constant
    if model.target_linear or model.target_quadratic or model.cross:
        shapes = [(point.length, point.target_length or 0.0) for point in frontier]
    else:
        shapes = [(length, 0.0) for length in _along(frontier)]
    sizes = [(length, model.per_example(length, target)) for length, target in shapes]
    curve = [(length, room / slope) for length, slope in sizes if slope > 0 and room > 0]
    return [(length, size) for length, size in curve if drawable(size, logarithmic=True)]


def _along(frontier: list[FrontierPoint]) -> list[float]:
    """Return lengths from the shortest to the longest, evenly spaced on a logarithmic axis."""
    return [float(one) for one in np.geomspace(frontier[0].length, frontier[-1].length, _CURVE_POINTS)]


def _series(probe: Probe, frontier: list[FrontierPoint]) -> Iterator[tuple[str, Sequence[_Shape], str, Layout]]:
    """Yield name, shapes, colour and style of the limits, the frontier and the trials; none without a shape."""
    unit, limit = probe.lengths.unit, probe.max_batch_length
    curves = {"dash": (f"memory model at {format_size(probe.device.limit_bytes)}", limit_curve(probe, frontier))}
    if drawable(limit, logarithmic=True) and frontier[0].length < frontier[-1].length:
        sizes = [(length, limit / length) for length in _along(frontier) if limit >= length]
        curves["dot"] = (f"max_batch_length = {format_length(limit, unit)}", sizes)
    for dash, (name, curve) in curves.items():
        shapes = [(length, size, hover(name, format_shape(size, length, unit))) for length, size in curve]
        if len(shapes) > 1:
            yield name, shapes, "--faint", {"mode": "lines", "line": {"width": 1.5, "dash": dash}}
    limited = {"mode": "lines+markers", "marker": {"size": 8}}
    filled = {"mode": "markers", "marker": {"symbol": "diamond-open", "size": 11}}
    for name, of_data, style in (
        ("largest that fits", False, limited),
        ("all that the data fill, more may fit", True, filled),
    ):
        members = thinned([point for point in frontier if (point.closed_by == "data") == of_data])
        if members:
            yield name, [(p.length, p.batch_size, _frontier_text(p, unit)) for p in members], "--hue-4", style
    for name, symbol, size, color, outcomes in _OUTCOMES:
        trials = [
            (trial.length, trial.batch_size, _trial_text(trial, unit))
            for trial in thinned(probe.trials)
            if trial.outcome in outcomes and drawable(trial.length, logarithmic=True) and trial.batch_size >= 1
        ]
        if trials:
            yield name, trials, color, {"mode": "markers", "marker": {"symbol": symbol, "size": size, "opacity": 0.75}}


def _frontier_text(point: FrontierPoint, unit: str | None) -> str:
    shape = format_shape(point.batch_size, point.length, unit)
    title, why = f"largest: {shape}", f"closed by {point.closed_by}"
    if point.closed_by == "data":
        title = f"all that the data fill: {shape}"
        why = "no more examples are this short, or --max-batch-size allows no more"
    elif point.oom_batch_size is not None:
        why += f" at {format_number(point.oom_batch_size)}"
    return hover(title, why, "" if point.trial is None else f"proven by trial {point.trial}", *_costs(point))


def _trial_text(trial: Trial, unit: str | None) -> str:
    title = f"trial {trial.index}: {format_shape(trial.batch_size, trial.length, unit)}"
    return hover(title, trial.outcome, *_costs(trial))


def _costs(measured: FrontierPoint | Trial) -> Iterator[str]:
    if measured.target_length is not None:
        yield f"target length {format_number(measured.target_length)}"
    if measured.peak_bytes is not None:
        yield f"peak memory {format_size(measured.peak_bytes)}"
    if measured.step_seconds is not None:
        yield f"step time {format_seconds(measured.step_seconds)}"


def _describe(probe: Probe, frontier: list[FrontierPoint]) -> str:
    limited = [point for point in frontier if point.closed_by != "data"]
    shapes = [format_shape(point.batch_size, point.length, probe.lengths.unit) for point in limited]
    ends = f"From {shapes[0]} to {shapes[-1]}" if shapes else "No batch that the data fill reaches the limit"
    failed = sum(trial.outcome == "oom" for trial in probe.trials) or "none"
    filled = len(frontier) - len(limited)
    more = f" At {counted(filled, 'length')} the data fill no larger batch; more may fit." if filled and limited else ""
    return f"{ends}: found in {counted(len(probe.trials), 'trial')}, {failed} of them out of memory.{more}"
