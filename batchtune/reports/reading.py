"""The sections on how data are read: a stream and its shards, and a data loader."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from msgspec.structs import replace

from batchtune.lengths import SPEECH_UNITS, ceil_div
from batchtune.loaders import kind_of
from batchtune.reports import NextStep, RunResults
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
    failures_table,
    fewer_steps,
    format_share,
    headline,
    known,
    make_table,
    settings_table,
    sizes_table,
    swept_warnings,
)
from batchtune.results import (
    LOADER_CONFIG_FILE,
    ROUNDING,
    STREAM_CONFIG_FILE,
    AnyRow,
    LoaderRow,
    LoaderTuning,
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
    format_seconds,
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
        facts += fewer_steps(
            ceil_div(row.batches, ranks), stream.current.batches // ranks
        )
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


# The section on a data loader: what to set, whether the step waits for it, what failed.

_OUTCOMES = {
    "error": "an error",
    "timeout": "no batch within the time limit",
    "crash": "a process died",
    "oom": "out of memory",
    "shared_memory": "/dev/shm is too small",
    "empty": "no batch",
    "repeats": "workers repeat each other",
}


def loader_section(run: RunResults) -> Section:
    """Return what to report on `loader.json`."""
    loader = run.loader
    assert loader is not None
    row = loader.recommended_row
    tables = []
    if row is not None:
        tables.append(_loader_comparison(loader, row))
    if loader.working_rows:
        tables.append(_loader_rows_table(loader))
    tables += failures_table(
        "Settings that failed",
        (
            (
                setting_name(loader, row),
                _OUTCOMES.get(row.outcome, row.outcome),
                row.error,
            )
            for row in _failed(loader)
        ),
        of="setting",
        file="loader.json",
        most=20,
    )
    tables.append(
        settings_table(
            "Settings of the tuning", {"kind": loader.kind, **loader.settings}
        )
    )
    return Section(
        title="Loader",
        sentences=[_headline(loader), *_loader_support(loader)],
        brief=3,
        tables=tables,
        warnings=list(_loader_warnings(loader)),
        next_steps=list(_next_steps(run, loader)),
    )


def _headline(loader: LoaderTuning) -> str:
    """Say what to set, how fast that is, and how long the step waits."""
    row = loader.recommended_row
    if row is None:
        return with_full_stop(loader.reason) or "Nothing is recommended for the loader."
    name = setting_name(loader, row)
    waits = ""
    if row.gpu_idle is not None:
        waits = f"the step waits for data {format_percent(row.gpu_idle)} of the time"
    if loader.is_bottleneck:
        return f"The loader is the bottleneck: with the best setting, {name}, {waits}."
    rate = ", and ".join(part for part in (row.rate_words, waits) if part)
    if len(loader.rows) == 1:
        return f"Measured {name}: {rate}."
    return f"Set {name} for the loader: {rate}."


def _loader_support(loader: LoaderTuning) -> Iterator[str]:
    """Say how sure the recommendation is, what the step needs, and what was measured."""
    row = loader.recommended_row
    if row is not None and len(loader.rows) == 1:
        yield "Only this setting was measured, so it is not known to be the best."
    if row is not None and row.estimated_epoch_seconds is not None:
        what = "of the loader alone"
        if loader.demand is not None:
            what = "with the step"
        yield f"An epoch {what} is estimated at {format_seconds(row.estimated_epoch_seconds)}."
    demand = loader.demand
    if demand is not None:
        source = (
            "by --step-ms"
            if demand.source == "step-ms"
            else f"by the probe on {demand.device_name}"
        )
        takes = f"The step takes {format_seconds(demand.step_seconds)} for a batch on average, {source}"
        rate = known(
            loader.demanded,
            lambda demanded: f", which is {format_number(demanded)} examples/s",
        )
        yield f"{takes}{rate or ''}."
    if row is not None and loader.reason:
        yield f"Why: {with_full_stop(loader.reason)}"
    if loader.reproducible and loader.reproduced is not None:
        same = format_number(loader.reproduced.batches)
        yield f"Reproducible: two epochs from one seed gave the same {same} batches, bit for bit."
    if (
        row is not None
        and row.examples_per_second_spread is not None
        and row.trials > 1
    ):
        differ = format_percent(row.examples_per_second_spread)
        yield f"Its rate is the median of {row.trials} trials, which differ by {differ}."
    epoch = known(
        loader.epoch_batches, lambda batches: f", {format_number(batches)} in an epoch"
    )
    yield f"Measured: {loader.target.words} ({loader.kind}), batches of {loader.batch or 'unknown shape'}{epoch or ''}."


def setting_name(loader: LoaderTuning, row: LoaderRow) -> str:
    """Return which row it is, by the arguments that rows differ in."""
    arguments = dict(row.arguments)
    for name, value in row.arguments.items():
        if all(other.arguments.get(name, value) == value for other in loader.rows):
            del arguments[name]
    return replace(row, arguments=arguments or row.arguments).name


def _loader_comparison(loader: LoaderTuning, chosen: LoaderRow) -> Table:
    """Compare the recommended row with the fastest one, and with the training process making its own batches."""
    working = loader.working_rows
    fastest = max(working, key=lambda row: row.rate)
    workers = kind_of(loader.kind).WORKERS_ARE
    alone = max(
        (row for row in working if not row.workers),
        key=lambda row: row.rate,
        default=None,
    )
    compared = {"recommended" if len(loader.rows) > 1 else "measured": chosen}
    if fastest is not chosen:
        compared["highest rate"] = fastest
    if alone is not None and alone is not chosen and alone is not fastest:
        compared[f"without {workers}"] = alone
    rows = [
        {"": name, workers: str(row.workers), **row_cells(row)}
        for name, row in compared.items()
    ]
    return make_table(
        "The loader's rate",
        rows,
        left=[""],
        marked=0,
        brief=True,
    )


def _loader_rows_table(loader: LoaderTuning) -> Table:
    working = loader.working_rows
    rows = [{"setting": setting_name(loader, row), **row_cells(row)} for row in working]
    marked = None
    if loader.recommended_row is not None:
        marked = working.index(loader.recommended_row)
    return make_table(
        "Settings of the loader",
        rows,
        left=["setting"],
        marked=marked,
        file="loader.json",
    )


def row_cells(row: LoaderRow) -> Cells:
    """Return what tables and charts show of a row, by the titles of the columns."""
    equal = {True: "yes", False: "no", None: None}
    return {
        "examples/s": known(row.examples_per_second, format_number),
        "step waits": known(row.gpu_idle, format_percent),
        "wait p99": known(row.wait_p99_seconds, format_seconds),
        "first batch": known(row.first_batch_seconds, format_seconds),
        "memory": known(row.memory_bytes, format_size),
        "equal to best": equal[row.equal_to_best],
    }


def _failed(loader: LoaderTuning) -> list[LoaderRow]:
    return [row for row in loader.rows if row.outcome != "ok"]


def _loader_warnings(loader: LoaderTuning) -> Iterator[str]:
    """Yield what differs between two epochs, the settings that failed, and the tuning's own warnings."""
    reproduced = loader.reproduced
    if loader.interrupted:
        measured = counted(len(loader.rows), "setting")
        yield f"The tuning was interrupted after {measured}: another may be better. Run the same command again."
    if reproduced is not None and reproduced.first_difference is not None:
        yield with_full_stop(
            f"Not reproducible: two epochs from one seed differ from batch {reproduced.first_difference} on: "
            f"{reproduced.what or 'how is not known'}"
        )
    # Of repetition the tuning warns itself.
    failed = [row for row in _failed(loader) if row.outcome != "repeats"]
    if failed:
        why = (
            (failed[0].error or _OUTCOMES[failed[0].outcome]).strip().partition("\n")[0]
        )
        yield (
            f"{len(failed)} of {counted(len(loader.rows), 'setting')} of the loader failed; "
            f"{setting_name(loader, failed[0])}: {with_full_stop(why)}"
        )
    yield from map(with_full_stop, loader.warnings)


def _next_steps(run: RunResults, loader: LoaderTuning) -> Iterator[NextStep]:
    row = loader.recommended_row
    again = f"batchtune tune-loader TARGET{run.as_option}"
    if row is None:
        yield again, "measure again, with the error fixed"
        return
    if loader.interrupted:
        yield again, "measure the settings that are missing, too"
        return
    yield str(run.folder / LOADER_CONFIG_FILE), "the arguments, for the loader"
    if loader.demand is None:
        yield f"{again} --step-ms MS", "hold it against the step"
