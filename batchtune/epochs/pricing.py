"""Works out the cost of one epoch: of a bucket table on one rank exactly, on average over shuffles; else simulated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from batchtune.epochs.batchers import Batching
from batchtune.epochs.epoch_time import EpochTime, shape_errors
from batchtune.epochs.expectation import Tally, expected_batches
from batchtune.epochs.layout import ON_ONE_RANK, EpochShapes, RankSplit
from batchtune.epochs.measured_costs import Costs, StepTimeFunction, TypicalTargets
from batchtune.epochs.randomness import (
    Mates,
    mates_in_buckets,
    step_deviation_in_buckets,
)
from batchtune.epochs.simulation import SimulatedEpochs, simulate_epochs
from batchtune.epochs.table import BucketTable, SizeFunction
from batchtune.lengths import Lengths
from batchtune.results import OwnBatches, Row, Sizing, SweepSettings


class TimedRow(NamedTuple):
    """A row of a sweep, and its time; None without step times."""

    row: Row
    time: EpochTime | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pricing:
    """The data, step times and ranks that the cost of an epoch is worked out from.

    Attributes:
        lengths: The data set, each length as batches are padded to it.
        total: The true length of all examples.
        step_seconds: The time of one step; None: not known.
        targets: The typical targets of the data set; None without targets.
        proven: Lengths → the largest batch size that is proven to fit, 0 without a proof; None: nothing was probed.
        seed: Of simulated epochs.
    """

    lengths: Lengths
    total: float
    max_batch_length: float
    step_seconds: StepTimeFunction | None = None
    targets: TypicalTargets | None = None
    dealing: RankSplit = ON_ONE_RANK
    proven: SizeFunction | None = None
    seed: int = 0

    @classmethod
    def of(
        cls,
        lengths: Lengths,
        max_batch_length: float,
        settings: SweepSettings,
        costs: Costs,
    ) -> Pricing:
        """Return the pricing of a sweep."""
        padded = lengths
        if settings.multiple_of is not None:
            padded = lengths.padded_to(settings.multiple_of)
        return cls(
            lengths=padded,
            total=lengths.total,
            max_batch_length=max_batch_length,
            step_seconds=costs.step_seconds,
            targets=TypicalTargets.of(padded),
            dealing=replace(
                RankSplit.of(settings, costs), same_bucket=settings.same_bucket
            ),
            proven=costs.proven,
            seed=settings.seed,
        )

    def padding_ratio(self, padded_length: float) -> float:
        """Return padded cells / all cells; an example that is dealt a second time counts as padding."""
        return (padded_length - self.total) / padded_length

    def mean_cost(
        self, epochs: Sequence[EpochShapes], scale: float = 1.0
    ) -> tuple[float, float | None]:
        """Return the mean padded length and time of epochs whose batches are `1 / scale` of all, in their order."""
        padded = float(np.mean([epoch.padded_length for epoch in epochs]))
        seconds = None
        if self.step_seconds is not None:
            times = [
                epoch.epoch_seconds(self.step_seconds, self.dealing) for epoch in epochs
            ]
            seconds = float(np.mean(times)) * scale
        return max(padded * scale, self.total), seconds

    def priced(self, strategy: str, sizing: Sizing, batching: Batching) -> TimedRow:
        """Return the row of batches that hold all lengths: exactly in buckets, by simulation in pools."""
        if batching.uses_pools:
            return self.of_pools(strategy, sizing, batching)
        return self.of_table(
            strategy, sizing, batching.table.num_buckets, batching.table
        )

    def of_table(
        self, strategy: str, sizing: Sizing, num_buckets: int, table: BucketTable
    ) -> TimedRow:
        """Return the row of a table that holds all lengths, on average over shuffles.

        It is exact, but for the time that several ranks take: epochs are simulated.
        """
        expected = expected_batches(self.lengths.histogram, table, self.dealing)
        counts = expected.counts
        batching = Batching(table)
        time = None
        if self.step_seconds is not None and self.dealing.world_size > 1:
            simulated = self._simulated(batching).time(self.step_seconds)
            time = replace(simulated, deviation=None)
        elif self.step_seconds is not None:
            time = expected.time(self.step_seconds, self.targets)
        return self._priced(
            batching,
            expected.tally,
            mates_in_buckets(expected),
            time,
            strategy=strategy,
            sizing=sizing,
            num_buckets=num_buckets,
            batches=expected.tally.batches,
            padded_length=max(expected.padded_length, self.total),
            repeated_examples=expected.tally.examples - self.lengths.count,
            effective_buckets=1 / float(np.sum((counts / counts.sum()) ** 2)),
            step_tokens_deviation=step_deviation_in_buckets(expected),
        )

    def of_pools(
        self,
        strategy: str,
        sizing: Sizing,
        batching: Batching,
        batches: int | None = None,
        *,
        cheapest: bool = False,
    ) -> TimedRow:
        """Return the row of pools: means over simulated epochs; `batches` where their number is known.

        If asked for the `cheapest`, and times are known, pools are cut for the least cost where that gains something.
        """
        simulated = self._simulated(batching)
        if cheapest and self.step_seconds is not None:
            simulated = simulated.cheapest(self.step_seconds)
        ranks = self.dealing.world_size
        numbers = np.array([len(shapes) for shapes in simulated.shapes])
        padded = float(np.mean([shapes.padded_length for shapes in simulated.shapes]))
        sizes = simulated.shapes[0].batch_sizes
        time = None
        if self.step_seconds is not None:
            time = simulated.time(self.step_seconds)
        return self._priced(
            simulated.batching,
            Tally.of(np.zeros_like(sizes), sizes),
            simulated.mates,
            time,
            strategy=strategy,
            sizing=sizing,
            num_buckets=simulated.batching.table.num_buckets,
            batches=batches
            or ranks * max(1, round(float(numbers.mean()) * simulated.scale / ranks)),
            padded_length=max(padded * simulated.scale, self.total),
            repeated_examples=simulated.repeated_examples,
            effective_buckets=simulated.effective_buckets,
            step_tokens_deviation=simulated.step_tokens_deviation,
            simulated_epochs=len(simulated.shapes),
            batches_deviation=float(numbers.std(ddof=1)) * math.sqrt(simulated.scale),
        )

    def of_own(self, own: OwnBatches, batching: Batching) -> TimedRow:
        """Return the row of batches that were counted; `batching` holds the largest of them."""
        with_targets = self.targets is not None
        shapes = EpochShapes.of(own.shapes, with_targets=with_targets)
        time = None
        if self.step_seconds is not None:
            mean = float(shapes.seconds(self.step_seconds).mean())
            seconds = mean * own.batches / self.dealing.world_size
            errors = shape_errors(self.step_seconds, shapes, seconds)
            time = EpochTime(seconds=seconds, errors=errors)
        mates = None
        if own.mates_again is not None:
            mates = Mates(own.mates_again, None)
        priced = self._priced(
            batching,
            Tally.of(np.zeros_like(shapes.batch_sizes), shapes.batch_sizes),
            mates,
            time,
            strategy="current",
            sizing="frontier",
            num_buckets=batching.table.num_buckets,
            batches=own.batches,
            padded_length=max(own.padded_length, self.total),
            repeated_examples=0,
            effective_buckets=own.effective_buckets,
        )
        return priced._replace(row=structs.replace(priced.row, pool_size=None))

    def _simulated(self, batching: Batching) -> SimulatedEpochs:
        """Return the first epochs with these batches."""
        return simulate_epochs(batching, self.lengths, self.dealing, self.seed)

    def _priced(
        self,
        batching: Batching,
        tally: Tally,
        mates: Mates | None,
        time: EpochTime | None,
        **figures: Any,
    ) -> TimedRow:
        """Return the row with these figures, and those that follow from them."""
        batches: int = figures["batches"]
        largest, longest = batching.largest_batches(self.lengths.histogram)
        unproven = None
        if self.proven is not None:
            unproven = int(np.count_nonzero(largest > self.proven(longest)))
        row = Row(
            **figures,
            used_buckets=longest.size,
            boundaries=batching.table.boundaries.tolist(),
            batch_sizes=batching.table.batch_sizes.tolist(),
            padding_ratio=self.padding_ratio(figures["padded_length"]),
            fill=self.total / (batches * self.max_batch_length),
            mean_batch_size=(self.lengths.count + figures["repeated_examples"])
            / batches,
            largest_padded_length=float((largest * longest).max()),
            smallest_batch_size=int(tally.batch_sizes.min()),
            largest_batch_size=int(tally.batch_sizes.max()),
            batch_size_variation=tally.batch_size_variation,
            steps=self.dealing.steps(batches),
            unproven=unproven,
            mates_again=None if mates is None else mates.again,
            length_correlation=None if mates is None else mates.correlation,
            pool_size=batching.pool_size,
            batch_overhead=batching.batch_overhead,
            accumulate=batching.accumulate,
            equal_counts=batching.equal_counts,
            pair_cost=batching.pair_cost,
        )
        if time is not None:
            row = structs.replace(row, ranks=time.ranks, **time.fields())
        return TimedRow(row, time)
