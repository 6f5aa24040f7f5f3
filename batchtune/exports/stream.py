"""`stream.yaml`: the recommendation for batchtune's own stage of a stream, and for any program that can read YAML."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from batchtune.errors import ResultError
from batchtune.exports.base import recommended_row
from batchtune.exports.sampler import evidence_of, read_config, render_yaml
from batchtune.exports.text import LengthLimits, about_data, about_stream
from batchtune.results import STREAM_CONFIG_FILE, Algorithm, Probe, StreamConfig, StreamRow, StreamSweep
from batchtune.units import format_number, format_seconds, format_size

_SPEECHBRAIN: Final = "speechbrain"
SPEECHBRAIN: tuple[Algorithm, ...] = (_SPEECHBRAIN,)
BUCKETS: tuple[Algorithm, ...] = ("bucket",)
OWN = "batchtune.BucketedStream"
OWN_ALGORITHMS: tuple[Algorithm, ...] = ("bucket", "pool", "pivot")
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

    def cost(row: StreamRow) -> float:
        return (timed and row.estimated_epoch_seconds) or row.batches

    row = recommended if recommended.algorithm in runs else None
    if row is None and runs == SPEECHBRAIN and sweep.recommended_speechbrain is not None:
        row = sweep.rows[sweep.recommended_speechbrain]
    row = row or min(rows, key=lambda row: (bool(row.unproven), cost(row), row.buffer_size))
    if row is recommended:
        return ChosenStream(row, sweep.batches_per_rank or _per_rank(row, sweep))
    more = cost(row) / cost(recommended) - 1
    what = ("more time" if more >= 0 else "less time") if timed else ("more" if more >= 0 else "fewer") + " batches"
    remark = f"batchtune recommends {_described(recommended)}, which {who} does not run; this is {_described(row)}"
    return ChosenStream(row, _per_rank(row, sweep), (f"{remark}, {abs(more):.1%} {what}",))


def stream_fields(chosen: ChosenStream, sweep: StreamSweep) -> dict[str, Any]:
    """Return what the templates of all streams say: the row, how the sweep read the stream, and for what data."""

    def setting(name: str, least: int, default: int) -> int:
        value = sweep.settings.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= least else default

    return {
        "about_row": about_stream(chosen.row, sweep),
        "about_data": about_data(sweep),
        "remarks": chosen.remarks,
        "row": chosen.row,
        "batches": chosen.batches,
        "memory": format_size(chosen.row.buffer_bytes),
        "limits": LengthLimits.of(sweep),
        "unit": sweep.lengths.unit,
        "seed": setting("seed", 0, 0),
        "workers": setting("workers", 1, 1),
        "shard_shuffle": setting("shuffle_shards", 1, 0) or False,
        "sample_shuffle": setting("shuffle_buffer", 1, 0) or False,
    }


def _per_rank(row: StreamRow, sweep: StreamSweep) -> int:
    return max(1, row.batches // sweep.world_size)


def _described(row: StreamRow) -> str:
    seconds = row.estimated_epoch_seconds
    time = f", {format_seconds(seconds)} an epoch" if seconds else ""
    return f"{row.name} ({format_number(row.batches)} batches{time})"


def stream_config(stream: StreamSweep, probe: Probe | None = None) -> StreamConfig:
    """Return the sweep's recommended row, or the best that `BucketedStream` can run, as its config.

    Raises:
        ResultError: The sweep recommends nothing, or holds no row that `BucketedStream` can run.
    """
    row, batches, _ = choose_stream(stream, OWN, OWN_ALGORITHMS)
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
