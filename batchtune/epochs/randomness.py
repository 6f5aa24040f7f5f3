"""How random batches are: how often the same two examples meet, and how alike in length those that meet are.

Two examples of one batch are mates. Both figures exist for buckets and pools, so that these can be compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from batchtune.epochs.expectation import ExpectedBatches
from batchtune.epochs.layout import EpochBatches, Layout, RankSplit
from batchtune.lengths import AnyArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Mates:
    """The figures of two examples of one batch."""

    again: float  # the probability that they meet again in the next epoch; 0 if all batches hold one example
    # Of their lengths; None if lengths do not vary, or nobody has a mate.
    correlation: float | None


def mates_in_buckets(expected: ExpectedBatches) -> Mates:
    """Return the figures of mates in a table's batches, exactly.

    A batch is a uniformly drawn subset of its bucket. So of the n_b(n_b - 1) / 2 pairs of bucket b, all equally likely,
    Σ B(B - 1) / 2 are mates: a pair meets again with the ratio of both.
    """
    histogram = expected.histogram
    tally = expected.tally
    counts = expected.counts.astype(np.float64)
    sizes = tally.batch_sizes.astype(np.float64)
    mates = np.bincount(
        tally.buckets, tally.numbers * sizes * (sizes - 1) / 2, counts.size
    )
    pairs = np.maximum(counts * (counts - 1) / 2, 1.0)
    if not mates.any():
        return Mates(0.0, None)
    again = float(np.sum(mates * np.minimum(mates / pairs, 1.0)) / mates.sum())
    centred = (
        histogram.lengths - float(histogram.cumulative_total[-1]) / histogram.count
    )
    sums = sums_between(histogram.counts * centred, expected.edges)
    squares = sums_between(histogram.counts * centred**2, expected.edges)
    mated = np.where(sizes > 1, tally.numbers * sizes, 0.0)
    with_mates = np.bincount(tally.buckets, mated, counts.size).astype(np.float64)
    return Mates(
        again,
        _correlation(
            (sums**2 - squares) / (2 * pairs), with_mates, squares.sum() / counts.sum()
        ),
    )


def step_deviation_in_buckets(expected: ExpectedBatches) -> float:
    """Return the standard deviation of the true length of whole steps / their mean, on average over shuffles.

    A batch is a uniformly drawn subset of its bucket, and the batches of a step are one of those of the epoch.
    """
    histogram = expected.histogram
    tally = expected.tally
    dealing = expected.dealing
    counts = np.maximum(expected.counts, 2)
    means = sums_between(histogram.counts * histogram.lengths, expected.edges) / counts
    squares = sums_between(histogram.counts * histogram.lengths**2, expected.edges)
    squares = squares / counts
    variances = np.maximum(squares - means**2, 0.0) / (counts - 1)
    buckets = tally.buckets
    sizes = tally.batch_sizes * dealing.together
    numbers = tally.numbers / dealing.together
    if counts.size == 1:
        # The last batch, which is smaller, ends a step that is no whole one.
        numbers = numbers * (sizes == sizes.max())
    within = sizes * np.maximum(counts[buckets] - sizes, 0) * variances[buckets]
    return step_deviation(sizes * means[buckets], within, numbers, dealing)


def step_deviation(
    totals: FloatArray,
    within: FloatArray | float,
    numbers: FloatArray,
    dealing: RankSplit,
) -> float:
    """Return the same by kinds of batches, or with `same_bucket` of all ranks' together.

    Of each kind, `totals` is the mean true length, `within` its variance, and `numbers` how many there are.
    """
    mean = np.average(totals, weights=numbers)
    variance = np.average((totals - mean) ** 2 + within, weights=numbers)
    each = dealing.world_size * dealing.accumulate // dealing.together
    count = numbers.sum()
    # Drawn without putting them back.
    variance *= max(0.0, count - each) / max(1.0, count - 1)
    return float(math.sqrt(variance / each) / mean)


def mates_in_cuts(cuts: list[EpochBatches], lengths: AnyArray) -> Mates:
    """Return the figures of mates over at least two epochs; `lengths`, shape (examples,), by index of the example."""
    # The last with the first: any two epochs tell as much.
    others = cuts[1:] + cuts[: len(cuts) > 2]
    again = [
        _met_again(first, second) for first, second in zip(cuts, others, strict=False)
    ]
    centred = lengths.astype(np.float64) - float(lengths.mean())
    products = []
    examples = []
    for cut in cuts:
        sizes = cut.layout.batch_sizes
        edges = np.concatenate(([0], np.cumsum(sizes)))
        held = centred[cut.held()]
        products.append(
            (sums_between(held, edges) ** 2 - sums_between(held**2, edges))
            / np.maximum(sizes * (sizes - 1), 1)
        )
        examples.append(np.where(sizes > 1, sizes, 0).astype(np.float64))
    correlation = _correlation(
        np.concatenate(products), np.concatenate(examples), float(lengths.var())
    )
    return Mates(float(np.mean(again)), correlation)


def effective_buckets(again: float, layout: Layout) -> float:
    """Return how often mates meet `again`, relative to batches of these sizes drawn from all examples; at least 1."""
    sizes = layout.batch_sizes.astype(np.float64)
    mates = sizes * (sizes - 1)
    if not mates.any():
        return 1.0
    at_random = float(np.sum(mates * (sizes - 1)) / (mates.sum() * (layout.count - 1)))
    return max(1.0, again / at_random)


def _met_again(first: EpochBatches, second: EpochBatches) -> float:
    """Return the share of the pairs of one epoch's batches that are in one batch of the other, too."""
    count = second.layout.count
    batches = second.layout.starts.size
    # An example that is left out meets nobody.
    batch_of = np.arange(batches, batches + count)
    batch_of[second.held()] = np.repeat(np.arange(batches), second.layout.batch_sizes)
    sizes = first.layout.batch_sizes
    keys = (
        np.repeat(np.arange(sizes.size), sizes) * (batches + count)
        + batch_of[first.held()]
    )
    _, met = np.unique(keys, return_counts=True)
    mates = float(np.sum(sizes * (sizes - 1.0)))
    if mates:
        return float(np.sum(met * (met - 1.0))) / mates
    return 0.0


def sums_between(values: FloatArray, edges: IntArray) -> FloatArray:
    """Return the sums of the values between each edge and the next."""
    return np.diff(np.concatenate(([0.0], np.cumsum(values)))[edges])


def _correlation(
    products: FloatArray, examples: FloatArray, variance: float
) -> float | None:
    """Return the mean product of mates' deviations, over examples that have mates, as a part of the variance."""
    if not examples.any() or not variance > 0:
        return None
    return float(np.clip(np.average(products, weights=examples) / variance, -1.0, 1.0))
