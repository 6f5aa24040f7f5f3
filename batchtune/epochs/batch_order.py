"""One epoch's batches: which examples are in which batch, in which order, and on which rank.

A batcher (`epochs.batchers`) orders an epoch's examples and cuts them into batches, as many for each rank: a `Cut`.
`drawn` puts these batches in order; `assemble` returns those of one rank, `simulate` only the shapes of all. The
sampler, the verification and the simulation of an epoch are these steps. `lengths` always has the shape (examples,).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from batchtune.epochs.layout import Indices, Layout, index_dtype, positions
from batchtune.lengths import FloatArray, IntArray

Ordering = Literal["random", "ascending", "descending"]
ORDERINGS: tuple[Ordering, ...] = get_args(Ordering)

# Examples that are looked up, or become Python numbers, at once: enough to be fast, few next to a data set.
_AT_ONCE = 1 << 18
_AS_LISTS = 1 << 14
# The shuffles that are drawn from (seed, epoch), each with random numbers of its own.
EXAMPLES = 1
_BATCHES = 2


@dataclass(frozen=True, slots=True, eq=False)
class EpochBatches:
    """An epoch's batches, in their order."""

    order: Indices  # shape (examples in batches,): indices of examples, batch after batch
    starts: Indices  # shape (batches + 1,): batch i holds order[starts[i] : starts[i + 1]]
    buckets: Indices  # shape (batches,): index of each batch's bucket

    def __len__(self) -> int:
        return int(self.buckets.size)

    def __iter__(self) -> Iterator[list[int]]:
        return self.lists()

    def lists(self, first: int = 0) -> Iterator[list[int]]:
        """Yield the batches as lists, from the one at `first` on."""
        for chunk in _chunks(self.starts[1:], first, _AS_LISTS):
            bounds = self.starts[chunk.start : chunk.stop + 1]
            examples = self.order[bounds[0] : bounds[-1]].tolist()
            for start, end in pairwise((bounds - bounds[0]).tolist()):
                yield examples[start:end]


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
        key = (self.epoch, of, self.attempt) if self.attempt else (self.epoch, of)
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=key))


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """One epoch's examples in their order, shape (examples,), and the batches as positions in them."""

    examples: Indices
    layout: Layout


def drawn(cut: Cut, drawing: Drawing, lengths: npt.NDArray[Any] | None = None) -> Indices:
    """Return the indices of batches in their order, shape (steps × world_size,); `lengths` if batches are sorted.

    Batch i is the one of rank i % world_size at step i // world_size.
    """
    layout = cut.layout
    examples = cut.examples
    together = layout.dealing.together
    ranks = layout.dealing.world_size
    units = layout.starts.size // together
    if drawing.shuffle:
        order: Indices = np.arange(units, dtype=index_dtype(layout.starts.size))
        drawing.stream(_BATCHES).shuffle(order)
    elif layout.in_order:
        order = np.arange(units, dtype=index_dtype(layout.starts.size))
    else:
        # As a sampler that reads examples one by one completes a step's batches: full ones when their last example was
        # read, then the rests, bucket by bucket.
        last = examples[layout.starts + layout.batch_sizes - 1].reshape(-1, together).max(axis=1)
        after_all = layout.count + layout.buckets[::together].astype(np.int64)
        order = np.argsort(np.where(layout.rest[::together], after_all, last), kind="stable")
    if layout.dealing.drop_last:
        order = order[: layout.batches_per_rank * ranks // together]
    if drawing.ordering != "random":
        assert lengths is not None
        longest = _longest(lengths, examples, layout.starts, layout.batch_sizes).reshape(-1, together).max(axis=1)
        if drawing.ordering == "ascending":
            keys = longest[order]
        else:
            keys = -longest[order]
        order = order[np.argsort(keys, kind="stable")]
    if together == 1:
        return order
    return (order[:, np.newaxis] * together + np.arange(together, dtype=order.dtype)).ravel()


def dropped_examples(layout: Layout, batches: Indices) -> int:
    """Return how many examples are in none of the batches that were drawn."""
    return layout.count - int(layout.batch_sizes[batches].sum(dtype=np.int64)) + layout.repeated_examples


def assemble(cut: Cut, drawing: Drawing, *, rank: int = 0, lengths: npt.NDArray[Any] | None = None) -> EpochBatches:
    """Return the batches of one rank in one epoch; `lengths` if batches are sorted."""
    examples = cut.examples
    layout = cut.layout
    mine = drawn(cut, drawing, lengths)[rank :: layout.dealing.world_size]
    starts = layout.starts[mine]
    sizes = layout.batch_sizes[mine]
    bounds = np.zeros(mine.size + 1, dtype=np.int64)
    np.cumsum(sizes, out=bounds[1:])
    order = np.empty(int(bounds[-1]), dtype=examples.dtype)
    for chunk in _chunks(bounds[1:], 0, _AT_ONCE):
        order[bounds[chunk.start] : bounds[chunk.stop]] = examples[positions(starts[chunk], sizes[chunk])]
    return EpochBatches(order, bounds, layout.buckets[mine])


@dataclass(frozen=True, slots=True, eq=False)
class EpochShapes:
    """The shapes and buckets of an epoch's batches, in their order; arrays of the shape (batches of all ranks,)."""

    batch_sizes: IntArray
    lengths: FloatArray
    targets: FloatArray | None
    buckets: IntArray

    def __len__(self) -> int:
        return int(self.batch_sizes.size)


def simulate(cut: Cut, drawing: Drawing, lengths: FloatArray, targets: FloatArray | None = None) -> EpochShapes:
    """Return the shapes of the batches that all ranks have in one epoch: those of step 0, rank by rank, then step 1."""
    examples = cut.examples
    layout = cut.layout
    batches = drawn(cut, drawing, lengths)
    starts = layout.starts[batches]
    sizes = layout.batch_sizes[batches]
    return EpochShapes(
        sizes.astype(np.int64),
        _longest(lengths, examples, starts, sizes),
        None if targets is None else _longest(targets, examples, starts, sizes),
        layout.buckets[batches].astype(np.int64),
    )


def _longest(values: npt.NDArray[Any], examples: Indices, starts: Indices, sizes: Indices) -> FloatArray:
    """Return the largest value of each batch, shape (batches,)."""
    longest = np.empty(starts.size)
    for chunk in _chunks(np.cumsum(sizes, dtype=np.int64), 0, _AT_ONCE):
        held = values[examples[positions(starts[chunk], sizes[chunk])]]
        longest[chunk] = np.maximum.reduceat(held, np.cumsum(sizes[chunk]) - sizes[chunk])
    return longest


def _chunks(ends: Indices, first: int, at_once: int) -> Iterator[slice]:
    """Yield the batches from `first` on, as many at a time as hold `at_once` examples, or one; `ends` counts up."""
    while first < ends.size:
        done = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, done + at_once, side="right")))
        yield slice(first, last)
        first = last
