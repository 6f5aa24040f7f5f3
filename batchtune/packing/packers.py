"""The packers: which sequences share a micro-batch, so that none has more tokens than the cap.

All take the sequences from the longest to the shortest, and work on whole groups of equally long ones.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable
from itertools import chain
from typing import TypeAlias

import numpy as np

from batchtune.lengths import FloatArray, IntArray

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

    Of several with as much room it takes the one that has had it longest. Those with equal room are filled at once.
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
            needed = min(most, -(-remaining // fitting))
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

    The bound is the number of tokens / `max_tokens`. Among the numbers of micro-batches up to that, and shares of the
    tokens that fill the micro-batches up in the end, it takes those with the smallest spread of seconds.
    """
    best = first_fit(lengths, seconds, max_tokens)
    bound = -(-int(lengths.sum()) // max_tokens)
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
    return -(-count // multiple) * multiple


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
        chosen = min(max(chosen, -(-fitting.size // _DEALT_TO)), left // run)
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
        roomy = np.argsort(-rooms, kind="stable")
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
