"""Evaluates the measurements of a loader: a setting's row of `loader.json`, and whether two epochs are the same."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

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
_LEAST_GROWTH_BYTES = 32 << 20
_LEAST_GROWTH = 0.1
_LEAST_LOOKS = 6
# Only the beginning of a longer epoch is compared.
COMPARED_SECONDS = 60.0
# The figures of a setting that differ between its measurements.
_MEDIANS = (
    *("batches_per_second", "examples_per_second", "length_per_second", "first_batch_seconds"),
    *("wait_p50_seconds", "wait_p99_seconds", "processors", "other_processors"),
)


def row_of(measurement: Measurement, kind: LoaderKind, rounds: int) -> LoaderRow:
    """Return the row of a measurement, without what depends on the step."""
    found = LoaderRow(
        arguments=measurement.arguments,
        workers=kind.workers(measurement.arguments),
        outcome=measurement.outcome,
        error=measurement.error,
        rounds=rounds,
        trials=len(measurement.trials),
    )
    epochs = measurement.epochs
    if measurement.outcome != "ok":
        return found
    rates = np.array([_rates(trial, found.workers) for trial in measurement.trials])
    batches, examples, length = map(float, np.median(rates, axis=0))
    waits = np.array([wait for taken in epochs for wait in taken.waits[1:]] or [epochs[0].waits[0]])
    memory = measurement.memory or MemoryUse()
    counted = all(count is not None for taken in epochs for count in taken.examples)
    measured = all(one is not None for taken in epochs for one in taken.total_lengths)
    busy = sum(taken.cpu_seconds for taken in epochs) / max(sum(taken.seconds for taken in epochs), 1e-9)
    total = sum(len(taken.waits) for taken in epochs)
    return replace(
        found,
        batches=total,
        examples=sum(count or 0 for taken in epochs for count in taken.examples),
        batches_per_second=batches,
        examples_per_second=examples if counted else None,
        length_per_second=length if measured else None,
        examples_per_second_spread=float(np.ptp(rates[:, 1])) / examples if counted and examples else None,
        first_batch_seconds=float(np.median([taken.waits[0] for taken in epochs if taken.waits])),
        wait_p50_seconds=float(np.quantile(waits, 0.5)),
        wait_p99_seconds=float(np.quantile(waits, 0.99)),
        processors=busy,
        other_processors=max(0.0, (measurement.busy_processors or 0.0) - busy),
        memory_bytes=memory.peak_bytes or None,
        worker_bytes=memory.worker_bytes if found.workers else None,
        shared_bytes=memory.shared_bytes,
        batch_bytes=max(taken.bytes for taken in epochs),
        growth_bytes_per_batch=growth(memory, measurement.spans, total),
    )


def _rates(trial: Sequence[Taken], workers: int) -> FloatArray:
    """Return batches, examples and length per second of one trial, each epoch from `_steady` on."""
    seconds, totals = 0.0, np.zeros(3)
    for taken in trial:
        first = _steady(taken, workers)
        seconds += sum(taken.waits[first:]) + sum(taken.steps[first:])
        sums = [sum(value or 0 for value in column[first:]) for column in (taken.examples, taken.total_lengths)]
        totals += (len(taken.waits) - first, *sums)
    return totals / max(seconds, 1e-9)


def measured_idle(epochs: Sequence[Taken], workers: int) -> float:
    """Return the share of the time that the consumer waited, each epoch from `_steady` on."""
    waits = sum(sum(taken.waits[_steady(taken, workers) :]) for taken in epochs)
    steps = sum(sum(taken.steps[_steady(taken, workers) :]) for taken in epochs)
    return waits / max(waits + steps, 1e-9)


def _steady(taken: Taken, workers: int) -> int:
    """Return the first batch of an epoch that counts: all workers begin their first ones at once, and end together."""
    return min(max(1, workers), len(taken.waits) // 2)


def growth(memory: MemoryUse, spans: Sequence[tuple[float, float]], batches: int) -> float | None:
    """Return by how many bytes memory grew with each batch; 0 if by no more than noise, None with too few looks.

    Within an epoch it is the median of the slopes between any two looks (Theil 1950, Sen 1968), the first third left
    out, × its time: workers that end with their epoch free their memory. From the first to the last epoch it is the
    difference of the medians.
    """
    slopes, levels = [], []
    for began, ended in spans:
        looks = [look for look in memory.history if began + (ended - began) / 3 <= look[0] <= ended]
        looks = looks[:: max(1, len(looks) // 100)]
        levels += [[size for _, size in looks]] if looks else []
        slopes += [(b - a) / (t - s) for (s, a), (t, b) in itertools.combinations(looks, 2) if t > s]
    if sum(map(len, levels)) < _LEAST_LOOKS or not batches or not slopes:
        return None
    each = batches / len(spans)
    within = float(np.median(slopes)) * float(np.median([ended - began for began, ended in spans]))
    across = float(np.median(levels[-1]) - np.median(levels[0]))
    noise = max(_LEAST_GROWTH_BYTES, _LEAST_GROWTH * levels[0][0])
    found = [grown / count for grown, count in ((within, each), (across, batches - each)) if grown > noise and count]
    return max(found, default=0.0)


def together(rows: Sequence[LoaderRow]) -> LoaderRow:
    """Return the row of a setting that was measured several times: the medians of its rates and waits."""
    columns = {name: [getattr(row, name) for row in rows] for name in (*_MEDIANS, "trials", "batches", "examples")}
    sums = {name: sum(columns.pop(name)) for name in ("trials", "batches", "examples")}
    medians = {name: float(np.median(values)) for name, values in columns.items() if None not in values}
    spread = None
    if rate := medians.get("examples_per_second"):
        spread = float(np.ptp(columns["examples_per_second"])) / rate
    return replace(rows[-1], **sums, **medians, examples_per_second_spread=spread)


def reproduced(runner: LoaderRunner, arguments: Arguments, kind: LoaderKind) -> Reproduced:
    """Take an epoch in each of two fresh processes, from the same seed, and compare all tensors bit for bit.

    Raises LoaderError if one of the two fails.
    """
    epochs: list[Taken] = []
    for _ in range(2):
        measured = runner.measure(arguments, Plan(seconds=COMPARED_SECONDS, digests=True), kind)
        if measured.outcome != "ok":
            raise LoaderError(f"the epoch to compare failed: {measured.error}")
        epochs += measured.epochs
    first, second = (epoch.digests for epoch in epochs)
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
            return Reproduced(batches=index + 1, first_difference=index, what=f"{', '.join(names)} differ")
    shorter = min(len(first), len(second))
    if len(first) != len(second) and all(epoch.complete for epoch in epochs):
        what = f"one epoch has {len(first)} batches, the other {len(second)}"
        return Reproduced(batches=shorter, first_difference=shorter, what=what)
    return Reproduced(batches=shorter)
