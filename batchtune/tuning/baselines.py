"""What a sweep is held against: fixed batch sizes, and the bound that no bucket table can beat."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import numpy as np

from batchtune.batching.expectation import expected_batches
from batchtune.batching.limits import Limits
from batchtune.batching.samplers import count_batches
from batchtune.batching.table import BucketTable
from batchtune.lengths import FloatArray, Lengths
from batchtune.results import Baseline, LowerBound, Row
from batchtune.tuning.estimates import StepSeconds, epoch_seconds
from batchtune.tuning.targets import TypicalTargets


def fixed_baselines(
    lengths: Lengths, limits: Limits, step_seconds: StepSeconds | None, targets: TypicalTargets | None = None
) -> list[Baseline]:
    """Batches of a fixed size, the largest that fits the longest examples: shuffled, and sorted by length.

    Args:
        lengths: The data set.
        limits: The frontier decides where there is one, else max_batch_length.
        step_seconds: The time of one step, or None.
        targets: Of the data set, where it has any.
    """
    longest = lengths.histogram.lengths[-1:]
    table = BucketTable(longest, limits.batch_sizes(longest, limits.sizings[-1]))
    shuffled = expected_batches(lengths.histogram, table)
    batch_size = int(table.batch_sizes[0])
    heads = lengths.values[::batch_size]
    sizes = np.full(heads.size, float(batch_size))
    sizes[-1] = lengths.count - batch_size * (heads.size - 1)

    def baseline(name: str, padded_length: float, seconds: float | None) -> Baseline:
        padded = max(padded_length, lengths.total)  # no less, whatever the rounding
        return Baseline(
            name=name,
            batch_size=batch_size,
            batches=count_batches(lengths.histogram, table),
            padded_length=padded,
            padding_ratio=(padded - lengths.total) / padded,
            estimated_epoch_seconds=seconds,
        )

    shuffled_seconds = sorted_seconds = None
    if step_seconds is not None:
        shuffled_seconds = epoch_seconds(shuffled, table, step_seconds, targets)
        if lengths.targets is None:
            sorted_seconds = float(np.sum(step_seconds(sizes, heads)))
        else:
            longest_targets = np.maximum.reduceat(lengths.targets, np.arange(0, lengths.count, batch_size))
            sorted_seconds = float(np.sum(step_seconds(sizes, heads, longest_targets)))
    return [
        baseline("fixed-random", shuffled.padded_length, shuffled_seconds),
        baseline("fixed-sorted", float(np.sum(sizes * heads)), sorted_seconds),
    ]


def lower_bound(lengths: Lengths, limits: Limits, step_seconds: StepSeconds | None) -> LowerBound:
    """What no bucket table can beat under these limits.

    An example takes at least the share of a batch that it would take among examples of its own length. Where
    a longer example takes a smaller share (a frontier need not be monotone), it takes that of the longer one.

    Args:
        lengths: The data set.
        limits: All sizings count, whichever allows more.
        step_seconds: The time of one step, or None. The time per example is taken to be least in a batch of the
            largest size, its half, its quarter and so on.
    """
    histogram = lengths.histogram
    whole = limits.largest_batch_sizes(histogram.lengths).astype(np.float64)
    # A batch can't be filled better than to max_batch_length exactly; whole examples reach that only by luck.
    capacity = np.maximum(whole, limits.max_batch_length / histogram.lengths)
    if limits.max_batch_size is not None:
        capacity = np.minimum(capacity, limits.max_batch_size)
    shares = np.sum(histogram.counts / _greatest_from_here_on(capacity))
    seconds = None
    if step_seconds is not None:
        each = _least_seconds_each(
            _greatest_from_here_on(whole), histogram.lengths, _mean_targets(lengths), step_seconds
        )
        seconds = float(np.sum(histogram.counts * -_greatest_from_here_on(-each)))
    return LowerBound(
        batches=max(1, math.ceil(float(shares) * (1 - 1e-12))),  # rounding must not make it one too many
        padded_length=lengths.total,
        estimated_epoch_seconds=seconds,
    )


def below_all(bound: LowerBound, found: Sequence[Row | Baseline]) -> LowerBound:
    """The bound, no higher than any time found: measured step times need not be as regular as it takes them to be."""
    seconds = [other.estimated_epoch_seconds for other in (bound, *found) if other.estimated_epoch_seconds is not None]
    return LowerBound(
        batches=bound.batches,
        padded_length=bound.padded_length,
        estimated_epoch_seconds=min(seconds, default=None),
    )


def _mean_targets(lengths: Lengths) -> FloatArray | None:
    """Of each distinct length: a batch's longest target is at least the mean of its examples' targets."""
    if lengths.targets is None:
        return None
    starts = np.concatenate(([0], np.cumsum(lengths.histogram.counts[::-1])[:-1]))
    sums = np.add.reduceat(lengths.targets, starts)[::-1]
    means: FloatArray = sums / lengths.histogram.counts
    return means


def _least_seconds_each(
    sizes: FloatArray, lengths: FloatArray, targets: FloatArray | None, step_seconds: StepSeconds
) -> FloatArray:
    """Shape (lengths,): the least time per example over batches of at most so many."""
    least: FloatArray = np.full(lengths.shape, np.inf)
    size = sizes
    while True:
        given = (size, lengths) if targets is None else (size, lengths, targets)
        least = np.minimum(least, np.asarray(step_seconds(*given), dtype=np.float64) / size)
        if (size == 1).all():
            return least
        size = np.maximum(1.0, np.floor(size / 2))


def _greatest_from_here_on(values: FloatArray) -> FloatArray:
    return cast(FloatArray, np.maximum.accumulate(values[::-1])[::-1])
