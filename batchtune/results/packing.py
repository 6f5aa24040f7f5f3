"""The records of packed micro-batches in `sweep.json`, and the packed sampler's config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from batchtune.results.shared import (
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


class PackedRow(Record, frozen=True, kw_only=True):
    """One packer of a sweep, or a framework's own, and what an epoch of its micro-batches comes to, on all ranks.

    Attributes:
        packer: `even`, `first-fit` or `best-fit`, or the framework whose packer it is.
        pool_size: The most sequences that are packed at once; None for a framework's packer.
        batches: Micro-batches of one epoch, none with padding.
        lower_bound: tokens / max_tokens, rounded up.
        tokens: Of one epoch, without those cut or left out.
        fill: tokens / (batches × max_tokens).
        largest_tokens: The most tokens of a micro-batch.
        over_cap: How many micro-batches have more than max_tokens.
        cut_sequences, cut_tokens: How many sequences are cut, and the tokens that this leaves out.
        left_out: How many sequences an epoch leaves out, because they fill no step.
        steps: Optimizer steps of one epoch.
        step_tokens_deviation: The standard deviation of the tokens of a step / their mean.
        slowest_rank: The time of the slowest rank / the mean of all, by the FLOPs of a dense 7B model.
        mates_again: As for a row; None for a framework's packer.
        estimated_epoch_seconds: None, unless the time of packed micro-batches is known.
    """

    packer: str
    max_tokens: Size
    pool_size: Size | None = None
    batches: CostSize
    lower_bound: Size
    tokens: CostSize
    fill: GainRatio
    largest_tokens: CostSize
    over_cap: CostCount
    cut_sequences: CostCount
    cut_tokens: CostCount
    left_out: CostCount = 0
    steps: CostSize
    step_tokens_deviation: CostRatio
    slowest_rank: CostRatio
    mates_again: CostShare | None = None
    estimated_epoch_seconds: Cost | None = None

    @property
    def name(self) -> str:
        """The row's name in sentences: `even packing`."""
        return f"{self.packer} packing"


class PackingSweep(Record, frozen=True, kw_only=True):
    """The packers compared.

    Attributes:
        max_tokens: The token budget: the most tokens of a micro-batch.
        cut_at: Longer sequences are cut at it; None: none may be longer than max_tokens.
        recommended: Index of the recommended row.
        current: The user's own packer, as a row; None if unknown.
        current_settings: Its settings, and their `source`.
    """

    max_tokens: Size
    cut_at: Size | None = None
    rows: list[PackedRow]
    recommended: Count
    reason: str
    warnings: list[str] = msgspec.field(default_factory=list)
    current: PackedRow | None = None
    current_settings: dict[str, Any] | None = None

    def problems(self) -> Iterator[str]:
        """Check the index of the recommended row."""
        yield from wrong_rows(self.rows, recommended=self.recommended)

    @property
    def row(self) -> PackedRow:
        """The recommended row."""
        return self.rows[self.recommended]
