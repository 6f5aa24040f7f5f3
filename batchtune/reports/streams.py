"""The section on a stream: how to batch it, what that saves and costs, its shards."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from batchtune.lengths import SPEECH_UNITS
from batchtune.reports import RunResults
from batchtune.reports.section import (
    CURRENT,
    Cells,
    Section,
    Table,
    Times,
    best_of_sweep,
    brief_facts,
    comparison_table,
    cost_cells,
    current_name,
    fewer_steps,
    format_share,
    headline,
    known,
    make_table,
    sizes_table,
    swept_warnings,
)
from batchtune.results import (
    ROUNDING,
    STREAM_CONFIG_FILE,
    AnyRow,
    Row,
    Shards,
    StreamRow,
    StreamSweep,
    cost_of,
)
from batchtune.units import (
    counted,
    format_length,
    format_number,
    format_percent,
    format_size,
    with_full_stop,
)

MAP_STYLE = "map-style bucket table"


def stream_section(run: RunResults) -> Section:
    """Return what to report on `stream.json`."""
    stream = run.stream
    assert stream is not None
    row = stream.recommended_row
    times = Times(run, stream)
    tables = [_rows_table(stream)] if stream.rows else []
    warnings = [*_warnings(stream), *swept_warnings(run, stream, "sweep-stream")]
    if row is None:
        reason = with_full_stop(stream.reason or "no reason is given")
        return Section(
            title="Stream",
            sentences=[f"Nothing is recommended for the stream: {reason}"],
            tables=tables,
            warnings=warnings,
            next_steps=[
                (
                    f"batchtune sweep-stream {run.manifest}{run.as_option}",
                    "compare other buffers and settings",
                )
            ],
        )
    proof = []
    if row.unproven == 0:
        proof.append(
            "Every batch of the simulated epochs was run, or is no larger than one that was."
        )
    facts = brief_facts(run, times, stream, proof)
    if stream.current is not None:
        ranks = stream.world_size
        facts += fewer_steps(-(-row.batches // ranks), stream.current.batches // ranks)
    if row.boundaries:
        tables.append(
            sizes_table(
                "Batch sizes of the stream",
                row,
                stream.lengths.unit,
                STREAM_CONFIG_FILE,
            )
        )
    verify = (
        f"batchtune verify --stream {run.manifest}{run.as_option}{run.workload_flags}"
    )
    config = (str(run.folder / STREAM_CONFIG_FILE), "the best for BucketedStream")
    return Section(
        title="Stream",
        sentences=[
            headline(
                _what_to_set(stream, row),
                row,
                _alternatives(stream),
                stream,
                timed=times.are_reliable,
            ),
            *facts,
            *_other_settings(stream, row),
            *_support(stream, row),
            *times.accuracy(),
        ],
        brief=1 + len(facts),
        tables=[_comparison(stream, row, timed=times.are_reliable), *tables],
        warnings=warnings,
        next_steps=list(run.steps_after_sweep(verify, config, of_stream=True)),
    )


def _what_to_set(stream: StreamSweep, row: StreamRow) -> str:
    """Return the row as a call, and its batch sizes in words."""
    limit = stream.max_batch_length * (1 + ROUNDING)
    sizes = ""
    if not row.by_speechbrain:
        sizes = f" with max_batch_length = {format_length(stream.max_batch_length, stream.lengths.unit)}"
        buckets = zip(row.boundaries, row.batch_sizes, strict=True)
        if any(boundary * size > limit and size > 1 for boundary, size in buckets):
            sizes = " with measured batch sizes"
    return f"{_typed_call(row)}{sizes}"


def _alternatives(stream: StreamSweep) -> dict[str, AnyRow]:
    """Return what the headline may compare with: the user's settings, SpeechBrain's best, random access."""
    rivals: dict[str, AnyRow] = {}
    speechbrain = stream.speechbrain_row
    if stream.current is not None and stream.current_fits is not False:
        rivals[CURRENT] = stream.current
    if (
        speechbrain is not None
        and speechbrain is not stream.recommended_row
        and stream.lengths.unit in SPEECH_UNITS
    ):
        rivals["SpeechBrain's best setting"] = speechbrain
    if stream.map_style is not None:
        rivals[f"a {MAP_STYLE}"] = stream.map_style
    return rivals


def _typed_call(row: StreamRow) -> str:
    """Return a row as the call that one would type, without the bucket table, which `stream.yaml` holds."""
    if not row.by_speechbrain:
        padding = (
            ""
            if row.max_padding_ratio is None
            else f", max_padding_ratio={row.max_padding_ratio:g}"
        )
        return f'BucketedStream(algorithm="{row.algorithm}", buffer_size={row.buffer_size}{padding})'
    limits = {
        "target_batch_numel": row.target_batch_numel,
        "max_batch_numel": row.max_batch_numel,
        "max_batch_size": row.max_batch_size,
    }
    settings = [
        f'"{name}": {number:.15g}'
        for name, number in limits.items()
        if number is not None
    ]
    # SpeechBrain's own default is 0.2, so that None has to be typed, too.
    settings.append(f'"max_padding_ratio": {row.max_padding_ratio}')
    return f"dynamic_bucketed_batch(buffersize={row.buffer_size}, sampler_kwargs={{{', '.join(settings)}}})"


def _other_settings(stream: StreamSweep, row: StreamRow) -> Iterator[str]:
    """Say what else to set: SpeechBrain's own function instead of BucketedStream, the epoch, the shards."""
    unit = stream.lengths.unit
    speechbrain = stream.speechbrain_row
    advice = stream.shards.advice
    batches = stream.batches_per_rank
    if row.by_speechbrain and unit:
        yield f"target_batch_numel and max_batch_numel are in {unit}: len_key has to give lengths in {unit}, too."
    elif speechbrain is not None and unit in (*SPEECH_UNITS, None):
        numbers = f" (numbers in {unit})" if unit else ""
        yield f"With SpeechBrain alone: {_typed_call(speechbrain)}{numbers}."
    if batches is not None:
        yield (
            f"A nominal epoch has {format_number(batches)} batches on each rank: looped_nominal_epoch={batches} in "
            f"SpeechBrain, .with_epoch({batches}) in WebDataset."
        )
    if advice is not None:
        size = (
            "" if advice.maxsize_bytes is None else f", maxsize={advice.maxsize_bytes}"
        )
        yield (
            f"For these ranks and workers, write {counted(advice.shards, 'shard')}: ShardWriter(pattern, "
            f"maxcount={advice.maxcount}{size})."
        )


def _support(stream: StreamSweep, row: StreamRow) -> Iterator[str]:
    """Say why the row is recommended, what a worker holds, and what was simulated."""
    if stream.reason:
        yield f"Why: {with_full_stop(stream.reason)}"
    yield _shards(stream.shards, stream.lengths.unit)
    yield (
        f"A worker holds at most {format_number(row.buffer_size)} examples, "
        f"{format_length(row.buffer_length, stream.lengths.unit)} in all ({format_size(row.buffer_bytes)})."
    )
    if row.dropped_examples:
        yield f"An epoch leaves out {counted(row.dropped_examples, 'example')} at its end (drop_end)."
    if row.simulated_epochs and row.batches_deviation is not None:
        yield (
            f"Figures are means of {row.simulated_epochs} simulated epochs, whose batches differ by "
            f"{format_percent(row.batches_deviation / row.batches)} (standard deviation)."
        )
    if stream.simulated_examples < stream.lengths.count:
        yield (
            f"{format_number(stream.simulated_examples)} of {counted(stream.lengths.count, 'example')} were simulated, "
            "the first shards of each worker. The figures are for all examples, but batch mates will meet again less "
            "often."
        )


def _shards(shards: Shards, unit: str | None) -> str:
    """Describe the shards; the warnings say what is wrong with them."""
    if shards.assumed:
        examples = f"{format_number(shards.largest_count)} examples"
        return f"Shards: {format_number(shards.count)} of {examples} each, assumed: the source is not a set of shards."
    return (
        f"Shards: {format_number(shards.count)} of {format_number(shards.smallest_count)} to "
        f"{format_number(shards.largest_count)} examples (median {format_number(shards.median_count)}), "
        f"{format_length(shards.smallest_length, unit)} to {format_length(shards.largest_length, unit)} in all."
    )


def algorithm_name(row: AnyRow) -> str:
    """Return what tables and charts call the algorithm of a row."""
    if isinstance(row, Row):
        return MAP_STYLE
    return "SpeechBrain" if row.by_speechbrain else row.algorithm


def _comparison(stream: StreamSweep, chosen: StreamRow, *, timed: bool) -> Table:
    """Compare the recommended row with the user's settings, the best of each other algorithm, and random access.

    Of an algorithm, batches that are proven to fit go first, and no buffer is larger than the recommended row's.
    """
    title, marked = best_of_sweep(stream, chosen, timed=timed)
    compared: dict[str, AnyRow] = {f"{title} ({algorithm_name(chosen)})": chosen}
    if stream.current is not None:
        compared[current_name(stream)] = stream.current
    for algorithm in dict.fromkeys(row.algorithm for row in stream.rows):
        rows = [row for row in stream.rows if row.algorithm == algorithm]
        rows = [row for row in rows if row.buffer_size <= chosen.buffer_size] or rows
        if stream.speechbrain_row in rows:
            rows = [stream.speechbrain_row]
        best = min(
            rows, key=lambda row: (bool(row.unproven), cost_of(row, timed=timed))
        )
        if algorithm != chosen.algorithm:
            compared[f"{algorithm_name(best)}, best"] = best
    if stream.map_style is not None:
        compared[MAP_STYLE] = stream.map_style
    return comparison_table(
        "What an epoch of the stream costs",
        compared,
        partial(_cells, timed=timed),
        timed=timed,
        steps_kept=stream.min_steps is not None,
        marked=marked,
    )


def _rows_table(stream: StreamSweep) -> Table:
    rows = [
        {
            "way": _way(row),
            **_cells(row),
            "unproven": known(row.unproven, format_number),
        }
        for row in stream.rows
    ]
    return make_table(
        "Ways to batch the stream",
        rows,
        left=["way"],
        marked=stream.recommended,
        file="stream.json",
    )


def _way(row: StreamRow) -> str:
    """Return the algorithm and its settings, without the buffer."""
    words = [algorithm_name(row)]
    if row.target_batch_numel is not None:
        words.append(f"target {format_number(row.target_batch_numel)}")
    if row.num_buckets is not None:
        words.append(counted(row.num_buckets, "bucket"))
    if row.max_padding_ratio is not None:
        words.append(f"padding to {format_share(row.max_padding_ratio)}")
    return ", ".join(words)


def _cells(row: AnyRow, *, timed: bool = True) -> Cells:
    """Return the size of the buffer, which random access does not have, and the cost."""
    buffer = format_number(row.buffer_size) if isinstance(row, StreamRow) else None
    return {
        "buffer": buffer,
        **cost_cells(row, timed=timed),
    }


def _warnings(stream: StreamSweep) -> Iterator[str]:
    """Say what is wrong with the recommended batches and the user's own."""
    row = stream.recommended_row
    if row is not None and row.unproven:
        yield (
            f"{format_number(row.unproven)} of {format_number(row.batches)} batches of an epoch are not proven to fit. "
            "`batchtune verify --stream` runs such batches."
        )
    if stream.current_fits is False:
        yield (
            f"{CURRENT.capitalize()} does not fit: its batches are larger than what was measured to fit, or than "
            "max_batch_length if nothing was measured."
        )
