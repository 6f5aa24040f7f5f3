"""How random batches are: how often the same examples meet, and how alike the lengths of those that meet are.

Two examples of one batch are mates. With every kind of batching, in buckets or in pools, both questions have an answer,
so that all can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from batchtune.batching.epochs import Cut
from batchtune.batching.layout import Layout, Tally
from batchtune.batching.table import BucketTable
from batchtune.lengths import FloatArray, Histogram, IntArray

# Pairs are counted in batches that hold about so many examples together, evenly taken.
_COUNTED = 1 << 20


@dataclass(frozen=True, slots=True)
class Mates:
    """What is expected of two examples of one batch.

    Attributes:
        again: The probability that they are in one batch again in the next epoch; 0 where all batches hold one example.
        correlation: Of the length of an example and that of a mate, each drawn uniformly; None where all lengths, or no
            mates, are alike.
    """

    again: float
    correlation: float | None


def mates_in_buckets(histogram: Histogram, table: BucketTable, tally: Tally) -> Mates:
    """Return what is expected of mates in a table's batches, exactly.

    A batch is a uniformly drawn subset of its bucket. So of the pairs of bucket b, p_b = Σ B(B - 1) / 2 are mates, each
    of its n_b(n_b - 1) / 2 pairs as likely as any other: they meet again with the ratio of both.
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
    """Return what was seen of mates in at least two epochs; `lengths`, shape (examples,), by index of the example."""
    again = [_met_again(first, second) for first, second in pairwise(cuts)]
    mean, products, examples = float(lengths.mean()), [], []
    for cut in cuts:
        some = _counted(cut.layout)
        sizes = cut.layout.batch_sizes[some].astype(np.float64)
        centred: FloatArray = lengths[cut.examples[_positions(cut.layout, some)]] - mean
        edges = np.concatenate(([0], np.cumsum(cut.layout.batch_sizes[some], dtype=np.int64)))
        sums, squares = (_sums(centred**power, edges) for power in (1, 2))
        products.append((sums**2 - squares) / np.maximum(sizes * (sizes - 1), 1.0))
        examples.append(np.where(sizes > 1, sizes, 0))
    correlation = _correlation(np.concatenate(products), np.concatenate(examples), float(lengths.var()))
    return Mates(float(np.mean(again)), correlation)


def again_at_random(layout: Layout) -> float:
    """Return how often mates met again if those of each example were drawn from all others, as many as it has."""
    sizes = layout.batch_sizes.astype(np.float64)
    mates = sizes * (sizes - 1)
    return float(np.sum(mates * (sizes - 1)) / (mates.sum() * (layout.count - 1))) if mates.any() else 0.0


def _met_again(first: Cut, second: Cut) -> float:
    """The share of the pairs of one epoch's batches that are in one batch of the other, too."""
    batches = second.layout.starts.size
    batch_of = np.arange(batches, batches + second.layout.count)  # an example that is left out meets nobody
    for_each = _positions(second.layout, np.arange(batches))
    batch_of[second.examples[for_each]] = np.repeat(np.arange(batches), second.layout.batch_sizes)
    layout, some = first.layout, _counted(first.layout)
    sizes = layout.batch_sizes[some].astype(np.float64)
    keys = np.repeat(some, layout.batch_sizes[some]) * (batches + second.layout.count)
    keys += batch_of[first.examples[_positions(layout, some)]]
    _, met = np.unique(keys, return_counts=True)
    mates = float(np.sum(sizes * (sizes - 1)))
    return float(np.sum(met * (met - 1.0))) / mates if mates else 0.0


def _counted(layout: Layout) -> IntArray:
    """Return the batches in which pairs are counted."""
    return np.arange(0, layout.starts.size, max(1, layout.count // _COUNTED))


def _positions(layout: Layout, batches: IntArray) -> IntArray:
    """The positions of some batches' examples, batch after batch."""
    sizes = layout.batch_sizes[batches].astype(np.int64)
    ends = np.cumsum(sizes)
    return np.repeat(layout.starts[batches] - (ends - sizes), sizes) + np.arange(int(sizes.sum()))


def _sums(values: FloatArray, edges: IntArray) -> FloatArray:
    """The sums of the values between each edge and the next."""
    return np.diff(np.concatenate(([0.0], np.cumsum(values)))[edges])


def _correlation(products: FloatArray, examples: FloatArray, variance: float) -> float | None:
    """The mean product of mates' deviations, over examples that have mates, as a part of the variance."""
    if not examples.sum() or not variance > 0:
        return None
    return float(np.clip(np.sum(products * examples) / examples.sum() / variance, -1.0, 1.0))
