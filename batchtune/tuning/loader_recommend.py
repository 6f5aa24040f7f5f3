"""The setting of a loader to recommend, and the sentences that say why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from batchtune.loaders import kind_of
from batchtune.results import BUSY_IDLE, LoaderRow, LoaderTuning
from batchtune.units import counted, format_number, format_percent, format_seconds, format_size

# Rates that differ by less are equal, unless the trials differ by more.
_EQUAL = 0.02
# Idle shares that differ by less are equal.
_EQUAL_IDLE = 0.02
# Processors kept busy beyond which the machine, not the number of workers, limits the rate.
_BUSY = 0.9
# Other programs that take a larger share of the processors disturb the measurement.
_OTHERS = 0.15


def ranked(rows: Sequence[LoaderRow]) -> list[LoaderRow]:
    """Return rows that work, the best first; `rows` are in the order of their settings, the cheapest first.

    Where step times are known: those with which the step waits no longer than it must, by their number of workers;
    then the others, the shortest waits first. Otherwise those that deliver as many examples a second as the fastest, by
    their number of workers, then the others by their rate. Equal rows keep their order.
    """
    if not rows:
        return []
    idle = [row.idle for row in rows if row.idle is not None]
    if len(idle) == len(rows):
        enough = max(BUSY_IDLE, min(idle) + _EQUAL_IDLE)
        return sorted(rows, key=lambda row: (0, row.workers) if (row.idle or 0) <= enough else (1, row.idle or 0))
    fastest = max(rows, key=_rate)
    equal = max(_EQUAL, min(0.1, fastest.examples_per_second_spread or 0.0))
    enough = (1 - equal) * _rate(fastest)
    return sorted(rows, key=lambda row: (0, row.workers) if _rate(row) >= enough else (1, -_rate(row)))


def _rate(row: LoaderRow) -> float:
    return row.examples_per_second or row.batches_per_second or 0.0


def reason_for(tuning: LoaderTuning) -> str:
    """Say in a sentence or two why the recommended row is the best, or why none is."""
    working = [row for row in tuning.rows if row.outcome == "ok"]
    failed = len(tuning.rows) - len(working)
    begun = f"Interrupted after {counted(len(tuning.rows), 'setting')}. " if tuning.interrupted else ""
    row = tuning.recommended_row
    if row is None:
        which = "no setting was measured" if not tuning.rows else f"all {counted(failed, 'setting')} failed"
        return f"{begun}Nothing is recommended: {which}."
    rate = f"{format_number(_rate(row))} {row.rate_unit}"
    if tuning.demand is None:
        if len(working) == 1:
            return f"{begun}{row.name} delivers {rate}; nothing else was compared."
        return f"{begun}{row.name} needs the fewest workers of those that are as fast as the fastest: {rate}."
    idle = row.idle or 0.0
    step = format_seconds(tuning.demand.step_seconds)
    if idle <= BUSY_IDLE:
        fewer = "" if not row.workers else " Fewer workers don't."
        return f"{begun}With {row.name} a step of {step} waits for {format_percent(idle)} of the time.{fewer}"
    if tuning.keeps_up:
        receiving = "" if tuning.queue is None else f": {format_seconds(tuning.queue.receive_seconds)} for each batch"
        return (
            f"{begun}{row.name} delivers {rate}, more than the step takes; it waits for {format_percent(idle)} of the "
            f"time all the same, mostly while the training process receives batches from its workers{receiving}."
        )
    return (
        f"{begun}The loader is the bottleneck: with {row.name}, the best setting, a step of {step} waits for "
        f"{format_percent(idle)} of the time."
    )


def warnings_for(tuning: LoaderTuning, processors: int) -> Iterator[str]:
    """Yield what the user should know of the rows."""
    row = tuning.recommended_row
    most = max((one.workers for one in tuning.rows), default=0)
    kind = kind_of(tuning.kind)
    if most > processors and kind.MORE_WORKERS and kind.WORKERS in tuning.settings.get("sweep", {}):
        yield (
            f"Up to {most} workers shared {counted(processors, 'processor')}: more workers than processors help only "
            "if they wait for disks or networks."
        )
    if row is None:
        return
    others = row.other_processors or 0.0
    machine = processors * tuning.measured_with.ranks_per_node
    if others > _OTHERS * machine:
        yield (
            f"Other programs kept {others:.1f} of {counted(machine, 'processor')} busy: rates are too low, and waits "
            "too long. Measure on an idle machine."
        )
    if row.growth_bytes_per_batch:
        epoch = tuning.epoch_batches
        whole = f", {format_size(int(row.growth_bytes_per_batch * epoch))} in an epoch" if epoch else ""
        yield (
            f"Memory grows by {format_size(int(row.growth_bytes_per_batch))} with each batch{whole}: a leak, or a "
            "cache, or the data set's Python objects, whose reference counts each worker writes to (keep them in numpy "
            "arrays or tensors)."
        )
    idle = row.idle
    if tuning.keeps_up and idle is not None and idle > BUSY_IDLE:
        yield (
            "Receiving a batch takes the training process some milliseconds, however many workers there are. On a GPU, "
            "pin_memory=true does it in a thread of its own, and steps that are not waited for hide it."
        )
    elif idle is not None and idle > BUSY_IDLE and others <= _OTHERS * machine:
        yield from _how_to_go_on(tuning, row, processors)
    predicted, measured = row.gpu_idle, row.gpu_idle_measured
    if predicted is not None and measured is not None and abs(predicted - measured) > max(0.05, 0.25 * measured):
        why = "step times or the machine's load vary, or the loader holds batches back"
        if (row.processors or 0.0) >= _BUSY * processors:
            why = "the loader keeps all processors busy, so the training process waits for one too"
        yield (
            f"The step waited for {format_percent(measured)} of the time, where the queue of workers predicts "
            f"{format_percent(predicted)}: {why}."
        )


def _how_to_go_on(tuning: LoaderTuning, row: LoaderRow, processors: int) -> Iterator[str]:
    slowest = max(tuning.stages, key=lambda stage: stage.share, default=None)
    stage = "" if slowest is None else f" {slowest.name} takes {format_percent(slowest.share)} of a batch's time."
    busy, kind = (row.processors or 0.0) + (row.other_processors or 0.0), kind_of(tuning.kind)
    if busy >= _BUSY * processors:
        yield (
            f"All {counted(processors, 'processor')} are busy: more workers don't help.{stage} Make each example "
            "cheaper (decode less, prepare data before training), or train on a machine with more processors."
        )
    elif kind.MORE_WORKERS and row.workers and row.workers >= max(one.workers for one in tuning.rows):
        yield (
            f"The processors are not all busy ({busy:.1f} of {processors}): try more workers, for example --sweep "
            f"{kind.WORKERS}={row.workers},{2 * row.workers}.{stage}"
        )
    elif stage:
        yield stage.strip()
