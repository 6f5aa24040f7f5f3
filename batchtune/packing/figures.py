"""What packed micro-batches come to: their number, tokens and time, as a row of a sweep."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from msgspec import structs

from batchtune.epochs.batchers import Batcher, StepBatcher
from batchtune.epochs.layout import EpochBatches, RankSplit, ShuffleKey, drawn
from batchtune.epochs.randomness import mates_in_cuts
from batchtune.lengths import FloatArray, IntArray
from batchtune.packing.batcher import PackedBatcher
from batchtune.packing.packed import Packed
from batchtune.packing.packing import DENSE_7B, Budget
from batchtune.packing.same_step import StepPacker
from batchtune.results import PackedRow

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
    """Return what the micro-batches of an epoch come to.

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
    step = number // (world_size * dealing.accumulate)
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
        lower_bound=-(-total // budget.max_tokens),
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
    """Return what packs pools, or steps of `pool_size` random sequences into as many micro-batches as accumulated."""
    if accumulate is None:
        return PackedBatcher(tokens, budget, pool_size)
    packer = StepPacker(tokens, budget)
    return StepBatcher(tokens.size, packer, pool_size, accumulate)


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
    """Return what the sampler's first epochs with this seed come to: the first, and all of them for what must fit.

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
