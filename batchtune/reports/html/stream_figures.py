"""Charts of a stream's sweep: cost by buffer size, and cost against how well examples mix.

Costs are times, where all rows have one, or batches; `timed` says which.
"""

from __future__ import annotations

from dataclasses import replace

from batchtune.reports.html.cost_chart import Other, Way, cost_view, drawn_cost, hues, lowest_cost
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

_MOST_TICKS = 12


def stream_figures(stream: StreamSweep) -> list[Figure]:
    """Draw what an epoch costs, against the size of the buffer and against randomness; none without rows."""
    measures = [True, False] if stream.has_times else [False]
    measures = [timed for timed in measures if _rows(stream, timed)]
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
            views=tuple(_mates_views(stream, timed)),
        ),
    ]
    return [figure for figure in figures if figure.views]


def _rows(stream: StreamSweep, timed: bool) -> list[StreamRow]:
    """Return the rows whose cost can be drawn."""
    return [row for row in stream.rows if drawable(drawn_cost(row, timed), logarithmic=True)]


def _others(stream: StreamSweep, timed: bool) -> list[Other]:
    """Return random access and the user's settings, each at its place among batch mates that meet again."""
    others = []
    if stream.map_style is not None:
        row = stream.map_style
        others.append(_other(row, MAP_STYLE, timed, "dash", "diamond"))
    if stream.current is not None:
        symbol = "square-x-open" if stream.current_fits is False else "square"
        others.append(_other(stream.current, current_name(stream), timed, "longdash", symbol))
    return others


def _other(row: StreamRow | Row, name: str, timed: bool, dash: str, symbol: str) -> Other:
    cost = drawn_cost(row, timed)
    return Other(name=name, cost=cost, dash=dash, color="--ink", place=_mates_place(row), symbol=symbol)


def _way(stream: StreamSweep, row: StreamRow, place: float, timed: bool) -> Way:
    cells = row_cells(stream, row)
    cells["examples between mates"] = format_number(row.mate_distance)
    return Way(
        series=algorithm_name(row),
        place=place,
        cost=drawn_cost(row, timed),
        text=hover(row.name, *cell_lines(cells)),
        chosen=row is stream.recommended_row,
    )


def _buffer_view(stream: StreamSweep, timed: bool) -> View:
    known = sorted(_rows(stream, timed), key=lambda row: drawn_cost(row, timed))
    rows = first_of_each(known, lambda row: (row.buffer_size, row.algorithm), stream.recommended_row)
    sizes = sorted({row.buffer_size for row in known})
    ticks: Layout = {}
    if len(sizes) <= _MOST_TICKS:
        ticks = {"tickvals": sizes, "ticktext": [format_number(size) for size in sizes]}
    x_axis = axis("examples in the buffer of a worker", type="log", range=log_range(sizes), **ticks)
    ways = [_way(stream, row, float(row.buffer_size), timed) for row in rows]
    others = [replace(other, place=None) for other in _others(stream, timed)]
    return cost_view(ways, others, x_axis, hues(map(algorithm_name, stream.rows)), timed=timed, connected=True)


def _mates_place(row: StreamRow | Row) -> float | None:
    """Return the per cent of batch mates that meet again; None where a logarithmic axis can't show it."""
    again = 100 * (row.mates_again or 0.0)
    return again if drawable(again, logarithmic=True) else None


def _mates_views(stream: StreamSweep, timed: bool) -> list[View]:
    ways = []
    for row in _rows(stream, timed):
        place = _mates_place(row)
        if place is not None:
            ways.append(_way(stream, row, place, timed))
    if not ways:
        return []
    others = [other for other in _others(stream, timed) if other.place is not None]
    x_axis = axis("batch mates that meet again (%)", type="log")
    colors = hues(map(algorithm_name, stream.rows))
    return [replace(cost_view(ways, others, x_axis, colors, timed=timed, connected=False), label="meet again")]
