"""The settings of a stream's sweep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from batchtune.buckets.sweep_settings import MOST_RANKS, check_positive, check_whole, recorded
from batchtune.streams.current import CurrentStream
from batchtune.streams.sharding import Sharding


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """The settings of a stream's sweep, of shards as in `Sharding`; UsageError if a number is out of range.

    Attributes:
        buffer_sizes: The most examples that a worker holds to make batches of; no more than there are.
        shard_size: Examples of each shard, for a source that is not a set of shards.
        bytes_per_length: The memory that a unit of length takes in the buffer; None: by the unit.
    """

    world_size: int = 1
    workers: int = 1
    shuffle_shards: int = 100
    shuffle_buffer: int = 1000
    buffer_sizes: tuple[int, ...] = (256, 1024, 4096)
    num_buckets: tuple[int, ...] = (4, 8, 12, 16, 20)
    max_batch_size: int | None = None
    shard_size: int = 1000
    bytes_per_length: float | None = None
    min_randomness: float | None = None
    seed: int = 0
    current: CurrentStream | None = None

    def __post_init__(self) -> None:
        check_whole("--world-size", self.world_size, 1, MOST_RANKS)
        check_whole("--workers", self.workers, 0, 1024)
        check_whole("--shuffle-shards", self.shuffle_shards, 0, 10**9)
        check_whole("--shuffle-buffer", self.shuffle_buffer, 0, 10**9)
        check_whole("--shard-size", self.shard_size, 1, 10**12)
        for size in self.buffer_sizes:
            check_whole("--buffer-size", size, 1, 10**15)
        if self.max_batch_size is not None:
            check_whole("--max-batch-size", self.max_batch_size, 1, 10**18)
        check_positive("--bytes-per-length", self.bytes_per_length, 1e12)
        check_positive("--min-randomness", self.min_randomness, 1)

    @property
    def readers(self) -> int:
        """Number of workers of all ranks."""
        return self.world_size * max(1, self.workers)

    @property
    def sharding(self) -> Sharding:
        """How shards come to workers."""
        return Sharding(
            world_size=self.world_size,
            workers=max(1, self.workers),
            shuffle_shards=self.shuffle_shards,
            shuffle_buffer=self.shuffle_buffer,
        )

    def record(self) -> dict[str, Any]:
        """Return them as `stream.json` holds them."""
        return recorded(self)
