"""The records of packed micro-batches in `sweep.json`, and the packed sampler's config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from batchtune.results.shared import (
    Amount,
    ClosedBy,
    Cost,
    CostCount,
    CostRatio,
    CostShare,
    CostSize,
    Count,
    GainRatio,
    Record,
    Size,
    wrong_rows,
)
from batchtune.units import counted

LawCoefficients = dict[
    Literal[
        "seconds_per_token",
        "seconds_per_squared_token",
        "seconds_per_sequence",
        "seconds_per_batch",
    ],
    Amount,
]


class PackedModel(Record, frozen=True, kw_only=True):
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


class PackedProbe(Record, frozen=True, kw_only=True):
    """What fits of packed batches.

    Attributes:
        max_tokens: The largest token budget proven, for batches that one of the trials in `proofs` contains.
        closed_by: Why no larger one: as for a point of the frontier; `data`: all tokens of the data, or --max-tokens.
        oom_tokens: The fewest tokens that ran out of memory; None if none did.
        proofs: Indices of the trials with `max_tokens` tokens, in compositions from the longest sequences to the
            shortest; empty if the probe was interrupted before they ran in turns.
        peak_bytes, step_seconds: Fits to all that ran; None if it is too little.
    """

    max_tokens: Size
    closed_by: ClosedBy
    oom_tokens: Size | None
    proofs: list[Count]
    peak_bytes: PackedModel | None
    step_seconds: PackedModel | None


class PackedRow(Record, frozen=True, kw_only=True):
    """One packer of a sweep, and what an epoch of its micro-batches comes to, on all ranks.

    Attributes:
        packer: `even`, `first-fit` or `best-fit`.
        pool_size: The most sequences that are packed at once; of steps that keep theirs, those of one on all ranks.
        accumulate: Into how many micro-batches each rank's share of an optimizer step is packed, whose sequences are
            those that training draws; None if batchtune draws them.
        batches: Micro-batches of one epoch, none with padding.
        lower_bound: tokens / max_tokens, rounded up.
        tokens: Of one epoch, without those cut or left out.
        fill: tokens / (batches × max_tokens).
        largest_tokens: The most tokens of a micro-batch.
        simulated_epochs: How many epochs largest_tokens, over_cap and unproven are about; the other figures are those
            of the first.
        over_cap: How many micro-batches have more than max_tokens.
        unproven: How many micro-batches are not proven to fit: no proof of the probe has as many tokens, squared
            tokens and sequences, and as long a one. None without a probe of packed batches.
        cut_sequences, cut_tokens: How many sequences are cut, and the tokens that this leaves out.
        steps: Optimizer steps of one epoch.
        step_tokens_deviation: The standard deviation of the tokens of a step / their mean.
        slowest_rank: The time of the slowest rank / the mean of all, by the probe's time law, or without one by the
            FLOPs of a dense 7B model.
        mates_again: As for a row.
        estimated_epoch_seconds: Of all steps, each as long as its slowest rank takes, by the probe's time law; None
            without one.
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


class PackingSweep(Record, frozen=True, kw_only=True):
    """The packers compared.

    Attributes:
        max_tokens: The token budget: the most tokens of a micro-batch.
        cut_at: Longer sequences are cut at it; None: none may be longer than max_tokens.
        proven_tokens: The token budget that the probe proved; None if it proved none.
        time_law: The probe's, as the arguments of `batchtune.TimeLaw`; None without one.
        padded_steps: Optimizer steps of an epoch of the user's padded batches, if they are known, or else of the best
            ones, or else of `fixed-random`.
        padded_step_tokens_deviation: As for a row, of those batches; None if their examples are not known.
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
    warnings: list[str] = msgspec.field(default_factory=list)
    current: PackedRow | None = None

    def problems(self) -> Iterator[str]:
        """Check the index of the recommended row."""
        yield from wrong_rows(self.rows, recommended=self.recommended)

    @property
    def row(self) -> PackedRow:
        """The recommended row."""
        return self.rows[self.recommended]
