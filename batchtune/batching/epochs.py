"""One epoch's batches: which examples are in which batch, in which order, and on which rank.

Batches are made in four steps, each a function of arrays:

1. `group`: the examples, bucket after bucket. Once for a data set.
2. `lay_out`: where each bucket is cut into batches, split and dealt so that every rank has as many. That depends on
   the number of examples in each bucket alone, so it is the same in every epoch. `tally` counts them without a place.
3. `shuffled` and `drawn`: for each epoch another order of the examples within their buckets, and of the batches.
4. `assemble`: the batches of one rank; or `simulate`: only the shapes of all.

The sampler, the verification and the simulation of an epoch are the same steps.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np
import numpy.typing as npt

from batchtune.lengths import FloatArray, IntArray

Indices: TypeAlias = npt.NDArray[np.signedinteger[Any]]
"""Of examples or batches: 32 bits wide where these suffice."""

Ordering = Literal["random", "ascending", "descending"]
ORDERINGS: tuple[Ordering, ...] = get_args(Ordering)

# So many examples at once are looked up or made Python's own: enough to be fast, no matter beside a data set.
_AT_ONCE = 1 << 18
_AS_LISTS = 1 << 14
# What is drawn from (seed, epoch), each from a stream of its own.
_EXAMPLES, _BATCHES = 1, 2


@dataclass(frozen=True, slots=True, eq=False)
class EpochBatches:
    """An epoch's batches, in their order.

    Attributes:
        order: Shape (examples in batches,): indices of examples, batch after batch.
        starts: Shape (batches + 1,): batch i holds order[starts[i] : starts[i + 1]].
        buckets: Shape (batches,): index of each batch's bucket.
    """

    order: Indices
    starts: Indices
    buckets: Indices

    def __len__(self) -> int:
        return int(self.buckets.size)

    def __iter__(self) -> Iterator[list[int]]:
        return self.lists()

    def lists(self, first: int = 0) -> Iterator[list[int]]:
        """The batches as lists, from the one at `first` on."""
        while first < len(self):
            last = int(np.searchsorted(self.starts, self.starts[first] + _AS_LISTS, side="right")) - 1
            last = min(max(last, first + 1), len(self))
            bounds = self.starts[first : last + 1]
            examples = self.order[bounds[0] : bounds[-1]].tolist()
            for start, end in pairwise((bounds - bounds[0]).tolist()):
                yield examples[start:end]
            first = last


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealing:
    """How buckets become the batches of all ranks.

    Attributes:
        world_size: Number of ranks. Each has the same number of batches, always.
        same_bucket: Whether, step by step, the batches of all ranks are of one bucket.
        drop_last: Whether what fills no batch, and batches that are not enough for all ranks, are left out.
    """

    world_size: int = 1
    same_bucket: bool = False
    drop_last: bool = False


ON_ONE_RANK = Dealing()


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """In which order examples and batches come.

    Attributes:
        shuffle: Whether the examples are shuffled within their buckets, and the batches (`ordering` random).
        ordering: `ascending` and `descending` sort the batches stably by their longest length. Without `shuffle`,
            `random` leaves the batches as a streaming sampler would complete them.
        seed: At least 0.
        epoch: At least 0; each has a shuffle of its own.
    """

    shuffle: bool = True
    ordering: Ordering = "random"
    seed: int = 0
    epoch: int = 0

    def stream(self, of: int) -> np.random.Generator:
        """The random numbers of this epoch for one purpose."""
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(self.epoch, of)))


@dataclass(frozen=True, slots=True, eq=False)
class Grouped:
    """Examples, bucket after bucket.

    Attributes:
        order: Shape (examples,): indices of examples; within a bucket in their own order.
        counts: Shape (buckets,): number of examples in each bucket.
    """

    order: Indices
    counts: IntArray

    @property
    def edges(self) -> IntArray:
        """Shape (buckets + 1,): bucket b is order[edges[b] : edges[b + 1]]."""
        return cast(IntArray, np.concatenate(([0], np.cumsum(self.counts))))


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where the buckets, one after the other, are cut into batches. All arrays have the shape (batches,).

    Attributes:
        starts: A batch's first example, as a position in `Grouped.order`.
        batch_sizes: Number of examples.
        buckets: Ascending.
        rest: Whether the batch is of what the bucket's full batches leave over.
        dealing: As it was laid out.
        count: Number of examples of the data set.
        repeated_examples: How many examples stand in batches a second time.
    """

    starts: Indices
    batch_sizes: Indices
    buckets: Indices
    rest: npt.NDArray[np.bool_]
    dealing: Dealing
    count: int
    repeated_examples: int = 0

    @property
    def together(self) -> int:
        """How many batches in a row make one step, and stay together when batches are put in order."""
        return self.dealing.world_size if self.dealing.same_bucket else 1


@dataclass(frozen=True, slots=True, eq=False)
class Tally:
    """How many batches of which size each bucket gives, over all ranks. Both arrays have the shape (kinds, buckets).

    The first kind is the full batches; others are smaller, and may differ in size from bucket to bucket.

    Attributes:
        batch_sizes: Number of examples; where a bucket has no such batch it means nothing.
        numbers: How many such batches an epoch has.
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
        # Sizes that no batch has may be too large to be multiplied.
        return int(np.sum(np.where(self.numbers > 0, self.batch_sizes, 0) * self.numbers))

    @property
    def largest(self) -> IntArray:
        """Shape (buckets,): the size of the largest batch; 0 for an empty bucket."""
        return cast(IntArray, np.where(self.numbers > 0, self.batch_sizes, 0).max(axis=0))


def index_dtype(largest: int) -> type[np.signedinteger[Any]]:
    """The integers that hold numbers up to `largest` in the least memory."""
    return np.int32 if largest <= np.iinfo(np.int32).max else np.int64


def assign(lengths: npt.NDArray[Any], boundaries: FloatArray) -> npt.NDArray[np.integer[Any]]:
    """The bucket of each example, in as few bits as will do.

    Lengths of fewer bits than float64 are compared with the boundaries rounded alike: the longest length, rounded,
    is then still not beyond the last boundary, where that was the longest length itself.

    Args:
        lengths: Shape (examples,), numbers.
        boundaries: Shape (buckets,), ascending.

    Returns:
        Shape (examples,): `numpy.searchsorted(boundaries, length)`, left side; `buckets` beyond the last boundary.
    """
    edges: npt.NDArray[Any] = boundaries
    if lengths.dtype.kind == "f" and lengths.dtype.itemsize < boundaries.dtype.itemsize:
        edges = boundaries.astype(lengths.dtype)
    buckets = np.empty(lengths.size, dtype=np.min_scalar_type(boundaries.size))
    for start in range(0, lengths.size, _AT_ONCE):
        buckets[start : start + _AT_ONCE] = np.searchsorted(edges, lengths[start : start + _AT_ONCE], side="left")
    return buckets


def group(buckets: npt.NDArray[np.integer[Any]], num_buckets: int) -> Grouped:
    """Sorts examples into their buckets.

    Args:
        buckets: Shape (examples,): the bucket of each example; of 8 or 16 bits it is fast and lean.
        num_buckets: Their number.
    """
    order = np.argsort(buckets, kind="stable").astype(index_dtype(buckets.size), copy=False)
    return Grouped(order, cast(IntArray, np.bincount(buckets, minlength=num_buckets).astype(np.int64)))


def group_descending(lengths: FloatArray, boundaries: FloatArray) -> Grouped:
    """Groups examples that lie in descending order of their lengths, as those of `Lengths` do.

    Args:
        lengths: Shape (examples,), descending, none beyond the last boundary.
        boundaries: Shape (buckets,), ascending.
    """
    starts = lengths.size - np.searchsorted(lengths[::-1], boundaries, side="right")
    ends = np.concatenate(([lengths.size], starts[:-1]))
    dtype = index_dtype(lengths.size)
    parts = [np.arange(start, end, dtype=dtype) for start, end in zip(starts, ends, strict=True)]
    return Grouped(np.concatenate(parts), (ends - starts).astype(np.int64))


def count(counts: IntArray, batch_sizes: IntArray, dealing: Dealing) -> int:
    """The number of batches of each rank in an epoch, without making them.

    With one rank it is Σ ceil(n_b / B_b); where incomplete batches are dropped, Σ floor(n_b / B_b).

    Args:
        counts: Shape (buckets,): number of examples in each bucket.
        batch_sizes: Shape (buckets,), at least 1.
        dealing: How they are dealt.
    """
    ranks, groups = dealing.world_size, _group_sizes(counts, batch_sizes, dealing)
    batches = int(np.sum(counts // groups if dealing.drop_last else -(-counts // groups)))
    if dealing.same_bucket:
        return batches
    return batches // ranks if dealing.drop_last else -(-batches // ranks)


def _group_sizes(counts: IntArray, batch_sizes: IntArray, dealing: Dealing) -> IntArray:
    """Shape (buckets,): the examples of a full batch, or of one for each rank where these are of one bucket."""
    # Sizes beyond any count are as good as one beyond it, and do not overflow.
    sizes = np.minimum(batch_sizes, counts + 1)
    return sizes * dealing.world_size if dealing.same_bucket else sizes


def tally(counts: IntArray, batch_sizes: IntArray, dealing: Dealing) -> Tally:
    """Counts the batches that `lay_out` cuts, by bucket and size, without making them.

    On one rank they are Σ ceil(n_b / B_b), whatever the shuffle. That is so for every sampler that fills buckets and
    emits what is left over, SpeechBrain's among them.

    Args:
        counts: Shape (buckets,): number of examples in each bucket.
        batch_sizes: Shape (buckets,), at least 1.
        dealing: How they are dealt.
    """
    ranks = dealing.world_size if dealing.same_bucket else 1
    full = counts // _group_sizes(counts, batch_sizes, dealing) * ranks
    left = counts - full * np.where(full > 0, batch_sizes, 0)
    if dealing.drop_last:
        return Tally(batch_sizes[np.newaxis], full[np.newaxis])
    if ranks > 1:
        each, more = left // ranks, left % ranks
        sizes = (batch_sizes, each + 1, np.maximum(each, 1))
        return Tally(np.stack(sizes), np.stack((full, more, np.where(left > 0, ranks - more, 0))))
    cut = Tally(np.stack((batch_sizes, left)), np.stack((full, np.minimum(left, 1))))
    return _tally_evened(counts, cut, dealing.world_size)


def _tally_evened(counts: IntArray, cut: Tally, ranks: int) -> Tally:
    """As `_evened`: splits the largest batches until their number is a multiple of the ranks, or repeats some."""
    wanted = -cut.batches % ranks
    if wanted == 0:
        return cut
    edges = np.concatenate(([0], np.cumsum(counts)))
    numbers = cut.numbers.copy()
    touched: list[tuple[int, int, int]] = []
    kinds, buckets = np.nonzero(numbers)
    for at in np.lexsort((buckets, -cut.batch_sizes[kinds, buckets])).tolist():
        kind, bucket = int(kinds[at]), int(buckets[at])
        size, some = int(cut.batch_sizes[kind, bucket]), min(int(numbers[kind, bucket]), wanted - len(touched))
        first = int(edges[bucket]) if kind == 0 else int(edges[bucket + 1]) - size
        touched += [(size, first + size * index, bucket) for index in range(some)]
        numbers[kind, bucket] -= some
    pieces = Counter((bucket, size) for size, _, bucket in _split(touched, wanted))
    repeats = -(int(numbers.sum()) + pieces.total()) % ranks
    if repeats:  # all are batches of one by now: the first of them come again, as often as it takes
        again, rest = divmod(repeats, int(edges[-1]))
        for bucket, number in enumerate((again * counts + np.clip(rest - edges[:-1], 0, counts)).tolist()):
            pieces[bucket, 1] += number
    rows = Counter(bucket for bucket, _ in pieces)
    sizes = np.ones((max(rows.values()), counts.size), dtype=np.int64)
    more = np.zeros_like(sizes)
    for (bucket, size), number in pieces.items():
        rows[bucket] -= 1
        sizes[rows[bucket], bucket], more[rows[bucket], bucket] = size, number
    return Tally(np.concatenate((cut.batch_sizes, sizes)), np.concatenate((numbers, more)))


def lay_out(counts: IntArray, batch_sizes: IntArray, dealing: Dealing) -> Layout:
    """Cuts buckets into batches so that every rank has the same number, and every example is in one of them.

    Without `same_bucket`, all buckets are cut into full batches and a rest each. Where the number of batches is no
    multiple of the ranks, the largest are split in two until it is; where even batches of one are too few, some are
    dealt twice. With `same_bucket`, a bucket is cut into groups of one full batch for each rank, and the rest is dealt
    evenly in smaller batches; where that holds fewer examples than there are ranks, others of the bucket are dealt
    twice. With `drop_last` nothing is split or repeated: rests are left out here, and full batches that are not enough
    for all ranks in `drawn`.

    Args:
        counts: Shape (buckets,): number of examples in each bucket.
        batch_sizes: Shape (buckets,), at least 1.
        dealing: How they are dealt.
    """
    cut = _cut_for_ranks if dealing.same_bucket else _cut
    edges = np.concatenate(([0], np.cumsum(counts))).tolist()
    full = counts - counts % _group_sizes(counts, batch_sizes, dealing)
    dtype = index_dtype(edges[-1])
    parts: list[tuple[Indices, Indices, npt.NDArray[np.bool_]]] = []
    for bucket, edge in enumerate(edges[:-1]):
        firsts, sizes = cut(int(counts[bucket]), int(batch_sizes[bucket]), dealing)
        parts.append(((firsts + edge).astype(dtype), sizes.astype(dtype), firsts >= full[bucket]))
    made = [firsts.size for firsts, _, _ in parts]
    starts, made_sizes, rest = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    buckets = np.repeat(np.arange(len(parts), dtype=dtype), made)
    if dealing.same_bucket:
        # What is dealt twice starts anywhere; it belongs to the rest all the same, as the batch beside it.
        rest = np.repeat(rest[:: dealing.world_size], dealing.world_size)
    layout = Layout(starts, made_sizes, buckets, rest, dealing, edges[-1])
    if not (dealing.same_bucket or dealing.drop_last):
        layout = _evened(layout)
    if dealing.drop_last:
        return layout
    return replace(layout, repeated_examples=int(layout.batch_sizes.sum(dtype=np.int64)) - layout.count)


def _cut(count: int, size: int, dealing: Dealing) -> tuple[IntArray, IntArray]:
    """Starts and sizes of a bucket's batches: full ones and, unless it is dropped, a rest."""
    kept = count - count % size if dealing.drop_last else count
    starts = np.arange(0, kept, size, dtype=np.int64)
    return starts, np.minimum(size, kept - starts)


def _cut_for_ranks(count: int, size: int, dealing: Dealing) -> tuple[IntArray, IntArray]:
    """The same in groups of one batch for each rank; the rest in batches that differ by one example at most."""
    ranks = dealing.world_size
    left = count % (size * ranks)
    starts = np.arange(0, count - left, size, dtype=np.int64)
    sizes = np.full(starts.size, size, dtype=np.int64)
    if left == 0 or dealing.drop_last:
        return starts, sizes
    dealt = left // ranks + (np.arange(ranks) < left % ranks)
    firsts = count - left + np.cumsum(dealt) - dealt
    empty = dealt == 0
    firsts[empty] = np.arange(int(empty.sum())) % count
    return np.concatenate((starts, firsts)), np.concatenate((sizes, np.maximum(dealt, 1)))


def _evened(layout: Layout) -> Layout:
    """Splits the largest batches until their number is a multiple of the ranks; repeats some where it can't be."""
    ranks = layout.dealing.world_size
    wanted = -layout.starts.size % ranks
    if wanted == 0:
        return layout
    # Each split takes the largest, so no more than the `wanted` largest are touched; of equals the first.
    touched = np.argsort(-layout.batch_sizes.astype(np.int64), kind="stable")[:wanted]
    pieces = _split([(int(layout.batch_sizes[at]), int(layout.starts[at]), int(at)) for at in touched], wanted)
    made = np.array(sorted(pieces, key=lambda piece: piece[1]), dtype=np.int64).reshape(-1, 3)
    kept = np.ones(layout.starts.size, dtype=np.bool_)
    kept[touched] = False
    starts = np.concatenate((layout.starts[kept], made[:, 1]))
    sizes = np.concatenate((layout.batch_sizes[kept], made[:, 0]))
    source = np.concatenate((np.flatnonzero(kept), made[:, 2]))
    order = np.argsort(starts, kind="stable")
    repeats = -order.size % ranks
    if repeats:
        order = np.sort(np.concatenate((order, np.resize(order, repeats))))
    dtype, source = layout.starts.dtype, source[order]
    return replace(
        layout,
        starts=starts[order].astype(dtype),
        batch_sizes=sizes[order].astype(dtype),
        buckets=layout.buckets[source],
        rest=layout.rest[source],
    )


def _split(batches: list[tuple[int, int, int]], splits: int) -> list[tuple[int, int, int]]:
    """Splits the largest of (size, start, batch) in near-equal halves, so many times as there is one of two or more."""
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


def shuffled(grouped: Grouped, drawing: Drawing) -> Indices:
    """The examples in this epoch's order, bucket after bucket.

    A shuffle of all examples that are then sorted into buckets, as streaming samplers work, gives each bucket's
    examples in a uniformly random order; so does a shuffle of each bucket.
    """
    if not drawing.shuffle:
        return grouped.order
    random = drawing.stream(_EXAMPLES)
    order: Indices = grouped.order.copy()
    for start, end in pairwise(grouped.edges.tolist()):
        random.shuffle(order[start:end])
    return order


def drawn(layout: Layout, examples: Indices, drawing: Drawing, lengths: npt.NDArray[Any] | None = None) -> Indices:
    """In which order the batches come.

    Args:
        layout: The batches.
        examples: Shape (examples,), as `shuffled` gives them.
        drawing: How they are put in order.
        lengths: Shape (examples,), by index of the example; needed where they are sorted.

    Returns:
        Shape (steps × world_size,): indices of batches. Batch i is the one of rank i % world_size at step
        i // world_size.

    Raises:
        ValueError: Batches are to be sorted without lengths.
    """
    together, ranks = layout.together, layout.dealing.world_size
    units = layout.starts.size // together
    if drawing.shuffle:
        order: Indices = np.arange(units, dtype=index_dtype(layout.starts.size))
        drawing.stream(_BATCHES).shuffle(order)
    else:
        order = np.argsort(_completed(layout, examples), kind="stable")
    if layout.dealing.drop_last:
        order = order[: units - units % (ranks // together)]
    if drawing.ordering != "random":
        if lengths is None:
            raise ValueError("to sort batches by length, the lengths are needed")
        longest = _longest(lengths, examples, layout.starts, layout.batch_sizes).reshape(-1, together).max(axis=1)
        keys = longest[order] if drawing.ordering == "ascending" else -longest[order]
        order = order[np.argsort(keys, kind="stable")]
    if together == 1:
        return order
    return (order[:, np.newaxis] * together + np.arange(together, dtype=order.dtype)).ravel()


def _completed(layout: Layout, examples: Indices) -> IntArray:
    """When a sampler that reads the examples one by one has a step's batches together.

    Full batches when their last example was read, then the rests, bucket by bucket.
    """
    last = examples[layout.starts + layout.batch_sizes - 1].reshape(-1, layout.together).max(axis=1)
    rest, buckets = layout.rest[:: layout.together], layout.buckets[:: layout.together]
    return cast(IntArray, np.where(rest, layout.count + buckets.astype(np.int64), last.astype(np.int64)))


def dropped_examples(layout: Layout, batches: Indices) -> int:
    """How many examples are in none of the batches that were drawn."""
    return layout.count - int(layout.batch_sizes[batches].sum(dtype=np.int64)) + layout.repeated_examples


def assemble(
    grouped: Grouped,
    layout: Layout,
    drawing: Drawing,
    *,
    rank: int = 0,
    lengths: npt.NDArray[Any] | None = None,
) -> EpochBatches:
    """The batches of one rank in one epoch.

    Args:
        grouped: The examples.
        layout: Made of `grouped.counts`.
        drawing: Seed, epoch and order.
        rank: Whose batches.
        lengths: Shape (examples,), by index of the example; needed where batches are sorted.

    Raises:
        ValueError: Batches are to be sorted without lengths.
    """
    examples = shuffled(grouped, drawing)
    mine = drawn(layout, examples, drawing, lengths)[rank :: layout.dealing.world_size]
    buckets, starts, sizes = layout.buckets[mine], layout.starts[mine], layout.batch_sizes[mine]
    bounds = np.zeros(mine.size + 1, dtype=np.int64)
    np.cumsum(sizes, out=bounds[1:])
    order = np.empty(int(bounds[-1]), dtype=examples.dtype)
    for batches, positions, _ in _positions(starts, sizes):
        order[bounds[batches.start] : bounds[batches.stop]] = examples[positions]
    return EpochBatches(order, bounds, buckets)


@dataclass(frozen=True, slots=True, eq=False)
class EpochShapes:
    """The shapes of an epoch's batches, in their order. All arrays have the shape (batches of all ranks,).

    Attributes:
        batch_sizes: Number of examples.
        lengths: Length of the longest.
        targets: The longest target length, or None where there are none.
        buckets: Index of the bucket.
    """

    batch_sizes: IntArray
    lengths: FloatArray
    targets: FloatArray | None
    buckets: IntArray

    def __len__(self) -> int:
        return int(self.batch_sizes.size)


def simulate(
    grouped: Grouped, layout: Layout, drawing: Drawing, lengths: FloatArray, targets: FloatArray | None = None
) -> EpochShapes:
    """The shapes of the batches that all ranks have in one epoch: those of step 0, rank by rank, then step 1.

    Args:
        grouped: The examples.
        layout: Made of `grouped.counts`.
        drawing: Seed, epoch and order.
        lengths: Shape (examples,), by index of the example.
        targets: Likewise, or None.
    """
    examples = shuffled(grouped, drawing)
    batches = drawn(layout, examples, drawing, lengths)
    starts, sizes = layout.starts[batches], layout.batch_sizes[batches]
    return EpochShapes(
        sizes.astype(np.int64),
        _longest(lengths, examples, starts, sizes),
        None if targets is None else _longest(targets, examples, starts, sizes),
        layout.buckets[batches].astype(np.int64),
    )


def _longest(values: npt.NDArray[Any], examples: Indices, starts: Indices, sizes: Indices) -> FloatArray:
    """Shape (batches,): the largest value of each batch."""
    longest = np.empty(starts.size)
    for batches, positions, firsts in _positions(starts, sizes):
        longest[batches] = np.maximum.reduceat(values[examples[positions]], firsts)
    return longest


def _positions(starts: Indices, sizes: Indices) -> Iterator[tuple[slice, IntArray, IntArray]]:
    """The positions of batches' examples, some batches at a time: which, positions, where in these each begins."""
    ends = np.cumsum(sizes, dtype=np.int64)
    low = done = 0
    while low < starts.size:
        high = max(low + 1, int(np.searchsorted(ends, done + _AT_ONCE, side="right")))
        some = sizes[low:high]
        firsts = ends[low:high] - some - done
        positions = np.repeat(starts[low:high] - firsts, some)
        positions += np.arange(positions.size)
        yield slice(low, high), positions, firsts
        low, done = high, int(ends[high - 1])
