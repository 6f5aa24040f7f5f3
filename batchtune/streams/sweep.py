"""Compares ways to batch a stream, and writes `stream.json`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from batchtune.buckets import STRATEGIES, sizes_up_to
from batchtune.buckets.advice import (
    TOLERANCE,
    Recommendation,
    best_of,
    keeping_reason,
    keeps_current,
    kept_steps,
    longer_than,
    proven_or_all,
    recommend,
    shown_cost,
)
from batchtune.buckets.sweep import costs_in, needed_limit, sweep
from batchtune.epochs import RankSplit, edges_of
from batchtune.epochs.expectation import (
    EpochTime,
    effective_buckets,
    mates_in_cuts,
    sums_between,
    with_equals,
)
from batchtune.epochs.measured_costs import (
    Costs,
    shrunk,
    shrunk_limit,
)
from batchtune.epochs.pricing import Pricing, check_min_steps, share_for
from batchtune.epochs.table import BucketTable, Limits
from batchtune.errors import UsageError
from batchtune.lengths import FloatArray, IntArray, Lengths, ceil_div
from batchtune.manifests import StreamLengths
from batchtune.results import (
    STREAM_FILE,
    Row,
    ShardAdvice,
    Shards,
    StreamRow,
    StreamSettings,
    StreamSweep,
    SweepSettings,
    cost_of,
    have_times,
    meta_of,
    row_at,
    write_result,
)
from batchtune.run_folder import clear_run
from batchtune.streams import StreamBatching
from batchtune.streams.simulated import (
    AnyBatching,
    CurrentStream,
    PivotSettings,
    StoredStream,
    StreamEpoch,
    distance_apart,
    epoch_seconds,
    shard_sizes,
    simulate_stream,
    speechbrain_limit,
)
from batchtune.units import counted, format_percent

# Recommends one way to batch a stream, and says why; describes its shards, and warns of what they can't do.

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
            f"; {cheapest.name} takes {shown(cheapest)}, but two examples of a batch share one again in the next epoch "
            f"in {format_percent(cheapest.known_mates_again)} of cases, not {format_percent(row.known_mates_again)} "
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
        each = max(each, ceil_div(total_bytes, _BYTES_OF_A_SHARD * readers))
    maxcount = max(1, count // readers)
    for number in range(each, 0, -1):
        size = ceil_div(count, readers * number)
        if ceil_div(count, size) == readers * number:
            maxcount = size
            break
    shards = ceil_div(count, maxcount)
    maxsize = None if total_bytes is None else max(1, ceil_div(2 * total_bytes, shards))
    return ShardAdvice(shards=shards, maxcount=maxcount, maxsize_bytes=maxsize)


def shards_of(stream: StreamLengths, sizes: Sequence[int], readers: int) -> Shards:
    """Describe the shards, which hold these numbers of examples, for this many workers of all ranks."""
    counts = np.array(sizes, dtype=np.int64)
    totals = sums_between(stream.values, edges_of(counts))
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
            f"two examples of a batch share one again in the next epoch in {format_percent(row.known_mates_again)} of "
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


# The most padding of a batch to compare. SpeechBrain's target_batch_numel is always its maximum: on made-up speech and
# text, targets of 80% and 90% made 2% to 25% more batches, and saved at most 0.1% of the time.
_PADDING_RATIOS = (0.05, 0.1, 0.2, 0.4)
# How many epochs of each way are simulated, whose spread says which rows are equal. They are the same whatever --seed
# says: the seed decides which examples meet in training, not which way to make batches is the best.
_EPOCHS = 3
_SEED = 0
# Bytes of a unit of length as samples are held in memory: float32 at 16 kHz, 80 float32 features, 64-bit tokens.
_BYTES = {
    "s": 64_000.0,
    "ms": 64.0,
    "samples": 4.0,
    "frames": 320.0,
    "tokens": 8.0,
    "words": 8.0,
}


def run_stream_sweep(
    stream: StreamLengths,
    settings: StreamSettings,
    folder: Path,
    *,
    max_batch_length: float | None = None,
    current: CurrentStream | None = None,
    force: bool = False,
    on_row: Callable[[StreamRow, int], None] = lambda row, rows: None,
) -> StreamSweep:
    """Sweep with the run folder's probe, if it has one, and write `stream.json`; raises as `run_sweep` does.

    `on_row` is called with each row as soon as it is known, and the number of all.
    """
    foreign, costs, known = costs_in(
        folder, stream.lengths, max_batch_length, force=force
    )
    limit = needed_limit(known, costs, folder)
    result = sweep_stream(stream, limit, settings, costs, current, on_row)
    if foreign:
        clear_run(folder)
    write_result(folder / STREAM_FILE, result)
    return result


def sweep_stream(
    stream: StreamLengths,
    max_batch_length: float,
    settings: StreamSettings,
    costs: Costs,
    current: CurrentStream | None = None,
    on_row: Callable[[StreamRow, int], None] = lambda row, rows: None,
) -> StreamSweep:
    """Simulate epochs of each worker's stream with every way to make batches, and recommend one.

    Raises UsageError if `max_batch_length` is not positive and finite, or the current settings make no batch.
    """
    lengths = stream.lengths
    if settings.bytes_per_length is None:
        settings = structs.replace(
            settings, bytes_per_length=_BYTES.get(lengths.unit or "", 1.0)
        )
    settings = structs.replace(
        settings, max_batch_size=settings.max_batch_size or costs.max_batch_size
    )
    limits = Limits(
        max_batch_length=max_batch_length,
        max_batch_size=settings.max_batch_size,
        frontier=costs.frontier,
    )
    fitting = limits
    share = 1.0
    if settings.min_steps is not None:
        check_min_steps(
            settings.min_steps, lengths, RankSplit(world_size=settings.world_size)
        )
        # Ranks need not have as many: each should have enough on average.
        fewest = min(lengths.count, settings.min_steps * settings.world_size)
        share = share_for(lengths, fitting, fewest)
    if share < 1.0:
        max_batch_length = shrunk_limit(max_batch_length, share, lengths)
        costs = shrunk(costs, share)
        limits = replace(
            limits, max_batch_length=max_batch_length, frontier=costs.frontier
        )
    of_map = SweepSettings(
        strategies=tuple(
            name for name, strategy in STRATEGIES.items() if strategy.depends_on_sizes
        ),
        num_buckets=settings.num_buckets,
        max_batch_size=settings.max_batch_size,
        seed=_SEED,
        world_size=settings.world_size,
    )
    as_map = sweep(lengths, max_batch_length, of_map, costs)
    tables = [row for row in as_map.rows if row.sizing == limits.sizings[-1]]
    sizes = shard_sizes(stream, settings.shard_size)
    stored = StoredStream.of(stream.values, stream.targets, sizes, settings, _SEED)
    pricing = Pricing.of(lengths, max_batch_length, of_map, costs)
    ways = list(_ways(tables, lengths, limits, settings))
    # The user's settings first, as they may have to be corrected.
    if current is not None:
        ways.insert(0, current.batching)
    priced: list[tuple[StreamRow, EpochTime | None]] = []
    current_fits = None
    for way in ways:
        epochs = [simulate_stream(stored, way, epoch) for epoch in range(_EPOCHS)]
        if current is not None and not priced:
            current_fits = _fit(epochs, fitting)
        row, time = _priced(way, epochs, stored, pricing, settings)
        priced.append((row, time))
        on_row(row, len(ways))
    current_row = None
    if current is not None:
        current_row = with_equals(priced)[0]
        del priced[0]
    rows = with_equals(priced)
    # Sized as the stream's tables are, so that only the stream makes a difference.
    steps_kept = settings.min_steps is not None
    best_table = recommend(tables, as_map.baselines, steps_kept=steps_kept)
    map_style = row_at(tables, best_table.portable)
    recommendation = recommend_stream(
        rows, min_randomness=settings.min_randomness, steps_kept=steps_kept
    )
    chosen = row_at(rows, recommendation.row)
    shards = shards_of(stream, sizes, settings.readers)
    warnings = [
        *stream_cautions(shards, settings.shard_size, settings.readers),
        *longer_than(
            lengths,
            fitting.max_batch_length,
            "max_batch_length",
            "each becomes a batch of one",
        ),
        *row_cautions(shards, chosen, map_style),
        *costs.warnings,
    ]
    if current is not None:
        warnings += current.notes
    swept = StreamSweep(
        meta=meta_of(StreamSweep),
        lengths=lengths.summary(),
        max_batch_length=max_batch_length,
        settings=settings,
        device_name=costs.device_name,
        simulated_examples=stored.lengths.size,
        shards=shards,
        rows=rows,
        map_style=map_style,
        recommended=recommendation.row,
        recommended_speechbrain=recommendation.portable,
        batches_per_rank=None
        if chosen is None
        else ceil_div(chosen.batches, settings.world_size),
        reason=recommendation.reason + kept_steps(settings.min_steps, share),
        warnings=warnings,
        current=current_row,
        current_fits=current_fits,
        current_settings=None if current is None else current.settings,
    )
    timed = have_times(rows)
    if chosen is None or not keeps_current(swept, chosen, timed=timed):
        return swept
    return structs.replace(
        swept,
        recommended=None,
        recommended_speechbrain=None,
        batches_per_rank=None,
        reason=keeping_reason(swept, chosen, timed=timed),
    )


def _fit(epochs: Sequence[StreamEpoch], limits: Limits) -> bool:
    """Return whether the batches of the current settings stay within the limits; UsageError if there are none."""
    if not all(epoch.batches_by_worker.any() for epoch in epochs):
        raise UsageError(
            "--current: these settings make no batch of the stream",
            "drop_end and drop_last drop what the buffer holds when the stream ends: everything, if a worker reads "
            "no more than the buffer holds. min_sample_len and max_sample_len may leave out everything, too.",
        )
    return all(
        limits.allow(epoch.shapes.batch_sizes, epoch.shapes.lengths) for epoch in epochs
    )


def _ways(
    tables: Sequence[Row], lengths: Lengths, limits: Limits, settings: StreamSettings
) -> Iterator[AnyBatching]:
    """Yield the ways to make batches that are compared, for each size of the buffer."""
    all_sizes = limits.pooled_table(lengths.histogram)
    limit = speechbrain_limit(lengths, limits)
    # Each set of boundaries once.
    different = {
        tuple(row.boundaries): BucketTable.of(row.boundaries, row.batch_sizes)
        for row in tables
    }
    for buffer_size in sizes_up_to(lengths.count, settings.buffer_sizes):
        for table in different.values():
            yield StreamBatching(
                algorithm="bucket", table=table, buffer_size=buffer_size
            )
        for ratio in _PADDING_RATIOS:
            yield StreamBatching(
                algorithm="pivot",
                table=all_sizes,
                buffer_size=buffer_size,
                max_padding_ratio=ratio,
            )
        for ratio in _PADDING_RATIOS:
            yield PivotSettings(
                target_batch_numel=limit,
                max_batch_numel=limit,
                max_batch_size=limits.max_batch_size,
                max_padding_ratio=ratio,
                buffersize=buffer_size,
            )


def _priced(
    way: AnyBatching,
    epochs: Sequence[StreamEpoch],
    stored: StoredStream,
    pricing: Pricing,
    settings: StreamSettings,
) -> tuple[StreamRow, EpochTime | None]:
    """Return the row of a way to make batches, from its simulated epochs, and its time."""
    first = epochs[0]
    sizes = first.shapes.batch_sizes.astype(np.float64)
    longest = first.shapes.lengths
    batches_by_epoch = np.array([epoch.weights.sum() for epoch in epochs])
    batches = max(1, round(float(batches_by_epoch.mean())))
    padded_lengths = [epoch.total(epoch.shapes.padded_lengths) for epoch in epochs]
    padded_length = float(np.mean(padded_lengths))
    true_lengths = [epoch.total(_true_lengths(epoch, stored)) for epoch in epochs]
    true_length = float(np.mean(true_lengths))
    count = pricing.lengths.count
    dropped = max(0, count - round(first.total(sizes)))
    mates = mates_in_cuts([epoch.cut for epoch in epochs], stored.lengths)
    mixing = distance_apart(first)
    workers = (first.batches_by_worker * stored.scale).reshape(settings.world_size, -1)
    ranks = workers.sum(axis=1)
    most_held = max(epoch.most_held for epoch in epochs)
    unproven = None
    if pricing.proven is not None:
        unproven = max(_unproven(epoch, pricing.proven) for epoch in epochs)
    time = None
    fields = _parameters(way)
    if pricing.step_seconds is not None:
        times = [epoch_seconds(stored, each, pricing.step_seconds) for each in epochs]
        time = EpochTime.simulated(np.array(times), first.shapes, pricing.step_seconds)
        fields |= time.fields()
    row = StreamRow(
        **fields,
        batches=batches,
        dropped_examples=dropped,
        padded_length=padded_length,
        padding_ratio=max(0.0, 1 - true_length / padded_length),  # rounding
        fill=pricing.total / (batches * pricing.max_batch_length),
        mean_batch_size=(count - dropped) / batches,
        smallest_batch_size=int(sizes.min()),
        largest_batch_size=int(sizes.max()),
        batch_size_variation=float(sizes.std() / sizes.mean()),
        largest_padded_length=float(first.shapes.padded_lengths.max()),
        under_half=float(np.mean(_filled(way, sizes, longest) < 0.5)),
        wait_median=float(np.median(first.waits)),
        wait_p99=float(np.percentile(first.waits, 99)),
        buffer_length=most_held,
        buffer_bytes=most_held * (settings.bytes_per_length or 0.0),
        worker_imbalance=float(workers.max() / workers.mean()),
        rank_imbalance=float(ranks.max() / ranks.mean()),
        mate_distance=mixing * (count + 1) / 3,
        mixing=mixing,
        mates_again=mates.again,
        length_correlation=mates.correlation,
        effective_buckets=effective_buckets(mates.again, first.cut.layout),
        simulated_epochs=_EPOCHS,
        batches_deviation=float(batches_by_epoch.std(ddof=1)),
        unproven=unproven,
    )
    return row, time


def _parameters(way: AnyBatching) -> dict[str, Any]:
    """Return the fields of a row that name its algorithm and settings."""
    if isinstance(way, PivotSettings):
        return {
            "algorithm": "speechbrain",
            "buffer_size": max(1, way.buffersize),
            "target_batch_numel": way.target_batch_numel,
            "max_batch_numel": way.max_batch_numel,
            "max_batch_size": way.max_batch_size,
            "max_padding_ratio": way.max_padding_ratio,
        }
    return {
        "algorithm": way.algorithm,
        "buffer_size": way.buffer_size,
        "boundaries": way.table.boundaries.tolist(),
        "batch_sizes": way.table.batch_sizes.tolist(),
        "max_padding_ratio": way.max_padding_ratio,
    }


def _filled(way: AnyBatching, sizes: FloatArray, longest: FloatArray) -> FloatArray:
    """Return each batch's size relative to what it could be."""
    if isinstance(way, PivotSettings):
        return sizes * longest / way.target_batch_numel
    return sizes / way.table.batch_sizes[way.table.assign(longest)]


def _true_lengths(epoch: StreamEpoch, stored: StoredStream) -> FloatArray:
    """Return the true length of each batch."""
    return np.add.reduceat(stored.lengths[epoch.cut.examples], epoch.cut.layout.starts)


def _unproven(epoch: StreamEpoch, proven: Callable[[FloatArray], IntArray]) -> int:
    return int(
        np.count_nonzero(epoch.shapes.batch_sizes > proven(epoch.shapes.lengths))
    )
