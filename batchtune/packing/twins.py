"""What other trainers' packers make of the same lengths, list for list.

Lengths are whole numbers of tokens. Sequences are their indices, micro-batches lists of these.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from batchtune.packing.packed import Packed
from batchtune.packing.packers import best_fit
from batchtune.packing.ranks import karmarkar_karp

MicroBatches = list[list[int]]


def verl_micro_batches(
    lengths_of_ranks: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    at_least: int = 1,
    multiple: int = 1,
    keeps_cap: bool = True,
) -> list[MicroBatches]:
    """Return each rank's micro-batches as verl's `rearrange_micro_batches` makes them with dynamic balance.

    All ranks have as many: tokens / `max_tokens` of the rank with the most, `at_least`, and a multiple. They are
    divided by Karmarkar-Karp on 24576·L + L², and small ones run first and last. `keeps_cap`: while one exceeds
    `max_tokens` on any rank, all get more, as since verl's pull request 7553 (in 0.9.1); before, it was exceeded.

    Source: `verl.utils.seqlen_balancing`, verl 0.9.1.

    Raises:
        ValueError: A sequence is longer than `max_tokens`, or a rank has fewer sequences than micro-batches.
    """
    if max(map(max, lengths_of_ranks)) > max_tokens:
        raise ValueError("a sequence is longer than max_tokens")
    fewest = min(map(len, lengths_of_ranks))
    count = at_least
    for lengths in lengths_of_ranks:
        count = max(count, min(len(lengths), -(-sum(lengths) // max_tokens)))
    count = -(-count // multiple) * multiple
    while True:
        if count > fewest:
            raise ValueError(
                f"a rank has {fewest:,} sequences in a step, but all ranks need {count:,} micro-batches"
            )
        packed = [_verl_divided(lengths, count) for lengths in lengths_of_ranks]
        totals = []
        for lengths, batches in zip(lengths_of_ranks, packed, strict=True):
            totals += [sum(lengths[index] for index in batch) for batch in batches]
        if not keeps_cap or max(totals) <= max_tokens:
            return packed
        count += multiple


def _verl_divided(lengths: Sequence[int], count: int) -> MicroBatches:
    """Return so many micro-batches of a rank, the smallest at both ends."""
    work = [24576 * length + length**2 for length in lengths]
    parts = karmarkar_karp(work, count, equal_size=False)
    batches = [sorted(part) for part in parts]
    batches.sort(
        key=lambda batch: (sum(work[index] for index in batch), batch[0]), reverse=True
    )
    return batches[::2][::-1] + batches[1::2]


def axolotl_batches(
    lengths: Sequence[int],
    order: Sequence[int],
    max_tokens: int,
    *,
    bin_size: int,
    batch_size: int = 1,
    group_size: int = 100_000,
    drop_last: bool = True,
) -> list[MicroBatches]:
    """Return the batches of `batch_size` packed sequences that axolotl's `MultipackBatchSampler` makes.

    It takes the examples in the sampler's order, `group_size` at a time, and puts each into the first bin with room and
    fewer than `bin_size`. A longer one than `max_tokens` gets a bin of its own.

    Source: `axolotl.utils.samplers.multipack`, axolotl 0.19.0, not `sequential`.
    """
    bins = []
    for first in range(0, len(order), group_size):
        group = order[first : first + group_size]
        held = [lengths[index] for index in group]
        for packed in _first_fit_in_order(held, max_tokens, bin_size):
            examples = [group[place] for place in packed]
            bins.append(examples)
    batches = [
        bins[first : first + batch_size] for first in range(0, len(bins), batch_size)
    ]
    if drop_last and batches and len(batches[-1]) < batch_size:
        batches.pop()
    return batches


def axolotl_epoch_length(batches_of_orders: Sequence[int]) -> int:
    """Return the length of axolotl's epochs: the fewest batches of the orders that `len()` draws, on any rank.

    It draws four, or one if there are at least as many ranks. Longer epochs end after so many.
    """
    return min(batches_of_orders)


def trl_bfd(
    lengths: Sequence[int], max_tokens: int, *, rows_at_once: int = 1000
) -> MicroBatches:
    """Return the sequences that TRL's `pack_dataset` packs into each row with the strategy `bfd`.

    For every 1,000 rows: without the empty ones, cut at `max_tokens`, from the longest on, each goes where the least
    room suffices, first to what has had that room longest.

    Source: `trl.data_utils`, TRL 1.16.0; `rows_at_once` is the `batch_size` of `datasets.Dataset.map`.
    """
    rows: MicroBatches = []
    tokens = np.minimum(np.asarray(lengths, dtype=np.int64), max_tokens)
    for first in range(0, tokens.size, rows_at_once):
        held = tokens[first : first + rows_at_once]
        order = np.argsort(-held, kind="stable")
        order = order[held[order] > 0]
        if order.size:
            owners = best_fit(held[order], np.empty(0), max_tokens)
            rows.extend(Packed.of_owners(first + order, owners).lists())
    return rows


def slime_steps(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    world_size: int,
    global_batch_size: int,
    multiple: int = 1,
    work: Sequence[float] | None = None,
) -> list[list[MicroBatches]]:
    """Return the micro-batches of each step and rank that slime's `build_dp_schedule` makes of dynamic batches.

    Each step takes `global_batch_size` sequences, packs them first-fit in their order, halves the largest until they
    are a multiple for the ranks, and deals them in turn or, with the `work` of each sequence (`balance_data`), by
    Karmarkar-Karp. Sequences that fill no step are left out; one longer than `max_tokens` is alone.

    Source: `slime.utils.dp_schedule`, slime at 624b824a, without `balance_by_flops`.

    Raises:
        ValueError: A step has too few sequences.
    """
    steps = []
    for first in range(
        0, len(lengths) // global_batch_size * global_batch_size, global_batch_size
    ):
        held = lengths[first : first + global_batch_size]
        packed = _first_fit_in_order(held, max_tokens)
        together = world_size * multiple
        wanted = -(-len(packed) // together) * together
        _halve_largest(packed, wanted, held)
        if work is None:
            dealt = [
                list(range(rank, wanted, world_size)) for rank in range(world_size)
            ]
        else:
            loads = [sum(work[first + place] for place in batch) for batch in packed]
            parts = karmarkar_karp(loads, world_size, equal_size=True)
            dealt = [sorted(part) for part in parts]
        steps.append(
            [
                [[first + place for place in packed[batch]] for batch in of_rank]
                for of_rank in dealt
            ]
        )
    return steps


def _halve_largest(packed: MicroBatches, wanted: int, lengths: Sequence[int]) -> None:
    """Halve the micro-batches with the most tokens, of several the last, until there are so many."""
    totals = [sum(lengths[place] for place in batch) for batch in packed]
    while len(packed) < wanted:
        divisible = [
            (total, batch)
            for batch, total in enumerate(totals)
            if len(packed[batch]) > 1
        ]
        if not divisible:
            raise ValueError(
                f"a step has {len(lengths):,} sequences, but its ranks need {wanted:,} micro-batches"
            )
        _, largest = max(divisible)
        halves: MicroBatches = [[], []]
        tokens = [0, 0]
        for place in sorted(packed[largest], key=lambda place: -lengths[place]):
            half = int(tokens[0] > tokens[1])
            halves[half].append(place)
            tokens[half] += lengths[place]
        packed[largest] = halves[0]
        totals[largest] = tokens[0]
        packed.append(halves[1])
        totals.append(tokens[1])


def _first_fit_in_order(
    lengths: Sequence[int], max_tokens: int, most_sequences: int | None = None
) -> MicroBatches:
    """Put each sequence into the first micro-batch with room for it and fewer than `most_sequences`."""
    rooms = np.empty(len(lengths), dtype=np.int64)
    packed: MicroBatches = []
    for place, length in enumerate(lengths):
        fitting = rooms[: len(packed)] >= length
        batch = len(packed)
        if fitting.any():
            batch = int(fitting.argmax())
        else:
            packed.append([])
            rooms[batch] = max_tokens
        packed[batch].append(place)
        rooms[batch] -= length
        if len(packed[batch]) == most_sequences:
            rooms[batch] = -1
    return packed
