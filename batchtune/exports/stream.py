"""`stream.yaml`: the recommendation for batchtune's own stage of a stream, and for any program that can read YAML."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from batchtune.errors import ResultError
from batchtune.exports.base import described, recommended_row, this_instead
from batchtune.exports.sampler import evidence_of, read_config, render_yaml
from batchtune.exports.text import LengthLimits, about_data, about_stream
from batchtune.results import (
    STREAM_ALGORITHMS,
    STREAM_CONFIG_FILE,
    Algorithm,
    Probe,
    StreamConfig,
    StreamRow,
    StreamSweep,
    cost_of,
)
from batchtune.units import format_size

_SPEECHBRAIN: Final = "speechbrain"
SPEECHBRAIN: tuple[Algorithm, ...] = (_SPEECHBRAIN,)
BUCKETS: tuple[Algorithm, ...] = ("bucket",)
OWN = "batchtune.BucketedStream"
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


class ChosenStream(NamedTuple):
    """The row that an export of a stream writes, the best that the framework can run.

    `batches` are those of a nominal epoch on each rank; `remarks`, sentences without a full stop, say which row it is
    instead of the recommended one, and what that costs.
    """

    row: StreamRow
    batches: int
    remarks: tuple[str, ...] = ()


def choose_stream(sweep: StreamSweep, who: str, runs: Collection[Algorithm]) -> ChosenStream:
    """Choose the recommended row if `who` runs its algorithm; else the best of these algorithms.

    That is one whose batches are all proven, if there is one; then that with the lowest estimated time (number of
    batches, where a time is unknown), then the smallest buffer.

    Raises:
        ResultError: The sweep recommends nothing, or holds no such row.
    """
    recommended, timed = recommended_row(sweep), sweep.has_times
    rows = [row for row in sweep.rows if row.algorithm in runs]
    if not rows:
        raise ResultError(
            f"The sweep of the stream holds no row that {who} can run (algorithm {' or '.join(runs)})",
            "Sweep again with all algorithms: `batchtune sweep-stream`.",
        )
    row = recommended if recommended.algorithm in runs else None
    if row is None and runs == SPEECHBRAIN:
        row = sweep.speechbrain_row
    row = row or min(rows, key=lambda row: (bool(row.unproven), cost_of(row, timed=timed) or 0.0, row.buffer_size))
    if row is recommended:
        return ChosenStream(row, sweep.batches_per_rank or _per_rank(row, sweep))
    instead = this_instead(row, recommended, timed=timed)
    remark = f"batchtune recommends {described(recommended)}, which {who} does not run; {instead}"
    return ChosenStream(row, _per_rank(row, sweep), (remark,))


def stream_fields(chosen: ChosenStream, sweep: StreamSweep) -> dict[str, Any]:
    """Return what the templates of all streams say: the row, how the sweep read the stream, and for what data."""
    streamed = sweep.streamed
    return {
        "about_row": about_stream(chosen.row, sweep),
        "about_data": about_data(sweep),
        "remarks": chosen.remarks,
        "row": chosen.row,
        "batches": chosen.batches,
        "memory": format_size(chosen.row.buffer_bytes),
        "limits": LengthLimits.of(sweep),
        "unit": sweep.lengths.unit,
        "seed": streamed.seed,
        "shard_shuffle": streamed.shuffle_shards or False,
        "sample_shuffle": streamed.shuffle_buffer or False,
    }


def swept_workers(sweep: StreamSweep) -> int:
    """Return the workers of each rank that the stream was swept with, at least 1."""
    return max(1, sweep.streamed.workers)


def _per_rank(row: StreamRow, sweep: StreamSweep) -> int:
    return max(1, row.batches // sweep.world_size)


def stream_config(stream: StreamSweep, probe: Probe | None = None) -> StreamConfig:
    """Return the sweep's recommended row, or the best that `BucketedStream` can run, as its config.

    Raises:
        ResultError: The sweep recommends nothing, or holds no row that `BucketedStream` can run.
    """
    row, batches, _ = choose_stream(stream, OWN, STREAM_ALGORITHMS)
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
        batches_per_epoch=batches if stream.batches_per_rank is not None else None,
        seed=stream.streamed.seed,
        evidence=evidence_of(stream, row, probe),
    )


def render_stream_yaml(config: StreamConfig) -> str:
    """Return the config as YAML; the same config gives the same bytes, and reading gives the same config."""
    return render_yaml(msgspec.to_builtins(config), _HEADERS[config.algorithm])


def read_stream_yaml(path: Path) -> StreamConfig:
    """Read and check a `stream.yaml`; errors are those of `read_config`."""

    def check(config: StreamConfig) -> None:
        if config.max_padding_ratio is not None and config.algorithm != "pivot":
            raise ValueError(f"max_padding_ratio belongs to the algorithm pivot, but algorithm is {config.algorithm}")

    return read_config(path, StreamConfig, STREAM_CONFIG_FILE, "sweep-stream", check)
