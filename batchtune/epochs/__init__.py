"""One epoch's batches: cut from buckets or pools, dealt to ranks, put in order, and their shapes; and what they cost.

A batcher (`epochs.batchers`) orders an epoch's examples and cuts them into `EpochBatches`, the same
number for each rank. `drawn` puts the batches of all ranks in order; `shapes_of` returns their
shapes. The sampler, the verification and the simulation of an epoch are these steps. `lengths`
always has the shape (examples,). The other modules know what the batches cost: models of memory and
step time, expectations, rows of a sweep.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from batchtune.lengths import (
    AnyArray,
    BoolArray,
    FloatArray,
    IntArray,
    Lengths,
    ceil_div,
)
from batchtune.records import Ordering

if TYPE_CHECKING:
    from batchtune.epochs.measured_costs import Costs, StepTimeFunction
    from batchtune.results import BatchShape, SweepSettings


Indices: TypeAlias = npt.NDArray[np.signedinteger[Any]]
"""Indices of examples: 32 bits wide where these suffice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSplit:
    """How buckets become the batches of all ranks, which always have the same number.

    Attributes:
        same_bucket: Whether, step by step, the batches of all ranks are of one bucket.
        drop_last: Whether to leave out examples that fill no batch, and batches not enough for all ranks.
        accumulate: The ranks wait for each other only after this many batches.
    """

    world_size: int = 1
    same_bucket: bool = False
    drop_last: bool = False
    accumulate: int = 1

    @classmethod
    def of(cls, settings: SweepSettings, costs: Costs) -> RankSplit:
        """Return the split that a sweep's settings ask for, or that of the measurements where they don't say."""
        return cls(
            world_size=settings.world_size or costs.world_size,
            accumulate=settings.accumulate or costs.accumulate,
        )

    @property
    def together(self) -> int:
        """The number of batches that make one step and stay together when batches are put in order."""
        if self.same_bucket:
            return self.world_size
        return 1

    @property
    def batches_per_step(self) -> int:
        """The number of batches of an optimizer step, over all ranks."""
        return self.world_size * self.accumulate

    def steps(self, batches: int) -> int:
        """Return the optimizer steps of an epoch with this many batches over all ranks."""
        return ceil_div(batches, self.batches_per_step)

    def fewest_batches(self, steps: int) -> int:
        """Return the fewest batches, over all ranks, that an epoch with this many optimizer steps needs."""
        return (steps - 1) * self.batches_per_step + 1


ON_ONE_RANK = RankSplit()


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The places where buckets or pools, one after the other, are cut into batches; arrays of the shape (batches,)."""

    starts: IntArray  # a batch's first example, as a position in this epoch's examples
    batch_sizes: IntArray
    buckets: IntArray  # of each batch; 0 where batches are not made in buckets
    # Whether it holds what the full batches of its bucket or pool leave over.
    rest: BoolArray
    dealing: RankSplit
    count: int  # of examples in the data set
    in_order: bool = False  # whether unshuffled batches come in this order; else as their last examples are read
    in_steps: bool = (
        False  # whether they stay in this order, as each belongs to an optimizer step
    )
    # With `drop_last`, the most batches that a rank runs; None: all that are enough.
    most_per_rank: int | None = None

    @classmethod
    def in_row(
        cls, sizes: IntArray, dealing: RankSplit, count: int, **order: bool
    ) -> Layout:
        """Return batches of consecutive examples by their sizes; none of them is a rest."""
        none = np.zeros_like(sizes)
        starts = np.cumsum(sizes) - sizes
        return cls(starts, sizes, none, none > 0, dealing, count, **order)

    @property
    def batches_per_rank(self) -> int:
        """The number of batches of each rank; those that are not enough for all ranks do not count."""
        enough = self.starts.size // self.dealing.world_size
        if self.most_per_rank is None:
            return enough
        return min(enough, self.most_per_rank)

    @property
    def repeated_examples(self) -> int:
        """How many examples are in batches a second time."""
        if self.dealing.drop_last:
            return 0
        return int(self.batch_sizes.sum()) - self.count


def floats(values: npt.ArrayLike) -> FloatArray:
    """Return numbers as an array of floats, which is not copied if it is one."""
    return np.asarray(values, dtype=np.float64)


def edges_of(sizes: npt.ArrayLike) -> AnyArray:
    """Return where parts of these sizes begin, one after the other, and where the last one ends."""
    return np.append(0, np.cumsum(sizes))


def positions(starts: AnyArray, sizes: AnyArray) -> IntArray:
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


def lay_out(counts: IntArray, batch_sizes: IntArray, dealing: RankSplit) -> Layout:
    """Cut buckets into batches so that every rank has the same number, and every example is in one of them.

    Each bucket is cut into full batches and a rest, as `deal` describes; the arguments are as for `tally`.
    """
    # Cut to one beyond the count, so that sizes do not overflow.
    sizes = np.minimum(batch_sizes, counts + 1) * dealing.together
    steps = -(-counts // sizes)
    ends = np.cumsum(counts)
    firsts = ends - counts
    buckets = np.repeat(np.arange(counts.size), steps)
    nth = np.arange(buckets.size) - np.repeat(np.cumsum(steps) - steps, steps)
    starts = firsts[buckets] + nth * sizes[buckets]
    held = np.minimum(sizes[buckets], ends[buckets] - starts)
    layout = Layout(
        starts, held, buckets, held < sizes[buckets], dealing, int(counts.sum())
    )
    return deal(layout, firsts=firsts)


def steps_per_rank(steps: Layout) -> int:
    """Return the number of batches of each rank once these are dealt, without the rests with `drop_last`."""
    dealing = steps.dealing
    if dealing.drop_last:
        return (
            int(np.count_nonzero(~steps.rest)) * dealing.together // dealing.world_size
        )
    return ceil_div(steps.starts.size * dealing.together, dealing.world_size)


def deal(
    steps: Layout, per_rank: int | None = None, firsts: IntArray | None = None
) -> Layout:
    """Deal steps to the ranks; a step is one batch, or with `same_bucket` one batch for each rank.

    If the ranks can't have equally many steps, or `per_rank` batches each, the largest steps are
    split in two until they can; if even batches of one are too few, some are dealt twice. A step
    for all ranks is dealt evenly. If it has fewer examples than ranks, other examples of its
    bucket, which begins at its position in `firsts`, are dealt twice; without `firsts`, its own.
    With `drop_last`, nothing is split or repeated: remainders are left out here, and full batches
    that are too few for all ranks in `drawn`.
    """
    dealing = steps.dealing
    together = dealing.together
    if dealing.drop_last:
        steps = chosen(steps, np.flatnonzero(~steps.rest))
    else:
        per_rank = per_rank or steps_per_rank(steps)
        steps = _split(steps, per_rank * dealing.world_size // together)
    if together == 1:
        return steps
    ranks = np.arange(together)
    starts = steps.starts[:, np.newaxis]
    held = steps.batch_sizes[:, np.newaxis]
    shares = held // together + (ranks < held % together)
    first = starts
    if firsts is not None:
        first = firsts[steps.buckets, np.newaxis]
    first_time = starts + np.cumsum(shares, axis=1) - shares
    second_time = first + (ranks - held) % (starts + held - first)
    return replace(
        steps,
        starts=np.where(shares > 0, first_time, second_time).ravel(),
        batch_sizes=np.maximum(shares, 1).ravel(),
        buckets=np.repeat(steps.buckets, together),
        rest=np.repeat(steps.rest, together),
    )


def _split(layout: Layout, wanted: int) -> Layout:
    """Split the largest batches in near-equal halves until there are as many as wanted; repeat some if too few."""
    while layout.starts.size < wanted:
        batch = int(layout.batch_sizes.argmax())
        size = int(layout.batch_sizes[batch])
        if size == 1:
            return chosen(layout, np.sort(np.arange(wanted) % layout.starts.size))
        layout = chosen(layout, np.insert(np.arange(layout.starts.size), batch, batch))
        half = ceil_div(size, 2)
        layout.batch_sizes[batch : batch + 2] = (half, size - half)
        layout.starts[batch + 1] += half
    return layout


def chosen(layout: Layout, batches: npt.NDArray[np.intp]) -> Layout:
    """Return some of the batches."""
    return replace(
        layout,
        starts=layout.starts[batches],
        batch_sizes=layout.batch_sizes[batches],
        buckets=layout.buckets[batches],
        rest=layout.rest[batches],
    )


ORDERINGS: tuple[Ordering, ...] = get_args(Ordering)

# The shuffles that are drawn from (seed, epoch), each with random numbers of its own.
EXAMPLES = 1
_BATCHES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ShuffleKey:
    """The order in which examples and batches come.

    `shuffle` shuffles the examples, within their buckets or before pools are taken, and the batches
    (`ordering` random). The orderings `ascending` and `descending` sort batches stably by their
    longest length; without `shuffle`, `random` leaves them as a streaming sampler would complete
    them. `attempt` says which of an epoch's shuffles it is.
    """

    shuffle: bool = True
    ordering: Ordering = "random"
    seed: int = 0
    epoch: int = 0
    attempt: int = 0

    def stream(self, of: int) -> np.random.Generator:
        """Return the random numbers of this epoch for one purpose."""
        key = [self.epoch, of]
        if self.attempt:
            key.append(self.attempt)
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=key))

    def examples(self, count: int) -> Indices:
        """Return this epoch's order of this many examples: shuffled, or as they are."""
        order: Indices = np.arange(count, dtype=index_dtype(count))
        if self.shuffle:
            self.stream(EXAMPLES).shuffle(order)
        return order


@dataclass(frozen=True, slots=True, eq=False)
class EpochBatches:
    """One epoch's examples in their order, shape (examples,), and the batches as positions in them."""

    examples: Indices
    layout: Layout

    def lists(self, batches: IntArray) -> Iterator[list[int]]:
        """Yield the examples of these batches."""
        starts = self.layout.starts[batches]
        ends = starts + self.layout.batch_sizes[batches]
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            yield self.examples[start:end].tolist()

    @classmethod
    def in_row(cls, examples: Indices, sizes: IntArray, count: int) -> EpochBatches:
        """Return batches of these sizes, of consecutive examples; `count` are the examples of the data set."""
        return cls(examples, Layout.in_row(sizes, ON_ONE_RANK, count))

    def shapes(
        self,
        lengths: AnyArray,
        targets: AnyArray | None,
        batches: IntArray | None = None,
    ) -> EpochShapes:
        """Return the shapes of these batches, or of all as they lie, from one length and target for each example."""
        layout = self.layout
        if batches is None:
            batches = np.arange(layout.starts.size)
        longest_targets = None
        if targets is not None:
            longest_targets = self.longest(targets, batches)
        return EpochShapes(
            layout.batch_sizes[batches],
            self.longest(lengths, batches),
            longest_targets,
        )

    def longest(self, values: AnyArray, batches: IntArray) -> FloatArray:
        """Return the largest value of each of these batches, from one value for each example."""
        sizes = self.layout.batch_sizes[batches]
        held = values[self.held(batches)]
        return np.maximum.reduceat(held, np.cumsum(sizes) - sizes).astype(np.float64)

    def held(self, batches: IntArray | slice = slice(None)) -> Indices:
        """Return the examples of these batches, or of all, batch after batch."""
        layout = self.layout
        places = positions(layout.starts[batches], layout.batch_sizes[batches])
        return self.examples[places]


def drawn(
    cut: EpochBatches, drawing: ShuffleKey, lengths: AnyArray | None = None
) -> IntArray:
    """Return the indices of batches in their order, shape (steps × world_size,); `lengths` if batches are sorted.

    Batch i is the one of rank i % world_size at step i // world_size.
    """
    layout = cut.layout
    together = layout.dealing.together
    order = np.arange(layout.starts.size // together)
    if layout.in_steps:
        return np.arange(layout.starts.size)
    if drawing.shuffle:
        drawing.stream(_BATCHES).shuffle(order)
    elif not layout.in_order:
        # As a sampler that reads examples one by one completes a step's batches: full ones when their last example was
        # read, then the rests, bucket by bucket.
        last = (
            cut.examples[layout.starts + layout.batch_sizes - 1]
            .reshape(-1, together)
            .max(axis=1)
        )
        after_all = layout.count + layout.buckets[::together]
        order = np.argsort(
            np.where(layout.rest[::together], after_all, last), kind="stable"
        )
    if layout.dealing.drop_last:
        order = order[: layout.batches_per_rank * layout.dealing.world_size // together]
    if drawing.ordering != "random":
        assert lengths is not None
        longest = (
            cut.longest(lengths, np.arange(layout.starts.size))
            .reshape(-1, together)
            .max(axis=1)
        )
        keys = longest[order]
        if drawing.ordering == "descending":
            keys = -keys
        order = order[np.argsort(keys, kind="stable")]
    return (order[:, np.newaxis] * together + np.arange(together)).ravel()


def dropped_examples(layout: Layout, batches: IntArray) -> int:
    """Return how many examples are in none of the batches that were drawn."""
    return (
        layout.count - int(layout.batch_sizes[batches].sum()) + layout.repeated_examples
    )


@dataclass(frozen=True, slots=True, eq=False)
class EpochShapes:
    """The shapes of an epoch's batches, in their order; arrays of the shape (batches of all ranks,)."""

    batch_sizes: IntArray
    lengths: FloatArray
    targets: FloatArray | None

    @classmethod
    def of(cls, shapes: Sequence[BatchShape], *, with_targets: bool) -> EpochShapes:
        """Return shapes that are known one by one; a missing target length counts as 0."""
        targets = None
        if with_targets:
            targets = np.array([shape.target_length or 0.0 for shape in shapes])
        return cls(
            np.array([shape.batch_size for shape in shapes]),
            np.array([shape.length for shape in shapes]),
            targets,
        )

    def __len__(self) -> int:
        return int(self.batch_sizes.size)

    def chosen(self, batches: IntArray) -> EpochShapes:
        """Return the shapes of some batches."""
        targets = None
        if self.targets is not None:
            targets = self.targets[batches]
        return EpochShapes(self.batch_sizes[batches], self.lengths[batches], targets)

    @property
    def _columns(self) -> list[AnyArray]:
        """What is known of each batch."""
        if self.targets is None:
            return [self.batch_sizes, self.lengths]
        return [self.batch_sizes, self.lengths, self.targets]

    def one_by_one(self) -> Iterator[BatchShape]:
        """Return the shape of each batch."""
        from batchtune.results import BatchShape

        return map(BatchShape, *(column.tolist() for column in self._columns))

    @property
    def padded_lengths(self) -> FloatArray:
        """The padded length of each batch."""
        return self.batch_sizes * self.lengths

    @property
    def padded_length(self) -> float:
        """The sum of the batches' padded lengths."""
        return float(self.batch_sizes @ self.lengths)

    def seconds(self, step_seconds: StepTimeFunction) -> FloatArray:
        """Return the time of each batch."""
        sizes, *lengths = self._columns
        return step_seconds(sizes.astype(np.float64), *lengths)

    def epoch_seconds(
        self, step_seconds: StepTimeFunction, dealing: RankSplit
    ) -> float:
        """Return the time of the epoch, whose batches ranks take in turn; a step lasts as long as its slowest batch."""
        seconds = np.zeros(dealing.steps(len(self)) * dealing.batches_per_step)
        seconds[: len(self)] = self.seconds(step_seconds)
        return float(
            seconds.reshape(-1, dealing.accumulate, dealing.world_size)
            .sum(axis=1)
            .max(axis=1)
            .sum()
        )


def shapes_of(cut: EpochBatches, drawing: ShuffleKey, sample: Lengths) -> EpochShapes:
    """Return the shapes of the batches that all ranks have in one epoch: those of step 0, rank by rank, then step 1."""
    lengths = sample.values
    return cut.shapes(lengths, sample.targets, drawn(cut, drawing, lengths))
