"""Works out the cost of one epoch: of a bucket table on one rank exactly, on average over shuffles; else simulated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from msgspec import structs

from batchtune.buckets.sweep_settings import SweepSettings
from batchtune.epochs.batch_order import EpochShapes
from batchtune.epochs.batchers import Batching
from batchtune.epochs.cost import StepTimes
from batchtune.epochs.expectation import ExpectedBatches, expected_batches
from batchtune.epochs.layout import ONE_RANK, Dealing, Ranks, Tally
from batchtune.epochs.measured_costs import Costs, StepSeconds, TypicalTargets, batch_seconds
from batchtune.epochs.randomness import Mates, mates_in_buckets
from batchtune.epochs.simulation import SimulatedEpochs, simulate_epochs, with_overhead
from batchtune.epochs.table import BucketTable
from batchtune.lengths import FloatArray, IntArray, Lengths
from batchtune.results import RankTimes, Row, Sizing, StreamRow

AnyRow = TypeVar("AnyRow", Row, StreamRow)

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpochCost:
    """The cost of one epoch over all ranks, whichever way it was worked out.

    Attributes:
        batches: Number of batches; of simulated pools their mean, a multiple of the ranks.
        padded_length: All cells of its batches, no less than the true length.
        time: None without step times.
    """

    batches: int
    padded_length: float
    time: EpochTime | None = None

    @property
    def seconds(self) -> float | None:
        """The time of the epoch; None if it is not known."""
        if self.time is None:
            return None
        return self.time.seconds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplerCost(EpochCost):
    """The cost of an epoch of a sampler that shuffles.

    Attributes:
        tally: The number of batches by size and bucket; of pools, as if of one bucket.
        repeated_examples: Examples that are dealt a second time.
        mates: How random the batches are.
        simulated_epochs: The number of simulated epochs, for means and their deviations; None: all is exact.
    """

    tally: Tally
    repeated_examples: int
    mates: Mates
    effective_buckets: float
    simulated_epochs: int | None = None
    batches_deviation: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pricing:
    """The data, step times and ranks that the cost of an epoch is worked out from.

    Attributes:
        lengths: The data set, each length as batches are padded to it.
        total: The true length of all examples.
        step_seconds: The time of one step; None: not known.
        targets: The typical targets of the data set; None without targets or step times.
        proven: Lengths → the largest batch size that is proven to fit, 0 without a proof; None: nothing was probed.
        seed: Of simulated epochs.
    """

    lengths: Lengths
    total: float
    max_batch_length: float
    step_seconds: StepSeconds | None = None
    targets: TypicalTargets | None = None
    ranks: Ranks = ONE_RANK
    proven: Callable[[FloatArray], IntArray] | None = None
    seed: int = 0

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
            ranks=Ranks(
                world_size=settings.world_size, same_bucket=settings.same_bucket, accumulate=settings.accumulate
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
        cost = batch_seconds(self.step_seconds, self.targets, expected.table.lower_edges)
        return expected.sum_of(cost) / self.ranks.world_size

    def of_table(self, table: BucketTable) -> SamplerCost:
        """Return the cost of an epoch with a table that holds all lengths, on average over shuffles.

        It is exact, but for the time that several ranks take: epochs are simulated.
        """
        histogram = self.lengths.histogram
        expected = expected_batches(histogram, table, self.ranks.dealing)
        counts = table.counts(histogram)
        return SamplerCost(
            tally=expected.tally,
            batches=expected.tally.batches,
            repeated_examples=expected.tally.examples - self.lengths.count,
            padded_length=max(expected.padded_length, self.total),
            mates=mates_in_buckets(histogram, table, expected.tally),
            effective_buckets=1 / float(np.sum((counts / counts.sum()) ** 2)),
            time=self._table_time(table, expected),
        )

    def _table_time(self, table: BucketTable, expected: ExpectedBatches) -> EpochTime | None:
        step = self.step_seconds
        if step is None:
            return None
        if self.ranks.world_size > 1:
            return replace(self._simulated_time(self._simulated(Batching(table)), step), deviation=None)
        seconds = self.table_seconds(expected)
        return EpochTime(seconds=seconds, errors=time_errors(expected, step, self.targets, seconds))

    def of_shapes(self, epochs: Sequence[EpochShapes], scale: float = 1.0) -> EpochCost:
        """Return the mean cost of epochs that have as many batches of each size; ranks take them in their order.

        The batches are `1 / scale` of all that the padded length and the time are of.
        """
        step = self.step_seconds
        padded = sum(epoch.padded_length for epoch in epochs) / len(epochs)
        time = None
        if step is not None:
            seconds = sum(epoch.epoch_seconds(step, self.ranks) for epoch in epochs) / len(epochs)
            time = EpochTime(seconds=seconds * scale)
        padded_length = max(padded * scale, self.total)
        return EpochCost(batches=len(epochs[0]), padded_length=padded_length, time=time)

    def cost_of(self, batching: Batching) -> SamplerCost:
        """Return the cost of an epoch that holds all lengths: exactly in buckets, by simulation in pools."""
        if batching.pool_size is None:
            return self.of_table(batching.table)
        return self._of_epochs(self._simulated(batching))

    def best_cut(self, batching: Batching) -> tuple[Batching, SamplerCost]:
        """Return pools as they are, or cut for the least cost if that gains more than 0.3%, with their cost."""
        filled = self._simulated(batching)
        if self.step_seconds is not None:
            costed = with_overhead(filled, self.step_seconds)
            if costed is not None:
                cheapest = self._simulated(costed)
                filled_seconds = filled.seconds(self.step_seconds, self.ranks).mean()
                if cheapest.seconds(self.step_seconds, self.ranks).mean() < filled_seconds * (1 - _LEAST_GAIN):
                    return costed, self._of_epochs(cheapest)
        return batching, self._of_epochs(filled)

    def _simulated(self, batching: Batching) -> SimulatedEpochs:
        return simulate_epochs(batching, self.lengths, self.ranks.dealing, self.seed)

    def _of_epochs(self, simulated: SimulatedEpochs) -> SamplerCost:
        """Return the mean cost of simulated epochs in pools."""
        ranks = self.ranks.world_size
        scale = simulated.scale
        numbers = np.array([len(shapes) for shapes in simulated.shapes])
        padded = float(np.mean([shapes.padded_length for shapes in simulated.shapes]))
        time = None
        if self.step_seconds is not None:
            time = self._simulated_time(simulated, self.step_seconds)
        return SamplerCost(
            tally=Tally.of(np.zeros_like(simulated.shapes[0].batch_sizes), simulated.shapes[0].batch_sizes),
            batches=ranks * max(1, round(float(numbers.mean()) * scale / ranks)),
            repeated_examples=simulated.repeated_examples,
            padded_length=max(padded * scale, self.total),
            mates=simulated.mates,
            effective_buckets=simulated.effective_buckets,
            simulated_epochs=len(simulated.shapes),
            batches_deviation=float(numbers.std(ddof=1)) * math.sqrt(scale),
            time=time,
        )

    def _simulated_time(self, simulated: SimulatedEpochs, step: StepSeconds) -> EpochTime:
        ranks = self.ranks.world_size
        times = simulated.seconds(step, self.ranks)
        seconds = float(times.mean())
        # An epoch has as many times the batches that were simulated, which are independent.
        deviation = float(times.std(ddof=1)) / math.sqrt(simulated.scale)
        by_dealing = None
        if ranks > 1:
            other = replace(self.ranks, same_bucket=not self.ranks.same_bucket)
            dealt = simulate_epochs(simulated.batching, self.lengths, other.dealing, self.seed)
            other_seconds = float(dealt.seconds(step, other).mean())
            by_same_bucket = {self.ranks.same_bucket: seconds, other.same_bucket: other_seconds}
            all_steps = float(np.mean([shapes.seconds(step).sum() for shapes in simulated.shapes]))
            by_dealing = RankTimes(
                without_waiting_epoch_seconds=all_steps * simulated.scale / ranks,
                independent_epoch_seconds=by_same_bucket[False],
                same_bucket_epoch_seconds=by_same_bucket[True],
            )
        return EpochTime(
            seconds=seconds,
            errors=shape_errors(step, simulated.shapes[0], seconds),
            chance=float(times.std(ddof=1)) / math.sqrt(times.size),
            deviation=deviation,
            ranks=by_dealing,
        )

    def row(self, strategy: str, sizing: Sizing, num_buckets: int, batching: Batching, cost: SamplerCost) -> Row:
        """Return the row of a sweep for these batches and their cost."""
        table = batching.table
        histogram = self.lengths.histogram
        tally = cost.tally
        largest, longest = batching.largest_batches(histogram)
        row = Row(
            strategy=strategy,
            sizing=sizing,
            num_buckets=num_buckets,
            used_buckets=longest.size,
            boundaries=table.boundaries.tolist(),
            batch_sizes=table.batch_sizes.tolist(),
            batches=cost.batches,
            padded_length=cost.padded_length,
            padding_ratio=self.padding_ratio(cost.padded_length),
            fill=self.total / (cost.batches * self.max_batch_length),
            mean_batch_size=(self.lengths.count + cost.repeated_examples) / cost.batches,
            largest_padded_length=float((largest * longest).max()),
            effective_buckets=cost.effective_buckets,
            estimated_epoch_seconds=cost.seconds,
            smallest_batch_size=int(tally.batch_sizes.min()),
            largest_batch_size=int(tally.batch_sizes.max()),
            batch_size_variation=tally.batch_size_variation,
            steps=self.ranks.steps(cost.batches),
            unproven=None if self.proven is None else int(np.count_nonzero(largest > self.proven(longest))),
            repeated_examples=cost.repeated_examples,
            mates_again=cost.mates.again,
            length_correlation=cost.mates.correlation,
            pool_size=batching.pool_size,
            batch_overhead=batching.batch_overhead,
            simulated_epochs=cost.simulated_epochs,
            batches_deviation=cost.batches_deviation,
        )
        if cost.time is None:
            return row
        return structs.replace(row, ranks=cost.time.ranks, **cost.time.fields())


def estimated_epoch_seconds(
    lengths: Lengths, table: BucketTable, step_seconds: StepSeconds, *, drop_last: bool = False
) -> float:
    """Return the time of all of an epoch's training steps on one rank, on average over shuffles."""
    expected = expected_batches(lengths.histogram, table, Dealing(drop_last=drop_last))
    return expected.sum_of(batch_seconds(step_seconds, TypicalTargets.of(lengths), table.lower_edges))


def time_errors(
    expected: ExpectedBatches, step_seconds: StepSeconds, targets: TypicalTargets | None, seconds: float
) -> FloatArray | None:
    """Return the errors of an epoch's time, to first order in those of the measured step times.

    None if `step_seconds` knows no errors.
    """
    sizes = expected.batch_sizes
    lengths = expected.lengths
    counts = expected.numbers
    if targets is None:
        return _errors(step_seconds, (sizes, lengths), counts, seconds)
    typical = targets(sizes, lengths, expected.table.lower_edges(lengths))
    return _errors(step_seconds, (sizes, lengths, typical), counts, seconds)


def shape_errors(step_seconds: StepSeconds, shapes: EpochShapes, seconds: float) -> FloatArray | None:
    """Return the errors of the time of an epoch with these batches; some of them stand for all.

    On several ranks their waiting is taken to grow as the time does.
    """
    by_length = np.argsort(shapes.lengths, kind="stable")
    chosen = by_length[np.linspace(0, by_length.size - 1, _REPRESENTATIVES).astype(np.int64)]
    of_chosen = [shapes.batch_sizes[chosen].astype(np.float64), shapes.lengths[chosen]]
    if shapes.targets is not None:
        of_chosen.append(shapes.targets[chosen])
    return _errors(step_seconds, tuple(of_chosen), np.ones(chosen.size), seconds)


def _errors(
    step_seconds: StepSeconds, shapes: tuple[FloatArray, ...], counts: FloatArray, seconds: float
) -> FloatArray | None:
    """Return the errors of the time of an epoch with so many of each shape (sizes, lengths and maybe targets)."""
    if not isinstance(step_seconds, StepTimes):
        return None
    sizes, lengths, *targets = shapes
    total, gradient = step_seconds.sensitivities(sizes, lengths, targets[0] if targets else None, counts)
    return gradient * (seconds / total) * step_seconds.sigmas


def with_equals(timed: Sequence[tuple[AnyRow, EpochTime | None]]) -> list[AnyRow]:
    """Return the rows, each marked by whether its time can be told from the fastest one's."""
    equal = equal_to_best([time for _, time in timed])
    return [structs.replace(row, equal_to_best=same) for (row, _), same in zip(timed, equal, strict=True)]


def equal_to_best(times: Sequence[EpochTime | None]) -> list[bool | None]:
    """Return which times can't be told from the least: they differ by at most two standard errors of the difference.

    Errors that both have in common cancel: the difference's is √Σ (error_a,p - error_b,p)², to which those of
    simulating few epochs are added. None for each if any time or its errors are unknown.
    """
    known = [time for time in times if time is not None and time.errors is not None]
    if not known or len(known) < len(times):
        return [None] * len(times)
    least = min(known, key=lambda time: time.seconds)
    equal: list[bool | None] = []
    for time in known:
        apart = np.subtract(time.errors, least.errors)  # type: ignore[arg-type]
        error = float(np.linalg.norm([*apart, time.chance, least.chance]))
        equal.append(time.seconds - least.seconds <= _WITHIN_ERRORS * error)
    return equal
