"""What an epoch costs with a bucket table: the row of a sweep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from batchtune.batching.epochs import Dealing
from batchtune.batching.expectation import ExpectedBatches, expected_batches
from batchtune.batching.table import BucketTable
from batchtune.cost import StepTimes
from batchtune.lengths import FloatArray, IntArray, Lengths
from batchtune.results import RankTimes, Row, Sizing
from batchtune.tuning.estimates import StepSeconds, epoch_batch_seconds
from batchtune.tuning.randomness import batch_size_statistics, meeting_probability
from batchtune.tuning.ranks import rank_times
from batchtune.tuning.targets import TypicalTargets
from batchtune.tuning.uncertainty import EpochTime, epoch_time, standard_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """On how many ranks training runs, and how they take batches.

    Attributes:
        world_size: Number of ranks.
        accumulate: Batches whose gradients are accumulated before the ranks wait for each other.
        same_bucket: Whether at each step all ranks take batches of the same bucket.
    """

    world_size: int = 1
    accumulate: int = 1
    same_bucket: bool = False

    def epoch_seconds(self, times: RankTimes) -> float:
        """The time of an epoch as these ranks take batches."""
        return times.same_bucket_epoch_seconds if self.same_bucket else times.independent_epoch_seconds

    @property
    def dealing(self) -> Dealing:
        """How they take batches."""
        return Dealing(world_size=self.world_size, same_bucket=self.same_bucket)

    def steps(self, batches: int) -> int:
        """Optimizer steps of an epoch of so many batches, over all ranks."""
        return -(-batches // (self.world_size * self.accumulate))


ONE_RANK = Ranks()


@dataclass(frozen=True, slots=True, eq=False)
class Priced:
    """A row, and how its time depends on what was measured; None where that is not known."""

    row: Row
    time: EpochTime | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pricing:
    """What is needed to say what an epoch costs.

    Attributes:
        lengths: The data set, each length as batches are padded to it.
        total: The true length of all examples.
        max_batch_length: The largest padded length that a batch may have.
        step_seconds: The time of one step; None: not known.
        targets: What is typical of the data set's targets; None: it has none, or no time is known.
        ranks: On which training runs.
        proven: Lengths → the largest batch size that is proven to fit, 0 where none is; None: nothing was probed.
    """

    lengths: Lengths
    total: float
    max_batch_length: float
    step_seconds: StepSeconds | None = None
    targets: TypicalTargets | None = None
    ranks: Ranks = ONE_RANK
    proven: Callable[[FloatArray], IntArray] | None = None

    def unproven(self, longest: FloatArray, batch_sizes: IntArray) -> int | None:
        """How many buckets can have a batch that is larger than what is proven; None where nothing was probed.

        Args:
            longest: Shape (buckets,): the longest length in each.
            batch_sizes: Shape (buckets,): examples in their largest batch.
        """
        return None if self.proven is None else int(np.count_nonzero(batch_sizes > self.proven(longest)))

    @property
    def sigmas(self) -> FloatArray | None:
        """How far off what was measured may be, as `StepTimes.sigmas`; None where that is not known."""
        return self.step_seconds.sigmas if isinstance(self.step_seconds, StepTimes) else None

    def padding_ratio(self, padded_length: float) -> float:
        """Padded cells / all cells; what is dealt a second time counts as padding."""
        return (padded_length - self.total) / padded_length

    def padded_length(self, expected: ExpectedBatches) -> float:
        """All cells of the epoch's batches; no less than the true length, whatever the rounding."""
        return max(expected.padded_length, self.total)

    def times(self, expected: ExpectedBatches, table: BucketTable) -> RankTimes | None:
        """The time of an epoch; None where step times are not known.

        Args:
            expected: The table's batches on one rank; what several make of them is worked out from these.
            table: The bucket table.
        """
        if self.step_seconds is None:
            return None
        cost = epoch_batch_seconds(table, self.step_seconds, self.targets)
        return rank_times(expected.histogram, expected, table, cost, self.ranks.world_size, self.ranks.accumulate)

    def epoch_seconds(self, expected: ExpectedBatches, table: BucketTable) -> float:
        """The time of an epoch as the ranks take batches.

        Raises:
            ValueError: Step times are not known.
        """
        times = self.times(expected, table)
        if times is None:
            raise ValueError("step times are not known")
        return self.ranks.epoch_seconds(times)

    def row(self, strategy: str, sizing: Sizing, num_buckets: int, table: BucketTable) -> Priced:
        """What an epoch costs with this table, over all ranks, exactly, on average over shuffles.

        Raises:
            ValueError: The longest length is beyond the table's last boundary.
        """
        histogram = self.lengths.histogram
        edges, counts = table.edges(histogram), table.counts(histogram)
        used = counts > 0
        longest = histogram.lengths[edges[1:][used] - 1]
        alone = dealt = expected_batches(histogram, table)
        if self.ranks.world_size > 1:
            dealt = expected_batches(histogram, table, self.ranks.dealing)
        padded = self.padded_length(dealt)
        batches = dealt.tally.batches
        sizes = batch_size_statistics(dealt.tally)
        times = self.times(alone, table)
        time = None
        if times is not None and self.step_seconds is not None:
            seconds = self.ranks.epoch_seconds(times)
            time = epoch_time(dealt, table, self.step_seconds, self.targets, seconds)
        row = Row(
            strategy=strategy,
            sizing=sizing,
            num_buckets=num_buckets,
            used_buckets=int(np.count_nonzero(used)),
            boundaries=table.boundaries.tolist(),
            batch_sizes=table.batch_sizes.tolist(),
            batches=batches,
            padded_length=padded,
            padding_ratio=self.padding_ratio(padded),
            fill=self.total / (batches * self.max_batch_length),
            mean_batch_size=sizes.mean,
            largest_padded_length=float((dealt.tally.largest[used] * longest).max()),
            effective_buckets=1 / meeting_probability(counts),
            estimated_epoch_seconds=None if time is None else time.seconds,
            estimated_epoch_error_seconds=None if time is None else standard_error(time, self.sigmas),
            smallest_batch_size=sizes.smallest,
            largest_batch_size=sizes.largest,
            batch_size_variation=sizes.variation,
            steps=self.ranks.steps(batches),
            ranks=times if self.ranks.world_size > 1 else None,
            unproven=self.unproven(longest, np.minimum(table.batch_sizes, counts)[used]),
            repeated_examples=dealt.tally.examples - self.lengths.count,
        )
        return Priced(row, time)
