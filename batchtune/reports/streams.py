"""The section on a stream: how to batch it, what that saves and costs, its shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from batchtune.lengths import SPEECH_UNITS
from batchtune.reports.rows import (
    CURRENT,
    DOES_NOT_FIT,
    UNPROVEN,
    advantage,
    batch_sizes,
    batches_words,
    current_name,
    current_words,
    format_correlation,
    format_share,
    is_better,
    padding,
    savings,
    time_error,
    without_times,
)
from batchtune.reports.section import SweptSection
from batchtune.reports.table import Fact, Table, format_times, known, limits_table, make_table, shown_of, spread
from batchtune.results import ROUNDING, STREAM_CONFIG_FILE, Row, Shards, StreamRow, StreamSweep, cost_of
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

MAP_STYLE = "map-style bucket table"
_MAX_ROWS = 500


class StreamSection(SweptSection[StreamSweep]):
    """The section on `stream.json`."""

    title, subject, command = "Stream", "The stream's sweep", "Sweep the stream"

    def headline(self) -> str:
        """Say what to set, as one would type it, and compare it with the first alternative."""
        stream, row = self.result, self.result.recommended_row
        if row is None:
            why = with_full_stop(f": {stream.reason}") if stream.reason else "."
            return f"No way to batch the stream is recommended{why}"
        limit, sized = stream.max_batch_length * (1 + ROUNDING), ""
        if not row.by_speechbrain:
            sized = f" with max_batch_length = {format_length(stream.max_batch_length, stream.lengths.unit)}"
            if any(end * size > limit and size > 1 for end, size in zip(row.boundaries, row.batch_sizes, strict=True)):
                sized = " with measured batch sizes"
        return f"Set {_typed_call(row)}{sized}{advantage(row, _compared(stream))}."

    def sentences(self) -> Iterator[str]:
        """Say what the recommended row saves and costs, most important first."""
        yield from self.evidence()
        stream, row = self.result, self.result.recommended_row
        if row is None:
            return
        if self.brief:
            if row.estimated_epoch_seconds is None:
                yield f"{without_times('ways to batch')}; the time saved may be much less."
            yield from self._other_settings(row)
            return
        others = _compared(stream)
        yield from savings(stream, row, others, "ways to batch")
        if stream.map_style is not None:
            yield _cost_of_streaming(row, stream.map_style)
        yield padding(row, others)
        if stream.reason:
            yield f"Why: {with_full_stop(stream.reason)}"
        yield from self._other_settings(row)
        if (batches := stream.batches_per_rank) is not None:
            yield (
                f"A nominal epoch has {format_number(batches)} batches on each rank: looped_nominal_epoch={batches} in "
                f"SpeechBrain, .with_epoch({batches}) in WebDataset."
            )
        yield _mixing(row, stream.map_style)
        yield (
            f"A worker holds at most {format_number(row.buffer_size)} examples, "
            f"{format_length(row.buffer_length, stream.lengths.unit)} in all ({format_size(row.buffer_bytes)}); an "
            f"example waits while {format_number(row.wait_median)} others are read (median; 99 in 100: at most "
            f"{format_number(row.wait_p99)})."
        )
        under_half = format_share(row.under_half)
        yield f"{batch_sizes(row)}; {under_half} of the batches are less than half as large as they could be."
        if row.dropped_examples:
            yield f"An epoch leaves out {counted(row.dropped_examples, 'example')} at its end (drop_end)."
        if row.worker_imbalance > 1:
            yield (
                f"The busiest worker makes {format_ratio(row.worker_imbalance)} times as many batches as the mean of "
                f"all, the busiest rank {format_ratio(row.rank_imbalance)} times."
            )
        yield from time_error(row)
        if row.simulated_epochs and row.batches_deviation is not None:
            yield (
                f"Figures are means of {row.simulated_epochs} simulated epochs, whose batches differ by "
                f"{format_percent(row.batches_deviation / row.batches)} (standard deviation)."
            )
        if stream.simulated_examples < stream.lengths.count:
            yield (
                f"{format_number(stream.simulated_examples)} of {counted(stream.lengths.count, 'example')} were "
                "simulated, the first shards of each worker. The figures are those of all, but batch mates will meet "
                "again less often."
            )

    def _other_settings(self, row: StreamRow) -> Iterator[str]:
        """Say what else to set: SpeechBrain's own function instead of BucketedStream, the shards."""
        stream, alone = self.result, self.result.speechbrain_row
        if row.unproven == 0:
            yield "Every batch of the simulated epoch was run, or is no larger than one that was."
        if stream.current is not None and stream.current_fits is not False and is_better(stream.current, row):
            yield "Your current config is better than the recommended one: keep it."
        unit = stream.lengths.unit
        if alone is not None and alone is not row and unit in (*SPEECH_UNITS, None):
            numbers = f" (numbers in {unit})" if unit else ""
            yield f"With SpeechBrain alone: {_typed_call(alone)}{numbers}."
        elif row.by_speechbrain and unit:
            yield f"target_batch_numel and max_batch_numel are in {unit}: len_key has to give lengths in {unit}, too."
        if (advice := stream.shards.advice) is not None:
            size = "" if advice.maxsize_bytes is None else f", maxsize={advice.maxsize_bytes}"
            yield (
                f"For these ranks and workers, write {counted(advice.shards, 'shard')}: ShardWriter(pattern, "
                f"maxcount={advice.maxcount}{size})."
            )

    def facts(self) -> Iterator[Fact]:
        """As for every section, with the shards and who reads them."""
        yield from super().facts()
        yield "Shards", _shards(self.result.shards, self.result.lengths.unit)
        named = {
            "world_size": "world_size",
            "workers": "workers of a rank",
            "shuffle_shards": "shardshuffle",
            "shuffle_buffer": "shuffle buffer",
            "seed": "seed",
        }
        settings = self.result.settings
        if parts := [f"{words} {settings[name]}" for name, words in named.items() if name in settings]:
            yield "Stream", ", ".join(parts)

    def tables(self) -> Iterator[Table]:
        """Lay out all rows, and the recommended row's batch sizes."""
        stream, row = self.result, self.result.recommended_row
        if stream.rows:
            yield _rows_table(stream)
        if row is not None and row.boundaries:
            title = "Largest batch size in the stream, by longest example"
            yield limits_table(title, row, stream.lengths.unit, STREAM_CONFIG_FILE)

    def comparison(self) -> Iterator[Table]:
        """Compare the recommended row with the user's settings, the best of each other algorithm, and random access."""
        stream, timed, chosen = self.result, self.result.has_times, self.result.recommended_row
        if chosen is None:
            return
        lines: list[tuple[str, StreamRow | Row]] = [(f"recommended ({algorithm_name(chosen)})", chosen)]
        if stream.current is not None:
            lines.append((current_name(stream, CURRENT), stream.current))
        lines += [(f"{algorithm_name(row)}, best", row) for row in _best_of_each(stream) if row is not chosen]
        if stream.map_style is not None:
            lines.append((MAP_STYLE, stream.map_style))
        rows = [
            {
                "": name,
                "buffer": None if isinstance(row, Row) else format_number(row.buffer_size),
                **_costs(stream, row),
                "meet again": None if timed else known(row.mates_again, format_share),
                "relative": format_times(cost_of(row, timed=timed), cost_of(chosen, timed=timed)),
            }
            for name, row in lines
        ]
        notes = [f"Your current config is {words}." for words in current_words(stream)]
        yield make_table("" if self.is_main else self.title, rows, notes, marked=0)

    def warnings(self) -> Iterator[str]:
        """Yield what is wrong with the recommended batches and the user's own, then the sweep's own warnings."""
        row = self.result.recommended_row
        if row is not None and row.unproven:
            verb = "is" if row.unproven == 1 else "are"
            yield (
                f"{format_number(row.unproven)} of {batches_words(row.batches)} {verb} larger than what is proven to "
                "fit. Run `batchtune probe-oom` again with --force, then `batchtune sweep-stream`."
            )
        if self.result.current_fits is False:
            yield (
                f"{CURRENT.capitalize()} {DOES_NOT_FIT}: its batches are larger than what was measured to fit, or than "
                "max_batch_length where nothing was."
            )
        yield from super().warnings()

    def steps(self) -> Iterator[Fact]:
        """As for every section."""
        run, row = self.run, self.result.recommended_row
        verified, alone = run.verified(of_stream=True), run.sweep is None
        config = str(run.folder / STREAM_CONFIG_FILE)
        verify = f"batchtune verify --stream{run.as_argument} SHARDS{self.workload_flags}"
        if row is None:
            yield f"batchtune sweep-stream SOURCE{run.as_option}", "compare other buffers and settings"
        elif verified is not None and not verified.holds:
            yield verify, "run these batches again"
        else:
            yield config, f"{'the best' if row.by_speechbrain else 'the config,'} for BucketedStream"
            if run.probe is not None and verified is None:
                yield verify, "run these batches for real"
            if alone and run.probe is None:
                yield f"batchtune probe-oom MANIFEST --workload W{run.as_option}", "measure what fits"
            if alone:
                yield f"batchtune export{run.as_argument} --to FRAMEWORK", "the same for SpeechBrain, NeMo, ..."


def algorithm_name(row: StreamRow | Row) -> str:
    """Return what tables and charts call the algorithm of a row."""
    if isinstance(row, Row):
        return "map-style"
    return "SpeechBrain" if row.by_speechbrain else row.algorithm


def _typed_call(row: StreamRow) -> str:
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


def _compared(stream: StreamSweep) -> list[tuple[str, StreamRow | Row]]:
    """Name the alternatives to the recommended row: the user's settings, SpeechBrain's best, random access."""
    others: list[tuple[str, StreamRow | Row]] = []
    if stream.current is not None and stream.current_fits is not False:
        others.append((CURRENT, stream.current))
    alone = stream.speechbrain_row if stream.lengths.unit in SPEECH_UNITS else None
    if alone is not None and alone is not stream.recommended_row:
        others.append(("SpeechBrain's best setting", alone))
    if stream.map_style is not None:
        others.append((f"a {MAP_STYLE}", stream.map_style))
    return others


def _cost_of_streaming(row: StreamRow, table: Row) -> str:
    theirs, seconds = f"{format_number(table.batches)} batches", table.estimated_epoch_seconds
    ratio = row.batches / table.batches
    if seconds and row.estimated_epoch_seconds is not None:
        theirs, ratio = f"an estimated {format_seconds(seconds)}", row.estimated_epoch_seconds / seconds
    change = format_percent(abs(ratio - 1))
    costs = "as much" if change == "0.0%" else f"{change} {'more' if ratio > 1 else 'less'}"
    best = f"With random access to all examples, the best bucket table ({table.name}) needs {theirs}"
    return f"{best}: the stream costs {costs}."


def _mixing(row: StreamRow, table: Row | None) -> str:
    against = alike = ""
    if table is not None and table.mates_again is not None:
        against = f", against {format_share(table.mates_again)} with a {MAP_STYLE}"
    if row.length_correlation is not None:
        alike = f"; their lengths correlate by {format_correlation(row.length_correlation)}"
    return (
        f"Batch mates are stored {format_number(row.mate_distance)} examples apart on average, "
        f"{format_percent(row.mixing)} of the distance between any two; {format_share(row.mates_again)} are mates "
        f"again in the next epoch{against}{alike}."
    )


def _shards(shards: Shards, unit: str | None) -> str:
    if shards.assumed:
        examples = f"{format_number(shards.largest_count)} examples"
        return f"{format_number(shards.count)} of {examples} each, assumed: the source is not a set of shards"
    counts = f"{format_number(shards.smallest_count)} to {format_number(shards.largest_count)}"
    lengths = f"{format_length(shards.smallest_length, unit)} to {format_length(shards.largest_length, unit)}"
    described = f"{format_number(shards.count)} of {counts} examples (median {format_number(shards.median_count)})"
    problems = {
        "damaged": shards.broken,
        "without examples": shards.empty,
        "repeated keys": shards.repeated_ids,
        "workers without a shard": shards.idle_workers,
    }
    found = [f"{format_number(number)} {what}" for what, number in problems.items() if number]
    return "; ".join([f"{described}, {lengths} in all", *found, *(["in order of length"] if shards.sorted else [])])


def _best_of_each(stream: StreamSweep) -> list[StreamRow]:
    """Return the best row of each algorithm, in the file's order, with no larger a buffer than the recommended row's.

    Batches that are proven to fit go first; SpeechBrain's is the one that the sweep recommends.
    """
    chosen, timed = stream.recommended_row, stream.has_times
    best = []
    for algorithm in dict.fromkeys(row.algorithm for row in stream.rows):
        rows = [row for row in stream.rows if row.algorithm == algorithm]
        if chosen is not None:
            rows = [row for row in rows if row.buffer_size <= chosen.buffer_size] or rows
        best.append(min(rows, key=lambda row: (bool(row.unproven), cost_of(row, timed=timed) or 0.0)))
    named = {row.algorithm: row for row in (stream.speechbrain_row, chosen) if row is not None}
    return [named.get(row.algorithm, row) for row in best]


def _rows_table(stream: StreamSweep) -> Table:
    algorithms = [row.algorithm for row in stream.rows]
    grouped = sorted(range(len(algorithms)), key=lambda index: algorithms.index(algorithms[index]))
    shown = spread(grouped, _MAX_ROWS, [] if stream.recommended is None else [grouped.index(stream.recommended)])
    lines: list[tuple[str, StreamRow | Row]] = [(algorithm_name(row), row) for row in (stream.rows[i] for i in shown)]
    if stream.current is not None:
        lines.append((current_name(stream), stream.current))
    if stream.map_style is not None:
        lines.append((algorithm_name(stream.map_style), stream.map_style))
    rows = [{"algorithm": name, **row_cells(stream, row)} for name, row in lines]
    notes = [*shown_of(len(shown), len(stream.rows), " rows", "stream.json"), *_notes(stream)]
    marked = None if stream.recommended is None else shown.index(stream.recommended)
    return make_table("Ways to batch the stream", rows, notes, marked, len(shown))


def row_cells(stream: StreamSweep, row: StreamRow | Row) -> dict[str, str | None]:
    """Return what tables and charts show of a row, by the titles of the columns."""

    def cell(field: str, words: Callable[[Any], str]) -> str | None:
        return known(getattr(row, field, None), words)  # the map-style table has not all of them

    most = cell("max_batch_numel", lambda numel: f" of {format_number(numel)}") or ""
    mark = UNPROVEN if row.unproven and isinstance(row, StreamRow) else ""
    return {
        "target": cell("target_batch_numel", lambda numel: f"{format_number(numel)}{most}"),
        "max pad": cell("max_padding_ratio", format_percent),
        "max size": cell("max_batch_size", format_number),
        "buckets": known(len(row.boundaries) if isinstance(row, Row) else row.num_buckets, format_number),
        "buffer": cell("buffer_size", lambda size: f"{format_number(size)}{mark}"),
        **_costs(stream, row),
        "mean batch": f"{row.mean_batch_size:.1f}",
        "meet again": known(row.mates_again, format_share),
        "under half": cell("under_half", format_share),
        "mixing": cell("mixing", format_percent),
        "memory": cell("buffer_bytes", format_size),
        "waits": cell("wait_median", format_number),
    }


def _costs(stream: StreamSweep, row: StreamRow | Row) -> dict[str, str | None]:
    """Return the cells that say what an epoch costs."""
    return {
        "batches": format_number(row.batches),
        "padding": format_percent(row.padding_ratio),
        "estimated epoch": known(row.estimated_epoch_seconds, format_seconds) if stream.has_times else None,
    }


def _notes(stream: StreamSweep) -> Iterator[str]:
    if stream.recommended is not None:
        yield "▶ marks the recommended row."
    if any(row.unproven for row in (*stream.rows, stream.current) if row is not None):
        yield f"{UNPROVEN} marks rows with batches that are not proven to fit."
    if any(row.target_batch_numel is not None for row in stream.rows):
        unit = stream.lengths.unit
        counts = "in the unit of the lengths" if unit is None else f"in {unit}"
        yield f"“Target” is target_batch_numel of max_batch_numel, {counts}."
    yield (
        "“Mixing” is how far apart batch mates are stored, as a share of the distance between any two examples; “meet "
        "again” the share of batch mates that are mates again in the next epoch; “under half” the share of batches "
        "that hold less than half of what they could; “waits” how many examples a worker reads until one's batch is "
        "made (median); “memory” that of a worker's full buffer."
    )
