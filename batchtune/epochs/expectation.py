"""The time, cost and randomness of an epoch on average over all shuffles, exactly and without shuffling.

`tally` counts the batches of each bucket and size. In a uniform shuffle each batch is a uniformly drawn subset of its
bucket's n examples, so P(longest of s ≤ x) = C(c, s) / C(n, s) with c the number of them up to x; as expectations are
linear, sums over batches follow from that.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeVar, cast

import numpy as np
from msgspec import structs

from batchtune.epochs import (
    ON_ONE_RANK,
    EpochBatches,
    EpochShapes,
    Layout,
    RankSplit,
    edges_of,
    lay_out,
)
from batchtune.epochs.measured_costs import (
    BatchCost,
    StepTimeFunction,
    StepTimes,
    TypicalTargets,
)
from batchtune.epochs.table import BucketTable
from batchtune.lengths import AnyArray, FloatArray, Histogram, IntArray
from batchtune.results import RankTimes, Row, StreamRow

RowT = TypeVar("RowT", Row, StreamRow)

# Times that differ by no more than two standard errors of their difference are taken for equal.
_WITHIN_ERRORS = 2.0
# Batches that stand for all in the errors, which need not be as exact as the time itself.
_REPRESENTATIVES = 512


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpochTime:
    """The time of one epoch as the ranks take batches, in seconds.

    Attributes:
        errors: Shape (sources,): its standard errors by the measurements that cause them; None: unknown.
        chance: The standard error from simulating only a few epochs.
        deviation: How much simulated epochs differ; None: the time is a mean over all shuffles.
        ranks: The time by how batches are dealt; None for batches that are known one by one.
    """

    seconds: float
    errors: FloatArray | None = None
    chance: float = 0.0
    deviation: float | None = None
    ranks: RankTimes | None = None

    @classmethod
    def simulated(
        cls,
        times: FloatArray,
        shapes: EpochShapes,
        step_seconds: StepTimeFunction,
        scale: float = 1.0,
    ) -> EpochTime:
        """Return the mean time of simulated epochs, each with `shapes` that stand for `scale` times as many batches."""
        seconds = float(times.mean())
        spread = float(times.std(ddof=1))
        return cls(
            seconds=seconds,
            errors=shape_errors(step_seconds, shapes, seconds),
            chance=spread / math.sqrt(times.size),
            # The batches that an epoch has beyond those that were simulated are independent of them.
            deviation=spread / math.sqrt(scale),
        )

    @property
    def standard_error(self) -> float | None:
        """The standard error of the time, in seconds; None if it is not known."""
        if self.errors is None:
            return None
        return float(np.hypot(np.linalg.norm(self.errors), self.chance))

    def fields(self) -> dict[str, float | None]:
        """Return the fields of a row that hold it."""
        return {
            "estimated_epoch_seconds": self.seconds,
            "estimated_epoch_error_seconds": self.standard_error,
            "epoch_seconds_deviation": self.deviation,
        }


def time_errors(
    step_seconds: StepTimeFunction,
    shapes: EpochShapes,
    counts: FloatArray,
    seconds: float,
) -> FloatArray | None:
    """Return the errors of an epoch's time, with this many batches of each shape, whose steps take `seconds`.

    To first order, they follow from the errors of the measured step times; None if `step_seconds`
    knows none.
    """
    if not isinstance(step_seconds, StepTimes):
        return None
    sizes = shapes.batch_sizes.astype(np.float64)
    return seconds * step_seconds.errors(sizes, shapes.lengths, shapes.targets, counts)


def shape_errors(
    step_seconds: StepTimeFunction, shapes: EpochShapes, seconds: float
) -> FloatArray | None:
    """Return the errors of the time of an epoch with these batches; some of them stand for all.

    On several ranks, waiting is assumed to grow in proportion to the time.
    """
    by_length = np.argsort(shapes.lengths, kind="stable")
    some = np.linspace(0, by_length.size - 1, _REPRESENTATIVES).astype(np.int64)
    chosen = shapes.chosen(by_length[some])
    return time_errors(step_seconds, chosen, np.ones(some.size), seconds)


def with_equals(timed: Sequence[tuple[RowT, EpochTime | None]]) -> list[RowT]:
    """Return the rows, each marked as equal to the fastest one or not."""
    equal = equal_to_best([time for _, time in timed])
    return [
        structs.replace(row, equal_to_best=same)
        for (row, _), same in zip(timed, equal, strict=True)
    ]


def equal_to_best(times: Sequence[EpochTime | None]) -> list[bool | None]:
    """Return which times count as equal to the least: they differ by at most two standard errors of the difference.

    Errors that both have in common cancel: the difference's is √Σ (error_a,p - error_b,p)², to which those of
    simulating few epochs are added. None for each if any time or its errors are unknown.
    """
    known = [time for time in times if time is not None and time.errors is not None]
    if not known or len(known) < len(times):
        return [None] * len(times)
    fastest = min(known, key=lambda time: time.seconds)
    equal: list[bool | None] = []
    for time in known:
        apart = np.subtract(time.errors, fastest.errors)  # type: ignore[arg-type]
        error = float(np.linalg.norm([*apart, time.chance, fastest.chance]))
        equal.append(time.seconds - fastest.seconds <= _WITHIN_ERRORS * error)
    return equal


# One length stands for neighbours: so many groups of a bucket, each with about as many of its batches.
_GROUPS = 64
# The cost of the last batch of a bucket is looked up among this many sizes; up to about 45 each has its own.
_TABLED_SIZES = 256
# Buckets at a time, so that the probabilities of their batches stay in the processor's cache.
_BLOCK = 64
# A table of as many log-factorials takes 32 MiB; of larger numbers they are computed.
_TABLED_FACTORIALS = 1 << 22
_FIRST_LOG_FACTORIALS = np.array([math.lgamma(number + 1) for number in range(256)])
_HALF_LOG_OF_TWO_PI = math.log(2 * math.pi) / 2


@dataclass(frozen=True, slots=True, eq=False)
class Tally:
    """How many batches of each size an epoch has in each bucket, over all ranks; arrays of the shape (kinds,)."""

    buckets: IntArray
    batch_sizes: IntArray
    numbers: IntArray

    @classmethod
    def of(cls, buckets: IntArray, batch_sizes: IntArray) -> Tally:
        """Count batches by their bucket and size, both of the shape (batches,)."""
        sizes = int(batch_sizes.max(initial=0)) + 1
        kinds, numbers = np.unique(buckets * sizes + batch_sizes, return_counts=True)
        return cls(kinds // sizes, kinds % sizes, numbers)

    @property
    def batches(self) -> int:
        """Number of all batches."""
        return int(self.numbers.sum())

    @property
    def examples(self) -> int:
        """Number of examples in them, each as often as it is dealt."""
        return int(self.batch_sizes @ self.numbers)

    @property
    def batch_size_variation(self) -> float:
        """The standard deviation of the batch sizes / their mean."""
        mean = self.examples / self.batches
        variance = np.average((self.batch_sizes - mean) ** 2, weights=self.numbers)
        return math.sqrt(variance) / mean


def tally(
    counts: IntArray, batch_sizes: IntArray, dealing: RankSplit = ON_ONE_RANK
) -> Tally:
    """Count the batches that `lay_out` cuts, by bucket and size.

    On one rank they are Σ ceil(n_b / B_b) whatever the shuffle, as for every sampler that fills buckets and emits the
    rest, SpeechBrain's among them. `counts`, the examples in each bucket, and `batch_sizes` have the shape (buckets,).
    """
    if dealing.world_size > 1:
        # Whole rounds of full batches go to the ranks as they are: only what remains is laid out.
        sizes = np.minimum(batch_sizes, counts + 1) * dealing.together
        steps = np.maximum(counts // sizes - 2 * dealing.world_size, 0)
        steps -= steps % dealing.world_size
        layout = lay_out(counts - steps * sizes, batch_sizes, dealing)
        counted = Tally.of(
            np.append(layout.buckets, np.arange(counts.size)),
            np.append(layout.batch_sizes, batch_sizes),
        )
        # Each bucket's full batches were counted once too often.
        full = counted.batch_sizes == batch_sizes[counted.buckets]
        numbers = counted.numbers.copy()
        numbers[full] += steps[counted.buckets[full]] * dealing.together - 1
        made = numbers > 0
        return Tally(counted.buckets[made], counted.batch_sizes[made], numbers[made])
    full = counts // batch_sizes
    rests = counts % batch_sizes
    numbers = np.concatenate((full, np.minimum(rests, 0 if dealing.drop_last else 1)))
    made = numbers > 0
    buckets = np.tile(np.arange(counts.size), 2)
    return Tally(
        buckets[made], np.concatenate((batch_sizes, rests))[made], numbers[made]
    )


@dataclass(frozen=True, eq=False)
class ExpectedBatches:
    """The expected number of batches of each size with each length as their longest, over shuffles.

    Of the many lengths of a bucket some stand for their neighbours, at their mean: padded lengths stay exact, and the
    time of a step is nearly linear between them. Arrays have the shape (shapes,).

    Attributes:
        edges, counts: As the table divides the histogram.
    """

    histogram: Histogram
    table: BucketTable
    dealing: RankSplit
    edges: IntArray
    counts: IntArray
    tally: Tally
    buckets: IntArray
    batch_sizes: IntArray
    lengths: FloatArray
    numbers: FloatArray

    def sum_of(self, cost: BatchCost) -> float:
        """Return the expected sum of a cost over the epoch's batches."""
        sizes = self.batch_sizes.astype(np.float64)
        return float(np.sum(self.numbers * cost(sizes, self.lengths)))

    @cached_property
    def padded_length(self) -> float:
        """The expected sum of the batches' padded lengths."""
        return self.sum_of(np.multiply)

    def shapes(self, targets: TypicalTargets | None) -> EpochShapes:
        """Return the shapes of the batches, with the target that is typical of each."""
        typical = None
        if targets is not None:
            above = self.table.lower_edges(self.lengths)
            typical = targets(self.batch_sizes, self.lengths, above)
        return EpochShapes(self.batch_sizes, self.lengths, typical)

    def seconds(
        self, step_seconds: StepTimeFunction, targets: TypicalTargets | None
    ) -> float:
        """Return the time of the epoch, shared out to ranks that never wait."""
        seconds = self.numbers * self.shapes(targets).seconds(step_seconds)
        return float(np.sum(seconds)) / self.dealing.world_size

    def time(
        self, step_seconds: StepTimeFunction, targets: TypicalTargets | None
    ) -> EpochTime:
        """Return the time of the epoch with its errors."""
        seconds = self.seconds(step_seconds, targets)
        return EpochTime(
            seconds=seconds,
            errors=time_errors(
                step_seconds, self.shapes(targets), self.numbers, seconds
            ),
        )


def expected_batches(
    histogram: Histogram, table: BucketTable, dealing: RankSplit = ON_ONE_RANK
) -> ExpectedBatches:
    """Return the batches to expect when each bucket's examples are shuffled and cut into batches.

    Raises ValueError if the longest length is beyond the last boundary.
    """
    edges, counts = table.divide(histogram)
    before = np.cumsum(counts) - counts
    counted = tally(counts, table.batch_sizes, dealing)
    lengths = []
    numbers = []
    for bucket, size, number in zip(
        counted.buckets, counted.batch_sizes, counted.numbers, strict=True
    ):
        held = slice(edges[bucket], edges[bucket + 1])
        within = all_within(
            histogram.cumulative[held] - before[bucket], counts[bucket], size
        )
        expected = number * np.maximum(np.diff(within, prepend=0.0), 0.0)
        longest = histogram.lengths[held]
        if longest.size > _GROUPS:
            # So many parts of the batches and of the range of lengths.
            place = within + (longest - longest[0]) / (longest[-1] - longest[0])
            starts = np.flatnonzero(
                np.diff(np.floor(place * (_GROUPS / 2)), prepend=-1.0)
            )
            total = np.add.reduceat(expected, starts)
            mean = np.add.reduceat(expected * longest, starts) / np.maximum(
                total, np.finfo(np.float64).tiny
            )
            # Rounding must not carry a mean beyond its bucket.
            longest = np.clip(mean, longest[starts], longest[-1])
            expected = total
        lengths.append(longest)
        numbers.append(expected)
    shapes = [each.size for each in numbers]
    return ExpectedBatches(
        histogram=histogram,
        table=table,
        dealing=dealing,
        edges=edges,
        counts=counts,
        tally=counted,
        buckets=np.repeat(counted.buckets, shapes),
        batch_sizes=np.repeat(counted.batch_sizes, shapes),
        lengths=np.concatenate(lengths),
        numbers=np.concatenate(numbers),
    )


def all_within(within: IntArray, count: IntArray, drawn: IntArray) -> FloatArray:
    """Return P(all of `drawn` out of `count` lie among the first `within`): C(within, drawn) / C(count, drawn)."""
    # Grouped so that within = count cancels: the last probability of a bucket is exactly 1.
    log_ratio = log_orders(np.maximum(within, drawn), drawn)
    log_ratio -= log_orders(count, drawn)
    return np.exp(log_ratio, out=log_ratio) * (drawn <= within)


def log_orders(count: IntArray, drawn: IntArray) -> FloatArray:
    """Return the logarithm of the ways to draw some of `count` examples in order: count! / (count - drawn)!."""
    rest = count - drawn
    if count.max(initial=0) < _TABLED_FACTORIALS:
        table = _log_factorials()
        return table.take(count) - table.take(rest)
    count, drawn = np.broadcast_arrays(count, drawn)
    logs = np.asarray(_log_factorial(count) - _log_factorial(rest))
    # Large ones differ by less than their rounding errors: there the terms of Stirling's series are subtracted.
    many = rest >= _TABLED_FACTORIALS
    total = count[many].astype(np.float64)
    taken = drawn[many]
    left = rest[many]
    logs[many] = taken * (np.log(total) - 1) - (left + 0.5) * np.log1p(-taken / total)
    logs[many] += (1 / total - 1 / left) / 12
    return logs


@lru_cache(maxsize=1)
def _log_factorials() -> FloatArray:
    """Return the logarithms of 0!, 1!, 2! and so on."""
    # Parts that fit the processor's cache.
    parts = np.arange(_TABLED_FACTORIALS).reshape(-1, 1 << 14)
    values = np.concatenate([_log_factorial(part) for part in parts])
    values.flags.writeable = False
    return values


def _log_factorial(numbers: IntArray) -> FloatArray:
    """Return the logarithm of the factorial of each number; of large ones by Stirling's series, exact to rounding."""
    known = _FIRST_LOG_FACTORIALS.size
    large = np.maximum(numbers, known).astype(np.float64)
    logs = (large + 0.5) * np.log(large) - large + _HALF_LOG_OF_TWO_PI
    logs += (1 / 12 - 1 / (360 * large * large)) / large
    first = _FIRST_LOG_FACTORIALS[np.minimum(numbers, known - 1)]
    return np.where(numbers < known, first, logs)


class BucketCosts(ABC):
    """The cost of every bucket (u_i, u_j], for `num_ends` ends u_1 < u_2 < ... and u_0 below all lengths.

    `ends` are indices of distinct lengths, as `representative_ends` returns them. `batch_sizes` are those of buckets
    that end there.
    """

    def __init__(
        self, histogram: Histogram, ends: IntArray, batch_sizes: IntArray
    ) -> None:
        self.num_ends = ends.size
        # Shape (ends + 1,): the number of examples up to each end.
        self._counts = np.concatenate(([0], histogram.cumulative[ends])).astype(
            np.int64
        )
        # No batch is larger than the data set.
        self._sizes = np.minimum(batch_sizes, histogram.count + 1)

    @abstractmethod
    def up_to(self, end: int) -> FloatArray:
        """Return the cost of the bucket (u_i, u_end] for each i < end, shape (end,)."""


class BatchCounts(BucketCosts):
    """The number of batches of a bucket: ceil(n / B) of its n examples, with the batch size B at its end."""

    def up_to(self, end: int) -> FloatArray:
        """Return the batches of the bucket (u_i, u_end] for each i < end, shape (end,)."""
        batches = -((self._counts[:end] - self._counts[end]) // self._sizes[end - 1])
        return cast(FloatArray, batches.astype(np.float64))


class ExpectedCosts(BucketCosts):
    """The sum of the cost over every length that can be the longest of a batch, as `ExpectedBatches.sum_of` does.

    It is exact if all lengths are ends. If not, all lengths between two ends count as their mean. It takes O(U²) steps
    for each of U ends.
    """

    def __init__(
        self,
        histogram: Histogram,
        ends: IntArray,
        batch_sizes: IntArray,
        cost: BatchCost,
    ) -> None:
        super().__init__(histogram, ends, batch_sizes)
        totals = np.diff(histogram.cumulative_total[ends], prepend=0.0)
        self._lengths = totals / np.diff(self._counts)
        self._cost = cost
        largest = min(int(self._sizes.max()), histogram.count)
        self._tabled = np.unique(np.geomspace(1, largest, _TABLED_SIZES).round())
        sizes = np.repeat(self._tabled, ends.size)
        costs = cost(sizes, np.tile(self._lengths, self._tabled.size))
        self._table = costs.reshape(self._tabled.size, ends.size)

    def up_to(self, end: int) -> FloatArray:
        """Return the expected cost of the bucket (u_i, u_end] for each i < end, shape (end,)."""
        size = self._sizes[end - 1]
        costs = self._cost(np.full(end, float(size)), self._lengths[:end])
        total = np.empty(end)
        for first in range(0, end, _BLOCK):
            begins = slice(first, min(first + _BLOCK, end))
            batches, rests = np.divmod(self._counts[end] - self._counts[begins], size)
            rows = np.searchsorted((self._tabled[1:] + self._tabled[:-1]) / 2, rests)
            of_rests = self._longest(begins, end, rests) * self._table[rows, first:end]
            total[begins] = batches * (self._longest(begins, end, size) @ costs[first:])
            total[begins] += np.where(rests > 0, of_rests.sum(axis=1), 0.0)
        return total

    def _longest(
        self, begins: slice, end: int, drawn: IntArray | np.int64
    ) -> FloatArray:
        """Return P(the longest of a batch lies behind each end), of the buckets (u_i, u_end] that begin there.

        Shape (buckets, ends from the first that begins to `end`). Of a bucket with fewer examples than are drawn the
        batch has all.
        """
        firsts = self._counts[begins, np.newaxis]
        counts = self._counts[end] - firsts
        within = self._counts[begins.start : end + 1] - firsts
        return np.diff(all_within(within, counts, np.minimum(drawn, counts.T).T))


# How random batches are: how often the same two examples meet, and how alike in length those that meet are.
#
# Two examples of one batch are mates. Both figures exist for buckets and pools, so that these can be compared.


@dataclass(frozen=True, slots=True)
class Mates:
    """The figures of two examples of one batch."""

    again: float  # the probability that they meet again in the next epoch; 0 if all batches hold one example
    # Of their lengths; None if lengths do not vary, or nobody has a mate.
    correlation: float | None


def mates_in_buckets(expected: ExpectedBatches) -> Mates:
    """Return the figures of mates in a table's batches, exactly.

    A batch is a uniformly drawn subset of its bucket. So of the n_b(n_b - 1) / 2 pairs of bucket b,
    all equally likely, Σ B(B - 1) / 2 are mates: the ratio of the two is the probability that a
    pair meets again.
    """
    histogram = expected.histogram
    tally = expected.tally
    counts = expected.counts.astype(np.float64)
    sizes = tally.batch_sizes.astype(np.float64)
    mates = np.bincount(
        tally.buckets, tally.numbers * sizes * (sizes - 1) / 2, counts.size
    )
    pairs = np.maximum(counts * (counts - 1) / 2, 1.0)
    if not mates.any():
        return Mates(0.0, None)
    again = float(np.sum(mates * np.minimum(mates / pairs, 1.0)) / mates.sum())
    centred = (
        histogram.lengths - float(histogram.cumulative_total[-1]) / histogram.count
    )
    sums = sums_between(histogram.counts * centred, expected.edges)
    squares = sums_between(histogram.counts * centred**2, expected.edges)
    mated = np.where(sizes > 1, tally.numbers * sizes, 0.0)
    with_mates = np.bincount(tally.buckets, mated, counts.size).astype(np.float64)
    return Mates(
        again,
        _correlation(
            (sums**2 - squares) / (2 * pairs), with_mates, squares.sum() / counts.sum()
        ),
    )


def step_deviation_in_buckets(expected: ExpectedBatches) -> float:
    """Return the standard deviation of the true length of whole steps / their mean, on average over shuffles.

    A batch is a uniformly drawn subset of its bucket, and the batches of a step are one of those of the epoch.
    """
    histogram = expected.histogram
    tally = expected.tally
    dealing = expected.dealing
    counts = np.maximum(expected.counts, 2)
    means = sums_between(histogram.counts * histogram.lengths, expected.edges) / counts
    squares = sums_between(histogram.counts * histogram.lengths**2, expected.edges)
    squares = squares / counts
    variances = np.maximum(squares - means**2, 0.0) / (counts - 1)
    buckets = tally.buckets
    sizes = tally.batch_sizes * dealing.together
    numbers = tally.numbers / dealing.together
    if counts.size == 1:
        # The last batch, which is smaller, ends a step that is no whole one.
        numbers = numbers * (sizes == sizes.max())
    within = sizes * np.maximum(counts[buckets] - sizes, 0) * variances[buckets]
    return step_deviation(sizes * means[buckets], within, numbers, dealing)


def step_deviation(
    totals: FloatArray,
    within: FloatArray | float,
    numbers: FloatArray,
    dealing: RankSplit,
) -> float:
    """Return a step's deviation by kinds of batches, or with `same_bucket` by those of all ranks together.

    For each kind, `totals` is the mean true length, `within` its variance, and `numbers` the number
    of batches.
    """
    mean = np.average(totals, weights=numbers)
    variance = np.average((totals - mean) ** 2 + within, weights=numbers)
    each = dealing.batches_per_step // dealing.together
    count = numbers.sum()
    # Drawn without putting them back.
    variance *= max(0.0, count - each) / max(1.0, count - 1)
    return float(math.sqrt(variance / each) / mean)


def mates_in_cuts(cuts: list[EpochBatches], lengths: AnyArray) -> Mates:
    """Return the figures of mates over at least two epochs; `lengths`, shape (examples,), by index of the example."""
    # The last with the first: any two epochs tell as much.
    others = cuts[1:] + cuts[: len(cuts) > 2]
    again = [
        _met_again(first, second) for first, second in zip(cuts, others, strict=False)
    ]
    centred = lengths.astype(np.float64) - float(lengths.mean())
    products = []
    examples = []
    for cut in cuts:
        sizes = cut.layout.batch_sizes
        edges = edges_of(sizes)
        held = centred[cut.held()]
        products.append(
            (sums_between(held, edges) ** 2 - sums_between(held**2, edges))
            / np.maximum(sizes * (sizes - 1), 1)
        )
        examples.append(np.where(sizes > 1, sizes, 0).astype(np.float64))
    correlation = _correlation(
        np.concatenate(products), np.concatenate(examples), float(lengths.var())
    )
    return Mates(float(np.mean(again)), correlation)


def effective_buckets(again: float, layout: Layout) -> float:
    """Return how often mates meet `again`, relative to batches of these sizes drawn from all examples; at least 1."""
    sizes = layout.batch_sizes.astype(np.float64)
    mates = sizes * (sizes - 1)
    if not mates.any():
        return 1.0
    at_random = float(np.sum(mates * (sizes - 1)) / (mates.sum() * (layout.count - 1)))
    return max(1.0, again / at_random)


def _met_again(first: EpochBatches, second: EpochBatches) -> float:
    """Return the share of the pairs of one epoch's batches that are in one batch of the other, too."""
    count = second.layout.count
    batches = second.layout.starts.size
    # An example that is left out meets nobody.
    batch_of = np.arange(batches, batches + count)
    batch_of[second.held()] = np.repeat(np.arange(batches), second.layout.batch_sizes)
    sizes = first.layout.batch_sizes
    keys = (
        np.repeat(np.arange(sizes.size), sizes) * (batches + count)
        + batch_of[first.held()]
    )
    _, met = np.unique(keys, return_counts=True)
    mates = float(np.sum(sizes * (sizes - 1.0)))
    if mates:
        return float(np.sum(met * (met - 1.0))) / mates
    return 0.0


def sums_between(values: FloatArray, edges: IntArray) -> FloatArray:
    """Return the sums of the values between each edge and the next."""
    return np.diff(edges_of(values)[edges])


def _correlation(
    products: FloatArray, examples: FloatArray, variance: float
) -> float | None:
    """Return the mean product of mates' deviations, over examples that have mates, as a part of the variance."""
    if not examples.any() or not variance > 0:
        return None
    return float(np.clip(np.average(products, weights=examples) / variance, -1.0, 1.0))
