"""Reads the settings of a sweep."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from batchtune.buckets.strategies import STRATEGIES
from batchtune.errors import UsageError, did_you_mean, invalid_field, shortened
from batchtune.results import MOST_BUCKETS, SweepSettings

__all__ = [
    "ALL_STRATEGIES",
    "SweepSettings",
    "checked_settings",
    "parse_num_buckets",
    "parse_sizes",
    "sizes_up_to",
]

ALL_STRATEGIES = tuple(STRATEGIES)


def checked_settings(**values: Any) -> SweepSettings:
    """Return the settings of a sweep; UsageError for an unknown strategy, a wrong value, or sizes of no pools."""
    try:
        settings = msgspec.convert(values, SweepSettings)
    except msgspec.ValidationError as error:
        raise UsageError(f"--{invalid_field(error).replace('_', '-', 2)}") from error
    for name in settings.strategies:
        if name not in STRATEGIES:
            hint = f"{did_you_mean(name, STRATEGIES)}Known strategies: {', '.join(STRATEGIES)}."
            raise UsageError(f"unknown strategy {shortened(name)} (--strategy)", hint)
    if settings.pool_sizes and not any(
        STRATEGIES[name].in_pools for name in settings.strategies
    ):
        raise UsageError(
            f"--pool-size has no effect: --strategy {', '.join(settings.strategies)} makes no pools",
            "Add --strategy pooled, or leave out --pool-size.",
        )
    return settings


def parse_num_buckets(text: str) -> tuple[int, ...]:
    """Read bucket counts: `10:20` (both ends in), `15`, `10,15,20`, or a mixture; ascending, each once."""
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", part.strip())
        first = int(match[1]) if match is not None else 0
        last = first
        if match is not None and match[2] is not None:
            last = int(match[2])
        if not 1 <= first <= last <= MOST_BUCKETS:
            raise UsageError(
                f"the number of buckets must be from 1 to {MOST_BUCKETS}, or ascending ranges, got {shortened(text)}",
                "Write 15, 10:20 (both ends in) or 10,15,20.",
            )
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


def parse_sizes(text: str, flag: str) -> tuple[int | Literal["all"], ...]:
    """Read sizes of pools or buffers: `20000`, `1000,20000` or `1000,all`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"all|0*[1-9]\d{0,14}", part) for part in parts):
        raise UsageError(
            f"{flag} must be a number of examples, at least 1, got {shortened(text)}",
            "Write 20000, a list such as 1000,20000, or all.",
        )
    return tuple("all" if part == "all" else int(part) for part in parts)


def sizes_up_to(count: int, sizes: Iterable[int | Literal["all"]]) -> list[int]:
    """Return the sizes of pools or buffers for so many examples, ascending, each once."""
    return sorted({count if size == "all" else min(size, count) for size in sizes})
