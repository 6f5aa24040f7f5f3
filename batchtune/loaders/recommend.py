"""The setting of a loader to recommend, and the sentences that say why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from batchtune.loaders import kind_of
from batchtune.results import BUSY_IDLE, Demand, LoaderRow, LoaderTuning
from batchtune.units import counted, format_percent, format_seconds

EQUAL = 0.02
"""Rates and idle shares that differ by less are equal; rates may differ by the spread of the trials, up to 10%."""
_MOST_EQUAL = 0.1
# Processors kept busy beyond which the machine, not the number of workers, limits the rate.
_BUSY = 0.9
# Other programs that take a larger share of the processors disturb the measurement.
_OTHERS = 0.15


def ranked(rows: Sequence[LoaderRow], demand: Demand | None) -> list[LoaderRow]:
    """Return rows that work, the best first: those equal to the best by their number of workers, then the others.

    `rows` are in the order of their settings, the cheapest first, in which equal ones stay. With a `demand`, the best
    is the one with which the step waits least; a row whose idle share was not measured is taken to wait as little as
    its rate allows. Without it, the best is the fastest.
    """
    equal = equal_to_best(rows, demand)

    def rank(row: LoaderRow) -> tuple[bool, float]:
        if row.name in equal:
            return False, row.workers
        return True, _slowness(row, rows[0], demand)

    return sorted(rows, key=rank)


def equal_to_best(rows: Sequence[LoaderRow], demand: Demand | None) -> set[str]:
    """Return the names of the rows that can't be told from the best, this one included; nothing without rows."""
    fastest = max(rows, key=lambda row: row.rate, default=None)
    if fastest is None:
        return set()
    tolerance = EQUAL
    if demand is None:
        tolerance = max(
            EQUAL, min(_MOST_EQUAL, fastest.examples_per_second_spread or 0.0)
        )
    slowness = {row.name: _slowness(row, fastest, demand) for row in rows}
    return {
        name
        for name, slow in slowness.items()
        if slow <= min(slowness.values()) + tolerance
    }


def _slowness(row: LoaderRow, reference: LoaderRow, demand: Demand | None) -> float:
    """Return the share of the time that the step waits, or without one, by which the row is slower than another."""
    if demand is None:
        return 1 - row.rate / reference.rate
    if row.gpu_idle is not None:
        return row.gpu_idle
    batch_seconds = 1 / (row.batches_per_second or 1e-9)
    if not row.workers:  # the step waits while the batch is made
        return batch_seconds / (batch_seconds + demand.step_seconds)
    return max(0.0, 1 - demand.step_seconds / batch_seconds)


def reason_for(tuning: LoaderTuning) -> str:
    """Say in a sentence or two why the recommended row is the best, or why none is."""
    row = tuning.recommended_row
    workers = kind_of(tuning.kind).WORKERS_ARE
    if row is None:
        reason = f"Nothing is recommended: {counted(len(tuning.rows), 'setting')} measured, and none works."
    elif tuning.demand is None or row.gpu_idle is None:
        equal = sum(other.equal_to_best is True for other in tuning.rows) - 1
        reason = (
            f"{row.name} delivers {row.rate_words}, and nothing that was measured more."
        )
        if equal > 0:
            reason += f" It can't be told from {counted(equal, 'other setting')}, with no fewer {workers}."
    else:
        step = format_seconds(tuning.demand.step_seconds)
        waits = format_percent(row.gpu_idle)
        reason = f"With {row.name}, a step of {step} waits for {waits} of the time, and no setting does better."
        if tuning.is_bottleneck:
            reason = f"The loader is the bottleneck. {reason}"
    if tuning.interrupted:
        return f"Interrupted after {counted(len(tuning.rows), 'setting')}. {reason}"
    return reason


def warnings_for(tuning: LoaderTuning, processors: int) -> Iterator[str]:
    """Yield what the user should know of the recommended row; `processors` are those of one rank."""
    row = tuning.recommended_row
    if row is None:
        return
    other_processors = row.other_processors or 0.0
    if other_processors > _OTHERS * processors:
        yield (
            f"Other programs kept {other_processors:.1f} processors busy: rates are too low, and waits too long. "
            "Measure on an idle machine."
        )
    if row.gpu_idle is None or row.gpu_idle <= BUSY_IDLE:
        return
    kind = kind_of(tuning.kind)
    busy = (row.processors or 0.0) + other_processors
    if busy >= _BUSY * processors:
        yield (
            f"All {counted(processors, 'processor')} are busy: more {kind.WORKERS_ARE} don't help. Make each example "
            "cheaper (decode less, prepare data before training), or train on a machine with more processors."
        )
    elif row.workers and row.workers >= max(other.workers for other in tuning.rows):
        yield (
            f"The processors are not all busy ({busy:.1f} of {processors}): try more {kind.WORKERS_ARE}, for example "
            f"--sweep {kind.WORKERS}={row.workers},{2 * row.workers}."
        )
