"""Batches of a stream: examples come one by one, a buffer holds some of them, and batches are made of what it holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from operator import truediv
from random import Random

import numpy as np

from batchtune.epochs.table import BucketTable
from batchtune.lengths import FloatArray, IntArray
from batchtune.results import StreamAlgorithm

# Without shuffle, this many examples are read at once: a full bucket leaves after them.
_AHEAD = 32
# A bucket that gives no batch while this many buffers are read has its turn, full or not.
_PATIENCE = 16
# If fewer than one example in this many is new, they are inserted; else the buffer is sorted.
_FEW = 32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamBatching:
    """A way to make batches of a stream, as `BucketedStream` does.

    The algorithm makes them of one bucket's examples (`bucket`), of neighbours in a buffer that is sorted and cut as a
    whole (`pool`), or of neighbours around a random example, as SpeechBrain does (`pivot`).
    """

    algorithm: StreamAlgorithm
    table: BucketTable  # a batch holds at most the batch size of its longest example's bucket
    buffer_size: int  # the most examples that are held at once
    max_padding_ratio: float | None = None  # for `pivot`: the most of a batch that may be padding; None: any
    shuffle: bool = True  # whether chance decides which examples go together, and in which order batches come
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
    """Reads a stream of which only the lengths are known."""

    def __init__(self, lengths: FloatArray) -> None:
        self._lengths: list[float] = lengths.tolist()

    def read(self, room: int) -> list[float]:
        """As for every reader."""
        read = self._lengths[self.count : self.count + room]
        self.count += len(read)
        self.ended = len(read) < room
        return read


def stream_random(seed: int, epoch: int, rank: int = 0, worker: int = 0) -> Random:
    """Return the random numbers of one worker's pass over its stream, the same on every machine."""
    return Random(f"{seed} {epoch} {rank} {worker}")


def stream_batches(lengths: FloatArray, batching: StreamBatching, random: Random) -> StreamBatches:
    """Return the batches of a stream of examples with these lengths, none beyond the last boundary."""
    reader = LengthReader(lengths)
    examples: list[int] = []
    ends: list[int] = []
    read: list[int] = []
    for batch in batched(reader, batching, random):
        examples += batch
        ends.append(len(examples))
        read.append(reader.count)
    return StreamBatches(*(np.array(numbers, dtype=np.int64) for numbers in (examples, ends, read)))


def batched(reader: Reader, batching: StreamBatching, random: Random) -> Iterator[list[int]]:
    """Yield the batches of a stream, as the places of their examples; at most buffer_size are held at any time.

    A batch whose longest example is u holds at most the table's batch size for u. The examples that are left when the
    stream ends make as few batches as they can, or with `pivot` and shuffle one more: one or two are not full.
    """
    make = {"bucket": _bucketed, "pool": _pooled, "pivot": _pivoted}[batching.algorithm]
    return make(reader, batching, random)


def _bucketed(reader: Reader, batching: StreamBatching, random: Random) -> Iterator[list[int]]:
    """Yield batches of one bucket each.

    With shuffle the buffer fills up, then as many random examples as a batch takes leave the bucket that holds most
    relative to its batch size: so all buckets hold the same multiple of their batch sizes, and the choice of mates is
    as wide as the buffer allows. Without, a bucket leaves when it is full, in the order of the stream. If the buffer is
    full before any bucket is, the fullest leaves; a bucket so rare that it does not fill has its turn in the end, lest
    an epoch that stops early never sees its examples. Such a batch is filled from the next shorter buckets.
    """
    edges = batching.table.boundaries.tolist()
    sizes = batching.table.batch_sizes.tolist()
    chance = random if batching.shuffle else None
    buckets: list[list[int]] = [[] for _ in sizes]
    held = 0
    next_look = reader.count + batching.buffer_size
    waited = [0] * len(sizes)  # looks at each bucket since a batch of it left

    while True:
        room = batching.buffer_size - held
        if chance is None:
            room = min(room, _AHEAD)
        lengths = reader.read(room)
        held += len(lengths)
        placed = enumerate(map(bisect_left, repeat(edges), lengths), reader.count - len(lengths))
        waits = len(lengths) == room and held < batching.buffer_size
        if chance is None:
            for place, bucket in placed:
                buckets[bucket].append(place)
                if len(buckets[bucket]) == sizes[bucket]:
                    batch = buckets[bucket]
                    buckets[bucket] = []
                    waited[bucket] = 0
                    waits = True
                    held -= len(batch)
                    yield batch
        else:
            for place, bucket in placed:
                buckets[bucket].append(place)
        if reader.ended:
            break
        while reader.count >= next_look:
            next_look += batching.buffer_size
            waited = [looks + 1 if bucket else 0 for looks, bucket in zip(waited, buckets, strict=True)]
        leaving = waited.index(max(waited))
        if waited[leaving] <= _PATIENCE or not buckets[leaving]:
            if waits:
                continue
            fullness = list(map(truediv, map(len, buckets), sizes))
            leaving = fullness.index(max(fullness))
        waited[leaving] = 0
        batch = _filled(buckets, sizes, leaving, chance)
        held -= len(batch)
        yield batch
    # The last batches: full ones of each bucket, then the remaining examples in a row, the longest first.
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
    yield from batches


def _filled(buckets: list[list[int]], sizes: list[int], bucket: int, chance: Random | None) -> list[int]:
    """Take a batch out of a bucket, and if that holds too few, out of the next shorter ones."""
    batch = _taken(buckets[bucket], sizes[bucket], chance)
    for shorter in range(bucket - 1, -1, -1):
        if len(batch) == sizes[bucket]:
            break
        batch += _taken(buckets[shorter], sizes[bucket] - len(batch), chance)
    return batch


def _taken(held: list[int], size: int, chance: Random | None) -> list[int]:
    """Take `size` examples, or all, out of those held: random ones, or without `chance` the first."""
    count = len(held)
    if count <= size:
        batch = held.copy()
        held.clear()
    elif chance is None:
        batch = held[:size]
        del held[:size]
    else:
        # Draw those that leave to the end or those that stay to the front, whichever are fewer.
        draw = chance.random
        stay = count - size
        if size < stay:
            for last in range(count - 1, stay - 1, -1):
                drawn = int(draw() * (last + 1))
                held[last], held[drawn] = held[drawn], held[last]
        else:
            for first in range(stay):
                drawn = first + int(draw() * (count - first))
                held[first], held[drawn] = held[drawn], held[first]
        batch = held[stay:]
        del held[stay:]
    return batch


def _pooled(reader: Reader, batching: StreamBatching, random: Random) -> Iterator[list[int]]:
    """Yield batches of neighbours in pools that are sorted by length, the longest first; of equal ones the earlier.

    While a pool's batches leave, the next one fills. A pool is cut from its longest or from its shortest example on,
    and the examples at the other end that fill no batch join the next pool: if it were always the same end, they could
    wait for ever. With shuffle, chance decides which end and how large the first pool is, so that other examples share
    a pool in each epoch, and batches leave in random order; without, the ends alternate.
    """
    edges = batching.table.boundaries.tolist()
    sizes = batching.table.batch_sizes.tolist()
    shuffle = batching.shuffle
    pool_size = batching.buffer_size
    if shuffle:
        pool_size -= int(batching.buffer_size / 2 * random.random())
    ascending = False
    places: list[int] = []  # of the pool that fills, and their lengths
    lengths: list[float] = []
    batches: list[list[int]] = []
    waiting = 0  # examples in batches
    while True:
        read = reader.read(pool_size - waiting - len(places))
        places += range(reader.count - len(read), reader.count)
        lengths += read
        if not batches:
            if not places:
                return
            pool_size = batching.buffer_size
            ascending = random.random() < 0.5 if shuffle else not ascending
            order = sorted(range(len(places)), key=lengths.__getitem__, reverse=True)
            descending = [lengths[index] for index in order]
            cut = _cut_ascending if ascending else _cut_descending
            cuts = cut(descending, edges, sizes)
            rest: list[int] = []  # joins the next pool
            first, last = cuts[-1]
            may_be_left = batching.drop_last if reader.ended else len(cuts) > 1
            if may_be_left and last - first < sizes[bisect_left(edges, descending[first])]:
                cuts.pop()
                if not reader.ended:
                    rest = sorted(order[first:last])
            batches = [[places[index] for index in order[first:last]] for first, last in reversed(cuts)]
            if shuffle:
                random.shuffle(batches)
            places = [places[index] for index in rest]
            lengths = [lengths[index] for index in rest]
            waiting = sum(map(len, batches))
            continue
        batch = batches.pop()
        waiting -= len(batch)
        yield batch


def _cut_descending(
    descending: list[float], edges: list[float], sizes: list[int], max_padding_ratio: float = 1.0
) -> list[tuple[int, int]]:
    """Return where batches begin and end if each takes as many as fit with its longest, from the longest on."""
    cuts: list[tuple[int, int]] = []
    first = 0
    while first < len(descending):
        longest = descending[first]
        last = min(first + sizes[bisect_left(edges, longest)], len(descending))
        if max_padding_ratio < 1:
            while last - first > 1 and 1 - sum(descending[first:last]) / (longest * (last - first)) > max_padding_ratio:
                last -= 1
        cuts.append((first, last))
        first = last
    return cuts


def _cut_ascending(descending: list[float], edges: list[float], sizes: list[int]) -> list[tuple[int, int]]:
    """Return the same, cut from the shortest on, which makes as few batches."""
    cuts: list[tuple[int, int]] = []
    last = len(descending)

    def fits(first: int) -> bool:
        return last - first <= sizes[bisect_left(edges, descending[first])]

    while last:
        first = bisect_left(range(last), True, key=fits)
        cuts.append((first, last))
        last = first
    return cuts


def _pivoted(reader: Reader, batching: StreamBatching, random: Random) -> Iterator[list[int]]:
    """Yield batches of neighbours in the sorted buffer, around a random one, or without shuffle the oldest.

    A batch takes the neighbour that pads it less, as `speechbrain.dataio.iterators.indices_around_random_pivot` does,
    of equal ones the shorter, as long as its longest example's batch size and max_padding_ratio allow.
    """
    edges = batching.table.boundaries.tolist()
    sizes = batching.table.batch_sizes.tolist()
    ratio = 1.0 if batching.max_padding_ratio is None else batching.max_padding_ratio
    held: list[tuple[float, int]] = []  # ascending lengths with their places
    while True:
        lengths = reader.read(batching.buffer_size - len(held))
        read = zip(lengths, range(reader.count - len(lengths), reader.count), strict=True)
        if len(lengths) * _FEW < len(held):
            for example in read:
                insort(held, example)
        else:
            held.extend(read)
            held.sort()
        if reader.ended:
            break
        if batching.shuffle:
            pivot = int(random.random() * len(held))
        else:
            pivot = min(range(len(held)), key=[place for _, place in held].__getitem__)
        first, last = _around(held, pivot, edges, sizes, ratio)
        batch = [place for _, place in held[first:last]]
        del held[first:last]
        yield batch
    held.reverse()
    descending = [length for length, _ in held]
    apart = 0
    if batching.shuffle and not batching.drop_last and held:  # cut elsewhere in each epoch
        apart = min(int(random.random() * sizes[bisect_left(edges, descending[0])]), len(held))
    cuts = _cut_descending(descending[:apart], edges, sizes, ratio)
    for first, last in _cut_descending(descending[apart:], edges, sizes, ratio):
        cuts.append((apart + first, apart + last))
    batches: list[list[int]] = []
    for first, last in cuts:
        if not batching.drop_last or last - first == sizes[bisect_left(edges, descending[first])]:
            batches.append([place for _, place in held[first:last]])
    if batching.shuffle:
        random.shuffle(batches)
    yield from batches


def _around(
    held: list[tuple[float, int]], pivot: int, edges: list[float], sizes: list[int], max_padding_ratio: float
) -> tuple[int, int]:
    """Return where the batch around the pivot begins and ends."""
    first = pivot
    last = pivot + 1
    longest = held[pivot][0]
    total = longest
    size = sizes[bisect_left(edges, longest)]
    while True:
        count = last - first + 1
        # The true share of the batch with one more, × count.
        shorter = 0.0
        longer = 0.0
        if first and count <= size:
            shorter = (total + held[first - 1][0]) / longest
        if last < len(held):
            length = held[last][0]
            if count <= (size if length == longest else sizes[bisect_left(edges, length)]):
                longer = (total + length) / length
        share = max(shorter, longer)
        if share == 0 or 1 - share / count > max_padding_ratio:
            return first, last
        if shorter >= longer:
            first -= 1
            total += held[first][0]
        else:
            longest = held[last][0]
            size = sizes[bisect_left(edges, longest)]
            total += longest
            last += 1
