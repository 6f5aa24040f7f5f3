"""What the tests of exports share: a made sweep of a stream, and ways to render, read and run what is exported.

The stream is LibriSpeech train-clean-100 on 2 ranks with 2 workers each.
"""

import ast
import os
import re
import warnings
from pathlib import Path

import msgspec
import pytest
import streamed_records
from msgspec.structs import replace
from packed_records import with_packing
from report_records import COUNT, MAX_BATCH_LENGTH, TOTAL_SECONDS
from ruamel.yaml import YAML

from batchtune.exports import FRAMEWORKS, Tuned, export_of
from batchtune.exports.run_configs import render_sampler_yaml, sampler_config
from batchtune.results import ShardAdvice, StreamSettings

# Exports of a stream; the others are of a bucket table.
STREAMS = (
    "speechbrain-stream",
    "webdataset",
    "hf-streaming",
    "lhotse-shar",
    "nemo-tarred",
)
# Exports of a token budget.
PACKERS = ("verl", "openrlhf", "slime", "trl", "axolotl")
TABLES = tuple(name for name in FRAMEWORKS if name not in (*STREAMS, *PACKERS))


def for_export(name, sweep, text="even"):
    """The sweep, of a training that packs if the framework does."""
    return with_packing(sweep, text) if name in PACKERS else sweep


BOUNDARIES = [4.0, 8.0, 12.5, 14.5, 16.0, 24.525]
BATCHES = {"bucket": 660, "pivot": 640, "speechbrain": 790}


def made_row(algorithm, *, timed=True):
    """A row of the shared maker with a buffer of 1024, and with the table or the limits that the tests name."""
    batches = BATCHES[algorithm]
    row = replace(
        streamed_records.stream_row(algorithm, 1, timed=timed, target=None),
        batches=batches,
        padding_ratio=0.04,
        padded_length=TOTAL_SECONDS / 0.96,
        mean_batch_size=COUNT / batches,
        fill=TOTAL_SECONDS / (batches * MAX_BATCH_LENGTH),
        estimated_epoch_seconds=batches * 0.3 if timed else None,
        max_padding_ratio=None,
    )
    if algorithm == "speechbrain":
        return replace(
            row,
            target_batch_numel=560.0,
            max_batch_numel=MAX_BATCH_LENGTH,
            max_padding_ratio=0.15,
        )
    sizes = [int(MAX_BATCH_LENGTH / boundary) for boundary in BOUNDARIES]
    return replace(row, boundaries=BOUNDARIES, batch_sizes=sizes)


def made_stream(*, recommended="bucket", timed=True, unit="s"):
    """The row of one algorithm is recommended."""
    rows = [made_row(algorithm, timed=timed) for algorithm in BATCHES]
    names, of_reports = list(BATCHES), streamed_records.made_stream()
    return streamed_records.made_stream(
        unit=unit,
        settings=StreamSettings(world_size=2, workers=2, seed=3),
        device_name="NVIDIA A100",
        shards=replace(
            of_reports.shards,
            count=64,
            smallest_count=400,
            advice=ShardAdvice(shards=64, maxcount=446),
        ),
        rows=rows,
        map_style=None,
        recommended=names.index(recommended),
        recommended_speechbrain=names.index("speechbrain"),
        batches_per_rank=BATCHES[recommended] // 2,
        reason="fewest batches",
        warnings=[],
    )


def without_recommendation(sweep, reason="no row beats the baseline"):
    return replace(sweep, recommended=None, batches_per_rank=None, reason=reason)


def stream_of(sweep):
    """A sweep of a stream of the same lengths, as free text and options have it; its buckets are of one row's table."""
    tables = [row for row in sweep.rows if row.pool_size is None] or sweep.rows
    row = sweep.recommended_row if sweep.recommended_row in tables else tables[-1]
    made = made_stream()
    limit = sweep.max_batch_length
    rows = [
        replace(one, target_batch_numel=limit * 0.9, max_batch_numel=limit)
        if one.algorithm == "speechbrain"
        else replace(one, boundaries=row.boundaries, batch_sizes=row.batch_sizes)
        for one in made.rows
    ]
    found = replace(
        made,
        lengths=sweep.lengths,
        max_batch_length=limit,
        settings=replace(made.settings, seed=sweep.settings.seed),
        device_name=sweep.device_name,
        rows=rows,
        reason=sweep.reason,
        warnings=sweep.warnings,
    )
    return (
        without_recommendation(found, sweep.reason)
        if sweep.recommended is None
        else found
    )


def tuned(sweep, **fields):
    """A run with a sweep, and one of a stream; a config is that of either."""
    if "config" in fields:
        fields["stream_config"] = fields["config"]
    return Tuned(sweep=sweep, stream=stream_of(sweep), **fields)


def rendered(name, sweep, **fields):
    """A framework's config of a run with a sweep, of a training that packs if the framework does."""
    return export_of(name).render(tuned(for_export(name, sweep), **fields))


def rendered_stream(name, stream, **fields):
    """A framework's config of a run with a sweep of a stream."""
    return export_of(name).render(Tuned(stream=stream, **fields))


def write_config(folder, sweep):
    """Write the `sampler.yaml` of a sweep, and return where it is."""
    path = folder / "sampler.yaml"
    config = render_sampler_yaml(sampler_config(sweep))
    path.write_text(config, encoding="utf-8")
    return str(path)


def prose(text):
    """Comments with their line breaks undone."""
    return re.sub(r"\s*\n\s*#?\s*", " ", text)


def content(name, text):
    """What a reader of a framework's config sees, without comments."""
    suffix = Path(export_of(name).file).suffix
    if suffix == ".py":
        return ast.dump(ast.parse(text))
    if suffix in (".yaml", ".yml"):
        return YAML(typ="safe", pure=True).load(text)
    return [line for line in text.splitlines() if not line.startswith("#")]


def executed(text, **names):
    """The names of an exported snippet that ran, with these as names that it finds."""
    found = {"__name__": "snippet", **names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(text, "snippet", "exec"), found)
    return found


def cuts_of(durations):
    """Lhotse's cuts; the test is skipped without Lhotse."""
    cut = pytest.importorskip("lhotse").MonoCut
    return [
        cut(id=f"{index:04d}", start=0, duration=float(duration), channel=0)
        for index, duration in enumerate(durations)
    ]


def changed(path, config, **fields):
    """Write a config that differs in these fields; a value of `...` leaves the field out."""
    document = {**msgspec.to_builtins(config), **fields}
    kept = {name: value for name, value in document.items() if value is not ...}
    with path.open("w", encoding="utf-8") as stream:
        YAML(typ="safe", pure=True).dump(kept, stream)
    return path


def assert_snapshot(name, text):
    """Hold a text to its snapshot. `REFRESH_SNAPSHOTS=1` writes it anew; read the difference."""
    snapshot = Path(__file__).parent / "snapshots" / name
    if os.environ.get("REFRESH_SNAPSHOTS") == "1":
        snapshot.write_text(text, encoding="utf-8")
    assert text == snapshot.read_text(encoding="utf-8")
