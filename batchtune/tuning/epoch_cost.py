"""The cost of one epoch: of a bucket table, exactly, on average over shuffles; or of simulated batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from batchtune.batching.epochs import EpochShapes
from batchtune.batching.expectation import BatchCost, ExpectedBatches, expected_batches
from batchtune.batching.layout import Dealing, Tally
from batchtune.batching.table import BucketTable
from batchtune.cost import StepTimes
from batchtune.lengths import FloatArray, IntArray, Lengths
from batchtune.results import RankTimes, Row, Sizing
from batchtune.tuning.costs import Costs, StepSeconds, TypicalTargets, epoch_batch_seconds
from batchtune.tuning.sweep_settings import ONE_RANK, Ranks, SweepSettings

WITHIN_ERRORS = 2.0
"""Times that differ by no more than so many standard errors of their difference are taken for equal."""

# Lengths that stand for all in the errors, which need not be as exact as the time itself.
_REPRESENTATIVES = 256
# Lengths that stand for all where there are more.
_LENGTHS_OF_RANKS = 2048
# Points of the grid on which times of several batches are added up; at least so many for each of them.
_GRID = 1 << 16
_LEAST_GRID_EACH = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpochCost:
    """The cost of one epoch over all ranks, whichever way it was worked out.

    Attributes:
        tally: How many batches of which size it has, by bucket if there are buckets.
        padded_length: All cells of its batches, no less than the true length.
        seconds: Its time as the ranks take batches; None without step times.
        errors: Shape (sources,): standard errors of the time, in seconds, by the measurements that they come from.
        ranks: The time by how batches are dealt; None of simulated batches.
    """

    tally: Tally
    padded_length: float
    seconds: float | None = None
    errors: FloatArray | None = None
    ranks: RankTimes | None = None

    @property
    def standard_error(self) -> float | None:
        """The standard error of the time, in seconds; None if it is not known."""
        return None if self.errors is None else float(np.linalg.norm(self.errors))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pricing:
    """All that is needed to work out the cost of an epoch.

    Attributes:
        lengths: The data set, each length as batches are padded to it.
        total: The true length of all examples.
        step_seconds: The time of one step; None: not known.
        targets: The targets that are typical of the data set; None: it has none, or no time is known.
        proven: Lengths → the largest batch size that is proven to fit, 0 without a proof; None: nothing was probed.
    """

    lengths: Lengths
    total: float
    max_batch_length: float
    step_seconds: StepSeconds | None = None
    targets: TypicalTargets | None = None
    ranks: Ranks = ONE_RANK
    proven: Callable[[FloatArray], IntArray] | None = None

    @classmethod
    def of(cls, lengths: Lengths, max_batch_length: float, settings: SweepSettings, costs: Costs) -> Pricing:
        """Return the pricing of a sweep."""
        padded = lengths if settings.multiple_of is None else lengths.padded_to(settings.multiple_of)
        return cls(
            lengths=padded,
            total=lengths.total,
            max_batch_length=max_batch_length,
            step_seconds=costs.step_seconds,
            targets=TypicalTargets.of(padded) if costs.step_seconds is not None else None,
            ranks=settings.ranks,
            proven=costs.proven,
        )

    def padding_ratio(self, padded_length: float) -> float:
        """Return padded cells / all cells; an example that is dealt a second time counts as padding."""
        return (padded_length - self.total) / padded_length

    def times(self, expected: ExpectedBatches) -> RankTimes:
        """Return the time of an epoch by how batches are dealt, from those of one rank, if step times are known."""
        assert self.step_seconds is not None
        cost = epoch_batch_seconds(expected.table, self.step_seconds, self.targets)
        return rank_times(expected, cost, self.ranks.world_size, self.ranks.accumulate)

    def epoch_seconds(self, expected: ExpectedBatches) -> float:
        """Return the time of an epoch as the ranks take batches, if step times are known."""
        return self.ranks.epoch_seconds(self.times(expected))

    def of_table(self, table: BucketTable) -> EpochCost:
        """Return the cost of an epoch with a table that holds all lengths, exactly, on average over shuffles."""
        alone = dealt = expected_batches(self.lengths.histogram, table)
        if self.ranks.world_size > 1:
            dealt = expected_batches(self.lengths.histogram, table, self.ranks.dealing)
        padded = max(dealt.padded_length, self.total)
        if self.step_seconds is None:
            return EpochCost(tally=dealt.tally, padded_length=padded)
        times = self.times(alone)
        seconds = self.ranks.epoch_seconds(times)
        errors = time_errors(dealt, self.step_seconds, self.targets, seconds)
        return EpochCost(tally=dealt.tally, padded_length=padded, seconds=seconds, errors=errors, ranks=times)

    def of_shapes(self, epochs: Sequence[EpochShapes]) -> EpochCost:
        """Return the mean cost of epochs whose batches are known one by one.

        Ranks take the batches in turn, in their order. All epochs have as many batches of each size.
        """
        numbers, step = np.unique(epochs[0].batch_sizes, return_counts=True), self.step_seconds
        padded = sum(float(np.sum(epoch.batch_sizes * epoch.lengths)) for epoch in epochs) / len(epochs)
        return EpochCost(
            tally=Tally(*(each[:, np.newaxis] for each in numbers)),
            padded_length=max(padded, self.total),
            seconds=None if step is None else sum(self._in_order(epoch, step) for epoch in epochs) / len(epochs),
        )

    def _in_order(self, shapes: EpochShapes, step_seconds: StepSeconds) -> float:
        """Return the time of an epoch's batches, dealt in their order."""
        sizes = shapes.batch_sizes.astype(np.float64)
        known = (sizes, shapes.lengths) if shapes.targets is None else (sizes, shapes.lengths, shapes.targets)
        ranks, accumulate = self.ranks.world_size, self.ranks.accumulate
        seconds = np.zeros(-(-sizes.size // (ranks * accumulate)) * ranks * accumulate)
        seconds[: sizes.size] = step_seconds(*known)
        return float(seconds.reshape(-1, accumulate, ranks).sum(axis=1).max(axis=1).sum())

    def row(
        self, strategy: str, sizing: Sizing, num_buckets: int, table: BucketTable, cost: EpochCost | None = None
    ) -> Row:
        """Return the row of a sweep for this table, with its exact cost or the one that is given."""
        cost = cost or self.of_table(table)
        histogram, tally = self.lengths.histogram, cost.tally
        counts = table.counts(histogram)
        used_sizes, longest = table.largest_batches(histogram)
        return Row(
            strategy=strategy,
            sizing=sizing,
            num_buckets=num_buckets,
            used_buckets=longest.size,
            boundaries=table.boundaries.tolist(),
            batch_sizes=table.batch_sizes.tolist(),
            batches=tally.batches,
            padded_length=cost.padded_length,
            padding_ratio=self.padding_ratio(cost.padded_length),
            fill=self.total / (tally.batches * self.max_batch_length),
            mean_batch_size=tally.mean_batch_size,
            largest_padded_length=float((tally.largest[counts > 0] * longest).max()),
            effective_buckets=1 / float(np.sum((counts / counts.sum()) ** 2)),
            estimated_epoch_seconds=cost.seconds,
            estimated_epoch_error_seconds=cost.standard_error,
            smallest_batch_size=tally.smallest_batch_size,
            largest_batch_size=tally.largest_batch_size,
            batch_size_variation=tally.batch_size_variation,
            steps=self.ranks.steps(tally.batches),
            ranks=cost.ranks if self.ranks.world_size > 1 else None,
            unproven=None if self.proven is None else int(np.count_nonzero(used_sizes > self.proven(longest))),
            repeated_examples=tally.examples - self.lengths.count,
        )


def estimated_epoch_seconds(
    lengths: Lengths, table: BucketTable, step_seconds: StepSeconds, *, drop_last: bool = False
) -> float:
    """Return the time of all of an epoch's training steps on one rank, on average over shuffles."""
    expected = expected_batches(lengths.histogram, table, Dealing(drop_last=drop_last))
    return expected.sum_of(epoch_batch_seconds(table, step_seconds, TypicalTargets.of(lengths)))


def time_errors(
    expected: ExpectedBatches, step_seconds: StepSeconds, targets: TypicalTargets | None, seconds: float
) -> FloatArray | None:
    """Return the errors of an epoch's time, to first order in those of the measured step times.

    Shapes are many (two for each distinct length), and neighbours have nearly the same derivatives: a few hundred
    stand for all. Their sum is scaled to the epoch's exact `seconds`, so that an error common to all shapes stays
    exact. On several ranks their waiting is taken to grow as the time does. None if `step_seconds` knows no errors.
    """
    if not isinstance(step_seconds, StepTimes):
        return None
    sizes, lengths, counts = expected.representatives(_REPRESENTATIVES)
    typical = None if targets is None else targets(sizes, lengths, expected.table.lower_edges(lengths))
    total, gradient = step_seconds.sensitivities(sizes, lengths, typical, counts)
    return gradient * (seconds / total) * step_seconds.sigmas


def equal_to_best(costs: Sequence[EpochCost]) -> list[bool | None]:
    """Return which times can't be told from the least: they differ by at most two standard errors of the difference.

    Errors that both have in common cancel: the difference's is √Σ (error_a,p - error_b,p)². One for each cost; the
    least itself is always equal. None where a time or the errors are not known.
    """
    known = [(cost.seconds, cost.errors) for cost in costs if cost.seconds is not None and cost.errors is not None]
    if not known or len(known) < len(costs):
        return [None] * len(costs)
    least, errors = min(known, key=lambda cost: cost[0])
    return [seconds - least <= WITHIN_ERRORS * float(np.linalg.norm(own - errors)) for seconds, own in known]


def rank_times(expected: ExpectedBatches, batch_cost: BatchCost, world_size: int, accumulate: int = 1) -> RankTimes:
    """Return the time of one epoch on several ranks, on average over shuffles and over how batches are dealt.

    Three ways to deal the batches, which are those of one epoch on one rank:

    - Without waiting: all batches' time / the number of ranks; what no dealing beats.
    - Independent: batches in random order, one to each rank at a time. A step lasts as long as the longest of
      `world_size` batches drawn without replacement from the M of an average epoch; there are ceil(M / world_size)
      steps, as samplers fill up the last one. (BucketBatchSampler splits the largest batches for that: with few steps
      an epoch, this is a per cent or two more than it takes.) Against the exact probabilities that adds less than 0.1%
      from 200 batches on, and at most 0.35% with 24. A simulated epoch is off by 1% with 255 batches and 0.3% with
      13,000, too much to compare tables by, and takes longer to make at that.
    - Same bucket: at each step all ranks have batches of one bucket: world_size · B of its examples as long as they
      last, so that the step lasts as long as the longest of them all takes. What is left of a bucket is dealt evenly:
      one step more, with ceil(rest / world_size) examples on the fullest rank, which is taken to have the longest.

    With accumulated gradients ranks wait for each other only every `accumulate` batches. Independent: for the longest
    of `world_size` sums of so many batches, drawn with replacement (for a normal distribution that makes no
    difference but the factor √(M / (M - 1)) in what waiting adds). Same bucket: counted as if ranks waited after
    each batch, which is an upper bound. On one rank all three are the plain sum over the batches.
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

    The distribution of a sum is the times', convolved with itself on an even grid. A time is shared out between the
    two points beside it, so that means are exact.
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
