"""The ways to make batches: from the buckets of a table, or from pools that are sorted by length.

Buckets pad a batch to its longest example, which may lie anywhere in the bucket, and each leaves a rest. Sorted pools
avoid both, but are less random: two examples of like length that fall into one pool are likely to be batch mates.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from batchtune.epochs.batch_order import EXAMPLES, Cut, Drawing
from batchtune.epochs.layout import Dealing, Indices, Layout, evened, index_dtype, lay_out
from batchtune.epochs.table import Buckets, BucketTable
from batchtune.lengths import FloatArray, Histogram, IntArray

# Examples that are sorted or cut at once.
_AT_ONCE = 1 << 20
# Compare batch sizes that differ by this factor: the best cut then costs at most 0.15% more than with all sizes.
_NEXT_SIZE = 1.05
# Small batches are left out where enlarging one costs at most this share of the overhead, and no larger ones than this.
_NO_MATTER = 0.02
_LARGEST_BLOCK = 64
# In larger pools the best cut gains next to nothing.
_LARGEST_COSTED = 20_000
# All epochs in pools have as many batches as the longest of the first; longer ones are reshuffled, up to 32 times.
_FIRST_EPOCHS = 3
_ATTEMPTS = 32


@dataclass(frozen=True, slots=True, eq=False)
class Batching:
    """A way to make batches, as a sampler config describes it.

    With `batch_overhead`, the cost of a batch besides its padded length, in the unit of length, pools are cut so that
    the sum of both is least; without, each batch holds as many examples as fit.
    """

    table: BucketTable  # in pools, a batch holds at most the batch size of its longest example's bucket
    pool_size: int | None = None  # the most examples of a pool; None: batches are made in buckets
    batch_overhead: float | None = None

    def largest_batches(self, histogram: Histogram) -> tuple[IntArray, FloatArray]:
        """Return size and longest length of the largest batch for each bucket with examples.

        In pools a batch may also hold examples of shorter buckets.
        """
        sizes, longest = self.table.largest_batches(histogram)
        if self.pool_size is None:
            return sizes, longest
        up_to = histogram.cumulative[np.searchsorted(histogram.lengths, longest)]
        allowed_sizes = self.table.batch_sizes[self.table.assign(longest)]
        return np.minimum(np.minimum(allowed_sizes, up_to), self.pool_size), longest

    def batcher(self, lengths: npt.NDArray[Any], targets: npt.NDArray[Any] | None = None) -> Batcher:
        """Return the batcher of examples with these lengths, none beyond the last boundary."""
        if self.pool_size is None:
            return BucketBatcher(self.table.assign(lengths, targets), self.table.batch_sizes)
        return PoolBatcher(lengths, self)


class Batcher(ABC):
    """A data set that can be cut into the batches of any epoch."""

    @abstractmethod
    def cut(self, drawing: Drawing, dealing: Dealing) -> Cut:
        """Return an epoch's examples, cut into batches; in pools one epoch may have a few more than another."""

    def equal_cut(self, drawing: Drawing, dealing: Dealing) -> Cut:
        """Return a cut with as many batches in every epoch, for trainers that ask for their number once."""
        return self.cut(drawing, dealing)

    def layout(self, drawing: Drawing, dealing: Dealing) -> Layout:
        """Return where an epoch's examples are cut into batches, as many in every epoch."""
        return self.equal_cut(drawing, dealing).layout


class BucketBatcher(Batcher):
    """Examples, bucket after bucket, cut at the same places in every epoch."""

    def __init__(self, buckets: Buckets, batch_sizes: IntArray) -> None:
        """Sort examples into their buckets, one for each example; 8 or 16 bits are fast and lean."""
        # Shape (examples,): indices of examples, within a bucket in their own order; and shape (buckets,).
        self._order = np.argsort(buckets, kind="stable").astype(index_dtype(buckets.size), copy=False)
        self._counts = cast(IntArray, np.bincount(buckets, minlength=batch_sizes.size).astype(np.int64))
        self._batch_sizes = batch_sizes
        self._layout: Layout | None = None

    def cut(self, drawing: Drawing, dealing: Dealing) -> Cut:
        """As for every batcher.

        Shuffling each bucket gives the same distribution as shuffling all examples and then sorting them into buckets,
        as streaming samplers do.
        """
        layout = self.layout(drawing, dealing)
        if not drawing.shuffle:
            return Cut(self._order, layout)
        random = drawing.stream(EXAMPLES)
        order: Indices = self._order.copy()
        for start, end in pairwise([0, *np.cumsum(self._counts).tolist()]):
            random.shuffle(order[start:end])
        return Cut(order, layout)

    def layout(self, drawing: Drawing, dealing: Dealing) -> Layout:
        """As for every batcher; the same in every epoch."""
        if self._layout is None or self._layout.dealing != dealing:
            self._layout = lay_out(self._counts, self._batch_sizes, dealing)
        return self._layout


class PoolBatcher(Batcher):
    """Examples in pools: shuffled, taken `pool_size` at a time, sorted by length, cut into batches.

    All pools of an epoch are of one size, to within one example. The longest examples of a pool come first; of equally
    long ones those that the shuffle put first.
    """

    def __init__(self, lengths: npt.NDArray[Any], batching: Batching) -> None:
        assert batching.pool_size is not None
        distinct = np.unique(lengths)
        table = batching.table
        count = lengths.size
        # Shape (examples,): the place of each length among the distinct ones, from the longest; few bits sort fast.
        self._places = np.empty(count, dtype=np.min_scalar_type(distinct.size))
        for start in range(0, count, _AT_ONCE):
            part = lengths[start : start + _AT_ONCE]
            ascending = np.argsort(part)  # to look lengths up in order: many different ones are not in the cache
            self._places[start + ascending] = distinct.size - 1 - np.searchsorted(distinct, part[ascending])
        self._distinct: FloatArray = distinct[::-1].astype(np.float64)
        self._buckets = table.assign(distinct[::-1])
        self._batching = batching
        self._pools = -(-count // batching.pool_size)
        self._each = divmod(count, self._pools)
        self._last: tuple[Drawing, Dealing, Cut] | None = None
        self._per_rank: tuple[int, Dealing, int] | None = None

    def cut(self, drawing: Drawing, dealing: Dealing) -> Cut:
        """As for every batcher."""
        examples, steps = self._steps(drawing, dealing)
        if dealing.drop_last or dealing.same_bucket:
            return Cut(examples, _dealt(steps))
        return Cut(examples, evened(steps))

    def equal_cut(self, drawing: Drawing, dealing: Dealing) -> Cut:
        """As for every batcher.

        An epoch with fewer batches than others has its largest ones split in two; one with more is reshuffled. With
        `drop_last`, one with more leaves some out, and one with fewer is reshuffled. The last cut is kept, as its
        number of batches is asked for more than once.
        """
        if not drawing.shuffle:
            return self.cut(drawing, dealing)
        if self._last is not None and self._last[:2] == (drawing, dealing):
            return self._last[2]
        wanted = self._batches_per_rank(drawing.seed, dealing)
        shuffles = [replace(drawing, attempt=attempt) for attempt in range(_ATTEMPTS)]
        for shuffle in (*shuffles, Drawing(seed=drawing.seed)):  # the last is one that `wanted` comes from
            examples, steps = self._steps(shuffle, dealing)
            batches = _per_rank(steps)
            if dealing.drop_last and batches >= wanted:
                break
            if not dealing.drop_last and batches <= wanted:
                break
        if dealing.drop_last:
            cut = Cut(examples, replace(_dealt(steps), most_per_rank=wanted))
        else:
            cut = Cut(examples, _evened_to(wanted, steps))
        self._last = (drawing, dealing, cut)
        return cut

    def first_cuts(self, seed: int, dealing: Dealing, epochs: int = _FIRST_EPOCHS, scale: float = 1.0) -> list[Cut]:
        """Return the equal cuts of the first epochs, without `drop_last`.

        With a `scale` above 1 the examples stand for so many times as many, whose epochs differ less: fewer batches are
        split.
        """
        firsts = [self._steps(Drawing(seed=seed, epoch=epoch), dealing) for epoch in range(epochs)]
        most_batches = max(_per_rank(steps) for _, steps in firsts)
        self._per_rank = (seed, dealing, most_batches)
        cuts = []
        for examples, steps in firsts:
            batches = _per_rank(steps)
            split = round((most_batches - batches) / math.sqrt(scale))
            cuts.append(Cut(examples, _evened_to(batches + split, steps)))
        return cuts

    def _batches_per_rank(self, seed: int, dealing: Dealing) -> int:
        if self._per_rank is None or self._per_rank[:2] != (seed, dealing):
            firsts = (Drawing(seed=seed, epoch=epoch) for epoch in range(_FIRST_EPOCHS))
            numbers = [_per_rank(self._steps(first, dealing)[1]) for first in firsts]
            wanted = min(numbers) if dealing.drop_last else max(numbers)
            self._per_rank = (seed, dealing, wanted)
        return self._per_rank[2]

    def _steps(self, drawing: Drawing, dealing: Dealing) -> tuple[Indices, Layout]:
        """Return the examples, and the pools' batches, or with `same_bucket` those of all ranks of a step in one."""
        dtype = index_dtype(self._places.size)
        overhead = self._batching.batch_overhead
        examples: Indices = np.arange(self._places.size, dtype=dtype)
        if drawing.shuffle:
            drawing.stream(EXAMPLES).shuffle(examples)
        parts = []
        for start, pools, size in self._parts():
            some = examples[start : start + pools * size].reshape(pools, size)
            places = self._places[some]
            order = _stable_order(places)
            some[:] = np.take_along_axis(some, order, axis=1)
            places = np.take_along_axis(places, order, axis=1)
            buckets = self._buckets[places]
            # Cut to one beyond the pool, so that sizes do not overflow.
            fits = np.minimum(self._batching.table.batch_sizes, size + 1) * dealing.together
            if overhead is None or dealing.drop_last or size > _LARGEST_COSTED:
                starts = _filled(buckets, fits)
            else:
                starts = _cheapest(self._distinct[places], fits[buckets], overhead * dealing.together)
            held = np.diff(starts, append=places.size)
            limiting = buckets.ravel()[starts].astype(np.int64)
            rest = ((starts + held) % size == 0) & (held < fits[limiting])
            kept = ~rest | (not dealing.drop_last)
            parts.append((starts[kept] + start, held[kept], limiting[kept], rest[kept]))
        starts, held, limiting, rest = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        cut = (starts.astype(dtype), held.astype(dtype), limiting.astype(dtype))
        return examples, Layout(*cut, rest, dealing, examples.size, in_order=True)

    def _parts(self) -> Iterator[tuple[int, int, int]]:
        """Yield (start, pools, examples of each): pools of one size, in groups that fit in the cache."""
        each, more = self._each
        for start, pools, size in ((0, more, each + 1), (more * (each + 1), self._pools - more, each)):
            at_once = max(1, _AT_ONCE // size)
            for first in range(0, pools, at_once):
                yield start + first * size, min(at_once, pools - first), size


def _per_rank(steps: Layout) -> int:
    """Return the number of batches of each rank once these are dealt."""
    batches = steps.starts.size * steps.dealing.together
    dealing = steps.dealing
    if dealing.drop_last:
        return batches // dealing.world_size
    return -(-batches // dealing.world_size)


def _evened_to(per_rank: int, steps: Layout) -> Layout:
    """Split the largest batches until each rank has so many, and deal them."""
    dealing = steps.dealing
    return _dealt(evened(steps, per_rank * dealing.world_size // dealing.together))


def _dealt(steps: Layout) -> Layout:
    """Deal the examples that were cut for all ranks of a step evenly to them."""
    together = steps.dealing.together
    if together == 1:
        return steps
    starts = steps.starts[:, np.newaxis]
    held = steps.batch_sizes[:, np.newaxis]
    dealt = held // together + (np.arange(together) < held % together)
    firsts = starts + np.cumsum(dealt, axis=1) - dealt
    again = starts + np.arange(together) % held  # fewer examples than ranks: some are dealt again
    return replace(
        steps,
        starts=np.where(dealt > 0, firsts, again).ravel().astype(steps.starts.dtype),
        batch_sizes=np.maximum(dealt, 1).ravel().astype(steps.starts.dtype),
        buckets=np.repeat(steps.buckets, together),
        rest=np.repeat(steps.rest, together),
    )


def _stable_order(places: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    """Return the stable order of each row, by its lower and then its upper 16 bits, which numpy sorts by radix."""
    if places.dtype.itemsize <= 2:
        return np.argsort(places, axis=1, kind="stable")
    order = np.argsort(places.astype(np.uint16), axis=1, kind="stable")
    upper = np.take_along_axis((places >> 16).astype(np.uint16), order, axis=1)
    return np.take_along_axis(order, np.argsort(upper, axis=1, kind="stable"), axis=1)


def _filled(buckets: Buckets, fits: IntArray) -> IntArray:
    """Return where batches start if each holds as many as fit with its longest, in pools one after the other.

    `buckets`, shape (pools, examples), descend in each pool; `fits`, shape (buckets,), are their batch sizes.
    """
    pools, size = buckets.shape
    if size <= fits.size:
        return _walked(fits[buckets])
    keys = np.arange(pools)[:, np.newaxis] * fits.size + buckets
    counts = np.bincount(keys.ravel(), minlength=pools * fits.size).reshape(pools, fits.size)
    ends = np.cumsum(counts[:, ::-1], axis=1)[:, ::-1]  # shape (pools, buckets): where each bucket's examples end
    filled = np.zeros(pools, dtype=np.int64)
    starts = []
    for bucket in range(fits.size - 1, -1, -1):
        # The batch that begins with the bucket's last example may reach into the next bucket.
        batches = np.maximum(0, -(-(ends[:, bucket] - filled) // fits[bucket]))
        nth = np.arange(int(batches.sum())) - np.repeat(np.cumsum(batches) - batches, batches)
        starts.append(np.repeat(filled + np.arange(pools) * size, batches) + nth * fits[bucket])
        filled += batches * fits[bucket]
    return np.sort(np.concatenate(starts))


def _cheapest(lengths: FloatArray, fits: IntArray, overhead: float) -> IntArray:
    """Return where batches start so that padded lengths and overheads are least in sum, in pools one after the other.

    Finds the cheapest cut of the pool's rest from each example on, from the last one back. Where batches of at least n
    examples are as good as smaller ones, no example's cut depends on those of the n before it: n are found at once.
    `lengths` and `fits`, the size of a batch that begins there, have the shape (pools, examples); lengths descend in
    each pool.
    """
    pools, size = lengths.shape
    rows = np.arange(pools)[:, np.newaxis]
    places = np.arange(size)
    largest = np.minimum(fits, size - places)
    smallest = _smallest_sizes(lengths, fits, overhead)
    sizes = _sizes_up_to(int(largest.max()))
    cost = np.full((pools, 2 * size + _LARGEST_BLOCK), np.inf)  # no batch reaches beyond the pool
    cost[:, size] = 0.0
    taken = np.empty((pools, size), dtype=np.int64)
    windows = {1 << power: sliding_window_view(cost, 1 << power, axis=1) for power in range(7)}
    end = size
    while end:
        block = smallest[end - 1]
        while block > end or min(smallest[end - block : end]) < block:
            block //= 2
        first = end - block
        longest = lengths[:, first:end]
        held = largest[:, first:end]
        least = longest * held + cost[rows, places[first:end] + held]
        compared = sizes[np.searchsorted(sizes, block) : np.searchsorted(sizes, held.max())]
        if compared.size:
            # Shape (sizes, pools × block), as long rows are fast: the rest's cost after a batch, and the batch's.
            sums = windows[block][:, first + compared].swapaxes(0, 1).reshape(compared.size, -1)
            sums += compared[:, np.newaxis].astype(np.float64) * longest.ravel()
            too_large = np.searchsorted(compared, held.min())
            np.copyto(sums[too_large:], np.inf, where=compared[too_large:, np.newaxis] >= held.ravel())
            cheapest = sums.min(axis=0).reshape(held.shape)
            better = cheapest < least  # of equal costs the largest batch is taken
            least = np.where(better, cheapest, least)
            held = np.where(better, compared[sums.argmin(axis=0)].reshape(held.shape), held)
        cost[:, first:end] = overhead + least
        taken[:, first:end] = held
        end = first
    return _walked(taken)


def _smallest_sizes(lengths: FloatArray, fits: IntArray, overhead: float) -> list[int]:
    """Return the smallest batches worth comparing at each place, powers of two.

    A smaller batch can take examples from the next one: each is padded by at most the difference between them.
    """
    size = lengths.shape[1]
    smallest = np.ones(size, dtype=np.int64)
    block = 2
    while block <= _LARGEST_BLOCK:
        later = lengths[:, np.minimum(np.arange(size) + block, size - 1)]
        padding = (lengths - later) * block
        enough = ((padding <= _NO_MATTER * overhead) & (fits >= block)).all(axis=0)
        smallest[enough] = block
        block *= 2
    sizes: list[int] = smallest.tolist()
    return sizes


@lru_cache(maxsize=8)
def _sizes_up_to(largest: int) -> IntArray:
    powers = _NEXT_SIZE ** np.arange(math.log(largest) / math.log(_NEXT_SIZE) + 1)
    return np.unique(powers.astype(np.int64))


def _walked(taken: IntArray) -> IntArray:
    """Return where batches start if each takes as many as its first example says, in pools one after the other."""
    pools, size = taken.shape
    rows = np.arange(pools)
    places = np.zeros(pools, dtype=np.int64)
    starts = []
    while rows.size:
        starts.append(rows * size + places)
        places = places + taken[rows, places]
        going = places < size
        rows = rows[going]
        places = places[going]
    return np.sort(np.concatenate(starts))
