"""The tables of a stream's report: the ways to batch it, compared, and how large batches may be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from batchtune.reports.rows import CURRENT, DOES_NOT_FIT, current_name, current_words, format_share
from batchtune.reports.table import Table, format_times, known, limits, make_table, shown_of, spread
from batchtune.results import Row, StreamRow, StreamSweep, cost_of
from batchtune.units import format_number, format_percent, format_seconds, format_size

_MARK = "*"
_MAX_ROWS = 500
_MAX_LIMITS = 24


def algorithm_name(row: StreamRow | Row) -> str:
    """Return what tables and charts call the algorithm of a row."""
    if isinstance(row, Row):
        return "map-style"
    return "SpeechBrain" if row.by_speechbrain else row.algorithm


def best_of_each(stream: StreamSweep) -> list[StreamRow]:
    """Return the best row of each algorithm, in the file's order, with no larger a buffer than the recommended row's.

    Batches that are proven to fit go first; SpeechBrain's is the one that the sweep recommends.
    """
    chosen, timed = stream.recommended_row, stream.has_times
    best = []
    for algorithm in dict.fromkeys(row.algorithm for row in stream.rows):
        rows = [row for row in stream.rows if row.algorithm == algorithm]
        if chosen is not None:
            rows = [row for row in rows if row.buffer_size <= chosen.buffer_size] or rows
        best.append(min(rows, key=lambda row: (bool(row.unproven), cost_of(row, timed=timed) or 0.0)))
    named = {row.algorithm: row for row in (stream.speechbrain_row, chosen) if row is not None}
    return [named.get(row.algorithm, row) for row in best]


def stream_comparison_table(stream: StreamSweep, chosen: StreamRow, title: str) -> Table:
    """Lay the recommended row next to the user's settings, the best of each other algorithm, and random access."""
    timed = stream.has_times
    lines: list[tuple[str, StreamRow | Row]] = [(f"recommended ({algorithm_name(chosen)})", chosen)]
    if stream.current is not None:
        lines.append((f"{CURRENT} ({DOES_NOT_FIT})" if stream.current_fits is False else CURRENT, stream.current))
    lines += [(f"{algorithm_name(row)}, best", row) for row in best_of_each(stream) if row is not chosen]
    if stream.map_style is not None:
        lines.append(("map-style bucket table", stream.map_style))
    rows = [
        {
            "": name,
            "buffer": None if isinstance(row, Row) else format_number(row.buffer_size),
            **_costs(stream, row),
            "meet again": None if timed else known(row.mates_again, format_share),
            "relative": format_times(cost_of(row, timed=timed), cost_of(chosen, timed=timed)),
        }
        for name, row in lines
    ]
    notes = [f"Your current config is {words}." for words in current_words(stream)]
    return make_table(title, rows, notes, marked=0)


def stream_tables(stream: StreamSweep) -> Iterator[Table]:
    """Lay out all rows, and the recommended row's batch sizes."""
    if not stream.rows:
        return
    algorithms = [row.algorithm for row in stream.rows]
    grouped = sorted(range(len(algorithms)), key=lambda index: algorithms.index(algorithms[index]))
    shown = spread(grouped, _MAX_ROWS, [] if stream.recommended is None else [grouped.index(stream.recommended)])
    lines: list[tuple[str, StreamRow | Row]] = [(algorithm_name(row), row) for row in (stream.rows[i] for i in shown)]
    if stream.current is not None:
        lines.append((current_name(stream), stream.current))
    if stream.map_style is not None:
        lines.append((algorithm_name(stream.map_style), stream.map_style))
    rows = [_cells(stream, name, row) for name, row in lines]
    notes = [*shown_of(len(shown), len(stream.rows), " rows", "stream.json"), *_notes(stream)]
    marked = None if stream.recommended is None else shown.index(stream.recommended)
    yield make_table("Ways to batch the stream", rows, notes, marked, len(shown))
    row, unit = stream.recommended_row, stream.lengths.unit
    if row is not None and row.boundaries:
        sizes, count = limits(row, unit, _MAX_LIMITS)
        title = f"Largest batch size in the stream, by longest example ({row.name})"
        yield make_table(title, sizes, shown_of(len(sizes), count, " lengths", "stream.yaml"))


def _cells(stream: StreamSweep, name: str, row: StreamRow | Row) -> dict[str, str | None]:
    def cell(field: str, words: Callable[[Any], str]) -> str | None:
        return known(getattr(row, field, None), words)  # the map-style table has not all of them

    most = cell("max_batch_numel", lambda numel: f" of {format_number(numel)}") or ""
    mark = _MARK if row.unproven and isinstance(row, StreamRow) else ""
    return {
        "algorithm": name,
        "target": cell("target_batch_numel", lambda numel: f"{format_number(numel)}{most}"),
        "max pad": cell("max_padding_ratio", format_percent),
        "max size": cell("max_batch_size", format_number),
        "buckets": known(len(row.boundaries) if isinstance(row, Row) else row.num_buckets, format_number),
        "buffer": cell("buffer_size", lambda size: f"{format_number(size)}{mark}"),
        **_costs(stream, row),
        "mean batch": f"{row.mean_batch_size:.1f}",
        "meet again": known(row.mates_again, format_share),
        "under half": cell("under_half", format_share),
        "mixing": cell("mixing", format_percent),
        "memory": cell("buffer_bytes", format_size),
        "waits": cell("wait_median", format_number),
    }


def _costs(stream: StreamSweep, row: StreamRow | Row) -> dict[str, str | None]:
    """Return the cells that say what an epoch costs."""
    return {
        "batches": format_number(row.batches),
        "padding": format_percent(row.padding_ratio),
        "estimated epoch": known(row.estimated_epoch_seconds, format_seconds) if stream.has_times else None,
    }


def _notes(stream: StreamSweep) -> Iterator[str]:
    if stream.recommended is not None:
        yield "▶ marks the recommended row."
    if any(row.unproven for row in (*stream.rows, stream.current) if row is not None):
        yield f"{_MARK} marks rows with batches that are not proven to fit."
    if any(row.target_batch_numel is not None for row in stream.rows):
        unit = stream.lengths.unit
        counts = "in the unit of the lengths" if unit is None else f"in {unit}"
        yield f"“Target” is target_batch_numel of max_batch_numel, {counts}."
    yield (
        "“Mixing” is how far apart batch mates are stored, as a share of the distance between any two examples; “meet "
        "again” the share of batch mates that are mates again in the next epoch; “under half” the share of batches "
        "that hold less than half of what they could; “waits” how many examples a worker reads until one's batch is "
        "made (median); “memory” that of a worker's full buffer."
    )
