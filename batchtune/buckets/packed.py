"""The strategy `packed` of a sweep: what an epoch of packed micro-batches comes to, next to padded ones."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import msgspec
import numpy as np

from batchtune.buckets.advice import best_of, proven_or_all
from batchtune.buckets.current_settings import YOURS
from batchtune.epochs.layout import RankSplit
from batchtune.epochs.measured_costs import PackedCosts
from batchtune.epochs.own_steps import OwnSteps
from batchtune.errors import UsageError
from batchtune.lengths import FloatArray, IntArray, Lengths
from batchtune.packing.figures import (
    random_row,
    simulated_row,
)
from batchtune.packing.packers import PACKERS
from batchtune.packing.packing import DENSE_7B, Budget, TimeLaw
from batchtune.packing.same_step import StepPacker
from batchtune.results import (
    Baseline,
    LawCoefficients,
    PackedModel,
    PackedRow,
    PackingSweep,
    Row,
    SweepSettings,
    cost_of,
    have_times,
)
from batchtune.units import counted, format_number, format_percent, format_seconds

POOL_SIZE = 8192
# Of many random steps, so many with the most tokens are packed to see how many micro-batches they need.
_FULLEST = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """What a user says about packing.

    Attributes:
        max_tokens: --max-tokens.
        cut_at: --cut-at.

    Raises:
        UsageError: A value is invalid.
    """

    max_tokens: int | None = None
    cut_at: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            self.budget(None)

    def budget(self, measured: PackedCosts | None) -> Budget | None:
        """Return what sequences are packed to: --max-tokens, or what was measured.

        Returns None if the training does not pack. Raises UsageError if a value is invalid.
        """
        max_tokens = self.max_tokens
        if max_tokens is None and measured is not None:
            max_tokens = measured.max_tokens
        if max_tokens is None:
            if self.cut_at is not None:
                raise UsageError(
                    "--cut-at needs a token budget, and none is given or measured",
                    "Add --max-tokens N, or use --truncate.",
                )
            return None
        law = DENSE_7B
        if measured is not None and measured.step_seconds is not None:
            law = time_law_of(measured.step_seconds)
        try:
            return Budget(max_tokens=max_tokens, cut_at=self.cut_at, time_law=law)
        except ValueError as error:
            problem = str(error).replace("max_tokens", "--max-tokens")
            raise UsageError(problem.replace("cut_at", "--cut-at")) from error


def time_law_of(model: PackedModel) -> TimeLaw:
    """Return a probe's fit as a time law; the default one if all micro-batches take equally long by the fit."""
    if not model.token + model.squared_token + model.sequence:
        return DENSE_7B
    return TimeLaw(
        seconds_per_token=model.token,
        seconds_per_squared_token=model.squared_token,
        seconds_per_sequence=model.sequence,
        seconds_per_batch=model.constant,
    )


def tokens_of(lengths: Lengths, budget: Budget) -> IntArray:
    """Return the lengths as whole tokens, none cut, shape (sequences,).

    Raises UsageError if one is fractional, or longer than the budget and not cut.
    """
    values = lengths.values
    fractional = values[values != np.floor(values)]
    if fractional.size:
        raise UsageError(
            f"packing needs whole lengths, but {fractional.size:,} of {values.size:,} are fractional, such as "
            f"{fractional[0]:g}",
            "Give lengths in tokens, or convert them with --length-scale.",
        )
    overlong = values[values > budget.max_tokens].astype(np.int64)
    if overlong.size and budget.cut_at is None:
        named = ", ".join(f"{length:,}" for length in np.unique(overlong)[::-1][:5])
        raise UsageError(
            f"sequences longer than the token budget of {budget.max_tokens:,}: {overlong.size:,} of {values.size:,}; "
            f"the longest have {named} tokens",
            f"Give at least --max-tokens {overlong.max()}, leave them out with --max-length {budget.max_tokens}, or, "
            f"if your training cuts them, add --cut-at {budget.max_tokens}.",
        )
    return values.astype(np.int64)


def with_min_packed_steps(
    budget: Budget, lengths: Lengths, min_steps: int, dealing: RankSplit
) -> Budget:
    """Return the budget, smaller if an epoch must have so many optimizer steps: they need as many micro-batches.

    Raises UsageError if the longest sequence does not fit in one so small.
    """
    tokens = _cut_tokens(lengths, budget)
    largest = int(tokens.sum()) // dealing.fewest_batches(min_steps)
    longest = int(tokens.max())
    if largest < longest:
        raise UsageError(
            f"--min-steps {min_steps} leaves micro-batches of {largest:,} tokens, but the longest sequence has "
            f"{longest:,}",
            f"Lower it, to at most {most_packed_steps(budget, lengths, dealing)}, leave long sequences out with "
            "--max-length, or cut them with --cut-at.",
        )
    return replace(budget, max_tokens=min(budget.max_tokens, largest))


def most_packed_steps(budget: Budget, lengths: Lengths, dealing: RankSplit) -> int:
    """Return the most optimizer steps of an epoch whose micro-batches all have room for the longest sequence."""
    tokens = _cut_tokens(lengths, budget)
    return dealing.steps(int(tokens.sum()) // int(tokens.max()))


def _cut_tokens(lengths: Lengths, budget: Budget) -> IntArray:
    """Return the tokens of each sequence, of long ones those that training keeps."""
    tokens = tokens_of(lengths, budget)
    if budget.cut_at is None:
        return tokens
    return np.minimum(tokens, budget.cut_at)


def sweep_packers(
    budget: Budget,
    lengths: Lengths,
    dealing: RankSplit,
    settings: SweepSettings,
    padded: Row | Baseline,
    max_batch_length: float,
    *,
    before: Row | None,
    own: OwnSteps | None,
    measured: PackedCosts | None,
    on_row: Callable[[PackedRow], None],
) -> PackingSweep:
    """Compare the packers with each other and with `padded`, the best padded batches, and recommend one of them.

    `before` are the padded batches that the user trains with; None: the best ones. `own` are the user's optimizer
    steps, if those are of random sequences: where the settings keep these, what packs them is recommended.

    Raises:
        UsageError: The lengths or the steps can't be packed, or there are too few for all ranks.
    """
    seed = settings.seed
    tokens = tokens_of(lengths, budget)
    together = dealing.world_size * dealing.accumulate
    if tokens.size < together:
        raise UsageError(
            f"{counted(tokens.size, 'sequence')} can't be dealt to {counted(dealing.world_size, 'rank')} with an "
            f"accumulation of {dealing.accumulate:,}: a step needs {together:,} micro-batches, each of one sequence "
            "at least",
            "Lower --world-size or --accumulate.",
        )
    proofs = None if measured is None else measured.proofs
    pool_size = min(POOL_SIZE, tokens.size)
    rows = []
    for packer in PACKERS:
        with_packer = replace(budget, packer=packer)
        row = simulated_row(tokens, with_packer, pool_size, dealing, seed, proofs)
        rows.append(row)
        on_row(row)
    # Of equally even ranks the most random rows go first.
    chosen = _cheapest(
        proven_or_all(rows),
        lambda row: (round(row.slowest_rank, 3), row.mates_again or 0.0),
    )
    current = None
    if own is not None and measured is not None:
        current = random_row(tokens, budget, own.batch_size, dealing, seed)
    if own is not None and settings.keep == "same":
        of_steps = list(_step_rows(tokens, budget, own, settings, proofs))
        for row in of_steps:
            rows.append(row)
            on_row(row)
        chosen = of_steps[0]
        if settings.micro_batches is None:
            # As many micro-batches as now, if that costs hardly more.
            chosen = _cheapest(
                of_steps, lambda row: (row is not of_steps[0], row.batches)
            )
    replaced = before or padded
    law = None
    if budget.time_law != DENSE_7B:
        law = msgspec.convert(asdict(budget.time_law), LawCoefficients)
    proven_tokens = None
    if measured is not None and len(measured.proofs):
        proven_tokens = measured.max_tokens
    return PackingSweep(
        max_tokens=budget.max_tokens,
        cut_at=budget.cut_at,
        proven_tokens=proven_tokens,
        time_law=law,
        padded_steps=dealing.steps(replaced.batches),
        padded_step_tokens_deviation=replaced.step_tokens_deviation,
        rows=rows,
        recommended=rows.index(chosen),
        reason=_reason(chosen, padded, max_batch_length, measured),
        warnings=[*_cautions(chosen, measured, current)],
        current=current,
    )


def _step_rows(
    tokens: IntArray,
    budget: Budget,
    own: OwnSteps,
    settings: SweepSettings,
    proofs: FloatArray | None,
) -> Iterator[PackedRow]:
    """Yield the rows of steps that keep their sequences, packed into the numbers of `OwnSteps.accumulations`.

    Raises UsageError if steps can't be packed so.
    """
    if settings.equal_counts:
        raise UsageError(
            "--equal-counts is for padded micro-batches, and this training packs",
            "Leave it out: a loss over packed rows is a mean over tokens.",
        )
    packer = StepPacker(tokens, budget, world_size=own.dealing.world_size)
    # Those with the most tokens need the most micro-batches.
    fullest = heapq.nlargest(
        _FULLEST,
        own.random(tokens.size, settings.seed),
        key=lambda step: int(tokens[step].sum()),
    )
    fewest = max(map(packer.fewest, fullest))
    if fewest == 1 and not own.have_micro_batches:
        raise UsageError(
            "--keep same: a step is one micro-batch, as no gradient accumulation is known, and packing can't change it",
            "Say it with --accumulate N, or leave --keep same out.",
        )
    for accumulate in own.accumulations(fewest, settings.micro_batches):
        yield simulated_row(
            tokens,
            budget,
            own.examples,
            replace(own.dealing, accumulate=accumulate),
            settings.seed,
            proofs,
            keeps_examples=True,
        )


def _cheapest(
    rows: Sequence[PackedRow], preference: Callable[[PackedRow], tuple[float, ...]]
) -> PackedRow:
    """Return the preferred row of those among the fastest; without times, of those with the fewest micro-batches."""
    best = best_of(rows, partial(cost_of, timed=have_times(rows)), preference)
    assert best is not None
    return best


def _reason(
    row: PackedRow,
    padded: Row | Baseline,
    max_batch_length: float,
    measured: PackedCosts | None,
) -> str:
    """Say why packing is recommended, and what the comparison with padded batches rests on."""
    if row.keeps_examples:
        needs = f"{row.batches:,} micro-batches"
        if row.estimated_epoch_seconds is not None:
            needs = (
                f"an estimated {format_seconds(row.estimated_epoch_seconds)} ({needs})"
            )
        return (
            f"each optimizer step keeps its {counted(row.pool_size or 0, 'sequence')}; in {row.name} an epoch takes "
            f"{needs}, without padding"
        )
    if isinstance(padded, Row):
        name = f"{padded.sized_name}, the best padded batches, need"
    else:
        name = f"a fixed batch size of {padded.batch_size:,} needs"
    packs = "--max-tokens"
    if measured is not None:
        packs = "as its probe did"
    needs = f"{row.name} needs {row.batches:,} micro-batches an epoch (lower bound: {row.lower_bound:,})"
    unknown = "packed times are not known"
    if row.estimated_epoch_seconds is not None:
        needs += f", an estimated {format_seconds(row.estimated_epoch_seconds)}"
        unknown = "padded batches were not timed"
    comparable = (
        f"but a padded batch may have {format_number(max_batch_length)} tokens, so the numbers of batches are not "
        "comparable"
    )
    if row.cut_sequences:
        comparable = "but padded batches cut nothing, so the numbers of batches are not comparable"
    elif max_batch_length == row.max_tokens:
        comparable = f"and both have at most {row.max_tokens:,} in a batch"
    return (
        f"the training packs ({packs}); {needs}; {name} {padded.batches:,}, with "
        f"{format_percent(padded.padding_ratio)} padding; tokens computed are compared, as "
        f"{unknown}, {comparable}"
    )


def _cautions(
    row: PackedRow, measured: PackedCosts | None, current: PackedRow | None
) -> Iterator[str]:
    """Yield the warnings about the recommended row and the user's own, each without a full stop."""
    if current is not None and current.over_cap:
        yield (
            f"{YOURS} packs up to {current.largest_tokens:,} tokens into a row, more than the {row.max_tokens:,} that "
            "were found to fit, and may run out of memory"
        )
    if measured is not None and measured.why_unproven is not None:
        yield f"no token budget is proven: {measured.why_unproven}"
    elif measured is not None and not len(measured.proofs):
        yield (
            f"the probe was interrupted before it proved a token budget, so {row.max_tokens:,} tokens may run out of "
            "memory: the same `batchtune probe-oom` continues it"
        )
    elif measured is not None and row.max_tokens > measured.max_tokens:
        yield (
            f"--max-tokens {row.max_tokens} is more than the {measured.max_tokens:,} tokens that the probe proved, and "
            "may run out of memory: leave it out, or probe with it"
        )
    elif row.unproven:
        yield (
            f"{row.unproven:,} of the {row.batches * row.simulated_epochs:,} micro-batches of "
            f"{counted(row.simulated_epochs, 'epoch')} exceed each proven one in tokens, squared tokens, sequences or "
            f"the longest sequence, and may run out of memory: give a --max-tokens below {row.max_tokens}"
        )
    if row.cut_sequences:
        yield (
            f"--cut-at cuts {counted(row.cut_sequences, 'sequence')}, which leaves out {row.cut_tokens:,} tokens: your "
            "training must cut them, too"
        )
