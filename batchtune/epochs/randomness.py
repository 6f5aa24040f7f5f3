"""The randomness of batches: how often the same two examples meet, and how alike in length those that meet are.

Two examples of one batch are mates. Both figures exist for buckets and pools, so that these can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from batchtune.epochs.batch_order import Cut
from batchtune.epochs.layout import Indices, Layout, Tally, positions
from batchtune.epochs.table import BucketTable
from batchtune.lengths import FloatArray, Histogram, IntArray


@dataclass(frozen=True, slots=True)
class Mates:
    """The figures of two examples of one batch."""

    again: float  # the probability that they meet again in the next epoch; 0 if all batches hold one example
    correlation: (
        float | None
    )  # of their lengths; None if lengths do not vary, or nobody has a mate


def mates_in_buckets(histogram: Histogram, table: BucketTable, tally: Tally) -> Mates:
    """Return the figures of mates in a table's batches, exactly.

    A batch is a uniformly drawn subset of its bucket. So of the n_b(n_b - 1) / 2 pairs of bucket b, all equally likely,
    Σ B(B - 1) / 2 are mates: a pair meets again with the ratio of both.
    """
    counts = table.counts(histogram).astype(np.float64)
    sizes = tally.batch_sizes.astype(np.float64)
    mates = np.bincount(
        tally.buckets, tally.numbers * sizes * (sizes - 1) / 2, counts.size
    )
    pairs = np.maximum(counts * (counts - 1) / 2, 1.0)
    if not mates.any():
        return Mates(0.0, None)
    again = float(np.sum(mates * np.minimum(mates / pairs, 1.0)) / mates.sum())
    edges = table.edges(histogram)
    centred = (
        histogram.lengths - float(histogram.cumulative_total[-1]) / histogram.count
    )
    sums = _sums(histogram.counts * centred, edges)
    squares = _sums(histogram.counts * centred**2, edges)
    mated = np.where(sizes > 1, tally.numbers * sizes, 0.0)
    with_mates = np.bincount(tally.buckets, mated, counts.size).astype(np.float64)
    return Mates(
        again,
        _correlation(
            (sums**2 - squares) / (2 * pairs), with_mates, squares.sum() / counts.sum()
        ),
    )


def mates_in_cuts(cuts: list[Cut], lengths: npt.NDArray[Any]) -> Mates:
    """Return the figures of mates over at least two epochs; `lengths`, shape (examples,), by index of the example."""
    others = (
        cuts[1:] + cuts[: len(cuts) > 2]
    )  # the last with the first: any two epochs tell as much
    again = [
        _met_again(first, second) for first, second in zip(cuts, others, strict=False)
    ]
    centred = lengths.astype(np.float64) - float(lengths.mean())
    products = []
    examples = []
    for cut in cuts:
        sizes = cut.layout.batch_sizes
        edges = np.concatenate(([0], np.cumsum(sizes)))
        held = centred[_batched(cut)]
        products.append(
            (_sums(held, edges) ** 2 - _sums(held**2, edges))
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


def _met_again(first: Cut, second: Cut) -> float:
    """Return the share of the pairs of one epoch's batches that are in one batch of the other, too."""
    count = second.layout.count
    batches = second.layout.starts.size
    batch_of = np.arange(
        batches, batches + count
    )  # an example that is left out meets nobody
    batch_of[_batched(second)] = np.repeat(
        np.arange(batches), second.layout.batch_sizes
    )
    sizes = first.layout.batch_sizes
    keys = (
        np.repeat(np.arange(sizes.size), sizes) * (batches + count)
        + batch_of[_batched(first)]
    )
    _, met = np.unique(keys, return_counts=True)
    mates = float(np.sum(sizes * (sizes - 1.0)))
    if mates:
        return float(np.sum(met * (met - 1.0))) / mates
    return 0.0


def _batched(cut: Cut) -> Indices:
    """Return the examples in batches, batch after batch."""
    return cut.examples[positions(cut.layout.starts, cut.layout.batch_sizes)]


def _sums(values: FloatArray, edges: IntArray) -> FloatArray:
    """Return the sums of the values between each edge and the next."""
    return np.diff(np.concatenate(([0.0], np.cumsum(values)))[edges])


def _correlation(
    products: FloatArray, examples: FloatArray, variance: float
) -> float | None:
    """Return the mean product of mates' deviations, over examples that have mates, as a part of the variance."""
    if not examples.any() or not variance > 0:
        return None
    return float(np.clip(np.average(products, weights=examples) / variance, -1.0, 1.0))
