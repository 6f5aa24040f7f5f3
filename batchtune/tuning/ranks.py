"""The time that ranks lose by waiting for each other: a step lasts as long as its slowest rank takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from batchtune.batching.expectation import BatchCost, ExpectedBatches, expected_batches
from batchtune.batching.table import BucketTable
from batchtune.lengths import FloatArray, Histogram, IntArray
from batchtune.results import RankTimes

# Lengths that stand for all where there are more.
_REPRESENTATIVES = 2048
# Times at which the distribution of a step's is worked out, where there are more.
_THRESHOLDS = 192
# Up to so many ranks, and up to so much of used buckets × ranks², drawing exactly so many batches is worked out.
_FEW_RANKS = 16
_MOST_WORK = 40_000
# Points of the grid on which times of several batches are added up; at least so many for each of them.
_GRID = 1 << 16
_LEAST_GRID_EACH = 16
# A probability that is nothing, whose logarithm is finite.
_TINY = 1e-300


def rank_times(expected: ExpectedBatches, batch_cost: BatchCost, world_size: int, accumulate: int = 1) -> RankTimes:
    """Return the time of one epoch on several ranks, on average over shuffles and over how batches are dealt.

    Three ways to deal the batches, which are those of one epoch on one rank:

    - Without waiting: all batches' time / the number of ranks; what no dealing beats.
    - Independent: batches in random order, one to each rank at a time. A step lasts as long as the longest of
      `world_size` batches drawn without replacement from the epoch's M; there are ceil(M / world_size) steps, as
      samplers fill up the last one. (BucketBatchSampler splits the largest batches for that, which shortens a few
      steps: with few steps an epoch, this is a per cent or two more than it takes.) Exact up to 16 ranks (and
      beyond, with few buckets); with more, each batch is taken to be drawn by itself with the probability
      world_size / M, which moves the result by less than 0.1%.
    - Same bucket: at each step all ranks have batches of one bucket: world_size · B of its examples as long as they
      last, so that the step lasts as long as the longest of them all takes. What is left of a bucket is dealt evenly:
      one step more, with ceil(rest / world_size) examples on the fullest rank, which is taken to have the longest.

    With accumulated gradients ranks wait for each other only every `accumulate` batches. Independent: for the longest
    of `world_size` sums of so many batches, drawn with replacement (for a normal distribution that makes no
    difference but the factor √(M / (M - 1)) in what waiting adds). Same bucket: counted as if ranks waited after
    each batch, which is an upper bound.

    A batch is taken to last no less than one of the same bucket with a shorter longest example. Where there are
    more than 2048 distinct lengths, as many stand for all, and the result is scaled so that the sum over all batches
    is exact.

    Args:
        expected: The batches of a table on one rank.
        batch_cost: Seconds of batches by their sizes and longest lengths.
        world_size: Number of ranks; 1: all three are the plain sum over the batches.
        accumulate: Batches whose gradients are added up before ranks wait for each other.
    """
    plain = expected.sum_of(batch_cost)
    if world_size == 1:
        return RankTimes(
            without_waiting_epoch_seconds=plain, independent_epoch_seconds=plain, same_bucket_epoch_seconds=plain
        )
    few = _with_few_lengths(expected)
    scale = plain / few.sum_of(batch_cost)
    return RankTimes(
        without_waiting_epoch_seconds=plain / world_size,
        independent_epoch_seconds=plain * _independent(_buckets(few, batch_cost), world_size, accumulate),
        same_bucket_epoch_seconds=scale * _same_bucket(few, batch_cost, world_size),
    )


def _with_few_lengths(expected: ExpectedBatches) -> ExpectedBatches:
    """Return the batches themselves, or those of fewer lengths, a group's mean longest length standing for it."""
    histogram, batches = expected.histogram, expected.batches
    starts = expected.group_starts(_REPRESENTATIVES)
    if starts.size == histogram.lengths.size:
        return expected
    last = np.append(starts[1:], histogram.lengths.size) - 1
    total = np.add.reduceat(batches, starts)
    weighted = np.add.reduceat(batches * histogram.lengths, starts)
    means = np.where(total > 0, weighted / np.where(total > 0, total, 1.0), histogram.lengths[last])
    few = Histogram(
        np.clip(means, histogram.lengths[starts], histogram.lengths[last]), np.add.reduceat(histogram.counts, starts)
    )
    return expected_batches(few, expected.table)


def _same_bucket(expected: ExpectedBatches, batch_cost: BatchCost, world_size: int) -> float:
    """A step of all ranks is a batch of world_size · B examples, of which each rank has its part."""
    histogram, table = expected.histogram, expected.table
    sizes = np.minimum(table.batch_sizes, histogram.count) * world_size  # no more: it could overflow
    steps = expected_batches(histogram, BucketTable(table.boundaries, sizes))
    return steps.sum_of(lambda examples, lengths: batch_cost(np.ceil(examples / world_size), lengths))


def _independent(buckets: Sequence[_Bucket], world_size: int, accumulate: int) -> float:
    """The time of an epoch, as a multiple of all its batches' time."""
    batches = sum(bucket.batches for bucket in buckets)
    drawn = min(world_size, batches)  # fewer batches than ranks: one step of all of them
    steps = -(-batches // world_size)
    seconds = np.concatenate([bucket.seconds for bucket in buckets])
    counts = np.concatenate([bucket.counts for bucket in buckets])
    total = float(np.sum(seconds * counts))
    if accumulate == 1:
        order = np.argsort(seconds, kind="stable")
        return steps * _mean_longest(buckets, seconds[order], counts[order], drawn) / total
    windows, rest = divmod(steps, accumulate)
    waited = windows * _mean_longest_sum(seconds, counts, drawn, accumulate) if windows else 0.0
    return (waited + (_mean_longest_sum(seconds, counts, drawn, rest) if rest else 0.0)) / total


@dataclass(frozen=True, slots=True, eq=False)
class _Bucket:
    """One bucket's examples and batches.

    Attributes:
        batch_size: Of the full batches, of which there are `full`.
        rest: Size of the last batch where it is not full, else 0.
        up_to: Shape (distinct lengths + 1,): how many of its examples are shorter than each length, and all.
        full_seconds: Shape (distinct lengths,): of a full batch by its longest length, never falling.
        rest_seconds: The same of the last batch.
        full_counts, rest_counts: Expected numbers of such batches.
    """

    batch_size: int
    full: int
    rest: int
    up_to: IntArray
    full_seconds: FloatArray
    rest_seconds: FloatArray
    full_counts: FloatArray
    rest_counts: FloatArray

    @property
    def batches(self) -> int:
        """Number of its batches."""
        return self.full + (self.rest > 0)

    @property
    def seconds(self) -> FloatArray:
        """Seconds of all shapes that its batches can have."""
        return np.concatenate((self.full_seconds, self.rest_seconds)) if self.rest else self.full_seconds

    @property
    def counts(self) -> FloatArray:
        """The average number of batches of each of these shapes."""
        return np.concatenate((self.full_counts, self.rest_counts)) if self.rest else self.full_counts

    def all_within(self, thresholds: FloatArray, most: int) -> FloatArray:
        """Return the probability that k of its batches, drawn at random, each last at most so long.

        k full batches are k·B of its n examples, of which the c that are short enough must make up all:
        C(c, k·B) / C(n, k·B). The last batch, with its own limit c', is then drawn from those that remain:
        C(c' - k·B, r) / C(n - k·B, r). Of k batches it is one with probability k / batches.

        Args:
            thresholds: Shape (thresholds,), in seconds.
            most: At most `batches`.

        Returns:
            Shape (thresholds, most + 1), for k = 0, 1, …, most.
        """
        from scipy.special import gammaln

        n, taken = int(self.up_to[-1]), np.arange(most + 1) * self.batch_size
        short = self.up_to[np.searchsorted(self.full_seconds, thresholds, side="right")][:, None]
        left = np.maximum(short - taken, 0)
        log_left = gammaln(left + 1.0)
        # Both brackets are 0 where all examples are short enough: then the probability is exactly 1.
        log_ratio = (gammaln(short + 1.0) - gammaln(n + 1.0)) - (log_left - gammaln(np.maximum(n - taken, 0) + 1.0))
        full = np.where(short >= taken, np.exp(np.minimum(log_ratio, 0.0)), 0.0)
        if not self.rest:
            return full
        short_for_rest = self.up_to[np.searchsorted(self.rest_seconds, thresholds, side="right")][:, None]
        over = np.maximum(short_for_rest, short) - taken
        all_over = n - taken
        log_rest = (gammaln(np.maximum(over, 0) + 1.0) - gammaln(np.maximum(all_over, 0) + 1.0)) - (
            gammaln(np.maximum(over - self.rest, 0) + 1.0) - gammaln(np.maximum(all_over - self.rest, 0) + 1.0)
        )
        with_rest = np.where(over >= self.rest, full * np.exp(np.minimum(log_rest, 0.0)), 0.0)
        share = np.arange(most + 1) / self.batches
        full *= 1 - share
        full[:, 1:] += share[1:] * with_rest[:, :-1]
        return full


def _buckets(expected: ExpectedBatches, batch_cost: BatchCost) -> list[_Bucket]:
    """The buckets that hold examples."""
    histogram, table = expected.histogram, expected.table
    (sizes, full_counts), (rests, rest_counts) = expected.kinds
    full = np.asarray(batch_cost(sizes.astype(np.float64), expected.lengths), dtype=np.float64)
    rest = np.asarray(batch_cost(np.maximum(rests, 1).astype(np.float64), expected.lengths))
    edges, counts = table.edges(histogram), table.counts(histogram)
    up_to = np.concatenate(([0], histogram.cumulative))
    found = []
    for bucket in np.flatnonzero(counts).tolist():
        start, end, size = int(edges[bucket]), int(edges[bucket + 1]), int(table.batch_sizes[bucket])
        found.append(
            _Bucket(
                batch_size=min(size, int(counts[bucket]) + 1),  # larger ones are never full; they could overflow
                full=int(counts[bucket]) // size,
                rest=int(counts[bucket]) % size,
                up_to=up_to[start : end + 1] - up_to[start],
                full_seconds=np.maximum.accumulate(full[start:end]),
                rest_seconds=np.maximum.accumulate(rest[start:end]),
                full_counts=full_counts[start:end],
                rest_counts=rest_counts[start:end],
            )
        )
    return found


def _mean_longest(buckets: Sequence[_Bucket], seconds: FloatArray, counts: FloatArray, drawn: int) -> float:
    """The mean of the longest of so many batches, drawn without replacement; `seconds` in ascending order."""
    ends = _thresholds(counts, drawn)
    within = _all_drawn_within(buckets, seconds[ends], drawn)
    # Between thresholds it rises as a power of the batches' own distribution, which draws with replacement make it.
    share = np.log(np.maximum(np.cumsum(counts), _TINY))
    each = np.exp(np.interp(share, share[ends], np.log(np.maximum(within, _TINY))))
    return float(np.sum(seconds * np.diff(each, prepend=0.0)))


def _thresholds(counts: FloatArray, drawn: int) -> IntArray:
    """Indices into times in ascending order: at equal parts of their distribution, and of that of the longest."""
    if counts.size <= _THRESHOLDS:
        return np.arange(counts.size)
    share = np.cumsum(counts)
    even = np.linspace(0, 1, _THRESHOLDS // 2 + 1)[1:]
    at = np.searchsorted(share, share[-1] * np.concatenate((even, even ** (1 / drawn))))
    return np.unique(np.minimum(np.concatenate(([0], at, [counts.size - 1])), counts.size - 1))


def _all_drawn_within(buckets: Sequence[_Bucket], thresholds: FloatArray, drawn: int) -> FloatArray:
    """Shape (thresholds,): the probability that so many of all batches, drawn at random, each last at most so long."""
    if drawn <= _FEW_RANKS or len(buckets) * drawn**2 <= _MOST_WORK:
        return _all_of_exactly(buckets, thresholds, drawn)
    return _all_of_about(buckets, thresholds, drawn)


def _all_of_exactly(buckets: Sequence[_Bucket], thresholds: FloatArray, drawn: int) -> FloatArray:
    """Bucket after bucket: j batches drawn from those so far, of which a hypergeometric number is of the new one."""
    within = np.zeros((thresholds.size, drawn + 1))
    within[:, 0] = 1.0
    before = 0
    for bucket in buckets:
        own = bucket.all_within(thresholds, min(drawn, bucket.batches))
        shares = _hypergeometric(drawn, bucket.batches, before)
        merged = np.zeros_like(within)
        for k in range(own.shape[1]):
            merged[:, k:] += own[:, k, None] * within[:, : drawn + 1 - k] * shares[k:, k]
        within = merged
        before += bucket.batches
    return within[:, drawn]


def _hypergeometric(most: int, own: int, others: int) -> FloatArray:
    """Shape (most + 1, most + 1), by j and k: C(own, k)·C(others, j - k) / C(own + others, j), or 0."""
    from scipy.special import gammaln

    j, k = np.arange(most + 1)[:, None], np.arange(most + 1)[None, :]
    possible = (k <= own) & (k <= j) & (j - k <= others)

    def log_choose(n: int, m: IntArray) -> FloatArray:
        inside = np.clip(m, 0, n)
        log: FloatArray = gammaln(n + 1.0) - gammaln(inside + 1.0) - gammaln(n - inside + 1.0)
        return log

    logs = log_choose(own, k) + log_choose(others, j - k) - log_choose(own + others, j)
    return np.where(possible, np.exp(np.where(possible, logs, 0.0)), 0.0)


def _all_of_about(buckets: Sequence[_Bucket], thresholds: FloatArray, drawn: int) -> FloatArray:
    """As if each batch were drawn by itself, so many on average: then buckets don't depend on each other.

    The number drawn then varies, by drawn·(1 - share). With a probability that falls as exp(-a·n) in the number n,
    that makes its mean greater by the factor exp(a²·variance / 2), which is taken out again.
    """
    from scipy.special import gammaln, xlog1py, xlogy

    share = drawn / sum(bucket.batches for bucket in buckets)
    within = np.ones(thresholds.size)
    for bucket in buckets:
        mean = share * bucket.batches
        most = min(bucket.batches, int(mean + 8 * np.sqrt(mean) + 8))  # more come with a probability below 1e-9
        k = np.arange(most + 1)
        logs = gammaln(bucket.batches + 1.0) - gammaln(k + 1.0) - gammaln(bucket.batches - k + 1.0)
        chances = np.exp(logs + xlogy(k, share) + xlog1py(bucket.batches - k, -share))
        within *= bucket.all_within(thresholds, most) @ (chances / chances.sum())
    log = np.log(np.maximum(within, _TINY))
    return np.exp(log - log**2 * (1 - share) / (2 * drawn))


def _mean_longest_sum(seconds: FloatArray, counts: FloatArray, drawn: int, added: int) -> float:
    """The mean of the longest of so many sums of times, each drawn with replacement.

    The distribution of a sum is the times', convolved with itself on an even grid. A time is shared out between the
    two points beside it, so that means are exact.
    """
    low, high = float(seconds.min()), float(seconds.max())
    if added == 1 or not high > low:
        return added * _mean_longest_of(seconds, counts, drawn)
    points = max(_GRID // added, _LEAST_GRID_EACH)
    place = (seconds - low) * ((points - 1) / (high - low))
    left = np.minimum(place.astype(np.int64), points - 2)
    one = np.bincount(left, counts * (1 - (place - left)), points) + np.bincount(
        left + 1, counts * (place - left), points
    )
    size = 1 << (added * (points - 1)).bit_length()
    several = np.maximum(np.fft.irfft(np.fft.rfft(one / one.sum(), size) ** added, size), 0.0)
    grid = np.arange(size, dtype=np.float64) * ((high - low) / (points - 1)) + added * low
    return _mean_longest_of(grid, several, drawn)


def _mean_longest_of(values: FloatArray, counts: FloatArray, drawn: int) -> float:
    """The mean of the longest of so many, drawn with replacement."""
    order = np.argsort(values, kind="stable")
    share = np.cumsum(counts[order])
    return float(np.sum(values[order] * np.diff((share / share[-1]) ** drawn, prepend=0.0)))
