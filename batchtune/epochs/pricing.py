"""Works out the cost of one epoch: exactly, over all shuffles, for a bucket table on one rank; else by simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from batchtune.epochs import (
    ON_ONE_RANK,
    EpochBatches,
    EpochShapes,
    RankSplit,
    edges_of,
    lay_out,
    shapes_of,
)
from batchtune.epochs.batchers import Batching
from batchtune.epochs.cost_model import nonnegative
from batchtune.epochs.expectation import (
    EpochTime,
    Mates,
    Tally,
    effective_buckets,
    expected_batches,
    mates_in_buckets,
    mates_in_cuts,
    shape_errors,
    step_deviation,
    step_deviation_in_buckets,
    sums_between,
)
from batchtune.epochs.measured_costs import (
    Costs,
    ProvenBy,
    StepTimeFunction,
    TypicalTargets,
    batch_seconds,
    share_of,
)
from batchtune.epochs.table import BucketTable, Limits, SizeFunction, batch_sizes_for
from batchtune.errors import UsageError
from batchtune.lengths import FloatArray, IntArray, Lengths, ceil_div, largest_first
from batchtune.results import (
    Baseline,
    BucketUse,
    Keep,
    LowerBound,
    OwnBatches,
    RankTimes,
    Row,
    Sizing,
    SweepSettings,
)
from batchtune.units import counted

# At least this many examples (for each rank), and pools, stand for more: an epoch's time is then known to 0.1%.
_EXAMPLES = 1 << 17
_OF_A_RANK = 1 << 14
_POOLS = 4
# Cutting an optimizer step takes a millisecond: this many examples stand for all, in at least some steps.
_IN_STEPS = 1 << 13
_LEAST_STEPS = 16
# Simulate up to 8 epochs of few examples, until this many were batched; with a batch overhead that takes longer.
_MOST_EPOCHS = 8
_FILLED = 1 << 18
_CUT = 1 << 16
# Epochs of more examples differ so little that two are enough.
_MANY = 1 << 18
# In pools of more batches, cutting for the least cost gains next to nothing.
_MOST_BATCHES = 40
# Pools are cut for the least cost if that gains this much.
_LEAST_GAIN = 0.003
# More examples in order are represented by this many, evenly spaced.
MOST_SIMULATED = 1 << 24
# As Transformers' length-grouped batches are sorted.
_MEGABATCHES = 50


@dataclass(frozen=True, eq=False)
class SimulatedEpochs:
    """Some epochs of a data set, or of a sample that stands for it.

    Attributes:
        lengths: The data set.
        sample: The examples that were batched.
        shapes: The batches of each epoch.
    """

    batching: Batching
    lengths: Lengths
    dealing: RankSplit
    seed: int
    sample: Lengths
    cuts: list[EpochBatches]
    shapes: list[EpochShapes]

    @property
    def scale(self) -> float:
        """The examples of the data set / those that were batched."""
        return self.lengths.count / self.sample.count

    @property
    def repeated_examples(self) -> int:
        """How many examples an epoch of the data set deals twice, on average."""
        return round(
            self.scale
            * float(np.mean([cut.layout.repeated_examples for cut in self.cuts]))
        )

    @property
    def mates(self) -> Mates:
        """How random the batches of the data set are: in pools as large, two examples share one less often."""
        mates = self._mates_of_sample
        shares = [
            _share_of_pool(self.batching, lengths.count)
            for lengths in (self.lengths, self.sample)
        ]
        return replace(mates, again=mates.again * shares[0] / shares[1])

    @property
    def effective_buckets(self) -> float:
        """How often mates meet again, compared with batches drawn from all examples."""
        return effective_buckets(self._mates_of_sample.again, self.cuts[0].layout)

    @property
    def step_tokens_deviation(self) -> float:
        """The standard deviation of the true length of a step / its mean."""
        size = self.batching.pool_size
        if self.batching.accumulate is not None and size is not None:
            # Of so many random examples.
            values = self.lengths.values
            share = (values.size - size) / (size * max(1, values.size - 1))
            return float(values.std() / values.mean() * math.sqrt(share))
        cut = self.cuts[0]
        edges = edges_of(cut.layout.batch_sizes)
        totals = sums_between(self.sample.values[cut.held()], edges)
        totals = totals.reshape(-1, self.dealing.together).sum(axis=1)
        numbers = np.full(totals.size, self.scale)
        return step_deviation(totals, 0.0, numbers, self.dealing)

    @cached_property
    def _mates_of_sample(self) -> Mates:
        return mates_in_cuts(self.cuts, self.sample.values)

    def seconds(self, step_seconds: StepTimeFunction) -> FloatArray:
        """Return the time of each epoch of the data set, shape (epochs,), as ranks take the batches in their order."""
        times = [
            shapes.epoch_seconds(step_seconds, self.dealing) for shapes in self.shapes
        ]
        return self.scale * np.array(times)

    def time(self, step_seconds: StepTimeFunction) -> EpochTime:
        """Return the time of an epoch of the data set, and that of several ranks by how batches are dealt."""
        dealing = self.dealing
        time = EpochTime.simulated(
            self.seconds(step_seconds), self.shapes[0], step_seconds, self.scale
        )
        if dealing.world_size == 1:
            return time
        other = replace(dealing, same_bucket=not dealing.same_bucket)
        dealt = simulate_epochs(self.batching, self.lengths, other, self.seed)
        by_same_bucket = {
            dealing.same_bucket: time.seconds,
            other.same_bucket: float(dealt.seconds(step_seconds).mean()),
        }
        in_turn = [shapes.seconds(step_seconds).sum() for shapes in self.shapes]
        all_steps = float(np.mean(in_turn)) * self.scale
        ranks = RankTimes(
            without_waiting_epoch_seconds=all_steps / dealing.world_size,
            independent_epoch_seconds=by_same_bucket[False],
            same_bucket_epoch_seconds=by_same_bucket[True],
        )
        return replace(time, ranks=ranks)

    def cheapest(self, step_seconds: StepTimeFunction) -> SimulatedEpochs:
        """Return epochs in pools, or steps, as they are, or cut for the least cost if that gains more than 0.3%."""
        costed = _with_costs(self, step_seconds)
        if costed is None:
            return self
        cheapest = simulate_epochs(costed, self.lengths, self.dealing, self.seed)
        filled_seconds = self.seconds(step_seconds).mean()
        if cheapest.seconds(step_seconds).mean() < filled_seconds * (1 - _LEAST_GAIN):
            return cheapest
        return self


def simulate_epochs(
    batching: Batching, lengths: Lengths, dealing: RankSplit, seed: int
) -> SimulatedEpochs:
    """Simulate the sampler's first epochs with this seed, by its own steps.

    If a sample stands for all examples, its pools have the same size, so its batches differ only by
    chance; but two examples share a pool more often, by a known ratio.
    """
    sample = lengths.evenly(_MANY)
    filled = _FILLED if batching.batch_overhead is None else _CUT
    if batching.uses_pools:
        examples = max(_EXAMPLES, _OF_A_RANK * dealing.world_size)
        pools = max(_POOLS, batching.pools_of(examples))
        if batching.accumulate is not None:
            pools = max(_LEAST_STEPS, batching.pools_of(_IN_STEPS))
            filled = _IN_STEPS
        sample = _of_pools(lengths, pools, batching.pools_of(lengths.count))
    number = _epochs_of(sample, filled)
    batcher = batching.batcher(sample.values)
    cuts = []
    shapes = []
    for drawing, cut in batcher.first_epochs(number, dealing, seed):
        cuts.append(cut)
        shapes.append(shapes_of(cut, drawing, sample))
    return SimulatedEpochs(batching, lengths, dealing, seed, sample, cuts, shapes)


def _with_costs(
    filled: SimulatedEpochs, step_seconds: StepTimeFunction
) -> Batching | None:
    """Return the same batching with what batches cost beyond their padded length; None if that gains next to nothing.

    Of pools that is a batch overhead: that of the straight line through the times of an epoch's steps by their padded
    lengths. Of how many micro-batches optimizer steps are is fixed: there it is the cost of a pair of positions. Times
    are taken for a sum of a constant, the padded length, and its product with the length.
    """
    batching = filled.batching
    shapes = filled.shapes[0]
    padded = shapes.padded_lengths
    if batching.accumulate is not None:
        seconds = shapes.seconds(step_seconds)
        terms = [np.ones_like(padded), padded, padded * shapes.lengths]
        columns = np.stack(terms, axis=1) / seconds[:, np.newaxis]
        _, each, pair = nonnegative(columns, np.ones(seconds.size))
        if not (each > 0 and pair > 0):
            return None
        return replace(batching, pair_cost=float(f"{pair / each:.3g}"))
    pools = batching.pools_of(filled.sample.count)
    if len(shapes) > _MOST_BATCHES * pools or np.ptp(padded) == 0:
        return None
    each, fixed = np.polyfit(padded, shapes.seconds(step_seconds), 1)
    if not (each > 0 and fixed > 0):
        return None
    return replace(batching, batch_overhead=float(f"{fixed / each:.3g}"))


def simulate_sorted(
    lengths: Lengths, batch_size: int, dealing: RankSplit
) -> tuple[list[EpochShapes], float]:
    """Simulate the epoch of batches in order of length; return all examples / those that were batched, too."""
    sample = lengths.evenly(MOST_SIMULATED)
    ranks = RankSplit(world_size=dealing.world_size)
    layout = lay_out(np.array([sample.count]), np.array([batch_size]), ranks)
    cut = EpochBatches(np.arange(sample.count), layout)
    shapes = cut.shapes(sample.values, sample.targets)
    return [shapes], lengths.count / sample.count


def simulate_length_grouped(
    lengths: Lengths, batch_size: int, dealing: RankSplit, seed: int
) -> tuple[list[EpochShapes], float]:
    """Simulate epochs of Transformers' length-grouped batches; return all examples / those that were batched, too.

    Ranks take batches in turn. The last ones are completed with examples from the beginning, as
    Accelerate does, so that all ranks have equally many.
    """
    # The Trainer groups the batches of a whole step.
    grouped_size = batch_size * dealing.accumulate
    megabatch = megabatch_size(lengths.count, grouped_size)
    sample = _of_pools(
        lengths,
        max(_POOLS, ceil_div(_EXAMPLES, megabatch)),
        ceil_div(lengths.count, megabatch),
    )
    completed = sample.count
    if dealing.world_size > 1:
        step = batch_size * dealing.world_size
        completed = ceil_div(sample.count, step) * step
    sizes = np.diff(np.arange(0, completed, batch_size), append=completed)
    shapes = []
    for epoch in range(_epochs_of(sample, _FILLED)):
        shuffled = np.random.default_rng([seed, epoch]).permutation(sample.count)
        order = np.resize(
            length_grouped(sample.values, grouped_size, shuffled), completed
        )
        cut = EpochBatches.in_row(order, sizes, sample.count)
        shapes.append(cut.shapes(sample.values, sample.targets))
    return shapes, lengths.count / sample.count


def megabatch_size(count: int, batch_size: int) -> int:
    """Return how many examples are sorted together: 50 batches, or a quarter of the data if that is less."""
    return batch_size * max(1, min(count // (batch_size * 4), _MEGABATCHES))


def length_grouped(
    lengths: FloatArray, batch_size: int, shuffled: IntArray
) -> IntArray:
    """Return the examples of an epoch in their order, from a random order of all; consecutive ones form batches.

    As `get_length_grouped_indices` of Transformers (5.23): each megabatch is sorted, the longest example first, and the
    longest of all comes first in the epoch. Both arrays have the shape (count,).
    """
    size = megabatch_size(lengths.size, batch_size)
    grouped: IntArray = shuffled.copy()
    for start in range(0, grouped.size, size):
        megabatch = shuffled[start : start + size]
        grouped[start : start + size] = megabatch[largest_first(lengths[megabatch])]
    longest = size * int(np.argmax(lengths[grouped[::size]]))
    grouped[[0, longest]] = grouped[[longest, 0]]
    return grouped


def _of_pools(lengths: Lengths, pools: int, in_all: int) -> Lengths:
    """Return the examples of so many of all pools, as large as those of all examples."""
    return lengths.evenly(lengths.count * min(pools, in_all) // in_all)


def _epochs_of(sample: Lengths, in_all: int) -> int:
    """Return how many epochs to simulate, to batch so many examples."""
    if sample.count <= _MANY:
        return int(np.clip(in_all // sample.count, 3, _MOST_EPOCHS))
    return 2


def _share_of_pool(batching: Batching, count: int) -> float:
    """Return the probability that a second example is in the pool of a first one."""
    each = count / batching.pools_of(count)
    if each > 1:
        return (each - 1) / (count - 1)
    return 1.0


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

        It is exact, except for the time on several ranks, which comes from simulated epochs.
        """
        expected = expected_batches(self.lengths.histogram, table, self.dealing)
        mates = mates_in_buckets(expected)
        deviation = step_deviation_in_buckets(expected)
        batching = Batching(table)
        time = None
        if self.step_seconds is not None and self.dealing.world_size > 1:
            time = replace(
                self._simulated(batching).time(self.step_seconds), deviation=None
            )
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
            time = EpochTime(
                seconds=seconds, errors=shape_errors(self.step_seconds, shapes, seconds)
            )
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


# Halvings of the range in which a share is searched.
_HALVINGS = 30
# Lengths and shares of the batch sizes at which throughput is compared.
_OF_THROUGHPUT = 128
_SHARES = 128


def share_for(lengths: Lengths, limits: Limits, fewest: int) -> float:
    """Return the largest share of the fitting batch sizes that leaves every way to batch at least `fewest` batches.

    An example takes up at least the share of a batch that it would take up in a full batch of
    examples of its own length, or of a longer one.
    """
    histogram = lengths.histogram
    fits: IntArray = np.zeros(histogram.lengths.size, dtype=np.int64)
    if limits.frontier is not None:
        fits = limits.frontier(histogram.lengths)

    def has_enough(share: float) -> bool:
        by_length = batch_sizes_for(histogram.lengths, share * limits.max_batch_length)
        sizes = np.maximum(by_length, share_of(fits, share)).astype(np.float64)
        if limits.max_batch_size is not None:
            sizes = np.minimum(sizes, limits.max_batch_size)
        return bool(
            # Rounding must not make it one too many.
            np.sum(histogram.counts / greatest_from_here_on(sizes)) * (1 - 1e-12)
            > fewest - 1
        )

    if has_enough(1.0):
        return 1.0
    share = 0.0
    too_large = 1.0
    for _ in range(_HALVINGS):
        middle = (share + too_large) / 2
        if has_enough(middle):
            share = middle
        else:
            too_large = middle
    return share


def share_within(
    fraction: float, pricing: Pricing, limits: Limits, keep: Keep
) -> float:
    """Return the smallest share of the fitting batch sizes at which full batches reach a fraction of the throughput.

    The throughput is that of the best share, in examples a second, by the times of batches of equal
    lengths. Raises UsageError if these are not known, or steps are kept.
    """
    if keep != "nothing":
        raise UsageError(
            f"--throughput-fraction makes batches smaller, but --keep {keep} already decides their size",
            "Leave out one of the two, or add --keep nothing.",
        )
    if pricing.step_seconds is None:
        raise UsageError(
            "--throughput-fraction needs step times, and none are known",
            "Measure them with `batchtune probe-oom`, or leave it out.",
        )
    lengths = pricing.lengths.evenly(_OF_THROUGHPUT)
    fits = limits.largest_sizes(lengths.values)
    cost = batch_seconds(pricing.step_seconds, pricing.targets)
    shares = np.geomspace(1 / fits.max(), 1.0, _SHARES)
    seconds = []
    for share in shares:
        sizes = share_of(fits, share).astype(np.float64)
        seconds.append(float((cost(sizes, lengths.values) / sizes).sum()))
    best = min(seconds)
    reaching = [seconds_of_share * fraction <= best for seconds_of_share in seconds]
    return float(shares[reaching.index(True)])


def check_min_steps(min_steps: int, lengths: Lengths, dealing: RankSplit) -> None:
    """Raise UsageError if even batches of one example make fewer optimizer steps."""
    if dealing.fewest_batches(min_steps) <= lengths.count:
        return
    ranks = ""
    if dealing.batches_per_step > 1:
        ranks = f" on {counted(dealing.world_size, 'rank')}, with an accumulation of {dealing.accumulate:,}"
    raise UsageError(
        f"--min-steps {min_steps}: an epoch of {counted(lengths.count, 'example')} has at most "
        f"{counted(dealing.steps(lengths.count), 'optimizer step')}{ranks}, with batches of one",
        "Lower it.",
    )


def greatest_from_here_on(values: FloatArray) -> FloatArray:
    """Return the greatest of each value and those after it."""
    return np.maximum.accumulate(values[::-1])[::-1]


def fixed_baselines(
    pricing: Pricing, limits: Limits, fewest: int = 1
) -> list[Baseline]:
    """Return the costs of the largest fixed batch size that fits the longest examples and makes `fewest` batches.

    The examples are shuffled, sorted by length, or grouped as Transformers' `group_by_length` does.
    As for the rows, all ranks have equally many batches: the first ones are split in two until they
    have. All examples are of one bucket, so the batches are also those of ranks that take the same
    bucket, but for the cut of the last ones. The frontier decides what fits, without one
    max_batch_length.
    """
    lengths = pricing.lengths
    longest = lengths.histogram.lengths[-1:]
    size = int(limits.largest_sizes(longest)[0])
    if fewest > 1:
        size = max(1, min(size, (lengths.count - 1) // (fewest - 1)))
    table = BucketTable(longest, np.array([size]))
    independent = replace(pricing, dealing=replace(pricing.dealing, same_bucket=False))
    shuffled = independent.of_table("fixed", "length", 1, table).row
    in_order = simulate_sorted(lengths, size, pricing.dealing)
    grouped = simulate_length_grouped(lengths, size, pricing.dealing, pricing.seed)
    costs = {
        "fixed-random": (shuffled.padded_length, shuffled.estimated_epoch_seconds),
        "fixed-sorted": pricing.mean_cost(*in_order),
        "length-grouped": pricing.mean_cost(*grouped),
    }
    deviations = {"fixed-random": shuffled.step_tokens_deviation}
    return [
        Baseline(
            name=name,
            batch_size=size,
            batches=shuffled.batches,
            padded_length=padded_length,
            padding_ratio=pricing.padding_ratio(padded_length),
            estimated_epoch_seconds=seconds,
            steps=shuffled.steps,
            step_tokens_deviation=deviations.get(name),
        )
        for name, (padded_length, seconds) in costs.items()
    ]


def lower_bound(
    pricing: Pricing,
    limits: Limits,
    compared: Sequence[Row | Baseline],
    fewest: int = 1,
) -> LowerBound:
    """Return the bound that no bucket table can beat under these limits.

    An example takes at least the share of a batch that it would take among examples of its own
    length, or of a longer example if that is smaller (a frontier need not be monotone). All ranks
    have equally many batches, and none ever waits. The time per example is taken to be least in a
    batch of the largest size, its half, its quarter and so on; and the epoch's is no higher than
    any of those `compared`, as measured step times need not be that regular. The bound has at least
    `fewest` batches.
    """
    histogram = pricing.lengths.histogram
    ranks = pricing.dealing.world_size
    sizes = [limits.batch_sizes(histogram.lengths, sizing) for sizing in limits.sizings]
    whole = np.max(sizes, axis=0).astype(np.float64)
    # A batch can't be filled better than to max_batch_length exactly; whole examples reach that only by luck.
    capacity = np.maximum(whole, limits.max_batch_length / histogram.lengths)
    if limits.max_batch_size is not None:
        capacity = np.minimum(capacity, limits.max_batch_size)
    shares = float(np.sum(histogram.counts / greatest_from_here_on(capacity)))
    seconds = [
        other.estimated_epoch_seconds
        for other in compared
        if other.estimated_epoch_seconds is not None
    ]
    if pricing.step_seconds is not None:
        largest = greatest_from_here_on(whole)
        halvings = np.arange(np.ceil(np.log2(largest.max())) + 1)[:, np.newaxis]
        size = np.maximum(1.0, np.floor(largest / 2**halvings))
        shapes = [size, np.broadcast_to(histogram.lengths, size.shape)]
        targets = pricing.targets
        # A batch's longest is at least the mean of its examples' targets.
        if targets is not None:
            shapes.append(np.broadcast_to(targets.means, size.shape))
        lowest = np.min(pricing.step_seconds(*shapes) / size, axis=0)
        seconds.append(
            float(np.sum(histogram.counts * -greatest_from_here_on(-lowest))) / ranks
        )
    return LowerBound(
        # Rounding must not make it one too many.
        batches=ranks
        * max(ceil_div(fewest, ranks), math.ceil(shares / ranks * (1 - 1e-12))),
        padded_length=pricing.total,
        estimated_epoch_seconds=min(seconds, default=None),
    )
