"""Token budgets: sequences packed into micro-batches of at most `max_tokens`, and dealt to ranks by their time."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import chain
from numbers import Real
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from batchtune.epochs import (
    EpochBatches,
    Indices,
    Layout,
    RankSplit,
    ShuffleKey,
    chosen,
    positions,
    steps_per_rank,
)
from batchtune.epochs.batchers import Cutter, ReshuffledBatcher, in_turn
from batchtune.epochs.table import OverlongError, checked_lengths
from batchtune.errors import listed, shortened
from batchtune.lengths import (
    AnyArray,
    FloatArray,
    IntArray,
    ceil_div,
    largest_first,
    whole,
)
from batchtune.records import PackedConfig

# Micro-batches dealt to ranks that wait for each other, so that all take about as long.

# So many of the slowest micro-batches, and at least so many for each rank, are dealt by Karmarkar-Karp. The others
# differ so little from the next that dealing them in turn, back and forth, keeps the ranks as even.
_SLOWEST = 4096
_OF_A_RANK = 32
# The slowest rank exchanges sequences with one of so many of the quickest, until all are as even as this, or nothing
# helps. Ranks of more sequences hold so many micro-batches that they need not.
_EXCHANGING = 32
_EVEN = 0.002
_MOST_EXCHANGES = 2000
_MOST_OF_A_RANK = 256

# A part of the items: its sum and the index of each; all negated, so that the largest part and, of several, the one
# with the largest difference between its parts, comes first.
_Part: TypeAlias = tuple[float, list[int]]


def karmarkar_karp(values: Sequence[float], parts: int) -> list[list[int]]:
    """Divide items into parts of nearly equal sums by the largest differencing method; return the items of each.

    The two divisions with the largest differences are merged, the largest parts of one with the
    smallest of the other, until one is left. All parts have the same number of items, so the number
    of items must be a multiple of the parts.

    Source: Karmarkar and Karp, The differencing method of set partitioning (1982).
    """
    items = sorted((value, index) for index, value in enumerate(values))
    divisions = []
    for first in range(0, len(items), parts):
        taken = items[first : first + parts]
        division = sorted((-value, [-index]) for value, index in taken)
        divisions.append((_negated_difference(division), division))
    heapq.heapify(divisions)
    while len(divisions) > 1:
        _, largest = heapq.heappop(divisions)
        _, other = heapq.heappop(divisions)
        merged = sorted(map(_joined, largest, reversed(other)))
        heapq.heappush(divisions, (_negated_difference(merged), merged))
    return [[-index for index in negated] for _, negated in divisions[0][1]]


def _negated_difference(division: list[_Part]) -> float:
    return division[0][0] - division[-1][0]


def _joined(part: _Part, other: _Part) -> _Part:
    return part[0] + other[0], part[1] + other[1]


def dealt(seconds: FloatArray, world_size: int) -> npt.NDArray[np.intp]:
    """Return the order of micro-batches, a multiple of `world_size`, in which number i is rank i % world_size's.

    All ranks get equally many, and the sums of their seconds are as even as `karmarkar_karp` makes
    them. Each rank begins with its slowest, so that those that run at the same time take about
    equally long.
    """
    order = largest_first(seconds)
    each = min(max(_SLOWEST // world_size, _OF_A_RANK), order.size // world_size)
    slowest = order[: each * world_size]
    parts = karmarkar_karp(seconds[slowest].tolist(), world_size)
    of_ranks = slowest[np.sort(np.array(parts), axis=1)]
    others = order[each * world_size :]
    others = others[in_turn(seconds[others], world_size)]
    return np.concatenate((of_ranks.T.ravel(), others))


def exchanged(
    packed: Packed,
    tokens: IntArray,
    seconds: FloatArray,
    max_tokens: int,
    world_size: int,
) -> Packed:
    """Return dealt micro-batches after slow ranks gave fast ones longer sequences for shorter ones, or for none.

    `tokens` and `seconds` are those of each sequence, shape (sequences,). The number of micro-batches stays, and none
    exceeds the cap. Each exchange is the one that leaves the slower of the two ranks the fewest seconds.
    """
    if tokens.size > _MOST_OF_A_RANK * world_size:
        return packed
    batches = np.empty(tokens.size, dtype=np.int64)
    batches[packed.sequences] = np.repeat(np.arange(packed.count), packed.sizes)
    sizes = packed.sizes.copy()
    rooms = max_tokens - packed.sums(tokens)
    loads = packed.sums(seconds).reshape(-1, world_size).sum(axis=0)
    # What may come back: a sequence, or from any micro-batch nothing.
    all_tokens = np.append(tokens, np.zeros_like(sizes))
    all_seconds = np.append(seconds, np.zeros(packed.count))
    all_batches = np.append(batches, np.arange(packed.count))
    for _ in range(_MOST_EXCHANGES):
        slowest = int(loads.argmax())
        if loads[slowest] <= (1 + _EVEN) * loads.mean():
            break
        quick = np.sort(loads)[:_EXCHANGING][-1]
        back = np.flatnonzero(loads[all_batches % world_size] <= quick)
        batches = all_batches[: tokens.size]
        sent = np.flatnonzero(batches % world_size == slowest)[:, np.newaxis]
        more = tokens[sent] - all_tokens[back]
        later = seconds[sent] - all_seconds[back]
        fits = (more <= rooms[all_batches[back]]) & (-more <= rooms[batches[sent]])
        # No micro-batch is left empty.
        fits &= (all_tokens[back] > 0) | (sizes[batches[sent]] > 1)
        others = loads[all_batches[back] % world_size]
        slower = np.maximum(loads[slowest] - later, others + later)
        slower[~fits] = np.inf
        row, column = np.unravel_index(slower.argmin(), slower.shape)
        if slower[row, column] >= loads[slowest]:
            break
        given = int(sent[row, 0])
        taken = int(back[column])
        here = int(all_batches[given])
        there = int(all_batches[taken])
        rooms[here] += more[row, column]
        rooms[there] -= more[row, column]
        loads[slowest] -= later[row, column]
        loads[there % world_size] += later[row, column]
        all_batches[given] = there
        if taken < tokens.size:
            all_batches[taken] = here
        else:
            sizes[here] -= 1
            sizes[there] += 1
    batches = all_batches[: tokens.size]
    order = largest_first(tokens)
    return Packed.of_owners(order, batches[order])


# The packers: which sequences share a micro-batch, so that none has more tokens than the cap.
#
# All take the sequences from the longest to the shortest, and work on whole groups of equally long ones.

Packer: TypeAlias = Callable[[IntArray, FloatArray, int, int], IntArray]
"""(lengths, seconds of each sequence, max_tokens, multiple) → the micro-batch of each sequence, from 0 on.

Lengths descend and are at most `max_tokens`; all arrays have the shape (sequences,). If the number of micro-batches is
no multiple of `multiple`, the caller splits some.
"""

# More micro-batches than the bound, in which shorter ones may be looked for.
_MORE = 0.005
# The tokens of the shortest sequences, of all, that fill up what the evened-out others leave free.
_FILLING_SHARES = (0.05, 0.5)
# A round deals sequences to at least 1/32 of the micro-batches that have room, in runs of at most 1/64 of their share.
_DEALT_TO = 32
_RUNS = 64


def first_fit(
    lengths: IntArray, seconds: FloatArray, max_tokens: int, multiple: int = 1
) -> IntArray:
    """Put each sequence into the first micro-batch with room for it.

    From the longest sequence on, that fills one micro-batch after the other, each with the longest sequence that still
    fits. Micro-batches are alike until a length runs out, so those that are alike are made at once.
    """
    distinct, firsts, counts = _groups(lengths)
    remaining = counts.tolist()
    ascending = distinct.tolist()
    available = list(range(len(ascending) + 1))

    def longest_up_to(group: int) -> int:
        """Return the last group up to this one that has sequences left, counted from 1; 0 without one."""
        last = group
        while available[last] != last:
            last = available[last]
        while available[group] != last:
            following = available[group]
            available[group] = last
            group = following
        return last

    records = []
    batches = 0
    group = longest_up_to(len(ascending))
    while group:
        room = max_tokens
        alike = lengths.size
        pattern = []
        while group:
            length = ascending[group - 1]
            taken = min(remaining[group - 1], room // length)
            pattern.append((group, taken))
            alike = min(alike, remaining[group - 1] // taken)
            room -= taken * length
            group = longest_up_to(bisect_right(ascending, room, 0, group - 1))
        for used, taken in pattern:
            records.append((used - 1, remaining[used - 1], taken, alike, batches))
            remaining[used - 1] -= taken * alike
            if not remaining[used - 1]:
                available[used] = used - 1
        batches += alike
        group = longest_up_to(len(ascending))
    groups, left, taken_each, batches_alike, first_batches = np.array(records).T
    sequences = taken_each * batches_alike
    begin = np.repeat(np.cumsum(sequences) - sequences, sequences)
    nth = np.arange(lengths.size) - begin
    places = np.repeat(firsts[groups] + counts[groups] - left, sequences) + nth
    owners = np.empty(lengths.size, dtype=np.int64)
    owners[places] = np.repeat(first_batches, sequences) + nth // np.repeat(
        taken_each, sequences
    )
    return owners


def best_fit(
    lengths: IntArray, seconds: FloatArray, max_tokens: int, multiple: int = 1
) -> IntArray:
    """Put each sequence into the micro-batch with the least room that suffices.

    Of several with equal room it takes the one that has had it longest. Those with equal room are
    filled at once.
    """
    distinct, _, counts = _groups(lengths)
    batches = 0
    rooms: list[int] = []  # ascending, those of `waiting`
    waiting: dict[int, list[int]] = {}
    owners = []
    times = []

    def put(chosen: list[int], taken: int, room: int) -> None:
        owners.append(chosen)
        times.append(taken)
        if room:
            if not waiting.get(room):
                insort(rooms, room)
            waiting.setdefault(room, []).extend(chosen)

    for length, count in zip(
        distinct[::-1].tolist(), counts[::-1].tolist(), strict=True
    ):
        remaining = count
        while remaining:
            place = bisect_left(rooms, length)
            room = max_tokens
            most = remaining
            if place < len(rooms):
                room = rooms[place]
                most = len(waiting[room])
            fitting = room // length
            full = min(most, remaining // fitting)
            needed = min(most, ceil_div(remaining, fitting))
            if place < len(rooms):
                chosen = waiting[room][:needed]
                del waiting[room][:needed]
                if not waiting[room]:
                    del rooms[place]
            else:
                chosen = list(range(batches, batches + needed))
                batches += needed
            if full:
                put(chosen[:full], fitting, room - fitting * length)
            remaining -= full * fitting
            if needed > full:
                put(chosen[full:], remaining, room - remaining * length)
                remaining = 0
    taken_each = np.repeat(times, [len(chosen) for chosen in owners])
    return np.repeat(np.fromiter(chain.from_iterable(owners), np.int64), taken_each)


def even(
    lengths: IntArray, seconds: FloatArray, max_tokens: int, multiple: int = 1
) -> IntArray:
    """Even out the seconds of the micro-batches; at most 0.5% more than the bound, unless first-fit needs more.

    The bound is the number of tokens / `max_tokens`. This tries the fewest and the most
    micro-batches up to that limit, and several shares of the tokens to fill them up with at the
    end, and takes those with the smallest spread of seconds.
    """
    best = first_fit(lengths, seconds, max_tokens)
    bound = ceil_div(int(lengths.sum()), max_tokens)
    allowed = int(bound * (1 + _MORE)) // multiple * multiple
    allowed = max(allowed, _rounded_up(int(best.max()) + 1, multiple))
    if allowed > lengths.size:
        return best
    spread = _spread(best, seconds, multiple)
    alone = int(np.count_nonzero(lengths * 2 > max_tokens))
    fewest = min(_rounded_up(max(bound, alone), multiple), allowed)
    for batches in sorted({fewest, allowed}):
        for share in _FILLING_SHARES:
            owners = _evened(lengths, seconds, max_tokens, batches, share)
            if owners.max() >= allowed:
                continue
            other = _spread(owners, seconds, multiple)
            if other < spread:
                best = owners
                spread = other
    return best


PACKERS: dict[str, Packer] = {
    "even": even,
    "first-fit": first_fit,
    "best-fit": best_fit,
}


def _groups(lengths: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Return the distinct lengths, ascending, where each begins in the descending lengths, and how many there are."""
    distinct, counts = np.unique(lengths, return_counts=True)
    return distinct, lengths.size - np.cumsum(counts), counts


def _rounded_up(count: int, multiple: int) -> int:
    return ceil_div(count, multiple) * multiple


def _spread(owners: IntArray, seconds: FloatArray, multiple: int) -> float:
    """Return the mean of the squared seconds of micro-batches, relative to the square of their mean."""
    sums = np.bincount(owners, seconds)
    return float(_rounded_up(sums.size, multiple) * np.sum(sums**2) / np.sum(sums) ** 2)


def _evened(
    lengths: IntArray,
    seconds: FloatArray,
    max_tokens: int,
    batches: int,
    filling_share: float,
) -> IntArray:
    """Return the micro-batch of each sequence: of so many, with even seconds, and as few more as the rest needs.

    The longest sequences go to the micro-batches with the least seconds. The shortest ones, which hold a share of the
    tokens, go where they fit best; what fits nowhere, into further micro-batches.
    """
    rooms = np.full(batches, max_tokens, dtype=np.int64)
    owners = np.full(lengths.size, -1, dtype=np.int64)
    shortest_tokens = np.cumsum(lengths[::-1])
    filling = np.searchsorted(shortest_tokens, filling_share * shortest_tokens[-1])
    dealt = lengths.size - min(int(filling), _RUNS * batches)
    dealt = _deal_longest(lengths[:dealt], seconds[:dealt], rooms, owners)
    rest = _fill(lengths, rooms, owners, dealt)
    if rest.size:
        owners[rest] = batches + first_fit(lengths[rest], seconds[rest], max_tokens)
    return owners


def _deal_longest(
    lengths: IntArray, seconds: FloatArray, rooms: IntArray, owners: IntArray
) -> int:
    """Deal sequences, from the longest on, to the micro-batches with the least seconds; return how many.

    `rooms` and `owners` are changed. It ends early if a sequence fits nowhere. In each round the micro-batches whose
    seconds would be passed by one sequence more for the least get one each, or, while many are left, a run of several.
    """
    tokens_before = np.concatenate(([0], np.cumsum(lengths)))
    seconds_before = np.concatenate(([0.0], np.cumsum(seconds)))
    loads = np.zeros(rooms.size)
    first = 0
    while first < lengths.size:
        left = lengths.size - first
        run = max(1, left // (_RUNS * rooms.size))
        order = np.argsort(loads, kind="stable")
        fitting = order[rooms[order] >= run * lengths[first]]
        if not fitting.size:
            run = 1
            fitting = order[rooms[order] >= lengths[first]]
        if not fitting.size:
            break
        passed = loads[fitting[0]] + seconds_before[first + run] - seconds_before[first]
        chosen = int(np.searchsorted(loads[fitting], passed, side="right"))
        chosen = min(max(chosen, ceil_div(fitting.size, _DEALT_TO)), left // run)
        dealt_to = fitting[:chosen]
        edges = first + run * np.arange(chosen + 1)
        owners[first : edges[-1]] = np.repeat(dealt_to, run)
        loads[dealt_to] += np.diff(seconds_before[edges])
        rooms[dealt_to] -= np.diff(tokens_before[edges])
        first = int(edges[-1])
    return first


def _fill(lengths: IntArray, rooms: IntArray, owners: IntArray, first: int) -> IntArray:
    """Put the sequences from `first` on where they fit best, and return those that fit nowhere.

    In each round every micro-batch, that with the most room first, gets the longest sequence that fits. `rooms` and
    `owners` are changed.
    """
    left = np.arange(lengths.size - 1, first - 1, -1)
    while left.size:
        ascending = lengths[left]
        roomy = largest_first(rooms)
        roomy = roomy[rooms[roomy] >= ascending[0]]
        longest = np.searchsorted(ascending, rooms[roomy], side="right") - 1
        # No sequence goes to two: each takes the next shorter one than the one before it, at most.
        nth = np.arange(roomy.size)
        chosen = np.minimum.accumulate(longest + nth) - nth
        chosen = chosen[chosen >= 0]
        if not chosen.size:
            break
        dealt_to = roomy[: chosen.size]
        owners[left[chosen]] = dealt_to
        rooms[dealt_to] -= ascending[chosen]
        left = np.delete(left, chosen)
    return left[::-1]


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Micro-batches, none of them empty.

    Attributes:
        sequences: Shape (sequences,): their indices, micro-batch after micro-batch.
        sizes: Shape (micro-batches,): how many sequences each holds.
    """

    sequences: IntArray
    sizes: IntArray

    @classmethod
    def of_owners(cls, sequences: IntArray, owners: IntArray) -> Packed:
        """Return the micro-batches of sequences, in this order within each, from the micro-batch of each of them."""
        sizes = np.bincount(owners)
        return cls(sequences[np.argsort(owners, kind="stable")], sizes[sizes > 0])

    @property
    def count(self) -> int:
        """The number of micro-batches."""
        return int(self.sizes.size)

    @property
    def starts(self) -> IntArray:
        """Where each micro-batch begins in `sequences`, shape (micro-batches,)."""
        return np.cumsum(self.sizes) - self.sizes

    def lists(self) -> Iterator[list[int]]:
        """Yield the sequences of each micro-batch."""
        sequences = self.sequences.tolist()
        starts = self.starts.tolist()
        for start, size in zip(starts, self.sizes.tolist(), strict=True):
            yield sequences[start : start + size]

    def sums(self, values: AnyArray) -> AnyArray:
        """Return the sum for each micro-batch of one value for each sequence."""
        return np.add.reduceat(values[self.sequences], self.starts)

    def extents(self, tokens: IntArray) -> FloatArray:
        """Return what memory depends on: tokens, Σ of their squares, sequences and the longest, shape (batches, 4)."""
        held = tokens[self.sequences].astype(np.float64)
        return np.column_stack(
            (
                np.add.reduceat(held, self.starts),
                np.add.reduceat(held**2, self.starts),
                self.sizes,
                np.maximum.reduceat(held, self.starts),
            )
        )

    def ordered(self, order: npt.NDArray[np.intp]) -> Packed:
        """Return the micro-batches in another order."""
        sizes = self.sizes[order]
        places = positions(self.starts[order], sizes)
        return Packed(self.sequences[places], sizes)

    def split_to(self, wanted: int, seconds: FloatArray) -> Packed:
        """Return at least the `wanted` number of micro-batches, or one for each sequence, by halving the slowest.

        `seconds`, shape (sequences,), descend within each micro-batch: every second sequence goes to the other half.
        """
        packed = self
        while packed.count < min(wanted, packed.sequences.size):
            sums = np.where(packed.sizes > 1, packed.sums(seconds), -1.0)
            # Those with more than half of the slowest one's seconds are halved before its halves are.
            halvable = int(np.count_nonzero(sums > sums.max() / 2))
            slowest = largest_first(sums)
            halved = np.zeros(packed.count, dtype=np.int64)
            halved[slowest[: min(halvable, wanted - packed.count)]] = 1
            nth = np.arange(packed.sequences.size) - np.repeat(
                packed.starts, packed.sizes
            )
            owners = np.repeat(2 * np.arange(packed.count), packed.sizes)
            owners += nth % 2 * np.repeat(halved, packed.sizes)
            packed = Packed.of_owners(packed.sequences, owners)
        return packed


# An int64 holds the tokens of a million sequences that are this long.
_MOST_TOKENS = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLaw:
    """The time of a micro-batch, from its total tokens, the sum of its squared lengths and its number of sequences.

    Attention within each sequence makes the time grow with the squares. Only ratios count when micro-batches are
    evened out, so the coefficients may also be FLOPs.

    Raises:
        ValueError: A coefficient is negative or not finite, or none but `seconds_per_batch` is positive.
    """

    seconds_per_token: float
    seconds_per_squared_token: float = 0.0
    seconds_per_sequence: float = 0.0
    seconds_per_batch: float = 0.0

    def __post_init__(self) -> None:
        coefficients = astuple(self)
        are_numbers = all(isinstance(value, Real) for value in coefficients)
        if not are_numbers or not all(0 <= value < math.inf for value in coefficients):
            raise ValueError(
                "the coefficients of a time law must be numbers, finite and at least 0, got "
                f"{shortened(coefficients)}"
            )
        if not any(coefficients[:-1]):
            raise ValueError(
                "a time law needs a positive seconds_per_token, seconds_per_squared_token or seconds_per_sequence"
            )

    def of_sequences(self, lengths: AnyArray) -> FloatArray:
        """Return the seconds that each sequence adds to its micro-batch, shape (sequences,)."""
        tokens = lengths.astype(np.float64)
        linear = self.seconds_per_token + self.seconds_per_squared_token * tokens
        return linear * tokens + self.seconds_per_sequence


# The FLOPs of a dense model with a hidden size of 4,096: 12·h²·L + 2·h·L² a layer, divided by 2·h. verl balances by it.
DENSE_7B = TimeLaw(seconds_per_token=24576.0, seconds_per_squared_token=1.0)


TimeLawGiven: TypeAlias = TimeLaw | Mapping[Any, float]
"""A time law, or its arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How sequences are packed.

    Attributes:
        max_tokens: The most tokens of a micro-batch, at least 1.
        packer: `even` fills micro-batches to the cap and evens out their time, `first-fit` and `best-fit` are those
            for descending lengths.
        time_law: The time of a micro-batch; by default proportional to the FLOPs of a dense 7B model.
        cut_at: Longer sequences count as this long, at most `max_tokens`, and the caller cuts them; None: no sequence
            may be longer than `max_tokens`.

    Raises:
        ValueError: An attribute breaks its rule.
    """

    max_tokens: int
    packer: str = "even"
    time_law: TimeLaw = DENSE_7B
    cut_at: int | None = None

    def __post_init__(self) -> None:
        cap = whole("max_tokens", self.max_tokens, 1, highest=_MOST_TOKENS)
        object.__setattr__(self, "max_tokens", cap)
        if not isinstance(self.packer, str) or self.packer not in PACKERS:
            raise ValueError(
                f"packer must be one of {', '.join(PACKERS)}, got {shortened(self.packer)}"
            )
        if not isinstance(self.time_law, TimeLaw):
            raise ValueError(
                f"time_law must be a batchtune.TimeLaw, got {shortened(self.time_law)}"
            )
        if self.cut_at is None:
            return
        cut_at = whole("cut_at", self.cut_at, 1)
        if cut_at > cap:
            raise ValueError(
                f"cut_at must be at most max_tokens, {cap:,}, got {cut_at:,}"
            )
        object.__setattr__(self, "cut_at", cut_at)

    def checked(self, lengths: npt.ArrayLike) -> IntArray:
        """Return the lengths that count; raise ValueError if one is no whole number or longer than allowed."""
        values = checked_lengths(lengths, hint="")
        unsound = (values > _MOST_TOKENS) | (values != np.floor(values))
        if unsound.any():
            entry = int(unsound.argmax())
            raise ValueError(
                f"lengths must be whole numbers of tokens, at most 2**40, but entry {entry} is {values[entry]}: fix it"
            )
        tokens: IntArray = values.astype(np.int64)
        if self.cut_at is not None:
            return np.minimum(tokens, self.cut_at)
        overlong = np.flatnonzero(tokens > self.max_tokens)
        if overlong.size:
            raise OverlongError(
                f"{overlong.size:,} of {tokens.size:,} sequences are longer than max_tokens, {self.max_tokens:,}, the "
                f"longest with {tokens.max():,} tokens: those with index {listed(overlong.tolist())}. Raise "
                f"max_tokens, leave them out, or cut them, cut_at={self.max_tokens}"
            )
        return tokens

    def packed(self, tokens: IntArray, multiple: int = 1) -> Packed:
        """Return the micro-batches of sequences with these lengths; their number is a `multiple` if possible."""
        seconds = self.time_law.of_sequences(tokens)
        order = largest_first(tokens)
        pack_sorted = PACKERS[self.packer]
        owners = pack_sorted(tokens[order], seconds[order], self.max_tokens, multiple)
        packed = Packed.of_owners(order, owners)
        return packed.split_to(_rounded_up(packed.count, multiple), seconds)

    def evened(self, packed: Packed, tokens: IntArray, world_size: int) -> Packed:
        """Return the micro-batches as ranks take them in turn, so that all ranks take about equally long.

        Their number, a multiple of the ranks, stays; some sequences may be exchanged.
        """
        packed = packed.ordered(dealt(self.seconds(packed, tokens), world_size))
        seconds = self.time_law.of_sequences(tokens)
        return exchanged(packed, tokens, seconds, self.max_tokens, world_size)

    def seconds(self, packed: Packed, tokens: IntArray) -> FloatArray:
        """Return the time of each micro-batch."""
        added = packed.sums(self.time_law.of_sequences(tokens))
        return self.time_law.seconds_per_batch + added


def budget_of(
    max_tokens: int,
    *,
    packer: str = "even",
    time_law: TimeLawGiven | None = None,
    cut_at: int | None = None,
) -> Budget:
    """Return the budget that a sampler's arguments describe; a time law may be given by its own arguments.

    Raises ValueError as `Budget` and `TimeLaw` do.
    """
    if isinstance(time_law, Mapping):
        time_law = TimeLaw(**time_law)
    return Budget(
        max_tokens=max_tokens,
        packer=packer,
        time_law=time_law or DENSE_7B,
        cut_at=cut_at,
    )


def budget_in(config: PackedConfig) -> Budget:
    """Return the budget of a `sampler.yaml`. Raises ValueError as `budget_of` does."""
    return budget_of(
        config.max_tokens,
        packer=config.packer,
        time_law=config.time_law,
        cut_at=config.cut_at,
    )


def pack(
    lengths: npt.ArrayLike,
    max_tokens: int,
    *,
    packer: str = "even",
    time_law: TimeLaw = DENSE_7B,
    cut_at: int | None = None,
    world_size: int = 1,
    accumulate: int = 1,
) -> list[list[int]]:
    """Pack the sequences of one global batch into micro-batches of at most `max_tokens`, and deal these to ranks.

    The result is the same on all ranks. Every sequence is in one micro-batch. A rank's micro-batches are
    `[rank::world_size]`: the same number for every rank, the slowest first.

    Example::

        micro_batches = batchtune.pack(lengths, 16_384, world_size=8)
        for micro_batch in micro_batches[rank::8]:
            ...  # of the sequences with these indices

    Args:
        lengths: Shape (sequences,): whole numbers of tokens, at least 1.
        max_tokens: The most tokens of a micro-batch.
        packer: `even`, `first-fit` or `best-fit`, as for `batchtune.PackedBatchSampler`.
        time_law: The time of a micro-batch, a `batchtune.TimeLaw`.
        cut_at: Longer sequences count as this long, and you cut them.
        world_size: The ranks that share the micro-batches.
        accumulate: Each rank's number of micro-batches is a multiple of this.

    Raises:
        OverlongError: A sequence is longer than `max_tokens`; the message counts and names them.
        ValueError: An argument breaks its rule, or there are too few sequences to give each rank the same number of
            micro-batches.
    """
    budget = Budget(
        max_tokens=max_tokens, packer=packer, time_law=time_law, cut_at=cut_at
    )
    ranks = whole("world_size", world_size, 1)
    multiple = ranks * whole("accumulate", accumulate, 1)
    tokens = budget.checked(lengths)
    packed = budget.packed(tokens, multiple)
    if packed.count % multiple:
        raise ValueError(_why_uneven(budget, tokens, ranks, multiple))
    return list(budget.evened(packed, tokens, ranks).lists())


def _why_uneven(
    budget: Budget, tokens: IntArray, world_size: int, multiple: int
) -> str:
    """Explain why the micro-batches can't be dealt evenly."""
    fewest = budget.packed(tokens).count
    needed = _rounded_up(fewest, multiple)
    return (
        f"{tokens.size:,} sequences can't be dealt evenly to {world_size:,} ranks with an accumulation of "
        f"{multiple // world_size:,}: the fewest micro-batches found are {fewest:,}, the next multiple of "
        f"{multiple:,} is {needed:,}, and each needs a sequence. Pack more sequences at once, lower world_size or "
        "accumulate, or raise max_tokens"
    )


class PackedBatcher(ReshuffledBatcher):
    """Sequences in pools: shuffled, taken `pool_size` at a time, packed into micro-batches.

    The micro-batches that all ranks run at the same time take about equally long. If an epoch has
    fewer than others, its last pool is packed into more.
    """

    def __init__(self, tokens: IntArray, budget: Budget, pool_size: int) -> None:
        super().__init__(tokens.size)
        self._tokens = tokens
        self._budget = budget
        self._pools = ceil_div(tokens.size, pool_size)

    def _steps(self, drawing: ShuffleKey, dealing: RankSplit) -> tuple[Indices, Layout]:
        """Return the sequences, and the micro-batches of all pools."""
        sequences = []
        sizes = []
        for pool in np.array_split(drawing.examples(self._count), self._pools):
            packed = self._budget.packed(self._tokens[pool])
            sequences.append(pool[packed.sequences])
            sizes.append(packed.sizes)
        pools = Packed(np.concatenate(sequences), np.concatenate(sizes))
        layout = Layout.in_row(pools.sizes, dealing, self._count, in_order=True)
        return pools.sequences, layout

    def _rounded_per_rank(self, steps: Layout) -> int:
        """Return the number of micro-batches of each rank, a multiple of those that are accumulated."""
        accumulate = steps.dealing.accumulate
        if steps.dealing.drop_last:
            return steps_per_rank(steps) // accumulate * accumulate
        return _rounded_up(steps_per_rank(steps), accumulate)

    def _dealt(self, examples: Indices, steps: Layout, per_rank: int) -> EpochBatches:
        """Return so many micro-batches for each rank, the slowest first, side by side with those that take as long."""
        seconds = self._budget.time_law.of_sequences(self._tokens)
        wanted = per_rank * steps.dealing.world_size
        packed = Packed(examples, steps.batch_sizes)
        if not steps.dealing.drop_last:
            packed = self._last_pool_packed_to(wanted, packed).split_to(wanted, seconds)
        order = largest_first(packed.sums(seconds))
        packed = packed.ordered(order)
        dealing = replace(steps.dealing, same_bucket=True)
        layout = Layout.in_row(packed.sizes, dealing, self._count, in_order=True)
        if packed.count < wanted:
            # Fewer sequences than ranks: some are dealt once more.
            again = np.sort(np.arange(wanted) % packed.count)
            layout = chosen(layout, again)
        return EpochBatches(packed.sequences, replace(layout, most_per_rank=per_rank))

    def _last_pool_packed_to(self, wanted: int, packed: Packed) -> Packed:
        """Return so many micro-batches if the last pool can make as many more."""
        place = self._count - self._count // self._pools
        before = int(np.searchsorted(packed.starts, place))
        pool = packed.sequences[place:]
        if packed.count == wanted or wanted - before > pool.size:
            return packed
        last = self._budget.packed(self._tokens[pool], wanted - before)
        return Packed(
            np.concatenate((packed.sequences[:place], pool[last.sequences])),
            np.concatenate((packed.sizes[:before], last.sizes)),
        )


@dataclass(frozen=True, slots=True, eq=False)
class StepPacker(Cutter):
    """Packs steps into micro-batches without padding, so that all micro-batches and ranks take about equally long.

    Attributes:
        tokens: Shape (sequences,): of the data set, each at most the budget.
        budget: The most tokens of a micro-batch, and its time.
    """

    tokens: IntArray
    budget: Budget

    def fewest(self, examples: Indices) -> int:
        """Return the fewest micro-batches of each rank that hold all sequences of a step."""
        packed = self.budget.packed(self.tokens[examples], self.world_size)
        return ceil_div(packed.count, self.world_size)

    def _cut_into(self, examples: Indices, parts: int) -> tuple[list[Indices], Indices]:
        left = examples[:0]
        tokens = self.tokens[examples]
        packed = _evenly_loaded(tokens, self.budget, parts)
        if packed is None:
            packed = self.budget.packed(tokens, parts)
        if packed.count > parts:
            by_length = replace(self.budget, packer="first-fit")
            full = by_length.packed(tokens)
            sizes = full.sizes[:parts]
            in_order = examples[full.sequences]
            examples, left = np.split(in_order, [int(sizes.sum())])
            packed = Packed(np.arange(examples.size), sizes)
        packed = self.budget.evened(packed, self.tokens[examples], self.world_size)
        return [examples[batch] for batch in packed.lists()], left


def _evenly_loaded(tokens: IntArray, budget: Budget, parts: int) -> Packed | None:
    """Return `parts` micro-batches, where each sequence, from the longest on, goes to the one with the least seconds.

    None if a sequence has no room there. For a step's few sequences that is much faster than a packer, and as even.
    """
    order = largest_first(tokens)
    seconds = budget.time_law.of_sequences(tokens)[order].tolist()
    loads = [(0.0, part, budget.max_tokens) for part in range(parts)]
    owners = []
    for length, its_seconds in zip(tokens[order].tolist(), seconds, strict=True):
        load, part, room = loads[0]
        if length > room:
            return None
        heapq.heapreplace(loads, (load + its_seconds, part, room - length))
        owners.append(part)
    return Packed.of_owners(order, np.array(owners))


__all__ = ["TimeLaw", "pack"]
