"""The settings of a sweep."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from batchtune.buckets.current import Current
from batchtune.buckets.strategies import STRATEGIES, Strategy
from batchtune.epochs.layout import ONE_RANK, Ranks
from batchtune.errors import UsageError, did_you_mean, shortened

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ALL_STRATEGIES = tuple(STRATEGIES)
_MOST_BUCKETS = 1000
MOST_RANKS = 16_384

# Pool sizes to compare, evenly spaced in their logarithm, from this many examples to all.
_POOL_SIZES = 8
_SMALLEST_POOL = 1000
_ALL = 10**15

_RANGE = re.compile(r"(\d{1,9})(?::(\d{1,9}))?")


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
        check_whole("--world-size", self.ranks.world_size, 1, MOST_RANKS)
        check_whole("--accumulate", self.ranks.accumulate, 1, MOST_RANKS)
        check_positive("--multiple-of", self.multiple_of, 1e15)
        check_positive("--throughput-fraction", self.throughput_fraction, 1)
        check_positive("--min-randomness", self.min_randomness, 1)

    def record(self) -> dict[str, Any]:
        """Return them as `sweep.json` holds them."""
        record: dict[str, Any] = {}
        for name, value in recorded(self).items():
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


def recorded(settings: DataclassInstance) -> dict[str, Any]:
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


def check_whole(name: str, number: int, least: int, most: int) -> None:
    """Raise UsageError unless a number is within these bounds."""
    if not least <= number <= most:
        raise UsageError(f"{name} must be from {least} to {most:,}, got {number:,}")


def check_positive(name: str, number: float | None, most: float) -> None:
    """Raise UsageError unless a number is above 0 and at most `most`; None is any number."""
    if number is not None and not 0 < number <= most:
        raise UsageError(f"{name} must be above 0 and at most {most:g}, got {number:g}")
