"""The sampler of packed micro-batches, and the sampler that a `sampler.yaml` describes, whichever that is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import ClassVar

import numpy.typing as npt

from batchtune.arguments import whole
from batchtune.packing.batcher import PackedBatcher
from batchtune.packing.packing import TimeLaw, budget_of
from batchtune.sampler.arguments import MOST_ACCUMULATED
from batchtune.sampler.base import EpochBatchSampler


class PackedBatchSampler(EpochBatchSampler):
    """Micro-batches of at most `max_tokens`, packed without padding, for `DataLoader(batch_sampler=...)`.

    Each epoch shuffles the sequences, takes them `pool_size` at a time and packs each pool. All ranks run micro-batches
    of about the same time side by side; these steps are then shuffled. All epochs have the same number of
    micro-batches, `len()`: if one has fewer, its last pool is packed into more.

    Example::

        sampler = PackedBatchSampler(lengths, max_tokens=16_384, accumulate=4)
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=DataCollatorWithFlattening())

    Epochs, ranks and resuming are as for `BucketBatchSampler`, including the arguments that are not listed here.

    Args:
        lengths: Shape (sequences,): whole numbers of tokens, at least 1.
        max_tokens: The most tokens of a micro-batch.
        packer: `even` fills micro-batches to the cap and evens out their time, with at most 0.5% more of them than
            tokens / max_tokens in each pool, unless first-fit-decreasing needs more; `first-fit` and `best-fit` are
            those for descending lengths.
        time_law: The time of a micro-batch, a `batchtune.TimeLaw` or its arguments; by default proportional to the
            FLOPs of a dense 7B model.
        pool_size: The most sequences of a pool, at least 1. All pools are of one size, to within one sequence; each
            leaves one micro-batch that is not full.
        cut_at: Longer sequences count as this long, and the data set or `collate_fn` cuts them; None: a sequence longer
            than `max_tokens` is an error that names it.
        accumulate: The number of micro-batches of each rank in an epoch is a multiple of this.
        drop_last: Whether to leave out the last micro-batches if they are too few for all ranks, instead of packing the
            last pool into more; see `dropped_examples`.

    Raises:
        OverlongError: A sequence is longer than `max_tokens`.
        ValueError: An argument breaks its rule; the message says what to do.
    """

    KIND = "packed"
    OPTIONS: ClassVar[tuple[str, ...]] = (
        "max_tokens",
        "packer",
        "time_law",
        "pool_size",
        "cut_at",
        "accumulate",
        "shuffle",
        "drop_last",
        "seed",
    )

    def __init__(
        self,
        lengths: npt.ArrayLike,
        *,
        max_tokens: int,
        packer: str = "even",
        time_law: TimeLaw | Mapping[str, float] | None = None,
        pool_size: int = 8192,
        cut_at: int | None = None,
        accumulate: int = 1,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        epoch: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.budget = budget_of(
            max_tokens, packer=packer, time_law=time_law, cut_at=cut_at
        )
        self.pool_size = whole("pool_size", pool_size, 1)
        tokens = self.budget.checked(lengths)
        accumulate = whole("accumulate", accumulate, 1, highest=MOST_ACCUMULATED)
        super().__init__(
            tokens,
            PackedBatcher(tokens, self.budget, self.pool_size),
            [asdict(self.budget), self.pool_size, accumulate],
            shuffle=shuffle,
            drop_last=drop_last,
            seed=seed,
            epoch=epoch,
            rank=rank,
            world_size=world_size,
            accumulate=accumulate,
        )


sampler_from_config = EpochBatchSampler.from_config
