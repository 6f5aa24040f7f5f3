"""`stream.yaml`: the recommendation for batchtune's own stage of a stream, and for any program that can read YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from batchtune.errors import ResultError
from batchtune.exports.base import recommended_row
from batchtune.exports.sampler import evidence_of, read_config, render_yaml
from batchtune.results import STREAM_CONFIG_FILE, Probe, StreamConfig, StreamRow, StreamSweep

_SPEECHBRAIN: Final = "speechbrain"
_HEADERS = {
    "bucket": """\
# batchtune's recommendation for the batches of a stream: each worker holds up to buffer_size examples.
# An example waits with those of its bucket, the first whose boundary is not below its length; a bucket
# that holds the batch size in the same place gives a batch. batchtune.BucketedStream does it.
""",
    "pool": """\
# batchtune's recommendation for the batches of a stream: each worker holds up to buffer_size examples,
# sorts them by length, the longest first, and cuts them into batches; a batch holds at most the batch size
# in the place of the first boundary that is not below its longest length. batchtune.BucketedStream does it.
""",
    "pivot": """\
# batchtune's recommendation for the batches of a stream: each worker holds up to buffer_size examples in
# order of length, and takes neighbours around a random one; a batch holds at most the batch size in the
# place of the first boundary that is not below its longest length. batchtune.BucketedStream does it.
""",
}


def own_row(sweep: StreamSweep) -> StreamRow:
    """Return the recommended row, or, where that is SpeechBrain's, the best that batchtune's own stage runs.

    Raises:
        ResultError: The sweep recommends nothing, or holds no such row.
    """
    row = recommended_row(sweep)
    if row.algorithm != _SPEECHBRAIN:
        return row
    own = [row for row in sweep.rows if row.algorithm != _SPEECHBRAIN]
    if not own:
        raise ResultError(
            "The sweep holds rows of SpeechBrain's dynamic_bucketed_batch alone, which BucketedStream does not run",
            "Sweep again with all algorithms, or `batchtune export --to speechbrain-stream`.",
        )
    timed = sweep.has_times
    return min(
        own,
        key=lambda row: (bool(row.unproven), (timed and row.estimated_epoch_seconds) or row.batches, row.buffer_size),
    )


def nominal_batches(sweep: StreamSweep, row: StreamRow) -> int | None:
    """Return the batches of a nominal epoch on each rank with a row; None where the sweep gives none."""
    if sweep.batches_per_rank is None or row is sweep.recommended_row:
        return sweep.batches_per_rank
    return max(1, row.batches // sweep.world_size)


def stream_config(stream: StreamSweep, probe: Probe | None = None) -> StreamConfig:
    """Return the sweep's recommended row, or the best that `BucketedStream` can run, as its config.

    Raises:
        ResultError: The sweep recommends nothing, or holds no row that `BucketedStream` can run.
    """
    row = own_row(stream)
    assert row.algorithm != _SPEECHBRAIN
    return StreamConfig(
        format=StreamConfig.FORMAT,
        version=StreamConfig.VERSION,
        unit=stream.lengths.unit,
        algorithm=row.algorithm,
        buffer_size=row.buffer_size,
        max_batch_length=stream.max_batch_length,
        bucket_boundaries=row.boundaries,
        bucket_batch_sizes=row.batch_sizes,
        max_padding_ratio=row.max_padding_ratio,
        shuffle=True,
        drop_last=False,
        batches_per_epoch=nominal_batches(stream, row),
        seed=stream.settings.get("seed", 0),
        evidence=evidence_of(stream, row, probe),
    )


def render_stream_yaml(config: StreamConfig) -> str:
    """Return the config as YAML; the same config gives the same bytes, and reading gives the same config."""
    return render_yaml(msgspec.to_builtins(config), _HEADERS[config.algorithm])


def read_stream_yaml(path: Path) -> StreamConfig:
    """Read and check a `stream.yaml`.

    Raises:
        ResultError: Missing, unreadable, not YAML, of another format, newer, or damaged; the message names
            the field.
    """

    def check(config: StreamConfig) -> None:
        if config.max_padding_ratio is not None and config.algorithm != "pivot":
            raise ValueError(f"max_padding_ratio belongs to the algorithm pivot, but algorithm is {config.algorithm}")

    return read_config(path, StreamConfig, STREAM_CONFIG_FILE, "sweep-stream", check)
