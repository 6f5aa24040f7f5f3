"""The settings of a stream's sweep."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from batchtune.errors import UsageError
from batchtune.streams.current import CurrentStream
from batchtune.streams.sharding import Sharding

_MOST_RANKS = 16_384


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
    buffer_sizes: tuple[int | Literal["all"], ...] = (256, 1024, 4096)
    num_buckets: tuple[int, ...] = (4, 8, 12, 16, 20)
    max_batch_size: int | None = None
    shard_size: int = 1000
    bytes_per_length: float | None = None
    min_randomness: float | None = None
    seed: int = 0
    current: CurrentStream | None = None

    def __post_init__(self) -> None:
        _check_whole("--world-size", self.world_size, 1, _MOST_RANKS)
        _check_whole("--workers", self.workers, 0, 1024)
        _check_whole("--shuffle-shards", self.shuffle_shards, 0, 10**9)
        _check_whole("--shuffle-buffer", self.shuffle_buffer, 0, 10**9)
        _check_whole("--shard-size", self.shard_size, 1, 10**12)
        if self.max_batch_size is not None:
            _check_whole("--max-batch-size", self.max_batch_size, 1, 10**18)
        _check_positive("--bytes-per-length", self.bytes_per_length, 1e12)
        _check_positive("--min-randomness", self.min_randomness, 1)

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
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "current"}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _check_whole(name: str, number: int, least: int, most: int) -> None:
    if not least <= number <= most:
        raise UsageError(f"{name} must be from {least} to {most:,}, got {number:,}")


def _check_positive(name: str, number: float | None, most: float) -> None:
    if number is not None and not 0 < number <= most:
        raise UsageError(f"{name} must be above 0 and at most {most:g}, got {number:g}")
