"""Packs the sequences of an optimizer step, which stay those that the training draws, into micro-batches that fit."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

import numpy as np

from batchtune.epochs.layout import Indices
from batchtune.epochs.same_step import Cutter
from batchtune.lengths import IntArray
from batchtune.packing.packed import Packed
from batchtune.packing.packing import Budget


@dataclass(frozen=True, slots=True, eq=False)
class StepPacker(Cutter):
    """Packs steps into micro-batches without padding, so that all micro-batches and ranks take about as long.

    Attributes:
        tokens: Shape (sequences,): of the data set, each at most the budget.
        budget: The most tokens of a micro-batch, and its time.
    """

    tokens: IntArray
    budget: Budget

    def fewest(self, examples: Indices) -> int:
        """Return the fewest micro-batches of each rank that hold all sequences of a step."""
        packed = self.budget.packed(self.tokens[examples], self.world_size)
        return -(-packed.count // self.world_size)

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
    order = np.argsort(-tokens, kind="stable")
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
