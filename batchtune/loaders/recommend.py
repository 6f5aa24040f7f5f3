"""Evaluates the measurements of a loader: the row of each setting, which one to recommend, and why."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from batchtune.epochs.cost_model import needs_targets
from batchtune.epochs.measured_costs import costs_of
from batchtune.lengths import FloatArray
from batchtune.loaders import LoaderKind, kind_of
from batchtune.loaders.protocol import Taken
from batchtune.loaders.runner import Measurement
from batchtune.results import (
    BUSY_IDLE,
    PROBE_FILE,
    SWEEP_FILE,
    Demand,
    LengthsSummary,
    LoaderRow,
    LoaderTuning,
    Probe,
    Sweep,
    read_if_written,
)
from batchtune.units import counted, format_percent, format_seconds

EQUAL = 0.02
"""Rates and idle shares that differ by less are equal; rates may differ by the spread of the trials, up to 10%."""
_MOST_EQUAL = 0.1
# Processors kept busy beyond which the machine, not the number of workers, limits the rate.
_BUSY = 0.9
# Other programs that take a larger share of the processors disturb the measurement.
_OTHERS = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """How long the step computes with batches.

    Attributes:
        source, per, device_name: As in `Demand`.
        seconds_of: Examples and longest lengths of batches → seconds of each step.
        lengths: The data that the run is about; None for a number that the user gave.
    """

    source: Literal["probe", "step-ms"]
    per: Literal["shape", "example", "batch"]
    seconds_of: Callable[[FloatArray, FloatArray], FloatArray]
    device_name: str | None = None
    lengths: LengthsSummary | None = None

    def of(self, epochs: Iterable[Taken]) -> list[float]:
        """Return the seconds of a step with each delivered batch; one whose examples are unknown counts as one."""
        seconds: list[float] = []
        for taken in epochs:
            examples = np.nan_to_num(
                _column(batch.examples for batch in taken.batches), nan=1.0
            )
            seconds += self.seconds_of(
                examples, _column(batch.length for batch in taken.batches)
            ).tolist()
        return seconds

    def demand(self, epochs: Iterable[Taken]) -> Demand:
        """Return the record of it for the batches that were delivered, at least one."""
        mean = float(np.mean(self.of(epochs)))
        return Demand(
            source=self.source,
            per=self.per,
            step_seconds=mean,
            device_name=self.device_name,
        )


def steps_of_run(folder: Path, step_ms: float | None, *, exact: bool) -> Steps | None:
    """Return the step times that the user gave, or those of a run folder's probe; None without any.

    `exact`: the lengths of batches are known, in the unit of the run. Without them, or if the times depend on targets,
    a step takes as long for each example as in the recommended epoch of the run's sweep.

    Raises:
        ResultError: A file of the run can't be read.
    """
    if step_ms is not None:
        return Steps(
            source="step-ms",
            per="batch",
            seconds_of=lambda examples, _: 0 * examples + step_ms / 1000,
        )
    probe = read_if_written(folder / PROBE_FILE, Probe)
    if probe is None:
        return None
    costs = costs_of(probe)
    model = probe.models.step_seconds
    if costs.step_seconds is None or model is None:
        return None
    steps = Steps(
        source="probe",
        per="shape",
        seconds_of=costs.step_seconds,
        device_name=costs.device_name,
        lengths=probe.lengths,
    )
    if exact and not needs_targets(model):
        return steps
    sweep = read_if_written(folder / SWEEP_FILE, Sweep)
    row = None if sweep is None else sweep.recommended_row
    if sweep is None or row is None or row.estimated_epoch_seconds is None:
        return None
    per_example = row.estimated_epoch_seconds / sweep.lengths.count
    return replace(
        steps, per="example", seconds_of=lambda examples, _: examples * per_example
    )


def row_of(kind: LoaderKind, measurements: Sequence[Measurement]) -> LoaderRow:
    """Return the row of a setting, without what depends on the step: medians over its measurements."""
    last = measurements[-1]
    workers = kind.workers(last.arguments)
    if last.outcome != "ok":
        return LoaderRow(
            arguments=last.arguments,
            workers=workers,
            outcome=last.outcome,
            error=last.error,
        )
    epochs = list(
        itertools.chain.from_iterable(
            measurement.epochs for measurement in measurements
        )
    )
    delivered = list(itertools.chain.from_iterable(taken.batches for taken in epochs))
    rates = np.array([_rates(measurement, workers) for measurement in measurements])
    batches, examples, length = np.median(rates, axis=0)
    waits = (
        list(itertools.chain.from_iterable(taken.waits[1:] for taken in epochs))
        or epochs[0].waits
    )
    processors = sum(taken.cpu_seconds for taken in epochs) / sum(
        taken.seconds for taken in epochs
    )
    return LoaderRow(
        arguments=last.arguments,
        workers=workers,
        outcome="ok",
        trials=len(measurements),
        batches=len(delivered),
        examples=sum(batch.examples or 0 for batch in delivered),
        examples_per_second=_known(examples),
        batches_per_second=float(batches),
        length_per_second=_known(length),
        examples_per_second_spread=_known(np.ptp(rates[:, 1]) / examples),
        first_batch_seconds=float(np.median([taken.waits[0] for taken in epochs])),
        wait_p50_seconds=float(np.quantile(waits, 0.5)),
        wait_p99_seconds=float(np.quantile(waits, 0.99)),
        processors=processors,
        other_processors=max(0.0, last.busy_processors - processors),
        memory_bytes=last.memory_bytes or None,
        worker_bytes=last.worker_bytes or None,
        shared_bytes=last.shared_bytes,
        batch_bytes=max(batch.size_bytes for batch in delivered),
    )


def idle_share(measurement: Measurement, workers: int) -> float:
    """Return the share of the time that the consumer waited, the start of each epoch apart."""
    *_, waits, steps = _totals(measurement, workers)
    return float(waits / (waits + steps))


def epoch_size(epochs: Iterable[Taken]) -> tuple[int | None, int | None]:
    """Return the batches and examples of an epoch that came to its end; None: not known."""
    for taken in epochs:
        if taken.complete:
            examples = [
                batch.examples for batch in taken.batches if batch.examples is not None
            ]
            if len(examples) == len(taken.batches):
                return len(examples), sum(examples)
            return len(taken.batches), None
    return None, None


def epoch_seconds(
    row: LoaderRow, batches: int | None, demand: Demand | None
) -> float | None:
    """Return the time of an epoch: its steps and measured waits, or the loader's own time without step times."""
    if (
        batches is None
        or row.batches_per_second is None
        or row.first_batch_seconds is None
    ):
        return None
    if demand is None:
        return row.first_batch_seconds + (batches - 1) / row.batches_per_second
    if row.gpu_idle is None:
        return None
    return row.first_batch_seconds + batches * demand.step_seconds / max(
        1e-9, 1 - row.gpu_idle
    )


def _rates(measurement: Measurement, workers: int) -> FloatArray:
    """Return batches, examples and length per second, the start of each epoch apart; NaN: not known."""
    totals = _totals(measurement, workers)
    rates: FloatArray = totals[:3] / totals[3:].sum()
    return rates


def _totals(measurement: Measurement, workers: int) -> FloatArray:
    """Return batches, examples, length, seconds of waits and of steps; NaN: not known.

    Each epoch counts from the first batch that follows those of its start: all workers begin their first ones at once.
    """
    totals = np.zeros(5)
    for taken in measurement.epochs:
        first = min(max(1, workers), len(taken.waits) // 2)
        figures = [
            (1, batch.examples, batch.total_length, wait, step)
            for batch, wait, step in zip(
                taken.batches, taken.waits, taken.steps, strict=True
            )
        ]
        totals += np.array(figures[first:], dtype=np.float64).sum(axis=0)
    return totals


def _column(figures: Iterable[float | None]) -> FloatArray:
    """Return figures as an array; NaN: not known."""
    return np.array(list(figures), dtype=np.float64)


def _known(figure: float) -> float | None:
    """Return a figure; None for NaN."""
    return None if math.isnan(figure) else float(figure)


def ranked(rows: Sequence[LoaderRow], demand: Demand | None) -> list[LoaderRow]:
    """Return rows that work, the best first: those equal to the best by their number of workers, then the others.

    `rows` are in the order of their settings, the cheapest first, in which equal ones stay. With a `demand`, the best
    is the one with which the step waits least; a row whose idle share was not measured is assumed to wait only as long
    as its throughput implies. Without it, the best is the fastest.
    """
    equal = equal_to_best(rows, demand)

    def rank(row: LoaderRow) -> tuple[bool, float]:
        if row.name in equal:
            return False, row.workers
        return True, _slowness(row, rows[0], demand)

    return sorted(rows, key=rank)


def equal_to_best(rows: Sequence[LoaderRow], demand: Demand | None) -> set[str]:
    """Return the names of the rows that are within the error of the best, this one included; nothing without rows."""
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
    """Return the share of time that the step waits; without a step, how much slower the row is than another."""
    if demand is None:
        return 1 - row.rate / reference.rate
    if row.gpu_idle is not None:
        return row.gpu_idle
    batch_seconds = 1 / (row.batches_per_second or 1e-9)
    if not row.workers:  # the step waits while the batch is made
        return batch_seconds / (batch_seconds + demand.step_seconds)
    return max(0.0, 1 - demand.step_seconds / batch_seconds)


def reason_for(tuning: LoaderTuning) -> str:
    """Explain in a sentence or two why the recommended row is the best, or why no row is recommended."""
    row = tuning.recommended_row
    workers = kind_of(tuning.kind).WORKERS_ARE
    if row is None:
        reason = f"Nothing is recommended: {counted(len(tuning.rows), 'setting')} measured, and none works."
    elif tuning.demand is None or row.gpu_idle is None:
        equal = sum(other.equal_to_best is True for other in tuning.rows) - 1
        reason = f"{row.name} delivers {row.rate_words}, the most that was measured."
        if equal > 0:
            reason += f" Within the error of it: {counted(equal, 'other setting')}, with no fewer {workers}."
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
