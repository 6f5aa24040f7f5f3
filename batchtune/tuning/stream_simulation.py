"""Simulates epochs of a stream: each worker's batches, made by the very code that training runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from batchtune.batching.epochs import Cut, EpochShapes
from batchtune.batching.layout import Dealing, Layout, positions
from batchtune.batching.pivot import PivotSettings, speechbrain_batches
from batchtune.batching.sharding import Sharding
from batchtune.batching.streams import StreamBatches, StreamBatching, stream_batches, stream_random
from batchtune.batching.table import BucketTable
from batchtune.lengths import FloatArray, IntArray
from batchtune.manifests import StreamLengths
from batchtune.results import StreamConfig
from batchtune.tuning.costs import StepSeconds
from batchtune.tuning.simulation import shapes_of

# This many examples stand for more: each worker's first shards that hold its part of them.
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

    @classmethod
    def of(
        cls, lengths: FloatArray, targets: FloatArray | None, sizes: Sequence[int], sharding: Sharding, seed: int
    ) -> StoredStream:
        """Take all examples, or the first shards, as many of each worker, that hold 131,072 or more."""
        number, counts = sharding.world_size * sharding.workers, np.array(sizes, dtype=np.int64)
        # Shard i goes to rank i % ranks, there to worker i // ranks % workers: whole rounds stay dealt as they are.
        rounds = np.add.reduceat(counts, np.arange(0, counts.size, number))
        enough = int(np.searchsorted(np.cumsum(rounds), _MOST_SIMULATED)) + 1
        taken = counts[: enough * number]
        kept = int(taken.sum())
        by_worker = np.zeros((2, number))
        for row, some in enumerate((counts, taken)):
            by_worker[row] = np.bincount(np.arange(some.size) % number, weights=some, minlength=number)
        scale = np.divide(by_worker[0], by_worker[1], out=np.ones(number), where=by_worker[1] > 0)
        by_rank = scale.reshape(sharding.workers, sharding.world_size).T.ravel()
        targets = None if targets is None else targets[:kept]
        return cls(lengths[:kept], targets, taken.tolist(), sharding, by_rank, seed)


@dataclass(frozen=True, slots=True, eq=False)
class StreamEpoch:
    """The batches of one simulated epoch, worker after worker, those of a rank's workers together.

    Attributes:
        number: Shape (workers of all ranks,): how many batches each worker makes.
        waits: Shape (examples in batches,): how many examples were read between each one's reading and its batch.
        held: The most that any worker held at once, as true length.
    """

    cut: Cut
    shapes: EpochShapes
    number: IntArray
    waits: IntArray
    held: float


def simulate_stream(stored: StoredStream, batching: AnyBatching, epoch: int) -> StreamEpoch:
    """Simulate the batches that all workers make of their streams in an epoch."""
    made: list[StreamBatches] = []
    examples, waited, held = [], [], 0.0
    for rank, workers in enumerate(stored.sharding.streams(stored.sizes, seed=stored.seed, epoch=epoch)):
        for worker, stream in enumerate(workers):
            lengths = stored.lengths[stream]
            own = stream_random(stored.seed, epoch, rank, worker)
            if isinstance(batching, PivotSettings):
                found = speechbrain_batches(lengths, batching, own)
                lengths = np.where(batching.keeps(lengths), lengths, 0.0)  # what it leaves out is never held
            else:
                found = stream_batches(lengths, batching, own)
            made.append(found)
            examples.append(stream[found.examples])
            waited.append(waits(found))
            held = max(held, most_held(found, lengths))
    sizes = np.concatenate([np.diff(found.ends, prepend=0) for found in made])
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
    targets = stored.targets
    return StreamEpoch(
        cut=Cut(order, layout),
        shapes=EpochShapes(
            sizes.astype(np.int64),
            _longest(stored.lengths[order], starts),
            None if targets is None else _longest(targets[order], starts),
            layout.buckets,
        ),
        number=np.array([found.ends.size for found in made], dtype=np.int64),
        waits=np.concatenate(waited),
        held=held,
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
    layout, count = epoch.cut.layout, epoch.cut.layout.count
    some = np.arange(0, layout.starts.size, max(1, count // _MEASURED_APART))
    sizes = layout.batch_sizes[some].astype(np.int64)
    ends = np.cumsum(sizes)
    batch = np.repeat(np.arange(some.size), sizes)
    stored = epoch.cut.examples[positions(layout.starts[some], sizes)].astype(np.float64)
    ascending = stored[np.lexsort((stored, batch))]
    # For ascending places p_0 … p_(n-1) the distances of all pairs add up to Σ p_k (2k - n + 1).
    rank = np.arange(ascending.size) - np.repeat(ends - sizes, sizes)
    distances = float(np.sum(ascending * (2 * rank - np.repeat(sizes, sizes) + 1)))
    pairs = float(np.sum(sizes * (sizes - 1) / 2))
    return distances / pairs / ((count + 1) / 3) if pairs else 0.0


def batches_in_turn(epoch: StreamEpoch, sharding: Sharding) -> list[IntArray]:
    """Return each rank's batches in the order in which it takes them: those of its workers in turn."""
    ranks = epoch.number.reshape(sharding.world_size, sharding.workers)
    starts = np.cumsum(ranks.sum(axis=1)) - ranks.sum(axis=1)
    return [start + _in_turn(workers) for start, workers in zip(starts, ranks, strict=True)]


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
    found = simulate_stream(stored, batching, epoch)
    of_rank, shapes = batches_in_turn(found, stored.sharding), found.shapes
    order = np.concatenate(of_rank)[_in_turn([own.size for own in of_rank])]
    targets = None if shapes.targets is None else shapes.targets[order]
    buckets = table.assign(shapes.lengths[order]).astype(np.int64)
    return EpochShapes(shapes.batch_sizes[order], shapes.lengths[order], targets, buckets)


def epoch_seconds(stored: StoredStream, epoch: StreamEpoch, step_seconds: StepSeconds) -> float:
    """Return the time of an epoch: a rank takes its workers' batches in turn, and each step waits for the slowest.

    Ranks whose streams end earlier go on with their first batches, as in a nominal epoch of the mean length.
    """
    seconds = np.asarray(step_seconds(*shapes_of([epoch.shapes])))
    of_rank = [seconds[batches] for batches in batches_in_turn(epoch, stored.sharding)]
    known = [times for times in of_rank if times.size]
    steps = round(seconds.size / len(of_rank))
    if not known or not steps:
        return 0.0
    slowest = np.max([np.resize(times, steps) for times in known], axis=0)
    whole = float(np.sum(epoch.number * stored.scale)) / float(epoch.number.sum())
    return float(slowest.sum()) * whole
