"""The strategy `packed` of a sweep: what an epoch of packed micro-batches comes to, next to padded ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from batchtune.buckets.current_packers import (
    PackerCurrent,
    price_packer,
    read_packer,
)
from batchtune.epochs.layout import Dealing
from batchtune.errors import UsageError
from batchtune.lengths import IntArray, Lengths
from batchtune.packing.figures import simulate_packing
from batchtune.packing.packers import PACKERS
from batchtune.packing.packing import Budget
from batchtune.results import (
    Baseline,
    PackedRow,
    PackingSweep,
    Row,
)
from batchtune.units import counted, format_number, format_percent

POOL_SIZE = 8192
# Among packers with at most this share more micro-batches than the fewest, the evenness of ranks decides.
_TOLERANCE = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """What a user says about packing.

    Attributes:
        budget: What sequences are packed to.
        current: The user's own packer; None if unknown.
    """

    budget: Budget
    current: PackerCurrent | None = None

    @classmethod
    def of(
        cls,
        max_tokens: int | None,
        cut_at: int | None = None,
        current: str | None = None,
    ) -> Packing | None:
        """Return what --max-tokens, --cut-at and a packer in --current say; None if the training does not pack.

        Without max_tokens it is that of the packer's settings. Raises UsageError if a value is invalid.
        """
        packer = None if current is None else read_packer(current)
        if packer is not None and max_tokens is None:
            max_tokens = packer.settings.max_tokens
        if max_tokens is None:
            if cut_at is not None:
                raise UsageError(
                    "--cut-at needs --max-tokens",
                    "Add --max-tokens N, or use --truncate.",
                )
            return None
        try:
            budget = Budget(max_tokens=max_tokens, cut_at=cut_at)
        except ValueError as error:
            problem = str(error).replace("max_tokens", "--max-tokens")
            raise UsageError(problem.replace("cut_at", "--cut-at")) from error
        return cls(budget=budget, current=packer)

    def tokens(self, lengths: Lengths) -> IntArray:
        """Return the lengths as whole tokens, none cut, shape (sequences,).

        Raises UsageError if one is fractional, or longer than the budget and not cut.
        """
        values = lengths.values
        fractional = values[values != np.floor(values)]
        if fractional.size:
            raise UsageError(
                f"--max-tokens needs whole lengths, but {fractional.size:,} of {values.size:,} are fractional, such as "
                f"{fractional[0]:g}",
                "Give lengths in tokens, or convert them with --length-scale.",
            )
        budget = self.budget
        overlong = values[values > budget.max_tokens].astype(np.int64)
        if overlong.size and budget.cut_at is None:
            named = ", ".join(f"{length:,}" for length in np.unique(overlong)[::-1][:5])
            raise UsageError(
                f"sequences longer than --max-tokens {budget.max_tokens:,}: {overlong.size:,} of {values.size:,}; the "
                f"longest have {named} tokens",
                f"Give at least --max-tokens {overlong[0]:,}, leave them out with --max-length {budget.max_tokens}, "
                f"or, if your training cuts them, add --cut-at {budget.max_tokens}.",
            )
        return values.astype(np.int64)


def sweep_packers(
    packing: Packing,
    lengths: Lengths,
    dealing: Dealing,
    seed: int,
    padded: Row | Baseline,
    max_batch_length: float,
    on_row: Callable[[PackedRow], None] = lambda row: None,
) -> PackingSweep:
    """Compare the packers with each other and with `padded`, the best padded batches, and recommend one of them.

    Raises:
        UsageError: The lengths can't be packed, or there are too few for all ranks.
    """
    tokens = packing.tokens(lengths)
    together = dealing.world_size * dealing.accumulate
    if tokens.size < together:
        raise UsageError(
            f"{counted(tokens.size, 'sequence')} can't be dealt to {counted(dealing.world_size, 'rank')} with an "
            f"accumulation of {dealing.accumulate:,}: a step needs {together:,} micro-batches, each of one sequence "
            "at least",
            "Lower --world-size or --accumulate.",
        )
    rows = []
    for packer in PACKERS:
        row = _row(tokens, replace(packing.budget, packer=packer), dealing, seed)
        rows.append(row)
        on_row(row)
    fewest = min(row.batches for row in rows)
    near = [row for row in rows if row.batches <= fewest * (1 + _TOLERANCE)]
    chosen = min(near, key=lambda row: (round(row.slowest_rank, 3), row.batches))
    current = None
    current_settings = None
    if packing.current is not None:
        current = price_packer(packing.current, tokens, dealing, seed)
        given = packing.current.settings
        current_settings = packing.current.record(
            given.describe(), msgspec.to_builtins(given)
        )
    return PackingSweep(
        max_tokens=packing.budget.max_tokens,
        cut_at=packing.budget.cut_at,
        rows=rows,
        recommended=rows.index(chosen),
        reason=_reason(chosen, padded, max_batch_length),
        warnings=list(_cautions(chosen, current)),
        current=current,
        current_settings=current_settings,
    )


def _row(tokens: IntArray, budget: Budget, dealing: Dealing, seed: int) -> PackedRow:
    """Return what the sampler's epochs with this packer come to: the first one, and the worst of all for the cap."""
    pool_size = min(POOL_SIZE, tokens.size)
    epochs, mates = simulate_packing(tokens, budget, pool_size, dealing, seed)
    first = epochs[0]
    return PackedRow(
        packer=budget.packer,
        max_tokens=budget.max_tokens,
        pool_size=pool_size,
        batches=first.micro_batches,
        lower_bound=first.lower_bound,
        tokens=first.tokens,
        fill=first.tokens / (first.micro_batches * budget.max_tokens),
        largest_tokens=max(epoch.largest_tokens for epoch in epochs),
        over_cap=sum(epoch.over_cap for epoch in epochs),
        cut_sequences=first.cut_sequences,
        cut_tokens=first.cut_tokens,
        steps=first.steps,
        step_tokens_deviation=first.step_tokens_deviation,
        slowest_rank=first.slowest_rank,
        mates_again=mates.again,
    )


def _reason(row: PackedRow, padded: Row | Baseline, max_batch_length: float) -> str:
    """Say why packing is recommended, and what the comparison with padded batches rests on."""
    name = padded.sized_name if isinstance(padded, Row) else padded.name
    comparable = (
        f"but a padded batch may have {format_number(max_batch_length)} tokens, so their numbers of batches do not "
        "compare"
    )
    if max_batch_length == row.max_tokens:
        comparable = f"and both have at most {row.max_tokens:,} in a batch"
    if row.cut_sequences:
        comparable += "; padded batches cut nothing"
    return (
        f"the training packs (--max-tokens); {row.name} needs {row.batches:,} micro-batches an epoch (lower bound: "
        f"{row.lower_bound:,}); {name}, the best padded batches, need {padded.batches:,}, and spend "
        f"{format_percent(padded.padding_ratio)} of their tokens on padding; tokens computed are compared, as packed "
        f"times are not known, {comparable}"
    )


def _cautions(row: PackedRow, current: PackedRow | None) -> Iterator[str]:
    """Yield the warnings, each without a full stop."""
    if row.cut_sequences:
        yield (
            f"--cut-at cuts {counted(row.cut_sequences, 'sequence')}, which leaves out {row.cut_tokens:,} tokens: your "
            "training must cut them, too"
        )
    if current is None:
        return
    if current.over_cap:
        yield (
            f"{current.packer} does not keep its cap of {current.max_tokens:,} tokens: {current.over_cap:,} of "
            f"{current.batches:,} micro-batches exceed it, the largest with "
            f"{current.largest_tokens:,}"
        )
    if current.max_tokens > row.max_tokens:
        yield (
            f"your settings of {current.packer} allow {current.max_tokens:,} tokens, but --max-tokens is "
            f"{row.max_tokens:,}: they may run out of memory"
        )
    if current.left_out:
        yield f"{current.packer} leaves out {counted(current.left_out, 'sequence')} in an epoch"
    if current.cut_sequences:
        yield f"{current.packer} cuts {counted(current.cut_sequences, 'sequence')} in an epoch"
