"""Simulates epochs: in pools, of a table on several ranks, in order of length, and grouped as by Transformers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from batchtune.epochs.batchers import Batching
from batchtune.epochs.cost_model import nonnegative
from batchtune.epochs.epoch_time import EpochTime
from batchtune.epochs.layout import (
    EpochBatches,
    EpochShapes,
    RankSplit,
    lay_out,
    shapes_of,
)
from batchtune.epochs.measured_costs import StepTimeFunction
from batchtune.epochs.randomness import (
    Mates,
    effective_buckets,
    mates_in_cuts,
    step_deviation,
    sums_between,
)
from batchtune.lengths import FloatArray, IntArray, Lengths
from batchtune.results import RankTimes

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
# Pools are cut for the least cost if that gains this much.
_LEAST_GAIN = 0.003
# More examples in order are represented by this many, evenly spaced.
MOST_SIMULATED = 1 << 24
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
    dealing: RankSplit
    seed: int
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

    @property
    def step_tokens_deviation(self) -> float:
        """The standard deviation of the true length of a step / its mean."""
        size = self.batching.pool_size
        if self.batching.accumulate is not None and size is not None:
            # Of so many random examples.
            values = self.lengths.values
            share = (values.size - size) / (size * max(1, values.size - 1))
            return float(values.std() / values.mean() * math.sqrt(share))
        cut = self.cuts[0]
        edges = np.concatenate(([0], np.cumsum(cut.layout.batch_sizes)))
        totals = sums_between(self.sample.values[cut.held()], edges)
        totals = totals.reshape(-1, self.dealing.together).sum(axis=1)
        numbers = np.full(totals.size, self.scale)
        return step_deviation(totals, 0.0, numbers, self.dealing)

    @cached_property
    def _mates_of_sample(self) -> Mates:
        return mates_in_cuts(self.cuts, self.sample.values)

    def seconds(self, step_seconds: StepTimeFunction) -> FloatArray:
        """Return the time of each epoch of the data set, shape (epochs,), as ranks take the batches in their order."""
        times = [
            shapes.epoch_seconds(step_seconds, self.dealing) for shapes in self.shapes
        ]
        return self.scale * np.array(times)

    def time(self, step_seconds: StepTimeFunction) -> EpochTime:
        """Return the time of an epoch of the data set, and that of several ranks by how batches are dealt."""
        dealing = self.dealing
        time = EpochTime.simulated(
            self.seconds(step_seconds), self.shapes[0], step_seconds, self.scale
        )
        if dealing.world_size == 1:
            return time
        other = replace(dealing, same_bucket=not dealing.same_bucket)
        dealt = simulate_epochs(self.batching, self.lengths, other, self.seed)
        by_same_bucket = {
            dealing.same_bucket: time.seconds,
            other.same_bucket: float(dealt.seconds(step_seconds).mean()),
        }
        in_turn = [shapes.seconds(step_seconds).sum() for shapes in self.shapes]
        all_steps = float(np.mean(in_turn)) * self.scale
        ranks = RankTimes(
            without_waiting_epoch_seconds=all_steps / dealing.world_size,
            independent_epoch_seconds=by_same_bucket[False],
            same_bucket_epoch_seconds=by_same_bucket[True],
        )
        return replace(time, ranks=ranks)

    def cheapest(self, step_seconds: StepTimeFunction) -> SimulatedEpochs:
        """Return epochs in pools, or steps, as they are, or cut for the least cost if that gains more than 0.3%."""
        costed = _with_costs(self, step_seconds)
        if costed is None:
            return self
        cheapest = simulate_epochs(costed, self.lengths, self.dealing, self.seed)
        filled_seconds = self.seconds(step_seconds).mean()
        if cheapest.seconds(step_seconds).mean() < filled_seconds * (1 - _LEAST_GAIN):
            return cheapest
        return self


def simulate_epochs(
    batching: Batching, lengths: Lengths, dealing: RankSplit, seed: int
) -> SimulatedEpochs:
    """Simulate the sampler's first epochs with this seed, by its own steps.

    If some examples stand for many, batches are the same but for chance, as pools are as large; only two examples
    share a pool more often, by a known ratio.
    """
    sample = lengths.evenly(_MANY)
    filled = _FILLED if batching.batch_overhead is None else _CUT
    if batching.uses_pools:
        examples = max(_EXAMPLES, _OF_A_RANK * dealing.world_size)
        pools = max(_POOLS, batching.pools_of(examples))
        if batching.accumulate is not None:
            pools = max(_LEAST_STEPS, batching.pools_of(_IN_STEPS))
            filled = _IN_STEPS
        sample = _of_pools(lengths, pools, batching.pools_of(lengths.count))
    number = _epochs_of(sample, filled)
    batcher = batching.batcher(sample.values)
    cuts = []
    shapes = []
    for drawing, cut in batcher.first_epochs(number, dealing, seed):
        cuts.append(cut)
        shapes.append(shapes_of(cut, drawing, sample))
    return SimulatedEpochs(batching, lengths, dealing, seed, sample, cuts, shapes)


def _with_costs(
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


def simulate_sorted(
    lengths: Lengths, batch_size: int, dealing: RankSplit
) -> tuple[list[EpochShapes], float]:
    """Simulate the epoch of batches in order of length; return all examples / those that were batched, too."""
    sample = lengths.evenly(MOST_SIMULATED)
    ranks = RankSplit(world_size=dealing.world_size)
    layout = lay_out(np.array([sample.count]), np.array([batch_size]), ranks)
    cut = EpochBatches(np.arange(sample.count), layout)
    shapes = cut.shapes(sample.values, sample.targets)
    return [shapes], lengths.count / sample.count


def simulate_length_grouped(
    lengths: Lengths, batch_size: int, dealing: RankSplit, seed: int
) -> tuple[list[EpochShapes], float]:
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
    return shapes, lengths.count / sample.count


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
