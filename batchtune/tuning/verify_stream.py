"""The stream of a verification: where its examples lie, and how `stream.yaml` makes batches of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from msgspec import structs

from batchtune.batching.epochs import EpochShapes
from batchtune.batching.streams import StreamBatching
from batchtune.batching.table import BucketTable
from batchtune.errors import ResultError
from batchtune.manifests import StreamLengths
from batchtune.results import STREAM_FILE, StreamConfig, StreamSweep, read_result
from batchtune.tuning.stream_settings import StreamSettings
from batchtune.tuning.stream_simulation import StoredStream, shapes_in_turn, shard_sizes, simulate_stream
from batchtune.units import format_number


def stored_stream(found: StreamLengths, folder: Path, seed: int) -> StoredStream:
    """Take all shards, and deal them to workers as the folder's `stream.json` did.

    Raises:
        ResultError: There is no `stream.json`, it can't be read, or it is of other shards.
    """
    path = folder / STREAM_FILE
    if not path.exists():
        raise ResultError(
            f"{path} does not exist, which says how shards come to workers",
            "`batchtune sweep-stream` writes it, with stream.yaml.",
        )
    swept = read_result(path, StreamSweep)
    settings = StreamSettings(**structs.asdict(swept.streamed))
    counts, were = np.array(shard_sizes(found, settings.shard_size)), swept.shards
    ours = counts.size, int(counts.min()), float(np.median(counts)), int(counts.max())
    theirs = were.count, were.smallest_count, were.median_count, were.largest_count
    if ours != theirs:
        raise ResultError(
            f"{path} is of {_shards(*theirs)}; these are {_shards(*ours)}",
            "Give the same shards, or run `batchtune sweep-stream` again: batches depend on them.",
        )
    scale, sharding = np.ones(settings.readers), settings.sharding
    return StoredStream(found.values, found.targets, counts.tolist(), sharding, scale, seed)


def stream_epoch(stored: StoredStream, config: StreamConfig, epoch: int) -> EpochShapes:
    """Return the shapes of an epoch's batches in the order in which ranks take them."""
    batching = StreamBatching(
        algorithm=config.algorithm,
        table=BucketTable.of(config.bucket_boundaries, config.bucket_batch_sizes),
        buffer_size=config.buffer_size,
        max_padding_ratio=config.max_padding_ratio,
        shuffle=config.shuffle,
        drop_last=config.drop_last,
    )
    return shapes_in_turn(stored, simulate_stream(stored, batching, epoch), batching.table)


def _shards(count: int, smallest: int, median: float, largest: int) -> str:
    return (
        f"{format_number(count)} shards of {format_number(smallest)} to {format_number(largest)} examples (half of "
        f"them up to {median:g})"
    )
