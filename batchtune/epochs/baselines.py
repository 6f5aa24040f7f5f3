"""Fixed batch sizes and a lower bound, which the rows of a sweep are compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from batchtune.epochs.pricing import Pricing
from batchtune.epochs.shares import greatest_from_here_on
from batchtune.epochs.simulation import simulate_length_grouped, simulate_sorted
from batchtune.epochs.table import BucketTable, Limits
from batchtune.results import Baseline, LowerBound, Row


def fixed_baselines(
    pricing: Pricing, limits: Limits, fewest: int = 1
) -> list[Baseline]:
    """Return the costs of the largest fixed batch size that fits the longest examples and makes `fewest` batches.

    The examples are shuffled, sorted by length, or grouped as Transformers' `group_by_length` does. Every rank has as
    many batches, as for the rows: the first are split in two until that is so. All examples are of one bucket, so the
    batches are also those of ranks that take the same bucket, but for the cut of the last ones. The frontier decides
    what fits, without one max_batch_length.
    """
    lengths = pricing.lengths
    longest = lengths.histogram.lengths[-1:]
    size = int(limits.largest_sizes(longest)[0])
    if fewest > 1:
        size = max(1, min(size, (lengths.count - 1) // (fewest - 1)))
    table = BucketTable(longest, np.array([size]))
    independent = replace(pricing, dealing=replace(pricing.dealing, same_bucket=False))
    shuffled = independent.of_table("fixed", "length", 1, table).row
    in_order = simulate_sorted(lengths, size, pricing.dealing)
    grouped = simulate_length_grouped(lengths, size, pricing.dealing, pricing.seed)
    costs = {
        "fixed-random": (shuffled.padded_length, shuffled.estimated_epoch_seconds),
        "fixed-sorted": pricing.mean_cost(*in_order),
        "length-grouped": pricing.mean_cost(*grouped),
    }
    deviations = {"fixed-random": shuffled.step_tokens_deviation}
    return [
        Baseline(
            name=name,
            batch_size=size,
            batches=shuffled.batches,
            padded_length=padded_length,
            padding_ratio=pricing.padding_ratio(padded_length),
            estimated_epoch_seconds=seconds,
            steps=shuffled.steps,
            step_tokens_deviation=deviations.get(name),
        )
        for name, (padded_length, seconds) in costs.items()
    ]


def lower_bound(
    pricing: Pricing,
    limits: Limits,
    compared: Sequence[Row | Baseline],
    fewest: int = 1,
) -> LowerBound:
    """Return the bound that no bucket table can beat under these limits.

    An example takes at least the share of a batch that it would take among examples of its own length, or of a longer
    example if that is smaller (a frontier need not be monotone). Every rank has as many batches, and none ever waits.
    The time per example is taken to be least in a batch of the largest size, its half, its quarter and so on; and the
    epoch's is no higher than any of those `compared`, as measured step times need not be that regular. At least
    `fewest` batches are asked for.
    """
    histogram = pricing.lengths.histogram
    ranks = pricing.dealing.world_size
    sizes = [limits.batch_sizes(histogram.lengths, sizing) for sizing in limits.sizings]
    whole = np.max(sizes, axis=0).astype(np.float64)
    # A batch can't be filled better than to max_batch_length exactly; whole examples reach that only by luck.
    capacity = np.maximum(whole, limits.max_batch_length / histogram.lengths)
    if limits.max_batch_size is not None:
        capacity = np.minimum(capacity, limits.max_batch_size)
    shares = float(np.sum(histogram.counts / greatest_from_here_on(capacity)))
    seconds = [
        other.estimated_epoch_seconds
        for other in compared
        if other.estimated_epoch_seconds is not None
    ]
    if pricing.step_seconds is not None:
        largest = greatest_from_here_on(whole)
        halvings = np.arange(np.ceil(np.log2(largest.max())) + 1)[:, np.newaxis]
        size = np.maximum(1.0, np.floor(largest / 2**halvings))
        shapes = [size, np.broadcast_to(histogram.lengths, size.shape)]
        targets = pricing.targets
        # A batch's longest is at least the mean of its examples' targets.
        if targets is not None:
            shapes.append(np.broadcast_to(targets.means, size.shape))
        lowest = np.min(pricing.step_seconds(*shapes) / size, axis=0)
        seconds.append(
            float(np.sum(histogram.counts * -greatest_from_here_on(-lowest))) / ranks
        )
    return LowerBound(
        # Rounding must not make it one too many.
        batches=ranks
        * max(-(-fewest // ranks), math.ceil(shares / ranks * (1 - 1e-12))),
        padded_length=pricing.total,
        estimated_epoch_seconds=min(seconds, default=None),
    )
