"""Simulates epochs in pools, and in Transformers' length-grouped batches: their shapes, and how random pools are."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from batchtune.batching import epochs
from batchtune.batching.batchers import Batching
from batchtune.batching.epochs import Drawing, EpochShapes
from batchtune.batching.layout import ON_ONE_RANK, Dealing
from batchtune.batching.length_grouped import length_grouped, megabatch_size
from batchtune.batching.randomness import Mates, again_at_random, mates_in_cuts
from batchtune.lengths import FloatArray, Lengths
from batchtune.tuning.costs import StepSeconds
from batchtune.tuning.sweep_settings import Ranks

# At least this many examples, and pools, stand for more.
_EXAMPLES, _POOLS = 1 << 19, 4
# Simulate 2 to 8 epochs, until this many examples were batched.
_IN_ALL = 1 << 21
# Pools are cut for the least cost if that gains this much, as it can only in pools of few batches; a few pools tell.
_LEAST_GAIN = 0.003
_MOST_BATCHES = 60
_COMPARED_POOLS = 6


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
    taken = lengths.count * pools // in_all  # so that pools are as large as those of all examples
    chosen = (2 * np.arange(taken) + 1) * lengths.count // (2 * taken)
    targets = None if lengths.targets is None else lengths.targets[chosen]
    return Lengths.of(lengths.values[chosen], targets, unit=lengths.unit)


def simulate_epochs(batching: Batching, lengths: Lengths, dealing: Dealing, seed: int) -> SimulatedEpochs:
    """Simulate the first epochs with this seed, by the sampler's own steps.

    If some examples stand for many, batches are the same but for chance, as the pools are as large; only two examples
    share a pool more often, by a known ratio.
    """
    assert batching.pool_size is not None
    sample = _sample(lengths, batching.pool_size, max(_POOLS, -(-_EXAMPLES // batching.pool_size)))
    batcher, cuts, shapes = batching.batcher(sample.values), [], []
    for epoch in range(_epochs_of(sample)):
        drawing = Drawing(seed=seed, epoch=epoch)
        cuts.append(batcher.cut(drawing, dealing))
        shapes.append(epochs.simulate(cuts[-1], drawing, sample.values, sample.targets))
    mates, at_random = mates_in_cuts(cuts, sample.values), again_at_random(cuts[0].layout)
    shares = [_share_of_pool(batching, count) for count in (lengths.count, sample.count)]
    return SimulatedEpochs(
        scale=lengths.count / sample.count,
        shapes=shapes,
        mates=replace(mates, again=mates.again * shares[0] / shares[1]),
        effective_buckets=max(1.0, mates.again / at_random) if at_random else 1.0,
        repeated_examples=float(np.mean([cut.layout.repeated_examples for cut in cuts])),
    )


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


def _epochs_of(sample: Lengths) -> int:
    return int(np.clip(round(_IN_ALL / sample.count), 2, 8))


def _share_of_pool(batching: Batching, count: int) -> float:
    """Return the probability that a second example is in the pool of a first one."""
    assert batching.pool_size is not None
    each = count / -(-count // batching.pool_size)
    return (each - 1) / (count - 1) if each > 1 else 1.0


def seconds_in_order(shapes: EpochShapes, step_seconds: StepSeconds, ranks: Ranks) -> float:
    """Return the time of an epoch's batches, which ranks take in turn, in their order."""
    seconds = np.zeros(ranks.steps(len(shapes)) * ranks.world_size * ranks.accumulate)
    seconds[: len(shapes)] = step_seconds(*shapes_of([shapes]))
    return float(seconds.reshape(-1, ranks.accumulate, ranks.world_size).sum(axis=1).max(axis=1).sum())


def shapes_of(found: list[EpochShapes]) -> tuple[FloatArray, ...]:
    """Return batch sizes, lengths, and targets if any, of all batches of some epochs."""
    sizes = np.concatenate([one.batch_sizes for one in found]).astype(np.float64)
    lengths = np.concatenate([one.lengths for one in found])
    targets = [one.targets for one in found if one.targets is not None]
    return (sizes, lengths, np.concatenate(targets)) if targets else (sizes, lengths)


def cut_for_least_cost(
    batching: Batching, lengths: Lengths, step_seconds: StepSeconds, ranks: Ranks, seed: int
) -> Batching:
    """Return the pools with a batch overhead, if cutting them for the least cost gains more than 0.3%.

    The overhead is that of the straight line through the times of an epoch's steps by their padded lengths; the gain
    is of those times themselves, in the same epoch.
    """
    assert batching.pool_size is not None
    histogram = lengths.histogram
    sizes = batching.table.batch_sizes[batching.table.assign(histogram.lengths)]
    if min(batching.pool_size, lengths.count) * np.average(1 / sizes, weights=histogram.counts) > _MOST_BATCHES:
        return batching
    sample, drawing = _sample(lengths, batching.pool_size, _COMPARED_POOLS), Drawing(seed=seed)
    dealing = ranks.dealing if ranks.same_bucket else ON_ONE_RANK

    def epoch_of(one: Batching) -> EpochShapes:
        return epochs.simulate(one.batcher(sample.values).cut(drawing, dealing), drawing, sample.values, sample.targets)

    filled = epoch_of(batching)
    padded, seconds = filled.batch_sizes * filled.lengths, np.asarray(step_seconds(*shapes_of([filled])))
    if np.ptp(padded) == 0:
        return batching
    each, fixed = np.polyfit(padded, seconds, 1)
    if not (each > 0 and fixed > 0):
        return batching
    cut = replace(batching, batch_overhead=float(f"{fixed / each:.3g}"))
    gain = 1 - float(np.sum(step_seconds(*shapes_of([epoch_of(cut)])))) / float(seconds.sum())
    return cut if gain > _LEAST_GAIN else batching
