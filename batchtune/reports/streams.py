"""The section on a stream: how to batch it, what that saves and costs, its shards."""

from __future__ import annotations

from collections.abc import Iterator

from batchtune.lengths import SPEECH_UNITS
from batchtune.reports.rows import (
    CURRENT,
    DOES_NOT_FIT,
    UNPROVEN,
    advantage,
    batches_words,
    current_name,
    current_words,
    format_share,
    is_better,
    padding,
    savings,
    time_error_sentence,
)
from batchtune.reports.section import SweptSection
from batchtune.reports.table import Fact, Table, format_times, known, limits_table, make_table, shown_of, spread
from batchtune.results import ROUNDING, STREAM_CONFIG_FILE, Row, Shards, StreamRow, StreamSweep, cost_of
from batchtune.units import (
    counted,
    format_length,
    format_number,
    format_percent,
    format_seconds,
    format_size,
    with_full_stop,
)

MAP_STYLE = "map-style bucket table"
_MAX_ROWS = 500
# Setting of the sweep → its name in reports.
_STREAM_SETTINGS = {
    "world_size": "world_size",
    "workers": "workers of a rank",
    "shuffle_shards": "shardshuffle",
    "shuffle_buffer": "shuffle buffer",
    "seed": "seed",
}
Line = tuple[str, StreamRow | Row]
"""A name and what it costs; a `Row` is of random access."""


class StreamSection(SweptSection[StreamSweep]):
    """The section on `stream.json`."""

    title = "Stream"
    subject = "The stream's sweep"
    command = "Sweep the stream"

    def sentences(self) -> Iterator[str]:
        """Say what to set, as one would type it, what else to set, and what it saves and costs."""
        stream = self.result
        row = stream.recommended_row
        if row is None:
            why = f": {with_full_stop(stream.reason)}" if stream.reason else "."
            yield f"No way to batch the stream is recommended{why}"
            return
        yield self._headline(row)
        yield from self.doubts("ways to batch")
        yield from self.truncation()
        if row.unproven == 0:
            yield "Every batch of the simulated epoch was run, or is no larger than one that was."
        yield from self._other_settings(row)
        if stream.reason:
            yield f"Why: {with_full_stop(stream.reason)}"
        alternatives = _compared(stream)
        yield from savings(stream, row, alternatives, timed=self.has_reliable_times)
        if stream.map_style is not None:
            yield self._cost_of_streaming(row, stream.map_style)
        yield padding(row, alternatives)
        yield from self._details(row)

    def _headline(self, row: StreamRow) -> str:
        stream = self.result
        limit = stream.max_batch_length * (1 + ROUNDING)
        sizes = ""
        if not row.by_speechbrain:
            sizes = f" with max_batch_length = {format_length(stream.max_batch_length, stream.lengths.unit)}"
            buckets = zip(row.boundaries, row.batch_sizes, strict=True)
            if any(boundary * size > limit and size > 1 for boundary, size in buckets):
                sizes = " with measured batch sizes"
        saved = advantage(row, _compared(stream), timed=self.has_reliable_times)
        return f"Set {_typed_call(row)}{sizes}{saved}."

    def _details(self, row: StreamRow) -> Iterator[str]:
        """Say what is worth knowing of the recommended row, beyond what it saves."""
        stream = self.result
        batches = stream.batches_per_rank
        if batches is not None:
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
        if row.dropped_examples:
            yield f"An epoch leaves out {counted(row.dropped_examples, 'example')} at its end (drop_end)."
        yield from time_error_sentence(row)
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
        stream = self.result
        unit = stream.lengths.unit
        speechbrain = stream.speechbrain_row
        advice = stream.shards.advice
        current = stream.current
        if current is not None and stream.current_fits is not False:
            if is_better(current, row, timed=self.has_reliable_times):
                yield "Your current config is better than the recommended one: keep it."
        if speechbrain is not None and speechbrain is not row and unit in (*SPEECH_UNITS, None):
            numbers = f" (numbers in {unit})" if unit else ""
            yield f"With SpeechBrain alone: {_typed_call(speechbrain)}{numbers}."
        elif row.by_speechbrain and unit:
            yield f"target_batch_numel and max_batch_numel are in {unit}: len_key has to give lengths in {unit}, too."
        if advice is not None:
            size = "" if advice.maxsize_bytes is None else f", maxsize={advice.maxsize_bytes}"
            yield (
                f"For these ranks and workers, write {counted(advice.shards, 'shard')}: ShardWriter(pattern, "
                f"maxcount={advice.maxcount}{size})."
            )

    def _cost_of_streaming(self, row: StreamRow, table: Row) -> str:
        needs = f"{format_number(table.batches)} batches"
        ratio = row.batches / table.batches
        if self.has_reliable_times and table.estimated_epoch_seconds and row.estimated_epoch_seconds is not None:
            needs = f"an estimated {format_seconds(table.estimated_epoch_seconds)}"
            ratio = row.estimated_epoch_seconds / table.estimated_epoch_seconds
        change = format_percent(abs(ratio - 1))
        costs = f"{change} {'more' if ratio > 1 else 'less'}"
        if change == "0.0%":
            costs = "as much"
        return (
            f"With random access to all examples, the best bucket table ({table.name}) needs {needs}: the stream costs "
            f"{costs}."
        )

    def facts(self) -> Iterator[Fact]:
        """As for every section, with the shards and who reads them."""
        yield from super().facts()
        yield "Shards", _shards(self.result.shards, self.result.lengths.unit)
        parts = []
        for name, words in _STREAM_SETTINGS.items():
            if name in self.result.settings:
                parts.append(f"{words} {self.result.settings[name]}")
        if parts:
            yield "Stream", ", ".join(parts)

    def tables(self) -> Iterator[Table]:
        """Compare the recommended row with its alternatives, then lay out all rows and its batch sizes."""
        stream = self.result
        row = stream.recommended_row
        if row is not None:
            yield self._comparison(row)
        if stream.rows:
            yield _rows_table(stream)
        if row is not None and row.boundaries:
            title = "Largest batch size in the stream, by longest example"
            yield limits_table(title, row, stream.lengths.unit, STREAM_CONFIG_FILE)

    def _comparison(self, chosen: StreamRow) -> Table:
        """Compare the recommended row with the user's settings, the best of each other algorithm, and random access."""
        stream = self.result
        timed = self.has_reliable_times
        lines: list[Line] = [(f"recommended ({algorithm_name(chosen)})", chosen)]
        if stream.current is not None:
            lines.append((current_name(stream, CURRENT), stream.current))
        lines += [(f"{algorithm_name(row)}, best", row) for row in _best_of_each(stream) if row is not chosen]
        if stream.map_style is not None:
            lines.append((MAP_STYLE, stream.map_style))
        rows = []
        for name, row in lines:
            cells = {
                "": name,
                "buffer": None if isinstance(row, Row) else format_number(row.buffer_size),
                "batches": format_number(row.batches),
                "padding": format_percent(row.padding_ratio),
                "estimated epoch": known(row.estimated_epoch_seconds, format_seconds) if timed else None,
                "meet again": None if timed else format_share(row.mates_again),
                "relative": format_times(cost_of(row, timed=timed), cost_of(chosen, timed=timed)),
            }
            rows.append(cells)
        notes = [f"Your current config is {words}." for words in current_words(stream)]
        title = "What it saves" if self.is_main else "Stream: what it saves"
        return make_table(title, rows, notes, marked=0, names=[""], brief=True)

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
        run = self.run
        row = self.result.recommended_row
        verified = run.verified(of_stream=True)
        verify = f"batchtune verify --stream{run.as_argument} SHARDS{self.workload_flags}"
        if row is None:
            yield f"batchtune sweep-stream SOURCE{run.as_option}", "compare other buffers and settings"
            return
        if verified is not None and not verified.holds:
            yield verify, "run these batches again"
            return
        purpose = "the best for BucketedStream" if row.by_speechbrain else "the config, for BucketedStream"
        yield str(run.folder / STREAM_CONFIG_FILE), purpose
        if run.probe is not None and verified is None:
            yield verify, "run these batches for real"
        if run.sweep is None:
            if run.probe is None:
                yield f"batchtune probe-oom MANIFEST --workload W{run.as_option}", "measure what fits"
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


def _compared(stream: StreamSweep) -> list[Line]:
    """Name the alternatives to the recommended row: the user's settings, SpeechBrain's best, random access."""
    alternatives: list[Line] = []
    if stream.current is not None and stream.current_fits is not False:
        alternatives.append((CURRENT, stream.current))
    speechbrain = stream.speechbrain_row if stream.lengths.unit in SPEECH_UNITS else None
    if speechbrain is not None and speechbrain is not stream.recommended_row:
        alternatives.append(("SpeechBrain's best setting", speechbrain))
    if stream.map_style is not None:
        alternatives.append((f"a {MAP_STYLE}", stream.map_style))
    return alternatives


def _mixing(row: StreamRow, table: Row | None) -> str:
    text = (
        f"Batch mates are stored {format_number(row.mate_distance)} examples apart on average, "
        f"{format_percent(row.mixing)} of the distance between any two; {format_share(row.mates_again)} are mates "
        "again in the next epoch"
    )
    if table is not None:
        text += f", against {format_share(table.mates_again)} with a {MAP_STYLE}"
    return f"{text}."


def _shards(shards: Shards, unit: str | None) -> str:
    if shards.assumed:
        examples = f"{format_number(shards.largest_count)} examples"
        return f"{format_number(shards.count)} of {examples} each, assumed: the source is not a set of shards"
    parts = [
        f"{format_number(shards.count)} of {format_number(shards.smallest_count)} to "
        f"{format_number(shards.largest_count)} examples (median {format_number(shards.median_count)}), "
        f"{format_length(shards.smallest_length, unit)} to {format_length(shards.largest_length, unit)} in all"
    ]
    problems = {
        "damaged": shards.broken,
        "without examples": shards.empty,
        "repeated keys": shards.repeated_ids,
        "workers without a shard": shards.idle_workers,
    }
    parts += [f"{format_number(count)} {problem}" for problem, count in problems.items() if count]
    if shards.sorted:
        parts.append("in order of length")
    return "; ".join(parts)


def _best_of_each(stream: StreamSweep) -> list[StreamRow]:
    """Return the best row of each algorithm, in the file's order, with no larger a buffer than the recommended row's.

    Batches that are proven to fit go first; SpeechBrain's is the one that the sweep recommends.
    """
    chosen = stream.recommended_row
    timed = stream.has_times
    best: dict[str, StreamRow] = {}
    for algorithm in dict.fromkeys(row.algorithm for row in stream.rows):
        rows = [row for row in stream.rows if row.algorithm == algorithm]
        if chosen is not None:
            rows = [row for row in rows if row.buffer_size <= chosen.buffer_size] or rows
        best[algorithm] = min(rows, key=lambda row: (bool(row.unproven), cost_of(row, timed=timed) or 0.0))
    for row in (stream.speechbrain_row, chosen):
        if row is not None:
            best[row.algorithm] = row
    return list(best.values())


def _rows_table(stream: StreamSweep) -> Table:
    algorithms = [row.algorithm for row in stream.rows]
    grouped = sorted(range(len(algorithms)), key=lambda index: algorithms.index(algorithms[index]))
    kept = [] if stream.recommended is None else [grouped.index(stream.recommended)]
    shown = spread(grouped, _MAX_ROWS, kept)
    lines: list[Line] = [(algorithm_name(stream.rows[index]), stream.rows[index]) for index in shown]
    if stream.current is not None:
        lines.append((current_name(stream), stream.current))
    if stream.map_style is not None:
        lines.append((algorithm_name(stream.map_style), stream.map_style))
    rows = [{"algorithm": name, **row_cells(stream, row)} for name, row in lines]
    notes = [*shown_of(len(shown), len(stream.rows), " rows", "stream.json"), *_notes(stream)]
    marked = None if stream.recommended is None else shown.index(stream.recommended)
    return make_table("Ways to batch the stream", rows, notes, marked, len(shown), names=["algorithm"])


def row_cells(stream: StreamSweep, row: StreamRow | Row) -> dict[str, str | None]:
    """Return what tables and charts show of a row, by the titles of the columns."""
    in_stream = row if isinstance(row, StreamRow) else None
    num_buckets = len(row.boundaries) if isinstance(row, Row) else row.num_buckets
    mark = UNPROVEN if in_stream and in_stream.unproven else ""
    return {
        "target": _target(in_stream) if in_stream else None,
        "max pad": known(in_stream.max_padding_ratio, format_percent) if in_stream else None,
        "buckets": known(num_buckets, format_number),
        "buffer": f"{format_number(in_stream.buffer_size)}{mark}" if in_stream else None,
        "batches": format_number(row.batches),
        "padding": format_percent(row.padding_ratio),
        "estimated epoch": known(row.estimated_epoch_seconds, format_seconds) if stream.has_times else None,
        "meet again": format_share(row.mates_again),
    }


def _target(row: StreamRow) -> str | None:
    if row.target_batch_numel is None:
        return None
    target = format_number(row.target_batch_numel)
    return target if row.max_batch_numel is None else f"{target} of {format_number(row.max_batch_numel)}"


def _notes(stream: StreamSweep) -> Iterator[str]:
    if stream.recommended is not None:
        yield "▶ marks the recommended row."
    if any(row.unproven for row in (*stream.rows, stream.current) if row is not None):
        yield f"{UNPROVEN} marks rows with batches that are not proven to fit."
    if any(row.target_batch_numel is not None for row in stream.rows):
        unit = stream.lengths.unit
        counts = "in the unit of the lengths" if unit is None else f"in {unit}"
        yield f"“Target” is target_batch_numel of max_batch_numel, {counts}."
    yield "“Meet again” is the share of batch mates that are mates again in the next epoch."
