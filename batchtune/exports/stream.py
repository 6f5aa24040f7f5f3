"""`stream.yaml`: the recommendation for batchtune's own stage of a stream, and for any program that can read YAML."""

from __future__ import annotations

from pathlib import Path

import msgspec

from batchtune.exports.base import batches_per_rank, choose_stream
from batchtune.exports.sampler import evidence_of, read_config, render_yaml
from batchtune.results import STREAM_ALGORITHMS, STREAM_CONFIG_FILE, Probe, StreamConfig, StreamSweep

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


def stream_config(stream: StreamSweep, probe: Probe | None = None) -> StreamConfig:
    """Return the sweep's recommended row, or the best that `BucketedStream` can run, as its config.

    Raises:
        ResultError: The sweep recommends nothing, or holds no row that `BucketedStream` can run.
    """
    row = choose_stream(stream, OWN, *STREAM_ALGORITHMS).row
    assert row.algorithm != "speechbrain"
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
        batches_per_epoch=None if stream.batches_per_rank is None else batches_per_rank(row, stream),
        seed=stream.streamed.seed,
        evidence=evidence_of(stream, row, probe),
    )


def render_stream_yaml(config: StreamConfig) -> str:
    """Return the config as YAML; the same config gives the same bytes, and reading gives the same config."""
    return render_yaml(msgspec.to_builtins(config), _HEADERS[config.algorithm])


def read_stream_yaml(path: Path) -> StreamConfig:
    """Read and check a `stream.yaml`; raises ResultError as `read_config` does."""

    def check(config: StreamConfig) -> None:
        if config.max_padding_ratio is not None and config.algorithm != "pivot":
            raise ValueError(f"max_padding_ratio belongs to the algorithm pivot, but algorithm is {config.algorithm}")

    return read_config(path, StreamConfig, STREAM_CONFIG_FILE, "sweep-stream", check)
