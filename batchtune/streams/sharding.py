"""The examples that each worker of a stream of shards reads, in the order in which WebDataset deals and shuffles."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from batchtune.epochs.layout import positions
from batchtune.lengths import IntArray
from batchtune.results import ShardAdvice

# WebDataset's default `initial` of both shuffles.
_INITIAL = 100
# What `advised_shards` aims at.
_SHARDS_OF_A_WORKER = 4
_EXAMPLES_OF_A_SHARD = 100
_BYTES_OF_A_SHARD = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How WebDataset deals shards to ranks and workers, and shuffles.

    It is `WebDataset(urls, shardshuffle=shuffle_shards, detshuffle=True, seed=seed, nodesplitter=split_by_node)`, then
    `.shuffle(shuffle_buffer, initial=shuffle_initial)`. Three of its habits are easily missed:

    - It deals the shards before it shuffles them: a worker reads the same shards in every epoch.
    - A worker without a shard raises a ValueError (`empty_check`), or gives nothing if that is off.
    - Without `detshuffle`, shards come in the same order in every epoch. With it they do so too unless the DataLoader
      has `persistent_workers`, since each new worker counts epochs from 0.
    """

    world_size: int = 1
    workers: int = 1  # of each rank's DataLoader; 1 also if it reads in the process itself
    shuffle_shards: int = 0  # how many shards its `shardshuffle` holds; 0: they stay in order
    shuffle_buffer: int = 0  # how many examples `.shuffle` holds; 0: they stay in order
    shuffle_initial: int | None = None  # how many it holds before it gives the first; None: WebDataset's own 100

    def shards(self, count: int, *, seed: int, epoch: int) -> list[list[IntArray]]:
        """Return which of `count` shards each worker reads, in its order: [rank][worker]."""
        by_rank: list[list[IntArray]] = []
        for rank in range(self.world_size):
            of_rank = np.arange(rank, count, self.world_size)
            by_worker = (of_rank[worker :: self.workers] for worker in range(self.workers))
            by_rank.append([shuffled(shards, self.shuffle_shards, random.Random(seed + epoch)) for shards in by_worker])
        return by_rank

    def streams(self, sizes: Sequence[int], *, seed: int, epoch: int) -> list[list[IntArray]]:
        """Return what each worker reads: [rank][worker], the indices of examples as stored, in its order.

        The order of the shards is WebDataset's own with this seed, to the shard. Within a worker examples are shuffled
        as by `.shuffle(shuffle_buffer, initial=shuffle_initial, rng=sample_random(seed, epoch, rank, worker))`. Without
        `rng` and `seed`, WebDataset shuffles by the time of day. `sizes` are the examples of each shard, by URL.
        """
        starts = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
        by_rank: list[list[IntArray]] = []
        for rank, shards_by_worker in enumerate(self.shards(len(sizes), seed=seed, epoch=epoch)):
            streams: list[IntArray] = []
            for worker, shards in enumerate(shards_by_worker):
                streams.append(self._examples(starts, shards, sample_random(seed, epoch, rank, worker)))
            by_rank.append(streams)
        return by_rank

    def _examples(self, starts: IntArray, shards: IntArray, random: random.Random) -> IntArray:
        """Return the indices of the examples of some shards, shuffled; `starts` has each shard's first."""
        stored = positions(starts[shards], starts[shards + 1] - starts[shards])
        return shuffled(stored, self.shuffle_buffer, random, self.shuffle_initial)


def sample_random(seed: int, epoch: int, rank: int, worker: int) -> random.Random:
    """Return the random numbers by which `Sharding.streams` shuffles one worker's examples."""
    return random.Random(f"samples {seed} {epoch} {rank} {worker}")  # not the numbers by which batches are made


def shuffled(stream: IntArray, buffer_size: int, random: random.Random, initial: int | None = None) -> IntArray:
    """Return a stream in the order in which WebDataset's `.shuffle(buffer_size, initial=initial, rng=random)` gives it.

    It fills a buffer by two examples for each that it gives, chosen from the buffer at random. `random` ends in the
    same state. Source: `webdataset.filters._shuffle`, WebDataset 1.0.
    """
    if buffer_size < 1:
        return stream
    initial = min(_INITIAL if initial is None else initial, buffer_size)
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


def advised_shards(count: int, total_bytes: int | None, readers: int) -> ShardAdvice:
    """Return how to write examples as shards for this many workers of all ranks.

    The number is a multiple of the readers, and one that `maxcount` gives exactly; only the last shard
    is smaller. It is the first of these that `maxcount` can give:

    - 4 for each worker, so that their order is worth shuffling, or as many as leave 100 examples in each, but at
      least 1; more if they would be larger than 1 GB on average: large files read well, and smaller ones copy well;
    - the next multiples, up to twice as many; then the smaller ones, from above;
    - any number that leaves no worker idle, as for 100 examples and 64 workers; as many as examples if those are fewer.

    `maxsize` is twice the mean size of a shard: it closes only a shard of unusually long examples. `total_bytes` are
    those of all examples, as stored; None if unknown.
    """
    each = max(1, min(_SHARDS_OF_A_WORKER, count // (_EXAMPLES_OF_A_SHARD * readers)))
    if total_bytes is not None:
        each = max(each, -(-total_bytes // (_BYTES_OF_A_SHARD * readers)))
    multiples = (readers * number for number in (*range(each, 2 * each + 1), *range(each - 1, 0, -1)))
    sizes = ((shards, -(-count // shards)) for shards in multiples)
    exact = (maxcount for shards, maxcount in sizes if -(-count // maxcount) == shards)  # that ShardWriter writes
    maxcount = next(exact, max(1, count // readers))
    shards = -(-count // maxcount)
    maxsize = None if total_bytes is None else max(1, -(-2 * total_bytes // shards))
    return ShardAdvice(shards=shards, maxcount=maxcount, maxsize_bytes=maxsize)
