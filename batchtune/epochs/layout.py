"""Buckets cut into batches and dealt to ranks, by the number of examples in each bucket alone."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from batchtune.lengths import IntArray

Indices: TypeAlias = npt.NDArray[np.signedinteger[Any]]
"""Indices of examples or batches: 32 bits wide where these suffice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealing:
    """The way in which buckets become the batches of all ranks, which always have the same number."""

    world_size: int = 1
    same_bucket: bool = False  # whether, step by step, the batches of all ranks are of one bucket
    drop_last: bool = False  # whether to leave out examples that fill no batch, and batches not enough for all ranks

    @property
    def together(self) -> int:
        """The number of batches that make one step and stay together when batches are put in order."""
        if self.same_bucket:
            return self.world_size
        return 1


ON_ONE_RANK = Dealing()


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The places where buckets or pools, one after the other, are cut into batches; arrays of the shape (batches,)."""

    starts: Indices  # a batch's first example, as a position in this epoch's examples
    batch_sizes: Indices
    buckets: Indices  # the bucket whose batch size limits the batch
    rest: npt.NDArray[np.bool_]  # whether it holds what the full batches of its bucket or pool leave over
    dealing: Dealing
    count: int  # of examples in the data set
    in_order: bool = False  # whether unshuffled batches come in this order; else as their last examples are read
    most_per_rank: int | None = None  # with `drop_last`, the most batches that a rank runs; None: all that are enough

    @property
    def batches_per_rank(self) -> int:
        """The number of batches of each rank; those that are not enough for all ranks do not count."""
        enough = int(self.starts.size) // self.dealing.world_size
        if self.most_per_rank is None:
            return enough
        return min(enough, self.most_per_rank)

    @property
    def repeated_examples(self) -> int:
        """How many examples are in batches a second time."""
        if self.dealing.drop_last:
            return 0
        return int(self.batch_sizes.sum(dtype=np.int64)) - self.count


@dataclass(frozen=True, slots=True, eq=False)
class Tally:
    """How many batches of each size an epoch has in each bucket, over all ranks; arrays of the shape (kinds, buckets).

    The first kind is the full batches; others are smaller, and may differ in size from bucket to bucket. Sizes are
    undefined where the number is 0.
    """

    batch_sizes: IntArray
    numbers: IntArray

    @property
    def batches(self) -> int:
        """Number of all batches."""
        return int(self.numbers.sum())

    @property
    def examples(self) -> int:
        """Number of examples in them, each as often as it is dealt."""
        # Undefined sizes may be too large to multiply.
        return int(np.sum(np.where(self.numbers > 0, self.batch_sizes, 0) * self.numbers))

    @property
    def largest(self) -> IntArray:
        """Shape (buckets,): the size of the largest batch; 0 for an empty bucket."""
        return cast(IntArray, np.where(self.numbers > 0, self.batch_sizes, 0).max(axis=0))

    @property
    def smallest_batch_size(self) -> int:
        """The least number of examples in a batch."""
        return int(self.batch_sizes[self.numbers > 0].min())

    @property
    def largest_batch_size(self) -> int:
        """The greatest number of examples in a batch."""
        return int(self.largest.max())

    @property
    def mean_batch_size(self) -> float:
        """Examples / batches."""
        return self.examples / self.batches

    @property
    def batch_size_variation(self) -> float:
        """The standard deviation of the batch sizes / their mean."""
        used = self.numbers > 0
        mean = self.mean_batch_size
        variance = float(np.sum(self.numbers[used] * (self.batch_sizes[used] - mean) ** 2)) / self.batches
        return math.sqrt(variance) / mean


def positions(starts: Indices, sizes: Indices) -> IntArray:
    """Return the positions of batches' examples, batch after batch, from where each begins and how many it holds."""
    ends = np.cumsum(sizes, dtype=np.int64)
    places = np.repeat(starts - (ends - sizes), sizes)
    places += np.arange(places.size)
    return places


def index_dtype(largest: int) -> type[np.signedinteger[Any]]:
    """Return the integers that hold numbers up to `largest` in the least memory."""
    if largest <= np.iinfo(np.int32).max:
        return np.int32
    return np.int64


def _full_batches(counts: IntArray, batch_sizes: IntArray, dealing: Dealing) -> IntArray:
    """Return the number of full batches, shape (buckets,): as many for each rank if a step is of one bucket."""
    # Cut to one beyond the count, so that sizes do not overflow.
    return cast(IntArray, counts // (np.minimum(batch_sizes, counts + 1) * dealing.together) * dealing.together)


def tally(counts: IntArray, batch_sizes: IntArray, dealing: Dealing = ON_ONE_RANK) -> Tally:
    """Count the batches that `lay_out` cuts, by bucket and size.

    On one rank they are Σ ceil(n_b / B_b) whatever the shuffle, as for every sampler that fills buckets and emits the
    rest, SpeechBrain's among them. `counts`, the examples in each bucket, and `batch_sizes` have the shape (buckets,).
    """
    if dealing.world_size > 1:
        return _tally_of(lay_out(counts, batch_sizes, dealing), batch_sizes)
    full = _full_batches(counts, batch_sizes, dealing)
    if dealing.drop_last:
        return Tally(batch_sizes[np.newaxis], full[np.newaxis])
    left = counts - full * np.where(full > 0, batch_sizes, 0)
    return Tally(np.stack((batch_sizes, left)), np.stack((full, np.minimum(left, 1))))


def _tally_of(layout: Layout, full_sizes: IntArray) -> Tally:
    """Count the batches of a layout; `full_sizes`, shape (buckets,), are the sizes of full batches."""
    numbers_by_size: list[dict[int, int]] = [{int(size): 0} for size in full_sizes]
    batches = np.stack((layout.buckets, layout.batch_sizes), axis=1)
    kinds, numbers = np.unique(batches, axis=0, return_counts=True)
    for (bucket, size), number in zip(kinds.tolist(), numbers.tolist(), strict=True):
        numbers_by_size[bucket][size] = number
    shape = (max(map(len, numbers_by_size)), full_sizes.size)
    tally = Tally(np.ones(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64))
    for bucket, by_size in enumerate(numbers_by_size):
        tally.batch_sizes[: len(by_size), bucket] = list(by_size)
        tally.numbers[: len(by_size), bucket] = list(by_size.values())
    return tally


def lay_out(counts: IntArray, batch_sizes: IntArray, dealing: Dealing) -> Layout:
    """Cut buckets into batches so that every rank has the same number, and every example is in one of them.

    Without `same_bucket`, each bucket is cut into full batches and a rest. If the number of batches is no multiple of
    the ranks, the largest are split in two until it is; if even batches of one are too few, some are dealt twice. With
    `same_bucket`, a bucket is cut into groups of one full batch for each rank, and the rest is dealt evenly in smaller
    batches; if it holds fewer examples than there are ranks, others of the bucket are dealt twice. With `drop_last`
    nothing is split or repeated: rests are left out here, and full batches that are not enough for all ranks in
    `drawn`. The arguments are as for `tally`.
    """
    edges = np.concatenate(([0], np.cumsum(counts))).tolist()
    dtype = index_dtype(edges[-1])
    ranks = dealing.together
    full = _full_batches(counts, batch_sizes, dealing)
    parts: list[tuple[Indices, Indices, Indices, npt.NDArray[np.bool_]]] = []
    for bucket, (count, whole) in enumerate(zip(counts.tolist(), full.tolist(), strict=True)):
        size = min(int(batch_sizes[bucket]), count + 1)
        left = count - whole * size
        starts = np.arange(whole, dtype=np.int64) * size
        sizes = np.full(whole, size, dtype=np.int64)
        if left and not dealing.drop_last:
            dealt = left // ranks + (np.arange(ranks) < left % ranks)
            firsts = count - left + np.cumsum(dealt) - dealt
            firsts[dealt == 0] = np.arange(np.count_nonzero(dealt == 0)) % count
            starts = np.append(starts, firsts)
            sizes = np.append(sizes, np.maximum(dealt, 1))
        firsts_in_epoch = (starts + edges[bucket]).astype(dtype)
        rest = np.arange(starts.size) >= whole
        parts.append((firsts_in_epoch, sizes.astype(dtype), np.full(starts.size, bucket, dtype=dtype), rest))
    firsts_in_epoch, sizes, buckets, rest = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    layout = Layout(firsts_in_epoch, sizes, buckets, rest, dealing, edges[-1])
    if dealing.same_bucket or dealing.drop_last:
        return layout
    return evened(layout)


def evened(layout: Layout, batches: int | None = None) -> Layout:
    """Split the largest batches until there are `batches`, or a multiple of the ranks; repeat some if too few."""
    if batches is None:
        wanted = -layout.starts.size % layout.dealing.world_size
    else:
        wanted = batches - layout.starts.size
    if wanted == 0:
        return layout
    # Each split takes the largest, so no more than the `wanted` largest are touched; of equals the first.
    touched = np.argsort(-layout.batch_sizes.astype(np.int64), kind="stable")[:wanted]
    pieces = _split(
        [(int(layout.batch_sizes[batch]), int(layout.starts[batch]), int(batch)) for batch in touched], wanted
    )
    made_sizes, made_starts, made_of = np.array(sorted(pieces, key=lambda piece: piece[1]), dtype=np.int64).T
    kept = np.delete(np.arange(layout.starts.size), touched)
    starts = np.concatenate((layout.starts[kept], made_starts))
    sizes = np.concatenate((layout.batch_sizes[kept], made_sizes))
    source = np.concatenate((kept, made_of))
    order = np.argsort(starts, kind="stable")
    if repeats := layout.starts.size + wanted - order.size:
        order = np.sort(np.concatenate((order, np.resize(order, repeats))))
    dtype = layout.starts.dtype
    source = source[order]
    return replace(
        layout,
        starts=starts[order].astype(dtype),
        batch_sizes=sizes[order].astype(dtype),
        buckets=layout.buckets[source],
        rest=layout.rest[source],
    )


def _split(batches: list[tuple[int, int, int]], splits: int) -> list[tuple[int, int, int]]:
    """Split the largest of (size, start, batch) in near-equal halves, `splits` times or until all hold one."""
    heap = [(-size, start, batch) for size, start, batch in batches]
    heapq.heapify(heap)
    for _ in range(splits):
        if heap[0][0] > -2:
            break
        size, start, batch = heapq.heappop(heap)
        first = (1 - size) // 2
        heapq.heappush(heap, (-first, start, batch))
        heapq.heappush(heap, (size + first, start + first, batch))
    return [(-size, start, batch) for size, start, batch in heap]
