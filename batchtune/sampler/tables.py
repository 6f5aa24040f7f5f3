"""The samplers of padded batches, in buckets or in pools."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy.typing as npt

from batchtune.arguments import whole
from batchtune.sampler.arguments import cost
from batchtune.sampler.base import TableBatchSampler


class BucketBatchSampler(TableBatchSampler):
    """Batches of examples of similar length, for `torch.utils.data.DataLoader(batch_sampler=...)`.

    An example belongs to the first bucket whose boundary is not below its length, and a batch holds examples of one
    bucket, at most that bucket's batch size. Each epoch is reshuffled, from seed and epoch alone, so all ranks and all
    runs agree on the batches. All epochs have as many batches, `len()`.

    Example::

        sampler = BucketBatchSampler.from_config("batchtune-run/sampler.yaml", "train.csv")  # row i is dataset[i]
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=pad, num_workers=4)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)  # may be left out: each pass over the loader is the next epoch
            for batch in loader:
                ...

    **Ranks.** Every rank has the same number of batches, and every example is in exactly one batch of one rank: if the
    batches can't be dealt evenly, the largest are split in two until they can. (Only if even batches of one can't, as
    with fewer examples than ranks, some are repeated: see `repeated_examples`.) Nothing else may deal the batches once
    more: give Lightning's Trainer `use_distributed_sampler=False`; on several processes leave the loader out of
    accelerate's `prepare`, or give `rank=0, world_size=1` here; with transformers' Trainer, return the loader from
    `get_train_dataloader` as it is. If something does, the first batch raises RuntimeError.

    **Resuming.** `state_dict` and `load_state_dict` resume in mid-epoch, batch for batch, with any number of workers:
    the state of a sampler in a plain DataLoader counts the batches that the loader has delivered, not those that its
    workers have fetched ahead. With `torchdata.stateful_dataloader.StatefulDataLoader`, save the loader's own state.
    A loader that accelerate prepared, on one process, fetches one batch ahead: prepare a StatefulDataLoader there, or
    give the number of batches trained on, `state_dict(batches=...)`. It also counts epochs, from 0: after `load_state`
    call its `set_epoch`.

    Args:
        lengths: Shape (examples,), positive and finite: the length of each example, in the unit of the boundaries.
            Lengths of fewer bits than float64 are compared with the boundaries rounded alike.
        bucket_boundaries: Inclusive upper edges, ascending; the last is at least the longest length.
        bucket_batch_sizes: One for each boundary, at least 1.
        shuffle: Whether to shuffle examples and batches. If not, examples keep their order within their buckets, and
            batches come as a streaming sampler fills them: full ones when their last example is read, then the rest
            bucket by bucket.
        batch_ordering: `ascending` or `descending` sorts an epoch's batches by their longest length.
        drop_last: Whether to leave out batches that are not full, and those at the end that are not enough for all
            ranks; see `dropped_examples`. An epoch that then holds no batch at all warns.
        seed, epoch: At least 0; the epoch is the first.
        rank, world_size: This process, from 0 on, and the number of processes; by default those of `torch.distributed`
            when the sampler is first used.
        same_bucket: Whether at each step the batches of all ranks are of one bucket, so that none waits for another.
            The rest of a bucket after full batches for all ranks is dealt evenly in smaller ones; if it is fewer
            examples than ranks, others of the bucket are repeated.
        overlong: Whether examples beyond the last boundary are an `error` or batches of a `single` example.

    Raises:
        ValueError: An argument breaks its rule; the message says which entry and what to do.
    """

    KIND = "bucket"


class PooledBatchSampler(TableBatchSampler):
    """Batches of neighbours in pools that are sorted by length, for `DataLoader(batch_sampler=...)`.

    Each epoch shuffles the examples, takes them `pool_size` at a time, sorts each pool by length and cuts it, from the
    longest example on, into batches of as many as fit; then it shuffles the batches. Padding is less than in buckets,
    and each pool leaves one batch that is not full, where each bucket does. In return, examples of like length that
    fall into one pool are likely to be batch mates: larger pools waste less, smaller ones are more random.

    **Number of batches.** Pools could be cut into a few batches more in one epoch than in another, but Lightning,
    transformers' Trainer and learning rate schedules ask for `len()` once. So all epochs have as many as the longest
    of the first three: an epoch with fewer has its largest batches split in two, and one with more is reshuffled.
    With `drop_last` they have as many as the shortest, and other epochs leave out some batches more.

    Everything else is as for `BucketBatchSampler`, including the arguments that are not listed here.

    Args:
        lengths: As for `BucketBatchSampler`.
        pool_size: The most examples of a pool, at least 1. All pools of an epoch are of one size, to within one
            example; a data set that is no larger is one pool.
        batch_overhead: The cost of a batch besides its padded length, in the unit of the lengths: pools are then cut so
            that both together are least, which saves time if a pool makes few batches. None: each batch holds as
            many examples as fit, as it does with `drop_last` and in pools of more than 4,096 examples.
        bucket_boundaries: Lengths up to which a batch size fits, ascending; the last is at least the longest length.
        bucket_batch_sizes: The most examples of a batch, by the first boundary that is not below its longest length.
        shuffle: Whether to shuffle examples and batches. If not, pools are taken in the order of the data set, and
            batches come pool by pool, the longest first.
        drop_last: As for `BucketBatchSampler`, for the last batch of each pool.
        same_bucket: Whether at each step the batches of all ranks are neighbours in one pool, so that they are of
            nearly one length and size, and none waits long for another.
    """

    KIND = "pooled"
    OPTIONS: ClassVar[tuple[str, ...]] = (
        *TableBatchSampler.OPTIONS,
        "pool_size",
        "batch_overhead",
    )

    def __init__(
        self,
        lengths: npt.ArrayLike,
        *,
        pool_size: int,
        batch_overhead: float | None = None,
        **options: Any,
    ) -> None:
        self.pool_size = whole("pool_size", pool_size, 1)
        if batch_overhead is not None:
            self.batch_overhead = cost("batch_overhead", batch_overhead)
        super().__init__(lengths, **options)
