"""One epoch's batches: which examples are in which batch, in which order, and on which rank.

A batcher (`epochs.batchers`) orders an epoch's examples and cuts them into batches, as many for each rank: a `Cut`.
`drawn` puts these batches in order, those of all ranks; `simulate` returns their shapes. The sampler, the verification
and the simulation of an epoch are these steps. `lengths` always has the shape (examples,).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from batchtune.epochs.layout import Indices, Layout, Ranks, positions
from batchtune.epochs.measured_costs import StepSeconds
from batchtune.lengths import FloatArray, IntArray

Ordering = Literal["random", "ascending", "descending"]
ORDERINGS: tuple[Ordering, ...] = get_args(Ordering)

# The shuffles that are drawn from (seed, epoch), each with random numbers of its own.
EXAMPLES = 1
_BATCHES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """The order in which examples and batches come.

    `shuffle` is of the examples, within their buckets or before pools are taken, and of the batches (`ordering`
    random). The orderings `ascending` and `descending` sort batches stably by their longest length; without `shuffle`,
    `random` leaves them as a streaming sampler would complete them. `attempt` says which of an epoch's shuffles it is.
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


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """One epoch's examples in their order, shape (examples,), and the batches as positions in them."""

    examples: Indices
    layout: Layout

    def lists(self, batches: IntArray) -> Iterator[list[int]]:
        """Yield the examples of these batches."""
        starts = self.layout.starts[batches]
        ends = starts + self.layout.batch_sizes[batches]
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            yield self.examples[start:end].tolist()

    def longest(self, values: npt.NDArray[Any], batches: IntArray) -> FloatArray:
        """Return the largest value of each of these batches, from one value for each example."""
        sizes = self.layout.batch_sizes[batches]
        if not sizes.size:
            return np.empty(0)
        held = values[self.examples[positions(self.layout.starts[batches], sizes)]]
        return np.maximum.reduceat(held, np.cumsum(sizes) - sizes).astype(np.float64)


def drawn(
    cut: Cut, drawing: Drawing, lengths: npt.NDArray[Any] | None = None
) -> IntArray:
    """Return the indices of batches in their order, shape (steps × world_size,); `lengths` if batches are sorted.

    Batch i is the one of rank i % world_size at step i // world_size.
    """
    layout = cut.layout
    together = layout.dealing.together
    units = layout.starts.size // together
    order = np.arange(units)
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
    """The shapes and buckets of an epoch's batches, in their order; arrays of the shape (batches of all ranks,)."""

    batch_sizes: IntArray
    lengths: FloatArray
    targets: FloatArray | None
    buckets: IntArray

    def __len__(self) -> int:
        return int(self.batch_sizes.size)

    @property
    def padded_length(self) -> float:
        """The sum of the batches' padded lengths."""
        return float(self.batch_sizes @ self.lengths)

    def seconds(self, step_seconds: StepSeconds) -> FloatArray:
        """Return the time of each batch."""
        sizes = self.batch_sizes.astype(np.float64)
        if self.targets is None:
            return step_seconds(sizes, self.lengths)
        return step_seconds(sizes, self.lengths, self.targets)

    def epoch_seconds(self, step_seconds: StepSeconds, ranks: Ranks) -> float:
        """Return the time of the epoch, whose batches ranks take in turn; a step lasts as long as its slowest batch."""
        seconds = np.zeros(ranks.steps(len(self)) * ranks.world_size * ranks.accumulate)
        seconds[: len(self)] = self.seconds(step_seconds)
        return float(
            seconds.reshape(-1, ranks.accumulate, ranks.world_size)
            .sum(axis=1)
            .max(axis=1)
            .sum()
        )


def simulate(
    cut: Cut, drawing: Drawing, lengths: FloatArray, targets: FloatArray | None = None
) -> EpochShapes:
    """Return the shapes of the batches that all ranks have in one epoch: those of step 0, rank by rank, then step 1."""
    layout = cut.layout
    batches = drawn(cut, drawing, lengths)
    longest_targets = None
    if targets is not None:
        longest_targets = cut.longest(targets, batches)
    longest = cut.longest(lengths, batches)
    return EpochShapes(
        layout.batch_sizes[batches], longest, longest_targets, layout.buckets[batches]
    )
