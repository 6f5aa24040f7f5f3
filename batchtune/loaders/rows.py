"""Evaluates the measurements of a loader: a setting's row of `loader.json`, and whether two epochs are the same."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from batchtune.errors import LoaderError
from batchtune.lengths import FloatArray
from batchtune.loaders.base import LoaderKind
from batchtune.loaders.memory import MemoryUse
from batchtune.loaders.protocol import Taken
from batchtune.loaders.runner import LoaderRunner, Measurement, Plan
from batchtune.results import Arguments, LoaderRow, Reproduced

# Memory that grew by less, in bytes and as a share of what was there, is noise: allocators keep some.
_MIN_GROWTH_BYTES = 32 << 20
_MIN_GROWTH = 0.1
_MIN_LOOKS = 6
# Only the beginning of a longer epoch is compared.
COMPARED_SECONDS = 60.0


def row_of(measurement: Measurement, kind: LoaderKind, rounds: int, *, rates: bool = True) -> LoaderRow:
    """Return the row of a measurement, without what depends on the step; without rates and waits unless `rates`."""
    row = LoaderRow(
        arguments=measurement.arguments,
        workers=kind.workers(measurement.arguments),
        outcome=measurement.outcome,
        error=measurement.error,
        rounds=rounds,
        trials=len(measurement.trials),
    )
    if measurement.outcome != "ok":
        return row
    epochs = measurement.epochs
    memory = measurement.memory or MemoryUse()
    row = replace(
        row,
        batches=sum(len(taken.waits) for taken in epochs),
        examples=sum(_total(taken.examples) for taken in epochs),
        first_batch_seconds=float(np.median([taken.waits[0] for taken in epochs if taken.waits])),
        memory_bytes=memory.peak_bytes or None,
        worker_bytes=memory.worker_bytes if row.workers else None,
        shared_bytes=memory.shared_bytes,
        batch_bytes=max(taken.bytes for taken in epochs),
    )
    if not rates:
        return row
    waits: list[float] = []
    for taken in epochs:
        waits += taken.waits[1:]
    waits = waits or [epochs[0].waits[0]]
    busy = sum(taken.cpu_seconds for taken in epochs) / max(sum(taken.seconds for taken in epochs), 1e-9)
    return replace(
        _with_rates(row, measurement.trials),
        wait_p50_seconds=float(np.quantile(waits, 0.5)),
        wait_p99_seconds=float(np.quantile(waits, 0.99)),
        processors=busy,
        other_processors=max(0.0, (measurement.busy_processors or 0.0) - busy),
        growth_bytes_per_batch=growth(memory, measurement.spans, row.batches / len(epochs)),
    )


def _total(values: Sequence[float | None]) -> Any:
    return sum(value for value in values if value is not None)


def _with_rates(row: LoaderRow, trials: Sequence[Sequence[Taken]]) -> LoaderRow:
    """Return a row with the median rates of its trials; None where a batch's examples or length are not known."""
    rates = np.array([_rates(trial, row.workers) for trial in trials])
    batches, examples, length = map(float, np.median(rates, axis=0))
    row = replace(row, batches_per_second=batches)
    epochs = list(itertools.chain.from_iterable(trials))
    if not any(None in taken.examples for taken in epochs):
        spread = float(np.ptp(rates[:, 1])) / examples if examples else None
        row = replace(row, examples_per_second=examples, examples_per_second_spread=spread)
    if not any(None in taken.total_lengths for taken in epochs):
        row = replace(row, length_per_second=length)
    return row


def _rates(trial: Sequence[Taken], workers: int) -> FloatArray:
    """Return batches, examples and length per second of one trial, each epoch from `_steady` on."""
    totals = np.zeros(3)
    for taken in trial:
        first = _steady(taken, workers)
        totals[0] += len(taken.waits) - first
        totals[1] += _total(taken.examples[first:])
        totals[2] += _total(taken.total_lengths[first:])
    waits, steps = _steady_seconds(trial, workers)
    return totals / max(waits + steps, 1e-9)


def measured_idle(trial: Sequence[Taken], workers: int) -> float:
    """Return the share of the time that the consumer waited, each epoch from `_steady` on."""
    waits, steps = _steady_seconds(trial, workers)
    return waits / max(waits + steps, 1e-9)


def _steady_seconds(trial: Sequence[Taken], workers: int) -> tuple[float, float]:
    """Return the seconds of waits and of steps, each epoch from `_steady` on."""
    waits = 0.0
    steps = 0.0
    for taken in trial:
        first = _steady(taken, workers)
        waits += sum(taken.waits[first:])
        steps += sum(taken.steps[first:])
    return waits, steps


def _steady(taken: Taken, workers: int) -> int:
    """Return the first batch of an epoch that counts: all workers begin their first ones at once, and end together."""
    return min(max(1, workers), len(taken.waits) // 2)


def growth(memory: MemoryUse, spans: Sequence[tuple[float, float]], epoch_batches: float) -> float | None:
    """Return by how many bytes memory grew with each batch; 0 if by no more than noise, None with too few looks.

    Within an epoch it is the slope of a line through its last two thirds × its time, the median of the epochs: workers
    that end with their epoch free their memory. From the first to the last epoch it is the difference of their medians.
    """
    grown_within: list[float] = []
    levels: list[float] = []
    looks = 0
    for began, ended in spans:
        settled = began + (ended - began) / 3
        history = [(seconds - began, size) for seconds, size in memory.history if settled <= seconds <= ended]
        looks += len(history)
        if len(history) < 2:
            continue
        points = np.array(history)
        slope, _ = np.polyfit(points[:, 0], points[:, 1], 1)
        grown_within.append(float(slope) * (ended - began))
        levels.append(float(np.median(points[:, 1])))
    if looks < _MIN_LOOKS or not levels:
        return None
    noise = max(_MIN_GROWTH_BYTES, _MIN_GROWTH * levels[0])
    growth_of_batch = 0.0
    grown_in_epoch = float(np.median(grown_within))
    if grown_in_epoch > noise:
        growth_of_batch = grown_in_epoch / epoch_batches
    grown_between_epochs = levels[-1] - levels[0]
    if grown_between_epochs > noise:
        batches_between = epoch_batches * (len(spans) - 1)
        growth_of_batch = max(growth_of_batch, grown_between_epochs / batches_between)
    return growth_of_batch


def merged(measurements: Sequence[Measurement]) -> Measurement:
    """Return all trials of a setting that was measured several times, with the memory of the last."""
    trials: list[list[Taken]] = []
    for measurement in measurements:
        trials += measurement.trials
    busy = [measurement.busy_processors or 0.0 for measurement in measurements]
    return dataclasses.replace(measurements[-1], trials=trials, busy_processors=float(np.mean(busy)))


def reproduced(runner: LoaderRunner, arguments: Arguments, kind: LoaderKind) -> Reproduced:
    """Take an epoch in each of two fresh processes, from the same seed, and compare all tensors bit for bit.

    Raises LoaderError if one of the two fails.
    """
    first = _digests(runner, arguments, kind)
    second = _digests(runner, arguments, kind)
    for index, (batch, other) in enumerate(zip(first.digests, second.digests, strict=False)):
        if batch != other:
            names = [name for name in {**batch, **other} if batch.get(name) != other.get(name)]
            return Reproduced(batches=index + 1, first_difference=index, what=f"{', '.join(names)} differ")
    shorter = min(len(first.digests), len(second.digests))
    if len(first.digests) != len(second.digests) and first.complete and second.complete:
        what = f"one epoch has {len(first.digests)} batches, the other {len(second.digests)}"
        return Reproduced(batches=shorter, first_difference=shorter, what=what)
    return Reproduced(batches=shorter)


def _digests(runner: LoaderRunner, arguments: Arguments, kind: LoaderKind) -> Taken:
    """Return an epoch of a fresh process, with its batches' digests."""
    measured = runner.measure(arguments, Plan(seconds=COMPARED_SECONDS, digests=True), kind)
    if measured.outcome != "ok":
        raise LoaderError(f"the epoch to compare failed: {measured.error}")
    return measured.epochs[0]
