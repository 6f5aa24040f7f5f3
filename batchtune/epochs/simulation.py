"""Simulates epochs: in pools, of a table on several ranks, and in Transformers' length-grouped batches.

Also tells how random batches are: how often the same two examples meet, and how alike in length those that meet are.
Two examples of one batch are mates. Both figures exist for buckets and pools, so that these can be compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from batchtune.epochs.batchers import Batching
from batchtune.epochs.cost_model import nonnegative
from batchtune.epochs.expectation import Tally
from batchtune.epochs.layout import (
    EpochBatches,
    EpochShapes,
    Layout,
    RankSplit,
    shapes_of,
)
from batchtune.epochs.measured_costs import StepTimeFunction
from batchtune.epochs.table import BucketTable
from batchtune.lengths import AnyArray, FloatArray, Histogram, IntArray, Lengths

# At least this many examples (for each rank), and pools, stand for more: an epoch's time is then known to 0.1%.
_EXAMPLES = 1 << 17
_OF_A_RANK = 1 << 14
_POOLS = 4
# Cutting an optimizer step takes a millisecond: this many examples stand for all, in at least some steps.
_IN_STEPS = 1 << 13
_LEAST_STEPS = 16
# Simulate up to 8 epochs of few examples, until this many were batched; with a batch overhead that takes longer.
_MOST_EPOCHS = 8
_FILLED = 1 << 18
_CUT = 1 << 16
# Epochs of more examples differ so little that two are enough.
_MANY = 1 << 18
# In pools of more batches, cutting for the least cost gains next to nothing.
_MOST_BATCHES = 40
# As Transformers' length-grouped batches are sorted.
_MEGABATCHES = 50


@dataclass(frozen=True, eq=False)
class SimulatedEpochs:
    """Some epochs of a data set, or of a sample that stands for it.

    Attributes:
        lengths: The data set.
        sample: The examples that were batched.
        shapes: The batches of each epoch.
    """

    batching: Batching
    lengths: Lengths
    sample: Lengths
    cuts: list[EpochBatches]
    shapes: list[EpochShapes]

    @property
    def scale(self) -> float:
        """The examples of the data set / those that were batched."""
        return self.lengths.count / self.sample.count

    @property
    def repeated_examples(self) -> int:
        """How many an epoch of the data set deals twice, on average."""
        return round(
            self.scale
            * float(np.mean([cut.layout.repeated_examples for cut in self.cuts]))
        )

    @property
    def mates(self) -> Mates:
        """How random the batches of the data set are: in pools as large, two examples share one less often."""
        mates = self._mates_of_sample
        shares = [
            _share_of_pool(self.batching, lengths.count)
            for lengths in (self.lengths, self.sample)
        ]
        return replace(mates, again=mates.again * shares[0] / shares[1])

    @property
    def effective_buckets(self) -> float:
        """How often mates meet again, compared with batches drawn from all examples."""
        return effective_buckets(self._mates_of_sample.again, self.cuts[0].layout)

    def step_tokens_deviation(self, dealing: RankSplit) -> float:
        """Return the standard deviation of the true length of a step / its mean."""
        size = self.batching.pool_size
        if self.batching.accumulate is not None and size is not None:
            # Of so many random examples.
            values = self.lengths.values
            share = (values.size - size) / (size * max(1, values.size - 1))
            return float(values.std() / values.mean() * math.sqrt(share))
        cut = self.cuts[0]
        edges = np.concatenate(([0], np.cumsum(cut.layout.batch_sizes)))
        totals = _sums(self.sample.values[cut.held()], edges)
        totals = totals.reshape(-1, dealing.together).sum(axis=1)
        return step_deviation(totals, 0.0, np.full(totals.size, self.scale), dealing)

    @cached_property
    def _mates_of_sample(self) -> Mates:
        return mates_in_cuts(self.cuts, self.sample.values)

    def seconds(self, step_seconds: StepTimeFunction, dealing: RankSplit) -> FloatArray:
        """Return the time of each epoch of the data set, shape (epochs,), as ranks take the batches in their order."""
        times = [shapes.epoch_seconds(step_seconds, dealing) for shapes in self.shapes]
        return self.scale * np.array(times)


def simulate_epochs(
    batching: Batching, lengths: Lengths, dealing: RankSplit, seed: int
) -> SimulatedEpochs:
    """Simulate the sampler's first epochs with this seed, by its own steps.

    If some examples stand for many, batches are the same but for chance, as pools are as large; only two examples
    share a pool more often, by a known ratio.
    """
    sample = lengths.evenly(_MANY)
    if batching.uses_pools:
        examples = max(_EXAMPLES, _OF_A_RANK * dealing.world_size)
        pools = max(_POOLS, batching.pools_of(examples))
        if batching.accumulate is not None:
            pools = max(_LEAST_STEPS, batching.pools_of(_IN_STEPS))
        sample = _of_pools(lengths, pools, batching.pools_of(lengths.count))
    batcher = batching.batcher(sample.values)
    filled = _FILLED if batching.batch_overhead is None else _CUT
    if batching.accumulate is not None:
        filled = _IN_STEPS
    number = _epochs_of(sample, filled)
    cuts = []
    shapes = []
    for drawing, cut in batcher.first_epochs(number, dealing, seed):
        cuts.append(cut)
        shapes.append(shapes_of(cut, drawing, sample))
    return SimulatedEpochs(batching, lengths, sample, cuts, shapes)


def with_costs(
    filled: SimulatedEpochs, step_seconds: StepTimeFunction
) -> Batching | None:
    """Return the same batching with what batches cost beyond their padded length; None if that gains next to nothing.

    Of pools that is a batch overhead: that of the straight line through the times of an epoch's steps by their padded
    lengths. Of how many micro-batches optimizer steps are is fixed: there it is the cost of a pair of positions. Times
    are taken for a sum of a constant, the padded length, and its product with the length.
    """
    batching = filled.batching
    shapes = filled.shapes[0]
    padded = shapes.batch_sizes * shapes.lengths
    if batching.accumulate is not None:
        seconds = shapes.seconds(step_seconds)
        terms = [np.ones_like(padded), padded, padded * shapes.lengths]
        columns = np.stack(terms, axis=1) / seconds[:, np.newaxis]
        _, each, pair = nonnegative(columns, np.ones(seconds.size))
        if not (each > 0 and pair > 0):
            return None
        return replace(batching, pair_cost=float(f"{pair / each:.3g}"))
    pools = batching.pools_of(filled.sample.count)
    if len(shapes) > _MOST_BATCHES * pools or np.ptp(padded) == 0:
        return None
    each, fixed = np.polyfit(padded, shapes.seconds(step_seconds), 1)
    if not (each > 0 and fixed > 0):
        return None
    return replace(batching, batch_overhead=float(f"{fixed / each:.3g}"))


def simulate_length_grouped(
    lengths: Lengths, batch_size: int, dealing: RankSplit, seed: int
) -> tuple[float, list[EpochShapes]]:
    """Simulate epochs of Transformers' length-grouped batches; return all examples / those that were batched, too.

    Ranks take batches in turn. The last ones are completed with examples from the beginning, as Accelerate does, so
    that each rank has as many.
    """
    # The Trainer groups the batches of a whole step.
    grouped_size = batch_size * dealing.accumulate
    megabatch = megabatch_size(lengths.count, grouped_size)
    sample = _of_pools(
        lengths, max(_POOLS, -(-_EXAMPLES // megabatch)), -(-lengths.count // megabatch)
    )
    completed = sample.count
    if dealing.world_size > 1:
        step = batch_size * dealing.world_size
        completed = -(-sample.count // step) * step
    sizes = np.diff(np.arange(0, completed, batch_size), append=completed)
    shapes = []
    for epoch in range(_epochs_of(sample, _FILLED)):
        shuffled = np.random.default_rng([seed, epoch]).permutation(sample.count)
        order = np.resize(
            length_grouped(sample.values, grouped_size, shuffled), completed
        )
        cut = EpochBatches.in_row(order, sizes, sample.count)
        shapes.append(cut.shapes(sample.values, sample.targets))
    return lengths.count / sample.count, shapes


def megabatch_size(count: int, batch_size: int) -> int:
    """Return how many examples are sorted together: 50 batches, or a quarter of the data if that is less."""
    return batch_size * max(1, min(count // (batch_size * 4), _MEGABATCHES))


def length_grouped(
    lengths: FloatArray, batch_size: int, shuffled: IntArray
) -> IntArray:
    """Return the examples of an epoch in their order, from a random order of all; consecutive ones form batches.

    As `get_length_grouped_indices` of Transformers (5.23): each megabatch is sorted, the longest example first, and the
    longest of all comes first in the epoch. Both arrays have the shape (count,).
    """
    size = megabatch_size(lengths.size, batch_size)
    grouped: IntArray = shuffled.copy()
    for start in range(0, grouped.size, size):
        megabatch = shuffled[start : start + size]
        grouped[start : start + size] = megabatch[
            np.argsort(-lengths[megabatch], kind="stable")
        ]
    longest = size * int(np.argmax(lengths[grouped[::size]]))
    grouped[[0, longest]] = grouped[[longest, 0]]
    return grouped


def _of_pools(lengths: Lengths, pools: int, in_all: int) -> Lengths:
    """Return the examples of so many of all pools, as large as those of all examples."""
    return lengths.evenly(lengths.count * min(pools, in_all) // in_all)


def _epochs_of(sample: Lengths, in_all: int) -> int:
    """Return how many epochs to simulate, to batch so many examples."""
    if sample.count <= _MANY:
        return int(np.clip(in_all // sample.count, 3, _MOST_EPOCHS))
    return 2


def _share_of_pool(batching: Batching, count: int) -> float:
    """Return the probability that a second example is in the pool of a first one."""
    each = count / batching.pools_of(count)
    if each > 1:
        return (each - 1) / (count - 1)
    return 1.0


@dataclass(frozen=True, slots=True)
class Mates:
    """The figures of two examples of one batch."""

    again: float  # the probability that they meet again in the next epoch; 0 if all batches hold one example
    # Of their lengths; None if lengths do not vary, or nobody has a mate.
    correlation: float | None


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


def step_deviation_in_buckets(
    histogram: Histogram, table: BucketTable, tally: Tally, dealing: RankSplit
) -> float:
    """Return the standard deviation of the true length of whole steps / their mean, on average over shuffles.

    A batch is a uniformly drawn subset of its bucket, and the batches of a step are one of those of the epoch.
    """
    counts = np.maximum(table.counts(histogram), 2)
    edges = table.edges(histogram)
    means = _sums(histogram.counts * histogram.lengths, edges) / counts
    squares = _sums(histogram.counts * histogram.lengths**2, edges) / counts
    variances = np.maximum(squares - means**2, 0.0) / (counts - 1)
    buckets = tally.buckets
    sizes = tally.batch_sizes * dealing.together
    numbers = tally.numbers / dealing.together
    if table.num_buckets == 1:
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

    `totals`, their mean true length, `within`, its variance, and the `numbers` of them have the shape (kinds,).
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
