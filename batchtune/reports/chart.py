"""The geometry of a report's charts: what to draw where. The page's template does the drawing.

Coordinates are those of the SVG's view box: pixels, y downwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from batchtune.reports.page import clean
from batchtune.reports.rows import has_times
from batchtune.reports.table import TIMES
from batchtune.results import FrontierPoint, Probe, Row, Sweep
from batchtune.units import format_length, format_number, format_seconds

WIDTH, HEIGHT = 800, 400
LEFT, RIGHT, TOP, BOTTOM = 48, 610, 40, 344
_LABEL_SPACING = 17
_LABEL_CHARACTERS = 24
# Only a damaged file holds values beyond these; they are not drawn.
_SMALLEST, _LARGEST = 1e-9, 1e15


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on an axis: its place and its label."""

    position: float
    label: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A measured or computed point, with the words that name it."""

    x: float
    y: float
    label: str
    recommended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A labelled line.

    Attributes:
        label: Its name, set to the right of the plot.
        role: What it is: `series`, or a line to compare with: `baseline`, `bound`, `limit`.
        hue: Index of its colour among the series; 0 for a line to compare with.
        path: The SVG path.
        marks: Its points; none for a line to compare with.
        end_y: Where it ends at the right.
        label_y: Where its label is set, so that labels do not overlap.
    """

    label: str
    role: str
    hue: int = 0
    path: str
    marks: tuple[Mark, ...] = ()
    end_x: float
    end_y: float
    label_y: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A line chart.

    Attributes:
        name: Distinguishes its elements on the page.
        title, description: For those who can't see it, and as its heading.
        x_title, y_title: What the axes show, with units.
        x_ticks, y_ticks: The axes' marks.
        lines: What is drawn, in drawing order.
    """

    name: str
    title: str
    description: str
    x_title: str
    y_title: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps a range of values to a range of pixels, evenly or by their logarithm."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(value)
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.start + share * (self.end - self.start), 2)


def sweep_chart(sweep: Sweep) -> Chart | None:
    """An epoch's time (batches, where times are unknown) against the number of buckets; None without rows."""
    timed = has_times(sweep)
    rows = [row for row in sweep.rows if row.num_buckets >= 1 and 0 <= _cost(row, timed) <= _LARGEST]
    if not rows:
        return None
    levels = _reference_levels(sweep, timed)
    costs = [_cost(row, timed) for row in rows] + [level for _, _, level in levels]
    unit_cost, unit = _axis_unit(max(costs)) if timed else (1.0, "")
    y_values = [value * unit_cost for value in even_ticks(min(costs) / unit_cost, max(costs) / unit_cost)]
    counts = [row.num_buckets for row in rows]
    x = _Scale(min(counts), max(counts), LEFT + 12, RIGHT - 12)
    y = _Scale(y_values[0], y_values[-1], BOTTOM, TOP)
    what = "estimated time of one epoch" if timed else "batches of one epoch"
    return Chart(
        name="sweep",
        title=f"{what[0].upper()}{what[1:]} by number of buckets",
        description=_describe_sweep(rows, levels, timed),
        x_title="number of buckets",
        y_title=f"{what} ({unit})" if unit else what,
        x_ticks=tuple(Tick(x(v), format_number(v)) for v in _whole_ticks(min(counts), max(counts))),
        y_ticks=tuple(Tick(y(v), format_number(v / unit_cost)) for v in y_values),
        lines=tuple(place_labels(_sweep_lines(rows, levels, x, y, timed, sweep.recommended_row))),
    )


def frontier_chart(probe: Probe) -> Chart | None:
    """The largest batch size against the length, both by logarithm; None with fewer than two lengths."""
    drawable = [p for p in probe.frontier if _SMALLEST <= p.length <= _LARGEST and p.batch_size >= 1]
    points = sorted(drawable, key=lambda point: point.length)
    if len(points) < 2:
        return None
    unit = probe.lengths.unit
    sizes = [point.batch_size for point in points]
    x = _Scale(points[0].length, points[-1].length, LEFT + 12, RIGHT - 12, logarithmic=True)
    y_values = log_ticks(min(sizes), max(sizes))
    low, high = min(*sizes, *y_values), max(*sizes, *y_values)
    y = _Scale(low, high, BOTTOM - 10, TOP + 10, logarithmic=True)
    marks = tuple(Mark(x(p.length), y(p.batch_size), _frontier_label(p, unit)) for p in points)
    lines = [replace(_line("largest that fits", "series", marks), hue=1)]
    limit = [
        Mark(x(point.length), y(probe.max_batch_length / point.length), "")
        for point in points
        if y.low <= probe.max_batch_length / point.length <= y.high
    ]
    if len(limit) > 1:
        lines.insert(0, replace(_line("max_batch_length", "limit", tuple(limit)), marks=()))
    return Chart(
        name="frontier",
        title="Frontier: the largest batch size that fits, by length",
        description=clean(f"From {_frontier_label(points[0], unit)} to {_frontier_label(points[-1], unit)}."),
        x_title=clean(f"length ({unit})" if unit else "length"),
        y_title="batch size",
        x_ticks=tuple(Tick(x(v), format_number(v)) for v in log_ticks(x.low, x.high, inside=True)),
        y_ticks=tuple(Tick(y(v), format_number(v)) for v in y_values),
        lines=tuple(place_labels(lines)),
    )


def even_ticks(low: float, high: float) -> list[float]:
    """About five round values, evenly spaced, the first at most `low`, the last at least `high`.

    Where both are the same, the values begin at 0; a billionth is the shortest range.

    Raises:
        ValueError: Not 0 <= low <= high.
    """
    if not 0 <= low <= high:
        raise ValueError(f"a range is ascending and not negative, got {low} and {high}")
    high = max(high, 1e-9)
    if high - low <= 1e-9 * high:
        low = 0.0
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def log_ticks(low: float, high: float, *, inside: bool = False) -> list[float]:
    """The values 1, 2 and 5 times a power of ten that cover a range; `inside`: only those within it.

    Raises:
        ValueError: Not 0 < low <= high.
    """
    if not 0 < low <= high:
        raise ValueError(f"a logarithmic range is positive and ascending, got {low} and {high}")
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    values = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    if inside:
        return [value for value in values if low <= value <= high]
    first = max(index for index, value in enumerate(values) if value <= low)
    last = min(index for index, value in enumerate(values) if value >= high)
    ticks = values[first : last + 1]
    return ticks if len(ticks) < 10 else [value for value in ticks if _is_power_of_ten(value)]


def place_labels(lines: Sequence[Line]) -> list[Line]:
    """Moves the lines' labels apart, as little as keeps their order and the plot's height."""
    order = sorted(range(len(lines)), key=lambda index: lines[index].end_y)
    places = [lines[index].end_y for index in order]
    for place in range(1, len(places)):
        places[place] = max(places[place], places[place - 1] + _LABEL_SPACING)
    limit: float = BOTTOM
    for place in reversed(range(len(places))):
        places[place] = min(places[place], limit)
        limit = places[place] - _LABEL_SPACING
    moved = list(lines)
    for index, y in zip(order, places, strict=True):
        moved[index] = replace(lines[index], label_y=round(y, 2))
    return moved


def _axis_unit(seconds: float) -> tuple[float, str]:
    """The unit of a time axis that ends there, in seconds, and its name."""
    for unit_seconds, name in ((3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if seconds >= 2 * unit_seconds:
            return unit_seconds, name
    return 1e-3, "ms"


def _reference_levels(sweep: Sweep, timed: bool) -> list[tuple[str, str, float]]:
    """What the rows are compared with: name, role, cost; those of unknown cost are left out."""
    costs: list[tuple[str, str, float | None]] = [
        (baseline.name, "baseline", baseline.estimated_epoch_seconds if timed else baseline.batches)
        for baseline in sweep.baselines
    ]
    if sweep.current is not None:
        costs.append(("current", "baseline", _cost(sweep.current, timed)))
    bound = sweep.lower_bound
    costs.append(("lower bound", "bound", bound.estimated_epoch_seconds if timed else bound.batches))
    return [(name, role, cost) for name, role, cost in costs if cost is not None and 0 <= cost <= _LARGEST]


def _describe_sweep(rows: list[Row], levels: list[tuple[str, str, float]], timed: bool) -> str:
    best = min(rows, key=lambda row: (_cost(row, timed), row.num_buckets))
    lowest = f"{best.strategy} with {best.num_buckets} buckets: {_cost_label(_cost(best, timed), timed)}"
    others = "".join(f" {name}: {_cost_label(level, timed)}." for name, _, level in levels)
    return clean(f"Lowest is {lowest}.{others}")


def _sweep_lines(
    rows: list[Row],
    levels: list[tuple[str, str, float]],
    x: _Scale,
    y: _Scale,
    timed: bool,
    recommended: Row | None,
) -> list[Line]:
    lines = [_level_line(name, role, y(level)) for name, role, level in levels]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        name = row.strategy if row.sizing == "length" else f"{row.strategy} ({row.sizing})"
        groups.setdefault(name, []).append(row)
    for hue, (name, members) in enumerate(groups.items()):
        lines.append(_row_line(name, hue, members, x, y, timed, recommended))
    # The recommended mark is drawn last, so that no other line covers it.
    return sorted(lines, key=lambda line: any(mark.recommended for mark in line.marks))


def _row_line(name: str, hue: int, rows: list[Row], x: _Scale, y: _Scale, timed: bool, recommended: Row | None) -> Line:
    marks = [
        Mark(
            x(row.num_buckets),
            y(_cost(row, timed)),
            clean(f"{name}, {row.num_buckets} buckets: {_cost_label(_cost(row, timed), timed)}"),
            row is recommended,
        )
        for row in sorted(rows, key=lambda row: row.num_buckets)
    ]
    return replace(_line(name, "series", tuple(marks)), hue=hue % 6)


def _line(label: str, role: str, marks: tuple[Mark, ...]) -> Line:
    path = "M" + " L".join(f"{mark.x} {mark.y}" for mark in marks)
    end = marks[-1]
    return Line(label=_short(label), role=role, path=path, marks=marks, end_x=end.x, end_y=end.y, label_y=end.y)


def _level_line(label: str, role: str, y: float) -> Line:
    path = f"M{LEFT} {y} L{RIGHT} {y}"
    return Line(label=_short(label), role=role, path=path, end_x=RIGHT, end_y=y, label_y=y)


def _cost(row: Row, timed: bool) -> float:
    seconds = row.estimated_epoch_seconds
    return seconds if timed and seconds is not None else row.batches


def _cost_label(cost: float, timed: bool) -> str:
    return format_seconds(cost) if timed else f"{format_number(cost)} batches"


def _whole_ticks(low: int, high: int) -> list[float]:
    if low == high:
        return [low]
    return sorted({value for value in even_ticks(low, high) if low <= value <= high and value == int(value)})


def _frontier_label(point: FrontierPoint, unit: str | None) -> str:
    shape = f"{format_number(point.batch_size)} {TIMES} {format_length(point.length, unit)}"
    return clean(f"{shape}, closed by {point.closed_by}")


def _is_power_of_ten(value: float) -> bool:
    return math.isclose(math.log10(value), round(math.log10(value)), abs_tol=1e-9)


def _short(label: str) -> str:
    label = clean(label)
    return label if len(label) <= _LABEL_CHARACTERS else label[: _LABEL_CHARACTERS - 1] + "…"
