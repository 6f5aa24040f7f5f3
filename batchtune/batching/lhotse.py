"""Lhotse's buckets and the batches of its DynamicBucketingSampler, list for list, without cuts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from batchtune.batching.epochs import EpochBatches
from batchtune.lengths import FloatArray

# With `sync_buckets`, Lhotse chooses the buckets from a generator of this seed, the same in every epoch.
_BUCKET_SEED = 1234
# Below so many a plain loop is faster than arrays.
_FEWEST_AT_ONCE = 256


def lhotse_boundaries(lengths: npt.ArrayLike, num_buckets: int) -> FloatArray:
    """The inner boundaries that Lhotse estimates, to the bit: buckets of about the same total length.

    It goes through the sorted lengths and begins a bucket as soon as the one before holds more than
    total / num_buckets. So a boundary is the shortest length of a bucket that was to begin there; but its sampler
    puts a length on a boundary into the bucket below (`bisect_left`). As every bucket overshoots its share, there can
    be fewer buckets than asked for, without a word; boundaries can be repeated, which leaves buckets empty. Only
    the length counts, whatever the constraint's `quadratic_duration`.

    DynamicBucketingSampler shows it the first 10,000 cuts (`num_cuts_for_bins_estimate`), not all.

    Source: `lhotse.dataset.sampling.dynamic_bucketing.estimate_duration_buckets`, Lhotse 1.33.

    Args:
        lengths: Shape (examples,), not negative.
        num_buckets: At least 2, at most the number of examples.

    Returns:
        At most num_buckets - 1 boundaries, ascending.

    Raises:
        ValueError: `num_buckets` is out of range, where Lhotse fails an assertion; or a length is negative or NaN.
    """
    values = np.array(lengths, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"lengths must be one-dimensional, got shape {values.shape}")
    if not (values >= 0).all():
        raise ValueError("lengths must not be negative or NaN")
    if not 2 <= num_buckets <= values.size:
        raise ValueError(f"num_buckets must be from 2 to the number of lengths, {values.size}, got {num_buckets}")
    values.sort()
    share = values.sum() / num_buckets
    boundaries = []
    start = _overshoot(values, 0, share, values.size // num_buckets)
    while start < values.size:
        boundaries.append(values[start])
        start = _overshoot(values, start, share, values.size // num_buckets)
    return np.array(boundaries, dtype=np.float64)


def _overshoot(values: FloatArray, start: int, share: float, window: int) -> int:
    """The end of the shortest run from `start` that sums to more than `share`; all there are where none does."""
    while True:
        # Summed one after another, as Lhotse does: another order would round differently.
        totals = np.cumsum(values[start : start + window])
        end = start + int(np.searchsorted(totals, share, side="right"))
        if end < start + totals.size:
            return end + 1
        if start + window >= values.size:
            return int(values.size)
        window *= 2


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
    _check(values, bins, sizes)
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


def _check(lengths: npt.NDArray[Any], bins: npt.NDArray[Any], sizes: npt.NDArray[Any]) -> None:
    if lengths.ndim != 1 or bins.ndim != 1 or sizes.ndim != 1:
        raise ValueError("lengths, duration_bins and batch_sizes must be one-dimensional")
    if np.isnan(lengths).any():
        raise ValueError("lengths must not be NaN")
    if not (bins[1:] >= bins[:-1]).all():
        raise ValueError("duration_bins must be ascending")
    if sizes.size not in (bins.size, bins.size + 1):
        raise ValueError(f"{bins.size} duration_bins need as many batch_sizes, or one more, got {sizes.size}")
    if sizes.size and (sizes.dtype.kind not in "iu" or sizes.min() < 1):
        raise ValueError("batch_sizes must be whole numbers, at least 1")


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
