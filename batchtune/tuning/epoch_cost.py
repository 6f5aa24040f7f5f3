"""The cost of one epoch: of a bucket table, exactly, on average over shuffles; or of simulated batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from batchtune.batching.epochs import EpochShapes
from batchtune.batching.expectation import ExpectedBatches, expected_batches
from batchtune.batching.layout import Dealing, Tally
from batchtune.batching.table import BucketTable
from batchtune.cost import StepTimes
from batchtune.lengths import FloatArray, IntArray, Lengths
from batchtune.results import RankTimes, Row, Sizing
from batchtune.tuning.costs import Costs
from batchtune.tuning.ranks import rank_times
from batchtune.tuning.sweep_settings import ONE_RANK, Ranks, SweepSettings
from batchtune.tuning.targets import StepSeconds, TypicalTargets, epoch_batch_seconds

WITHIN_ERRORS = 2.0
"""Times that differ by no more than so many standard errors of their difference are taken for equal."""

# Lengths that stand for all in the derivatives, which need not be as exact as the time itself.
_REPRESENTATIVES = 256


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpochCost:
    """The cost of one epoch over all ranks, whichever way it was worked out.

    Attributes:
        tally: How many batches of which size it has, by bucket where there are buckets.
        padded_length: All cells of its batches, no less than the true length.
        seconds: Its time as the ranks take batches; None without step times.
        gradient: Shape (sources,): the derivatives of the time by the logarithms that `StepTimes.sigmas` are of, in
            seconds; None where the errors of the step times are not known.
        ranks: The time by how batches are dealt; None without step times, or of simulated batches.
    """

    tally: Tally
    padded_length: float
    seconds: float | None = None
    gradient: FloatArray | None = None
    ranks: RankTimes | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Priced:
    """A row, and the cost that it was made of."""

    row: Row
    cost: EpochCost


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pricing:
    """All that is needed to work out the cost of an epoch.

    Attributes:
        lengths: The data set, each length as batches are padded to it.
        total: The true length of all examples.
        max_batch_length: The largest padded length that a batch may have.
        step_seconds: The time of one step; None: not known.
        targets: The targets that are typical of the data set; None: it has none, or no time is known.
        ranks: On which training runs.
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

    @property
    def sigmas(self) -> FloatArray | None:
        """The errors of the measured times, as `StepTimes.sigmas`; None where they are not known."""
        return self.step_seconds.sigmas if isinstance(self.step_seconds, StepTimes) else None

    def padding_ratio(self, padded_length: float) -> float:
        """Return padded cells / all cells; an example that is dealt a second time counts as padding."""
        return (padded_length - self.total) / padded_length

    def times(self, expected: ExpectedBatches) -> RankTimes | None:
        """Return the time of an epoch by how batches are dealt; None without step times.

        Args:
            expected: A table's batches on one rank; those of several ranks are worked out from these.
        """
        if self.step_seconds is None:
            return None
        cost = epoch_batch_seconds(expected.table, self.step_seconds, self.targets)
        return rank_times(expected, cost, self.ranks.world_size, self.ranks.accumulate)

    def epoch_seconds(self, expected: ExpectedBatches) -> float:
        """Return the time of an epoch as the ranks take batches.

        Raises:
            ValueError: Step times are not known.
        """
        times = self.times(expected)
        if times is None:
            raise ValueError("step times are not known")
        return self.ranks.epoch_seconds(times)

    def of_table(self, table: BucketTable) -> EpochCost:
        """Return the cost of an epoch with a bucket table, exactly, on average over shuffles.

        Raises:
            ValueError: The longest length is beyond the table's last boundary.
        """
        alone = dealt = expected_batches(self.lengths.histogram, table)
        if self.ranks.world_size > 1:
            dealt = expected_batches(self.lengths.histogram, table, self.ranks.dealing)
        times = self.times(alone)
        seconds = None if times is None else self.ranks.epoch_seconds(times)
        return EpochCost(
            tally=dealt.tally,
            padded_length=max(dealt.padded_length, self.total),
            seconds=seconds,
            gradient=None if seconds is None else time_gradient(dealt, self.step_seconds, self.targets, seconds),
            ranks=times,
        )

    def of_shapes(self, epochs: Sequence[EpochShapes]) -> EpochCost:
        """Return the mean cost of epochs whose batches are known one by one.

        Ranks take the batches in turn, in their order.

        Args:
            epochs: Each epoch's shapes, at least one; all have as many batches of each size.
        """
        sizes, numbers = np.unique(epochs[0].batch_sizes, return_counts=True)
        padded = sum(float(np.sum(epoch.batch_sizes * epoch.lengths)) for epoch in epochs) / len(epochs)
        seconds = None
        if self.step_seconds is not None:
            seconds = sum(self._seconds_in_order(epoch, self.step_seconds) for epoch in epochs) / len(epochs)
        return EpochCost(
            tally=Tally(sizes[:, np.newaxis], numbers[:, np.newaxis]),
            padded_length=max(padded, self.total),
            seconds=seconds,
        )

    def _seconds_in_order(self, shapes: EpochShapes, step_seconds: StepSeconds) -> float:
        sizes = shapes.batch_sizes.astype(np.float64)
        known = (sizes, shapes.lengths) if shapes.targets is None else (sizes, shapes.lengths, shapes.targets)
        ranks, accumulate = self.ranks.world_size, self.ranks.accumulate
        seconds = np.zeros(-(-sizes.size // (ranks * accumulate)) * ranks * accumulate)
        seconds[: sizes.size] = step_seconds(*known)
        of_ranks = seconds.reshape(-1, accumulate, ranks).sum(axis=1)
        return float(of_ranks.max(axis=1).sum())

    def row(self, strategy: str, sizing: Sizing, num_buckets: int, table: BucketTable) -> Priced:
        """Return the row of a sweep for this table.

        Raises:
            ValueError: The longest length is beyond the table's last boundary.
        """
        histogram, cost = self.lengths.histogram, self.of_table(table)
        counts, tally = table.counts(histogram), cost.tally
        used_sizes, longest = table.largest_batches(histogram)
        row = Row(
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
            estimated_epoch_error_seconds=standard_error(cost, self.sigmas),
            smallest_batch_size=tally.smallest_batch_size,
            largest_batch_size=tally.largest_batch_size,
            batch_size_variation=tally.batch_size_variation,
            steps=self.ranks.steps(tally.batches),
            ranks=cost.ranks if self.ranks.world_size > 1 else None,
            unproven=None if self.proven is None else int(np.count_nonzero(used_sizes > self.proven(longest))),
            repeated_examples=tally.examples - self.lengths.count,
        )
        return Priced(row, cost)


def estimated_epoch_seconds(
    lengths: Lengths, table: BucketTable, step_seconds: StepSeconds, *, drop_last: bool = False
) -> float:
    """Return the time of all of an epoch's training steps on one rank, on average over shuffles.

    Args:
        lengths: The data set.
        table: Its last boundary is at least the longest length.
        step_seconds: The time of one step.
        drop_last: Whether batches that are not full are left out.

    Raises:
        ValueError: The longest length is beyond the last boundary.
    """
    expected = expected_batches(lengths.histogram, table, Dealing(drop_last=drop_last))
    return expected.sum_of(epoch_batch_seconds(table, step_seconds, TypicalTargets.of(lengths)))


def time_gradient(
    expected: ExpectedBatches, step_seconds: StepSeconds | None, targets: TypicalTargets | None, seconds: float
) -> FloatArray | None:
    """Return the derivatives of an epoch's time, to first order in the errors of the measured step times.

    Shapes are many (two for each distinct length), and neighbours have nearly the same derivatives: a few hundred
    stand for all. Their sum is scaled to the exact time, so that an error common to all shapes stays exact.

    Args:
        expected: The epoch's batches.
        step_seconds: The time of one step; only `StepTimes` knows its errors.
        targets: The targets that are typical of the data set; None where it has none.
        seconds: The epoch's exact time. On several ranks too: their waiting is taken to grow as the time does.

    Returns:
        As `EpochCost.gradient`.
    """
    if not isinstance(step_seconds, StepTimes):
        return None
    sizes, lengths, counts = expected.representatives(_REPRESENTATIVES)
    typical = None if targets is None else targets(sizes, lengths, expected.table.lower_edges(lengths))
    total, gradient = step_seconds.sensitivities(sizes, lengths, typical, counts)
    return gradient * (seconds / total)


def standard_error(cost: EpochCost, sigmas: FloatArray | None) -> float | None:
    """Return the standard error of an epoch's time, in seconds: √Σ (gradient_p · sigma_p)².

    Args:
        cost: Of the epoch.
        sigmas: Shape (sources,): as `StepTimes.sigmas`; None where they are not known.

    Returns:
        None where the errors are not known.
    """
    if cost.gradient is None or sigmas is None:
        return None
    return float(np.linalg.norm(cost.gradient * sigmas))


def equal_to_best(costs: Sequence[EpochCost], sigmas: FloatArray | None) -> list[bool | None]:
    """Return which times can't be told from the least: they differ by at most two standard errors of the difference.

    Errors that both have in common cancel: the difference's is √Σ ((gradient_a,p - gradient_b,p) · sigma_p)².

    Args:
        costs: Of several tables on the same data.
        sigmas: Shape (sources,): as `StepTimes.sigmas`; None where they are not known.

    Returns:
        One for each; the least itself is always equal. None where a time or the errors are not known.
    """
    known = [(cost.seconds, cost.gradient) for cost in costs if cost.seconds is not None]
    if sigmas is None or len(known) < len(costs):
        return [None] * len(costs)
    least, gradient = min(known, key=lambda cost: cost[0])
    return [
        None
        if gradient is None or other is None
        else seconds - least <= WITHIN_ERRORS * float(np.linalg.norm((other - gradient) * sigmas))
        for seconds, other in known
    ]
