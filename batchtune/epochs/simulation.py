"""Simulates epochs in pools, and in Transformers' length-grouped batches: their shapes, and how random pools are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from batchtune.epochs import batch_order
from batchtune.epochs.batch_order import Drawing, EpochShapes
from batchtune.epochs.batchers import Batching, PoolBatcher
from batchtune.epochs.layout import Dealing
from batchtune.epochs.length_grouped import length_grouped, megabatch_size
from batchtune.epochs.measured_costs import StepSeconds
from batchtune.epochs.randomness import Mates, effective_buckets, mates_in_cuts
from batchtune.epochs.ranks import Ranks
from batchtune.epochs.table import BucketTable
from batchtune.lengths import FloatArray, Lengths
from batchtune.results import RankTimes

# At least this many examples (for each rank), and pools, stand for more: an epoch's time is then known to 0.1%.
_EXAMPLES = 1 << 17
_OF_A_RANK = 1 << 14
_POOLS = 4
# Simulate up to 8 epochs of few examples, until this many were batched; with a batch overhead that takes longer.
_MOST_EPOCHS = 8
_FILLED = 1 << 18
_CUT = 1 << 16
# Epochs of more examples differ so little that two are enough.
_MANY = 1 << 18
# In pools of more batches, cutting for the least cost gains next to nothing.
_MOST_BATCHES = 40


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedEpochs:
    """Some epochs of a data set, or of examples that stand for it.

    Attributes:
        scale: The examples of the data set / those that were batched.
        shapes: The batches of each epoch.
        mates: How random they are, for the whole data set.
        effective_buckets: How often mates meet again, compared with batches drawn from all examples.
        repeated_examples: How many an epoch deals twice, on average.
    """

    scale: float
    shapes: list[EpochShapes]
    mates: Mates
    effective_buckets: float
    repeated_examples: float

    def seconds(self, step_seconds: StepSeconds, ranks: Ranks) -> FloatArray:
        """Return the time of each epoch, shape (epochs,), as ranks take the batches in their order."""
        return np.array([seconds_in_order(shapes, step_seconds, ranks) for shapes in self.shapes])


def _sample(lengths: Lengths, pool_size: int, pools: int) -> Lengths:
    """Return the examples of so many pools, evenly taken in order of length: the middle one of as many neighbours."""
    in_all = -(-lengths.count // pool_size)
    if in_all <= pools:
        return lengths
    return _evenly(lengths, lengths.count * pools // in_all)  # so that pools are as large as those of all examples


def _evenly(lengths: Lengths, taken: int) -> Lengths:
    """Return so many examples, evenly taken in order of length."""
    if taken == lengths.count:
        return lengths
    chosen = (2 * np.arange(taken) + 1) * lengths.count // (2 * taken)
    targets = None if lengths.targets is None else lengths.targets[chosen]
    return Lengths.of(lengths.values[chosen], targets, unit=lengths.unit)


def simulate_epochs(batching: Batching, lengths: Lengths, dealing: Dealing, seed: int) -> SimulatedEpochs:
    """Simulate the sampler's first epochs with this seed, by its own steps.

    If some examples stand for many, batches are the same but for chance, as the pools are as large; only two examples
    share a pool more often, by a known ratio.
    """
    assert batching.pool_size is not None
    examples = max(_EXAMPLES, _OF_A_RANK * dealing.world_size)
    sample = _sample(lengths, batching.pool_size, max(_POOLS, -(-examples // batching.pool_size)))
    scale = lengths.count / sample.count
    batcher = PoolBatcher(sample.values, batching)
    number = _epochs_of(sample, _FILLED if batching.batch_overhead is None else _CUT)
    cuts = batcher.first_cuts(seed, dealing, min(number, 3) if scale == 1 else number, scale)
    for epoch in range(len(cuts), number):
        cuts.append(batcher.equal_cut(Drawing(seed=seed, epoch=epoch), dealing))
    shapes = []
    for epoch, cut in enumerate(cuts):
        shapes.append(batch_order.simulate(cut, Drawing(seed=seed, epoch=epoch), sample.values, sample.targets))
    mates = mates_in_cuts(cuts, sample.values)
    shares = [_share_of_pool(batching, count) for count in (lengths.count, sample.count)]
    return SimulatedEpochs(
        scale=scale,
        shapes=shapes,
        mates=replace(mates, again=mates.again * shares[0] / shares[1]),
        effective_buckets=effective_buckets(mates.again, cuts[0].layout),
        repeated_examples=float(np.mean([cut.layout.repeated_examples for cut in cuts])),
    )


@dataclass(frozen=True, slots=True)
class DealtTimes:
    """The time of an epoch with a table over several ranks, by how batches are dealt.

    Attributes:
        ranks: The means of simulated epochs.
        standard_error: Of the time as the ranks take batches, in seconds.
    """

    ranks: RankTimes
    standard_error: float


def dealt_times(table: BucketTable, lengths: Lengths, step_seconds: StepSeconds, ranks: Ranks, seed: int) -> DealtTimes:
    """Simulate the sampler's batches of each rank; a step lasts as long as the slowest rank's batch."""
    sample = _evenly(lengths, min(lengths.count, _MANY))
    scale = lengths.count / sample.count
    batcher = Batching(table).batcher(sample.values)
    drawings = [Drawing(seed=seed, epoch=epoch) for epoch in range(_epochs_of(sample, _MANY))]
    seconds = {}
    without_waiting = 0.0
    for same_bucket in (True, False):
        dealt = replace(ranks, same_bucket=same_bucket)
        cuts = [batcher.cut(drawing, dealt.dealing) for drawing in drawings]
        simulated = [
            batch_order.simulate(cut, drawing, sample.values, sample.targets)
            for cut, drawing in zip(cuts, drawings, strict=True)
        ]
        seconds[same_bucket] = scale * np.array([seconds_in_order(shapes, step_seconds, dealt) for shapes in simulated])
        all_steps = float(np.sum(step_seconds(*shapes_of(simulated))))
        without_waiting = scale * all_steps / len(drawings) / ranks.world_size
    times = RankTimes(
        without_waiting_epoch_seconds=without_waiting,
        independent_epoch_seconds=float(seconds[False].mean()),
        same_bucket_epoch_seconds=float(seconds[True].mean()),
    )
    deviation = float(seconds[ranks.same_bucket].std(ddof=1))
    return DealtTimes(times, deviation / math.sqrt(len(drawings)))


def simulate_length_grouped(
    lengths: Lengths, batch_size: int, ranks: Ranks, seed: int
) -> tuple[float, list[EpochShapes]]:
    """Simulate epochs of Transformers' length-grouped batches; return all examples / those that were batched, too.

    Ranks take batches in turn. The last ones are completed with examples from the beginning, as Accelerate does, so
    that each rank has as many.
    """
    grouped_size = batch_size * ranks.accumulate  # the Trainer groups the batches of a whole step
    megabatch = megabatch_size(lengths.count, grouped_size)
    sample = _sample(lengths, megabatch, max(_POOLS, -(-_EXAMPLES // megabatch)))
    completed = sample.count
    if ranks.world_size > 1:
        step = batch_size * ranks.world_size
        completed = -(-sample.count // step) * step
    starts = np.arange(0, completed, batch_size)
    sizes = np.diff(starts, append=completed)
    shapes = []
    for epoch in range(_epochs_of(sample)):
        shuffled = np.random.default_rng([seed, epoch]).permutation(sample.count)
        order = np.resize(length_grouped(sample.values, grouped_size, shuffled), completed)
        targets = None if sample.targets is None else np.maximum.reduceat(sample.targets[order], starts)
        longest = np.maximum.reduceat(sample.values[order], starts)
        shapes.append(EpochShapes(sizes, longest, targets, np.zeros(sizes.size, dtype=np.int64)))
    return lengths.count / sample.count, shapes


def _epochs_of(sample: Lengths, in_all: int = _FILLED) -> int:
    """Return how many epochs to simulate, to batch so many examples."""
    if sample.count <= _MANY:
        return int(np.clip(in_all // sample.count, 3, _MOST_EPOCHS))
    return 2


def _share_of_pool(batching: Batching, count: int) -> float:
    """Return the probability that a second example is in the pool of a first one."""
    assert batching.pool_size is not None
    each = count / -(-count // batching.pool_size)
    if each > 1:
        return (each - 1) / (count - 1)
    return 1.0


def seconds_in_order(shapes: EpochShapes, step_seconds: StepSeconds, ranks: Ranks) -> float:
    """Return the time of an epoch's batches, which ranks take in turn, in their order."""
    seconds = np.zeros(ranks.steps(len(shapes)) * ranks.world_size * ranks.accumulate)
    seconds[: len(shapes)] = step_seconds(*shapes_of([shapes]))
    return float(seconds.reshape(-1, ranks.accumulate, ranks.world_size).sum(axis=1).max(axis=1).sum())


def shapes_of(epochs: Sequence[EpochShapes]) -> tuple[FloatArray, ...]:
    """Return batch sizes, lengths, and targets if any, of all batches of some epochs."""
    sizes = np.concatenate([shapes.batch_sizes for shapes in epochs]).astype(np.float64)
    lengths = np.concatenate([shapes.lengths for shapes in epochs])
    targets = [shapes.targets for shapes in epochs if shapes.targets is not None]
    if targets:
        return sizes, lengths, np.concatenate(targets)
    return sizes, lengths


def with_overhead(batching: Batching, filled: SimulatedEpochs, step_seconds: StepSeconds) -> Batching | None:
    """Return the pools with a batch overhead; None if cutting them for the least cost can gain next to nothing.

    The overhead is that of the straight line through the times of an epoch's steps by their padded lengths.
    """
    assert batching.pool_size is not None
    shapes = filled.shapes[0]
    pools = -(-int(shapes.batch_sizes.sum()) // batching.pool_size)
    padded = shapes.batch_sizes * shapes.lengths
    if len(shapes) > _MOST_BATCHES * pools or np.ptp(padded) == 0:
        return None
    each, fixed = np.polyfit(padded, np.asarray(step_seconds(*shapes_of([shapes]))), 1)
    if not (each > 0 and fixed > 0):
        return None
    return replace(batching, batch_overhead=float(f"{fixed / each:.3g}"))
