"""One epoch of SpeechBrain's DynamicBatchSampler, batch for batch, as arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from batchtune.batching.epochs import EpochBatches
from batchtune.batching.samplers import speechbrain_boundaries
from batchtune.lengths import IntArray

BatchOrdering = Literal["random", "ascending", "descending"]
BATCH_ORDERINGS: tuple[BatchOrdering, ...] = get_args(BatchOrdering)

_Numbers: TypeAlias = npt.NDArray[Any]

# Up to so many boundaries, comparing with each of them is faster than a binary search for every length.
_MOST_COMPARISONS = 32
_LENGTHS_AT_ONCE = 1 << 14


def speechbrain_batches(
    lengths: npt.ArrayLike,
    max_batch_length: float,
    *,
    num_buckets: int | None = None,
    bucket_boundaries: npt.ArrayLike | None = None,
    max_batch_ex: int | None = None,
    batch_ordering: BatchOrdering = "random",
    drop_last: bool = False,
    permutation: npt.ArrayLike | None = None,
    batch_permutation: Callable[[int], npt.ArrayLike] | None = None,
) -> EpochBatches:
    """The batches that SpeechBrain's DynamicBatchSampler holds, in their order and in the order within them.

    The sampler draws twice, each time from a generator that it seeds anew with the same number:

    - the examples, with `shuffle=True`: `torch.randperm(n, generator=g)` after `g.manual_seed(seed + epoch)`;
    - the batches, with `batch_ordering="random"`: `torch.randperm(batches, generator=g)` after another
      `g.manual_seed(seed + epoch)`. So where there are as many batches as examples, both are the same.

    Those are what `permutation` and `batch_permutation` have to give. Its seed is 42 and its epoch 0 unless told
    otherwise. Without `set_epoch`, a second pass over the same sampler has the same batches in another order: after
    each pass it permutes the batches once more than it did at first. With p the permutation of batches, the first pass
    takes p; with shuffling each later one p[p], and without it pass k takes p applied k times.

    What is odd in the original and is so here: a length beyond the last boundary makes a batch of one, as does every
    length with `num_buckets=1`; `max_batch_ex` below 1 counts as 1; a `max_batch_length` of 0 or less makes batches
    of one with given boundaries; empty boundaries count as none given.

    Source: `speechbrain.dataio.sampler.DynamicBatchSampler`, SpeechBrain 1.0 and 1.1.

    Args:
        lengths: Shape (examples,), its `lengths_list`; not NaN.
        max_batch_length: As SpeechBrain's, in the unit of the lengths.
        num_buckets: As SpeechBrain's; needed without `bucket_boundaries`.
        bucket_boundaries: As SpeechBrain's: ascending, positive; they go before `num_buckets`.
        max_batch_ex: As SpeechBrain's: the most examples in a batch.
        batch_ordering: As SpeechBrain's. The sorted ones go by the longest length, equal ones as they were made.
        drop_last: As SpeechBrain's: whether batches that are not full are left out.
        permutation: Shape (examples,), the order in which the examples come; None as with `shuffle=False`.
        batch_permutation: Number of batches → a permutation of so many; needed with `random`, else not called.

    Returns:
        `buckets` is the number of boundaries for batches of what is beyond the last boundary.

    Raises:
        ValueError: SpeechBrain raises an error too: neither boundaries nor their number are given, or boundaries are
            repeated, out of order, negative, zero or so small that a batch size is infinite, or `batch_ordering` is
            unknown. Also: a length is NaN, or a permutation is missing or none.
    """
    if batch_ordering not in BATCH_ORDERINGS:
        raise ValueError(f"batch_ordering must be one of {', '.join(BATCH_ORDERINGS)}, got {batch_ordering!r}")
    if batch_ordering == "random" and batch_permutation is None:
        raise ValueError("batch_ordering 'random' needs a batch_permutation")
    values = np.asarray(lengths)
    if values.ndim != 1:
        raise ValueError(f"lengths must be one-dimensional, got shape {values.shape}")
    boundaries = _boundaries(bucket_boundaries, num_buckets, max_batch_length)
    sizes = _batch_sizes(boundaries, max_batch_length, max_batch_ex, values.size)
    # Widened once: the values stay the same, and each comparison with a boundary is spared the widening.
    ids = _bucket_ids(values.astype(np.result_type(values, boundaries)), boundaries)
    stream = None if permutation is None else np.asarray(permutation, dtype=np.int64)
    if stream is not None:
        ids = ids[stream]
    batches = _fill_buckets(ids, sizes, drop_last)
    examples = batches.positions if stream is None else stream[batches.positions]
    if batch_ordering == "random":
        assert batch_permutation is not None  # checked above
        wanted = np.asarray(batch_permutation(batches.sizes.size), dtype=np.int64)
    else:
        wanted = _by_longest(batches.longest(values[examples]), descending=batch_ordering == "descending")
    return batches.taken(examples, wanted)


@dataclass(frozen=True, slots=True, eq=False)
class _Filled:
    """Batches in the order in which their buckets filled, but their examples bucket after bucket.

    Attributes:
        positions: Shape (examples in the buckets,): positions in the stream of examples, bucket after bucket.
        starts: Shape (batches,): where each batch begins in `positions`.
        sizes: Shape (batches,): number of examples in each.
        buckets: Shape (batches,): bucket of each.
    """

    positions: IntArray
    starts: IntArray
    sizes: IntArray
    buckets: IntArray

    def longest(self, lengths: _Numbers) -> _Numbers:
        """The longest length of each batch, from the lengths at `positions`; shape (batches,)."""
        if self.starts.size == 0:
            return lengths[:0]
        # The runs between the starts hold each batch and, with drop_last, what was left out behind it.
        order = np.argsort(self.starts)
        ends = self.starts[order] + self.sizes[order]
        edges = np.column_stack((self.starts[order], ends)).ravel()
        if edges[-1] == lengths.size:
            edges = edges[:-1]
        longest = np.empty(self.starts.size, dtype=lengths.dtype)
        longest[order] = np.maximum.reduceat(lengths, edges)[::2]
        return longest

    def taken(self, examples: IntArray, wanted: IntArray) -> EpochBatches:
        """The batches at the indices `wanted`, with the examples at `positions`."""
        sizes = self.sizes[wanted]
        ends = np.cumsum(sizes)
        starts = np.concatenate((np.zeros(1, dtype=np.int64), ends))
        source = np.repeat(self.starts[wanted] - starts[:-1], sizes)
        source += np.arange(source.size)
        return EpochBatches(order=examples[source], starts=starts, buckets=self.buckets[wanted])


def _boundaries(bucket_boundaries: npt.ArrayLike | None, num_buckets: int | None, max_batch_length: float) -> _Numbers:
    """The boundaries, in the type in which SpeechBrain holds them."""
    given = np.asarray([] if bucket_boundaries is None else bucket_boundaries)
    if given.ndim != 1:
        raise ValueError(f"bucket_boundaries must be one-dimensional, got shape {given.shape}")
    if given.size == 0:
        if num_buckets is None:
            raise ValueError("either num_buckets or bucket_boundaries is needed")
        return np.sort(speechbrain_boundaries(num_buckets, max_batch_length))
    if not (given >= 0).all():
        raise ValueError("bucket_boundaries must not be negative")
    if not (given[1:] > given[:-1]).all():
        raise ValueError("bucket_boundaries must be ascending, each once")
    return given


def _batch_sizes(boundaries: _Numbers, max_batch_length: float, max_batch_ex: int | None, examples: int) -> IntArray:
    """Shape (boundaries + 1,): examples in a full batch, capped where more than there are examples."""
    with np.errstate(all="ignore"):
        quotients = max_batch_length / boundaries
    if not np.isfinite(quotients).all():
        raise ValueError(f"max_batch_length {max_batch_length} divided by every boundary must be finite")
    cap = examples + 1 if max_batch_ex is None else min(examples + 1, max_batch_ex)
    return np.append(np.clip(quotients, 1, max(1, cap)).astype(np.int64), 1)


def _bucket_ids(lengths: _Numbers, boundaries: _Numbers) -> npt.NDArray[np.integer[Any]]:
    """`numpy.searchsorted(boundaries, lengths)` in the smallest type, which a stable sort is fastest on."""
    if lengths.dtype.kind == "f" and np.isnan(lengths).any():
        raise ValueError("lengths must not be NaN")
    if boundaries.size > _MOST_COMPARISONS:
        kind = np.uint16 if boundaries.size < 1 << 16 else np.int64
        return np.searchsorted(boundaries, lengths).astype(kind)
    ids = np.zeros(lengths.size, dtype=np.uint8)
    for start in range(0, lengths.size, _LENGTHS_AT_ONCE):  # so that they stay in the cache
        part = lengths[start : start + _LENGTHS_AT_ONCE]
        part_ids = ids[start : start + _LENGTHS_AT_ONCE]
        for boundary in boundaries:
            part_ids += part > boundary
    return ids


def _fill_buckets(ids: npt.NDArray[np.integer[Any]], sizes: IntArray, drop_last: bool) -> _Filled:
    """Puts a stream of examples into buckets and takes out what is full, then what is left.

    Args:
        ids: Shape (examples,): the bucket of each.
        sizes: Shape (buckets,): examples in a full batch.
        drop_last: Whether batches that are not full are left out.
    """
    positions = np.argsort(ids, kind="stable").astype(np.int64, copy=False)
    counts = np.bincount(ids, minlength=sizes.size)
    firsts = np.cumsum(counts) - counts
    full = counts // sizes
    buckets = np.repeat(np.arange(sizes.size), full)
    within = np.arange(buckets.size) - np.repeat(np.cumsum(full) - full, full)
    starts = firsts[buckets] + within * sizes[buckets]
    # A batch is made when its last example comes.
    made = np.argsort(positions[starts + sizes[buckets] - 1])
    left = np.flatnonzero(counts % sizes) if not drop_last else np.zeros(0, dtype=np.int64)
    return _Filled(
        positions=positions,
        starts=np.concatenate((starts[made], (firsts + full * sizes)[left])),
        sizes=np.concatenate((sizes[buckets][made], (counts % sizes)[left])),
        buckets=np.concatenate((buckets[made], left)),
    )


def _by_longest(longest: _Numbers, *, descending: bool) -> IntArray:
    """The stable order by longest length; equal ones stay as they were, in both directions."""
    if not descending:
        return np.argsort(longest, kind="stable").astype(np.int64, copy=False)
    backwards = np.argsort(longest[::-1], kind="stable")[::-1]
    return (longest.size - 1 - backwards).astype(np.int64, copy=False)
