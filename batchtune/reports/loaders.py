"""What a report says of a data loader: what to set, whether the step waits for it, what is slow, what failed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from batchtune.reports.comparisons import batches_words, speed
from batchtune.reports.run import RunResults
from batchtune.reports.table import UNKNOWN, clean
from batchtune.results import (
    BUSY_IDLE,
    LOADER_CONFIG_FILE,
    LoaderRow,
    LoaderStage,
    LoaderTuning,
    argument_text,
)
from batchtune.units import (
    counted,
    format_number,
    format_percent,
    format_seconds,
    format_size,
    with_full_stop,
)

# A sentence quotes no more of an error, or of a name.
_QUOTED = 120
_SILENT = {
    **{"in_order": True, "pin_memory": False, "persistent_workers": False},
    **{"prefetch_factor": None, "multiprocessing_context": None},
}
_OUTCOMES = {
    "error": "an error",
    "timeout": "no batch within the time limit",
    "crash": "a process died",
    "oom": "out of memory",
    "shared_memory": "/dev/shm is too small",
    "empty": "no batch",
}


def loader_headline(loader: LoaderTuning) -> str:
    """Say what to set, and whether it keeps the step busy, or that the loader is the bottleneck and why."""
    row = loader.recommended_row
    if row is None:
        return f"Loader: {with_full_stop(loader.reason) or 'no setting is recommended.'}"
    rate, idle, name = f"{format_number(_speed(row))} {row.rate_unit}", row.idle, setting_name(loader, row)
    if idle is None:
        set_it = f"Set {name} for the loader: {rate}" if row.arguments else f"The loader as it is makes {rate}"
        return f"{set_it}{_against(loader, row)}."
    waits = format_percent(idle)
    if idle <= BUSY_IDLE:
        needs = "" if loader.demanded is None else f"; the step takes {format_number(loader.demanded)}"
        which = name if row.arguments else "The loader as it is"
        return f"{which} keeps the step busy: it waits for data {waits} of the time. The loader makes {rate}{needs}."
    if loader.keeps_up:
        return (
            f"{name} keeps up: it makes {rate}, and the step takes {format_number(loader.demanded or 0.0)}. The step "
            f"waits {waits} of the time all the same, mostly to receive batches from the workers."
        )
    slow = "" if (stage := slowest(loader)) is None else f"; {_stage(stage)}"
    best = f"with the best setting, {name}" if len(loader.rows) > 1 else f"with {name}" if row.arguments else "as it is"
    return f"The loader is the bottleneck: {best}, the step waits for data {waits} of the time{slow}."


def loader_sentences(loader: LoaderTuning) -> Iterator[str]:
    """Say what speaks for the recommended row, most important first; the headline comes before."""
    row = loader.recommended_row
    if row is None:
        return
    yield from brief_loader_sentences(loader)
    if loader.reason and not loader.reason.startswith("The loader is the bottleneck"):  # the headline says so
        yield f"Why: {with_full_stop(loader.reason)}"
    needs = []
    if row.processors is not None:
        needs.append(f"{row.processors:.1f} processors")
    if row.memory_bytes is not None:
        shared = "" if not row.shared_bytes else f" ({format_size(row.shared_bytes)} of it shared)"
        needs.append(f"{format_size(row.memory_bytes)} of memory{shared}")
    if needs:
        first = row.first_batch_seconds
        comes = "" if first is None else f"; the first batch comes after {format_seconds(first)}"
        yield f"It keeps {' and '.join(needs)} in use{comes}."
    if loader.demand is not None:
        yield f"The step: {demand_words(loader)}."
    if row.gpu_idle is not None and row.gpu_idle_measured is not None:
        yield (
            f"Beside a step that takes as long, it was measured to wait {format_percent(row.gpu_idle_measured)} of the "
            f"time; the queue of workers gives {format_percent(row.gpu_idle)}."
        )
    queue = loader.queue
    if queue is not None:
        receives = ""
        if queue.receive_seconds >= 1e-6:
            receives = (
                f"; the training process spends {format_seconds(queue.receive_seconds)} on one that a worker made"
            )
        yield (
            f"One process makes a batch in {format_seconds(queue.batch_seconds)}, {format_percent(queue.busy)} of it "
            f"computing{receives}. With these figures the queue gives the measured rates to within "
            f"{format_percent(queue.relative_error)}."
        )
    if row.examples_per_second_spread is not None and row.trials > 1:
        yield (
            f"Its rate is the median of {row.trials} trials, which differ by "
            f"{format_percent(row.examples_per_second_spread)}."
        )


def brief_loader_sentences(loader: LoaderTuning) -> Iterator[str]:
    """Say what an epoch takes, the slow stage, and whether batches are reproducible."""
    row = loader.recommended_row
    if row is None:
        return
    if row.estimated_epoch_seconds is not None:
        what = "with the step" if loader.demand is not None else "of the loader alone"
        yield f"An epoch {what} is estimated at {format_seconds(row.estimated_epoch_seconds)}."
    stage = slowest(loader)
    if stage is not None and (row.idle is None or row.idle <= BUSY_IDLE):  # else the headline says so
        yield f"The slowest stage: {_stage(stage)}."
    if loader.reproducible and loader.reproduced is not None:
        same = batches_words(loader.reproduced.batches)
        yield f"Reproducible: two epochs from one seed gave the same {same}, bit for bit."


def varied_arguments(loader: LoaderTuning) -> list[str]:
    """Return the names of the arguments that rows differ in, in their order."""
    names = list(dict.fromkeys(name for row in loader.rows for name in row.arguments))
    values = {name: {argument_of(row, name) for row in loader.rows} for name in names}
    varied = [name for name in names if len(values[name] - {UNKNOWN}) > 1]
    # A row without workers has no prefetch_factor: that tells it apart only where nothing else does.
    told_apart = {tuple(argument_of(row, name) for name in varied) for row in loader.rows}
    if len(told_apart) == len(loader.rows):
        return varied
    return [name for name in names if len(values[name]) > 1]


def argument_of(row: LoaderRow, name: str) -> str:
    """Return the value of a row's argument, as the command line writes it; a dash where it has none."""
    return argument_text(row.arguments[name]) if name in row.arguments else UNKNOWN


def setting_name(loader: LoaderTuning, row: LoaderRow) -> str:
    """Return which row it is, by the arguments that rows differ in, short enough for a sentence.

    A DataLoader's defaults go without saying.
    """
    varied, silent = varied_arguments(loader), _SILENT if loader.kind == "torch" else {}
    differ = {
        name: value for name, value in row.arguments.items() if name in varied and silent.get(name, ...) is not value
    }
    return shown((replace(row, arguments=differ) if differ else row).name)


def shown(text: str) -> str:
    """Return the first line of a text from a file, short enough for a sentence."""
    line = clean((text.strip().splitlines() or [""])[0])
    return line if len(line) <= _QUOTED else f"{line[: _QUOTED - 1]}…"


def slowest(loader: LoaderTuning) -> LoaderStage | None:
    """Return the stage that takes the most of making a batch; None where stages were not measured."""
    return max(loader.stages, key=lambda stage: stage.share, default=None)


def without_workers(loader: LoaderTuning) -> LoaderRow | None:
    """Return the fastest row in which the training process makes the batches itself; None where none was measured."""
    return max(_delivered(row for row in loader.rows if not row.workers), key=_speed, default=None)


def fastest(loader: LoaderTuning) -> LoaderRow | None:
    """Return the row with the most examples per second; None where all failed."""
    return max(_delivered(loader.rows), key=_speed, default=None)


def failed_settings(loader: LoaderTuning) -> list[LoaderRow]:
    """Return the rows that failed."""
    return [row for row in loader.rows if row.outcome != "ok"]


def outcome_words(row: LoaderRow) -> str:
    """Say how a row's measurement ended."""
    return _OUTCOMES.get(row.outcome, row.outcome)


def demand_words(loader: LoaderTuning) -> str:
    """Say how long the step takes, and where that is from; a phrase."""
    demand = loader.demand
    assert demand is not None
    source = "by --step-ms"
    if demand.source == "probe":
        source = f"by the probe{f' on {demand.device_name}' if demand.device_name else ''}"
    takes = "" if loader.demanded is None else f", which is {format_number(loader.demanded)} examples/s"
    return f"{format_seconds(demand.step_seconds)} for a batch on average, {source}{takes}"


def loader_facts(loader: LoaderTuning) -> Iterator[tuple[str, str]]:
    """Name and value of what was measured, and how."""
    yield "Loader", f"{loader.target.words} ({loader.kind})"
    batch = "" if loader.batch is None else f"{loader.batch}; "
    yield "Batches", f"{batch}delivered to {loader.device_name}"
    if loader.epoch_batches is not None:
        examples = "" if loader.epoch_examples is None else f", {counted(loader.epoch_examples, 'example')}"
        yield "Epoch", f"{format_number(loader.epoch_batches)} batches{examples}"
    if loader.demand is not None:
        yield "Step", demand_words(loader)
    having = loader.measured_with
    ranks = f", shared by {having.ranks_per_node} ranks" if having.ranks_per_node > 1 else ""
    if "processors" in loader.settings:
        yield "Processors", f"{having.processors}{ranks}"


def loader_warnings(loader: LoaderTuning, *, brief: bool = False) -> Iterator[str]:
    """Yield what differs between two epochs, the settings that failed, and the tuning's own warnings.

    In the full report a table holds the settings that failed.
    """
    reproduced = loader.reproduced
    if reproduced is not None and reproduced.first_difference is not None:
        how = f": {shown(reproduced.what)}" if reproduced.what else ""
        yield with_full_stop(
            f"Not reproducible: two epochs from one seed differ from batch {reproduced.first_difference} on{how}"
        )
    failed = failed_settings(loader)
    if failed:
        first = failed[0]
        why = shown(first.error) if first.error else outcome_words(first)
        one, of = f"{setting_name(loader, first)}: {with_full_stop(why)}", counted(len(loader.rows), "setting")
        more = " --full shows all." if brief and len(failed) > 1 else ""
        yield f"{len(failed)} of {of} of the loader failed, such as {one}{more}"
    yield from map(with_full_stop, loader.warnings)


def loader_steps(results: RunResults) -> Iterator[tuple[str, str]]:
    """Pair each command, or file, with what it is for, in the order to take them."""
    loader, run = results.loader, results.as_option
    if loader is None:
        return
    row = loader.recommended_row
    again = f"batchtune tune-loader TARGET{run}"
    if row is None:
        yield again, "measure again"
        return
    yield str(results.folder / LOADER_CONFIG_FILE), "the arguments, for the loader"
    if loader.demand is None:
        yield f"{again} --step-ms MS", "hold it against the step"
    elif row.idle is not None and row.idle > BUSY_IDLE and not loader.stages:
        yield f"{again} --stages", "find the slow stage"


def _against(loader: LoaderTuning, row: LoaderRow) -> str:
    """Say how fast a row is next to the training process alone: `, 3.1 times faster than num_workers=0`."""
    alone = without_workers(loader)
    if alone is None or alone is row or not alone.examples_per_second or not row.examples_per_second:
        return ""
    return f", {speed(1 / row.examples_per_second, 1 / alone.examples_per_second)} {setting_name(loader, alone)}"


def _stage(stage: LoaderStage) -> str:
    return f"{shown(stage.name)} takes {format_percent(stage.share)} of the time to make a batch"


def _speed(row: LoaderRow) -> float:
    return row.examples_per_second or row.batches_per_second or 0.0


def _delivered(rows: Iterable[LoaderRow]) -> Iterator[LoaderRow]:
    return (row for row in rows if row.outcome == "ok")
