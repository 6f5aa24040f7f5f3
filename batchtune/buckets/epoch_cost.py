"""Works out the cost of one epoch: of a bucket table on one rank exactly, on average over shuffles; else simulated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from msgspec import structs

from batchtune.epochs.batchers import Batching
from batchtune.epochs.expectation import ExpectedBatches, Tally, expected_batches
from batchtune.epochs.layout import ON_ONE_RANK, EpochShapes, RankSplit
from batchtune.epochs.measured_costs import (
    Costs,
    StepTimeFunction,
    TypicalTargets,
    batch_seconds,
)
from batchtune.epochs.simulation import (
    Mates,
    SimulatedEpochs,
    mates_in_buckets,
    simulate_epochs,
    step_deviation_in_buckets,
    with_costs,
)
from batchtune.epochs.step_times import StepTimes
from batchtune.epochs.table import BucketTable, SizeFunction
from batchtune.lengths import FloatArray, Lengths
from batchtune.results import (
    OwnBatches,
    RankTimes,
    Row,
    Sizing,
    StreamRow,
    SweepSettings,
)

RowT = TypeVar("RowT", Row, StreamRow)

# Times that differ by no more than two standard errors of their difference are taken for equal.
_WITHIN_ERRORS = 2.0
# Pools are cut for the least cost if that gains this much.
_LEAST_GAIN = 0.003
# Batches that stand for all in the errors, which need not be as exact as the time itself.
_REPRESENTATIVES = 512


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpochTime:
    """The time of one epoch as the ranks take batches, in seconds.

    Attributes:
        errors: Shape (sources,): its standard errors by the measurements that cause them; None: unknown.
        chance: The standard error that comes of simulating few epochs.
        deviation: How much simulated epochs differ; None: the time is a mean over all shuffles.
        ranks: The time by how batches are dealt; None of batches that are known one by one.
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
        """Return the mean time of simulated epochs; `shapes` are those of one, and stand for `scale` times as many."""
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

    def table_seconds(self, expected: ExpectedBatches) -> float:
        """Return the time of an epoch of a table's batches, shared out to ranks that never wait."""
        assert self.step_seconds is not None
        cost = batch_seconds(
            self.step_seconds, self.targets, expected.table.lower_edges
        )
        return expected.sum_of(cost) / self.dealing.world_size

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
            return self.of_epochs(strategy, sizing, self.simulated(batching))
        return self.of_table(
            strategy, sizing, batching.table.num_buckets, batching.table
        )

    def of_table(
        self, strategy: str, sizing: Sizing, num_buckets: int, table: BucketTable
    ) -> TimedRow:
        """Return the row of a table that holds all lengths, on average over shuffles.

        It is exact, but for the time that several ranks take: epochs are simulated.
        """
        histogram = self.lengths.histogram
        expected = expected_batches(histogram, table, self.dealing)
        counts = table.counts(histogram)
        time = None
        if self.step_seconds is not None:
            time = self._table_time(expected, self.step_seconds)
        return self._priced(
            Batching(table),
            expected.tally,
            mates_in_buckets(histogram, table, expected.tally),
            time,
            strategy=strategy,
            sizing=sizing,
            num_buckets=num_buckets,
            batches=expected.tally.batches,
            padded_length=max(expected.padded_length, self.total),
            repeated_examples=expected.tally.examples - self.lengths.count,
            effective_buckets=1 / float(np.sum((counts / counts.sum()) ** 2)),
            step_tokens_deviation=step_deviation_in_buckets(
                histogram, table, expected.tally, self.dealing
            ),
        )

    def of_epochs(
        self,
        strategy: str,
        sizing: Sizing,
        simulated: SimulatedEpochs,
        batches: int | None = None,
    ) -> TimedRow:
        """Return the row of pools: means over simulated epochs; `batches` where their number is known."""
        ranks = self.dealing.world_size
        numbers = np.array([len(shapes) for shapes in simulated.shapes])
        padded = float(np.mean([shapes.padded_length for shapes in simulated.shapes]))
        sizes = simulated.shapes[0].batch_sizes
        time = None
        if self.step_seconds is not None:
            time = self._simulated_time(simulated, self.step_seconds)
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
            step_tokens_deviation=simulated.step_tokens_deviation(self.dealing),
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

    def simulated(self, batching: Batching) -> SimulatedEpochs:
        """Return the first epochs with these batches."""
        return simulate_epochs(batching, self.lengths, self.dealing, self.seed)

    def best_cut(self, batching: Batching) -> SimulatedEpochs:
        """Return epochs in pools, or steps, as they are, or cut for the least cost if that gains more than 0.3%."""
        filled = self.simulated(batching)
        if self.step_seconds is None:
            return filled
        costed = with_costs(filled, self.step_seconds)
        if costed is None:
            return filled
        cheapest = self.simulated(costed)
        filled_seconds = filled.seconds(self.step_seconds, self.dealing).mean()
        if cheapest.seconds(self.step_seconds, self.dealing).mean() < filled_seconds * (
            1 - _LEAST_GAIN
        ):
            return cheapest
        return filled

    def _table_time(
        self, expected: ExpectedBatches, step_seconds: StepTimeFunction
    ) -> EpochTime:
        if self.dealing.world_size > 1:
            time = self._simulated_time(
                self.simulated(Batching(expected.table)), step_seconds
            )
            return replace(time, deviation=None)
        sizes = expected.batch_sizes
        lengths = expected.lengths
        targets = None
        if self.targets is not None:
            targets = self.targets(sizes, lengths, expected.table.lower_edges(lengths))
        seconds = self.table_seconds(expected)
        errors = time_errors(
            step_seconds, sizes, lengths, targets, expected.numbers, seconds
        )
        return EpochTime(seconds=seconds, errors=errors)

    def _simulated_time(
        self, simulated: SimulatedEpochs, step_seconds: StepTimeFunction
    ) -> EpochTime:
        dealing = self.dealing
        times = simulated.seconds(step_seconds, dealing)
        time = EpochTime.simulated(
            times, simulated.shapes[0], step_seconds, simulated.scale
        )
        if dealing.world_size == 1:
            return time
        other = replace(dealing, same_bucket=not dealing.same_bucket)
        dealt = simulate_epochs(simulated.batching, self.lengths, other, self.seed)
        by_same_bucket = {
            dealing.same_bucket: time.seconds,
            other.same_bucket: float(dealt.seconds(step_seconds, other).mean()),
        }
        in_turn = [shapes.seconds(step_seconds).sum() for shapes in simulated.shapes]
        all_steps = float(np.mean(in_turn)) * simulated.scale
        ranks = RankTimes(
            without_waiting_epoch_seconds=all_steps / dealing.world_size,
            independent_epoch_seconds=by_same_bucket[False],
            same_bucket_epoch_seconds=by_same_bucket[True],
        )
        return replace(time, ranks=ranks)

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


def time_errors(
    step_seconds: StepTimeFunction,
    sizes: FloatArray,
    lengths: FloatArray,
    targets: FloatArray | None,
    counts: FloatArray,
    seconds: float,
) -> FloatArray | None:
    """Return the errors of the time of an epoch with so many batches of each shape, whose steps take `seconds`.

    They are of first order in those of the measured step times; None if `step_seconds` knows no errors.
    """
    if not isinstance(step_seconds, StepTimes):
        return None
    return seconds * step_seconds.errors(sizes, lengths, targets, counts)


def shape_errors(
    step_seconds: StepTimeFunction, shapes: EpochShapes, seconds: float
) -> FloatArray | None:
    """Return the errors of the time of an epoch with these batches; some of them stand for all.

    On several ranks their waiting is taken to grow as the time does.
    """
    by_length = np.argsort(shapes.lengths, kind="stable")
    chosen = by_length[
        np.linspace(0, by_length.size - 1, _REPRESENTATIVES).astype(np.int64)
    ]
    targets = None
    if shapes.targets is not None:
        targets = shapes.targets[chosen]
    sizes = shapes.batch_sizes[chosen].astype(np.float64)
    return time_errors(
        step_seconds,
        sizes,
        shapes.lengths[chosen],
        targets,
        np.ones(chosen.size),
        seconds,
    )


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
