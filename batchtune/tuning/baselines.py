"""The baselines of a sweep: fixed batch sizes, and the bound that no bucket table can beat."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from batchtune.batching.epochs import EpochShapes
from batchtune.batching.layout import Dealing, lay_out
from batchtune.batching.table import BucketTable, Limits
from batchtune.lengths import FloatArray
from batchtune.results import Baseline, LowerBound, Row
from batchtune.tuning.epoch_cost import EpochCost, Pricing


def fixed_baselines(pricing: Pricing, limits: Limits) -> list[Baseline]:
    """Return the costs of the largest fixed batch size that fits the longest examples: shuffled, and sorted by length.

    On several ranks every rank has as many batches as any other, as for the rows: where their number is no multiple
    of the ranks, the first are split in two until it is. All examples are of one bucket, so these are the batches
    of ranks that take them of the same bucket, too, but for how what fills no batch on each is cut.
    The frontier decides what fits, without one max_batch_length.
    """
    lengths = pricing.lengths
    longest = lengths.histogram.lengths[-1:]
    table = BucketTable(longest, limits.batch_sizes(longest, limits.sizings[-1]))
    layout = lay_out(np.array([lengths.count]), table.batch_sizes, Dealing(world_size=pricing.ranks.world_size))
    targets = None if lengths.targets is None else np.maximum.reduceat(lengths.targets, layout.starts)
    in_order = EpochShapes(layout.batch_sizes, lengths.values[layout.starts], targets, layout.buckets)

    def baseline(name: str, cost: EpochCost) -> Baseline:
        return Baseline(
            name=name,
            batch_size=int(table.batch_sizes[0]),
            batches=cost.tally.batches,
            padded_length=cost.padded_length,
            padding_ratio=pricing.padding_ratio(cost.padded_length),
            estimated_epoch_seconds=cost.seconds,
        )

    independent = replace(pricing, ranks=replace(pricing.ranks, same_bucket=False))
    return [
        baseline("fixed-random", independent.of_table(table)),
        baseline("fixed-sorted", pricing.of_shapes([in_order])),
    ]


def lower_bound(pricing: Pricing, limits: Limits, found: Sequence[Row | Baseline]) -> LowerBound:
    """Return the bound that no bucket table can beat under these limits.

    An example takes at least the share of a batch that it would take among examples of its own length. Where
    a longer example takes a smaller share (a frontier need not be monotone), it takes that of the longer one.
    Every rank has as many batches as any other, and none ever waits.
    The time per example is taken to be least in a batch of the largest size, its half, its quarter and so on; and the
    epoch's is no higher than any that was found, as measured step times need not be that regular.
    """
    histogram, ranks, step_seconds = pricing.lengths.histogram, pricing.ranks.world_size, pricing.step_seconds
    sizes = [limits.batch_sizes(histogram.lengths, sizing) for sizing in limits.sizings]
    whole = np.max(sizes, axis=0).astype(np.float64)
    # A batch can't be filled better than to max_batch_length exactly; whole examples reach that only by luck.
    capacity = np.maximum(whole, limits.max_batch_length / histogram.lengths)
    if limits.max_batch_size is not None:
        capacity = np.minimum(capacity, limits.max_batch_size)
    shares = float(np.sum(histogram.counts / _greatest_from_here_on(capacity)))
    seconds = [other.estimated_epoch_seconds for other in found if other.estimated_epoch_seconds is not None]
    if step_seconds is not None:
        size, targets = _greatest_from_here_on(whole), pricing.lengths.targets
        if targets is not None:  # a batch's longest is at least the mean of its examples' targets
            starts = np.concatenate(([0], np.cumsum(histogram.counts[::-1])[:-1]))
            targets = np.add.reduceat(targets, starts)[::-1] / histogram.counts
        least: FloatArray = np.full(size.shape, np.inf)
        while True:
            given = (size, histogram.lengths) if targets is None else (size, histogram.lengths, targets)
            least = np.minimum(least, np.asarray(step_seconds(*given), dtype=np.float64) / size)
            if (size == 1).all():
                break
            size = np.maximum(1.0, np.floor(size / 2))
        seconds.append(float(np.sum(histogram.counts * -_greatest_from_here_on(-least))) / ranks)
    return LowerBound(
        # Rounding must not make it one too many.
        batches=ranks * max(1, math.ceil(shares / ranks * (1 - 1e-12))),
        padded_length=pricing.total,
        estimated_epoch_seconds=min(seconds, default=None),
    )


def _greatest_from_here_on(values: FloatArray) -> FloatArray:
    return cast(FloatArray, np.maximum.accumulate(values[::-1])[::-1])
