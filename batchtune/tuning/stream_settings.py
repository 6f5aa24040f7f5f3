"""The settings of a stream's sweep."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from batchtune.batching.sharding import Sharding
from batchtune.errors import UsageError
from batchtune.tuning.current.stream import CurrentStream
from batchtune.tuning.sweep_settings import MOST_RANKS


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """The settings of a stream's sweep; those of shards and their shuffles as in `Sharding`.

    Attributes:
        buffer_sizes: The most examples that a worker holds to make batches of; no more than there are.
        shard_size: Examples of each shard, for a source that is no set of shards.
        bytes_per_length: The memory that a unit of length takes in the buffer; None: by the unit.
        min_randomness: The least probability, for the recommended row, that batch mates do not meet again in the next
            epoch; None: any.
        current: The user's settings now.

    Raises:
        UsageError: A number is out of range.
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
        for name, number, least, most in (
            ("--world-size", self.world_size, 1, MOST_RANKS),
            ("--workers", self.workers, 0, 1024),
            ("--shuffle-shards", self.shuffle_shards, 0, 10**9),
            ("--shuffle-buffer", self.shuffle_buffer, 0, 10**9),
            ("--shard-size", self.shard_size, 1, 10**12),
            *(("--buffer-size", size, 1, 10**15) for size in self.buffer_sizes),
            *(("--max-batch-size", size, 1, 10**18) for size in [self.max_batch_size] if size is not None),
        ):
            if not least <= number <= most:
                raise UsageError(f"{name} must be from {least} to {most:,}, got {number:,}")
        if self.bytes_per_length is not None and not 0 < self.bytes_per_length <= 1e12:
            raise UsageError(f"--bytes-per-length must be above 0 and at most 1e12, got {self.bytes_per_length:g}")
        if self.min_randomness is not None and not 0 < self.min_randomness <= 1:
            raise UsageError(f"--min-randomness must be above 0 and at most 1, got {self.min_randomness:g}")

    @property
    def readers(self) -> int:
        """Workers of all ranks."""
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
        found = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "current"}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}
