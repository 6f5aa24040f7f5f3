"""What packed micro-batches come to: their number, tokens and time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchtune.epochs.layout import Dealing, Drawing, drawn
from batchtune.epochs.simulation import Mates, mates_in_cuts
from batchtune.packing.batcher import PackedBatcher
from batchtune.packing.packed import Packed
from batchtune.packing.packing import Budget

# Any two epochs tell how often mates meet again; three tell how much the others differ.
_EPOCHS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingFigures:
    """The figures of micro-batches, of all ranks.

    Attributes:
        micro_batches: Their number.
        lower_bound: The number of tokens / max_tokens, rounded up.
        largest_tokens: The most tokens of one.
        over_cap: How many have more than max_tokens.
        cut_sequences: How many sequences are cut.
        cut_tokens: The tokens that this leaves out.
        tokens: Their number, without those left out.
        steps: The optimizer steps.
        step_tokens_deviation: The standard deviation of the tokens of a step / their mean.
        epoch_seconds: The time of all steps, each of which lasts as long as its slowest rank.
        slowest_rank: That time / the mean of the ranks': 1 if all finish together.
    """

    micro_batches: int
    lower_bound: int
    largest_tokens: int
    over_cap: int
    cut_sequences: int
    cut_tokens: int
    tokens: int
    steps: int
    step_tokens_deviation: float
    epoch_seconds: float
    slowest_rank: float


def figures_of(
    packed: Packed, lengths: npt.ArrayLike, budget: Budget, dealing: Dealing
) -> PackingFigures:
    """Return the figures of micro-batches of which number i is rank i % world_size's.

    `lengths`, shape (sequences,), are those before any was cut.
    """
    tokens = budget.checked(lengths)
    totals = packed.sums(tokens)
    together = dealing.world_size * dealing.accumulate
    seconds = np.zeros(-(-packed.count // together) * together)
    seconds[: packed.count] = budget.seconds(packed, tokens)
    step_tokens = np.zeros(seconds.size)
    step_tokens[: packed.count] = totals
    step_tokens = step_tokens.reshape(-1, together).sum(axis=1)
    of_ranks = seconds.reshape(-1, dealing.accumulate, dealing.world_size).sum(axis=1)
    epoch_seconds = float(of_ranks.max(axis=1).sum())
    cut = np.asarray(lengths) - tokens
    return PackingFigures(
        micro_batches=packed.count,
        lower_bound=-(-int(totals.sum()) // budget.max_tokens),
        largest_tokens=int(totals.max()),
        over_cap=int(np.count_nonzero(totals > budget.max_tokens)),
        cut_sequences=int(np.count_nonzero(cut)),
        cut_tokens=int(cut.sum()),
        tokens=int(totals.sum()),
        steps=step_tokens.size,
        step_tokens_deviation=float(step_tokens.std() / step_tokens.mean()),
        epoch_seconds=epoch_seconds,
        slowest_rank=epoch_seconds * dealing.world_size / float(seconds.sum()),
    )


def simulate_packing(
    lengths: npt.ArrayLike, budget: Budget, pool_size: int, dealing: Dealing, seed: int
) -> tuple[list[PackingFigures], Mates]:
    """Return the figures of the sampler's first epochs with this seed, and those of two sequences of a micro-batch."""
    tokens = budget.checked(lengths)
    batcher = PackedBatcher(tokens, budget, pool_size)
    cuts = []
    epochs = []
    for epoch in range(_EPOCHS):
        drawing = Drawing(seed=seed, epoch=epoch)
        cut = batcher.cut(drawing, dealing)
        cuts.append(cut)
        packed = Packed(cut.examples, cut.layout.batch_sizes)
        in_order = packed.ordered(drawn(cut, drawing))
        epochs.append(figures_of(in_order, lengths, budget, dealing))
    return epochs, mates_in_cuts(cuts, tokens)
