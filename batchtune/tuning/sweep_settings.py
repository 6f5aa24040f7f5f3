"""The settings of a sweep, and of a stream's sweep."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from batchtune.batching.layout import Dealing
from batchtune.batching.sharding import Sharding
from batchtune.batching.strategies import STRATEGIES, Strategy
from batchtune.errors import UsageError, did_you_mean, shortened
from batchtune.results import RankTimes
from batchtune.tuning.current.base import Current
from batchtune.tuning.current.stream import CurrentStream

ALL_STRATEGIES = tuple(STRATEGIES)
_MOST_BUCKETS = 1000
_MOST_RANKS = 16_384

# Pool sizes to compare, evenly spaced in their logarithm, from this many examples to all.
_POOL_SIZES = 8
_SMALLEST_POOL = 1000
_ALL = 10**15

_RANGE = re.compile(r"(\d{1,9})(?::(\d{1,9}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The ranks that training runs on; with `same_bucket` all take batches of one bucket at each step.

    With `accumulate` above 1 they wait for each other only after so many batches.
    """

    world_size: int = 1
    same_bucket: bool = False
    accumulate: int = 1

    def epoch_seconds(self, times: RankTimes) -> float:
        """Return the time of an epoch as these ranks take batches."""
        if self.same_bucket:
            return times.same_bucket_epoch_seconds
        return times.independent_epoch_seconds

    @property
    def dealing(self) -> Dealing:
        """How batches are dealt to them."""
        return Dealing(world_size=self.world_size, same_bucket=self.same_bucket)

    def steps(self, batches: int) -> int:
        """Return the optimizer steps of an epoch with this many batches over all ranks."""
        return -(-batches // (self.world_size * self.accumulate))


ONE_RANK = Ranks()


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSettings:
    """The settings of a sweep; UsageError for an unknown strategy, a number out of range, or pool sizes without pools.

    Attributes:
        pool_sizes: Examples of a pool, at least 1 each; empty: from a thousand to all, as the data allow.
        seed: Of the shuffles of the sampler that is written, and of simulated epochs.
        multiple_of: Boundaries, and the lengths of batches, are rounded up to multiples of this.
        throughput_fraction: The share of the best throughput that is enough.
        min_randomness: The least probability, for the recommended row, that mates do not meet again in the next epoch.
        current: The user's current settings, to compare with.
    """

    strategies: tuple[str, ...] = ALL_STRATEGIES
    num_buckets: tuple[int, ...] = tuple(range(10, 21))
    pool_sizes: tuple[int, ...] = ()
    max_batch_size: int | None = None
    seed: int = 0
    multiple_of: float | None = None
    ranks: Ranks = ONE_RANK
    throughput_fraction: float = 0.95
    min_randomness: float | None = None
    current: Current | None = None

    def __post_init__(self) -> None:
        if not self.strategies:
            raise UsageError("at least one strategy is needed", f"Known ones: {', '.join(STRATEGIES)}.")
        for name in self.strategies:
            if name not in STRATEGIES:
                hint = f"{did_you_mean(name, STRATEGIES)}Known strategies: {', '.join(STRATEGIES)}."
                raise UsageError(f"unknown strategy {shortened(name)} (--strategy)", hint)
        if not self.num_buckets:
            raise UsageError("at least one number of buckets is needed")
        for number in self.num_buckets:
            _check_num_buckets(number)
        for size in self.pool_sizes:
            if size < 1:
                raise UsageError(f"a pool must hold at least 1 example, got {size}")
        if self.pool_sizes and not any(STRATEGIES[name].in_pools for name in self.strategies):
            pooled = " or ".join(name for name, strategy in STRATEGIES.items() if strategy.in_pools)
            raise UsageError(
                f"--pool-size has no effect: --strategy {', '.join(self.strategies)} makes no pools",
                f"Add --strategy {pooled}, or leave out --pool-size.",
            )
        if self.max_batch_size is not None and self.max_batch_size < 1:
            raise UsageError(f"max_batch_size must be at least 1, got {self.max_batch_size}")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed must be at least 0 and below 2^63, got {shortened(self.seed)}")
        _check_whole("--world-size", self.ranks.world_size, 1, _MOST_RANKS)
        _check_whole("--accumulate", self.ranks.accumulate, 1, _MOST_RANKS)
        _check_positive("--multiple-of", self.multiple_of, 1e15)
        _check_positive("--throughput-fraction", self.throughput_fraction, 1)
        _check_positive("--min-randomness", self.min_randomness, 1)

    def record(self) -> dict[str, Any]:
        """Return them as `sweep.json` holds them."""
        record: dict[str, Any] = {}
        for name, value in _recorded(self).items():
            record |= asdict(value) if name == "ranks" else {name: value}
        return {**record, "pool_sizes": ["all" if size == _ALL else size for size in self.pool_sizes]}

    def numbers(self, strategy: Strategy, count: int) -> tuple[int, ...]:
        """Return the bucket counts, or the pool sizes, to sweep for so many examples."""
        if not strategy.in_pools:
            return self.num_buckets
        if self.pool_sizes:
            return tuple(sorted({min(size, count) for size in self.pool_sizes}))
        if count <= _SMALLEST_POOL:
            return (count,)
        between = np.geomspace(_SMALLEST_POOL, count, _POOL_SIZES)[:-1]
        sizes = [count, *(min(int(float(f"{size:.2g}")), count) for size in between[::-1])]
        # Two sizes that give as many pools give the same pools.
        return tuple(sorted({-(-count // size): size for size in sizes}.values()))


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
        _check_whole("--world-size", self.world_size, 1, _MOST_RANKS)
        _check_whole("--workers", self.workers, 0, 1024)
        _check_whole("--shuffle-shards", self.shuffle_shards, 0, 10**9)
        _check_whole("--shuffle-buffer", self.shuffle_buffer, 0, 10**9)
        _check_whole("--shard-size", self.shard_size, 1, 10**12)
        for size in self.buffer_sizes:
            _check_whole("--buffer-size", size, 1, 10**15)
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
        return _recorded(self)


def _recorded(settings: SweepSettings | StreamSettings) -> dict[str, Any]:
    """Return all fields but `current`, tuples as lists."""
    values = {field.name: getattr(settings, field.name) for field in fields(settings) if field.name != "current"}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def parse_num_buckets(text: str) -> tuple[int, ...]:
    """Read bucket counts: `10:20` (both ends in), `15`, `10,15,20`, or a mixture; ascending, each once."""
    numbers: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise UsageError(
                f"the number of buckets must be a number, a range or a list of them, got {shortened(text)}",
                "Write 15, 10:20 (both ends in) or 10,15,20.",
            )
        first = int(match[1])
        last = int(match[2] or match[1])
        _check_num_buckets(first)
        _check_num_buckets(last)
        if first > last:
            raise UsageError(
                f"a range of bucket counts must run from low to high, got {shortened(part.strip())}",
                f"Write {last}:{first}.",
            )
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


def parse_sizes(text: str, flag: str) -> tuple[int, ...]:
    """Read sizes of pools or buffers: `20000`, `1000,20000` or `1000,all`; ascending, each once."""
    sizes = set()
    for part in (part.strip() for part in text.split(",")):
        if part != "all" and not re.fullmatch(r"0*[1-9]\d{0,99}", part):
            raise UsageError(
                f"{flag} must be a number of examples, at least 1, got {shortened(text)}",
                "Write 20000, a list such as 1000,20000, or all.",
            )
        sizes.add(_ALL if part == "all" else min(int(part), _ALL))
    return tuple(sorted(sizes))


def _check_num_buckets(number: int) -> None:
    if not 1 <= number <= _MOST_BUCKETS:
        raise UsageError(f"the number of buckets must be from 1 to {_MOST_BUCKETS}, got {number}")


def _check_whole(name: str, number: int, least: int, most: int) -> None:
    if not least <= number <= most:
        raise UsageError(f"{name} must be from {least} to {most:,}, got {number:,}")


def _check_positive(name: str, number: float | None, most: float) -> None:
    if number is not None and not 0 < number <= most:
        raise UsageError(f"{name} must be above 0 and at most {most:g}, got {number:g}")
