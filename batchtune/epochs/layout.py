"""Buckets and pools cut into batches and dealt to ranks, by the number of examples alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from batchtune.lengths import IntArray
from batchtune.results import RankTimes

Indices: TypeAlias = npt.NDArray[np.signedinteger[Any]]
"""Indices of examples: 32 bits wide where these suffice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealing:
    """The way in which buckets become the batches of all ranks, which always have the same number."""

    world_size: int = 1
    same_bucket: bool = (
        False  # whether, step by step, the batches of all ranks are of one bucket
    )
    drop_last: bool = False  # whether to leave out examples that fill no batch, and batches not enough for all ranks

    @property
    def together(self) -> int:
        """The number of batches that make one step and stay together when batches are put in order."""
        if self.same_bucket:
            return self.world_size
        return 1


ON_ONE_RANK = Dealing()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The ranks that training runs on; with `same_bucket` all take batches of one bucket at each step.

    With `accumulate` above 1 they wait for each other only after so many batches.
    """

    world_size: int = 1
    same_bucket: bool = False
    accumulate: int = 1

    def epoch_seconds(self, times: RankTimes) -> float:
        """Return the time of an epoch as these ranks take batches."""
        if self.same_bucket:
            return times.same_bucket_epoch_seconds
        return times.independent_epoch_seconds

    @property
    def dealing(self) -> Dealing:
        """How batches are dealt to them."""
        return Dealing(world_size=self.world_size, same_bucket=self.same_bucket)

    def steps(self, batches: int) -> int:
        """Return the optimizer steps of an epoch with this many batches over all ranks."""
        return -(-batches // (self.world_size * self.accumulate))


ONE_RANK = Ranks()


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The places where buckets or pools, one after the other, are cut into batches; arrays of the shape (batches,)."""

    starts: IntArray  # a batch's first example, as a position in this epoch's examples
    batch_sizes: IntArray
    buckets: IntArray  # the bucket whose batch size limits the batch
    rest: npt.NDArray[
        np.bool_
    ]  # whether it holds what the full batches of its bucket or pool leave over
    dealing: Dealing
    count: int  # of examples in the data set
    in_order: bool = False  # whether unshuffled batches come in this order; else as their last examples are read
    most_per_rank: int | None = (
        None  # with `drop_last`, the most batches that a rank runs; None: all that are enough
    )

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


@dataclass(frozen=True, slots=True, eq=False)
class Tally:
    """How many batches of each size an epoch has in each bucket, over all ranks; arrays of the shape (kinds,)."""

    buckets: IntArray
    batch_sizes: IntArray
    numbers: IntArray

    @classmethod
    def of(cls, buckets: IntArray, batch_sizes: IntArray) -> Tally:
        """Count batches by their bucket and size, both of the shape (batches,)."""
        sizes = int(batch_sizes.max(initial=0)) + 1
        kinds, numbers = np.unique(buckets * sizes + batch_sizes, return_counts=True)
        return cls(kinds // sizes, kinds % sizes, numbers)

    @property
    def batches(self) -> int:
        """Number of all batches."""
        return int(self.numbers.sum())

    @property
    def examples(self) -> int:
        """Number of examples in them, each as often as it is dealt."""
        return int(self.batch_sizes @ self.numbers)

    @property
    def mean_batch_size(self) -> float:
        """Examples / batches."""
        return self.examples / self.batches

    @property
    def batch_size_variation(self) -> float:
        """The standard deviation of the batch sizes / their mean."""
        variance = float(
            np.average(
                (self.batch_sizes - self.mean_batch_size) ** 2, weights=self.numbers
            )
        )
        return math.sqrt(variance) / self.mean_batch_size


def tally(
    counts: IntArray, batch_sizes: IntArray, dealing: Dealing = ON_ONE_RANK
) -> Tally:
    """Count the batches that `lay_out` cuts, by bucket and size.

    On one rank they are Σ ceil(n_b / B_b) whatever the shuffle, as for every sampler that fills buckets and emits the
    rest, SpeechBrain's among them. `counts`, the examples in each bucket, and `batch_sizes` have the shape (buckets,).
    """
    if dealing.world_size > 1:
        layout = lay_out(counts, batch_sizes, dealing)
        return Tally.of(layout.buckets, layout.batch_sizes)
    full = counts // batch_sizes
    rests = counts % batch_sizes
    numbers = np.concatenate((full, np.minimum(rests, 0 if dealing.drop_last else 1)))
    made = numbers > 0
    buckets = np.tile(np.arange(counts.size), 2)
    return Tally(
        buckets[made], np.concatenate((batch_sizes, rests))[made], numbers[made]
    )


def positions(starts: npt.NDArray[Any], sizes: npt.NDArray[Any]) -> IntArray:
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


def lay_out(counts: IntArray, batch_sizes: IntArray, dealing: Dealing) -> Layout:
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
    return -(-steps.starts.size * dealing.together // dealing.world_size)


def deal(
    steps: Layout, per_rank: int | None = None, firsts: IntArray | None = None
) -> Layout:
    """Deal what was cut into steps, those of one batch or with `same_bucket` of one for each rank, to the ranks.

    If the steps are no multiple of the ranks, or too few for `per_rank` batches of each, the largest are split in two
    until they are; if even batches of one are too few, some are dealt twice. A step for all ranks is dealt evenly; of
    fewer examples than ranks, others from `firsts`, the first position of each bucket, are dealt twice, or without it
    the same. With `drop_last` nothing is split or repeated: rests are left out here, and full batches that are not
    enough for all ranks in `drawn`.
    """
    dealing = steps.dealing
    together = dealing.together
    if dealing.drop_last:
        steps = _chosen(steps, np.flatnonzero(~steps.rest))
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
    own = starts + np.cumsum(shares, axis=1) - shares
    again = first + (ranks - held) % (starts + held - first)
    return replace(
        steps,
        starts=np.where(shares > 0, own, again).ravel(),
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
            return _chosen(layout, np.sort(np.arange(wanted) % layout.starts.size))
        layout = _chosen(layout, np.insert(np.arange(layout.starts.size), batch, batch))
        half = -(-size // 2)
        layout.batch_sizes[batch : batch + 2] = (half, size - half)
        layout.starts[batch + 1] += half
    return layout


def _chosen(layout: Layout, batches: npt.NDArray[np.intp]) -> Layout:
    """Return some of the batches."""
    return replace(
        layout,
        starts=layout.starts[batches],
        batch_sizes=layout.batch_sizes[batches],
        buckets=layout.buckets[batches],
        rest=layout.rest[batches],
    )
