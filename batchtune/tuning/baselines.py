"""What a sweep is held against: fixed batch sizes, and the bound that no bucket table can beat."""

from __future__ import annotations

import math
from typing import cast

import numpy as np

from batchtune.batching.expectation import BatchCost, expected_batches
from batchtune.batching.limits import Limits
from batchtune.batching.samplers import count_batches
from batchtune.batching.table import BucketTable
from batchtune.lengths import FloatArray, Lengths
from batchtune.results import Baseline, LowerBound


def fixed_baselines(lengths: Lengths, limits: Limits, step_seconds: BatchCost | None) -> list[Baseline]:
    """Batches of a fixed size, the largest that fits the longest examples: shuffled, and sorted by length.

    Args:
        lengths: The data set.
        limits: The frontier decides where there is one, else max_batch_length.
        step_seconds: The step-time model, or None.
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
        shuffled_seconds = shuffled.sum_of(step_seconds)
        sorted_seconds = float(np.sum(step_seconds(sizes, heads)))
    return [
        baseline("fixed-random", shuffled.padded_length, shuffled_seconds),
        baseline("fixed-sorted", float(np.sum(sizes * heads)), sorted_seconds),
    ]


def lower_bound(lengths: Lengths, limits: Limits, step_seconds: BatchCost | None) -> LowerBound:
    """What no bucket table can beat under these limits.

    An example takes at least the share of a batch that it would take among examples of its own length. Where
    a longer example takes a smaller share (a frontier need not be monotone), it takes that of the longer one.

    Args:
        lengths: The data set.
        limits: All sizings count, whichever allows more.
        step_seconds: The step-time model, or None; the time per example must not rise with the batch size.
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
        sizes = _greatest_from_here_on(whole)
        each = np.asarray(step_seconds(sizes, histogram.lengths), dtype=np.float64) / sizes
        seconds = float(np.sum(histogram.counts * -_greatest_from_here_on(-each)))
    return LowerBound(
        batches=max(1, math.ceil(float(shares) * (1 - 1e-12))),  # rounding must not make it one too many
        padded_length=lengths.total,
        estimated_epoch_seconds=seconds,
    )


def _greatest_from_here_on(values: FloatArray) -> FloatArray:
    return cast(FloatArray, np.maximum.accumulate(values[::-1])[::-1])
