"""Cuts the examples of an optimizer step into micro-batches that fit, at the least cost.

The examples of a step stay those that the training draws, so the training stays the same: only which of them share a
micro-batch, and with it the padding, changes. Lengths descend; a micro-batch holds neighbours.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from batchtune.epochs.layout import Indices
from batchtune.epochs.table import BucketTable
from batchtune.lengths import AnyArray, FloatArray, IntArray


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

        These are the shortest ones. Without a number there are as few micro-batches as hold all examples. Of fewer
        examples than micro-batches, there are fewer of these, or on several ranks some examples are dealt twice.
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

        And how many would hold all of its examples, if some don't fit and move to the next step; else 0. After the last
        step, more micro-batches follow.
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
        longest_first = np.argsort(-values, kind="stable")
        examples = examples[longest_first]
        values = values[longest_first]
        fits = self.table.batch_sizes[self.table.assign(values)]
        costs = values * (1 + (self.pair_cost or 0.0) * values)
        sizes = self._sizes(costs, fits, parts)
        ends = np.cumsum(sizes)
        starts = ends - sizes
        order = dealt(costs[starts] * sizes, self.world_size)
        batches = [examples[starts[place] : ends[place]] for place in order]
        return batches, examples[sizes.sum() :]

    def fewest(self, examples: Indices) -> int:
        """Return the fewest micro-batches of each rank that hold all examples of a step."""
        values = np.sort(self.lengths[examples].astype(np.float64))[::-1]
        fits = self.table.batch_sizes[self.table.assign(values)]
        each = -(-most_held(fits).size // self.world_size)
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
    """Return the sizes of `parts` micro-batches, as many examples each as fit, whose costs are least in sum.

    A micro-batch costs as many times what its first example does, `costs`, as it has examples. None if the examples
    don't fit into `parts`, or are fewer than that. `fits` is as for `most_held`.
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
