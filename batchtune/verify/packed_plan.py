"""Plans the proof of packed micro-batches: those that prove the token budget, and those of the sampler's epochs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import count
from typing import Any

from batchtune.epochs.batchers import Batcher
from batchtune.epochs.layout import RankSplit, ShuffleKey
from batchtune.lengths import IntArray
from batchtune.packing.figures import batcher_of, in_order
from batchtune.packing.packed import Packed
from batchtune.packing.packing import Budget, budget_of
from batchtune.probe.compositions import COMPOSITIONS, Compositions
from batchtune.results import BatchShape, PackedConfig
from batchtune.verify.plan import (
    FEWEST_STEPS,
    MOST_SHUFFLED,
    MOST_STEPS,
    Plan,
    PlannedBatch,
)


@dataclass(frozen=True, kw_only=True)
class PackedPlan(Plan):
    """The packed micro-batches of `sampler.yaml` to prove. A `PlannedBatch` of them has no bucket: it is 0."""

    config: PackedConfig

    @cached_property
    def epoch_batches(self) -> int:
        """The number of micro-batches of an epoch."""
        return self._epoch(0).count

    @property
    def planned_steps(self) -> int:
        """How many shuffled steps to run, unless they take too long: those of an epoch, but 12 to 200."""
        steps = max(FEWEST_STEPS, min(self.epoch_batches, MOST_STEPS))
        return steps + -steps % self.costs.accumulate  # whole optimizer steps

    @cached_property
    def worst_batches(self) -> list[PlannedBatch]:
        """The micro-batches that prove the budget, those of the longest sequences first."""
        compositions = Compositions(self.lengths, self.seed)
        tokens = min(self.config.max_tokens, compositions.all_tokens)
        shapes = [compositions.shape(name, tokens) for name in COMPOSITIONS]
        return [PlannedBatch(shape, 0) for shape in dict.fromkeys(shapes)]

    @property
    def sequences(self) -> list[list[PlannedBatch]]:
        """Each of those with three others after it, each sequence on an emptied cache."""
        return list(self._with_others_after(self.worst_batches, self.worst_batches))

    def shuffled_batches(self, first: int = 0) -> Iterator[PlannedBatch]:
        """Yield epoch after epoch of micro-batches from the `first` on, as the sampler draws them with seed + epoch."""
        for epoch in count(first):
            for sequences in self._epoch(epoch).lists():
                shape = BatchShape.packed(self._tokens[sequences].tolist())
                yield PlannedBatch(shape, 0)

    @property
    def recorded(self) -> dict[str, Any]:
        """The fields of the record on the sampler; there are no buckets."""
        return {
            "settings": {**asdict(self.settings), "seed": self.seed},
            "bucket_boundaries": [],
            "bucket_batch_sizes": [],
            "max_batch_length": float(self.config.max_tokens),
            "pool_size": self.config.pool_size,
        }

    @cached_property
    def _budget(self) -> Budget:
        config = self.config
        return budget_of(
            config.max_tokens,
            packer=config.packer,
            time_law=config.time_law,
            cut_at=config.cut_at,
        )

    @cached_property
    def _tokens(self) -> IntArray:
        return self._budget.checked(self.lengths.evenly(MOST_SHUFFLED).values)

    @cached_property
    def _batcher(self) -> Batcher:
        config = self.config
        accumulate = None
        pool_size = config.pool_size
        if config.keeps_examples:
            accumulate = config.accumulate
            # One rank runs its share of each step.
            pool_size = max(1, pool_size // self.costs.world_size)
        return batcher_of(self._tokens, self._budget, pool_size, accumulate)

    def _epoch(self, epoch: int) -> Packed:
        drawing = ShuffleKey(seed=self.seed + epoch)
        return in_order(self._batcher.cut(drawing, RankSplit()), drawing)
