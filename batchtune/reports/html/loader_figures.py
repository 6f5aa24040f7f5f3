"""Charts of a loader's tuning: throughput, and how long the step waits, by number of workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from batchtune.reports.html.figure import (
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
from batchtune.reports.loaders import failed_settings, outcome_words, quoted, row_cells, setting_name, workers_words
from batchtune.reports.table import known
from batchtune.results import LoaderRow, LoaderTuning
from batchtune.units import format_number, format_percent

# Up to this many numbers of workers have a tick each.
_MAX_TICKS = 12
# A step that takes more than this multiple of the fastest setting's rate would press all rows flat.
_HIGHEST = 3.0


def loader_figures(loader: LoaderTuning) -> list[Figure]:
    """Draw examples per second against workers, the step's demand among them, and how long the step waits."""
    demand = loader.demanded if drawable(loader.demanded) else None
    drawn = [
        _view(loader, "throughput", axis("examples per second"), lambda row: row.examples_per_second, demand),
        _view(loader, "waiting", axis("time that the step waits", "%"), _idle_percent, None),
    ]
    views = tuple(view for view in drawn if view is not None)
    if not views:
        return []
    workers = workers_words(loader)
    against = "" if demand is None else f"; {_demand_words(demand)}"
    caption = f"Each point is a setting of the loader{against}. The line joins the best of each number of {workers}."
    title = f"What the loader delivers, by its {workers}"
    return [Figure(name="loader", title=title, caption=caption, views=views)]


def _idle_percent(row: LoaderRow) -> float | None:
    return None if row.gpu_idle is None else 100 * row.gpu_idle


def _demand_words(demand: float) -> str:
    return f"the step takes {format_number(demand)} examples/s"


def _view(
    loader: LoaderTuning,
    label: str,
    y_axis: Layout,
    value_of: Callable[[LoaderRow], float | None],
    demand: float | None,
) -> View | None:
    """Return the settings by their number of workers, with the demand as a level; None if no value can be drawn."""
    rows = [row for row in loader.rows if drawable(value_of(row)) and drawable(row.workers)]
    if not rows:
        return None
    failed = [row for row in failed_settings(loader) if drawable(row.workers)]
    x_axis = _workers_axis(loader, [*rows, *failed])
    highest = max(value_of(row) or 0.0 for row in rows)
    data: list[Trace] = []
    notes: list[Layout] = []
    if demand is not None and demand > _HIGHEST * highest:
        notes.append(above_scale(_demand_words(demand)))
    elif demand is not None:
        highest = max(highest, demand)
        words = _demand_words(demand)
        data.append(level(words, demand, x_axis, "--ink", "dash", hover(words)))

    def point(row: LoaderRow) -> Point:
        return row.workers, value_of(row), _row_text(loader, row)

    by_rate = sorted(rows, key=lambda row: -(row.examples_per_second or 0.0))
    best = first_of_each(by_rate, lambda row: row.workers, loader.recommended_row)
    others = [row for row in rows if not any(row is drawn for drawn in best)]
    if others:
        looks = {"size": 6, "opacity": 0.7}
        data.append(points("other settings", map(point, thinned(others)), "--faint", mode="markers", marker=looks))
    name = f"best of each number of {workers_words(loader)}"
    data.append(points(name, map(point, thinned(best)), "--hue-0"))
    if failed:
        places = [(row.workers, 0.0, _row_text(loader, row)) for row in thinned(failed)]
        data.append(points("failed", places, "--ink", mode="markers", marker={"symbol": "x", "size": 9}))
    chosen = loader.recommended_row
    if chosen is not None and any(row is chosen for row in rows):
        data.append(star(point(chosen), "measured" if len(loader.rows) == 1 else "recommended"))
    room = 1.06 + 0.06 * len(notes)
    y_axis = y_axis | {"range": [-0.04 * highest, room * highest or 1.0]}
    return View(label, data, {"xaxis": x_axis, "yaxis": y_axis, "annotations": notes})


def _workers_axis(loader: LoaderTuning, rows: Sequence[LoaderRow]) -> Layout:
    workers = sorted({row.workers for row in rows})
    room = 0.06 * max(workers[-1] - workers[0], 8)
    ticks: Layout = {}
    if len(workers) <= _MAX_TICKS:
        ticks = {"tickvals": workers, "ticktext": list(map(str, workers))}
    return axis(workers_words(loader), range=[workers[0] - room, workers[-1] + room], **ticks)


def _row_text(loader: LoaderTuning, row: LoaderRow) -> str:
    name = setting_name(loader, row)
    if row.outcome != "ok":
        return hover(name, f"failed: {outcome_words(row)}", quoted(row.error or ""))
    spread = known(row.examples_per_second_spread, format_percent)
    return hover(name, *cell_lines({**row_cells(row), "trials differ by": spread}))
