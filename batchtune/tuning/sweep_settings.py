"""The settings of a sweep, and the ranks that training runs on."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from batchtune.batching.layout import Dealing
from batchtune.batching.strategies import STRATEGIES, Strategy
from batchtune.errors import UsageError, did_you_mean, shortened
from batchtune.results import RankTimes
from batchtune.tuning.current.base import Current

ALL_STRATEGIES = tuple(STRATEGIES)
MOST_BUCKETS = 1000
MOST_RANKS = 16_384

# Pools that are compared: so many sizes, in even ratio, from this many examples to all.
_POOL_SIZES, _SMALLEST_POOL = 8, 1000
_ALL = 10**15

_RANGE = re.compile(r"(\d{1,9})(?::(\d{1,9}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The ranks that training runs on; at each step they may take batches of the same bucket.

    Attributes:
        accumulate: Batches whose gradients are accumulated before the ranks wait for each other.
    """

    world_size: int = 1
    same_bucket: bool = False
    accumulate: int = 1

    def epoch_seconds(self, times: RankTimes) -> float:
        """Return the time of an epoch as these ranks take batches."""
        return times.same_bucket_epoch_seconds if self.same_bucket else times.independent_epoch_seconds

    @property
    def dealing(self) -> Dealing:
        """The way in which they take batches."""
        return Dealing(world_size=self.world_size, same_bucket=self.same_bucket)

    def steps(self, batches: int) -> int:
        """Return the optimizer steps of an epoch of so many batches, over all ranks."""
        return -(-batches // (self.world_size * self.accumulate))


ONE_RANK = Ranks()


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSettings:
    """The settings of a sweep.

    Attributes:
        num_buckets: Bucket counts, 1 to 1000 each.
        pool_sizes: Examples of a pool, at least 1 each; empty: from a thousand to all, as the data allow.
        seed: Of the shuffles of the sampler that is written, and of the epochs in pools that are simulated.
        multiple_of: Boundaries, and the lengths of batches, are rounded up to multiples of this; None: they are not.
        throughput_fraction: What part of the best throughput is enough.
        min_randomness: The least probability, for the recommended row, that batch mates do not meet again in the next
            epoch; None: any.
        current: The user's settings now, to show beside the others.

    Raises:
        UsageError: A strategy is unknown, or a number is out of range.
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
        if self.max_batch_size is not None and self.max_batch_size < 1:
            raise UsageError(f"max_batch_size must be at least 1, got {self.max_batch_size}")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed must be at least 0 and below 2^63, got {shortened(self.seed)}")
        if self.multiple_of is not None and not 0 < self.multiple_of <= 1e15:
            raise UsageError(f"--multiple-of must be above 0 and at most 1e15, got {self.multiple_of:g}")
        for name, number in (("--world-size", self.ranks.world_size), ("--accumulate", self.ranks.accumulate)):
            if not 1 <= number <= MOST_RANKS:
                raise UsageError(f"{name} must be from 1 to {MOST_RANKS:,}, got {number:,}")
        shares = {"--throughput-fraction": self.throughput_fraction, "--min-randomness": self.min_randomness}
        for name, share in shares.items():
            if share is not None and not 0 < share <= 1:
                raise UsageError(f"{name} must be above 0 and at most 1, got {share:g}")

    def record(self) -> dict[str, Any]:
        """Return them as `sweep.json` holds them."""
        found: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            found |= asdict(value) if field.name == "ranks" else {field.name: value}
        del found["current"]
        found["pool_sizes"] = ["all" if size == _ALL else size for size in self.pool_sizes]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}

    def numbers(self, strategy: Strategy, count: int) -> tuple[int, ...]:
        """Return the numbers of buckets, or the sizes of pools, that are swept for so many examples."""
        if not strategy.in_pools:
            return self.num_buckets
        if self.pool_sizes:
            return tuple(sorted({min(size, count) for size in self.pool_sizes}))
        if count <= _SMALLEST_POOL:
            return (count,)
        between = np.geomspace(_SMALLEST_POOL, count, _POOL_SIZES)[:-1]
        sizes = [count, *(min(int(float(f"{size:.2g}")), count) for size in between[::-1])]
        # Where two sizes give as many pools, the examples of each are as many, too.
        return tuple(sorted({-(-count // size): size for size in sizes}.values()))


def parse_num_buckets(text: str) -> tuple[int, ...]:
    """Read bucket counts: `10:20` (both ends in), `15`, `10,15,20`, or a mixture; ascending, each once.

    Raises:
        UsageError: Not of this form, a range that runs backwards, or a count out of range.
    """
    numbers: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise UsageError(
                f"the number of buckets must be a number, a range or a list of them, got {shortened(text)}",
                "Write 15, 10:20 (both ends in) or 10,15,20.",
            )
        first, last = int(match[1]), int(match[2] or match[1])
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
    """Read sizes of pools or buffers: `20000`, `1000,20000` or `1000,all`; ascending, each once.

    Raises:
        UsageError: Not of this form, or a size of 0.
    """
    sizes = []
    for part in (part.strip() for part in text.split(",")):
        if part != "all" and not re.fullmatch(r"0*[1-9]\d{0,99}", part):
            raise UsageError(
                f"{flag} must be a number of examples, at least 1, got {shortened(text)}",
                "Write 20000, a list such as 1000,20000, or all.",
            )
        sizes.append(_ALL if part == "all" else min(int(part), _ALL))
    return tuple(sorted(set(sizes)))


def _check_num_buckets(number: int) -> None:
    if not 1 <= number <= MOST_BUCKETS:
        raise UsageError(f"the number of buckets must be from 1 to {MOST_BUCKETS}, got {number}")
