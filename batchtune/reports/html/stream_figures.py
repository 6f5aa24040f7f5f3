"""Charts of a stream's sweep: cost by buffer size, and cost against how well examples mix.

Each has a view by time, where all rows have one, and a view by batches; `timed` says which.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from batchtune.reports.html.cost_scale import CostScale, Other, cost_words, drawn_cost, log_range, mark, star
from batchtune.reports.html.figure import HUES, Figure, Layout, Point, View, axis, drawable, hover, points, thinned
from batchtune.reports.rows import current_name, format_share
from batchtune.reports.stream_tables import algorithm_name
from batchtune.results import StreamRow, StreamSweep
from batchtune.units import format_number, format_percent, format_size

_MAP_STYLE = "map-style bucket table"


def stream_figures(stream: StreamSweep) -> list[Figure]:
    """Draw what an epoch costs, against the size of the buffer and against how well examples mix; none without rows."""
    measures = [timed for timed in ((True, False) if stream.has_times else (False,)) if _rows(stream, timed)]
    if not measures:
        return []
    timed = measures[0]
    best = min(_rows(stream, timed), key=lambda row: (drawn_cost(row, timed), row.buffer_size))
    others = [(other.name, other.cost) for other in _others(stream, timed) if drawable(other.cost)]
    costs = [f"{name}: {cost_words(cost, timed)}" for name, cost in [(best.name, drawn_cost(best, timed)), *others]]
    return [
        Figure(
            name="stream",
            title="What an epoch of the stream costs, by buffer size",
            caption=f"Lowest is {'; '.join(costs)}. Of each algorithm and buffer the best row is drawn.",
            views=tuple(_buffer_view(stream, timed) for timed in measures),
        ),
        Figure(
            name="stream-mixing",
            title="Speed against how well examples of the stream mix",
            caption="Each point is a way to batch: lower is faster, further right mixes better (100%: batch mates are "
            "stored as far apart as any two examples).",
            views=tuple(_mixing_view(stream, timed) for timed in measures),
        ),
    ]


def _rows(stream: StreamSweep, timed: bool) -> list[StreamRow]:
    return [
        row
        for row in stream.rows
        if drawable(drawn_cost(row, timed), logarithmic=True) and drawable(row.buffer_size) and drawable(row.mixing)
    ]


def _others(stream: StreamSweep, timed: bool) -> list[Other]:
    others = []
    if stream.map_style is not None:
        others.append(Other(_MAP_STYLE, drawn_cost(stream.map_style, timed), "dash", "--ink"))
    if stream.current is not None:
        others.append(Other(current_name(stream), drawn_cost(stream.current, timed), "longdash"))
    return others


class _Chart(CostScale):
    """The rows on a scale of costs, against the size of the buffer or how well examples mix."""

    def __init__(self, stream: StreamSweep, *, timed: bool, by_mixing: bool) -> None:
        self.stream, self.rows, self.by_mixing = stream, _rows(stream, timed), by_mixing
        super().__init__([drawn_cost(row, timed) for row in self.rows], _others(stream, timed), timed=timed)

    def place(self, row: StreamRow) -> Point:
        x = 100 * row.mixing if self.by_mixing else float(row.buffer_size)
        return x, drawn_cost(row, self.timed) / self.size, _row_text(row, self.timed)

    def chart(self, x_axis: Layout, places: list[float], **style: Any) -> View:
        """Return the view: lines of what is compared, each algorithm, and the recommended row's mark."""
        data = self.levels(places)
        names = dict.fromkeys(map(algorithm_name, self.rows))
        for number, name in enumerate(names):
            rows = [row for row in self.rows if algorithm_name(row) == name]
            shown = thinned(rows if self.by_mixing else _best_by_buffer(rows, self.timed))
            data.append(points(name, map(self.place, shown), f"--hue-{number % HUES}", **style))
        row = self.stream.recommended_row
        if row is not None and row in self.rows:
            data.append(star(self.place(row)))
        return self.view(x_axis, data)


def _best_by_buffer(rows: list[StreamRow], timed: bool) -> list[StreamRow]:
    """Return the best row with each size of buffer, the smallest first."""
    best: dict[int, StreamRow] = {}
    for row in sorted(rows, key=lambda row: drawn_cost(row, timed)):
        best.setdefault(row.buffer_size, row)
    return [best[size] for size in sorted(best)]


def _buffer_view(stream: StreamSweep, timed: bool) -> View:
    chart = _Chart(stream, timed=timed, by_mixing=False)
    span = log_range([row.buffer_size for row in chart.rows])
    x_axis = axis("examples in the buffer of a worker", type="log", range=span)
    return chart.chart(x_axis, np.geomspace(10 ** span[0], 10 ** span[1], 49).tolist())


def _mixing_view(stream: StreamSweep, timed: bool) -> View:
    chart = _Chart(stream, timed=timed, by_mixing=True)
    places = [100 * row.mixing for row in chart.rows]
    room = 0.05 * max(max(places) - min(places), 1.0)
    low, high = min(places) - room, max(places) + room
    x_axis = axis("distance between batch mates, of that between any two examples (%)", range=[low, high])
    marker = {"size": 7, "opacity": 0.85}
    view = chart.chart(x_axis, np.linspace(low, high, 49).tolist(), mode="markers", marker=marker)
    now = stream.current
    if now is not None and drawable(now.mixing) and any(other.name == current_name(stream) for other in chart.others):
        looks = {"symbol": "square-x-open" if stream.current_fits is False else "square", "size": 11}
        view.data.append(mark(current_name(stream), chart.place(now), "--ink", looks))
    return view


def _row_text(row: StreamRow, timed: bool) -> str:
    kinds = [kind for kind in (timed, not timed) if drawable(drawn_cost(row, kind))]
    return hover(
        row.name,
        *(cost_words(drawn_cost(row, kind), kind) for kind in kinds),
        f"padding {format_percent(row.padding_ratio)}, mean batch {row.mean_batch_size:.1f}",
        f"{format_share(row.under_half)} of batches less than half as large as they could be",
        f"mates {format_number(row.mate_distance)} examples apart, {format_share(row.mates_again)} meet again",
        f"buffer of {format_size(row.buffer_bytes)}",
    )
