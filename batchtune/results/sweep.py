"""The records of `sweep.json`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from batchtune.results.shared import (
    LESS_IS_BETTER,
    ROUNDING,
    Amount,
    Correlation,
    Cost,
    CostCount,
    Costed,
    CostRatio,
    CostShare,
    CostSize,
    Count,
    Gain,
    GainRatio,
    Length,
    LengthsSummary,
    Positive,
    RankTimes,
    Record,
    Result,
    Seed,
    Share,
    Size,
    TargetLength,
    wrong_limit,
    wrong_rows,
    wrong_settings,
    wrong_table,
)
from batchtune.units import counted, format_number

Sizing = Literal["length", "frontier"]
MOST_BUCKETS = 1000
_Ranks = Annotated[int, msgspec.Meta(ge=1, le=16_384)]
_Part = Annotated[float, msgspec.Meta(gt=0, le=1)]


class SweepSettings(Record, frozen=True, kw_only=True):
    """The settings of a sweep, from the command line to `sweep.json`.

    Attributes:
        strategies: Names; empty: all of them.
        pool_sizes: Examples of a pool; empty: from a thousand to all, as the data allow.
        seed: Of the shuffles of the sampler that is written, and of simulated epochs.
        multiple_of: Boundaries, and the lengths of batches, are rounded up to multiples of this.
        world_size: Number of ranks; with same_bucket all take batches of one bucket at each step.
        accumulate: Ranks wait for each other only after so many batches.
        throughput_fraction: The share of the best throughput that is enough.
        min_randomness: The least probability, for the recommended row, that mates do not meet again in the next epoch.
    """

    strategies: tuple[str, ...] = ()
    num_buckets: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=1, le=MOST_BUCKETS)], ...], msgspec.Meta(min_length=1)
    ] = tuple(range(10, 21))
    pool_sizes: tuple[Size | Literal["all"], ...] = ()
    max_batch_size: Size | None = None
    seed: Seed = 0
    multiple_of: Annotated[float, msgspec.Meta(gt=0, le=1e15)] | None = None
    world_size: _Ranks = 1
    same_bucket: bool = False
    accumulate: _Ranks = 1
    throughput_fraction: _Part = 0.95
    min_randomness: _Part | None = None


class EpochFigures(Record, frozen=True, kw_only=True):
    """The figures of an epoch's batches, whichever way they are made; `Row` and `StreamRow` describe them."""

    boundaries: list[Length] = msgspec.field(default_factory=list)
    batch_sizes: list[Size] = msgspec.field(default_factory=list)
    batches: CostSize
    padded_length: Annotated[Positive, LESS_IS_BETTER]
    padding_ratio: CostShare
    fill: GainRatio
    mean_batch_size: Gain
    smallest_batch_size: Size
    largest_batch_size: Size
    batch_size_variation: CostRatio
    largest_padded_length: Amount
    effective_buckets: Cost
    mates_again: CostShare
    length_correlation: Correlation | None = None
    estimated_epoch_seconds: Cost | None = None
    estimated_epoch_error_seconds: Cost | None = None
    equal_to_best: bool | None = None
    batches_deviation: Cost | None = None
    epoch_seconds_deviation: Cost | None = None
    unproven: CostCount | None = None

    @property
    def randomness(self) -> float:
        """The probability that two mates are not mates again in the next epoch."""
        return 1 - self.mates_again


class Row(EpochFigures, frozen=True, kw_only=True):
    """One bucket table of a sweep, or one size of pools, and the cost of an epoch with it.

    For pools the table says how many examples fit with the longest of a batch; their figures are means of simulated
    epochs. On several ranks the batches are those of all ranks together, as batchtune's samplers deal them: every rank
    has the same number, so some are split, or (in the same bucket) the remainder is dealt in smaller ones.

    Attributes:
        num_buckets: Requested, or how many batch sizes pools have; used_buckets: how many hold an example.
        boundaries, batch_sizes: The table, one entry a bucket; the boundary is an inclusive upper edge.
        batches: Batches of one epoch, `drop_last` off; a multiple of the ranks.
        padded_length: Cells of the epoch's batches, expected over shuffles.
        padding_ratio: Padded cells / all cells; those of an example dealt a second time count as padded.
        fill: True length, of each example once, / (batches × max_batch_length).
        mean_batch_size: Examples in a batch, counting one dealt twice twice.
        largest_padded_length: Of any batch that this table can form on these data.
        effective_buckets: 1 / Σ p², p the share of the examples in each bucket. For pools: mates_again / the same for
            batches of the same sizes drawn from all examples.
        estimated_epoch_seconds: On all ranks, each step as long as its slowest rank takes; None without step times.
        estimated_epoch_error_seconds: Its standard error; None without step times.
        equal_to_best: Whether it differs from the lowest estimated time by no more than the error of the difference.
        smallest_batch_size, largest_batch_size: Of the epoch's batches, including those that are not full.
        batch_size_variation: Their standard deviation / their mean.
        steps: Optimizer steps of one epoch, on `world_size` ranks with gradients accumulated.
        ranks: The cost of the ranks' waiting for each other; None for one rank, or without step times.
        unproven: How many buckets have a batch size that is not proven: no batch at least as large in every respect
            ran, alone and in turns. None without a probe.
        repeated_examples: How many examples are dealt a second time, to give every rank the same number of batches.
        mates_again: The probability that two examples of one batch share a batch again in the next epoch.
        length_correlation: Of the lengths of two examples of one batch; None if all lengths are equal.
        pool_size, batch_overhead: As in `sampler.yaml`; pool_size is None if batches are made in buckets.
        simulated_epochs: How many epochs the figures are means of; None: they are exact expectations.
        batches_deviation, epoch_seconds_deviation: From epoch to epoch; None for exact expectations.
    """

    strategy: str
    sizing: Sizing
    num_buckets: Size
    used_buckets: CostCount
    steps: CostCount
    ranks: RankTimes | None = None
    repeated_examples: CostCount = 0
    pool_size: Size | None = None
    batch_overhead: Amount | None = None
    simulated_epochs: Count | None = None

    @property
    def name(self) -> str:
        """The row's name in sentences: `optimal with 12 buckets`, `pools of 6800 examples`."""
        if self.pool_size is not None:
            return f"pools of {format_number(self.pool_size)} examples"
        return f"{self.strategy} with {counted(len(self.boundaries), 'bucket')}"

    @property
    def sized_name(self) -> str:
        """The same, and where a table's batch sizes come from: `optimal with 12 buckets sized by the frontier`."""
        return self.name + (" sized by the frontier" if self.pool_size is None and self.sizing == "frontier" else "")

    @property
    def sizes_in_use(self) -> int:
        """How many buckets hold examples, and so need a batch size that fits."""
        return self.used_buckets

    def problems(self) -> Iterator[str]:
        """Check the table."""
        yield from wrong_table(self.boundaries, self.batch_sizes)


class Baseline(Record, frozen=True, kw_only=True):
    """A fixed batch size, the largest that fits the longest examples.

    Examples are shuffled (`fixed-random`), sorted by length (`fixed-sorted`), or sorted within 50 batches at a time, as
    Transformers' `group_by_length` does (`length-grouped`, the mean of simulated epochs).

    On several ranks batches and padded_length are those of all ranks together, each with the same number of batches:
    some are split in two to get a multiple of the ranks.
    """

    name: str
    batch_size: Size
    batches: Size
    padded_length: Positive
    padding_ratio: Share
    estimated_epoch_seconds: Amount | None


class LowerBound(Record, frozen=True, kw_only=True):
    """The cost that no bucket table can beat, over all ranks."""

    batches: Size
    padded_length: Amount
    estimated_epoch_seconds: Amount | None


class HistogramBin(Record, frozen=True, kw_only=True):
    """The examples with lengths in (from, to]: `from` is an exclusive lower edge, `to` an inclusive upper one."""

    from_: TargetLength = msgspec.field(name="from")
    to: Length
    count: Count


class BucketUse(Record, frozen=True, kw_only=True):
    """One bucket of the recommended table.

    Attributes:
        boundary: Its inclusive upper edge.
        examples: Number of examples in it.
        batches: Batches of one epoch, over all ranks, including those that are not full.
        length: True length of its examples.
        padded_length: Cells of its batches, expected over shuffles.
        proven_by: Index of the trial in `trials.jsonl` that proves that its batches fit, if any.
    """

    boundary: Length
    batch_size: Size
    examples: Count
    batches: Count
    length: Amount
    padded_length: Amount
    proven_by: Count | None = None


class Saturation(Record, frozen=True, kw_only=True):
    """The smallest max_batch_length that reaches a share of the best throughput.

    Attributes:
        fraction: Of the best throughput, in true length per second.
        max_batch_length: The smallest one to reach it, with the optimal table for it.
        mean_batch_size: Of that table, over all ranks.
    """

    fraction: Share
    max_batch_length: Length
    mean_batch_size: Amount


class LearningRate(Record, frozen=True, kw_only=True):
    """Factors for the learning rate when the batch size changes; a hint.

    Attributes:
        relative_to: The row whose batch size the factors start from: a baseline's name, or `current`.
        from_batch_size, to_batch_size: Mean batch sizes, before and with the recommended row.
        linear: to / from (Goyal et al. 2017, for SGD).
        square_root: √(to / from) (Krizhevsky 2014; Malladi et al. 2022 for Adam).
    """

    relative_to: str
    from_batch_size: Amount
    to_batch_size: Amount
    linear: Amount
    square_root: Amount


class TwoDimensionalRow(Record, frozen=True, kw_only=True):
    """A bucket table over length and target length, and its gain over one dimension, on one rank.

    Attributes:
        num_buckets: The most buckets allowed.
        buckets: (length, target length) pairs, in ascending order, both inclusive upper edges: an example belongs to
            the first bucket with neither boundary below its own.
        batch_sizes: One for each bucket.
        batches, estimated_epoch_seconds: Of one epoch, from simulated shuffles.
        one_dimensional_batches, one_dimensional_epoch_seconds: The same for the optimal table over length alone, sized
            by the frontier, with as many buckets.
        unproven: As for a row.
    """

    num_buckets: Size
    buckets: list[tuple[Length, TargetLength]]
    batch_sizes: list[Size]
    batches: Size
    estimated_epoch_seconds: Amount | None
    one_dimensional_batches: Size
    one_dimensional_epoch_seconds: Amount | None
    unproven: Count | None = None

    @property
    def sizes_in_use(self) -> int:
        """As for a row."""
        return len(self.buckets)

    def problems(self) -> Iterator[str]:
        """Check the table."""
        if not self.buckets or len(self.buckets) != len(self.batch_sizes):
            yield f"it has {len(self.buckets)} buckets and {len(self.batch_sizes)} batch sizes"
        if any(before > after for before, after in itertools.pairwise(self.buckets)):
            yield "buckets do not ascend"


class Sweep(Result, frozen=True, kw_only=True):
    """`sweep.json`: the bucket tables compared.

    Attributes:
        current: The user's own settings, as a row; None if unknown.
        current_fits: Whether its batches stay within what was measured to fit, or within max_batch_length without a
            probe; None without such a row.
        current_settings: Those settings, and their `source`.
        recommended_table: Index of the best bucket table, for frameworks without pools; None if there is none.
        trade_off: Indices of the rows that no other beats in both speed and randomness, the fastest first.
        saturation: None without step times.
        learning_rate: None if no row is recommended.
        two_dimensional: Empty without target lengths, or if memory does not depend on them.
        histogram: Of the lengths, ascending bins that cover them all.
        quantiles: 1001 lengths: quantile i / 1000 of the data set at position i.
        buckets: Of the recommended table; empty without one, and for pools.
    """

    FORMAT: ClassVar[str] = "batchtune/sweep"

    lengths: LengthsSummary
    max_batch_length: Length
    settings: dict[str, Any]
    device_name: str | None
    rows: list[Row]
    baselines: list[Baseline]
    lower_bound: LowerBound
    recommended: Count | None
    reason: str
    warnings: list[str]
    current: Row | None = None
    current_fits: bool | None = None
    current_settings: dict[str, Any] | None = None
    trade_off: list[Count] = msgspec.field(default_factory=list)
    saturation: Saturation | None = None
    learning_rate: LearningRate | None = None
    two_dimensional: list[TwoDimensionalRow] = msgspec.field(default_factory=list)
    histogram: list[HistogramBin] = msgspec.field(default_factory=list)
    quantiles: Annotated[list[Length], msgspec.Meta(min_length=2)]
    buckets: list[BucketUse] = msgspec.field(default_factory=list)
    recommended_table: Count | None = None

    def problems(self) -> Iterator[str]:
        """Check the settings, the indices of rows, the quantiles, and the recommended row's figures."""
        yield from wrong_settings(self.settings, SweepSettings)
        yield from wrong_limit(self.max_batch_length, self.lengths)
        table = self.recommended_table
        last_of_curve = max(self.trade_off, default=None)
        missing = list(
            wrong_rows(self.rows, recommended=self.recommended, recommended_table=table, trade_off=last_of_curve)
        )
        yield from missing
        if any(low > high for low, high in itertools.pairwise(self.quantiles)):
            yield "quantiles do not ascend"
        if missing or self.recommended is None:
            return
        row = self.rows[self.recommended]
        examples = row.mean_batch_size * row.batches - row.repeated_examples
        if not math.isclose(examples, self.lengths.count, rel_tol=ROUNDING):
            yield f"row {self.recommended}: batches is {row.batches}, for {self.lengths.count:,} examples"
        true_length = (1 - row.padding_ratio) * row.padded_length
        if not math.isclose(true_length, self.lengths.total, rel_tol=ROUNDING):
            yield f"row {self.recommended}: padding_ratio is {row.padding_ratio}, for {self.lengths.total:,}"

    @property
    def recommended_row(self) -> Row | None:
        """The recommended row, or None if no row beats the baseline."""
        return None if self.recommended is None else self.rows[self.recommended]

    @property
    def has_times(self) -> bool:
        """Whether every row has an estimated time, so that rows are compared by it."""
        return bool(self.rows) and have_times(self.rows)

    @property
    def world_size(self) -> int:
        """Number of ranks whose batches are counted; 1 if the settings do not say."""
        return int(self.settings.get("world_size", 1))


def cost_of(costed: Costed, *, timed: bool) -> float | None:
    """Return an epoch's cost: its estimated seconds if `timed` (None if unknown), else its batches.

    `Sweep.has_times` decides for all rows: seconds and batches are never mixed.
    """
    return costed.estimated_epoch_seconds if timed else float(costed.batches)


def have_times(rows: Iterable[Costed]) -> bool:
    """Return whether all have an estimated time to be compared by; otherwise their batches are compared."""
    return all(row.estimated_epoch_seconds is not None for row in rows)


def epoch_costs(rows: Sequence[Costed]) -> list[float]:
    """Return comparable costs: estimated seconds, or the numbers of batches if any row has no time."""
    timed = have_times(rows)
    return [cost_of(row, timed=timed) or 0.0 for row in rows]


def unproven_sizes(row: Row | TwoDimensionalRow) -> str | None:
    """Say how many batch sizes are not proven: `4 of 13 batch sizes are not proven to fit`; None if all are."""
    if not row.unproven:
        return None
    return f"{row.unproven} of {row.sizes_in_use} batch sizes {'is' if row.unproven == 1 else 'are'} not proven to fit"
