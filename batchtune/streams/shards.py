"""Describes the shards of a stream, warns of what they can't do, and finds those of an earlier sweep again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from msgspec import structs

from batchtune.errors import ResultError
from batchtune.lengths import FloatArray
from batchtune.manifests import StreamLengths
from batchtune.results import STREAM_FILE, Row, Shards, StreamRow, StreamSweep, read_result
from batchtune.streams.sharding import advised_shards
from batchtune.streams.simulated import StoredStream, shard_sizes
from batchtune.streams.stream_settings import StreamSettings
from batchtune.units import counted, format_number, format_percent

# A rank correlation of position and length above this: the shards are sorted.
_SORTED = 0.9
# A worker with this many times the mean of batches is worth a warning.
_UNEVEN = 1.1
# So is this share of batches under half of what they could hold,
_MANY_SMALL = 0.2
# and this share of batch mates that meet again.
_MANY_AGAIN = 0.2


def shards_of(stream: StreamLengths, sizes: Sequence[int], settings: StreamSettings) -> Shards:
    """Describe the shards, which hold so many examples each."""
    counts = np.array(sizes, dtype=np.int64)
    edges = np.concatenate(([0], np.cumsum(counts)))
    length_before = np.concatenate(([0.0], np.cumsum(stream.values)))
    totals = np.diff(length_before[edges])
    readers = settings.readers
    idle = max(0, readers - int(np.count_nonzero(counts)))
    uneven = counts.max() > 1.5 * max(1, int(np.median(counts)))
    advice = None
    if stream.lengths.count >= readers and (not stream.shards or idle or uneven or len(sizes) % readers):
        total_bytes = sum(shard.size for shard in stream.shards) if stream.shards else None
        advice = advised_shards(stream.lengths.count, total_bytes, readers)
    return Shards(
        count=len(sizes),
        assumed=not stream.shards,
        broken=sum(shard.broken for shard in stream.shards),
        empty=int(np.count_nonzero(counts == 0)),
        smallest_count=int(counts.min()),
        median_count=float(np.median(counts)),
        largest_count=int(counts.max()),
        smallest_length=float(totals.min()),
        largest_length=float(totals.max()),
        sorted=_are_sorted(stream.values),
        repeated_ids=stream.repeated_ids,
        idle_workers=idle,
        advice=advice,
    )


def _are_sorted(lengths: FloatArray) -> bool:
    """Return whether length goes with the place in the stream: the rank correlation of both is nearly 1 or -1."""
    sample = lengths[np.linspace(0, lengths.size - 1, min(lengths.size, 10_000)).astype(np.int64)]
    if sample.size < 3 or np.ptp(sample) == 0:
        return False
    _, ranks = np.unique(sample, return_inverse=True)
    return abs(float(np.corrcoef(ranks, np.arange(sample.size))[0, 1])) > _SORTED


def stream_cautions(stream: StreamLengths, shards: Shards, settings: StreamSettings) -> Iterator[str]:
    """Yield what is wrong with the shards."""
    readers = settings.readers
    if shards.assumed:
        yield (
            f"the source is not a set of shards: it is taken to lie in {counted(shards.count, 'shard')} of up to "
            f"{settings.shard_size:,} examples, in its order (--shard-size)"
        )
    if shards.broken:
        yield f"{counted(shards.broken, 'shard')} can't be read to the end: WebDataset stops there with an error"
    if shards.idle_workers:
        yield (
            f"{counted(shards.count - shards.empty, 'shard')} for {counted(readers, 'worker')} (of "
            f"{counted(settings.world_size, 'rank')}): {shards.idle_workers:,} get none, and WebDataset stops with an "
            "error there"
        )
    if shards.sorted:
        yield (
            "the shards hold the examples in order of length: no buffer can mix them. Shuffle the examples before you "
            "write the shards"
        )
    if shards.repeated_ids:
        yield f"keys repeat: an earlier example has the same in {counted(shards.repeated_ids, 'case')}"
    if readers > 1 and not shards.idle_workers:
        yield (
            "WebDataset deals the shards before it shuffles them: each worker reads the same shards in every epoch, so "
            "examples of two workers never meet. resampled=True, or a shuffle of the list before each epoch, mixes them"
        )


def row_cautions(
    stream: StreamLengths, shards: Shards, row: StreamRow | None, settings: StreamSettings
) -> Iterator[str]:
    """Yield what is wrong with the recommended row."""
    if row is None:
        return
    if not shards.idle_workers and max(row.worker_imbalance, row.rank_imbalance) > _UNEVEN:
        yield (
            f"the shards give one worker {row.worker_imbalance:.2f} times and one rank {row.rank_imbalance:.2f} times "
            "as many batches as the mean: others wait for it, or see the same examples more often"
        )
    if row.under_half > _MANY_SMALL:
        if row.buffer_size * settings.readers >= stream.lengths.count:
            why = "a worker reads too few examples to fill them"
        else:
            why = f"a buffer of {format_number(row.buffer_size)} is too small to fill them (--buffer-size)"
        yield f"{format_percent(row.under_half)} of the batches hold less than half of what they could: {why}"


def mates_cautions(row: StreamRow | None, map_style: Row | None) -> Iterator[str]:
    """Yield a caution if mates of the recommended row meet again often."""
    if row is None:
        return
    many = _MANY_AGAIN
    if map_style is not None:
        many = max(many, 1.5 * (map_style.mates_again or 0.0))
    if row.mates_again > many:
        yield (
            f"batch mates of one epoch are mates again in the next in {format_percent(row.mates_again)} of cases: "
            "larger shuffle buffers, or a recommendation held to --min-randomness, mix them better"
        )


def stored_stream(stream: StreamLengths, folder: Path, seed: int) -> StoredStream:
    """Take all shards, dealt to workers as for the folder's `stream.json`; ResultError without one, or of others."""
    path = folder / STREAM_FILE
    if not path.exists():
        raise ResultError(
            f"{path} does not exist, which says how shards come to workers",
            "`batchtune sweep-stream` writes it, with stream.yaml.",
        )
    swept = read_result(path, StreamSweep)
    settings = StreamSettings(**structs.asdict(swept.streamed))
    sizes = shard_sizes(stream, settings.shard_size)
    given = _describe_shards(len(sizes), min(sizes), float(np.median(sizes)), max(sizes))
    shards = swept.shards
    expected = _describe_shards(shards.count, shards.smallest_count, shards.median_count, shards.largest_count)
    if given != expected:
        raise ResultError(
            f"{path} is of {expected}; these are {given}",
            "Give the same shards, or run `batchtune sweep-stream` again: batches depend on them.",
        )
    return StoredStream(stream.values, stream.targets, sizes, settings.sharding, np.ones(settings.readers), seed)


def _describe_shards(count: int, smallest: int, median: float, largest: int) -> str:
    return f"{count:,} shards of {smallest:,} to {largest:,} examples (half of them up to {median:,.15g})"
