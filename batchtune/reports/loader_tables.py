"""The tables of a loader's report: its settings compared, those that failed, the stages of making a batch."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from batchtune.reports.loaders import (
    argument_of,
    failed_settings,
    fastest,
    outcome_words,
    setting_name,
    varied_arguments,
    without_workers,
)
from batchtune.reports.table import UNKNOWN, Table, known, make_table, shown_of, spread
from batchtune.results import LoaderRow, LoaderTuning, argument_text
from batchtune.units import format_number, format_percent, format_seconds, format_size

_MARK = "*"
_MAX_ROWS = 500
_MAX_FAILED = 20
# What tables call arguments whose own name is too wide for a column.
_SHORT = {"multiprocessing_context": "context"}


def loader_tables(loader: LoaderTuning) -> Iterator[Table]:
    """Lay out all rows, those that failed with their messages, and the stages."""
    if loader.rows:
        yield _rows_table(loader)
    yield from _failed_table(loader)
    if loader.stages:
        stages = [
            {
                "stage": stage.name,
                "time per example": format_seconds(stage.seconds_per_example),
                "share": format_percent(stage.share),
            }
            for stage in loader.stages
        ]
        shares = [stage.share for stage in loader.stages]
        notes = ["Each measured alone, in one process, without the stages before."]
        yield make_table("Stages of making a batch", stages, notes, marked=shares.index(max(shares)))


def loader_comparison_table(loader: LoaderTuning, chosen: LoaderRow, title: str) -> Table:
    """Lay the recommended row next to the fastest one, and the training process that makes its batches itself."""
    lines = {"recommended": chosen, "fastest": fastest(loader), "without workers": without_workers(loader)}
    rows, seen = [], set[int]()
    for name, row in lines.items():
        if row is None or id(row) in seen:
            continue
        seen.add(id(row))
        figures = _figures(row)
        rows.append(
            {
                "": name,
                "workers": format_number(row.workers),
                "examples/s": figures["examples/s"],
                "step waits": known(row.idle, format_percent),
                **{title: figures[title] for title in ("wait p99", "first batch", "memory")},
            }
        )
    return make_table(title, rows, marked=0)


def _rows_table(loader: LoaderTuning) -> Table:
    shown = spread(range(len(loader.rows)), _MAX_ROWS, [loader.recommended])
    varied, rows = varied_arguments(loader), []
    for index in shown:
        row = loader.rows[index]
        figures = {**_figures(row), **_more(loader, row)}
        arguments = _titled({name: argument_of(row, name) for name in varied}, taken=figures)
        rows.append({**(arguments or {"settings": row.name}), **figures})
    marked = None if loader.recommended is None else shown.index(loader.recommended)
    notes = [*shown_of(len(shown), len(loader.rows), " settings", "loader.json"), *_notes(loader, varied)]
    return make_table("Settings of the loader", rows, notes, marked)


def _failed_table(loader: LoaderTuning) -> Iterator[Table]:
    failed = failed_settings(loader)
    rows = [
        {"settings": setting_name(loader, row), "outcome": outcome_words(row), "message": row.error or UNKNOWN}
        for row in failed[:_MAX_FAILED]
    ]
    if rows:
        yield make_table("Settings that failed", rows, shown_of(len(rows), len(failed), "", "loader.json"))


def _titled(values: dict[str, str], taken: Collection[str]) -> dict[str, str]:
    """Return arguments by the titles of their columns, which narrow terminals set in lines."""
    titled: dict[str, str] = {}
    for name, value in values.items():
        title = _SHORT.get(name, name).replace("_", " ")
        titled[f"{name}=" if title in (*taken, *titled) or not title else title] = value
    return titled


def _figures(row: LoaderRow) -> dict[str, str | None]:
    """Return the cells that decide between rows."""
    mark = _MARK if row.gpu_idle_measured is not None else ""
    return {
        "examples/s": known(row.examples_per_second, format_number),
        "step waits": known(row.idle, lambda idle: f"{format_percent(idle)}{mark}"),
        "wait p50": known(row.wait_p50_seconds, format_seconds),
        "wait p99": known(row.wait_p99_seconds, format_seconds),
        "first batch": known(row.first_batch_seconds, format_seconds),
        "processors": known(row.processors, lambda count: f"{count:.1f}"),
        "memory": known(row.memory_bytes, format_size),
    }


def _more(loader: LoaderTuning, row: LoaderRow) -> dict[str, str | None]:
    grows, failed = (any(test(one) for one in loader.rows) for test in (_grows, _failed))
    return {
        "growth": known(row.growth_bytes_per_batch, format_size) if grows else None,
        "outcome": row.outcome.replace("_", " ") if failed else None,
    }


def _grows(row: LoaderRow) -> bool:
    return bool(row.growth_bytes_per_batch)


def _failed(row: LoaderRow) -> bool:
    return row.outcome != "ok"


def _notes(loader: LoaderTuning, varied: list[str]) -> Iterator[str]:
    if loader.recommended is not None:
        yield "▶ marks the recommended row."
    fixed = {name: value for row in loader.rows for name, value in row.arguments.items() if name not in varied}
    if varied and fixed:
        same = " ".join(f"{name}={argument_text(value)}" for name, value in fixed.items())
        yield f"The same for all that take it: {same}."
    if any(row.idle is not None for row in loader.rows):
        yield "“Step waits” is the share of training that the step waits for batches, by the queue of workers."
    if any(row.gpu_idle_measured is not None for row in loader.rows):
        yield f"{_MARK} marks shares that were measured, beside a step that takes as long."
    if any(row.wait_p50_seconds is not None for row in loader.rows):
        yield (
            "“Wait” is for one batch, of a consumer that takes batches as fast as they come (p50: the median; p99: 99 "
            "in 100 are shorter), the first of each epoch apart."
        )
    if len({row.rounds for row in loader.rows}) > 1:
        yield "Settings that were slow in a first, short round were not measured again."
    if any(map(_grows, loader.rows)):
        yield "“Growth” is by how much memory grew with each batch."
