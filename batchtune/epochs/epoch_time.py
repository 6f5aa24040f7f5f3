"""The time of an epoch, its errors by the measurements that it rests on, and which times can't be told apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from msgspec import structs

from batchtune.epochs.layout import EpochShapes
from batchtune.epochs.measured_costs import StepTimeFunction
from batchtune.epochs.step_times import StepTimes
from batchtune.lengths import FloatArray
from batchtune.results import RankTimes, Row, StreamRow

RowT = TypeVar("RowT", Row, StreamRow)

# Times that differ by no more than two standard errors of their difference are taken for equal.
_WITHIN_ERRORS = 2.0
# Batches that stand for all in the errors, which need not be as exact as the time itself.
_REPRESENTATIVES = 512


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpochTime:
    """The time of one epoch as the ranks take batches, in seconds.

    Attributes:
        errors: Shape (sources,): its standard errors by the measurements that cause them; None: unknown.
        chance: The standard error that comes of simulating few epochs.
        deviation: How much simulated epochs differ; None: the time is a mean over all shuffles.
        ranks: The time by how batches are dealt; None of batches that are known one by one.
    """

    seconds: float
    errors: FloatArray | None = None
    chance: float = 0.0
    deviation: float | None = None
    ranks: RankTimes | None = None

    @classmethod
    def simulated(
        cls,
        times: FloatArray,
        shapes: EpochShapes,
        step_seconds: StepTimeFunction,
        scale: float = 1.0,
    ) -> EpochTime:
        """Return the mean time of simulated epochs; `shapes` are those of one, and stand for `scale` times as many."""
        seconds = float(times.mean())
        spread = float(times.std(ddof=1))
        return cls(
            seconds=seconds,
            errors=shape_errors(step_seconds, shapes, seconds),
            chance=spread / math.sqrt(times.size),
            # The batches that an epoch has beyond those that were simulated are independent of them.
            deviation=spread / math.sqrt(scale),
        )

    @property
    def standard_error(self) -> float | None:
        """The standard error of the time, in seconds; None if it is not known."""
        if self.errors is None:
            return None
        return float(np.hypot(np.linalg.norm(self.errors), self.chance))

    def fields(self) -> dict[str, float | None]:
        """Return the fields of a row that hold it."""
        return {
            "estimated_epoch_seconds": self.seconds,
            "estimated_epoch_error_seconds": self.standard_error,
            "epoch_seconds_deviation": self.deviation,
        }


def time_errors(
    step_seconds: StepTimeFunction,
    shapes: EpochShapes,
    counts: FloatArray,
    seconds: float,
) -> FloatArray | None:
    """Return the errors of the time of an epoch with so many batches of each shape, whose steps take `seconds`.

    They are of first order in those of the measured step times; None if `step_seconds` knows no errors.
    """
    if not isinstance(step_seconds, StepTimes):
        return None
    sizes = shapes.batch_sizes.astype(np.float64)
    return seconds * step_seconds.errors(sizes, shapes.lengths, shapes.targets, counts)


def shape_errors(
    step_seconds: StepTimeFunction, shapes: EpochShapes, seconds: float
) -> FloatArray | None:
    """Return the errors of the time of an epoch with these batches; some of them stand for all.

    On several ranks their waiting is taken to grow as the time does.
    """
    by_length = np.argsort(shapes.lengths, kind="stable")
    some = np.linspace(0, by_length.size - 1, _REPRESENTATIVES).astype(np.int64)
    chosen = shapes.chosen(by_length[some])
    return time_errors(step_seconds, chosen, np.ones(some.size), seconds)


def with_equals(timed: Sequence[tuple[RowT, EpochTime | None]]) -> list[RowT]:
    """Return the rows, each marked as equal to the fastest one or not."""
    equal = equal_to_best([time for _, time in timed])
    return [
        structs.replace(row, equal_to_best=same)
        for (row, _), same in zip(timed, equal, strict=True)
    ]


def equal_to_best(times: Sequence[EpochTime | None]) -> list[bool | None]:
    """Return which times count as equal to the least: they differ by at most two standard errors of the difference.

    Errors that both have in common cancel: the difference's is √Σ (error_a,p - error_b,p)², to which those of
    simulating few epochs are added. None for each if any time or its errors are unknown.
    """
    known = [time for time in times if time is not None and time.errors is not None]
    if not known or len(known) < len(times):
        return [None] * len(times)
    fastest = min(known, key=lambda time: time.seconds)
    equal: list[bool | None] = []
    for time in known:
        apart = np.subtract(time.errors, fastest.errors)  # type: ignore[arg-type]
        error = float(np.linalg.norm([*apart, time.chance, fastest.chance]))
        equal.append(time.seconds - fastest.seconds <= _WITHIN_ERRORS * error)
    return equal
