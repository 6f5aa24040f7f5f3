"""One epoch of other samplers, batch for batch, where the frameworks themselves may not be installed."""

from __future__ import annotations

import random
from itertools import islice

import numpy as np

from batchtune.lengths import FloatArray

# Lhotse chooses the buckets from a generator of this seed, the same in every epoch.
_BUCKET_SEED = 1234


def lhotse_batches(
    lengths: FloatArray,
    edges: FloatArray,
    batch_sizes: list[int],
    *,
    seed: int = 0,
    buffer_size: int = 20_000,
) -> list[list[int]]:
    """The batches of a shuffling DynamicBucketingSampler with a fixed batch size for each bucket.

    That is `DynamicBucketingSampler(cuts, shuffle=True, duration_bins=edges[:-1], world_size=1,
    constraint=FixedBucketBatchSizeConstraint(edges, batch_sizes))`: it takes a batch from a random queue, or from the
    nearest that holds a full one, the lower of two; at the end from the nearest that holds any.

    Source: `lhotse.dataset.sampling.dynamic_bucketing`, Lhotse 1.33.
    """
    choices, shuffles = random.Random(_BUCKET_SEED), random.Random(seed)
    queues: list[list[int]] = [[] for _ in batch_sizes]
    unread = enumerate(np.searchsorted(edges[:-1], lengths).tolist())

    def read(count: int) -> None:
        for example, bucket in islice(unread, count):
            queues[bucket].append(example)

    read(buffer_size)
    batches = []
    while any(queues):
        first = choices.randrange(len(queues))
        nearest = sorted(
            range(len(queues)), key=lambda bucket: (abs(bucket - first), bucket)
        )
        filled = [bucket for bucket in nearest if queues[bucket]]
        chosen = next(
            (bucket for bucket in filled if len(queues[bucket]) >= batch_sizes[bucket]),
            filled[0],
        )
        places = list(range(len(queues[chosen])))
        shuffles.shuffle(places)
        taken = places[: batch_sizes[chosen]]
        batches.append([queues[chosen][place] for place in taken])
        queues[chosen] = [
            queues[chosen][place] for place in sorted(places[batch_sizes[chosen] :])
        ]
        read(len(taken))
    return batches


def lhotse_boundaries(lengths: FloatArray, num_buckets: int) -> FloatArray:
    """The inner boundaries that Lhotse estimates, to the bit: buckets of about the same total length.

    It goes through the sorted lengths and begins a bucket as soon as the one before holds more than total /
    num_buckets. Source: `lhotse.dataset.sampling.dynamic_bucketing.estimate_duration_buckets`, Lhotse 1.33.
    """
    values = np.sort(np.asarray(lengths, dtype=np.float64))
    share = values.sum() / num_buckets
    boundaries: list[float] = []
    total = 0.0
    for value in values.tolist():
        if total > share:
            boundaries.append(value)
            total = 0.0
        total += value
    return np.array(boundaries, dtype=np.float64)
