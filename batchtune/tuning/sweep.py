"""Compares strategies and bucket counts on one data set."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from batchtune.batching.expectation import expected_batches
from batchtune.batching.limits import Limits
from batchtune.batching.samplers import count_batches
from batchtune.batching.strategies import STRATEGIES, Problem
from batchtune.batching.table import BucketTable
from batchtune.errors import UsageError
from batchtune.lengths import FloatArray, IntArray, Lengths
from batchtune.results import Row, Sizing, Sweep, meta_of
from batchtune.tuning.baselines import below_all, fixed_baselines, lower_bound
from batchtune.tuning.cautions import cautions
from batchtune.tuning.estimates import StepSeconds, batch_seconds, epoch_seconds
from batchtune.tuning.recommend import recommend
from batchtune.tuning.targets import TypicalTargets

MOST_BUCKETS = 1000

_RANGE = re.compile(r"(\d{1,9})(?::(\d{1,9}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a probe knows of the device; all None without one.

    Attributes:
        frontier: Lengths → the largest batch size that fits, at least 1.
        step_seconds: (batch sizes, lengths, target lengths) → seconds of one training step, element by element,
            broadcasting; called without target lengths where the data set has none.
        device_name: The device that was measured.
    """

    frontier: Callable[[FloatArray], IntArray] | None = None
    step_seconds: StepSeconds | None = None
    device_name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSettings:
    """What a sweep compares.

    Attributes:
        strategies: Names from `STRATEGIES`.
        num_buckets: Bucket counts, 1 to 1000 each.
        max_batch_size: The most examples in a batch, or None.
        seed: For the shuffles of the sampler that is written; the sweep itself draws nothing.

    Raises:
        UsageError: A strategy is unknown, or a number is out of range.
    """

    strategies: tuple[str, ...] = tuple(STRATEGIES)
    num_buckets: tuple[int, ...] = tuple(range(10, 21))
    max_batch_size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.strategies:
            raise UsageError("at least one strategy is needed", f"Known ones: {', '.join(STRATEGIES)}.")
        for name in self.strategies:
            if name not in STRATEGIES:
                raise UsageError(f"{name!r} is no strategy", f"Known ones: {', '.join(STRATEGIES)}.")
        if not self.num_buckets:
            raise UsageError("at least one number of buckets is needed")
        for number in self.num_buckets:
            _check_num_buckets(number)
        if self.max_batch_size is not None and self.max_batch_size < 1:
            raise UsageError(f"max_batch_size must be at least 1, got {self.max_batch_size}")


def parse_num_buckets(text: str) -> tuple[int, ...]:
    """Reads bucket counts: `10:20` (both ends in), `15`, `10,15,20`, or a mixture.

    Returns:
        The counts in ascending order, each once.

    Raises:
        UsageError: Not of this form, a range that runs backwards, or a count out of range.
    """
    numbers: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise UsageError(
                f"the number of buckets must be a number, a range or a list of them, got {text!r}",
                "Write 15, 10:20 (both ends in) or 10,15,20.",
            )
        first, last = int(match[1]), int(match[2] or match[1])
        _check_num_buckets(first)
        _check_num_buckets(last)
        if first > last:
            raise UsageError(
                f"a range of bucket counts must run from low to high, got {part.strip()!r}",
                f"Write {last}:{first}.",
            )
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


def sweep(
    lengths: Lengths,
    max_batch_length: float,
    settings: SweepSettings,
    costs: Costs,
    on_row: Callable[[Row], None] | None = None,
) -> Sweep:
    """Works out what an epoch costs with every strategy and bucket count, and recommends one.

    Nothing is drawn at random: padded lengths and times are exact expectations over shuffles.

    Args:
        lengths: The data set.
        max_batch_length: The largest padded length that a batch may have, in the unit of the lengths.
        settings: What to compare.
        costs: What a probe knows.
        on_row: Told each row as soon as it is known.

    Raises:
        UsageError: `max_batch_length` is not positive and finite.
    """
    if not (math.isfinite(max_batch_length) and max_batch_length > 0):
        raise UsageError(f"max_batch_length must be positive and finite, got {max_batch_length:g}")
    limits = Limits(max_batch_length=max_batch_length, max_batch_size=settings.max_batch_size, frontier=costs.frontier)
    rows: list[Row] = []
    targets = TypicalTargets.of(lengths) if costs.step_seconds is not None else None
    for row in _rows(lengths, limits, settings, costs, targets):
        rows.append(row)
        if on_row is not None:
            on_row(row)
    baselines = fixed_baselines(lengths, limits, costs.step_seconds, targets)
    bound = lower_bound(lengths, limits, costs.step_seconds)
    choice = recommend(rows, baselines)
    return Sweep(
        meta=meta_of(Sweep),
        lengths=lengths.summary(),
        max_batch_length=max_batch_length,
        settings={
            "strategies": list(settings.strategies),
            "num_buckets": list(settings.num_buckets),
            "max_batch_size": settings.max_batch_size,
            "seed": settings.seed,
        },
        device_name=costs.device_name,
        rows=rows,
        baselines=baselines,
        lower_bound=below_all(bound, [*rows, *baselines]),
        recommended=choice.index,
        reason=choice.reason,
        warnings=cautions(lengths, limits, settings.num_buckets, rows),
    )


def _check_num_buckets(number: int) -> None:
    if not 1 <= number <= MOST_BUCKETS:
        raise UsageError(f"the number of buckets must be from 1 to {MOST_BUCKETS}, got {number}")


def _rows(
    lengths: Lengths, limits: Limits, settings: SweepSettings, costs: Costs, targets: TypicalTargets | None
) -> Iterator[Row]:
    for strategy in settings.strategies:
        # Only `optimal` chooses its boundaries for what the frontier allows; the others do not know of sizes.
        for sizing in limits.sizings if strategy == "optimal" else limits.sizings[:1]:
            problem = Problem(
                histogram=lengths.histogram,
                max_batch_length=limits.max_batch_length,
                example_costs=_example_costs(lengths.histogram.lengths, limits, sizing, costs, targets),
            )
            tables = STRATEGIES[strategy](problem, settings.num_buckets)
            for num_buckets, boundaries in zip(settings.num_buckets, tables, strict=True):
                table = BucketTable(boundaries, limits.batch_sizes(boundaries, sizing))
                yield _row(strategy, sizing, num_buckets, table, lengths, limits.max_batch_length, costs, targets)


def _example_costs(
    ends: FloatArray, limits: Limits, sizing: Sizing, costs: Costs, targets: TypicalTargets | None
) -> FloatArray:
    """What an example costs in a bucket that ends at each length: its share of a full batch there."""
    sizes = limits.batch_sizes(ends, sizing).astype(np.float64)
    if costs.step_seconds is None:
        return 1 / sizes
    return np.asarray(batch_seconds(costs.step_seconds, targets)(sizes, ends), dtype=np.float64) / sizes


def _row(
    strategy: str,
    sizing: Sizing,
    num_buckets: int,
    table: BucketTable,
    lengths: Lengths,
    max_batch_length: float,
    costs: Costs,
    targets: TypicalTargets | None,
) -> Row:
    histogram = lengths.histogram
    edges, counts = table.edges(histogram), table.counts(histogram)
    used = counts > 0
    longest = histogram.lengths[edges[1:][used] - 1]
    shares = counts / lengths.count
    expected = expected_batches(histogram, table)
    padded = max(expected.padded_length, lengths.total)  # no less, whatever the rounding
    batches = count_batches(histogram, table)
    seconds = None
    if costs.step_seconds is not None:
        seconds = epoch_seconds(expected, table, costs.step_seconds, targets)
    return Row(
        strategy=strategy,
        sizing=sizing,
        num_buckets=num_buckets,
        used_buckets=int(np.count_nonzero(used)),
        boundaries=table.boundaries.tolist(),
        batch_sizes=table.batch_sizes.tolist(),
        batches=batches,
        padded_length=padded,
        padding_ratio=(padded - lengths.total) / padded,
        fill=lengths.total / (batches * max_batch_length),
        mean_batch_size=lengths.count / batches,
        largest_padded_length=float((np.minimum(table.batch_sizes, counts)[used] * longest).max()),
        effective_buckets=float(1 / np.sum(shares**2)),
        estimated_epoch_seconds=seconds,
    )
