"""Simulates epochs of a stream: each worker's batches, made by the very code that training runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from batchtune.epochs.batch_order import Cut, EpochShapes
from batchtune.epochs.layout import Dealing, Layout, positions
from batchtune.epochs.measured_costs import StepSeconds
from batchtune.epochs.table import BucketTable
from batchtune.lengths import FloatArray, IntArray
from batchtune.manifests import StreamLengths
from batchtune.results import StreamConfig
from batchtune.streams.bucketed import StreamBatches, StreamBatching, stream_batches, stream_random
from batchtune.streams.pivot import PivotSettings, speechbrain_batches
from batchtune.streams.sharding import Sharding

# This many examples stand for more: each worker's first shards that hold its part of them. Against all of a million
# examples, batches and cells of made-up speech and text came within 0.9% with one worker and 1.1% with eight, with
# buffers of 256 to 4,096 examples. Half as many: 0.8% with one worker, 1.1% with eight; a quarter: 0.8% and 3.2%.
_MOST_SIMULATED = 1 << 17
# The distance of mates is averaged over batches that hold about this many examples.
_MEASURED_APART = 1 << 20


def shard_sizes(stream: StreamLengths, shard_size: int) -> list[int]:
    """Return the examples of each shard; a source that is not a set of shards is cut into shards of `shard_size`."""
    if stream.shards:
        return [shard.count for shard in stream.shards]
    whole, rest = divmod(stream.lengths.count, shard_size)
    return [shard_size] * whole + [rest] * bool(rest)


AnyBatching: TypeAlias = PivotSettings | StreamBatching


@dataclass(frozen=True, slots=True, eq=False)
class StoredStream:
    """The examples that are simulated, as they are stored, and how workers come to them.

    Attributes:
        lengths, targets: Shape (examples,).
        sizes: Examples of each shard.
        scale: Shape (workers of all ranks,), those of a rank together: all examples of a worker / those simulated.
    """

    lengths: FloatArray
    targets: FloatArray | None
    sizes: Sequence[int]
    sharding: Sharding
    scale: FloatArray
    seed: int
    _read_by_epoch: dict[int, list[list[IntArray]]] = field(default_factory=dict, init=False)

    @classmethod
    def of(
        cls, lengths: FloatArray, targets: FloatArray | None, sizes: Sequence[int], sharding: Sharding, seed: int
    ) -> StoredStream:
        """Take all examples, or the first shards, as many of each worker, that hold 131,072 or more."""
        readers = sharding.world_size * sharding.workers
        counts = np.array(sizes, dtype=np.int64)
        # Shard i goes to rank i % ranks, there to worker i // ranks % workers: whole rounds stay dealt as they are.
        rounds = np.add.reduceat(counts, np.arange(0, counts.size, readers))
        enough_rounds = int(np.searchsorted(np.cumsum(rounds), _MOST_SIMULATED)) + 1
        simulated = counts[: enough_rounds * readers]
        of_all = np.bincount(np.arange(counts.size) % readers, weights=counts, minlength=readers)
        of_simulated = np.bincount(np.arange(simulated.size) % readers, weights=simulated, minlength=readers)
        scale = np.divide(of_all, of_simulated, out=np.ones(readers), where=of_simulated > 0)
        by_rank = scale.reshape(sharding.workers, sharding.world_size).T.ravel()
        examples = int(simulated.sum())
        if targets is not None:
            targets = targets[:examples]
        return cls(lengths[:examples], targets, simulated.tolist(), sharding, by_rank, seed)

    def read_in(self, epoch: int) -> list[list[IntArray]]:
        """Return what each worker reads in an epoch, [rank][worker], as `Sharding.streams` does; worked out once."""
        if epoch not in self._read_by_epoch:
            self._read_by_epoch[epoch] = self.sharding.streams(self.sizes, seed=self.seed, epoch=epoch)
        return self._read_by_epoch[epoch]


@dataclass(frozen=True, slots=True, eq=False)
class StreamEpoch:
    """The batches of one simulated epoch, worker after worker, those of a rank's workers together.

    Attributes:
        batches_by_worker: Shape (workers of all ranks,).
        waits: Shape (examples in batches,): how many examples were read between each one's reading and its batch.
        most_held: The most that any worker held at once, as true length.
    """

    cut: Cut
    shapes: EpochShapes
    batches_by_worker: IntArray
    waits: IntArray
    most_held: float


def simulate_stream(stored: StoredStream, batching: AnyBatching, epoch: int) -> StreamEpoch:
    """Simulate the batches that all workers make of their streams in an epoch."""
    made: list[StreamBatches] = []
    examples: list[IntArray] = []
    largest_hold = 0.0
    for rank, streams in enumerate(stored.read_in(epoch)):
        for worker, stream in enumerate(streams):
            lengths = stored.lengths[stream]
            random = stream_random(stored.seed, epoch, rank, worker)
            if isinstance(batching, PivotSettings):
                batches = speechbrain_batches(lengths, batching, random)
                lengths = np.where(batching.keeps(lengths), lengths, 0.0)  # what it leaves out is never held
            else:
                batches = stream_batches(lengths, batching, random)
            made.append(batches)
            examples.append(stream[batches.examples])
            largest_hold = max(largest_hold, most_held(batches, lengths))
    sizes = np.concatenate([np.diff(batches.ends, prepend=0) for batches in made])
    starts = np.cumsum(sizes) - sizes
    order = np.concatenate(examples)
    layout = Layout(
        starts=starts,
        batch_sizes=sizes,
        buckets=np.zeros(sizes.size, dtype=np.int64),
        rest=np.zeros(sizes.size, dtype=np.bool_),
        dealing=Dealing(drop_last=True),
        count=stored.lengths.size,
        in_order=True,
    )
    longest_targets = None
    if stored.targets is not None:
        longest_targets = _longest(stored.targets[order], starts)
    return StreamEpoch(
        cut=Cut(order, layout),
        shapes=EpochShapes(sizes, _longest(stored.lengths[order], starts), longest_targets, layout.buckets),
        batches_by_worker=np.array([batches.ends.size for batches in made], dtype=np.int64),
        waits=np.concatenate([waits(batches) for batches in made]),
        most_held=largest_hold,
    )


def waits(batches: StreamBatches) -> IntArray:
    """Return how many examples are read after each one until its batch is made, in the order of `batches.examples`."""
    sizes = np.diff(batches.ends, prepend=0)
    return np.repeat(batches.read, sizes) - batches.examples - 1


def most_held(batches: StreamBatches, lengths: npt.ArrayLike) -> float:
    """Return the most that is held at once, as true length: just before a batch is made, or at the end of the stream.

    `lengths` are of shape (examples of the stream,), 0 for those that are never held.
    """
    values = np.asarray(lengths, dtype=np.float64)
    read = np.concatenate(([0.0], np.cumsum(values)))
    batched = np.concatenate(([0.0], np.cumsum(values[batches.examples])))
    before = np.concatenate(([0], batches.ends))
    return float(np.max(read[np.append(batches.read, values.size)] - batched[before]))


def _longest(values: FloatArray, starts: IntArray) -> FloatArray:
    return np.maximum.reduceat(values, starts) if starts.size else np.empty(0)


def distance_apart(epoch: StreamEpoch) -> float:
    """Return how far two examples of one batch are stored apart, relative to the (n + 1) / 3 of a random draw."""
    layout = epoch.cut.layout
    measured = np.arange(0, layout.starts.size, max(1, layout.count // _MEASURED_APART))
    sizes = layout.batch_sizes[measured].astype(np.int64)
    starts = np.cumsum(sizes) - sizes
    batch = np.repeat(np.arange(measured.size), sizes)
    stored = epoch.cut.examples[positions(layout.starts[measured], sizes)].astype(np.float64)
    ascending = stored[np.lexsort((stored, batch))]
    # For ascending places p_0 … p_(n-1) the distances of all pairs add up to Σ p_k (2k - n + 1).
    rank_in_batch = np.arange(ascending.size) - np.repeat(starts, sizes)
    distances = float(np.sum(ascending * (2 * rank_in_batch - np.repeat(sizes, sizes) + 1)))
    pairs = float(np.sum(sizes * (sizes - 1) / 2))
    if pairs == 0:
        return 0.0
    return distances / pairs / ((layout.count + 1) / 3)


def _batches_by_rank(epoch: StreamEpoch, sharding: Sharding) -> list[IntArray]:
    """Return each rank's batches in the order in which it takes them: those of its workers in turn."""
    by_rank: list[IntArray] = []
    start = 0
    for batches_by_worker in epoch.batches_by_worker.reshape(sharding.world_size, sharding.workers):
        by_rank.append(start + _in_turn(batches_by_worker))
        start += int(batches_by_worker.sum())
    return by_rank


def _in_turn(numbers: Sequence[int] | IntArray) -> IntArray:
    """Return the order of rows that lie one after the other: the first of each, then the second of each, and so on."""
    return np.argsort(np.concatenate([np.arange(number) for number in numbers]), kind="stable")


def stream_epoch(stored: StoredStream, config: StreamConfig, epoch: int) -> EpochShapes:
    """Return the shapes of the batches that `stream.yaml` makes, in the order in which ranks take them.

    First come those of step 0, rank by rank. A batch's bucket is that of its longest example, which limits its size.
    """
    table = BucketTable.of(config.bucket_boundaries, config.bucket_batch_sizes)
    batching = StreamBatching(
        algorithm=config.algorithm,
        table=table,
        buffer_size=config.buffer_size,
        max_padding_ratio=config.max_padding_ratio,
        shuffle=config.shuffle,
        drop_last=config.drop_last,
    )
    simulated = simulate_stream(stored, batching, epoch)
    by_rank = _batches_by_rank(simulated, stored.sharding)
    order = np.concatenate(by_rank)[_in_turn([batches.size for batches in by_rank])]
    shapes = simulated.shapes
    targets = None
    if shapes.targets is not None:
        targets = shapes.targets[order]
    lengths = shapes.lengths[order]
    return EpochShapes(shapes.batch_sizes[order], lengths, targets, table.assign(lengths).astype(np.int64))


def epoch_seconds(stored: StoredStream, epoch: StreamEpoch, step_seconds: StepSeconds) -> float:
    """Return the time of an epoch: a rank takes its workers' batches in turn, and each step waits for the slowest.

    Ranks whose streams end earlier go on with their first batches, as in a nominal epoch of the mean length.
    """
    seconds = epoch.shapes.seconds(step_seconds)
    steps = round(seconds.size / stored.sharding.world_size)
    if steps == 0:
        return 0.0
    ranks = [np.resize(seconds[batches], steps) for batches in _batches_by_rank(epoch, stored.sharding) if batches.size]
    slowest = np.max(ranks, axis=0)
    scale = float(np.sum(epoch.batches_by_worker * stored.scale)) / float(epoch.batches_by_worker.sum())
    return float(slowest.sum()) * scale
