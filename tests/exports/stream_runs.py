"""A made sweep of a stream, as exports see it: LibriSpeech train-clean-100 on 2 ranks with 2 workers each."""

from __future__ import annotations

from typing import Any

import msgspec
import streamed_records
from report_records import COUNT, MAX_BATCH_LENGTH, TOTAL_SECONDS

from batchtune.exports import FRAMEWORKS, Tuned
from batchtune.results import ShardAdvice, StreamRow, StreamSweep, Sweep

# Exports of a stream; the others are of a bucket table.
STREAMS = ("speechbrain-stream", "webdataset", "hf-streaming", "lhotse-shar", "nemo-tarred")
TABLES = tuple(name for name in FRAMEWORKS if name not in STREAMS)

BOUNDARIES = [4.0, 8.0, 12.5, 14.5, 16.0, 24.525]
BATCHES = {"bucket": 660, "pool": 640, "pivot": 700, "speechbrain": 790}


def made_row(algorithm: Any, buffer_size: int = 1024, *, timed: bool = True, **fields: Any) -> StreamRow:
    batches = BATCHES[algorithm]
    padding = 0.04
    own = {"boundaries": BOUNDARIES, "batch_sizes": [int(MAX_BATCH_LENGTH / edge) for edge in BOUNDARIES]}
    theirs = {"target_batch_numel": 560.0, "max_batch_numel": 600.0, "max_padding_ratio": 0.15}
    chosen = theirs if algorithm == "speechbrain" else own
    return StreamRow(
        **{
            **{"algorithm": algorithm, "buffer_size": buffer_size, **chosen},
            **{"batches": batches, "dropped_examples": 0, "padded_length": TOTAL_SECONDS / (1 - padding)},
            **{"padding_ratio": padding, "fill": TOTAL_SECONDS / (batches * MAX_BATCH_LENGTH)},
            **{"mean_batch_size": COUNT / batches, "smallest_batch_size": 3, "largest_batch_size": 150},
            **{"batch_size_variation": 0.4, "largest_padded_length": 599.0, "under_half": 0.02},
            **{"wait_median": 700.0, "wait_p99": 4000.0, "buffer_length": 12_900.0, "buffer_bytes": 825e6},
            **{"worker_imbalance": 1.03, "rank_imbalance": 1.01, "mate_distance": 900.0, "mixing": 0.1},
            **{"mates_again": 0.2, "length_correlation": 0.9, "effective_buckets": 5.0, "simulated_epochs": 3},
            "estimated_epoch_seconds": batches * 0.3 if timed else None,
            **fields,
        }
    )


def made_stream(*, recommended: str = "bucket", timed: bool = True, unit: str | None = "s") -> StreamSweep:
    """The row of one algorithm is recommended."""
    rows = [made_row(algorithm, timed=timed) for algorithm in BATCHES]
    names, of_reports = list(BATCHES), streamed_records.made_stream()
    return streamed_records.made_stream(
        unit=unit,
        settings={"world_size": 2, "workers": 2, "shuffle_shards": 100, "shuffle_buffer": 1000, "seed": 3},
        device_name="NVIDIA A100",
        shards=msgspec.structs.replace(
            of_reports.shards, count=64, smallest_count=400, advice=ShardAdvice(shards=64, maxcount=446)
        ),
        rows=rows,
        map_style=None,
        recommended=names.index(recommended),
        recommended_speechbrain=names.index("speechbrain"),
        batches_per_rank=BATCHES[recommended] // 2,
        reason="fewest batches",
        warnings=[],
    )


def without_recommendation(sweep: StreamSweep, reason: str = "no row beats the baseline") -> StreamSweep:
    return msgspec.structs.replace(sweep, recommended=None, batches_per_rank=None, reason=reason)


def stream_of(sweep: Sweep) -> StreamSweep:
    """A sweep of a stream of the same lengths, as free text and options have it; its buckets are of one row's table."""
    tables = [row for row in sweep.rows if row.pool_size is None] or sweep.rows
    row = next((row for row in tables if row is sweep.recommended_row), tables[-1])
    made, replace = made_stream(), msgspec.structs.replace
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
        settings={**made.settings, **sweep.settings},
        device_name=sweep.device_name,
        rows=rows,
        reason=sweep.reason,
        warnings=sweep.warnings,
    )
    return without_recommendation(found, sweep.reason) if sweep.recommended is None else found


def tuned(sweep: Sweep, **fields: Any) -> Tuned:
    """A run with a sweep, and one of a stream; a config is that of either."""
    if "config" in fields:
        fields["stream_config"] = fields["config"]
    return Tuned(sweep=sweep, stream=stream_of(sweep), **fields)
