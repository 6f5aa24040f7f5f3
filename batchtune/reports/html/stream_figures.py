"""Charts of a stream's sweep: cost by buffer size, and cost against how well examples mix.

Costs are times, where all rows have one, or batches; `timed` says which.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from batchtune.reports.html.cost_chart import POINTS, CostChart, Other, drawn_cost, hues, lowest_cost
from batchtune.reports.html.figure import (
    Figure,
    Layout,
    View,
    axis,
    cell_lines,
    drawable,
    first_of_each,
    hover,
    log_range,
)
from batchtune.reports.rows import current_name
from batchtune.reports.streams import MAP_STYLE, algorithm_name, row_cells
from batchtune.results import Row, StreamRow, StreamSweep
from batchtune.units import format_number

Place = Callable[[StreamRow | Row], float | None]

_MOST_TICKS = 12


def stream_figures(stream: StreamSweep) -> list[Figure]:
    """Draw what an epoch costs, against the size of the buffer and against randomness; none without rows."""
    measures = [timed for timed in ((True, False) if stream.has_times else (False,)) if _rows(stream, timed)]
    if not measures:
        return []
    timed = measures[0]
    best = min(_rows(stream, timed), key=lambda row: (drawn_cost(row, timed), row.buffer_size))
    lowest = lowest_cost(best.name, drawn_cost(best, timed), _others(stream, timed), timed)
    figures = [
        Figure(
            name="stream",
            title="What an epoch of the stream costs, by buffer size",
            caption=f"{lowest} Of each algorithm and buffer the best row is drawn.",
            views=tuple(_buffer_view(stream, timed) for timed in measures),
        ),
        Figure(
            name="stream-randomness",
            title="Speed against how well examples of the stream mix",
            caption="Each point is a way to batch: lower is faster. Mates that meet again less often are more random.",
            views=tuple(filter(None, [_mates_view(stream, timed)])),
        ),
    ]
    return [figure for figure in figures if figure.views]


def _rows(stream: StreamSweep, timed: bool, place: Place | None = None) -> list[StreamRow]:
    """Return the rows whose cost, and place, can be drawn."""
    rows = [row for row in stream.rows if drawable(drawn_cost(row, timed), logarithmic=True)]
    return rows if place is None else [row for row in rows if place(row) is not None]


def _others(stream: StreamSweep, timed: bool, place: Place | None = None) -> list[Other]:
    found: list[tuple[str, StreamRow | Row, str, str]] = []
    if stream.map_style is not None:
        found.append((MAP_STYLE, stream.map_style, "dash", "diamond"))
    if stream.current is not None:
        symbol = "square-x-open" if stream.current_fits is False else "square"
        found.append((current_name(stream), stream.current, "longdash", symbol))
    return [
        Other(name, drawn_cost(row, timed), dash, "--ink", None if place is None else place(row), symbol)
        for name, row, dash, symbol in found
    ]


class _Chart(CostChart[StreamRow]):
    def __init__(self, stream: StreamSweep, rows: list[StreamRow], place: Place, timed: bool, *, placed: bool) -> None:
        others = _others(stream, timed, place if placed else None)
        super().__init__(rows, place, others, stream.recommended_row, timed)
        self.stream = stream

    @property
    def hues(self) -> dict[str, str]:
        return hues(map(algorithm_name, self.stream.rows))

    def series(self, row: StreamRow) -> str:
        return algorithm_name(row)

    def text(self, row: StreamRow) -> str:
        apart = {"examples between mates": format_number(row.mate_distance)}
        return hover(row.name, *cell_lines(row_cells(self.stream, row) | apart))


def _buffer_view(stream: StreamSweep, timed: bool) -> View:
    known = sorted(_rows(stream, timed), key=lambda row: drawn_cost(row, timed))
    rows = first_of_each(known, lambda row: (row.buffer_size, row.algorithm), stream.recommended_row)
    sizes = sorted({row.buffer_size for row in known})
    ticks: Layout = {}
    if len(sizes) <= _MOST_TICKS:
        ticks = {"tickvals": sizes, "ticktext": [format_number(size) for size in sizes]}
    x_axis = axis("examples in the buffer of a worker", type="log", range=log_range(sizes), **ticks)
    return _Chart(stream, rows, _buffer, timed, placed=False).view(x_axis)


def _buffer(row: StreamRow | Row) -> float | None:
    return float(row.buffer_size) if isinstance(row, StreamRow) else None


def _mates_view(stream: StreamSweep, timed: bool) -> View | None:
    def place(row: StreamRow | Row) -> float | None:
        again = 100 * (row.mates_again or 0.0)
        return again if drawable(again, logarithmic=True) else None

    if not (rows := _rows(stream, timed, place)):
        return None
    chart = _Chart(stream, rows, place, timed, placed=True)
    places = [place(row) or 0.0 for row in rows] + [other.place or 1.0 for other in chart.others]
    x_axis = axis("batch mates that meet again (%)", type="log", range=log_range(places))
    return replace(chart.view(x_axis, **POINTS), label="meet again")
