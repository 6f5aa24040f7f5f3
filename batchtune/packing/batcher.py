"""Epochs of packed micro-batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from batchtune.epochs.batchers import ReshuffledBatcher
from batchtune.epochs.layout import (
    EpochBatches,
    Indices,
    Layout,
    RankSplit,
    ShuffleKey,
    chosen,
    steps_per_rank,
)
from batchtune.lengths import IntArray
from batchtune.packing.packed import Packed
from batchtune.packing.packing import Budget


class PackedBatcher(ReshuffledBatcher):
    """Sequences in pools: shuffled, taken `pool_size` at a time, packed into micro-batches.

    Micro-batches that all ranks run at the same time are those that take about as long. An epoch with fewer than others
    has its last pool packed into more.
    """

    def __init__(self, tokens: IntArray, budget: Budget, pool_size: int) -> None:
        super().__init__(tokens.size)
        self._tokens = tokens
        self._budget = budget
        self._pools = -(-tokens.size // pool_size)

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
        return -(-steps_per_rank(steps) // accumulate) * accumulate

    def _dealt(self, examples: Indices, steps: Layout, per_rank: int) -> EpochBatches:
        """Return so many micro-batches for each rank, the slowest first, side by side with those that take as long."""
        seconds = self._budget.time_law.of_sequences(self._tokens)
        wanted = per_rank * steps.dealing.world_size
        packed = Packed(examples, steps.batch_sizes)
        if not steps.dealing.drop_last:
            packed = self._last_pool_packed_to(wanted, packed).split_to(wanted, seconds)
        order = np.argsort(-packed.sums(seconds), kind="stable")
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
