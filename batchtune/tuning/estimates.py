"""How long an epoch takes with a bucket table, by the time of one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from batchtune.batching.epochs import Dealing
from batchtune.batching.expectation import BatchCost, ExpectedBatches, expected_batches
from batchtune.batching.table import BucketTable
from batchtune.lengths import FloatArray, Lengths
from batchtune.tuning.targets import TypicalTargets

_SUPPORTS = 8192


class StepSeconds(Protocol):
    """(batch sizes, longest lengths, longest target lengths) → seconds of one training step, element by element.

    It is called without target lengths where the data set has none.
    """

    def __call__(
        self, batch_sizes: npt.ArrayLike, lengths: npt.ArrayLike, target_lengths: npt.ArrayLike | None = None, /
    ) -> FloatArray:
        """Seconds, of the shape that the arguments broadcast to."""


def estimated_epoch_seconds(
    lengths: Lengths, table: BucketTable, step_seconds: StepSeconds, *, drop_last: bool = False
) -> float:
    """The time of all of an epoch's training steps, on average over shuffles.

    Args:
        lengths: The data set.
        table: Its last boundary is at least the longest length.
        step_seconds: The time of one step.
        drop_last: Whether batches that are not full are left out.

    Raises:
        ValueError: The longest length is beyond the last boundary.
    """
    expected = expected_batches(lengths.histogram, table, Dealing(drop_last=drop_last))
    return epoch_seconds(expected, table, step_seconds, TypicalTargets.of(lengths))


def epoch_seconds(
    expected: ExpectedBatches, table: BucketTable, step_seconds: StepSeconds, targets: TypicalTargets | None
) -> float:
    """As `estimated_epoch_seconds`, of what is worked out already."""
    return expected.sum_of(epoch_batch_seconds(table, step_seconds, targets))


def epoch_batch_seconds(table: BucketTable, step_seconds: StepSeconds, targets: TypicalTargets | None) -> BatchCost:
    """The time of one step of the table's batches, by batch size and longest length."""
    below = np.concatenate(([0.0], table.boundaries[:-1]))

    def above(ends: FloatArray) -> FloatArray:
        return below[np.searchsorted(table.boundaries, ends)]

    return interpolated(batch_seconds(step_seconds, targets, above))


def interpolated(cost: BatchCost) -> BatchCost:
    """The same for many batches at once, in ascending order of length: linear between 8192 of them.

    They are evenly spaced, and stand on both sides wherever the batch size changes: between them only the length
    does, by so little that the cost is as good as linear in it.
    """

    def seconds(batch_sizes: FloatArray, lengths: FloatArray) -> FloatArray:
        if lengths.size <= _SUPPORTS:
            return np.asarray(cost(batch_sizes, lengths), dtype=np.float64)
        changes = np.flatnonzero(np.diff(batch_sizes)) + 1
        even = np.linspace(0, lengths.size - 1, _SUPPORTS).astype(np.int64)
        chosen = np.unique(np.concatenate((even, changes - 1, changes)))
        at = np.asarray(cost(batch_sizes[chosen], lengths[chosen]), dtype=np.float64)
        return np.interp(lengths, lengths[chosen], at)

    return seconds


def batch_seconds(
    step_seconds: StepSeconds, targets: TypicalTargets | None, above: Callable[[FloatArray], FloatArray] | None = None
) -> BatchCost:
    """The time of one step by batch size and longest length alone, with the target that is typical of such a batch.

    Args:
        step_seconds: The time of one step.
        targets: What is typical; None: the data set has no targets.
        above: Longest lengths → what all lengths of the batch are longer than; None: not known.
    """
    if targets is None:
        return lambda batch_sizes, lengths: step_seconds(batch_sizes, lengths)

    def seconds(batch_sizes: FloatArray, lengths: FloatArray) -> FloatArray:
        typical = targets(batch_sizes, lengths, None if above is None else above(lengths))
        return step_seconds(batch_sizes, lengths, typical)

    return seconds
