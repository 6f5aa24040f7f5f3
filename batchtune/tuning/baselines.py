"""What a sweep is held against: fixed batch sizes, and the bound that no bucket table can beat."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import numpy as np

from batchtune.batching import epochs
from batchtune.batching.epochs import Dealing, Layout
from batchtune.batching.expectation import expected_batches
from batchtune.batching.limits import Limits
from batchtune.batching.table import BucketTable
from batchtune.lengths import FloatArray, Lengths
from batchtune.results import Baseline, LowerBound, Row
from batchtune.tuning.estimates import StepSeconds
from batchtune.tuning.pricing import Pricing


def fixed_baselines(pricing: Pricing, limits: Limits) -> list[Baseline]:
    """Batches of a fixed size, the largest that fits the longest examples: shuffled, and sorted by length.

    On several ranks every rank has as many batches as any other, as for the rows: where their number is no multiple
    of the ranks, the first are split in two until it is. All examples are of one bucket, so these are the batches
    of ranks that take them of the same bucket, too, but for how what fills no batch on each is cut.

    Args:
        pricing: What an epoch costs.
        limits: The frontier decides where there is one, else max_batch_length.
    """
    lengths = pricing.lengths
    longest = lengths.histogram.lengths[-1:]
    table = BucketTable(longest, limits.batch_sizes(longest, limits.sizings[-1]))
    dealing = Dealing(world_size=pricing.ranks.world_size)
    alone = shuffled = expected_batches(lengths.histogram, table)
    if dealing.world_size > 1:
        shuffled = expected_batches(lengths.histogram, table, dealing)
    layout = epochs.lay_out(np.array([lengths.count]), table.batch_sizes, dealing)

    def baseline(name: str, padded_length: float, seconds: float | None) -> Baseline:
        return Baseline(
            name=name,
            batch_size=int(table.batch_sizes[0]),
            batches=shuffled.tally.batches,
            padded_length=padded_length,
            padding_ratio=pricing.padding_ratio(padded_length),
            estimated_epoch_seconds=seconds,
        )

    times = pricing.times(alone, table)
    return [
        baseline(
            "fixed-random",
            pricing.padded_length(shuffled),
            None if times is None else times.independent_epoch_seconds,
        ),
        baseline(
            "fixed-sorted",
            max(float(np.sum(layout.batch_sizes * lengths.values[layout.starts])), pricing.total),
            _sorted_epoch_seconds(pricing, layout),
        ),
    ]


def _sorted_epoch_seconds(pricing: Pricing, layout: Layout) -> float | None:
    """The time of an epoch whose batches come in order of length, dealt to the ranks in turn."""
    if pricing.step_seconds is None:
        return None
    lengths, ranks = pricing.lengths, pricing.ranks
    sizes, heads = layout.batch_sizes.astype(np.float64), lengths.values[layout.starts]
    if lengths.targets is None:
        seconds = pricing.step_seconds(sizes, heads)
    else:
        seconds = pricing.step_seconds(sizes, heads, np.maximum.reduceat(lengths.targets, layout.starts))
    group = ranks.world_size * ranks.accumulate
    steps = np.zeros(-(-sizes.size // group) * group)
    steps[: sizes.size] = seconds
    of_ranks = steps.reshape(-1, ranks.accumulate, ranks.world_size).sum(axis=1)
    return float(of_ranks.max(axis=1).sum())


def lower_bound(pricing: Pricing, limits: Limits) -> LowerBound:
    """What no bucket table can beat under these limits.

    An example takes at least the share of a batch that it would take among examples of its own length. Where
    a longer example takes a smaller share (a frontier need not be monotone), it takes that of the longer one.
    Every rank has as many batches as any other, and none ever waits.

    Args:
        pricing: What an epoch costs. The time per example is taken to be least in a batch of the largest size, its
            half, its quarter and so on.
        limits: All sizings count, whichever allows more.
    """
    lengths, histogram = pricing.lengths, pricing.lengths.histogram
    whole = limits.largest_batch_sizes(histogram.lengths).astype(np.float64)
    # A batch can't be filled better than to max_batch_length exactly; whole examples reach that only by luck.
    capacity = np.maximum(whole, limits.max_batch_length / histogram.lengths)
    if limits.max_batch_size is not None:
        capacity = np.minimum(capacity, limits.max_batch_size)
    shares = np.sum(histogram.counts / _greatest_from_here_on(capacity))
    seconds = None
    if pricing.step_seconds is not None:
        each = _least_seconds_each(
            _greatest_from_here_on(whole), histogram.lengths, _mean_targets(lengths), pricing.step_seconds
        )
        seconds = float(np.sum(histogram.counts * -_greatest_from_here_on(-each))) / pricing.ranks.world_size
    ranks = pricing.ranks.world_size
    return LowerBound(
        # Rounding must not make it one too many.
        batches=ranks * max(1, math.ceil(float(shares) / ranks * (1 - 1e-12))),
        padded_length=pricing.total,
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
