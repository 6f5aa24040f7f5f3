"""The settings of a sweep, its rows, padded and packed, and the cost of an epoch that rows are compared by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar

import msgspec

from batchtune.records import (
    LESS_IS_BETTER,
    PER_CENT,
    Amount,
    Cost,
    CostCount,
    CostRatio,
    CostShare,
    CostSize,
    Count,
    Gain,
    GainRatio,
    LawCoefficients,
    Length,
    LengthsSummary,
    Part,
    Positive,
    Ranks,
    Record,
    SamplerKind,
    Seed,
    Share,
    Size,
    Sizing,
)
from batchtune.results.shared import (
    ClosedBy,
    Result,
    row_at,
    wrong_limit,
    wrong_rows,
    wrong_table,
)
from batchtune.units import counted, format_number

Keep = Literal["same", "steps", "nothing"]
MOST_BUCKETS = 1000
Correlation = Annotated[float, msgspec.Meta(ge=-1, le=1), LESS_IS_BETTER, PER_CENT]


class SweepSettings(Record):
    """The settings of a sweep, from the command line to `sweep.json`.

    Attributes:
        strategies: Names; empty: all of them.
        pool_sizes: Examples of a pool; empty: from a thousand to all, as the data allow.
        seed: Seed of the shuffles of the sampler that is written, and of simulated epochs.
        multiple_of: Boundaries, and the lengths of batches, are rounded up to multiples of this.
        world_size: Number of ranks; None: the probed number. With same_bucket all take batches of one bucket at each
            step.
        accumulate: Batches of an optimizer step on each rank; ranks wait for each other only after the last one. None:
            as in the probed script, or one.
        min_randomness: The least probability, for the recommended row, that mates do not meet again in the next epoch.
        min_steps: The fewest optimizer steps of an epoch: batches are made smaller until it has that many.
        keep: What stays as it is: the examples of each optimizer step (`same`), the number of steps (`steps`), or
            `nothing`, which fills the memory; None: `nothing` if the user's own batches are not known, `same` if they
            say what a step is and it has several micro-batches, `steps` otherwise.
        micro_batches: How many micro-batches each rank's share of such a step is cut into; None: as many as now.
        equal_counts: Whether the micro-batches of a step that keeps its examples hold the same number of them.
        throughput_fraction: If nothing is kept, batches are the smallest that reach this share of the best throughput;
            None: they fill the memory.
    """

    strategies: tuple[str, ...] = ()
    num_buckets: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=1, le=MOST_BUCKETS)], ...],
        msgspec.Meta(min_length=1),
    ] = tuple(range(10, 21))
    pool_sizes: tuple[Size | Literal["all"], ...] = ()
    max_batch_size: Size | None = None
    seed: Seed = 0
    multiple_of: Annotated[float, msgspec.Meta(gt=0, le=1e15)] | None = None
    world_size: Ranks | None = None
    same_bucket: bool = False
    accumulate: Ranks | None = None
    min_randomness: Part | None = None
    min_steps: Size | None = None
    keep: Keep | None = None
    micro_batches: Size | None = None
    equal_counts: bool = False
    throughput_fraction: Part | None = None


class RankTimes(Record):
    """The time of one epoch on several ranks that wait for each other at every step.

    Attributes:
        without_waiting_epoch_seconds: If no rank ever waited: all batches' time / the number of ranks.
        independent_epoch_seconds: If each rank takes whatever batch comes.
        same_bucket_epoch_seconds: If at each step all ranks take batches of the same bucket.
    """

    without_waiting_epoch_seconds: Amount
    independent_epoch_seconds: Amount
    same_bucket_epoch_seconds: Amount


class EpochFigures(Record):
    """The figures of an epoch's batches, whichever way they are made; `Row` and `StreamRow` describe them."""

    boundaries: list[Length] = []
    batch_sizes: list[Size] = []
    batches: CostSize
    padded_length: Annotated[Positive, LESS_IS_BETTER]
    padding_ratio: CostShare
    fill: GainRatio
    mean_batch_size: Gain
    smallest_batch_size: Size
    largest_batch_size: Size
    batch_size_variation: CostRatio
    largest_padded_length: Amount
    effective_buckets: Cost | None
    mates_again: CostShare | None
    length_correlation: Correlation | None = None
    estimated_epoch_seconds: Cost | None = None
    estimated_epoch_error_seconds: Cost | None = None
    equal_to_best: bool | None = None
    batches_deviation: Cost | None = None
    epoch_seconds_deviation: Cost | None = None
    unproven: CostCount | None = None

    @property
    def name(self) -> str:
        """The row's name in sentences."""
        raise NotImplementedError

    @property
    def sized_name(self) -> str:
        """The same, and where batch sizes come from, if that is not the length alone."""
        return self.name

    @property
    def keeps_examples(self) -> bool:
        """Whether each optimizer step has the examples that it has without batchtune."""
        return False

    @property
    def randomness(self) -> float | None:
        """The probability that two mates are not mates again in the next epoch; None for a recorded training."""
        return None if self.mates_again is None else 1 - self.mates_again

    @property
    def known_mates_again(self) -> float:
        """The value of mates_again, which every row has that a sweep compares."""
        assert self.mates_again is not None
        return self.mates_again


class Row(EpochFigures):
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
        mean_batch_size: Examples per batch; repeated examples count each time.
        largest_padded_length: The largest of any batch that this table can form on these data.
        effective_buckets: 1 / Σ p², p the share of the examples in each bucket. For pools: mates_again / the same for
            batches of the same sizes drawn from all examples.
        estimated_epoch_seconds: On all ranks, each step as long as its slowest rank takes; None without step times.
        estimated_epoch_error_seconds: Its standard error; None without step times.
        equal_to_best: Whether it differs from the lowest estimated time by no more than the error of the difference.
        smallest_batch_size, largest_batch_size: Those of the epoch's batches, including those that
            are not full.
        batch_size_variation: Their standard deviation / their mean.
        steps: Optimizer steps of one epoch, on `world_size` ranks with gradients accumulated.
        step_tokens_deviation: The standard deviation of the true length of a step, padding not counted, / its mean;
            None for batches whose examples are not known.
        ranks: The cost of the ranks' waiting for each other; None for one rank, or without step times.
        unproven: How many buckets have a batch size that is not proven: no batch at least as large in every respect
            ran, alone and interleaved. None without a probe.
        repeated_examples: How many examples are dealt a second time, to give every rank the same number of batches.
        mates_again: The probability that two examples of one batch share a batch again in the next epoch; None, like
            effective_buckets, for a recorded training, which does not say which examples a batch held.
        length_correlation: Correlation of the lengths of two examples of one batch; None if all
            lengths are equal.
        pool_size, batch_overhead, accumulate, equal_counts, pair_cost: As in `sampler.yaml`; pool_size is None if
            batches are made in buckets.
        simulated_epochs: How many epochs the figures are means of; None: they are exact expectations.
        batches_deviation, epoch_seconds_deviation: From epoch to epoch; None for exact expectations.
    """

    strategy: str
    sizing: Sizing
    num_buckets: Size
    used_buckets: CostCount
    steps: CostCount
    step_tokens_deviation: CostRatio | None = None
    ranks: RankTimes | None = None
    repeated_examples: CostCount = 0
    pool_size: Size | None = None
    batch_overhead: Amount | None = None
    accumulate: Size | None = None
    equal_counts: bool = False
    pair_cost: Amount | None = None
    simulated_epochs: Count | None = None

    @property
    def uses_pools(self) -> bool:
        """Whether batches are made in sorted pools, or steps, rather than in the buckets of the table."""
        return self.pool_size is not None

    @property
    def keeps_examples(self) -> bool:
        """Whether each optimizer step has the examples that it has without batchtune."""
        return self.accumulate is not None

    @property
    def sampler(self) -> SamplerKind:
        """The sampler that runs it, as `sampler.yaml` says."""
        if self.keeps_examples:
            return "same-step"
        return "pooled" if self.uses_pools else "bucket"

    @property
    def name(self) -> str:
        """The row's name in sentences: `optimal with 12 buckets`, `pools of 6800 examples`."""
        if self.accumulate is not None:
            return (
                f"{counted(self.accumulate, 'micro-batch')} of each step's own examples"
            )
        if self.pool_size is not None:
            return f"pools of {format_number(self.pool_size)} examples"
        return f"{self.strategy} with {counted(len(self.boundaries), 'bucket')}"

    @property
    def sized_name(self) -> str:
        """The same, and where a table's batch sizes come from: `optimal with 12 buckets sized by the frontier`."""
        if self.uses_pools or self.sizing == "length":
            return self.name
        return f"{self.name} sized by the frontier"

    @property
    def sizes_in_use(self) -> int:
        """How many buckets hold examples, and so need a batch size that fits."""
        return self.used_buckets

    def problems(self) -> Iterator[str]:
        """Check the table."""
        yield from wrong_table(self.boundaries, self.batch_sizes)


AnyFigures = TypeVar("AnyFigures", bound=EpochFigures)


class Swept(Result, Generic[AnyFigures]):
    """Base of the sweeps: ways to batch a data set, or a stream, compared."""

    lengths: LengthsSummary
    max_batch_length: Length
    settings: Any
    device_name: str | None
    rows: list[AnyFigures]
    recommended: Count | None
    reason: str
    warnings: list[str]
    current: AnyFigures | None = None
    current_fits: bool | None = None
    current_settings: dict[str, Any] | None = None

    def wrong_figures(self, **indices: int | None) -> Iterator[str]:
        """Yield what is wrong with the limit, and with the indices of rows: the recommended one, and those named."""
        yield from wrong_limit(self.max_batch_length, self.lengths)
        yield from wrong_rows(self.rows, recommended=self.recommended, **indices)

    @property
    def recommended_row(self) -> AnyFigures | None:
        """The recommended row, or None if no row beats the baseline."""
        return row_at(self.rows, self.recommended)

    @property
    def recommends_nothing(self) -> bool:
        """Whether there is no row to write a config of."""
        return self.recommended is None

    @property
    def has_times(self) -> bool:
        """Whether every row has an estimated time, so that rows are compared by it."""
        return bool(self.rows) and have_times(self.rows)

    @property
    def min_steps(self) -> int | None:
        """The fewest optimizer steps of an epoch that were asked for."""
        steps: int | None = self.settings.min_steps
        return steps

    @property
    def world_size(self) -> int:
        """Number of ranks whose batches are counted; 1 if the settings do not say."""
        return self.settings.world_size or 1


class PackedModel(Record):
    """cost = constant + token·Σ L + squared_token·Σ L² + sequence·n, of a packed batch of n sequences of lengths L.

    Attributes:
        relative_error: Root mean square of (fit / measured - 1) over the fitted trials.
        largest_error: The largest |fit / measured - 1| among them.
    """

    constant: Amount
    token: Amount
    squared_token: Amount
    sequence: Amount
    relative_error: Amount
    largest_error: Amount


class PackedProbe(Record):
    """What fits of packed batches.

    Attributes:
        max_tokens: The largest token budget proven, for batches that one of the trials in `proofs` contains.
        closed_by: Why no larger one: as for a point of the frontier; `data`: all tokens of the data, or --max-tokens.
        oom_tokens: The fewest tokens that ran out of memory; None if none did.
        proofs: Indices of the trials with `max_tokens` tokens, in compositions from the longest sequences to the
            shortest; empty if the probe was interrupted before they ran interleaved.
        peak_bytes, step_seconds: Fits to all trials that ran; None if they are too few.
    """

    max_tokens: Size
    closed_by: ClosedBy
    oom_tokens: Size | None
    proofs: list[Count]
    peak_bytes: PackedModel | None
    step_seconds: PackedModel | None


class PackedRow(Record):
    """One packer of a sweep, and what an epoch of its micro-batches comes to, on all ranks.

    Attributes:
        packer: `even`, `first-fit` or `best-fit`.
        pool_size: The most sequences that are packed at once; if steps keep their sequences, those of one step on all
            ranks.
        accumulate: How many micro-batches each rank's share of an optimizer step is packed into, if training draws the
            step's sequences; None if batchtune draws them.
        batches: Micro-batches of one epoch, none with padding.
        lower_bound: tokens / max_tokens, rounded up.
        tokens: Tokens of one epoch, without those cut or left out.
        fill: tokens / (batches × max_tokens).
        largest_tokens: The most tokens of a micro-batch.
        simulated_epochs: How many epochs largest_tokens, over_cap and unproven are about; the other figures are those
            of the first.
        over_cap: How many micro-batches have more than max_tokens.
        unproven: How many micro-batches are not proven to fit: no proof of the probe has as many tokens, squared tokens
            and sequences, and a sequence as long. None without a probe of packed batches.
        cut_sequences, cut_tokens: How many sequences are cut, and the tokens that this leaves out.
        steps: Optimizer steps of one epoch.
        step_tokens_deviation: The standard deviation of the tokens of a step / their mean.
        slowest_rank: The time of the slowest rank / the mean of all, by the probe's time law, or without one by the
            FLOPs of a dense 7B model.
        mates_again: As for a row.
        estimated_epoch_seconds: Time of all steps, each as long as its slowest rank takes, by the
            probe's time law; None without one.
    """

    packer: str
    max_tokens: Size
    pool_size: Size | None = None
    accumulate: Size | None = None
    batches: CostSize
    lower_bound: Size
    tokens: CostSize
    fill: GainRatio
    largest_tokens: CostSize
    simulated_epochs: Size = 1
    over_cap: CostCount
    unproven: CostCount | None = None
    cut_sequences: CostCount
    cut_tokens: CostCount
    steps: CostSize
    step_tokens_deviation: CostRatio
    slowest_rank: CostRatio
    mates_again: CostShare | None = None
    estimated_epoch_seconds: Cost | None = None

    @property
    def name(self) -> str:
        """The row's name in sentences: `even packing`."""
        if self.accumulate is not None:
            return f"{counted(self.accumulate, 'micro-batch')} of each step's own sequences"
        return f"{self.packer} packing"

    @property
    def keeps_examples(self) -> bool:
        """Whether each optimizer step has the sequences that it has without batchtune."""
        return self.accumulate is not None

    @property
    def padding_ratio(self) -> float:
        """None of the tokens are padding."""
        return 0.0

    @property
    def padded_length(self) -> float:
        """All tokens, as none are padding."""
        return float(self.tokens)


class PackingSweep(Record):
    """The packers compared.

    Attributes:
        max_tokens: The token budget: the most tokens of a micro-batch.
        cut_at: Longer sequences are cut at it; None: none may be longer than max_tokens.
        proven_tokens: The token budget that the probe proved; None if it proved none.
        time_law: The probe's, as the arguments of `batchtune.TimeLaw`; None without one.
        padded_steps: Optimizer steps of an epoch of the user's padded batches, if they are known, or else of the best
            ones, or else of `fixed-random`.
        padded_step_tokens_deviation: As for a row, of those batches; None if their examples are not
            known.
        recommended: Index of the recommended row.
        current: The user's own packed batches, of random sequences; None if they are padded, or not known.
    """

    max_tokens: Size
    cut_at: Size | None = None
    proven_tokens: Size | None = None
    time_law: LawCoefficients | None = None
    padded_steps: Size
    padded_step_tokens_deviation: CostRatio | None
    rows: list[PackedRow]
    recommended: Count
    reason: str
    warnings: list[str] = []
    current: PackedRow | None = None

    def problems(self) -> Iterator[str]:
        """Check the index of the recommended row."""
        yield from wrong_rows(self.rows, recommended=self.recommended)

    @property
    def row(self) -> PackedRow:
        """The recommended row."""
        return self.rows[self.recommended]


class Baseline(Record):
    """A fixed batch size, the largest that fits the longest examples.

    Examples are shuffled (`fixed-random`), sorted by length (`fixed-sorted`), or sorted within 50 batches at a time, as
    Transformers' `group_by_length` does (`length-grouped`, the mean of simulated epochs). Optimizer steps and
    step_tokens_deviation are as for a row; the latter is known only for shuffled examples.

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

    mates_again = None  # not worked out


class LowerBound(Record):
    """The cost that no bucket table can beat, over all ranks."""

    batches: Size
    padded_length: Amount
    estimated_epoch_seconds: Amount | None

    # No batches reach the bound.
    steps = None
    step_tokens_deviation = None
    padding_ratio = None
    mates_again = None

    def at_most(self, row: Row) -> LowerBound:
        """Return the same, with a time that is no higher than a row's: measured step times need not be regular."""
        seconds = row.estimated_epoch_seconds
        if seconds is None or seconds >= (self.estimated_epoch_seconds or 0.0):
            return self
        return msgspec.structs.replace(self, estimated_epoch_seconds=seconds)


Costed: TypeAlias = EpochFigures | PackedRow | Baseline | LowerBound
"""Whatever says what an epoch costs."""


def cost_of(costed: Costed, *, timed: bool, steps_kept: bool = False) -> float:
    """Return an epoch's cost: its estimated seconds if `timed` (0 if unknown), else its batches.

    If their number is kept (`min_steps`), it is their padded length. `Sweep.has_times` decides for all rows: seconds
    and batches are never mixed.
    """
    if timed:
        return costed.estimated_epoch_seconds or 0.0
    if steps_kept:
        return costed.padded_length
    return float(costed.batches)


def have_times(rows: Iterable[Costed]) -> bool:
    """Return whether all have an estimated time to be compared by; otherwise their batches are compared."""
    return all(row.estimated_epoch_seconds is not None for row in rows)


def epoch_costs(rows: Sequence[Costed], *, steps_kept: bool) -> list[float]:
    """Return comparable costs: estimated seconds, or if any row has no time what `cost_of` says."""
    timed = have_times(rows)
    return [cost_of(row, timed=timed, steps_kept=steps_kept) for row in rows]
