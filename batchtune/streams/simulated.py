"""Simulates epochs of a stream: what each worker reads, and its batches, made by the very code that training runs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from batchtune.epochs.layout import (
    EpochBatches,
    EpochShapes,
    positions,
)
from batchtune.epochs.measured_costs import StepTimeFunction
from batchtune.epochs.table import BucketTable
from batchtune.errors import ResultError
from batchtune.lengths import FloatArray, IntArray
from batchtune.manifests import StreamLengths
from batchtune.results import (
    STREAM_FILE,
    StreamConfig,
    StreamedWith,
    StreamSweep,
    read_result,
)
from batchtune.streams.bucketed import (
    StreamBatches,
    StreamBatching,
    stream_batches,
    stream_random,
)
from batchtune.streams.speechbrain import PivotSettings, speechbrain_batches
from batchtune.units import counted

# WebDataset's default `initial` of both shuffles.
_INITIAL = 100
# This many examples stand for more: each worker's first shards that hold its part of them. Against all of a million
# examples, batches and cells of made-up speech and text came within 0.9% with one worker and 1.1% with eight, with
# buffers of 256 to 4,096 examples. Half as many: 0.8% with one worker, 1.1% with eight; a quarter: 0.8% and 3.2%.
_MOST_SIMULATED = 1 << 17
# The distance of mates is averaged over batches that hold about this many examples.
_MEASURED_APART = 1 << 20

AnyBatching: TypeAlias = PivotSettings | StreamBatching


def worker_streams(
    sharding: StreamedWith, sizes: Sequence[int], *, seed: int, epoch: int
) -> list[list[IntArray]]:
    """Return what each worker reads: [rank][worker], the indices of examples as stored, in its order.

    Shards are dealt and shuffled, to the shard, as by
    `WebDataset(urls, shardshuffle=shuffle_shards, detshuffle=True, seed=seed, nodesplitter=split_by_node)`. Three of
    its habits are easily missed:

    - It deals the shards before it shuffles them: a worker reads the same shards in every epoch.
    - A worker without a shard raises a ValueError (`empty_check`), or gives nothing if that is off.
    - Without `detshuffle`, shards come in the same order in every epoch. With it they do so too unless the DataLoader
      has `persistent_workers`, since each new worker counts epochs from 0.

    A worker's examples are shuffled as by `.shuffle(shuffle_buffer, rng=sample_random(seed, epoch, rank, worker))`.
    Without `rng` and `seed`, WebDataset shuffles by the time of day. `sizes` are the examples of each shard, by URL.
    """
    starts = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
    by_rank: list[list[IntArray]] = []
    for rank in range(sharding.world_size):
        of_rank = np.arange(rank, len(sizes), sharding.world_size)
        streams: list[IntArray] = []
        for worker in range(sharding.readers_per_rank):
            dealt = of_rank[worker :: sharding.readers_per_rank]
            chance = random.Random(seed + epoch)
            shards = shuffled(dealt, sharding.shuffle_shards, chance)
            stored = positions(starts[shards], starts[shards + 1] - starts[shards])
            chance = sample_random(seed, epoch, rank, worker)
            streams.append(shuffled(stored, sharding.shuffle_buffer, chance))
        by_rank.append(streams)
    return by_rank


def sample_random(seed: int, epoch: int, rank: int, worker: int) -> random.Random:
    """Return the random numbers by which `worker_streams` shuffles one worker's examples."""
    # Not the numbers by which batches are made.
    return random.Random(f"samples {seed} {epoch} {rank} {worker}")


def shuffled(stream: IntArray, buffer_size: int, random: random.Random) -> IntArray:
    """Return a stream in the order in which WebDataset's `.shuffle(buffer_size, rng=random)` gives it.

    It fills a buffer by two examples for each that it gives, chosen from the buffer at random. `random` ends in the
    same state. Source: `webdataset.filters._shuffle`, WebDataset 1.0.
    """
    if buffer_size < 1:
        return stream
    initial = min(_INITIAL, buffer_size)
    source = iter(stream.tolist())
    result: list[int] = []
    held: list[int] = []
    for example in source:
        held.append(example)
        if len(held) < buffer_size:
            held.extend(islice(source, 1))
        if len(held) >= initial:
            result.append(_drawn(held, random))
    while held:
        result.append(_drawn(held, random))
    return np.array(result, dtype=np.int64)


def _drawn(held: list[int], random: random.Random) -> int:
    """Take a random example out of the buffer; the last one takes its place."""
    index = random.randint(0, len(held) - 1)
    drawn = held[index]
    held[index] = held[-1]
    held.pop()
    return drawn


def shard_sizes(stream: StreamLengths, shard_size: int) -> list[int]:
    """Return the examples of each shard; a source that is not a set of shards is cut into shards of `shard_size`."""
    if stream.shards:
        return [shard.count for shard in stream.shards]
    edges = [*range(0, stream.lengths.count, shard_size), stream.lengths.count]
    sizes: list[int] = np.diff(edges).tolist()
    return sizes


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
    sharding: StreamedWith
    scale: FloatArray
    seed: int
    _read: dict[int, list[list[IntArray]]] = field(default_factory=dict, init=False)

    @classmethod
    def of(
        cls,
        lengths: FloatArray,
        targets: FloatArray | None,
        sizes: Sequence[int],
        sharding: StreamedWith,
        seed: int,
    ) -> StoredStream:
        """Take all examples, or the first shards, as many of each worker, that hold 131,072 or more."""
        readers = sharding.readers
        # Shard i goes to rank i % ranks, there to worker i // ranks % workers: whole rounds stay dealt as they are.
        rounds = np.zeros((-(-len(sizes) // readers), readers))
        rounds.flat[: len(sizes)] = sizes
        held = np.cumsum(rounds.sum(axis=1))
        enough = int(np.searchsorted(held, _MOST_SIMULATED)) + 1
        read = rounds[:enough].sum(axis=0)
        scale = np.divide(
            rounds.sum(axis=0), read, out=np.ones(readers), where=read > 0
        )
        by_rank = scale.reshape(
            sharding.readers_per_rank, sharding.world_size
        ).T.ravel()
        examples = int(read.sum())
        if targets is not None:
            targets = targets[:examples]
        sizes = sizes[: enough * readers]
        return cls(lengths[:examples], targets, sizes, sharding, by_rank, seed)

    def read_in(self, epoch: int) -> list[list[IntArray]]:
        """Return what each worker reads in an epoch, [rank][worker], as `worker_streams` does; worked out once."""
        if epoch not in self._read:
            self._read[epoch] = worker_streams(
                self.sharding, self.sizes, seed=self.seed, epoch=epoch
            )
        return self._read[epoch]


def stored_stream(stream: StreamLengths, folder: Path, seed: int) -> StoredStream:
    """Take all shards, dealt to workers as for the folder's `stream.json`; ResultError without one, or of others."""
    path = folder / STREAM_FILE
    if not path.exists():
        raise ResultError(
            f"{path}, which says how shards come to workers, does not exist",
            "`batchtune sweep-stream` writes it, with stream.yaml.",
        )
    swept = read_result(path, StreamSweep)
    sharding = msgspec.convert(swept.settings, StreamedWith, from_attributes=True)
    sizes = shard_sizes(stream, sharding.shard_size)
    if len(sizes) != swept.shards.count or max(sizes) != swept.shards.largest_count:
        raise ResultError(
            f"{path} is of {counted(swept.shards.count, 'other shard')}; these are {len(sizes):,}",
            "Give the same shards, or run `batchtune sweep-stream` again: batches depend on them.",
        )
    scale = np.ones(sharding.readers)
    return StoredStream(stream.values, stream.targets, sizes, sharding, scale, seed)


@dataclass(frozen=True, slots=True, eq=False)
class StreamEpoch:
    """The batches of one simulated epoch, worker after worker, those of a rank's workers together.

    Attributes:
        batches_by_worker: Shape (workers of all ranks,).
        weights: Shape (batches,): how many batches of an epoch of all examples each stands for.
        waits: Shape (examples in batches,): how many examples were read between each one's reading and its batch.
        most_held: The most that any worker held at once, as true length.
    """

    cut: EpochBatches
    shapes: EpochShapes
    batches_by_worker: IntArray
    weights: FloatArray
    waits: IntArray
    most_held: float

    def total(self, values: FloatArray) -> float:
        """Return the sum of a value of each batch for an epoch of all examples."""
        return float(np.sum(values * self.weights))


def simulate_stream(
    stored: StoredStream, batching: AnyBatching, epoch: int
) -> StreamEpoch:
    """Simulate the batches that all workers make of their streams in an epoch."""
    made: list[StreamBatches] = []
    examples: list[IntArray] = []
    largest_hold = 0.0
    for rank, streams in enumerate(stored.read_in(epoch)):
        for worker, stream in enumerate(streams):
            lengths = stored.lengths[stream]
            chance = stream_random(stored.seed, epoch, rank, worker)
            if isinstance(batching, PivotSettings):
                batches = speechbrain_batches(lengths, batching, chance)
                # What it leaves out is never held.
                lengths = np.where(batching.keeps(lengths), lengths, 0.0)
            else:
                batches = stream_batches(lengths, batching, chance)
            made.append(batches)
            examples.append(stream[batches.examples])
            largest_hold = max(largest_hold, most_held(batches, lengths))
    sizes = np.concatenate([np.diff(batches.ends, prepend=0) for batches in made])
    cut = EpochBatches.in_row(np.concatenate(examples), sizes, stored.lengths.size)
    batches_by_worker = np.array([batches.ends.size for batches in made])
    return StreamEpoch(
        cut=cut,
        shapes=cut.shapes(stored.lengths, stored.targets),
        batches_by_worker=batches_by_worker,
        weights=np.repeat(stored.scale, batches_by_worker),
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


def distance_apart(epoch: StreamEpoch) -> float:
    """Return how far two examples of one batch are stored apart, relative to the (n + 1) / 3 of a random draw."""
    layout = epoch.cut.layout
    total = 0.0
    pairs = 0
    for batch in range(0, layout.starts.size, max(1, layout.count // _MEASURED_APART)):
        size = int(layout.batch_sizes[batch])
        start = layout.starts[batch]
        ascending = np.sort(epoch.cut.examples[start : start + size])
        # For ascending places p_0 … p_(n-1) the distances of all pairs add up to Σ p_k (2k - n + 1).
        total += float(ascending @ (2.0 * np.arange(size) - size + 1))
        pairs += size * (size - 1) // 2
    if pairs == 0:
        return 0.0
    return total / pairs / ((layout.count + 1) / 3)


def _batches_by_rank(epoch: StreamEpoch, sharding: StreamedWith) -> list[IntArray]:
    """Return each rank's batches in the order of its steps: those of its workers in turn."""
    shape = (sharding.world_size, sharding.readers_per_rank)
    ends = np.cumsum(epoch.batches_by_worker).reshape(shape)
    by_worker = epoch.batches_by_worker.reshape(shape)
    return [
        _in_turn(numbers) + end[-1] - numbers.sum()
        for numbers, end in zip(by_worker, ends, strict=True)
    ]


def _in_turn(numbers: Sequence[int] | IntArray) -> IntArray:
    """Return the order of rows that lie one after the other: the first of each, then the second of each, and so on."""
    places = np.concatenate([np.arange(number) for number in numbers])
    return np.argsort(places, kind="stable")


def stream_epoch(stored: StoredStream, config: StreamConfig, epoch: int) -> EpochShapes:
    """Return the shapes of the batches that `stream.yaml` makes, in the order of the ranks' steps.

    First come those of step 0, rank by rank.
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
    return simulated.shapes.chosen(order)


def epoch_seconds(
    stored: StoredStream, epoch: StreamEpoch, step_seconds: StepTimeFunction
) -> float:
    """Return the time of an epoch: a rank takes its workers' batches in turn, and each step waits for the slowest.

    Ranks whose streams end earlier go on with their first batches, as in a nominal epoch of the mean length.
    """
    seconds = epoch.shapes.seconds(step_seconds)
    steps = round(seconds.size / stored.sharding.world_size)
    if steps == 0:
        return 0.0
    ranks = [
        np.resize(seconds[batches], steps)
        for batches in _batches_by_rank(epoch, stored.sharding)
        if batches.size
    ]
    return float(np.max(ranks, axis=0).sum() * epoch.weights.mean())
