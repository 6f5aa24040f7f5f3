"""The records of `sweep.json` and `sampler.yaml`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from batchtune.results.devices import StepGradient
from batchtune.results.packing import LawCoefficients, PackingSweep
from batchtune.results.rows import Row, SamplerKind, SweepSettings, have_times
from batchtune.results.shared import (
    ROUNDING,
    Amount,
    Bytes,
    CostRatio,
    Count,
    Length,
    LengthsSummary,
    Positive,
    Record,
    Result,
    Seed,
    Share,
    Size,
    TargetLength,
    row_at,
    wrong_limit,
    wrong_rows,
    wrong_settings,
)


class Baseline(Record, frozen=True, kw_only=True):
    """A fixed batch size, the largest that fits the longest examples.

    Examples are shuffled (`fixed-random`), sorted by length (`fixed-sorted`), or sorted within 50 batches at a time, as
    Transformers' `group_by_length` does (`length-grouped`, the mean of simulated epochs).
    Optimizer steps and step_tokens_deviation are as for a row; the latter is known of shuffled examples.

    On several ranks batches and padded_length are those of all ranks together, each with the same number of batches:
    some are split in two to get a multiple of the ranks.
    """

    name: str
    batch_size: Size
    batches: Size
    padded_length: Positive
    padding_ratio: Share
    estimated_epoch_seconds: Amount | None
    steps: Count | None = None
    step_tokens_deviation: Amount | None = None

    @property
    def mates_again(self) -> None:
        """Not worked out."""


class LowerBound(Record, frozen=True, kw_only=True):
    """The cost that no bucket table can beat, over all ranks."""

    batches: Size
    padded_length: Amount
    estimated_epoch_seconds: Amount | None

    @property
    def steps(self) -> None:
        """No batches reach the bound."""

    @property
    def step_tokens_deviation(self) -> None:
        """No batches reach the bound."""

    @property
    def padding_ratio(self) -> None:
        """No batches reach the bound."""

    @property
    def mates_again(self) -> None:
        """No batches reach the bound."""


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


class Proof(Record, frozen=True, kw_only=True):
    """The recommended batches as they ran in shuffled training, in fresh processes at the limit.

    Attributes:
        steps: Shuffled steps that passed.
        pairs: How often one shape followed another on an emptied cache; 0 where the allocator does not fragment.
        processes: Fresh processes that ran shuffled batches.
        ooms: Batches that ran out of memory.
        tables: How many tables were run until one held, or time ended.
        highest_reserved_bytes: The most that the allocator held; None where unknown.
        limit_bytes: Of the device, as in `probe.json`.
        reason: Why the table is not proven; None: it is.
    """

    steps: Count = 0
    pairs: Count = 0
    processes: Count = 0
    ooms: Count = 0
    tables: Size = 1
    highest_reserved_bytes: Bytes | None = None
    limit_bytes: Bytes
    reason: str | None = None

    @property
    def holds(self) -> bool:
        """Whether the table is proven."""
        return self.reason is None


class Sweep(Result, frozen=True, kw_only=True):
    """`sweep.json`: the bucket tables compared.

    Attributes:
        current: The user's own settings, as a row; None if unknown.
        current_fits: Whether its batches stay within what was measured to fit, or within max_batch_length without a
            probe; None without such a row, or where an unfinished probe tried nothing of that size.
        current_settings: Those settings, and their `source`.
        recommended_table: Index of the best bucket table, for frameworks without pools; None if there is none.
        trade_off: Indices of the rows that no other beats in both speed and randomness, the fastest first.
        learning_rate: None if no row is recommended.
        two_dimensional: Empty without target lengths, or if memory does not depend on them.
        histogram: Of the lengths, ascending bins that cover them all.
        quantiles: 1001 lengths: quantile i / 1000 of the data set at position i.
        buckets: Of the recommended table; empty without one, and for pools.
        packing: The packers, if the training packs (its probe does, or --max-tokens says so); the other rows are then
            what to do without packing.
        proof: The recommended row's batches as they ran in shuffled training; None if they did not run.
        gradient: How the gradient of a step of the probed script depends on its micro-batches; None if unknown.
        gradient_difference: To that of the recommended row, whose steps keep their examples; None if unknown.
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
    learning_rate: LearningRate | None = None
    two_dimensional: list[TwoDimensionalRow] = msgspec.field(default_factory=list)
    histogram: list[HistogramBin] = msgspec.field(default_factory=list)
    quantiles: Annotated[list[Length], msgspec.Meta(min_length=2)]
    buckets: list[BucketUse] = msgspec.field(default_factory=list)
    recommended_table: Count | None = None
    packing: PackingSweep | msgspec.UnsetType = msgspec.UNSET
    proof: Proof | None = None
    gradient: StepGradient | None = None
    gradient_difference: CostRatio | None = None

    def problems(self) -> Iterator[str]:
        """Check the settings, the indices of rows, the quantiles, and the recommended row's figures."""
        yield from wrong_settings(self.settings, SweepSettings)
        yield from wrong_limit(self.max_batch_length, self.lengths)
        table = self.recommended_table
        last_of_curve = max(self.trade_off, default=None)
        missing = list(
            wrong_rows(
                self.rows,
                recommended=self.recommended,
                recommended_table=table,
                trade_off=last_of_curve,
            )
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
        return row_at(self.rows, self.recommended)

    @property
    def unproven(self) -> int | None:
        """How many batch sizes of the recommended row are not proven; None without a row or a probe.

        None of them is unless the table is.
        """
        row = self.recommended_row
        if row is None or row.unproven is None:
            return None
        if self.proof is not None and self.proof.holds:
            return row.unproven
        return row.sizes_in_use

    @property
    def packed(self) -> PackingSweep | None:
        """The packers; None if the training does not pack."""
        return None if self.packing is msgspec.UNSET else self.packing

    @property
    def has_times(self) -> bool:
        """Whether every row has an estimated time, so that rows are compared by it."""
        return bool(self.rows) and have_times(self.rows)

    @property
    def min_steps(self) -> int | None:
        """The fewest optimizer steps of an epoch that were asked for."""
        return self.settings.get("min_steps")

    @property
    def world_size(self) -> int:
        """Number of ranks whose batches are counted; 1 if the settings do not say."""
        return int(self.settings.get("world_size", 1))


def unproven_sizes(row: Row | TwoDimensionalRow) -> str | None:
    """Say how many batch sizes are not proven: `4 of 13 batch sizes are not proven to fit`; None if all are."""
    if not row.unproven:
        return None
    return f"{row.unproven} of {row.sizes_in_use} batch sizes {'is' if row.unproven == 1 else 'are'} not proven to fit"


class SamplerEvidence(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The evidence for the recommendation.

    Attributes:
        fingerprint: Of the lengths that the table was made for.
        device: Name of the device that was measured; None without a probe.
        allocator: How torch took its memory, as for `probe.json`: training must do so, too. None where there is no
            choice, or without a probe.
        batches: Batches of one epoch, over all ranks of the sweep.
        padding_ratio: Padded cells / all cells.
        estimated_epoch_seconds: None without step times.
        unproven: How many buckets have a batch size that is not proven to fit (all of them until the table ran in
            shuffled training), or how many micro-batches are not; None without a probe.
        proof: How the table ran in shuffled training; None if it did not.
        margin_bytes: Memory that proven batches leave free; None if unknown.
        min_length, max_length: The limits of --min-length and --max-length: no batch with shorter or longer examples
            was counted or run. None without such a limit.
        left_out: Reason → number of examples left out.
        truncate: Where training cuts longer examples off: the sampler counts them as this long. None: nowhere.
        multiple_of: Batches were counted as padded to multiples of it; None: to their longest example.
    """

    fingerprint: str
    device: str | None
    allocator: str | None = None
    batches: Count
    padding_ratio: Share
    estimated_epoch_seconds: Amount | None
    unproven: Count | None = None
    margin_bytes: Bytes | None = None
    min_length: Length | None = None
    max_length: Length | None = None
    left_out: dict[str, Count] = msgspec.field(default_factory=dict)
    truncate: Length | None = None
    multiple_of: Length | None = None
    proof: Proof | None = None


class PackedConfig(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of the `sampler.yaml` of a training that packs, in its order.

    Attributes:
        unit: Of the lengths; None if unknown.
        max_tokens: The most tokens of a micro-batch.
        packer: As for `batchtune.PackedBatchSampler`.
        sampler: `same-step-packed` packs the sequences of each optimizer step, which are those that training draws.
        pool_size: The most sequences that are packed at once; those of a step on all ranks.
        time_law: The time of a micro-batch as measured, as the arguments of `batchtune.TimeLaw`; None: not measured.
        cut_at: Longer sequences count as so long; None: none may be longer than max_tokens.
        accumulate: Each rank has a multiple of so many micro-batches; as many in each step whose sequences stay.
        own_accumulate: How many of the training's own batches, on each rank, make such a step; None for other steps.
    """

    FORMAT: ClassVar[str] = "batchtune/sampler"

    format: str
    version: int
    unit: str | None
    sampler: Literal["packed", "same-step-packed"]
    max_tokens: Size
    packer: str
    pool_size: Size
    time_law: LawCoefficients | None = None
    cut_at: Size | None = None
    accumulate: Size
    own_accumulate: Size | None = None
    shuffle: bool = True
    drop_last: bool = False
    seed: Seed = 0
    evidence: SamplerEvidence

    @property
    def keeps_examples(self) -> bool:
        """Whether each optimizer step has the sequences that training draws for it."""
        return self.own_accumulate is not None


class SamplerConfig(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `sampler.yaml`, in its order.

    Attributes:
        unit: Of lengths, boundaries and max_batch_length; None if unknown.
        max_batch_length: The largest padded length of a batch that the sweep allowed.
        max_batch_size: The largest of bucket_batch_sizes.
        num_buckets: Number of boundaries.
        bucket_boundaries: Inclusive upper edges, strictly ascending.
        bucket_batch_sizes: One for each boundary, at least 1.
        sampler: How batches are made: in the buckets, or in sorted pools, where the buckets say how many examples fit
            with the longest one of a batch.
        pool_size: The most examples of a pool; None in buckets.
        batch_overhead: The cost of a batch beyond its padded length, in the unit; pools are cut to minimise the total.
            None: each batch holds as many examples as fit.
        accumulate: Into how many micro-batches each rank's share of an optimizer step is cut, whose examples, pool_size
            of them on all ranks, are those that training draws: its gradient accumulation; None for other samplers.
        own_accumulate: How many of the training's own batches, on each rank, make a step.
        equal_counts: Whether the micro-batches of a step hold the same number of examples, to within one.
        pair_cost: What a pair of positions of an example costs, as in attention, if a position costs 1; steps are cut
            to minimise the total. None: only positions cost.
    """

    FORMAT: ClassVar[str] = "batchtune/sampler"

    format: str
    version: int
    unit: str | None
    max_batch_length: Length
    max_batch_size: Size
    num_buckets: Size
    bucket_boundaries: list[Length]
    bucket_batch_sizes: list[Size]
    shuffle: bool = True
    batch_ordering: Literal["random", "ascending", "descending"] = "random"
    drop_last: bool = False
    seed: Seed = 0
    evidence: SamplerEvidence
    sampler: SamplerKind = "bucket"
    pool_size: Size | None = None
    batch_overhead: Amount | None = None
    accumulate: Size | None = None
    own_accumulate: Size | None = None
    equal_counts: bool = False
    pair_cost: Amount | None = None

    @property
    def keeps_examples(self) -> bool:
        """Whether each optimizer step has the examples that training draws for it."""
        return self.own_accumulate is not None
