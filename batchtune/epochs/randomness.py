"""The randomness of batches: how often the same two examples meet, and how alike in length those that meet are.

Two examples of one batch are mates. Both figures exist for buckets and pools, so that these can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from batchtune.epochs.batch_order import Cut
from batchtune.epochs.layout import Layout, Tally, positions
from batchtune.epochs.table import BucketTable
from batchtune.lengths import FloatArray, Histogram, IntArray

# Pairs are counted in evenly spaced batches that together hold about this many examples.
_COUNTED = 1 << 20


@dataclass(frozen=True, slots=True)
class Mates:
    """The figures of two examples of one batch."""

    again: float  # the probability that they meet again in the next epoch; 0 if all batches hold one example
    correlation: float | None  # of their lengths; None if lengths do not vary, or nobody has a mate


def mates_in_buckets(histogram: Histogram, table: BucketTable, tally: Tally) -> Mates:
    """Return the figures of mates in a table's batches, exactly.

    A batch is a uniformly drawn subset of its bucket. So of the n_b(n_b - 1) / 2 pairs of bucket b, all equally likely,
    Σ B(B - 1) / 2 are mates: a pair meets again with the ratio of both.
    """
    counts = table.counts(histogram).astype(np.float64)
    sizes = np.where(tally.numbers > 0, tally.batch_sizes, 1).astype(np.float64)
    mates = np.sum(tally.numbers * sizes * (sizes - 1) / 2, axis=0)
    pairs = np.maximum(counts * (counts - 1) / 2, 1.0)
    together = float(mates.sum())
    again = float(np.sum(mates * np.minimum(mates / pairs, 1.0))) / together if together else 0.0
    ends = table.edges(histogram)
    centred = histogram.lengths - float(histogram.cumulative_total[-1]) / histogram.count
    sums, squares = (_sums(histogram.counts * centred**power, ends) for power in (1, 2))
    with_mates = np.sum(np.where(sizes > 1, tally.numbers * sizes, 0), axis=0)
    return Mates(
        again, _correlation((sums**2 - squares) / (2 * pairs), with_mates, float(squares.sum()) / counts.sum())
    )


def mates_in_cuts(cuts: list[Cut], lengths: npt.NDArray[Any]) -> Mates:
    """Return the figures of mates over at least two epochs; `lengths`, shape (examples,), by index of the example."""
    others = cuts[1:] + cuts[: len(cuts) > 2]  # the last with the first: any two epochs tell as much
    again = [_met_again(first, second) for first, second in zip(cuts, others, strict=False)]
    mean = float(lengths.mean())
    products = []
    examples = []
    for cut in cuts:
        counted = _counted(cut.layout)
        held = cut.layout.batch_sizes[counted]
        sizes = held.astype(np.float64)
        edges = np.concatenate(([0], np.cumsum(held, dtype=np.int64)))
        centred: FloatArray = lengths[cut.examples[positions(cut.layout.starts[counted], held)]] - mean
        sums, squares = (_sums(centred**power, edges) for power in (1, 2))
        products.append((sums**2 - squares) / np.maximum(sizes * (sizes - 1), 1.0))
        examples.append(np.where(sizes > 1, sizes, 0))
    correlation = _correlation(np.concatenate(products), np.concatenate(examples), float(lengths.var()))
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
    batches = second.layout.starts.size
    batch_of = np.arange(batches, batches + second.layout.count)  # an example that is left out meets nobody
    every = positions(second.layout.starts, second.layout.batch_sizes)
    batch_of[second.examples[every]] = np.repeat(np.arange(batches), second.layout.batch_sizes)
    counted = _counted(first.layout)
    held = first.layout.batch_sizes[counted]
    keys = np.repeat(counted, held) * (batches + second.layout.count)
    keys += batch_of[first.examples[positions(first.layout.starts[counted], held)]]
    _, met = np.unique(keys, return_counts=True)
    mates = float(np.sum(held * (held - 1.0)))
    if mates:
        return float(np.sum(met * (met - 1.0))) / mates
    return 0.0


def _counted(layout: Layout) -> IntArray:
    """Return the batches in which pairs are counted."""
    return np.arange(0, layout.starts.size, max(1, layout.count // _COUNTED))


def _sums(values: FloatArray, edges: IntArray) -> FloatArray:
    """Return the sums of the values between each edge and the next."""
    return np.diff(np.concatenate(([0.0], np.cumsum(values)))[edges])


def _correlation(products: FloatArray, examples: FloatArray, variance: float) -> float | None:
    """Return the mean product of mates' deviations, over examples that have mates, as a part of the variance."""
    if not examples.sum() or not variance > 0:
        return None
    return float(np.clip(np.sum(products * examples) / examples.sum() / variance, -1.0, 1.0))
