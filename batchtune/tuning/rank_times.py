"""Works out the time of an epoch on several ranks that wait for each other, from the expected batches of one."""

from __future__ import annotations

import numpy as np

from batchtune.batching.expectation import BatchCost, ExpectedBatches, expected_batches
from batchtune.batching.table import BucketTable
from batchtune.lengths import FloatArray
from batchtune.results import RankTimes

# The most lengths that are computed with; more are represented by these.
_LENGTHS_OF_RANKS = 2048
# Points of the grid on which times of several batches are added up; at least so many for each of them.
_GRID = 1 << 16
_LEAST_GRID_EACH = 16


def rank_times(expected: ExpectedBatches, batch_cost: BatchCost, world_size: int, accumulate: int = 1) -> RankTimes:
    """Return the time of one epoch on several ranks, on average over shuffles and over how batches are dealt.

    Three ways to deal the batches, which are those of one epoch on one rank:

    - Without waiting: all batches' time / the number of ranks; the lower bound of all dealings.
    - Independent: batches in random order, one to each rank at a time. A step lasts as long as the longest of
      `world_size` batches drawn without replacement from the M of an average epoch; there are ceil(M / world_size)
      steps, as samplers fill up the last one. (BucketBatchSampler splits the largest batches for that: with few steps
      an epoch, this is a per cent or two more than it takes.) Against the exact probabilities that adds less than 0.1%
      from 200 batches on, and at most 0.35% with 24; a simulated epoch is slower, and off by 1% with 255 batches.
    - Same bucket: at each step all ranks have batches of one bucket: world_size · B of its examples as long as they
      last, so that the step lasts as long as the longest of them all takes. The rest of a bucket is dealt evenly: one
      more step, with ceil(rest / world_size) examples on the fullest rank, which is taken to have the longest.

    With accumulated gradients ranks wait for each other only every `accumulate` batches. Independent: for the longest
    of `world_size` sums of so many batches, drawn with replacement (for a normal distribution that changes what waiting
    adds by the factor √(M / (M - 1))). Same bucket: counted as if ranks waited after each batch, an upper bound. On one
    rank all three are the plain sum over the batches.
    """
    plain = expected.sum_of(batch_cost)
    if world_size == 1:
        return RankTimes(
            without_waiting_epoch_seconds=plain, independent_epoch_seconds=plain, same_bucket_epoch_seconds=plain
        )
    histogram, table = expected.histogram, expected.table
    sizes = np.minimum(table.batch_sizes, histogram.count) * world_size  # no more: it could overflow
    steps = expected_batches(histogram, BucketTable(table.boundaries, sizes))
    return RankTimes(
        without_waiting_epoch_seconds=plain / world_size,
        independent_epoch_seconds=plain * _waiting(expected, batch_cost, world_size, accumulate),
        same_bucket_epoch_seconds=steps.sum_of(
            lambda examples, lengths: batch_cost(np.ceil(examples / world_size), lengths)
        ),
    )


def _waiting(expected: ExpectedBatches, batch_cost: BatchCost, world_size: int, accumulate: int) -> float:
    """Return the time of an epoch that is dealt independently, as a multiple of all its batches' time."""
    from scipy.special import gammaln

    batch_sizes, lengths, counts = expected.representatives(_LENGTHS_OF_RANKS)
    seconds = np.asarray(batch_cost(batch_sizes, lengths), dtype=np.float64)
    order = np.argsort(seconds, kind="stable")
    seconds, counts = seconds[order], counts[order]
    batches = expected.tally.batches
    drawn, steps = min(world_size, batches), -(-batches // world_size)
    if accumulate == 1:
        up_to = np.cumsum(counts)  # C(c, drawn) / C(n, drawn), for counts that need not be whole
        logs = gammaln(up_to + 1) - gammaln(np.maximum(up_to - drawn, 0.0) + 1)
        within = np.where(up_to >= drawn, np.exp(np.minimum(logs - logs[-1], 0.0)), 0.0)
        within[-1] = 1.0
        waited = steps * _mean(seconds, within)
    else:
        windows, rest = divmod(steps, accumulate)
        waited = windows * _mean_longest_sum(seconds, counts, drawn, accumulate) if windows else 0.0
        waited += _mean_longest_sum(seconds, counts, drawn, rest) if rest else 0.0
    return waited / float(np.sum(seconds * counts))


def _mean(values: FloatArray, within: FloatArray) -> float:
    """Return the mean of a distribution with these values, ascending, and its probabilities up to each."""
    return float(np.sum(values * np.diff(within, prepend=0.0)))


def _mean_longest_sum(seconds: FloatArray, counts: FloatArray, drawn: int, added: int) -> float:
    """Return the mean of the longest of so many sums of times (in ascending order), each drawn with replacement.

    The distribution of a sum is the times', convolved with itself on an even grid. A time is shared out between the two
    nearest grid points, so that means are exact.
    """
    low, high = float(seconds[0]), float(seconds[-1])
    if added > 1 and high > low:
        points = max(_GRID // added, _LEAST_GRID_EACH)
        place = (seconds - low) * ((points - 1) / (high - low))
        left = np.minimum(place.astype(np.int64), points - 2)
        one = np.bincount(left, counts * (1 - (place - left)), points)
        one += np.bincount(left + 1, counts * (place - left), points)
        size = 1 << (added * (points - 1)).bit_length()
        counts = np.maximum(np.fft.irfft(np.fft.rfft(one / one.sum(), size) ** added, size), 0.0)
        seconds = np.arange(size, dtype=np.float64) * ((high - low) / (points - 1)) / added + low
    share = np.cumsum(counts)
    return added * _mean(seconds, (share / share[-1]) ** drawn)
