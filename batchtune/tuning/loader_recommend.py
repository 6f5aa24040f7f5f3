"""The setting of a loader to recommend, and the sentences that say why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from batchtune.loaders import kind_of
from batchtune.results import BUSY_IDLE, LoaderRow, LoaderTuning
from batchtune.units import counted, format_number, format_percent, format_seconds, format_size

# Rates that differ by less are equal, unless the trials differ by more; beyond the second number they never are.
_EQUAL = 0.02
_EQUAL_AT_MOST = 0.1
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
    equal = [row for row, same in zip(rows, equal_to_best(rows), strict=True) if same]
    others = [row for row in rows if row not in equal]
    by_idle = _have_idle(rows)
    others.sort(key=lambda row: (row.idle or 0.0) if by_idle else -_rate(row))
    return sorted(equal, key=lambda row: row.workers) + others


def equal_to_best(rows: Sequence[LoaderRow]) -> list[bool]:
    """Return which rows can't be told from the best: by idle shares where all are known, else by rates.

    Rates are equal within the spread of the trials.
    """
    if not rows:
        return []
    if _have_idle(rows):
        enough = max(BUSY_IDLE, min(row.idle or 0.0 for row in rows) + _EQUAL_IDLE)
        return [(row.idle or 0.0) <= enough for row in rows]
    fastest = max(rows, key=_rate)
    spread = min(_EQUAL_AT_MOST, fastest.examples_per_second_spread or 0.0)
    enough = (1 - max(_EQUAL, spread)) * _rate(fastest)
    return [_rate(row) >= enough for row in rows]


def _have_idle(rows: Sequence[LoaderRow]) -> bool:
    return all(row.idle is not None for row in rows)


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
    kind = kind_of(tuning.kind)
    workers = kind.WORKERS_ARE
    if tuning.demand is None:
        if len(working) == 1:
            return f"{begun}{row.name} delivers {rate}; nothing else was compared."
        equal = sum(other.equal_to_best is True for other in working) - 1
        reason = f"{begun}{row.name} needs the fewest {workers} of those that are as fast as the fastest: {rate}."
        return reason + (f" It can't be told from {counted(equal, 'other setting')}." if equal > 0 else "")
    idle = row.idle or 0.0
    step = format_seconds(tuning.demand.step_seconds)
    if idle <= BUSY_IDLE:
        fewer = "" if not row.workers else f" Fewer {workers} don't."
        return f"{begun}With {row.name} a step of {step} waits for {format_percent(idle)} of the time.{fewer}"
    if tuning.keeps_up and kind.IN_SHARED_MEMORY:
        receiving = "" if tuning.queue is None else f": {format_seconds(tuning.queue.receive_seconds)} for each batch"
        return (
            f"{begun}{row.name} delivers {rate}, more than the step takes; it waits for {format_percent(idle)} of the "
            f"time all the same, mostly while the training process receives batches from its workers{receiving}."
        )
    if not tuning.is_bottleneck:
        fastest = max(working, key=_rate)
        return (
            f"{begun}With {row.name}, the best setting, a step of {step} waits for {format_percent(idle)} of the time, "
            f"although {fastest.name} alone delivers {format_number(_rate(fastest))} {fastest.rate_unit}, more than "
            "the step takes."
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
    if row.examples_per_second_spread is not None and row.examples_per_second_spread > _EQUAL_AT_MOST:
        yield (
            f"The rate of one setting differs by {format_percent(row.examples_per_second_spread)} between trials: "
            "settings that differ by less can't be told apart. Measure on an idle machine."
        )
    idle = row.idle
    if tuning.keeps_up and kind.IN_SHARED_MEMORY and idle is not None and idle > BUSY_IDLE:
        pinned = "pin_memory=true does it in a thread of its own, and " if tuning.kind == "torch" else ""
        yield (
            "Receiving a batch takes the training process some milliseconds, however many workers there are. On a GPU, "
            f"{pinned}steps that are not waited for hide it."
        )
    elif idle is not None and idle > BUSY_IDLE and others <= _OTHERS * machine:
        yield from _how_to_go_on(tuning, row, processors)
    predicted, measured = row.gpu_idle, row.gpu_idle_measured
    if predicted is not None and measured is not None and abs(predicted - measured) > max(0.05, 0.25 * measured):
        why = "step times or the machine's load vary, or the loader holds batches back"
        if (row.processors or 0.0) >= _BUSY * processors:
            why = "the loader keeps all processors busy, so the training process waits for one too"
        yield (
            f"The step waited for {format_percent(measured)} of the time, where the queue of {kind.WORKERS_ARE} "
            f"predicts {format_percent(predicted)}: {why}."
        )


def _how_to_go_on(tuning: LoaderTuning, row: LoaderRow, processors: int) -> Iterator[str]:
    slowest = max(tuning.stages, key=lambda stage: stage.share, default=None)
    stage = "" if slowest is None else f" {slowest.name} takes {format_percent(slowest.share)} of a batch's time."
    busy, kind = (row.processors or 0.0) + (row.other_processors or 0.0), kind_of(tuning.kind)
    if busy >= _BUSY * processors:
        yield (
            f"All {counted(processors, 'processor')} are busy: more {kind.WORKERS_ARE} don't help.{stage} Make each "
            "example cheaper (decode less, prepare data before training), or train on a machine with more processors."
        )
    elif kind.MORE_WORKERS and row.workers and row.workers >= max(one.workers for one in tuning.rows):
        yield (
            f"The processors are not all busy ({busy:.1f} of {processors}): try more workers, for example --sweep "
            f"{kind.WORKERS}={row.workers},{2 * row.workers}.{stage}"
        )
    elif stage:
        yield stage.strip()
