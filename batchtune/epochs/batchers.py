"""The ways to make batches: from the buckets of a table, from pools that are sorted by length, or step by step.

Buckets pad a batch to its longest example, which may lie anywhere in the bucket, and each leaves a rest. Sorted pools
avoid both, but are less random: two examples of like length that fall into one pool are likely to be batch mates. An
optimizer step's own examples, sorted and cut into its micro-batches, are as random as the training draws them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from batchtune.epochs import (
    EXAMPLES,
    EpochBatches,
    Indices,
    Layout,
    RankSplit,
    ShuffleKey,
    deal,
    index_dtype,
    lay_out,
    steps_per_rank,
)
from batchtune.epochs.table import Buckets, BucketTable
from batchtune.lengths import (
    AnyArray,
    FloatArray,
    Histogram,
    IntArray,
    ceil_div,
    largest_first,
)
from batchtune.records import SamplerConfig

if TYPE_CHECKING:
    from batchtune.results import Row

# Cuts the examples of an optimizer step into micro-batches that fit, at the least cost.
#
# The examples of a step stay those that the training draws, so the training stays the same: only which of them share a
# micro-batch, and with it the padding, changes. Lengths descend; a micro-batch holds neighbours.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cutter(ABC):
    """Cuts optimizer steps into micro-batches for the ranks that run them.

    Attributes:
        world_size: How many ranks run a step's micro-batches side by side.
    """

    world_size: int = 1

    @abstractmethod
    def fewest(self, examples: Indices) -> int:
        """Return the fewest micro-batches of each rank that hold all examples of a step."""

    @abstractmethod
    def _cut_into(self, examples: Indices, parts: int) -> tuple[list[Indices], Indices]:
        """Return `parts` micro-batches, as ranks take them in turn, and the examples that don't fit."""

    def cut(self, examples: Indices, each: int | None) -> tuple[list[Indices], Indices]:
        """Return `each` micro-batches for every rank, as ranks take them in turn, and the examples that don't fit.

        The shortest examples are left over. Without `each`, there are as few micro-batches as hold
        all examples. With fewer examples than micro-batches, fewer are made, or on several ranks
        some examples are dealt twice.
        """
        ranks = self.world_size
        if each is None:
            each = self.fewest(examples)
            if examples.size < each * ranks:
                examples = np.resize(examples, each * ranks)
        if examples.size < ranks:
            examples = np.resize(examples, ranks)
        return self._cut_into(examples, min(each, examples.size // ranks) * ranks)

    def epoch(
        self, steps: Iterable[tuple[Indices, int | None]]
    ) -> Iterator[tuple[list[Indices], int]]:
        """Yield the micro-batches of each step, from its examples and how many micro-batches each rank runs.

        Also yield how many micro-batches would hold all of the step's examples, if some don't fit
        and move to the next step; else 0. Examples left after the last step make more
        micro-batches.
        """
        left = np.empty(0, dtype=np.int64)
        each: int | None = 1
        for examples, each in steps:
            batches, left = self.cut(np.concatenate((left, examples)), each)
            yield batches, self.fewest(examples) if left.size else 0
        while left.size:
            batches, left = self.cut(left, each)
            yield batches, 0


@dataclass(frozen=True, slots=True, eq=False)
class StepCutter(Cutter):
    """Cuts steps into padded micro-batches: sorted by length, at the least cost.

    Attributes:
        lengths: Shape (examples,): of the data set.
        table: How many examples of a micro-batch fit, by the length of its longest.
        equal_counts: Whether the micro-batches of a step hold the same number of examples, to within one.
        pair_cost: What a pair of positions of an example costs, as in attention, if a position costs 1.
    """

    lengths: AnyArray
    table: BucketTable
    equal_counts: bool = False
    pair_cost: float | None = None

    def _cut_into(self, examples: Indices, parts: int) -> tuple[list[Indices], Indices]:
        values = self.lengths[examples].astype(np.float64)
        longest_first = largest_first(values)
        examples = examples[longest_first]
        values = values[longest_first]
        fits = self.table.batch_sizes[self.table.assign(values)]
        costs = values * (1 + (self.pair_cost or 0.0) * values)
        sizes = self._sizes(costs, fits, parts)
        ends = np.cumsum(sizes)
        starts = ends - sizes
        order = in_turn(costs[starts] * sizes, self.world_size)
        batches = [examples[starts[place] : ends[place]] for place in order]
        return batches, examples[sizes.sum() :]

    def fewest(self, examples: Indices) -> int:
        """Return the fewest micro-batches of each rank that hold all examples of a step."""
        values = np.sort(self.lengths[examples].astype(np.float64))[::-1]
        fits = self.table.batch_sizes[self.table.assign(values)]
        each = ceil_div(most_held(fits).size, self.world_size)
        if self.equal_counts:
            most = max(1, examples.size // self.world_size)
            while each < most and equal_parts(fits, each * self.world_size) is None:
                each += 1
        return each

    def _sizes(self, costs: FloatArray, fits: IntArray, parts: int) -> IntArray:
        """Return the sizes of `parts` micro-batches of all examples, or of those that fit, the longest first."""
        if self.equal_counts:
            sizes = equal_parts(fits, parts)
            if sizes is None:
                sizes = np.full(parts, fits[0])
            return sizes
        least = least_costly(costs, fits, parts)
        return most_held(fits, parts) if least is None else least


def micro_batches(own: int, own_accumulate: int, accumulate: int) -> int:
    """Return how many micro-batches replace a rank's `own` batches, if a step is cut into `accumulate`.

    A last step of fewer than `own_accumulate` batches is cut into fewer micro-batches in proportion.
    """
    steps, rest = divmod(own, own_accumulate)
    return steps * accumulate + ceil_div(rest * accumulate, own_accumulate)


def most_held(fits: IntArray, parts: int | None = None) -> IntArray:
    """Return the sizes of at most `parts` micro-batches (None: any number), each with as many examples as fit.

    `fits`, shape (examples,): the most examples of a micro-batch that begins there.
    """
    sizes: list[int] = []
    place = 0
    while place < fits.size and len(sizes) != parts:
        sizes.append(int(min(fits[place], fits.size - place)))
        place += sizes[-1]
    return np.array(sizes, dtype=np.int64)


# Comparing this many batches takes no longer than finding out which don't fit.
_FEW = 8192


class _Ends(NamedTuple):
    """Batches that end before some places next to each other, by their size.

    Attributes:
        first, last: Of the places; the last is excluded.
        costs: Shape (places, sizes), of each batch, the largest first; infinite where it doesn't fit.
        before: Of the same shape, a view: the least costs up to where each batch begins.
    """

    first: int
    last: int
    costs: FloatArray
    before: FloatArray


def least_costly(costs: FloatArray, fits: IntArray, parts: int) -> IntArray | None:
    """Return the sizes of `parts` micro-batches that fit, with the least total cost.

    A micro-batch costs its number of examples times what its first example costs, by `costs`. None
    if the examples don't fit into `parts`, or are fewer than that. `fits` is as for `most_held`.
    """
    count = costs.size
    if count < parts:
        return None
    fits = np.minimum(fits, count - parts + 1)
    room = int(fits.max())
    # The least costs up to each place, behind room for batches that would begin before the first example.
    least = np.full(room + count + 1, np.inf)
    least[room] = 0.0
    groups = list(_ends(costs, fits, least, room))
    chosen = np.full((parts + 1, count + 1), room)
    descends = (np.diff(fits) < 0).any()
    for part in range(parts):
        # The last group first: each needs the costs before it as they were.
        for group in groups:
            if group.last <= part + 1:  # fewer examples than parts
                continue
            width = room
            if not descends:
                # With one part more, the last one up to a place is no larger.
                width = chosen[part - 1, max(group.first, part) : group.last].max()
            sums = group.before[:, -width:] + group.costs[:, -width:]
            columns = sums.argmin(axis=1)
            places = slice(group.first, group.last)
            chosen[part, places] = sums.shape[1] - columns
            least[room:][places] = sums[np.arange(columns.size), columns]
        least[room : room + part + 1] = np.inf
    if least[-1] == np.inf:
        return None
    taken = []
    end = count
    for part in range(parts - 1, -1, -1):
        taken.append(int(chosen[part, end]))
        end -= taken[-1]
    return np.array(taken[::-1])


def _ends(
    costs: FloatArray, fits: IntArray, least: FloatArray, room: int
) -> Iterator[_Ends]:
    """Yield all places from the last group on; of many, a group's largest batches differ by three times at most.

    So few batches are compared that don't fit: the longest examples make small ones.
    """
    starts = np.arange(costs.size)
    reached = np.maximum.accumulate(starts + fits)
    places = starts + 1
    largest = places - np.searchsorted(reached, places)
    last = costs.size + 1
    while last > 1:
        width = int(largest[: last - 1].max())
        first = 1
        if last * width > _FEW:
            first += int(np.argmax(largest > width // 3))
        sizes = np.arange(width, 0, -1)
        begins = np.arange(first, last)[:, np.newaxis] - sizes
        held = np.maximum(begins, 0)
        fit = (begins >= 0) & (sizes <= fits[held])
        before: FloatArray = np.ndarray(
            begins.shape,
            buffer=least,
            offset=(room + first - width) * least.itemsize,
            strides=2 * least.strides,
        )
        yield _Ends(first, last, np.where(fit, sizes * costs[held], np.inf), before)
        last = first


def equal_parts(fits: IntArray, parts: int) -> IntArray | None:
    """Return sizes that differ by one at most, so that a mean over each micro-batch's examples weighs them alike.

    None if the examples don't fit like that, or are fewer than `parts`.
    """
    count = fits.size
    if count < parts:
        return None
    ends = np.arange(1, parts + 1) * count // parts
    sizes = np.diff(ends, prepend=0)
    if (sizes > fits[ends - sizes]).any():
        return None
    return sizes


def in_turn(costs: FloatArray, ranks: int) -> IntArray:
    """Return the order in which ranks take micro-batches in turn: those at one place cost about the same.

    From place to place, another rank takes the most expensive one, so that no rank is always the
    slowest.
    """
    places = largest_first(costs).reshape(-1, ranks)
    places[1::2] = places[1::2, ::-1]
    return places.ravel()


# Examples that are sorted or cut at once.
_AT_ONCE = 1 << 20
# Compare batch sizes that differ by this factor: the best cut then costs at most 0.15% more than with all sizes.
_NEXT_SIZE = 1.05
# In larger pools the best cut gains next to nothing.
_LARGEST_COSTED = 4096
# All epochs in pools have as many batches as the longest of the first; longer ones are reshuffled, up to 32 times.
_FIRST_EPOCHS = 3
_ATTEMPTS = 32
# The first epochs of so few examples need not be cut twice.
_REMEMBERED = 1 << 18


@dataclass(frozen=True, slots=True, eq=False)
class Batching:
    """A way to make batches, as a sampler config describes it.

    With `batch_overhead`, the cost of a batch on top of its padded length, in the unit of length, pools are cut so that
    the sum of both is least; without, each batch holds as many examples as fit.

    With `accumulate`, each pool is an optimizer step of all ranks: its examples are cut into this
    many micro-batches for each rank, with the least padding or, with `equal_counts`, of the same
    number of examples. With `pair_cost`, the cost of a pair of positions of an example relative to
    that of one position, these costs are minimised instead of the padding.
    """

    table: BucketTable  # in pools, a batch holds at most the batch size of its longest example's bucket
    # The most examples of a pool; None: batches are made in buckets.
    pool_size: int | None = None
    batch_overhead: float | None = None
    accumulate: int | None = None
    equal_counts: bool = False
    pair_cost: float | None = None

    @classmethod
    def of(cls, made: Row | SamplerConfig) -> Batching:
        """Return how a row of a sweep, or a config, makes batches; raises ValueError as `BucketTable.of` does."""
        if isinstance(made, SamplerConfig):
            table = BucketTable.of(made.bucket_boundaries, made.bucket_batch_sizes)
        else:
            table = BucketTable.of(made.boundaries, made.batch_sizes)
        return cls(
            table,
            made.pool_size,
            made.batch_overhead,
            made.accumulate,
            made.equal_counts,
            made.pair_cost,
        )

    @property
    def uses_pools(self) -> bool:
        """Whether batches are made in sorted pools rather than in the buckets of the table."""
        return self.pool_size is not None

    def pools_of(self, count: int) -> int:
        """Return how many pools this many examples make."""
        assert self.pool_size is not None
        return ceil_div(count, self.pool_size)

    def largest_batches(self, histogram: Histogram) -> tuple[IntArray, FloatArray]:
        """Return size and longest length of the largest batch for each bucket with examples.

        In pools a batch may also hold examples of shorter buckets.
        """
        edges, counts = self.table.divide(histogram)
        used = counts > 0
        longest = histogram.lengths[edges[1:][used] - 1]
        if self.pool_size is not None:
            counts = np.minimum(np.cumsum(counts), self.pool_size)
        return np.minimum(self.table.batch_sizes, counts)[used], longest

    def batcher(self, lengths: AnyArray, targets: AnyArray | None = None) -> Batcher:
        """Return the batcher of examples with these lengths, none beyond the last boundary."""
        if self.accumulate is not None:
            assert self.pool_size is not None
            cutter = StepCutter(
                lengths,
                self.table,
                equal_counts=self.equal_counts,
                pair_cost=self.pair_cost,
            )
            return StepBatcher(lengths.size, cutter, self.pool_size, self.accumulate)
        if self.uses_pools:
            return PoolBatcher(lengths, self)
        return BucketBatcher(
            self.table.assign(lengths, targets), self.table.batch_sizes
        )


class Batcher(ABC):
    """A data set that can be cut into the batches of any epoch."""

    @abstractmethod
    def cut(self, drawing: ShuffleKey, dealing: RankSplit) -> EpochBatches:
        """Return an epoch's examples, cut into the same number of batches in every epoch: trainers ask for it once."""

    def batches_per_rank(self, drawing: ShuffleKey, dealing: RankSplit) -> int:
        """Return the number of batches of each rank; without cutting an epoch where a subclass can."""
        return self.cut(drawing, dealing).layout.batches_per_rank

    def first_epochs(
        self, number: int, dealing: RankSplit, seed: int = 0
    ) -> Iterator[tuple[ShuffleKey, EpochBatches]]:
        """Yield the shuffles and batches of this many epochs, from the first one on."""
        for epoch in range(number):
            drawing = ShuffleKey(seed=seed, epoch=epoch)
            yield drawing, self.cut(drawing, dealing)


class BucketBatcher(Batcher):
    """Examples, bucket after bucket, cut at the same places in every epoch."""

    def __init__(self, buckets: Buckets, batch_sizes: IntArray) -> None:
        """Sort examples into their buckets, one for each example; 8 or 16 bits are fast and lean."""
        # Shape (examples,): indices of examples, within a bucket in their own order; and shape (buckets,).
        self._order = np.argsort(buckets, kind="stable").astype(
            index_dtype(buckets.size), copy=False
        )
        self._counts = np.bincount(buckets, minlength=batch_sizes.size)
        self._batch_sizes = batch_sizes

    def cut(self, drawing: ShuffleKey, dealing: RankSplit) -> EpochBatches:
        """Return an epoch's examples, cut bucket by bucket.

        Shuffling each bucket gives the same distribution as shuffling all examples and then sorting them into buckets,
        as streaming samplers do.
        """
        layout = lay_out(self._counts, self._batch_sizes, dealing)
        if not drawing.shuffle:
            return EpochBatches(self._order, layout)
        random = drawing.stream(EXAMPLES)
        order: Indices = self._order.copy()
        for bucket in np.split(order, np.cumsum(self._counts)[:-1]):
            random.shuffle(bucket)
        return EpochBatches(order, layout)

    def batches_per_rank(self, drawing: ShuffleKey, dealing: RankSplit) -> int:
        """Return the number of batches of each rank."""
        return lay_out(self._counts, self._batch_sizes, dealing).batches_per_rank


class ReshuffledBatcher(Batcher):
    """Batches whose number depends on the shuffle: every epoch is brought to the maximum of the first ones."""

    def __init__(self, count: int) -> None:
        """Take so many examples."""
        self._count = count
        self._per_rank: dict[tuple[int, bool, RankSplit], int] = {}
        self._first_steps: dict[
            tuple[ShuffleKey, RankSplit], tuple[Indices, Layout]
        ] = {}

    def cut(self, drawing: ShuffleKey, dealing: RankSplit) -> EpochBatches:
        """Return an epoch's examples, cut pool by pool.

        An epoch with fewer batches than others has its largest ones split in two; one with more is reshuffled. With
        `drop_last`, one with more leaves some out, and one with fewer is reshuffled.
        """
        wanted = self.batches_per_rank(drawing, dealing)
        shuffles = [replace(drawing, attempt=attempt) for attempt in range(_ATTEMPTS)]
        # The last is one that `wanted` comes from.
        for shuffle in (
            *shuffles,
            replace(drawing, epoch=0),
        ):
            examples, steps = self._first_steps.get((shuffle, dealing)) or self._steps(
                shuffle, dealing
            )
            batches = self._rounded_per_rank(steps)
            if batches == wanted or (batches > wanted) == dealing.drop_last:
                break
        return self._dealt(examples, steps, wanted)

    def batches_per_rank(self, drawing: ShuffleKey, dealing: RankSplit) -> int:
        """Return the most batches of the first three epochs, with `drop_last` the fewest."""
        plan = (drawing.seed, drawing.shuffle, dealing)
        if plan not in self._per_rank:
            epochs = range(_FIRST_EPOCHS if drawing.shuffle else 1)
            numbers = []
            for epoch in epochs:
                first = replace(drawing, epoch=epoch, attempt=0)
                steps = self._steps(first, dealing)
                numbers.append(self._rounded_per_rank(steps[1]))
                if self._count <= _REMEMBERED:
                    self._first_steps[first, dealing] = steps
            self._per_rank[plan] = min(numbers) if dealing.drop_last else max(numbers)
        return self._per_rank[plan]

    def _rounded_per_rank(self, steps: Layout) -> int:
        """Return the number of batches of each rank that a shuffle makes."""
        return steps_per_rank(steps)

    def _dealt(self, examples: Indices, steps: Layout, per_rank: int) -> EpochBatches:
        """Return the batches of the ranks, so many each."""
        dealt = deal(steps, per_rank)
        return EpochBatches(examples, replace(dealt, most_per_rank=per_rank))

    @abstractmethod
    def _steps(self, drawing: ShuffleKey, dealing: RankSplit) -> tuple[Indices, Layout]:
        """Return the examples of a shuffle, and its batches or, with `same_bucket`, its steps of all ranks."""


class PoolBatcher(ReshuffledBatcher):
    """Examples in pools: shuffled, taken `pool_size` at a time, sorted by length, cut into batches.

    All pools of an epoch are of one size, to within one example. The longest examples of a pool
    come first; equally long ones stay in the order of the shuffle.
    """

    def __init__(self, lengths: AnyArray, batching: Batching) -> None:
        super().__init__(lengths.size)
        distinct = np.unique(lengths)
        # Shape (examples,): the place of each length among the distinct ones, from the longest; few bits sort fast.
        places = distinct.size - 1 - np.searchsorted(distinct, lengths)
        self._places = places.astype(np.min_scalar_type(distinct.size))
        self._distinct: FloatArray = distinct[::-1].astype(np.float64)
        self._buckets = batching.table.assign(distinct[::-1])
        self._batching = batching
        self._pools = batching.pools_of(lengths.size)

    def _steps(self, drawing: ShuffleKey, dealing: RankSplit) -> tuple[Indices, Layout]:
        """Return the examples, and the pools' batches, or with `same_bucket` those of all ranks of a step in one."""
        count = self._count
        overhead = self._batching.batch_overhead
        examples = drawing.examples(count)
        parts = []
        for start, pools, size in self._parts():
            pooled = examples[start : start + pools * size].reshape(pools, size)
            order = np.argsort(self._places[pooled], axis=1, kind="stable")
            pooled[:] = np.take_along_axis(pooled, order, axis=1)
            places = self._places[pooled]
            # Cut to one beyond the pool, so that sizes do not overflow.
            fits = (
                np.minimum(self._batching.table.batch_sizes, size + 1)
                * dealing.together
            )[self._buckets[places]]
            taken = fits
            if (
                overhead is not None
                and not dealing.drop_last
                and size <= _LARGEST_COSTED
            ):
                taken = _cheapest(
                    self._distinct[places], fits, overhead * dealing.together
                )
            starts = _walked(taken)
            held = np.diff(starts, append=places.size)
            rest = ((starts + held) % size == 0) & (held < fits.ravel()[starts])
            parts.append((held, rest))
        held, rest = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        layout = Layout.in_row(held, dealing, count, in_order=True)
        return examples, replace(layout, rest=rest)

    def _parts(self) -> Iterator[tuple[int, int, int]]:
        """Yield (start, pools, examples of each): pools of one size, in groups that fit in the cache."""
        each, more = divmod(self._places.size, self._pools)
        for start, pools, size in (
            (0, more, each + 1),
            (more * (each + 1), self._pools - more, each),
        ):
            at_once = max(1, _AT_ONCE // size)
            for first in range(0, pools, at_once):
                yield start + first * size, min(at_once, pools - first), size


@dataclass(frozen=True, slots=True, eq=False)
class StepBatcher(Batcher):
    """Examples in optimizer steps: shuffled, taken `pool_size` at a time, and cut into the micro-batches of a step.

    Each rank runs a step in `accumulate` micro-batches.
    """

    count: int
    cutter: Cutter
    pool_size: int
    accumulate: int

    def cut(self, drawing: ShuffleKey, dealing: RankSplit) -> EpochBatches:
        """Return an epoch's examples, step by step; the micro-batches of a step stay together."""
        examples = drawing.examples(self.count)
        ends = range(self.pool_size, self.count, self.pool_size)
        steps = [
            (step, ceil_div(step.size * self.accumulate, self.pool_size))
            for step in np.split(examples, ends)
        ]
        cutter = replace(self.cutter, world_size=dealing.world_size)
        batches = [batch for step, _ in cutter.epoch(steps) for batch in step]
        in_order = np.concatenate(batches)
        sizes = np.array([batch.size for batch in batches])
        layout = Layout.in_row(sizes, dealing, self.count, in_order=True, in_steps=True)
        return EpochBatches(in_order, layout)


def _cheapest(lengths: FloatArray, fits: IntArray, overhead: float) -> IntArray:
    """Return how many examples the batch that begins at each takes, so that lengths and overheads are least in sum.

    Finds the cheapest cut of the pool's rest from each example on, from the last one back. `lengths` and `fits`, the
    size of a batch that begins there, have the shape (pools, examples); lengths descend in each pool.
    """
    pools, size = lengths.shape
    largest = np.minimum(fits, np.arange(size, 0, -1))
    powers = _NEXT_SIZE ** np.arange(math.log(largest.max()) / math.log(_NEXT_SIZE) + 1)
    sizes = np.unique(powers.astype(np.int64))
    rows = np.arange(pools)
    num_compared = np.searchsorted(sizes, largest.max(axis=0))
    # The cost of each pool from an example on; no batch reaches beyond the pool.
    costs = np.full((size + int(sizes[-1]) + 1, pools), np.inf)
    costs[size] = 0.0
    taken: IntArray = largest.copy()
    for first in range(size - 1, -1, -1):
        longest = lengths[:, first]
        held = largest[:, first]
        whole = longest * held + costs[first + held, rows]
        compared = sizes[: num_compared[first], np.newaxis]
        if compared.size:
            sums = costs[first + compared[:, 0]] + compared * longest
            sums[compared >= held] = np.inf
            lowest = sums.argmin(axis=0)
            lowest_sums = sums[lowest, rows]
            # Of equal costs the largest batch is taken.
            taken[:, first] = np.where(lowest_sums < whole, compared[lowest, 0], held)
            whole = np.minimum(whole, lowest_sums)
        costs[first] = overhead + whole
    return taken


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
