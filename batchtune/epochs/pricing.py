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
from batchtune.epochs.layout import ON_ONE_RANK, EpochShapes, RankSplit, shapes_of
from batchtune.epochs.measured_costs import (
    Costs,
    ProvenBy,
    StepTimeFunction,
    TypicalTargets,
)
from batchtune.epochs.randomness import (
    mates_in_buckets,
    step_deviation_in_buckets,
)
from batchtune.epochs.simulation import (
    MOST_SIMULATED,
    SimulatedEpochs,
    simulate_epochs,
)
from batchtune.epochs.table import BucketTable, SizeFunction
from batchtune.lengths import Lengths
from batchtune.results import BucketUse, OwnBatches, Row, Sizing, SweepSettings

# Shuffles to average over: an epoch has many batches, so they differ little.
_SHUFFLES = 3


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

    def on_one_rank(self, batching: Batching) -> tuple[int, float | None]:
        """Return the number of batches of an epoch on one rank, and its mean time over a few shuffles."""
        sample = self.lengths.evenly(MOST_SIMULATED)
        batcher = batching.batcher(sample.values, sample.targets)
        shapes = [
            shapes_of(cut, drawing, sample)
            for drawing, cut in batcher.first_epochs(_SHUFFLES, ON_ONE_RANK)
        ]
        scale = self.lengths.count / sample.count
        _, seconds = replace(self, dealing=ON_ONE_RANK).mean_cost(shapes, scale)
        return round(len(shapes[0]) * scale), seconds

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
        mates = mates_in_buckets(expected)
        deviation = step_deviation_in_buckets(expected)
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
            time,
            strategy=strategy,
            sizing=sizing,
            num_buckets=num_buckets,
            batches=expected.tally.batches,
            padded_length=max(expected.padded_length, self.total),
            repeated_examples=expected.tally.examples - self.lengths.count,
            effective_buckets=1
            / float(np.sum((expected.counts / self.lengths.count) ** 2)),
            mates_again=mates.again,
            length_correlation=mates.correlation,
            step_tokens_deviation=deviation,
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
        mates = simulated.mates
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
            time,
            strategy=strategy,
            sizing=sizing,
            num_buckets=simulated.batching.table.num_buckets,
            batches=batches
            or ranks * max(1, round(float(numbers.mean()) * simulated.scale / ranks)),
            padded_length=max(padded * simulated.scale, self.total),
            repeated_examples=simulated.repeated_examples,
            effective_buckets=simulated.effective_buckets,
            mates_again=mates.again,
            length_correlation=mates.correlation,
            step_tokens_deviation=simulated.step_tokens_deviation,
            simulated_epochs=len(simulated.shapes),
            batches_deviation=float(numbers.std(ddof=1)) * math.sqrt(simulated.scale),
        )

    def of_own(self, own: OwnBatches, batching: Batching) -> TimedRow:
        """Return the row of batches that were counted; `batching` holds the largest of them."""
        shapes = EpochShapes.of(own.shapes, with_targets=self.targets is not None)
        time = None
        if self.step_seconds is not None:
            mean = float(shapes.seconds(self.step_seconds).mean())
            seconds = mean * own.batches / self.dealing.world_size
            errors = shape_errors(self.step_seconds, shapes, seconds)
            time = EpochTime(seconds=seconds, errors=errors)
        priced = self._priced(
            batching,
            Tally.of(np.zeros_like(shapes.batch_sizes), shapes.batch_sizes),
            time,
            strategy="current",
            sizing="frontier",
            num_buckets=batching.table.num_buckets,
            batches=own.batches,
            padded_length=max(own.padded_length, self.total),
            repeated_examples=0,
            effective_buckets=own.effective_buckets,
            mates_again=own.mates_again,
        )
        return priced._replace(row=structs.replace(priced.row, pool_size=None))

    def uses(
        self, row: Row, lengths: Lengths, proven_by: ProvenBy | None
    ) -> list[BucketUse]:
        """Describe what each bucket of a row's table holds and costs over all ranks, those without examples too.

        Of pools the list is empty: their batches hold examples of several buckets. `lengths` are the true ones.
        """
        if row.uses_pools:
            return []
        table = Batching.of(row).table
        histogram = self.lengths.histogram
        expected = expected_batches(histogram, table, self.dealing)
        counts = expected.counts
        cells = expected.numbers * expected.batch_sizes * expected.lengths
        padded = np.bincount(expected.buckets, cells, table.num_buckets)
        batches = np.bincount(
            expected.tally.buckets, expected.tally.numbers, table.num_buckets
        )
        true = np.diff(lengths.histogram.total_of(np.cumsum(counts)), prepend=0.0)
        buckets = []
        for bucket in range(table.num_buckets):
            examples = int(counts[bucket])
            proof = None
            if proven_by is not None and examples:
                longest = float(histogram.lengths[expected.edges[bucket + 1] - 1])
                proof = proven_by(longest, min(row.batch_sizes[bucket], examples))
            buckets.append(
                BucketUse(
                    boundary=row.boundaries[bucket],
                    batch_size=row.batch_sizes[bucket],
                    examples=examples,
                    batches=int(batches[bucket]),
                    length=float(true[bucket]),
                    padded_length=max(float(padded[bucket]), float(true[bucket])),
                    proven_by=proof,
                )
            )
        return buckets

    def _simulated(self, batching: Batching) -> SimulatedEpochs:
        """Return the first epochs with these batches."""
        return simulate_epochs(batching, self.lengths, self.dealing, self.seed)

    def _priced(
        self,
        batching: Batching,
        tally: Tally,
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
            pool_size=batching.pool_size,
            batch_overhead=batching.batch_overhead,
            accumulate=batching.accumulate,
            equal_counts=batching.equal_counts,
            pair_cost=batching.pair_cost,
        )
        if time is not None:
            row = structs.replace(row, ranks=time.ranks, **time.fields())
        return TimedRow(row, time)
