"""The section on a data loader: what to set, whether the step waits for it, what failed."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from batchtune.loaders import kind_of
from batchtune.reports import NextStep, RunResults
from batchtune.reports.section import (
    Cells,
    Section,
    Table,
    failures_table,
    known,
    make_table,
    settings_table,
)
from batchtune.results import LOADER_CONFIG_FILE, LoaderRow, LoaderTuning
from batchtune.units import (
    counted,
    format_number,
    format_percent,
    format_seconds,
    format_size,
    with_full_stop,
)

_OUTCOMES = {
    "error": "an error",
    "timeout": "no batch within the time limit",
    "crash": "a process died",
    "oom": "out of memory",
    "shared_memory": "/dev/shm is too small",
    "empty": "no batch",
    "repeats": "workers repeat each other",
}


def loader_section(run: RunResults) -> Section:
    """Return what to report on `loader.json`."""
    loader = run.loader
    assert loader is not None
    row = loader.recommended_row
    tables = []
    if row is not None:
        tables.append(_comparison(loader, row))
    if loader.working_rows:
        tables.append(_rows_table(loader))
    tables += failures_table(
        "Settings that failed",
        (
            (
                setting_name(loader, row),
                _OUTCOMES.get(row.outcome, row.outcome),
                row.error,
            )
            for row in _failed(loader)
        ),
        of="setting",
        file="loader.json",
        most=20,
    )
    tables.append(
        settings_table(
            "Settings of the tuning", {"kind": loader.kind, **loader.settings}
        )
    )
    return Section(
        title="Loader",
        sentences=[_headline(loader), *_support(loader)],
        brief=3,
        tables=tables,
        warnings=list(_warnings(loader)),
        next_steps=list(_next_steps(run, loader)),
    )


def _headline(loader: LoaderTuning) -> str:
    """Say what to set, how fast that is, and how long the step waits."""
    row = loader.recommended_row
    if row is None:
        return with_full_stop(loader.reason) or "Nothing is recommended for the loader."
    name = setting_name(loader, row)
    waits = ""
    if row.gpu_idle is not None:
        waits = f"the step waits for data {format_percent(row.gpu_idle)} of the time"
    if loader.is_bottleneck:
        return f"The loader is the bottleneck: with the best setting, {name}, {waits}."
    rate = ", and ".join(part for part in (row.rate_words, waits) if part)
    if len(loader.rows) == 1:
        return f"Measured {name}: {rate}."
    return f"Set {name} for the loader: {rate}."


def _support(loader: LoaderTuning) -> Iterator[str]:
    """Say how sure the recommendation is, what the step needs, and what was measured."""
    row = loader.recommended_row
    if row is not None and len(loader.rows) == 1:
        yield "Only this setting was measured, so it is not known to be the best."
    if row is not None and row.estimated_epoch_seconds is not None:
        what = "of the loader alone"
        if loader.demand is not None:
            what = "with the step"
        yield f"An epoch {what} is estimated at {format_seconds(row.estimated_epoch_seconds)}."
    demand = loader.demand
    if demand is not None:
        source = (
            "by --step-ms"
            if demand.source == "step-ms"
            else f"by the probe on {demand.device_name}"
        )
        takes = f"The step takes {format_seconds(demand.step_seconds)} for a batch on average, {source}"
        rate = known(
            loader.demanded,
            lambda demanded: f", which is {format_number(demanded)} examples/s",
        )
        yield f"{takes}{rate or ''}."
    if row is not None and loader.reason:
        yield f"Why: {with_full_stop(loader.reason)}"
    if loader.reproducible and loader.reproduced is not None:
        same = format_number(loader.reproduced.batches)
        yield f"Reproducible: two epochs from one seed gave the same {same} batches, bit for bit."
    if (
        row is not None
        and row.examples_per_second_spread is not None
        and row.trials > 1
    ):
        differ = format_percent(row.examples_per_second_spread)
        yield f"Its rate is the median of {row.trials} trials, which differ by {differ}."
    epoch = known(
        loader.epoch_batches, lambda batches: f", {format_number(batches)} in an epoch"
    )
    yield f"Measured: {loader.target.words} ({loader.kind}), batches of {loader.batch or 'unknown shape'}{epoch or ''}."


def setting_name(loader: LoaderTuning, row: LoaderRow) -> str:
    """Return which row it is, by the arguments that rows differ in."""
    arguments = dict(row.arguments)
    for name, value in row.arguments.items():
        if all(other.arguments.get(name, value) == value for other in loader.rows):
            del arguments[name]
    return replace(row, arguments=arguments or row.arguments).name


def _comparison(loader: LoaderTuning, chosen: LoaderRow) -> Table:
    """Compare the recommended row with the fastest one, and with the training process making its own batches."""
    working = loader.working_rows
    fastest = max(working, key=lambda row: row.rate)
    workers = kind_of(loader.kind).WORKERS_ARE
    alone = max(
        (row for row in working if not row.workers),
        key=lambda row: row.rate,
        default=None,
    )
    compared = {"recommended" if len(loader.rows) > 1 else "measured": chosen}
    if fastest is not chosen:
        compared["fastest"] = fastest
    if alone is not None and alone is not chosen and alone is not fastest:
        compared[f"without {workers}"] = alone
    rows = [
        {"": name, workers: str(row.workers), **row_cells(row)}
        for name, row in compared.items()
    ]
    return make_table(
        "The loader's rate",
        rows,
        left=[""],
        marked=0,
        brief=True,
    )


def _rows_table(loader: LoaderTuning) -> Table:
    working = loader.working_rows
    rows = [{"setting": setting_name(loader, row), **row_cells(row)} for row in working]
    marked = None
    if loader.recommended_row is not None:
        marked = working.index(loader.recommended_row)
    return make_table(
        "Settings of the loader",
        rows,
        left=["setting"],
        marked=marked,
        file="loader.json",
    )


def row_cells(row: LoaderRow) -> Cells:
    """Return what tables and charts show of a row, by the titles of the columns."""
    equal = {True: "yes", False: "no", None: None}
    return {
        "examples/s": known(row.examples_per_second, format_number),
        "step waits": known(row.gpu_idle, format_percent),
        "wait p99": known(row.wait_p99_seconds, format_seconds),
        "first batch": known(row.first_batch_seconds, format_seconds),
        "memory": known(row.memory_bytes, format_size),
        "equal to best": equal[row.equal_to_best],
    }


def _failed(loader: LoaderTuning) -> list[LoaderRow]:
    return [row for row in loader.rows if row.outcome != "ok"]


def _warnings(loader: LoaderTuning) -> Iterator[str]:
    """Yield what differs between two epochs, the settings that failed, and the tuning's own warnings."""
    reproduced = loader.reproduced
    if loader.interrupted:
        measured = counted(len(loader.rows), "setting")
        yield f"The tuning was interrupted after {measured}: another may be better. Run the same command again."
    if reproduced is not None and reproduced.first_difference is not None:
        yield with_full_stop(
            f"Not reproducible: two epochs from one seed differ from batch {reproduced.first_difference} on: "
            f"{reproduced.what or 'how is not known'}"
        )
    # Of repetition the tuning warns itself.
    failed = [row for row in _failed(loader) if row.outcome != "repeats"]
    if failed:
        why = (
            (failed[0].error or _OUTCOMES[failed[0].outcome]).strip().partition("\n")[0]
        )
        yield (
            f"{len(failed)} of {counted(len(loader.rows), 'setting')} of the loader failed; "
            f"{setting_name(loader, failed[0])}: {with_full_stop(why)}"
        )
    yield from map(with_full_stop, loader.warnings)


def _next_steps(run: RunResults, loader: LoaderTuning) -> Iterator[NextStep]:
    row = loader.recommended_row
    again = f"batchtune tune-loader TARGET{run.as_option}"
    if row is None:
        yield again, "measure again, with the error fixed"
        return
    if loader.interrupted:
        yield again, "measure the settings that are missing, too"
        return
    yield str(run.folder / LOADER_CONFIG_FILE), "the arguments, for the loader"
    if loader.demand is None:
        yield f"{again} --step-ms MS", "hold it against the step"
