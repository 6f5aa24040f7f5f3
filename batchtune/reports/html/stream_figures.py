"""Charts of a stream's sweep: cost by buffer size, and cost against how well examples mix.

Costs are times, where all rows have one, or batches; `timed` says which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from batchtune.reports.html.cost_scale import CostScale, Other, cost_words, drawn_cost, log_range
from batchtune.reports.html.figure import HUES, Figure, Layout, Point, View, axis, drawable, hover, points, thinned
from batchtune.reports.rows import current_name, format_share
from batchtune.reports.stream_tables import algorithm_name
from batchtune.results import Row, StreamRow, StreamSweep
from batchtune.units import format_number, format_percent, format_size

Place = Callable[[StreamRow | Row], float | None]

_MAP_STYLE = "map-style bucket table"
_MOST_TICKS = 12
_POINTS = {"mode": "markers", "marker": {"size": 7, "opacity": 0.85}}


def stream_figures(stream: StreamSweep) -> list[Figure]:
    """Draw what an epoch costs, against the size of the buffer and against randomness; none without rows."""
    measures = [timed for timed in ((True, False) if stream.has_times else (False,)) if _rows(stream, timed)]
    if not measures:
        return []
    timed = measures[0]
    best = min(_rows(stream, timed), key=lambda row: (drawn_cost(row, timed), row.buffer_size))
    others = [(other.name, other.cost) for other in _others(stream, timed) if drawable(other.cost)]
    costs = [f"{name}: {cost_words(cost, timed)}" for name, cost in [(best.name, drawn_cost(best, timed)), *others]]
    placed = tuple(view for view in (_mates_view(stream, timed), _distance_view(stream, timed)) if view)
    figures = [
        Figure(
            name="stream",
            title="What an epoch of the stream costs, by buffer size",
            caption=f"Lowest is {'; '.join(costs)}. Of each algorithm and buffer the best row is drawn.",
            views=tuple(_buffer_view(stream, timed) for timed in measures),
        ),
        Figure(
            name="stream-randomness",
            title="Speed against how well examples of the stream mix",
            caption="Each point is a way to batch: lower is faster. Mates that meet again less often, and mates that "
            "are stored further apart (100%: as far as any two examples), are more random.",
            views=placed,
        ),
    ]
    return figures if placed else figures[:1]


def _rows(stream: StreamSweep, timed: bool) -> list[StreamRow]:
    return [row for row in stream.rows if drawable(drawn_cost(row, timed), logarithmic=True)]


def _others(stream: StreamSweep, timed: bool, place: Place | None = None) -> list[Other]:
    """Return what the rows are compared with, and where it lies, if that is known."""
    found: list[tuple[str, StreamRow | Row, str, str]] = []
    if stream.map_style is not None:
        found.append((_MAP_STYLE, stream.map_style, "dash", "diamond"))
    if stream.current is not None:
        symbol = "square-x-open" if stream.current_fits is False else "square"
        found.append((current_name(stream), stream.current, "longdash", symbol))
    return [
        Other(name, drawn_cost(row, timed), dash, "--ink", None if place is None else place(row), symbol)
        for name, row, dash, symbol in found
    ]


class _Chart(CostScale):
    """Rows on a scale of costs, each at a place of its own, and what they are compared with."""

    def __init__(
        self, stream: StreamSweep, rows: list[StreamRow], place: Place, others: list[Other], *, timed: bool
    ) -> None:
        super().__init__([drawn_cost(row, timed) for row in rows], others, timed=timed)
        self.stream, self.rows, self.placed = stream, rows, place

    def point(self, row: StreamRow) -> Point:
        return self.placed(row), drawn_cost(row, self.timed) / self.size, _row_text(row, self.timed)

    def drawn(self, x_axis: Layout, places: Sequence[float], **style: Any) -> View:
        """Return the view: each algorithm, the others as points or else as lines, and the recommended row's mark."""
        data = self.levels([other for other in self.others if other.randomness is None], places)
        for number, name in enumerate(dict.fromkeys(map(algorithm_name, self.stream.rows))):
            shown = thinned([row for row in self.rows if algorithm_name(row) == name])
            if shown:
                data.append(points(name, map(self.point, shown), f"--hue-{number % HUES}", **style))
        data += self.marks(self.others)
        row = self.stream.recommended_row
        return self.view(x_axis, data, self.point(row) if row is not None and row in self.rows else None)


def _buffer_view(stream: StreamSweep, timed: bool) -> View:
    best: dict[tuple[int, str], StreamRow] = {}
    known = _rows(stream, timed)
    for row in sorted(known, key=lambda row: drawn_cost(row, timed)):
        best.setdefault((row.buffer_size, row.algorithm), row)
    chosen = stream.recommended_row
    if chosen is not None and chosen in known:  # another may be as good
        best[chosen.buffer_size, chosen.algorithm] = chosen
    rows = [best[key] for key in sorted(best)]
    chart = _Chart(stream, rows, lambda row: float(getattr(row, "buffer_size", 0)), _others(stream, timed), timed=timed)
    sizes = sorted({row.buffer_size for row in rows})
    ticks: Layout = {}
    if len(sizes) <= _MOST_TICKS:
        ticks = {"tickvals": sizes, "ticktext": [format_number(size) for size in sizes]}
    low, high = log_range(sizes)
    x_axis = axis("examples in the buffer of a worker", type="log", range=[low, high], **ticks)
    return chart.drawn(x_axis, np.geomspace(10**low, 10**high, 49).tolist())


def _mates_view(stream: StreamSweep, timed: bool) -> View | None:
    def place(row: StreamRow | Row) -> float | None:
        again = 100 * (row.mates_again or 0.0)
        return again if drawable(again, logarithmic=True) else None

    rows = [row for row in _rows(stream, timed) if place(row) is not None]
    if not rows:
        return None
    chart = _Chart(stream, rows, place, _others(stream, timed, place), timed=timed)
    low, high = log_range([place(row) or 0.0 for row in rows] + [other.randomness or 1.0 for other in chart.others])
    x_axis = axis("batch mates that meet again (%)", type="log", range=[low, high])
    view = chart.drawn(x_axis, np.geomspace(10**low, 10**high, 49).tolist(), **_POINTS)
    return replace(view, label="meet again")


def _distance_view(stream: StreamSweep, timed: bool) -> View | None:
    def place(row: StreamRow | Row) -> float | None:
        return 100 * row.mixing if isinstance(row, StreamRow) and drawable(row.mixing) else None

    rows = [row for row in _rows(stream, timed) if place(row) is not None]
    if not rows:
        return None
    chart = _Chart(stream, rows, place, _others(stream, timed, place), timed=timed)
    places = [place(row) or 0.0 for row in rows] + [other.randomness for other in chart.others if other.randomness]
    room = 0.05 * max(max(places) - min(places), 1.0)
    low, high = min(places) - room, max(places) + room
    x_axis = axis("distance between batch mates, of that between any two examples (%)", range=[low, high])
    return replace(chart.drawn(x_axis, np.linspace(low, high, 49).tolist(), **_POINTS), label="distance")


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
