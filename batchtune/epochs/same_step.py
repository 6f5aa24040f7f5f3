"""Cuts the examples of an optimizer step into micro-batches that fit, with the least padding.

The examples of a step stay those that the training draws, so the training stays the same: only which of them share a
micro-batch, and with it the padding, changes. Lengths descend; a micro-batch holds neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from batchtune.epochs.layout import Indices
from batchtune.epochs.table import BucketTable
from batchtune.lengths import FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class StepCutter:
    """Cuts optimizer steps into micro-batches for the ranks that run them.

    Attributes:
        lengths: Shape (examples,): of the data set.
        table: How many examples of a micro-batch fit, by the length of its longest.
        world_size: How many ranks run a step's micro-batches side by side.
        equal_counts: Whether the micro-batches of a step hold the same number of examples, to within one.
    """

    lengths: npt.NDArray[Any]
    table: BucketTable
    world_size: int = 1
    equal_counts: bool = False

    def cut(self, examples: Indices, each: int) -> tuple[list[Indices], Indices]:
        """Return `each` micro-batches for every rank, as ranks take them in turn, and the examples that don't fit.

        These are the shortest ones. Of fewer examples than micro-batches, there are fewer of these, or on several ranks
        some examples are dealt twice.
        """
        ranks = self.world_size
        if examples.size < ranks:
            examples = np.resize(examples, ranks)
        values = self.lengths[examples].astype(np.float64)
        longest_first = np.argsort(-values, kind="stable")
        examples = examples[longest_first]
        values = values[longest_first]
        fits = self.table.batch_sizes[self.table.assign(values)]
        sizes = self._sizes(values, fits, min(each, examples.size // ranks) * ranks)
        ends = np.cumsum(sizes)
        batches = np.split(examples, ends)
        left = batches.pop()
        order = dealt(values[ends - sizes] * sizes, ranks)
        return [batches[place] for place in order.tolist()], left

    def epoch(
        self, steps: Iterable[tuple[Indices, int]]
    ) -> Iterator[tuple[list[Indices], Indices]]:
        """Yield the micro-batches of each step, from its examples and how many micro-batches each rank runs.

        And the examples that don't fit, which move to the next step; after the last one, more micro-batches follow.
        """
        left = np.empty(0, dtype=np.int64)
        each = 1
        for examples, each in steps:
            batches, left = self.cut(np.concatenate((left, examples)), each)
            yield batches, left
        while left.size:
            batches, left = self.cut(left, each)
            yield batches, left

    def _sizes(self, lengths: FloatArray, fits: IntArray, parts: int) -> IntArray:
        """Return the sizes of `parts` micro-batches of all examples, or of those that fit, the longest first."""
        if self.equal_counts:
            sizes = equal_parts(fits, parts)
            if sizes is None:
                sizes = np.full(parts, fits[0])
            return sizes
        least = least_padded(lengths, fits, parts)
        return most_held(fits, parts) if least is None else least


def micro_batches(own: int, own_accumulate: int, accumulate: int) -> int:
    """Return how many micro-batches take the place of a rank's `own` batches, if a step is cut into `accumulate`.

    A last step of fewer than `own_accumulate` batches is cut into fewer micro-batches in proportion.
    """
    steps, rest = divmod(own, own_accumulate)
    return steps * accumulate + -(-rest * accumulate // own_accumulate)


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


def least_padded(lengths: FloatArray, fits: IntArray, parts: int) -> IntArray | None:
    """Return the sizes of `parts` micro-batches, as many examples each as fit, whose padded lengths are least in sum.

    None if the examples don't fit into `parts`, or are fewer than that. `lengths` descend; `fits` is as for
    `most_held`.
    """
    count = lengths.size
    if count < parts:
        return None
    widest = int(min(fits.max(), count - parts + 1))
    # In column j: of a batch of widest - j examples that ends before each place, begins at `starts`.
    sizes = np.arange(widest, 0, -1)
    starts = np.arange(count + 1)[:, np.newaxis] - sizes
    held = np.maximum(starts, 0).clip(max=count - 1)
    costs = np.where(
        (starts >= 0) & (sizes <= fits[held]), sizes * lengths[held], np.inf
    )
    least = np.full(widest + count + 1, np.inf)
    least[widest] = 0.0
    chosen = np.empty((parts, count + 1), dtype=np.int64)
    for part in range(parts):
        # Row e holds the least costs up to each place where a batch that ends before e may begin.
        before = np.lib.stride_tricks.sliding_window_view(least, widest)[: count + 1]
        sums = before + costs
        columns = sums.argmin(axis=1)
        chosen[part] = sizes[columns]
        least[widest:] = sums[np.arange(count + 1), columns]
    if least[-1] == np.inf:
        return None
    taken = []
    end = count
    for part in range(parts - 1, -1, -1):
        taken.append(int(chosen[part, end]))
        end -= taken[-1]
    return np.array(taken[::-1])


def equal_parts(fits: IntArray, parts: int) -> IntArray | None:
    """Return sizes that differ by one at most, so that a mean over each micro-batch's examples weighs them alike.

    None if the examples don't fit so, or are fewer than `parts`.
    """
    count = fits.size
    if count < parts:
        return None
    ends = np.arange(1, parts + 1) * count // parts
    sizes = np.diff(ends, prepend=0)
    if (sizes > fits[ends - sizes]).any():
        return None
    return sizes


def dealt(costs: FloatArray, ranks: int) -> IntArray:
    """Return the order in which ranks take micro-batches in turn: those at one place cost about the same.

    Places alternate in which rank takes the dearest, so that no rank is always the slowest.
    """
    places = np.argsort(-costs, kind="stable").reshape(-1, ranks)
    places[1::2] = places[1::2, ::-1]
    return places.ravel()
