"""Batches of one fixed size: what training without buckets does."""

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt

from batchtune.batching.epochs import EpochBatches
from batchtune.lengths import IntArray


def fixed_batches(count_or_order: int | npt.ArrayLike, batch_size: int, *, drop_last: bool = False) -> EpochBatches:
    """Cuts an order of examples into batches of one size, as `torch.utils.data.BatchSampler` does.

    Batches as torch's come from this order:

    - `DataLoader(shuffle=False)`: the number of examples; they come as they are.
    - Sorted by length: `length_order`.
    - `DataLoader(shuffle=True, generator=g)`: its RandomSampler's permutation, which takes three draws from `g` in
      every epoch, `g` going on from epoch to epoch:

        1. `torch.empty((), dtype=torch.int64).random_(generator=g)`, when the iterator is made: the workers' seed,
           drawn without workers too, but with `persistent_workers` in the first epoch only. A RandomSampler that is
           iterated over without a data loader leaves it out.
        2. `torch.randperm(n, generator=g)`: the order to give here.
        3. `torch.randperm(n, generator=g)` once more, at the end of the epoch: it is cut to no examples, but the next
           epoch's draws come after it.

    - `DataLoader(shuffle=True)` without a generator draws two seeds from torch's default generator in every epoch: 1.
      as above, and with the first batch `seed = int(torch.empty((), dtype=torch.int64).random_())`; the order is
      `torch.randperm(n, generator=g)` after `g.manual_seed(seed)` with a generator of its own.

    Source: `torch.utils.data`, torch 2.13.

    Args:
        count_or_order: Number of examples, in their own order, or shape (examples,), indices in any order.
        batch_size: Examples in a batch, at least 1.
        drop_last: Whether a last batch that is not full is left out.

    Returns:
        All batches are of bucket 0.

    Raises:
        ValueError: `batch_size` is below 1, the number of examples is negative, or the order is not one-dimensional.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    given = np.asarray(count_or_order)
    if given.size and given.dtype.kind not in "iu":
        raise ValueError(f"a number of examples or their indices are needed, got {given.dtype}")
    if given.ndim == 0 and given < 0:
        raise ValueError(f"the number of examples must not be negative, got {given}")
    if given.ndim > 1:
        raise ValueError(f"an order must be one-dimensional, got shape {given.shape}")
    order = np.arange(int(given), dtype=np.int64) if given.ndim == 0 else given.astype(np.int64)
    batches = order.size // batch_size if drop_last else -(-order.size // batch_size)
    # Without an example too many: a batch size may be anything, also beyond what 64 bits hold.
    starts = np.arange(batches + 1, dtype=np.int64) * min(batch_size, order.size)
    starts[-1] = min(starts[-1], order.size)
    return EpochBatches(order=order[: starts[-1]], starts=starts, buckets=np.zeros(batches, dtype=np.int64))


def length_order(lengths: npt.ArrayLike, *, descending: bool = False) -> IntArray:
    """The order of examples by length; equal ones stay in their order, in both directions, as Python sorts.

    Args:
        lengths: Shape (examples,).
        descending: Whether the longest come first.

    Returns:
        Shape (examples,): as `sorted(range(n), key=lengths.__getitem__, reverse=descending)`.

    Raises:
        ValueError: `lengths` is not one-dimensional.
    """
    values = np.asarray(lengths)
    if values.ndim != 1:
        raise ValueError(f"lengths must be one-dimensional, got shape {values.shape}")
    if not descending:
        return cast(IntArray, np.argsort(values, kind="stable").astype(np.int64, copy=False))
    backwards = np.argsort(values[::-1], kind="stable")[::-1]
    return cast(IntArray, (values.size - 1 - backwards).astype(np.int64, copy=False))
