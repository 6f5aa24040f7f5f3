"""Compares strategies and bucket counts on one data set."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from batchtune.batching.expectation import expected_batches
from batchtune.batching.limits import Limits
from batchtune.batching.strategies import STRATEGIES, Problem, ProblemCosts
from batchtune.batching.table import BucketTable
from batchtune.errors import UsageError, shortened
from batchtune.lengths import FloatArray, Histogram, IntArray, Lengths, padded_to
from batchtune.results import (
    Baseline,
    BucketUse,
    LearningRate,
    Row,
    Saturation,
    Sizing,
    Sweep,
    TwoDimensionalRow,
    meta_of,
)
from batchtune.tuning.baselines import below_all, fixed_baselines, lower_bound
from batchtune.tuning.cautions import cap_cautions, cautions, current_cautions
from batchtune.tuning.current import Current, CurrentTable, current_table
from batchtune.tuning.distribution import ProvenBy, bucket_uses, histogram_of, quantiles_of
from batchtune.tuning.estimates import StepSeconds, batch_seconds
from batchtune.tuning.pricing import ONE_RANK, Priced, Pricing, Ranks
from batchtune.tuning.randomness import learning_rate_hint
from batchtune.tuning.recommend import recommend
from batchtune.tuning.saturation import saturation
from batchtune.tuning.targets import TypicalTargets
from batchtune.tuning.trade_off import knee, trade_off
from batchtune.tuning.two_dimensions import JointSizes, two_dimensional_rows
from batchtune.tuning.uncertainty import equal_to_best
from batchtune.tuning.unit_hints import limit_unit_hint

ALL_STRATEGIES = tuple(STRATEGIES)
MOST_BUCKETS = 1000
MOST_RANKS = 16_384

_RANGE = re.compile(r"(\d{1,9})(?::(\d{1,9}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a probe knows of the device; all None without one.

    Attributes:
        frontier: Lengths → the largest batch size that fits, at least 1.
        continued_frontier: The same, and beyond the longest length, where batches are padded further.
        step_seconds: (batch sizes, lengths, target lengths) → seconds of one training step, element by element,
            broadcasting; called without target lengths where the data set has none.
        device_name: The device that was measured.
        joint_frontier: (lengths, target lengths) → the largest batch size that fits, at least 1; None where shorter
            targets than the longest were not measured.
        proven: Lengths → the largest batch size that is proven to fit, 0 where none is.
        joint_proven: The same for pairs of lengths and target lengths.
        joint_lengths: The lengths at which pairs were measured.
        proven_by: (longest length, batch size) → index of the trial that proves such a batch; None where none does.
    """

    frontier: Callable[[FloatArray], IntArray] | None = None
    continued_frontier: Callable[[FloatArray], IntArray] | None = None
    step_seconds: StepSeconds | None = None
    device_name: str | None = None
    joint_frontier: JointSizes | None = None
    proven: Callable[[FloatArray], IntArray] | None = None
    joint_proven: JointSizes | None = None
    joint_lengths: FloatArray = field(default_factory=lambda: np.empty(0))
    proven_by: ProvenBy | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSettings:
    """What a sweep compares.

    Attributes:
        strategies: Names from `STRATEGIES`.
        num_buckets: Bucket counts, 1 to 1000 each.
        max_batch_size: The most examples in a batch, or None.
        seed: For the shuffles of the sampler that is written; the sweep itself draws nothing.
        multiple_of: Boundaries, and the lengths of batches, are rounded up to multiples of this; None: they are not.
        ranks: On how many ranks training runs, and how they take batches.
        throughput_fraction: What part of the best throughput is enough, above 0 and at most 1.
        min_randomness: The least 1 / effective buckets of the recommended table, above 0 and at most 1; None: any.

    Raises:
        UsageError: A strategy is unknown, or a number is out of range.
    """

    strategies: tuple[str, ...] = ALL_STRATEGIES
    num_buckets: tuple[int, ...] = tuple(range(10, 21))
    max_batch_size: int | None = None
    seed: int = 0
    multiple_of: float | None = None
    ranks: Ranks = ONE_RANK
    throughput_fraction: float = 0.95
    min_randomness: float | None = None

    def __post_init__(self) -> None:
        if not self.strategies:
            raise UsageError("at least one strategy is needed", f"Known ones: {', '.join(STRATEGIES)}.")
        for name in self.strategies:
            if name not in STRATEGIES:
                raise UsageError(f"{shortened(name)} is no strategy", f"Known ones: {', '.join(STRATEGIES)}.")
        if not self.num_buckets:
            raise UsageError("at least one number of buckets is needed")
        for number in self.num_buckets:
            _check_num_buckets(number)
        if self.max_batch_size is not None and self.max_batch_size < 1:
            raise UsageError(f"max_batch_size must be at least 1, got {self.max_batch_size}")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed must be at least 0 and below 2^63, got {shortened(self.seed)}")
        if self.multiple_of is not None and not 0 < self.multiple_of <= 1e15:
            raise UsageError(f"--multiple-of must be above 0 and at most 1e15, got {self.multiple_of:g}")
        for name, number in (("--world-size", self.ranks.world_size), ("--accumulate", self.ranks.accumulate)):
            if not 1 <= number <= MOST_RANKS:
                raise UsageError(f"{name} must be from 1 to {MOST_RANKS:,}, got {number:,}")
        for name, share in (
            ("--throughput-fraction", self.throughput_fraction),
            ("--min-randomness", self.min_randomness),
        ):
            if share is not None and not 0 < share <= 1:
                raise UsageError(f"{name} must be above 0 and at most 1, got {share:g}")

    def record(self) -> dict[str, Any]:
        """What `sweep.json` says of them."""
        return {
            "strategies": list(self.strategies),
            "num_buckets": list(self.num_buckets),
            "max_batch_size": self.max_batch_size,
            "seed": self.seed,
            "multiple_of": self.multiple_of,
            "world_size": self.ranks.world_size,
            "same_bucket": self.ranks.same_bucket,
            "accumulate": self.ranks.accumulate,
            "throughput_fraction": self.throughput_fraction,
            "min_randomness": self.min_randomness,
        }


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


def sweep(
    lengths: Lengths,
    max_batch_length: float,
    settings: SweepSettings,
    costs: Costs,
    on_row: Callable[[Row], None] | None = None,
    *,
    current: Current | None = None,
) -> Sweep:
    """Works out what an epoch costs with every strategy and bucket count, and recommends one.

    Nothing is drawn at random: padded lengths and times are exact expectations over shuffles.

    Args:
        lengths: The data set.
        max_batch_length: The largest padded length that a batch may have, in the unit of the lengths.
        settings: What to compare.
        costs: What a probe knows.
        on_row: Told each row as soon as it is known.
        current: What the user has now.

    Raises:
        UsageError: `max_batch_length` is not positive and finite.
    """
    if not (math.isfinite(max_batch_length) and max_batch_length > 0):
        raise UsageError(f"max_batch_length must be positive and finite, got {max_batch_length:g}")
    limits = _limits(lengths, max_batch_length, settings, costs)
    pricing = _pricing(lengths, max_batch_length, settings, costs)
    found: list[Priced] = []
    for priced in _rows(pricing, limits, settings):
        found.append(priced)
        if on_row is not None:
            on_row(priced.row)
    rows = _with_equals(found, pricing)
    as_table = None if current is None else current_table(current, lengths)
    now = None if as_table is None else _current_row(as_table, pricing, found)
    fits = None if as_table is None else _fits(as_table, limits)
    baselines = fixed_baselines(pricing, limits)
    others: list[Row | Baseline] = [*rows, *baselines, *([] if now is None else [now])]
    choice = recommend(rows, baselines, min_randomness=settings.min_randomness)
    recommended = None if choice.index is None else rows[choice.index]
    wrong_unit = limit_unit_hint(lengths, max_batch_length) if recommended is None else None
    curve_costs = [_cost(row, rows) for row in rows]
    spread = [row.effective_buckets for row in rows]
    curve = trade_off(curve_costs, spread)
    return Sweep(
        meta=meta_of(Sweep),
        lengths=lengths.summary(),
        max_batch_length=max_batch_length,
        settings=settings.record(),
        device_name=costs.device_name,
        rows=rows,
        baselines=baselines,
        lower_bound=below_all(lower_bound(pricing, limits), others),
        recommended=choice.index,
        reason=f"{wrong_unit}. As it is, {choice.reason}" if wrong_unit else choice.reason,
        warnings=[
            *cautions(lengths, limits, settings.num_buckets, rows),
            *_ranks_cautions(pricing),
            *_current_warnings(current, as_table, now, fits, settings),
            *([] if current is None else cap_cautions(current, recommended, settings.max_batch_size)),
        ],
        current=now,
        current_fits=fits,
        current_settings=None if current is None or as_table is None else current.record(as_table),
        trade_off=curve,
        knee=knee(curve_costs, spread, curve),
        saturation=_saturation(pricing, limits, settings, recommended),
        learning_rate=_learning_rate(recommended, now, baselines),
        two_dimensional=_two_dimensional(pricing, limits, costs, rows),
        histogram=histogram_of(lengths),
        quantiles=quantiles_of(lengths),
        buckets=_bucket_uses(lengths, pricing, recommended, costs),
    )


def _check_num_buckets(number: int) -> None:
    if not 1 <= number <= MOST_BUCKETS:
        raise UsageError(f"the number of buckets must be from 1 to {MOST_BUCKETS}, got {number}")


def _limits(lengths: Lengths, max_batch_length: float, settings: SweepSettings, costs: Costs) -> Limits:
    further = settings.multiple_of is not None
    return Limits(
        max_batch_length=max_batch_length,
        max_batch_size=settings.max_batch_size,
        frontier=(costs.continued_frontier or costs.frontier) if further else costs.frontier,
        measured_up_to=lengths.longest if further else None,
    )


def _pricing(lengths: Lengths, max_batch_length: float, settings: SweepSettings, costs: Costs) -> Pricing:
    padded = lengths if settings.multiple_of is None else lengths.padded_to(settings.multiple_of)
    return Pricing(
        lengths=padded,
        total=lengths.total,
        max_batch_length=max_batch_length,
        step_seconds=costs.step_seconds,
        targets=TypicalTargets.of(padded) if costs.step_seconds is not None else None,
        ranks=settings.ranks,
        proven=costs.proven,
    )


def _rows(pricing: Pricing, limits: Limits, settings: SweepSettings) -> Iterator[Priced]:
    problems = {sizing: _problem(pricing, limits, sizing) for sizing in limits.sizings}
    for strategy in settings.strategies:
        # Only `optimal` chooses its boundaries for what the frontier allows; the others do not know of sizes.
        for sizing in limits.sizings if strategy == "optimal" else limits.sizings[:1]:
            tables = STRATEGIES[strategy](problems[sizing], settings.num_buckets)
            for num_buckets, boundaries in zip(settings.num_buckets, tables, strict=True):
                if settings.multiple_of is not None:
                    boundaries = np.unique(padded_to(boundaries, settings.multiple_of))
                table = BucketTable(boundaries, limits.batch_sizes(boundaries, sizing))
                yield pricing.row(strategy, sizing, num_buckets, table)


def _problem(pricing: Pricing, limits: Limits, sizing: Sizing) -> Problem:
    histogram = pricing.lengths.histogram
    return Problem(
        histogram=histogram,
        max_batch_length=pricing.max_batch_length,
        batch_sizes=limits.batch_sizes(histogram.lengths, sizing),
        costs=None if pricing.step_seconds is None else _costs(pricing, pricing.step_seconds),
    )


def _costs(pricing: Pricing, step_seconds: StepSeconds) -> ProblemCosts:
    """What `Pricing.row` reports of an epoch, and what it is made of."""

    def of_batch(batch_sizes: FloatArray, lengths: FloatArray, above: FloatArray | None = None) -> FloatArray:
        seconds = batch_seconds(step_seconds, pricing.targets, None if above is None else lambda _: above)
        return np.asarray(seconds(batch_sizes, lengths), dtype=np.float64)

    def of_epoch(histogram: Histogram, table: BucketTable) -> float:
        return pricing.epoch_seconds(expected_batches(histogram, table), table)

    return ProblemCosts(of_batch=of_batch, of_epoch=of_epoch)


def _table(row: Row) -> BucketTable:
    return BucketTable(np.asarray(row.boundaries), np.asarray(row.batch_sizes, dtype=np.int64))


def _bucket_uses(lengths: Lengths, pricing: Pricing, recommended: Row | None, costs: Costs) -> list[BucketUse]:
    if recommended is None:
        return []
    return bucket_uses(lengths, pricing.lengths, _table(recommended), pricing.ranks.dealing, costs.proven_by)


def _current_row(current: CurrentTable, pricing: Pricing, found: Sequence[Priced]) -> Row:
    """What the user has now; its batches are padded as they come."""
    as_it_is = replace(pricing, lengths=current.lengths, total=current.lengths.total)
    now = as_it_is.row("current", current.sizing, current.table.num_buckets, current.table)
    times = [priced.time for priced in (*found, now) if priced.time is not None]
    if len(times) <= len(found):
        return now.row
    return msgspec.structs.replace(now.row, equal_to_best=equal_to_best(times, pricing.sigmas)[-1])


def _fits(current: CurrentTable, limits: Limits) -> bool:
    """Whether all its batches stay within what was measured, or within max_batch_length where nothing was.

    A batch of one always does.
    """
    table, histogram = current.table, current.lengths.histogram
    counts = table.counts(histogram)
    used = counts > 0
    longest = histogram.lengths[table.edges(histogram)[1:][used] - 1]
    sizes = np.minimum(table.batch_sizes, counts)[used]
    return bool(((sizes == 1) | (sizes <= limits.batch_sizes(longest, limits.sizings[-1]))).all())


def _with_equals(found: Sequence[Priced], pricing: Pricing) -> list[Row]:
    """The rows, each with whether it is as good as the fastest, as far as can be told."""
    times = [priced.time for priced in found if priced.time is not None]
    if len(times) < len(found):
        return [priced.row for priced in found]
    equal = equal_to_best(times, pricing.sigmas)
    return [msgspec.structs.replace(priced.row, equal_to_best=same) for priced, same in zip(found, equal, strict=True)]


def _cost(row: Row, rows: Sequence[Row]) -> float:
    """The estimated time, or the number of batches where any row has no time."""
    timed = all(other.estimated_epoch_seconds is not None for other in rows)
    return row.estimated_epoch_seconds if timed and row.estimated_epoch_seconds is not None else float(row.batches)


def _ranks_cautions(pricing: Pricing) -> Iterator[str]:
    ranks = pricing.ranks
    if ranks.same_bucket and ranks.world_size == 1:
        yield "--same-bucket says nothing about one rank: give their number with --world-size"
    if pricing.step_seconds is None and ranks.world_size > 1:
        yield (
            f"what it costs that {ranks.world_size:,} ranks wait for each other is not known without step times: "
            "`batchtune probe-oom` measures them"
        )


def _current_warnings(
    current: Current | None,
    found: CurrentTable | None,
    row: Row | None,
    fits: bool | None,
    settings: SweepSettings,
) -> Iterator[str]:
    if current is None or found is None or row is None:
        return
    if not fits:
        yield (
            "your current config makes batches that are larger than what was found to fit (or than the "
            "max_batch_length that was given): its times are extrapolated, and it may run out of memory"
        )
    if settings.multiple_of is not None:
        yield "your current config is counted as its batches come, not padded to multiples as the others are"
    yield from current_cautions(current, found, row)
    yield from found.notes


def _saturation(
    pricing: Pricing, limits: Limits, settings: SweepSettings, recommended: Row | None
) -> Saturation | None:
    if pricing.step_seconds is None:
        return None
    num_buckets = len(recommended.boundaries) if recommended is not None else max(settings.num_buckets)
    return saturation(
        pricing.lengths,
        limits,
        pricing.step_seconds,
        pricing.targets,
        num_buckets,
        fraction=settings.throughput_fraction,
        epoch=pricing.epoch_seconds,
        dealing=pricing.ranks.dealing,
    )


def _two_dimensional(pricing: Pricing, limits: Limits, costs: Costs, rows: Sequence[Row]) -> list[TwoDimensionalRow]:
    joint = costs.joint_frontier
    if joint is None or pricing.lengths.targets is None:
        return []

    def sizes(lengths: FloatArray, targets: FloatArray) -> IntArray:
        fits = joint(lengths, targets)
        return fits if limits.max_batch_size is None else np.minimum(fits, limits.max_batch_size)

    return two_dimensional_rows(
        pricing.lengths,
        sizes,
        pricing.step_seconds,
        rows,
        proven=costs.joint_proven,
        measured=costs.joint_lengths,
    )


def _learning_rate(recommended: Row | None, current: Row | None, baselines: Sequence[Baseline]) -> LearningRate | None:
    """The hint for who goes over to the recommended row from the current settings, or from a fixed batch size."""
    if recommended is None:
        return None
    if current is not None:
        return learning_rate_hint("current", current.mean_batch_size, recommended.mean_batch_size)
    fixed = baselines[0]
    return learning_rate_hint(fixed.name, float(fixed.batch_size), recommended.mean_batch_size)
