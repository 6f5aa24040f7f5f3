"""The batches of Lhotse's DynamicBucketingSampler, list for list, without cuts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from batchtune.batching.epochs import EpochBatches

# With `sync_buckets`, Lhotse chooses the buckets from a generator of this seed, the same in every epoch.
_BUCKET_SEED = 1234
# Below so many a plain loop is faster than arrays.
_FEWEST_AT_ONCE = 256


def lhotse_batches(
    lengths: npt.ArrayLike,
    duration_bins: npt.ArrayLike,
    batch_sizes: npt.ArrayLike,
    *,
    shuffle: bool = False,
    drop_last: bool = False,
    seed: int = 0,
    epoch: int = 0,
    buffer_size: int = 20_000,
    sync_buckets: bool = True,
) -> EpochBatches:
    """The batches of Lhotse's DynamicBucketingSampler with a fixed batch size per bucket, for one process.

    That is `DynamicBucketingSampler(cuts, constraint=FixedBucketBatchSizeConstraint(max_seq_len_buckets,
    batch_sizes), duration_bins=duration_bins, ...)` after `set_epoch(epoch)`, with `world_size=1`, iterated over
    outside a data loader's worker. Under this constraint `quadratic_duration` and `num_buckets` have no effect.

    It reads `buffer_size` cuts into one queue per bin, and one more. Again and again it chooses a queue, takes a batch
    out of it, and reads as many more. It chooses among the queues that hold a full batch; where there is none, among
    what is left, unless `drop_last`. How it chooses and takes:

    - `sync_buckets`: a random queue (from the seed 1234 in every epoch, whatever `seed` is), or the nearest one that
      is ready, first downwards. Without it: a random one of those ready, from the seed seed + epoch.
    - `shuffle`: all of the queue is shuffled for every batch, from the seed seed + epoch. Without it: in their order.

    Two things to know. With `drop_last`, or without `sync_buckets`, an epoch can end while cuts are still unread: when
    no queue of a small buffer holds a full batch. And without `sync_buckets` it loses what is left even without
    `drop_last`: it takes empty queues for filled ones, and ends at the first one that it happens to choose.

    Source: `lhotse.dataset.sampling.dynamic_bucketing`, Lhotse 1.33; the draws are Python's `random.Random`.

    Args:
        lengths: Shape (examples,), not NaN: the cuts' durations, in the order of the cuts.
        duration_bins: Shape (bins,), ascending; a length on a bin's edge is in the bin.
        batch_sizes: At least 1 each. Shape (bins,) where the constraint's `max_seq_len_buckets` are the
            `duration_bins`, as NeMo does it: the last bin's edge is the longest length allowed, and the queue behind it
            stays empty. Shape (bins + 1,) where it has one edge more, beyond the longest length.
        shuffle: As Lhotse's.
        drop_last: As Lhotse's.
        seed: As Lhotse's, a number.
        epoch: What `set_epoch` was given.
        buffer_size: As Lhotse's.
        sync_buckets: As Lhotse's.

    Raises:
        ValueError: The arguments break one of these rules, or the sampler comes upon a length beyond the last allowed
            one, where Lhotse fails an assertion in the middle of the epoch.
    """
    values, bins, sizes = np.asarray(lengths), np.asarray(duration_bins), np.asarray(batch_sizes)
    ids: list[int] = np.searchsorted(bins, values).tolist()
    queues = _Queues(sizes.tolist(), bins.size + 1)
    words = _Words(random.Random(seed + epoch))
    if sync_buckets:
        chooser = _synced_choices(queues, _Words(random.Random(_BUCKET_SEED), at_once=1 << 10), drop_last)
    else:
        chooser = _free_choices(queues, words, drop_last)
    order: list[int] = []
    starts, buckets = [0], []
    read = queues.put(ids, 0, buffer_size)
    for bucket in chooser:
        batch = queues.take(bucket, words if shuffle else None)
        order += batch
        starts.append(len(order))
        buckets.append(bucket)
        read = queues.put(ids, read, len(batch))
    return EpochBatches(
        order=np.array(order, dtype=np.int64),
        starts=np.array(starts, dtype=np.int64),
        buckets=np.array(buckets, dtype=np.int64),
    )


class _Queues:
    """What the sampler has read and not yet given out, as indices of examples in the order of reading."""

    def __init__(self, batch_sizes: list[int], number: int) -> None:
        self.batch_sizes = batch_sizes
        self.queues: list[list[int]] = [[] for _ in range(number)]

    def __len__(self) -> int:
        return len(self.queues)

    def put(self, ids: list[int], start: int, number: int) -> int:
        """Reads examples from `start`; gives where it stopped."""
        end = min(len(ids), start + max(0, number))
        queues = self.queues
        for index in range(start, end):
            queues[ids[index]].append(index)
        return end

    def is_filled(self, bucket: int) -> bool:
        """Whether there is anything in it."""
        return len(self.queues[bucket]) > 0

    def is_ready(self, bucket: int) -> bool:
        """Whether it holds a full batch."""
        queue = self.queues[bucket]
        if bucket < len(self.batch_sizes):
            return len(queue) >= self.batch_sizes[bucket]
        if queue:
            raise ValueError(f"example {queue[0]} is longer than the last bucket allows")
        return False

    def take(self, bucket: int, words: _Words | None) -> list[int]:
        """Takes a batch out, in random order where words are given."""
        queue, size = self.queues[bucket], self.batch_sizes[bucket]
        if words is None:
            batch = queue[:size]
            del queue[:size]
            return batch
        places = words.first_shuffled(len(queue), size)
        batch = [queue[place] for place in places]
        for place in sorted(places, reverse=True):
            del queue[place]
        return batch


def _free_choices(queues: _Queues, words: _Words, drop_last: bool) -> Iterator[int]:
    """The queues that it takes from without `sync_buckets`, until it ends."""
    while True:
        ready = [bucket for bucket in range(len(queues)) if queues.is_ready(bucket)]
        if not ready:
            if drop_last:
                return
            # Lhotse means those that are not empty, but asks queues for their truth, which is always true.
            ready = list(range(len(queues)))
        bucket = ready[words.below(len(ready))]
        if not queues.is_filled(bucket):
            return
        yield bucket


def _synced_choices(queues: _Queues, words: _Words, drop_last: bool) -> Iterator[int]:
    """The queues that it takes from with `sync_buckets`, until it ends."""
    while True:
        first = words.below(len(queues))
        bucket = _nearest(len(queues), first, queues.is_ready)
        if bucket is None and not drop_last:
            bucket = _nearest(len(queues), first, queues.is_filled)
        if bucket is None:
            return
        yield bucket


def _nearest(number: int, first: int, suits: Callable[[int], bool]) -> int | None:
    """The bucket nearest to the first that suits, the lower of two."""
    if suits(first):
        return first
    for distance in range(1, number):
        for bucket in (first - distance, first + distance):
            if 0 <= bucket < number and suits(bucket):
                return bucket
    return None


class _Words:
    """What `random.Random` draws, taken as words of 32 bits, many at once."""

    def __init__(self, generator: random.Random, at_once: int = 1 << 16) -> None:
        self._generator = generator
        self._at_once = at_once
        self._words = np.zeros(0, dtype=np.uint32)
        self._at = 0

    def below(self, end: int) -> int:
        """As `random.Random.randrange(end)`; `random.Random.choice` draws the same."""
        shift = 32 - end.bit_length()
        while True:
            drawn = int(self._look(1)[0]) >> shift
            self._at += 1
            if drawn < end:
                return drawn

    def first_shuffled(self, number: int, wanted: int) -> list[int]:
        """The first `wanted` of the numbers 0 to `number` - 1 as `random.Random.shuffle` leaves them.

        It exchanges the place i, from the last one down to 1, with one drawn from 0 to i.
        """
        drawn = self._exchanges(number)
        wanted = min(wanted, number)
        places: list[int] = _first_places(drawn[: number - wanted], wanted).tolist()
        for place, other in zip(range(wanted - 1, 0, -1), drawn[number - wanted :].tolist(), strict=True):
            places[place], places[other] = places[other], places[place]
        return places

    def _look(self, number: int) -> npt.NDArray[np.uint32]:
        """The next words, without taking them."""
        if self._at + number > self._words.size:
            count = max(number, self._at_once)
            drawn = self._generator.getrandbits(32 * count).to_bytes(4 * count, "little")
            self._words = np.concatenate((self._words[self._at :], np.frombuffer(drawn, dtype="<u4")))
            self._at = 0
        return self._words[self._at : self._at + number]

    def _exchanges(self, number: int) -> npt.NDArray[np.int32]:
        """What a shuffle draws for the places from `number` - 1 down to 1."""
        parts = [np.zeros(0, dtype=np.int32)]
        while number >= _FEWEST_AT_ONCE:
            parts.append(self._exchanges_of_as_many_bits(number))
            number -= parts[-1].size
        parts.append(np.array(self._exchanges_one_by_one(number), dtype=np.int32))
        return np.concatenate(parts)

    def _exchanges_one_by_one(self, number: int) -> list[int]:
        found = []
        while number > 1:
            bits = number.bit_length()
            # Numbers down to 2 ** (bits - 1) need as many bits. Each takes one word or more, as words too large are
            # passed over: so many can be taken without looking whether one has come to the end.
            words = self._look(number - max(1, (1 << (bits - 1)) - 1))
            self._at += words.size
            for drawn in (words >> np.uint32(32 - bits)).tolist():
                if drawn < number:
                    number -= 1
                    found.append(drawn)
        return found

    def _exchanges_of_as_many_bits(self, number: int) -> npt.NDArray[np.int32]:
        """The next draws below `number`, `number` - 1 and so on, as long as those have as many bits; at least one.

        A word counts if it is below the number it is drawn for, which depends on how many have counted before it. That
        has one solution only, so whatever guess agrees with itself is it; the expected course is a good first one.
        """
        bits = number.bit_length()
        needed = number - (1 << (bits - 1)) + 1
        words = self._look(needed + needed // 2 + 64)
        drawn = (words >> np.uint32(32 - bits)).astype(np.int32)
        counts = drawn < number * np.exp(np.arange(drawn.size) * (-1.0 / (1 << bits)))
        while True:
            until = np.cumsum(counts, dtype=np.int32)
            better = drawn < number - (until - counts)
            if np.array_equal(better, counts):
                break
            counts = better
        which = np.flatnonzero(counts)[:needed]
        self._at += int(which[-1]) + 1 if which.size == needed else drawn.size
        exchanges: npt.NDArray[np.int32] = drawn[which]
        return exchanges


def _first_places(drawn: npt.NDArray[np.int32], wanted: int) -> npt.NDArray[np.int32]:
    """What lies at the first `wanted` places once the others, from the last one down, were exchanged with `drawn`.

    Followed backwards: what lies at a place came to it from the lowest place that was exchanged with it, as that was
    the last to be; and so on from there.
    """
    number = wanted + drawn.size
    came_from = np.arange(number, dtype=np.int32)
    places = came_from[wanted:][::-1].copy()
    moved = drawn != places  # a place exchanged with itself tells nothing
    came_from[drawn[moved]] = places[moved]  # of several the last one counts, which is the lowest
    found: npt.NDArray[np.int32] = came_from[:wanted]
    while True:
        further = came_from[found]
        if np.array_equal(further, found):
            break
        found = further
    return found
