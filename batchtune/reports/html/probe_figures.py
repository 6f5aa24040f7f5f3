"""What the probe measured: the frontier, the trials around it, and where the model of memory reaches the limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from batchtune.reports.html.figure import (
    Figure,
    Trace,
    View,
    axis,
    drawable,
    hover,
    length_unit,
    points,
    thinned,
)
from batchtune.reports.table import format_shape
from batchtune.results import FrontierPoint, Probe, Trial
from batchtune.units import counted, format_length, format_number, format_seconds, format_size

_CURVE_POINTS = 120
# What closes a point of the frontier that memory does not.
_DATA = "data"

# How an outcome is drawn: name in the legend, symbol, colour, outcomes.
_OUTCOMES = (
    ("passed", "circle", "--hue-1", ("ok",)),
    ("out of memory", "x", "--hue-0", ("oom",)),
    ("failed otherwise", "triangle-up", "--hue-5", ("timeout", "crash", "error")),
)


def frontier_figure(probe: Probe) -> Figure | None:
    """Draw the frontier, the trials and the limit, by batch size and by padded length; None without a frontier."""
    frontier = sorted(
        (p for p in probe.frontier if drawable(p.length, logarithmic=True) and drawable(p.batch_size)),
        key=lambda point: point.length,
    )
    frontier = [point for point in frontier if point.batch_size >= 1]
    if not frontier:
        return None
    unit = probe.lengths.unit
    size, size_name = length_unit(max(point.batch_size * point.length for point in frontier), unit)
    x_axis = axis("length", unit, type="log")
    return Figure(
        name="frontier",
        title="Frontier: the largest batch, by length",
        caption=_describe(probe, frontier),
        views=(
            View(
                label="batch size",
                data=_traces(probe, frontier, lambda batch_size, length: batch_size),
                layout={"xaxis": x_axis, "yaxis": axis("batch size", type="log")},
            ),
            View(
                label="padded length",
                data=_traces(probe, frontier, lambda batch_size, length: batch_size * length / size),
                layout={"xaxis": x_axis, "yaxis": axis("batch size × length", size_name, rangemode="tozero")},
            ),
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


def _traces(probe: Probe, frontier: list[FrontierPoint], y: Callable[[float, float], float]) -> list[Trace]:
    unit = probe.lengths.unit
    data = list(_limits(probe, frontier, y))
    limited = [point for point in frontier if point.closed_by != _DATA]
    filled = [point for point in frontier if point.closed_by == _DATA]
    series: tuple[tuple[str, list[FrontierPoint], str, Trace], ...] = (
        ("largest that fits", limited, "lines+markers", {"size": 8}),
        ("all that the data fill, more may fit", filled, "markers", {"symbol": "diamond-open", "size": 11}),
    )
    for name, members, mode, marker in series:
        if members:
            values = [(p.length, y(p.batch_size, p.length), _frontier_text(p, unit)) for p in thinned(members)]
            data.append(points(name, values, color="--hue-4", mode=mode, marker=marker))
    for name, symbol, color, outcomes in _OUTCOMES:
        trials = [
            (trial.length, y(trial.batch_size, trial.length), _trial_text(trial, unit))
            for trial in thinned(probe.trials)
            if trial.outcome in outcomes and drawable(trial.length, logarithmic=True) and trial.batch_size >= 1
        ]
        if trials:
            marker = {"symbol": symbol, "size": 8 if symbol == "x" else 6, "opacity": 0.75}
            data.append(points(name, trials, color=color, mode="markers", marker=marker))
    return data


def _limits(probe: Probe, frontier: list[FrontierPoint], y: Callable[[float, float], float]) -> Iterator[Trace]:
    """Return the memory model's curve, and that of max_batch_length."""
    unit = probe.lengths.unit
    curve = limit_curve(probe, frontier)
    if len(curve) > 1:
        name = f"memory model at {format_size(probe.device.limit_bytes)}"
        values = [(length, y(size, length), hover(name, format_shape(size, length, unit))) for length, size in curve]
        yield points(name, values, color="--faint", mode="lines", line={"width": 1.5, "dash": "dash"})
    limit = probe.max_batch_length
    if drawable(limit, logarithmic=True) and frontier[0].length < frontier[-1].length:
        name = f"max_batch_length = {format_length(limit, unit)}"
        sizes = [(length, limit / length) for length in _along(frontier) if limit >= length]
        values = [(length, y(size, length), hover(name, format_shape(size, length, unit))) for length, size in sizes]
        if values:
            yield points(name, values, color="--faint", mode="lines", line={"width": 1.5, "dash": "dot"})


def _frontier_text(point: FrontierPoint, unit: str | None) -> str:
    shape = format_shape(point.batch_size, point.length, unit)
    proof = [] if point.trial is None else [f"proven by trial {point.trial}"]
    if point.closed_by == _DATA:
        why = "no more examples are this short, or --max-batch-size allows no more"
        return hover(f"all that the data fill: {shape}", why, *proof, *_costs(point))
    closed = f"closed by {point.closed_by}"
    if point.oom_batch_size is not None:
        closed += f" at {format_number(point.oom_batch_size)}"
    return hover(f"largest: {shape}", closed, *proof, *_costs(point))


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
    unit = probe.lengths.unit
    limited = [point for point in frontier if point.closed_by != _DATA]
    shapes = [format_shape(point.batch_size, point.length, unit) for point in limited]
    ends = f"From {shapes[0]} to {shapes[-1]}" if shapes else "No batch that the data fill reaches the limit"
    trials = counted(len(probe.trials), "trial")
    failed = sum(trial.outcome == "oom" for trial in probe.trials)
    filled = len(frontier) - len(limited)
    of_data = (
        f" At {counted(filled, 'length')} the data fill no larger batch; more may fit." if filled and limited else ""
    )
    return f"{ends}: found in {trials}, {failed or 'none'} of them out of memory.{of_data}"
