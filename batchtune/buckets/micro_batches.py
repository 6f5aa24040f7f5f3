"""Rows of micro-batches: packed up to a token budget, or cut from each optimizer step's own examples."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import structs

from batchtune.buckets import PACKED
from batchtune.buckets.advice import TOLERANCE, best_of, proven_or_all
from batchtune.buckets.current import YOURS, Current, known_current
from batchtune.epochs import EpochBatches, RankSplit, ShuffleKey, drawn
from batchtune.epochs.batchers import (
    Batcher,
    Batching,
    StepBatcher,
    StepCutter,
    micro_batches,
)
from batchtune.epochs.expectation import mates_in_cuts
from batchtune.epochs.measured_costs import BatchCost, PackedCosts, batch_seconds
from batchtune.epochs.pricing import Pricing, TimedRow
from batchtune.epochs.table import Limits
from batchtune.errors import UsageError
from batchtune.lengths import FloatArray, IntArray, Lengths, ceil_div
from batchtune.packing import (
    DENSE_7B,
    PACKERS,
    Budget,
    Packed,
    PackedBatcher,
    StepPacker,
    TimeLaw,
)
from batchtune.results import (
    Baseline,
    Device,
    Keep,
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

# The optimizer steps of training that draws its batches at random, and the numbers of micro-batches to compare.

# The fewest micro-batches are those that all of this many random steps fit into.
_STEPS = 4096
# The cheapest number of micro-batches is chosen by this many random steps, among this many numbers.
_COMPARED = 32
_NUMBERS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSteps:
    """The optimizer steps of training that draws its batches at random.

    Attributes:
        batch_size: Examples of each batch.
        dealing: Its ranks, and how many batches each of them accumulates.
        unknown_sampler: The sampler that draws the examples, assumed to be random; None if they are
            known to be.
    """

    batch_size: int
    dealing: RankSplit
    unknown_sampler: str | None = None

    @property
    def examples(self) -> int:
        """The examples of a step on all ranks."""
        return self.batch_size * self.dealing.batches_per_step

    def accumulations(self, fewest: int, asked: int | None, *others: int) -> list[int]:
        """Return the numbers of micro-batches to compare: that `asked` for, the present one, others, and the `fewest`.

        For an unknown sampler, only the number asked for and the present one, which holds its
        batches if they fit. Raises UsageError if a step can't be cut into the number asked for.
        """
        most = self.examples // self.dealing.world_size
        numbers = [max(self.dealing.accumulate, fewest)]
        if self.unknown_sampler is None:
            numbers += [*others, fewest]
        if asked is not None:
            if not fewest <= asked <= most:
                raise UsageError(
                    f"--micro-batches {asked:,}: a rank's share of a step makes {fewest:,} to {most:,}, limited by "
                    "what fits and by its number of examples",
                    f"Give a number from {fewest:,} to {most:,}.",
                )
            numbers.insert(0, asked)
        return list(dict.fromkeys(numbers))

    def random(self, count: int, seed: int) -> Iterator[IntArray]:
        """Yield the examples of many random steps, some of them from the same epoch, in data of this many examples."""
        random = np.random.default_rng(seed)
        size = min(self.examples, count)
        steps = (
            step
            for _ in range(1 + _STEPS * size // count)
            for step in np.split(random.permutation(count), range(size, count, size))
        )
        return islice(steps, _STEPS)

    def steps(self, count: int) -> int:
        """Return how many optimizer steps an epoch of this many examples has."""
        return ceil_div(count, self.examples)

    def batches(self, count: int, accumulate: int) -> int:
        """Return the micro-batches of all ranks in an epoch whose steps are cut into `accumulate` on each rank."""
        ranks = self.dealing.world_size
        own = ceil_div(count, self.batch_size * ranks)
        return ranks * micro_batches(own, self.dealing.accumulate, accumulate)

    def cheapest(
        self,
        cutter: StepCutter,
        fewest: int,
        cost: BatchCost,
        tolerance: float,
        seed: int,
    ) -> int:
        """Return how many micro-batches of a rank cost the least, from the `fewest` to the present number.

        Fewer micro-batches save the fixed cost of each, but pad more. Of the numbers that cost
        hardly more than the least, the largest is taken, because it needs the least memory.
        """
        lengths = cutter.lengths
        steps = [*islice(self.random(lengths.size, seed), _COMPARED)]
        most = max(self.dealing.accumulate, fewest)
        costs: dict[int, float] = {}
        numbers = np.geomspace(fewest, most, _NUMBERS).round().astype(int)
        for number in numbers.tolist():
            batches = [batch for step in steps for batch in cutter.cut(step, number)[0]]
            sizes = np.array([batch.size for batch in batches])
            longest = np.array([lengths[batch].max() for batch in batches])
            costs[number] = float(cost(sizes, longest).sum())
        limit = min(costs.values()) * (1 + tolerance)
        return max(number for number in costs if costs[number] <= limit)


# Any two epochs tell how often mates meet again; three tell how much the others differ.
_EPOCHS = 3


def row_of(
    packed: Packed,
    lengths: npt.ArrayLike,
    tokens: IntArray,
    budget: Budget,
    dealing: RankSplit,
    proofs: FloatArray | None = None,
) -> PackedRow:
    """Return the figures of an epoch's micro-batches.

    Args:
        packed: The micro-batches; number i is rank i % world_size's.
        lengths: Shape (sequences,): before any was cut.
        tokens: Shape (sequences,): as they are trained.
        budget: With the packer's name, the cap and the time law.
        dealing: The ranks, and how many micro-batches each of them accumulates.
        proofs: Shape (proofs, 4): the batches that are proven to fit, as `Packed.extents`; None if unknown.
    """
    extents = packed.extents(tokens)
    totals = packed.sums(tokens)
    total = int(totals.sum())
    world_size = dealing.world_size
    number = np.arange(packed.count)
    step = number // dealing.batches_per_step
    step_tokens = np.bincount(step, totals)
    # Equal slots are accumulated.
    slots = step * world_size + number % world_size
    seconds = np.bincount(
        slots, budget.seconds(packed, tokens), step_tokens.size * world_size
    )
    of_ranks = seconds.reshape(-1, world_size)
    epoch_seconds = float(of_ranks.max(axis=1).sum())
    cut = (np.asarray(lengths) - tokens)[packed.sequences]
    unproven = None
    if proofs is not None:
        contained = np.zeros(packed.count, dtype=np.bool_)
        for proof in proofs:
            contained |= (extents <= proof).all(axis=1)
        unproven = int(np.count_nonzero(~contained))
    return PackedRow(
        packer=budget.packer,
        max_tokens=budget.max_tokens,
        batches=packed.count,
        lower_bound=ceil_div(total, budget.max_tokens),
        tokens=total,
        fill=total / (packed.count * budget.max_tokens),
        largest_tokens=int(totals.max()),
        over_cap=int(np.count_nonzero(totals > budget.max_tokens)),
        unproven=unproven,
        cut_sequences=int(np.count_nonzero(cut)),
        cut_tokens=int(cut.sum()),
        steps=step_tokens.size,
        step_tokens_deviation=float(step_tokens.std() / step_tokens.mean()),
        slowest_rank=epoch_seconds * world_size / float(seconds.sum()),
        # The default law gives FLOPs, not seconds.
        estimated_epoch_seconds=None if budget.time_law == DENSE_7B else epoch_seconds,
    )


def random_row(
    tokens: IntArray,
    budget: Budget,
    batch_size: int,
    dealing: RankSplit,
    seed: int,
) -> PackedRow:
    """Return the figures of micro-batches of `batch_size` sequences, drawn at random and packed."""
    sequences = np.random.default_rng(seed).permutation(tokens.size)
    starts = np.arange(0, tokens.size, batch_size)
    packed = Packed(sequences, np.diff(starts, append=tokens.size))
    return row_of(packed, tokens, tokens, budget, dealing)


def batcher_of(
    tokens: IntArray, budget: Budget, pool_size: int, accumulate: int | None
) -> Batcher:
    """Return the batcher that packs pools, or steps of `pool_size` random sequences, as the dealing says."""
    if accumulate is None:
        return PackedBatcher(tokens, budget, pool_size)
    return StepBatcher(tokens.size, StepPacker(tokens, budget), pool_size, accumulate)


def in_order(cut: EpochBatches, drawing: ShuffleKey) -> Packed:
    """Return an epoch's micro-batches in the order in which they come."""
    order = drawn(cut, drawing)
    return Packed(cut.held(order), cut.layout.batch_sizes[order])


def simulated_row(
    lengths: npt.ArrayLike,
    budget: Budget,
    pool_size: int,
    dealing: RankSplit,
    seed: int,
    proofs: FloatArray | None = None,
    *,
    keeps_examples: bool = False,
) -> PackedRow:
    """Return the figures of the sampler's first epochs with this seed: of the first, and of all for what must fit.

    With `keeps_examples`, steps of `pool_size` random sequences are packed into as many micro-batches as `dealing`
    accumulates.
    """
    tokens = budget.checked(lengths)
    accumulate = dealing.accumulate if keeps_examples else None
    batcher = batcher_of(tokens, budget, pool_size, accumulate)
    cuts = []
    rows = []
    for drawing, cut in batcher.first_epochs(_EPOCHS, dealing, seed):
        cuts.append(cut)
        packed = in_order(cut, drawing)
        rows.append(row_of(packed, lengths, tokens, budget, dealing, proofs))
    first = rows[0]
    if first.unproven is not None:
        first = structs.replace(first, unproven=sum(row.unproven or 0 for row in rows))
    return structs.replace(
        first,
        pool_size=pool_size,
        accumulate=accumulate,
        simulated_epochs=_EPOCHS,
        largest_tokens=max(row.largest_tokens for row in rows),
        over_cap=sum(row.over_cap for row in rows),
        mates_again=mates_in_cuts(cuts, tokens).again,
    )


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
        """Return the token budget: --max-tokens, or the measured one.

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
    """Return the budget, made smaller if an epoch must have more optimizer steps than it gives.

    Raises UsageError if the longest sequence does not fit into the smaller one.
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

    `before` are the padded batches that the user trains with; None: the best ones. `own` are the
    user's optimizer steps, if they have random sequences: if the settings keep them, the row that
    packs them is recommended.

    Raises:
        UsageError: The lengths or the steps can't be packed, or there are too few for all ranks.
    """
    seed = settings.seed
    tokens = tokens_of(lengths, budget)
    together = dealing.batches_per_step
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
    if fewest == own.dealing.batches_per_step == 1:
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


# Rows that keep the examples of each optimizer step, and cut them into other micro-batches.

SAME_STEP = "same-step"


def own_steps(current: Current | None, dealing: RankSplit) -> OwnSteps | None:
    """Return the steps of the user's current settings; None if those don't say which examples a step has."""
    if current is None or current.settings.random_batch_size is None:
        return None
    return OwnSteps(
        batch_size=current.settings.random_batch_size,
        dealing=dealing,
        unknown_sampler=current.settings.unknown_sampler,
    )


def kept(
    settings: SweepSettings, current: Current | None, own: OwnSteps | None, count: int
) -> Keep:
    """Return what the recommendation keeps as it is: what was asked for, or as much as is known of the training.

    `count` is the number of examples. Raises UsageError if options contradict each other.
    """
    keep = settings.keep or _by_default(settings, current, own, count)
    if settings.min_steps is not None and keep != "steps":
        raise UsageError(
            f"--min-steps says how many steps to keep, and --keep {keep} does not keep a number of them",
            "Leave out one of the two.",
        )
    asked = settings.micro_batches is not None or settings.equal_counts
    if asked and keep != "same":
        raise UsageError(
            "--micro-batches and --equal-counts cut the examples of a step, which are not kept",
            "Say what a step is with --current batch_size=N and --accumulate N, and add --keep same.",
        )
    if keep != "nothing" and current is None and settings.min_steps is None:
        raise UsageError(
            f"--keep {keep}: the examples and steps of your training are not known",
            "Say it with --current batch_size=N and --accumulate N, or tune the script itself: -- python train.py.",
        )
    if keep == "same" and own is None:
        raise UsageError(
            "--keep same: these settings do not say which examples a step has",
            "Say it with --current batch_size=N and --accumulate N, or keep their number: --keep steps.",
        )
    if keep == "same" and own is not None and own.examples > count:
        raise UsageError(
            f"--keep same: a step has {own.examples:,} examples, and the data {count:,}",
            "Keep the number of steps with --keep steps.",
        )
    return keep


def _by_default(
    settings: SweepSettings, current: Current | None, own: OwnSteps | None, count: int
) -> Keep:
    if settings.min_steps is not None:
        return "steps"
    if current is None:
        return "nothing"
    # The examples of a step can only be cut otherwise where it has several micro-batches.
    if own is not None and own.dealing.batches_per_step > 1 and own.examples <= count:
        return "same"
    return "steps"


class KnownSizes(NamedTuple):
    """The most examples of a batch that may be recommended (None: any number), and of the training's own batches.

    An `own` of 0 is unknown.
    """

    most: int | None = None
    own: int = 0


def known_sizes(
    lengths: Lengths,
    settings: SweepSettings,
    given: Current | None,
    folder: Path,
    device: Device,
) -> KnownSizes:
    """Return what is known of padded batch sizes before the probe, which takes minutes.

    `given` are the settings that the user gave, `device` is the one that is to be probed. Raises UsageError for what
    the sweep would refuse after it: options that contradict each other or the training, or more micro-batches than a
    step has examples.
    """
    refuse_to_pack(settings)
    current = known_current(given, device.script, folder, lengths)
    own_accumulate = None if current is None else current.settings.accumulate
    dealing = RankSplit(
        world_size=settings.world_size or device.world_size,
        accumulate=settings.accumulate or own_accumulate or device.accumulation,
    )
    own = own_steps(current, dealing)
    keep = kept(settings, current, own, lengths.count)
    if own is None:
        return KnownSizes()
    if keep != "same":
        return KnownSizes(own=own.batch_size)
    own.accumulations(1, settings.micro_batches)
    return KnownSizes(most=own.examples, own=own.batch_size)


def refuse_to_pack(settings: SweepSettings) -> None:
    """Raise UsageError if packing is asked for, but no token budget is known."""
    if PACKED in settings.strategies:
        raise UsageError(
            "--strategy packed needs a token budget, and none is given or measured",
            "Add --max-tokens N, or probe a workload that packs.",
        )


def same_step_rows(
    pricing: Pricing, limits: Limits, settings: SweepSettings, own: OwnSteps
) -> Iterator[TimedRow]:
    """Yield the rows with the present number of micro-batches, the fastest number, and the fewest that fit.

    If the user asks for a number (`micro_batches`), its row comes first.
    """
    sizing = limits.sizings[-1]
    table = limits.pooled_table(pricing.lengths.histogram)
    values = pricing.lengths.values
    ranks = own.dealing.world_size
    cutter = StepCutter(values, table, settings.equal_counts, world_size=ranks)
    cost = None
    if pricing.step_seconds is not None:
        cost = batch_seconds(pricing.step_seconds, pricing.targets)
    # That each of many random steps fits into.
    fewest = max(map(cutter.fewest, own.random(values.size, settings.seed)))
    others = []
    if cost is not None:
        others.append(own.cheapest(cutter, fewest, cost, TOLERANCE, pricing.seed))
    for accumulate in own.accumulations(fewest, settings.micro_batches, *others):
        batching = Batching(
            table,
            own.examples,
            accumulate=accumulate,
            equal_counts=settings.equal_counts,
        )
        dealing = replace(pricing.dealing, accumulate=accumulate, same_bucket=False)
        of_steps = replace(pricing, dealing=dealing)
        batches = own.batches(pricing.lengths.count, accumulate)
        yield of_steps.of_pools(SAME_STEP, sizing, batching, batches, cheapest=True)
