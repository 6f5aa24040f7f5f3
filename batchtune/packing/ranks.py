"""Micro-batches dealt to ranks that wait for each other, so that all take about as long."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from batchtune.lengths import FloatArray, IntArray
from batchtune.packing.packed import Packed

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

    The two divisions with the largest differences are merged, the largest parts of one with the smallest of the other,
    until one is left. All parts have as many items, so that these must be a multiple of the parts.

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

    Every rank gets as many, and the sums of their seconds are as even as by `karmarkar_karp`. Each rank begins with its
    slowest, so that those that run at the same time take about as long.
    """
    order = np.argsort(-seconds, kind="stable")
    each = min(max(_SLOWEST // world_size, _OF_A_RANK), order.size // world_size)
    slowest = order[: each * world_size]
    parts = karmarkar_karp(seconds[slowest].tolist(), world_size)
    of_ranks = slowest[np.sort(np.array(parts), axis=1)]
    in_turn = order[each * world_size :].reshape(-1, world_size)
    in_turn[1::2] = in_turn[1::2, ::-1]
    return np.concatenate((of_ranks.T, in_turn)).ravel()


def exchanged(
    packed: Packed,
    tokens: IntArray,
    seconds: FloatArray,
    max_tokens: int,
    world_size: int,
) -> Packed:
    """Return dealt micro-batches after slow ranks have given quick ones longer sequences for shorter or no ones.

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
    order = np.argsort(-tokens, kind="stable")
    return Packed.of_owners(order, batches[order])
