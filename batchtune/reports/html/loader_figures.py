"""Charts of a loader's tuning: throughput, and how long the step waits, by number of workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from batchtune.reports.html.figure import (
    HUES,
    Figure,
    Layout,
    Point,
    Trace,
    View,
    above_scale,
    axis,
    cell_lines,
    drawable,
    first_of_each,
    hover,
    level,
    points,
    star,
    thinned,
)
from batchtune.reports.loaders import (
    argument_of,
    failed_settings,
    outcome_words,
    quoted,
    row_cells,
    setting_name,
    varied_arguments,
    workers_words,
)
from batchtune.reports.table import UNKNOWN, known
from batchtune.results import LoaderRow, LoaderTuning
from batchtune.units import format_number, format_percent

# Up to this many numbers of workers have a tick each.
_MOST_TICKS = 12
# More lines say no more.
_MOST_LINES = 4
# Settings whose best rates differ by less are one line.
_MATTERS = 1.05
# A step that takes more than this multiple of the fastest setting's rate would press all rows flat.
_HIGHEST = 3.0


class _Scale(NamedTuple):
    """The axis that rows are drawn on: `of` returns a row's value, `level` is a named value to compare them with."""

    label: str
    title: str
    unit: str | None
    of: Callable[[LoaderRow], float | None]
    level: tuple[str, float] | None


def loader_figures(loader: LoaderTuning) -> list[Figure]:
    """Draw examples per second against workers, the step's demand among them, and how long the step waits."""
    demand = None
    if (demanded := loader.demanded) is not None and drawable(demanded):
        demand = f"the step takes {format_number(demanded)} examples/s", demanded
    scales = (
        _Scale("throughput", "examples per second", None, lambda row: row.examples_per_second, demand),
        _Scale("waiting", "time that the step waits", "%", _idle_percent, None),
    )
    views = tuple(_view(loader, scale) for scale in scales if any(_drawn(loader, scale)))
    if not views:
        return []
    against = f"; {demand[0]}" if demand is not None else ""
    are = workers_words(loader)
    caption = f"Each point is a setting of the loader{against}. Lines join the best settings of each number of {are}."
    return [Figure(name="loader", title=f"What the loader delivers, by its {are}", caption=caption, views=views)]


def _idle_percent(row: LoaderRow) -> float | None:
    return None if row.gpu_idle is None else 100 * row.gpu_idle


def _drawn(loader: LoaderTuning, scale: _Scale) -> list[LoaderRow]:
    return [row for row in loader.rows if drawable(scale.of(row)) and drawable(row.workers)]


def _view(loader: LoaderTuning, scale: _Scale) -> View:
    rows = _drawn(loader, scale)
    failed = [row for row in failed_settings(loader) if drawable(row.workers)]
    workers = sorted({row.workers for row in (*rows, *failed)})
    room = 0.06 * max(workers[-1] - workers[0], 8)
    ticks: Layout = {"tickvals": workers, "ticktext": list(map(str, workers))} if len(workers) <= _MOST_TICKS else {}
    x_axis = axis(workers_words(loader), range=[workers[0] - room, workers[-1] + room], **ticks)
    highest = max(scale.of(row) or 0.0 for row in rows)
    data: list[Trace] = []
    notes: list[Layout] = []
    if scale.level is not None:
        name, value = scale.level
        if value <= _HIGHEST * highest:
            highest = max(highest, value)
            data.append(level(name, value, x_axis, "--ink", "dash", hover(name)))
        else:
            notes.append(above_scale(name))

    def point(row: LoaderRow) -> Point:
        return row.workers, scale.of(row), _row_text(loader, row)

    groups = _groups(loader, rows)
    on_lines = {id(row) for members in groups.values() for row in members}
    if others := [row for row in rows if id(row) not in on_lines]:
        small = {"size": 6, "opacity": 0.7}
        data.append(points("other settings", map(point, thinned(others)), "--faint", mode="markers", marker=small))
    for number, (name, members) in enumerate(groups.items()):
        data.append(points(name, map(point, thinned(members)), f"--hue-{number % HUES}"))
    if failed:
        places = [(row.workers, 0.0, _row_text(loader, row)) for row in thinned(failed)]
        data.append(points("failed", places, "--ink", mode="markers", marker={"symbol": "x", "size": 9}))
    chosen = loader.recommended_row
    if chosen is not None and chosen in rows:
        data.append(star(point(chosen), "measured" if len(loader.rows) == 1 else "recommended"))
    y_axis = axis(scale.title, scale.unit, range=[-0.04 * highest, (1.06 + 0.06 * len(notes)) * highest or 1.0])
    return View(scale.label, data, {"xaxis": x_axis, "yaxis": y_axis, "annotations": notes})


def _groups(loader: LoaderTuning, rows: Sequence[LoaderRow]) -> dict[str, list[LoaderRow]]:
    """Return the rows to join, by the name of their line: of each number of workers the best.

    A line for each combination of the other arguments that change the rate, of a few lines at most. A row that takes
    none of these, such as one without workers, is on all lines.
    """
    names = [name for name in varied_arguments(loader) if any(_other(row, name) for row in rows)]
    names.sort(key=lambda name: -_effect(rows, name))
    kept: list[str] = []
    for name in names:
        if _effect(rows, name) >= _MATTERS and len(_combinations(rows, [*kept, name])) <= _MOST_LINES:
            kept.append(name)
    found: dict[str, list[LoaderRow]] = {}
    best_of_each = f"best of each number of {workers_words(loader)}"
    for values in _combinations(rows, kept):
        of = dict(zip(kept, values, strict=True))
        members = [row for row in rows if all(_value(row, name) in (UNKNOWN, of[name]) for name in kept)]
        title = " ".join(f"{name}={value}" for name, value in of.items()) or best_of_each
        members.sort(key=lambda row: -(row.examples_per_second or 0.0))
        found[title] = first_of_each(members, lambda row: row.workers, loader.recommended_row)
    return found


def _other(row: LoaderRow, name: str) -> bool:
    """Return whether an argument of a row is another than the number of its workers."""
    return name in row.arguments and argument_of(row, name) != str(row.workers)


def _value(row: LoaderRow, name: str) -> str:
    """Return the value of an argument; a dash where it has none, or nothing to do without workers."""
    return UNKNOWN if not row.workers and row.arguments.get(name) is None else argument_of(row, name)


def _combinations(rows: Sequence[LoaderRow], names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the values that these arguments have together, in the order of the rows."""
    found = dict.fromkeys(tuple(_value(row, name) for name in names) for row in rows)
    return [values for values in found if UNKNOWN not in values] or list(found)[:1]


def _effect(rows: Sequence[LoaderRow], name: str) -> float:
    """Return by which factor the best rates of an argument's values differ, at most, with the same workers.

    It is 1 where only one of several numbers of workers was measured with more than one of its values.
    """
    best: dict[int, dict[str, float]] = {}
    for row in rows:
        if _value(row, name) != UNKNOWN:
            rates = best.setdefault(row.workers, {})
            value = argument_of(row, name)
            rates[value] = max(rates.get(value, 0.0), row.examples_per_second or 0.0)
    found = [max(rates.values()) / max(min(rates.values()), 1e-9) for rates in best.values() if len(rates) > 1]
    return max(found) if len(found) >= min(2, len(best)) and found else 1.0


def _row_text(loader: LoaderTuning, row: LoaderRow) -> str:
    name = setting_name(loader, row)
    if row.outcome != "ok":
        return hover(name, f"failed: {outcome_words(row)}", quoted(row.error or ""))
    spread = known(row.examples_per_second_spread, format_percent)
    return hover(name, *cell_lines({**row_cells(row), "trials differ by": spread}))
