"""How far off an estimated epoch may be: the errors of the measured step times, carried through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchtune.batching.expectation import ExpectedBatches
from batchtune.batching.table import BucketTable
from batchtune.cost import StepTimes
from batchtune.lengths import FloatArray
from batchtune.tuning.estimates import StepSeconds
from batchtune.tuning.targets import TypicalTargets

WITHIN_ERRORS = 2.0
"""Times that differ by no more than so many standard errors of their difference are taken for equal."""

# Lengths that stand for all in the derivatives, which need not be as exact as the time itself.
_REPRESENTATIVES = 256


@dataclass(frozen=True, slots=True, eq=False)
class EpochTime:
    """The time of an epoch, and what its error comes from.

    Attributes:
        seconds: The time.
        gradient: Shape (sources,): its derivatives by the logarithms that `StepTimes.sigmas` are of, in seconds;
            None where the step times do not tell.
    """

    seconds: float
    gradient: FloatArray | None


def epoch_time(
    expected: ExpectedBatches,
    table: BucketTable,
    step_seconds: StepSeconds,
    targets: TypicalTargets | None,
    seconds: float,
) -> EpochTime:
    """An epoch's time with its derivatives, to first order in the errors of the measured step times.

    Shapes are many (two for each distinct length), and neighbours have nearly the same derivatives: a few hundred
    stand for all. What they give is scaled by the exact time, so that an error common to all shapes stays exact.

    Args:
        expected: The epoch's batches.
        table: The bucket table they come from.
        step_seconds: The time of one step; only `StepTimes` knows its errors.
        targets: What is typical of the data set; None where it has no targets.
        seconds: The epoch's exact time. On several ranks too: their waiting is taken to grow as the time does.

    Returns:
        With a gradient of None for step times that don't know their errors.
    """
    if not isinstance(step_seconds, StepTimes):
        return EpochTime(seconds, None)
    sizes, lengths, counts = _representatives(expected, table)
    typical = None
    if targets is not None:
        below = np.concatenate(([0.0], table.boundaries[:-1]))
        typical = targets(sizes, lengths, below[np.searchsorted(table.boundaries, lengths)])
    total, gradient = step_seconds.sensitivities(sizes, lengths, typical, counts)
    return EpochTime(seconds, gradient * (seconds / total))


def standard_error(time: EpochTime, sigmas: FloatArray | None) -> float | None:
    """The standard error of an epoch's time, in seconds: √Σ (gradient_p · sigma_p)².

    Args:
        time: Of the epoch.
        sigmas: Shape (sources,): as `StepTimes.sigmas`; None where they are not known.

    Returns:
        None where the errors are not known.
    """
    if time.gradient is None or sigmas is None:
        return None
    return float(np.linalg.norm(time.gradient * sigmas))


def equal_to_best(times: Sequence[EpochTime], sigmas: FloatArray | None) -> list[bool | None]:
    """Which times can't be told from the least: they differ by at most two standard errors of the difference.

    Errors that both have in common cancel: the difference's is √Σ ((gradient_a,p - gradient_b,p) · sigma_p)².

    Args:
        times: Of several tables on the same data.
        sigmas: Shape (sources,): as `StepTimes.sigmas`; None where they are not known.

    Returns:
        One for each time; the least itself is always equal. None where the errors are not known.
    """
    best = min(times, key=lambda time: time.seconds, default=None)
    return [None if best is None else _equal(time, best, sigmas) for time in times]


def _equal(time: EpochTime, best: EpochTime, sigmas: FloatArray | None) -> bool | None:
    if time.gradient is None or best.gradient is None or sigmas is None:
        return None
    error = float(np.linalg.norm((time.gradient - best.gradient) * sigmas))
    return time.seconds - best.seconds <= WITHIN_ERRORS * error


def group_starts(expected: ExpectedBatches, table: BucketTable, most: int) -> npt.NDArray[np.intp]:
    """Groups of neighbouring distinct lengths, none across buckets, each of which one length can stand for.

    Besides its first length, each has at most 2 / `most` of the batches, and none spans more than 2 / `most` of the
    lengths' range.

    Args:
        expected: The epoch's batches.
        table: The bucket table they come from.
        most: At most so many groups, and one more for each bucket; up to so many lengths each is its own group.

    Returns:
        Where each group begins in the distinct lengths, ascending from 0.
    """
    lengths = expected.lengths
    if lengths.size <= most:
        return np.arange(lengths.size)
    batches = np.cumsum(expected.batches)
    place = batches / batches[-1] + (lengths - lengths[0]) / (lengths[-1] - lengths[0])
    changes = np.flatnonzero(np.diff(np.floor(place * (most / 2)))) + 1
    edges = np.searchsorted(lengths, table.boundaries, side="right")
    return np.unique(np.concatenate(([0], changes, edges[edges < lengths.size])))


def _representatives(expected: ExpectedBatches, table: BucketTable) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Batch sizes, longest lengths and expected numbers of the shapes that stand for all of an epoch's batches."""
    starts = group_starts(expected, table, _REPRESENTATIVES)
    last = np.append(starts[1:], expected.lengths.size) - 1
    sizes, lengths, counts = [], [], []
    for size, batches in expected.kinds:
        count = np.add.reduceat(batches, starts)
        there = count > 0
        mean = np.add.reduceat(batches * expected.lengths, starts)[there] / count[there]
        # Rounding must not carry a mean beyond its group, into another bucket.
        lengths.append(np.clip(mean, expected.lengths[starts[there]], expected.lengths[last[there]]))
        sizes.append(size[starts[there]].astype(np.float64))
        counts.append(count[there])
    return np.concatenate(sizes), np.concatenate(lengths), np.concatenate(counts)
