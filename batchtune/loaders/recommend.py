"""The setting of a loader to recommend, and the sentences that say why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from batchtune.loaders import kind_of
from batchtune.results import BUSY_IDLE, LoaderRow, LoaderTuning
from batchtune.units import counted, format_percent, format_seconds, format_size

# Rates that differ by less are equal, unless the trials differ by more; beyond the second number they never are.
_EQUAL = 0.02
_MOST_EQUAL = 0.1
# Idle shares that differ by less are equal.
EQUAL_IDLE = 0.02
# Processors kept busy beyond which the machine, not the number of workers, limits the rate.
_BUSY = 0.9
# Other programs that take a larger share of the processors disturb the measurement.
_OTHERS = 0.15


def ranked(rows: Sequence[LoaderRow], least_idle: Mapping[str, float] | None = None) -> list[LoaderRow]:
    """Return rows that work, the best first; `rows` are in the order of their settings, the cheapest first.

    Where step times are known: those with which the step waits no longer than it must, by their number of workers;
    then the others, the shortest waits first. Otherwise those that deliver as many examples a second as the fastest, by
    their number of workers, then the others by their rate. Equal rows keep their order.

    Args:
        rows: Those that work.
        least_idle: By a row's name, the lowest idle share that its rate allows: of rows whose own was not measured.
            None: step times are not known.
    """
    if least_idle is None:
        equal = _equal_rates(rows)
        costs = [-row.rate for row in rows]
    else:
        costs = [least_idle[row.name] if row.gpu_idle is None else row.gpu_idle for row in rows]
        limit = _equal_idle_limit(costs)
        equal = [idle <= limit for idle in costs]
    best = [index for index, is_equal in enumerate(equal) if is_equal]
    others = [index for index, is_equal in enumerate(equal) if not is_equal]
    best.sort(key=lambda index: rows[index].workers)
    others.sort(key=lambda index: costs[index])
    return [rows[index] for index in best + others]


def equal_to_best(rows: Sequence[LoaderRow]) -> list[bool | None]:
    """Return which rows can't be told from the best: by measured idle shares if any has one, else by rates.

    Rates are equal within the spread of the trials. None: others have idle shares, but not this row.
    """
    idle = [row.gpu_idle for row in rows if row.gpu_idle is not None]
    if not idle:
        return list(_equal_rates(rows))
    limit = _equal_idle_limit(idle)
    return [None if row.gpu_idle is None else row.gpu_idle <= limit for row in rows]


def _equal_idle_limit(idle: Sequence[float]) -> float:
    """Return the highest idle share that can't be told from the lowest."""
    return max(BUSY_IDLE, min(idle, default=0.0) + EQUAL_IDLE)


def _equal_rates(rows: Sequence[LoaderRow]) -> list[bool]:
    if not rows:
        return []
    fastest = max(rows, key=lambda row: row.rate)
    spread = min(_MOST_EQUAL, fastest.examples_per_second_spread or 0.0)
    limit = (1 - max(_EQUAL, spread)) * fastest.rate
    return [row.rate >= limit for row in rows]


def reason_for(tuning: LoaderTuning) -> str:
    """Say in a sentence or two why the recommended row is the best, or why none is."""
    reason = _reason(tuning)
    if tuning.interrupted:
        return f"Interrupted after {counted(len(tuning.rows), 'setting')}. {reason}"
    return reason


def _reason(tuning: LoaderTuning) -> str:
    row = tuning.recommended_row
    if row is None:
        if not tuning.rows:
            return "Nothing is recommended: no setting was measured."
        return f"Nothing is recommended: all {counted(len(tuning.rows), 'setting')} failed."
    if tuning.demand is None:
        return _reason_without_step(tuning, row)
    if row.gpu_idle is None:
        return f"{row.name} delivers {row.rate_words}; how long the step waits was not measured."
    step = format_seconds(tuning.demand.step_seconds)
    waits = f"{row.name}, a step of {step} waits for {format_percent(row.gpu_idle)} of the time"
    if tuning.is_bottleneck:
        return f"The loader is the bottleneck: with {waits}, and no setting does better."
    if row.gpu_idle > BUSY_IDLE:
        return f"With {waits}, and no setting does better."
    if not row.workers:
        return f"With {waits}."
    return f"With {waits}. Fewer {kind_of(tuning.kind).WORKERS_ARE} don't keep it busy."


def _reason_without_step(tuning: LoaderTuning, row: LoaderRow) -> str:
    working = tuning.working_rows
    if len(working) == 1:
        return f"{row.name} delivers {row.rate_words}; nothing else was compared."
    workers = kind_of(tuning.kind).WORKERS_ARE
    reason = f"{row.name} needs the fewest {workers} of those that are as fast as the fastest: {row.rate_words}."
    equal = sum(other.equal_to_best is True for other in working) - 1
    if equal > 0:
        reason += f" It can't be told from {counted(equal, 'other setting')}."
    return reason


def warnings_for(tuning: LoaderTuning, processors: int) -> Iterator[str]:
    """Yield what the user should know of the rows."""
    kind = kind_of(tuning.kind)
    most_workers = max((row.workers for row in tuning.rows), default=0)
    if most_workers > processors and kind.MORE_WORKERS and kind.WORKERS in tuning.settings.get("sweep", {}):
        yield (
            f"Up to {most_workers} workers shared {counted(processors, 'processor')}: more workers than processors "
            "help only if they wait for disks or networks."
        )
    row = tuning.recommended_row
    if row is None:
        return
    other_processors = row.other_processors or 0.0
    machine = processors * tuning.measured_with.ranks_per_node
    is_disturbed = other_processors > _OTHERS * machine
    if is_disturbed:
        yield (
            f"Other programs kept {other_processors:.1f} of {counted(machine, 'processor')} busy: rates are too low, "
            "and waits too long. Measure on an idle machine."
        )
    if row.growth_bytes_per_batch:
        yield _growth_words(row.growth_bytes_per_batch, tuning.epoch_batches)
    if row.examples_per_second_spread is not None and row.examples_per_second_spread > _MOST_EQUAL:
        yield (
            f"Rates differ by {format_percent(row.examples_per_second_spread)} between trials: "
            "settings that differ by less can't be told apart. Measure on an idle machine."
        )
    if row.gpu_idle is None or row.gpu_idle <= BUSY_IDLE:
        return
    if tuning.keeps_up and kind.IN_SHARED_MEMORY:
        yield (
            "Receiving a batch takes the training process some milliseconds, however many workers there are. On a GPU, "
            f"{kind.HIDES_RECEIVING}asynchronous steps hide it."
        )
    elif not is_disturbed:
        yield from _how_to_go_on(tuning, row, processors)


def _growth_words(bytes_per_batch: float, epoch_batches: int | None) -> str:
    epoch = ""
    if epoch_batches:
        epoch = f", {format_size(int(bytes_per_batch * epoch_batches))} in an epoch"
    return (
        f"Memory grows by {format_size(int(bytes_per_batch))} with each batch{epoch}: a leak, or a "
        "cache, or the data set's Python objects, whose reference counts each worker writes to (keep them in numpy "
        "arrays or tensors)."
    )


def _how_to_go_on(tuning: LoaderTuning, row: LoaderRow, processors: int) -> Iterator[str]:
    stage = ""
    if tuning.stages:
        slowest = max(tuning.stages, key=lambda stage: stage.share)
        stage = f" {slowest.name} takes {format_percent(slowest.share)} of a batch's time."
    busy = (row.processors or 0.0) + (row.other_processors or 0.0)
    kind = kind_of(tuning.kind)
    if busy >= _BUSY * processors:
        yield (
            f"All {counted(processors, 'processor')} are busy: more {kind.WORKERS_ARE} don't help.{stage} Make each "
            "example cheaper (decode less, prepare data before training), or train on a machine with more processors."
        )
    elif kind.MORE_WORKERS and row.workers and row.workers >= max(other.workers for other in tuning.rows):
        yield (
            f"The processors are not all busy ({busy:.1f} of {processors}): try more workers, for example --sweep "
            f"{kind.WORKERS}={row.workers},{2 * row.workers}.{stage}"
        )
    elif stage:
        yield stage.strip()
