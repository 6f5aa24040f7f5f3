"""How much chance a bucket table leaves: sizes of the batches, which examples can meet, what it means for training."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from batchtune.batching.epochs import Tally
from batchtune.lengths import IntArray
from batchtune.results import LearningRate


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """The sizes of an epoch's batches, those that are not full included.

    Attributes:
        smallest: The least number of examples in a batch.
        mean: Examples / batches, an example counted as often as it is dealt.
        largest: The greatest number of examples in a batch.
        variation: Standard deviation over the batches / mean; 0 where all have the same size.
    """

    smallest: int
    mean: float
    largest: int
    variation: float


def batch_size_statistics(tally: Tally) -> BatchSizes:
    """Describes the sizes of an epoch's batches, on all ranks: they are the same whatever the shuffle.

    Args:
        tally: How many batches of which size there are; at least one.

    Raises:
        ValueError: There is no batch.
    """
    there = tally.numbers > 0
    if not there.any():
        raise ValueError("at least one batch is needed")
    sizes, batches = tally.batch_sizes[there], tally.numbers[there]
    mean = tally.examples / tally.batches
    variance = float(np.sum(batches * (sizes - mean) ** 2)) / tally.batches
    return BatchSizes(
        smallest=int(sizes.min()), mean=mean, largest=int(sizes.max()), variation=math.sqrt(variance) / mean
    )


def meeting_probability(counts: IntArray) -> float:
    """The probability that two examples, each drawn at random, are of one bucket, so that they could share a batch.

    It is Σ p_b², p_b the share of the examples in bucket b: 1 / effective buckets; 1 is full randomness.

    Args:
        counts: Shape (buckets,): the number of examples in each bucket, at least one in all.

    Raises:
        ValueError: There are no examples.
    """
    total = counts.sum()
    if total < 1:
        raise ValueError("at least one example is needed")
    return float(np.sum((counts / total) ** 2))


def learning_rate_hint(relative_to: str, from_batch_size: float, to_batch_size: float) -> LearningRate:
    """By what to multiply the learning rate when the mean batch size changes: the two rules in use.

    Linear: Goyal et al. 2017, "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour" (arXiv:1706.02677), for
    SGD. Square root: Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks"
    (arXiv:1404.5997), which keeps the variance of the update; Malladi et al. 2022, "On the SDEs and Scaling Rules for
    Adaptive Gradient Algorithms" (arXiv:2205.10287), derive it for Adam and RMSprop.

    Args:
        relative_to: Whose batch size `from_batch_size` is.
        from_batch_size: Mean number of examples in a batch before.
        to_batch_size: Mean number of examples in a batch afterwards.

    Raises:
        ValueError: A batch size is not positive and finite.
    """
    for size in (from_batch_size, to_batch_size):
        if not (math.isfinite(size) and size > 0):
            raise ValueError(f"batch sizes must be positive and finite, got {size}")
    ratio = to_batch_size / from_batch_size
    return LearningRate(
        relative_to=relative_to,
        from_batch_size=from_batch_size,
        to_batch_size=to_batch_size,
        linear=ratio,
        square_root=math.sqrt(ratio),
    )
