"""Batches of a stream: examples come one by one, a buffer holds some of them, and batches are made of what it holds."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import numpy as np

from batchtune.epochs.table import BucketTable
from batchtune.lengths import FloatArray, IntArray
from batchtune.records import StreamAlgorithm

# A bucket that gives no batch while this many buffers are read has its turn, full or not.
_PATIENCE = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamBatching:
    """A way to make batches of a stream, as `BucketedStream` does.

    The algorithm makes them of one bucket's examples (`bucket`), or of neighbours around a random example of the sorted
    buffer, as SpeechBrain does (`pivot`).
    """

    algorithm: StreamAlgorithm
    table: BucketTable  # a batch holds at most the batch size of its longest example's bucket
    buffer_size: int  # the most examples that are held at once
    max_padding_ratio: float | None = None  # of a batch, for `pivot`; None: any
    shuffle: bool = True  # whether chance decides which examples go together, and the order of batches
    drop_last: bool = False  # whether to leave out examples at the end of the stream that fill no batch


@dataclass(frozen=True, slots=True, eq=False)
class StreamBatches:
    """The batches that one worker makes of its stream."""

    examples: IntArray  # shape (examples in batches,): places in the worker's stream, from 0, batch after batch
    ends: IntArray  # shape (batches,): batch i is examples[ends[i - 1] : ends[i]]
    read: IntArray  # shape (batches,): how many examples of the stream had been read when the batch was made


class Reader(ABC):
    """The examples of a stream, in its order."""

    count = 0  # how many examples were read; the next is at this place
    ended = False  # whether the stream has given its last example

    @abstractmethod
    def read(self, room: int) -> list[float]:
        """Read at most `room` examples and return their lengths, positive and at most the last boundary.

        Fewer only if the stream has ended, or if the examples held take too much memory: then a batch has to leave.
        """


class LengthReader(Reader):
    """Reads the lengths of a stream."""

    def __init__(self, lengths: FloatArray) -> None:
        self._lengths: list[float] = lengths.tolist()

    def read(self, room: int) -> list[float]:
        """Return the next lengths, at most this many."""
        read = self._lengths[self.count : self.count + room]
        self.count += len(read)
        self.ended = len(read) < room
        return read


def stream_random(seed: int, epoch: int, rank: int = 0, worker: int = 0) -> Random:
    """Return the random numbers of one worker's pass over its stream, the same on every machine."""
    return Random(f"{seed} {epoch} {rank} {worker}")


def stream_batches(
    lengths: FloatArray, batching: StreamBatching, random: Random
) -> StreamBatches:
    """Return the batches of a stream of examples with these lengths, none beyond the last boundary."""
    reader = LengthReader(lengths)
    return collected(batched(reader, batching, random), lambda: reader.count)


def collected(
    batches: Iterator[list[int]], examples_read: Callable[[], int]
) -> StreamBatches:
    """Return the batches that a worker makes; `examples_read` says how many examples were read until now."""
    examples = []
    ends = []
    read = []
    for batch in batches:
        examples += batch
        ends.append(len(examples))
        read.append(examples_read())
    return StreamBatches(
        *(np.array(numbers, dtype=np.int64) for numbers in (examples, ends, read))
    )


def batched(
    reader: Reader, batching: StreamBatching, random: Random
) -> Iterator[list[int]]:
    """Yield the batches of a stream, as the places of their examples; at most buffer_size are held at any time.

    A batch whose longest example is u holds at most the table's batch size for u. The examples that are left when the
    stream ends make as few batches as they can, or with `pivot` and shuffle one more: one or two are not full.
    """
    make = {"bucket": _bucketed, "pivot": _pivoted}[batching.algorithm]
    return make(reader, batching, random)


def _bucketed(
    reader: Reader, batching: StreamBatching, random: Random
) -> Iterator[list[int]]:
    """Yield batches of one bucket each.

    The buffer fills up, then as many examples as a batch takes leave the bucket that holds most relative to its batch
    size: so all buckets hold the same multiple of their batch sizes, and the choice of mates is as wide as the buffer
    allows. With shuffle random ones leave, else the first. A bucket so rare that it does not fill has its turn in the
    end, lest an epoch that stops early never sees its examples. A batch that leaves before its bucket is full is filled
    from the next shorter buckets.
    """
    edges = batching.table.boundaries.tolist()
    sizes = batching.table.batch_sizes.tolist()
    chance = random if batching.shuffle else None
    buckets: list[list[int]] = [[] for _ in sizes]
    held = 0
    next_look = reader.count + batching.buffer_size
    waited = [0] * len(sizes)  # looks at each bucket since a batch of it left

    while True:
        lengths = reader.read(batching.buffer_size - held)
        held += len(lengths)
        for place, length in enumerate(lengths, reader.count - len(lengths)):
            buckets[bisect_left(edges, length)].append(place)
        if reader.ended:
            break
        while reader.count >= next_look:
            next_look += batching.buffer_size
            waited = [
                looks + bool(bucket)
                for looks, bucket in zip(waited, buckets, strict=True)
            ]
        leaving = waited.index(max(waited))
        if waited[leaving] <= _PATIENCE or not buckets[leaving]:
            fullness = [
                len(bucket) / size for bucket, size in zip(buckets, sizes, strict=True)
            ]
            leaving = fullness.index(max(fullness))
        waited[leaving] = 0
        batch = _filled(buckets, sizes, leaving, chance)
        held -= len(batch)
        yield batch
    yield from _last_batches(buckets, sizes, batching, chance)


def _last_batches(
    buckets: list[list[int]],
    sizes: list[int],
    batching: StreamBatching,
    chance: Random | None,
) -> list[list[int]]:
    """Take the last batches: full ones of each bucket, then the remaining examples in a row, the longest first."""
    batches = []
    for bucket, size in enumerate(sizes):
        while len(buckets[bucket]) >= size:
            batches.append(_filled(buckets, sizes, bucket, chance))
    for bucket in range(len(sizes) - 1, -1, -1):
        while buckets[bucket]:
            batch = _filled(buckets, sizes, bucket, chance)
            if len(batch) == sizes[bucket] or not batching.drop_last:
                batches.append(batch)
    if chance is not None:
        chance.shuffle(batches)
    return batches


def _filled(
    buckets: list[list[int]], sizes: list[int], bucket: int, chance: Random | None
) -> list[int]:
    """Take a batch out of a bucket, and if that holds too few, out of the next shorter ones."""
    batch = _taken(buckets[bucket], sizes[bucket], chance)
    for shorter in range(bucket - 1, -1, -1):
        if len(batch) == sizes[bucket]:
            break
        batch += _taken(buckets[shorter], sizes[bucket] - len(batch), chance)
    return batch


def _taken(held: list[int], size: int, chance: Random | None) -> list[int]:
    """Take `size` examples, or all, out of those held: random ones, or without `chance` the first."""
    size = min(size, len(held))
    if chance is not None:
        chosen = chance.sample(range(len(held)), size)
        return [held.pop(index) for index in sorted(chosen, reverse=True)]
    batch = held[:size]
    del held[:size]
    return batch


def _cut_descending(
    descending: list[float],
    edges: list[float],
    sizes: list[int],
    max_padding_ratio: float,
) -> list[tuple[int, int]]:
    """Return where batches begin and end if each takes as many as fit with its longest, from the longest on."""
    cuts = []
    first = 0
    while first < len(descending):
        longest = descending[first]
        last = min(first + sizes[bisect_left(edges, longest)], len(descending))
        if max_padding_ratio < 1:
            while (
                last - first > 1
                and 1 - sum(descending[first:last]) / (longest * (last - first))
                > max_padding_ratio
            ):
                last -= 1
        cuts.append((first, last))
        first = last
    return cuts


class SortedBuffer:
    """The examples that are held, in order of length; of equal lengths the earlier first."""

    def __init__(self) -> None:
        self.lengths: list[float] = []
        self.places: list[int] = []

    def fill(self, reader: Reader, size: int) -> None:
        """Read until this many examples are held, or the stream ends."""
        lengths = reader.read(size - len(self.lengths))
        for place, length in enumerate(lengths, reader.count - len(lengths)):
            index = bisect_right(self.lengths, length)
            self.lengths.insert(index, length)
            self.places.insert(index, place)

    def take(self, first: int, last: int) -> list[int]:
        """Take out the places from `first` to before `last`."""
        batch = self.places[first:last]
        del self.lengths[first:last]
        del self.places[first:last]
        return batch


def around_pivot(
    lengths: list[float],
    pivot: int,
    admits: Callable[[int, float], bool],
    max_padding_ratio: float,
    grows: Callable[[int, float], bool] = lambda count, longest: True,
) -> tuple[int, int]:
    """Return where the batch begins and ends that grows around a pivot in ascending lengths.

    It adds the neighbour that pads it less, on a tie the shorter one, while `grows` holds for the
    batch's size and longest length, and `admits` for those that the neighbour would give it.
    `speechbrain.dataio.iterators`, SpeechBrain 1.1, does the same in `indices_around_random_pivot`;
    it raises a ZeroDivisionError too if two lengths are 0.
    """
    first = pivot
    last = pivot + 1
    longest = lengths[pivot]
    # In the order of joining, which decides how their sum is rounded.
    taken = [longest]
    count = 1
    while grows(count, longest):
        count += 1
        shorter = math.inf
        longer = math.inf
        if first > 0 and admits(count, longest):
            shorter = 1.0 - sum(taken, lengths[first - 1]) / (count * longest)
        if last < len(lengths) and admits(count, lengths[last]):
            longer = 1.0 - sum(taken, lengths[last]) / (count * lengths[last])
        if shorter > max_padding_ratio:
            shorter = math.inf
        if longer > max_padding_ratio:
            longer = math.inf
        if shorter == longer == math.inf:
            break
        if shorter <= longer:
            first -= 1
            taken.append(lengths[first])
        else:
            longest = lengths[last]
            last += 1
            taken.append(longest)
    return first, last


def _pivoted(
    reader: Reader, batching: StreamBatching, random: Random
) -> Iterator[list[int]]:
    """Yield batches of neighbours in the sorted buffer, around a random one, or without shuffle the oldest.

    What is left when the stream ends is cut from the longest on.
    """
    edges = batching.table.boundaries.tolist()
    sizes = batching.table.batch_sizes.tolist()
    ratio = 1.0 if batching.max_padding_ratio is None else batching.max_padding_ratio

    def admits(count: int, longest: float) -> bool:
        return count <= int(sizes[bisect_left(edges, longest)])

    held = SortedBuffer()
    while True:
        held.fill(reader, batching.buffer_size)
        if reader.ended:
            break
        if batching.shuffle:
            pivot = int(random.random() * len(held.places))
        else:
            pivot = held.places.index(min(held.places))
        yield held.take(*around_pivot(held.lengths, pivot, admits, ratio))
    batches = []
    places = held.places[::-1]
    descending = held.lengths[::-1]
    for first, last in _cut_descending(descending, edges, sizes, ratio):
        is_full = last - first == sizes[bisect_left(edges, descending[first])]
        if is_full or not batching.drop_last:
            batches.append(places[first:last])
    if batching.shuffle:
        random.shuffle(batches)
    yield from batches
