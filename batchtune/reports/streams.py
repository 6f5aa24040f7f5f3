"""What a report says of a stream: what to set, what that saves and costs, its shards, warnings."""

from __future__ import annotations

from collections.abc import Iterator

from batchtune.reports.comparisons import advantage, batches_words, is_better, padding, savings, time_error
from batchtune.reports.pools import format_correlation
from batchtune.reports.rows import CURRENT, DOES_NOT_FIT, format_share
from batchtune.reports.run import RunResults
from batchtune.reports.trade_offs import batch_sizes
from batchtune.results import ROUNDING, STREAM_CONFIG_FILE, Row, Shards, StreamRow, StreamSweep
from batchtune.units import (
    counted,
    format_length,
    format_number,
    format_percent,
    format_ratio,
    format_seconds,
    format_size,
    with_full_stop,
)

SPEECHBRAIN = "SpeechBrain's best setting"
MAP_STYLE = "a map-style bucket table"


def stream_headline(stream: StreamSweep) -> str:
    """Say what to set, as one would type it, and compare it with the first of the others."""
    row = stream.recommended_row
    if row is None:
        why = with_full_stop(f": {stream.reason}") if stream.reason else "."
        return f"No way to batch the stream is recommended{why}"
    limit, sized = stream.max_batch_length * (1 + ROUNDING), ""
    if not row.by_speechbrain:
        sized = f" with max_batch_length = {format_length(stream.max_batch_length, stream.lengths.unit)}"
        if any(end * size > limit and size > 1 for end, size in zip(row.boundaries, row.batch_sizes, strict=True)):
            sized = " with measured batch sizes"
    return f"Set {typed_call(row)}{sized}{advantage(row, compared_streams(stream))}."


def typed_call(row: StreamRow) -> str:
    """Return a row as the call that one would type, without the bucket table, which `stream.yaml` holds."""
    if not row.by_speechbrain:
        padding = "" if row.max_padding_ratio is None else f", max_padding_ratio={row.max_padding_ratio:g}"
        return f'BucketedStream(algorithm="{row.algorithm}", buffer_size={row.buffer_size}{padding})'
    numbers = {
        "target_batch_numel": row.target_batch_numel,
        "max_batch_numel": row.max_batch_numel,
        "max_batch_size": row.max_batch_size,
    }
    known = [f'"{name}": {number:.15g}' for name, number in numbers.items() if number is not None]
    # SpeechBrain's own default is 0.2, so that None has to be typed, too.
    ratio = "None" if row.max_padding_ratio is None else f"{row.max_padding_ratio:g}"
    settings = ", ".join([*known, f'"max_padding_ratio": {ratio}'])
    return f"dynamic_bucketed_batch(buffersize={row.buffer_size}, sampler_kwargs={{{settings}}})"


def compared_streams(stream: StreamSweep) -> list[tuple[str, StreamRow | Row]]:
    """Name what the recommended row is compared with: the user's settings, SpeechBrain's best, random access."""
    others: list[tuple[str, StreamRow | Row]] = []
    if stream.current is not None and stream.current_fits is not False:
        others.append((CURRENT, stream.current))
    if (alone := stream.speechbrain_row) is not None and alone is not stream.recommended_row:
        others.append((SPEECHBRAIN, alone))
    if stream.map_style is not None:
        others.append((MAP_STYLE, stream.map_style))
    return others


def stream_sentences(stream: StreamSweep) -> Iterator[str]:
    """Say what the recommendation saves and costs, most important first; the headline comes before."""
    row = stream.recommended_row
    if row is None:
        return
    others = compared_streams(stream)
    yield from savings(stream, row, others, "ways to batch")
    yield from _cost_of_streaming(stream, row)
    yield padding(row, others)
    if stream.reason:
        yield f"Why: {with_full_stop(stream.reason)}"
    yield from brief_stream_sentences(stream)
    if (batches := stream.batches_per_rank) is not None:
        yield (
            f"A nominal epoch has {format_number(batches)} batches on each rank: looped_nominal_epoch={batches} in "
            f"SpeechBrain, .with_epoch({batches}) in WebDataset."
        )
    yield _mixing(row, stream.map_style)
    yield _buffer(stream, row)
    if (sizes := batch_sizes(row)) is not None:
        yield f"{sizes}; {format_share(row.under_half)} of the batches are less than half as large as they could be."
    if row.dropped_examples:
        yield f"An epoch leaves out {counted(row.dropped_examples, 'example')} at its end (drop_end)."
    if row.worker_imbalance > 1:
        yield (
            f"The busiest worker makes {format_ratio(row.worker_imbalance)} times as many batches as the mean of all, "
            f"the busiest rank {format_ratio(row.rank_imbalance)} times."
        )
    yield from time_error(row)
    if stream.simulated_examples < stream.lengths.count:
        yield (
            f"{format_number(stream.simulated_examples)} of {counted(stream.lengths.count, 'example')} were simulated, "
            "the first shards of each worker. The figures are those of all, but batch mates will meet again less often."
        )


def brief_stream_sentences(stream: StreamSweep) -> Iterator[str]:
    """Say what else to set: SpeechBrain's own function without BucketedStream, the shards."""
    row, alone = stream.recommended_row, stream.speechbrain_row
    if row is None:
        return
    if row.unproven == 0:
        yield "Every batch of the simulated epoch was run, or is no larger than one that was."
    if stream.current is not None and stream.current_fits is not False and is_better(stream.current, row):
        yield "Your current config is better than the recommended one: keep it."
    unit = stream.lengths.unit
    if alone is not None and alone is not row:
        numbers = f" (numbers in {unit})" if unit else ""
        yield f"With SpeechBrain alone: {typed_call(alone)}{numbers}."
    elif row.by_speechbrain and unit:
        yield f"target_batch_numel and max_batch_numel are in {unit}: len_key has to give lengths in {unit}, too."
    if (advice := stream.shards.advice) is not None:
        size = "" if advice.maxsize_bytes is None else f", maxsize={advice.maxsize_bytes}"
        yield (
            f"For these ranks and workers, write {counted(advice.shards, 'shard')}: ShardWriter(pattern, "
            f"maxcount={advice.maxcount}{size})."
        )


def _cost_of_streaming(stream: StreamSweep, row: StreamRow) -> Iterator[str]:
    table = stream.map_style
    if table is None:
        return
    theirs, seconds = f"{format_number(table.batches)} batches", table.estimated_epoch_seconds
    ratio = row.batches / table.batches
    if seconds and row.estimated_epoch_seconds is not None:
        theirs, ratio = f"an estimated {format_seconds(seconds)}", row.estimated_epoch_seconds / seconds
    change = format_percent(abs(ratio - 1))
    costs = "as much" if change == "0.0%" else f"{change} {'more' if ratio > 1 else 'less'}"
    yield (
        f"With random access to all examples, the best bucket table ({table.name}) needs {theirs}: the stream costs "
        f"{costs}."
    )


def _mixing(row: StreamRow, table: Row | None) -> str:
    against = ""
    if table is not None and table.mates_again is not None:
        against = f", against {format_share(table.mates_again)} with {MAP_STYLE}"
    alike = ""
    if row.length_correlation is not None:
        alike = f"; their lengths correlate by {format_correlation(row.length_correlation)}"
    return (
        f"Batch mates are stored {format_number(row.mate_distance)} examples apart on average, "
        f"{format_percent(row.mixing)} of the distance between any two; {format_share(row.mates_again)} are mates "
        f"again in the next epoch{against}{alike}."
    )


def _buffer(stream: StreamSweep, row: StreamRow) -> str:
    return (
        f"A worker holds at most {format_number(row.buffer_size)} examples, "
        f"{format_length(row.buffer_length, stream.lengths.unit)} in all ({format_size(row.buffer_bytes)}); an example "
        f"waits while {format_number(row.wait_median)} others are read (median; 99 in 100: at most "
        f"{format_number(row.wait_p99)})."
    )


def stream_facts(stream: StreamSweep) -> Iterator[tuple[str, str]]:
    """Name and value of what the stream is read from, and by how many."""
    yield "Shards", _shards(stream.shards, stream.lengths.unit)
    named = {
        "world_size": "world_size",
        "workers": "workers of a rank",
        "shuffle_shards": "shardshuffle",
        "shuffle_buffer": "shuffle buffer",
        "seed": "seed",
    }
    parts = [f"{words} {stream.settings[name]}" for name, words in named.items() if name in stream.settings]
    if parts:
        yield "Stream", ", ".join(parts)


def _shards(shards: Shards, unit: str | None) -> str:
    if shards.assumed:
        examples = f"{format_number(shards.largest_count)} examples"
        return f"{format_number(shards.count)} of {examples} each, assumed: the source is no set of shards"
    counts = f"{format_number(shards.smallest_count)} to {format_number(shards.largest_count)}"
    lengths = f"{format_length(shards.smallest_length, unit)} to {format_length(shards.largest_length, unit)}"
    problems = {
        "damaged": shards.broken,
        "without examples": shards.empty,
        "repeated keys": shards.repeated_ids,
        "workers without a shard": shards.idle_workers,
    }
    found = [f"{format_number(number)} {what}" for what, number in problems.items() if number]
    return "; ".join(
        (
            f"{format_number(shards.count)} of {counts} examples (median {format_number(shards.median_count)}), "
            f"{lengths} in all",
            *found,
            *(["in order of length"] if shards.sorted else []),
        )
    )


def stream_warnings(stream: StreamSweep) -> Iterator[str]:
    """Yield what is wrong with the recommended batches and the user's own, then the sweep's own warnings."""
    row = stream.recommended_row
    if row is not None and row.unproven:
        verb = "is" if row.unproven == 1 else "are"
        yield (
            f"{format_number(row.unproven)} of {batches_words(row.batches)} {verb} larger than what is proven to fit. "
            "Run `batchtune probe-oom` again with --force, then `batchtune sweep-stream`."
        )
    if stream.current_fits is False:
        yield (
            f"{CURRENT.capitalize()} {DOES_NOT_FIT}: its batches are larger than what was measured to fit, or than "
            "max_batch_length where nothing was."
        )
    yield from map(with_full_stop, stream.warnings)


def stream_steps(results: RunResults, workload: str) -> Iterator[tuple[str, str]]:
    """Pair each command, or file, with what it is for, in the order to take them; `workload` are flags that name it."""
    stream, alone, verified = results.stream, results.sweep is None, results.verified(of_stream=True)
    folder, run = results.as_argument, results.as_option
    if stream is None:
        return
    if stream.recommended_row is None:
        yield f"batchtune sweep-stream SOURCE{run}", "compare other buffers and settings"
        return
    config, verify = str(results.folder / STREAM_CONFIG_FILE), f"batchtune verify --stream{folder} SHARDS{workload}"
    if verified is not None and not verified.holds:
        if verified.proposal is not None and verified.proposal.verified:
            yield config, "set the safe sizes there"
        yield verify, "run these batches again"
        return
    which = "the best" if stream.recommended_row.by_speechbrain else "the config,"
    yield config, f"{which} for BucketedStream"
    if results.probe is not None and verified is None:
        yield verify, "run these batches for real"
    if alone and results.probe is None:
        yield f"batchtune probe-oom MANIFEST --workload W{run}", "measure what fits"
    if alone:
        yield f"batchtune export{folder} --to FRAMEWORK", "the same for SpeechBrain, NeMo, ..."
