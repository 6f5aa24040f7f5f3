"""Recommends one way to batch a stream, and says why; describes its shards, and warns of what they can't do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from batchtune.buckets.advice import (
    TOLERANCE,
    Recommendation,
    best_of,
    proven_or_all,
    shown_cost,
)
from batchtune.lengths import FloatArray
from batchtune.manifests import StreamLengths
from batchtune.results import Row, ShardAdvice, Shards, StreamRow, cost_of, have_times
from batchtune.units import counted, format_percent

# Mates that meet again more often by less than this share meet as often: simulations differ by as much.
_EQUAL_AGAIN = 0.05
# A rank correlation of position and length above this: the shards are sorted.
_SORTED = 0.9
# A worker with this many times the mean of batches is worth a warning.
_UNEVEN = 1.1
# So is this share of batch mates that meet again.
_MANY_AGAIN = 0.2
# Shards of a worker, so that their order is worth shuffling, but no smaller and no larger than this on average.
_SHARDS_OF_A_WORKER = 4
_EXAMPLES_OF_A_SHARD = 100
_BYTES_OF_A_SHARD = 10**9


def recommend_stream(
    rows: Sequence[StreamRow],
    *,
    min_randomness: float | None = None,
    steps_kept: bool = False,
) -> Recommendation:
    """Recommend the smallest buffer among the best rows.

    They must have only proven batches (unless no row has) and be as random as asked for, or else as the best row with
    buckets. Rows are equal if they cost at most 1% more than the best of them, or no more than the spread of simulated
    epochs explains. Among rows with as large a buffer, a percent of mates that meet again weighs as much as a percent
    of the cost: the time, or without step times the batches, and with `steps_kept` the padded length.
    """
    timed = have_times(rows)
    cost = partial(cost_of, timed=timed, steps_kept=steps_kept)

    def spread(row: StreamRow) -> float:
        deviation = row.epoch_seconds_deviation
        if not timed:
            deviation = None if steps_kept else row.batches_deviation
        return deviation or 0.0

    def buffer(row: StreamRow) -> tuple[float, float]:
        return row.buffer_size, cost(row) * (1 + row.known_mates_again)

    shown = partial(shown_cost, timed=timed, steps_kept=steps_kept)
    best = partial(best_of, cost=cost, preference=buffer, spread=spread)
    allowed: Sequence[StreamRow] = [
        row
        for row in rows
        if min_randomness is None or 1 - row.known_mates_again >= min_randomness
    ]
    if not allowed:
        most_random = min(rows, key=lambda row: row.known_mates_again)
        reason = (
            f"no way is as random as --min-randomness {min_randomness:g} asks; the most random is {most_random.name}, "
            f"with {1 - most_random.known_mates_again:.3g}"
        )
        return Recommendation(None, reason, None)
    allowed = proven_or_all(allowed)
    random_enough = allowed
    in_buckets = best([row for row in allowed if row.algorithm == "bucket"])
    if min_randomness is None and in_buckets is not None:
        most_again = in_buckets.known_mates_again * (1 + _EQUAL_AGAIN)
        random_enough = [
            row
            for row in allowed
            if row.algorithm == "bucket" or row.known_mates_again <= most_again
        ]
    row = best(random_enough)
    # The best row of SpeechBrain; one that is random enough comes first.
    speechbrain = best(
        [other for other in random_enough if other.by_speechbrain]
    ) or best([other for other in allowed if other.by_speechbrain])
    assert row is not None
    reason = f"{row.name} takes {shown(row)}"
    if speechbrain is not None and speechbrain is not row:
        reason += f", {speechbrain.name} at its best {shown(speechbrain)}"
    cheapest = min(allowed, key=cost)
    saves = cost(cheapest) < cost(row) * (1 - TOLERANCE)
    if saves and cheapest.known_mates_again > row.known_mates_again:
        reason += (
            f"; {cheapest.name} takes {shown(cheapest)}, but batch mates meet again in "
            f"{format_percent(cheapest.known_mates_again)} of cases, not {format_percent(row.known_mates_again)} "
            "(--min-randomness)"
        )
    portable = None if speechbrain is None else rows.index(speechbrain)
    return Recommendation(rows.index(row), reason, portable)


def advised_shards(count: int, total_bytes: int | None, readers: int) -> ShardAdvice:
    """Return how to write examples as shards for this many workers of all ranks: a multiple of them, of equal size.

    There are 4 for each worker, or as many as leave 100 examples in each; more if they would be larger than 1 GB on
    average: large files read well, and smaller ones copy well. ShardWriter's `maxcount` can't give every number: then
    the next smaller multiple is advised. `maxsize` is twice the mean size of a shard: it closes only a shard of
    unusually long examples. `total_bytes` are those of all examples, as stored; None if unknown.
    """
    each = max(1, min(_SHARDS_OF_A_WORKER, count // (_EXAMPLES_OF_A_SHARD * readers)))
    if total_bytes is not None:
        each = max(each, -(-total_bytes // (_BYTES_OF_A_SHARD * readers)))
    maxcount = max(1, count // readers)
    for number in range(each, 0, -1):
        size = -(-count // (readers * number))
        if -(-count // size) == readers * number:
            maxcount = size
            break
    shards = -(-count // maxcount)
    maxsize = None if total_bytes is None else max(1, -(-2 * total_bytes // shards))
    return ShardAdvice(shards=shards, maxcount=maxcount, maxsize_bytes=maxsize)


def shards_of(stream: StreamLengths, sizes: Sequence[int], readers: int) -> Shards:
    """Describe the shards, which hold so many examples each, for this many workers of all ranks."""
    counts = np.array(sizes, dtype=np.int64)
    edges = np.concatenate(([0], np.cumsum(counts)))
    length_before = np.concatenate(([0.0], np.cumsum(stream.values)))
    totals = np.diff(length_before[edges])
    median = float(np.median(counts))
    idle = max(0, readers - int(np.count_nonzero(counts)))
    is_fine = (
        bool(stream.shards)
        and not idle
        and len(sizes) % readers == 0
        and counts.max() <= 1.5 * max(1, median)
    )
    advice = None
    if not is_fine and stream.lengths.count >= readers:
        total_bytes = None
        if stream.shards:
            total_bytes = sum(shard.size for shard in stream.shards)
        advice = advised_shards(stream.lengths.count, total_bytes, readers)
    return Shards(
        count=len(sizes),
        assumed=not stream.shards,
        broken=sum(shard.broken for shard in stream.shards),
        empty=int(np.count_nonzero(counts == 0)),
        smallest_count=int(counts.min()),
        median_count=median,
        largest_count=int(counts.max()),
        smallest_length=float(totals.min()),
        largest_length=float(totals.max()),
        sorted=_are_sorted(stream.values),
        repeated_ids=stream.repeated_ids,
        idle_workers=idle,
        advice=advice,
    )


def _are_sorted(lengths: FloatArray) -> bool:
    """Return whether length goes with the place in the stream: the rank correlation of both is nearly 1 or -1."""
    sample = lengths[
        np.linspace(0, lengths.size - 1, min(lengths.size, 10_000)).astype(np.int64)
    ]
    if sample.size < 3 or np.ptp(sample) == 0:
        return False
    _, ranks = np.unique(sample, return_inverse=True)
    return abs(float(np.corrcoef(ranks, np.arange(sample.size))[0, 1])) > _SORTED


def stream_cautions(shards: Shards, shard_size: int, readers: int) -> Iterator[str]:
    """Yield the problems of the shards; `shard_size` is that of a source without shards."""
    if shards.assumed:
        yield (
            f"the source is not a set of shards: it is treated as {counted(shards.count, 'shard')} of up to "
            f"{shard_size:,} examples, in its order (--shard-size)"
        )
    if shards.broken:
        yield f"{counted(shards.broken, 'shard')} can't be read to the end: WebDataset stops there with an error"
    if shards.idle_workers:
        yield (
            f"{counted(shards.count - shards.empty, 'shard')} for {counted(readers, 'worker')}: "
            f"{shards.idle_workers:,} get none, and WebDataset stops with an error there"
        )
    if shards.sorted:
        yield (
            "the shards hold the examples in order of length: no buffer can mix them. Shuffle the examples before you "
            "write the shards"
        )
    if readers > 1 and not shards.idle_workers:
        yield (
            "WebDataset deals the shards before it shuffles them: each worker reads the same shards in every epoch, so "
            "examples of two workers never meet. resampled=True, or a shuffle of the list before each epoch, mixes them"
        )


def row_cautions(
    shards: Shards, row: StreamRow | None, map_style: Row | None
) -> Iterator[str]:
    """Yield what is wrong with the recommended row."""
    if row is None:
        return
    usual = 0.0 if map_style is None else map_style.known_mates_again
    if row.known_mates_again > max(_MANY_AGAIN, 1.5 * usual):
        yield (
            f"batch mates of one epoch are mates again in the next in {format_percent(row.known_mates_again)} of "
            "cases: larger shuffle buffers, or a recommendation held to --min-randomness, mix them better"
        )
    if (
        not shards.idle_workers
        and max(row.worker_imbalance, row.rank_imbalance) > _UNEVEN
    ):
        yield (
            f"the shards give one worker {row.worker_imbalance:.2f} times and one rank {row.rank_imbalance:.2f} times "
            "as many batches as the mean: others wait for it, or see the same examples more often"
        )
