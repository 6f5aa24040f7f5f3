"""Compares strategies and bucket counts on one data set, and writes `sweep.json`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from batchtune.batching.expectation import expected_batches
from batchtune.batching.strategies import STRATEGIES, Problem, ProblemCosts
from batchtune.batching.table import BucketTable, Limits
from batchtune.errors import ResultError, UsageError
from batchtune.lengths import FloatArray, Histogram, Lengths, padded_to
from batchtune.results import (
    PROBE_FILE,
    SWEEP_FILE,
    Baseline,
    LearningRate,
    Probe,
    Row,
    Sizing,
    Sweep,
    epoch_costs,
    meta_of,
    read_result,
    write_result,
)
from batchtune.tuning.baselines import below_all, fixed_baselines, lower_bound
from batchtune.tuning.cautions import cautions, limit_unit_hint
from batchtune.tuning.costs import Costs, capped, costs_of
from batchtune.tuning.current import Current, CurrentTable
from batchtune.tuning.current.base import YOURS
from batchtune.tuning.distribution import bucket_uses, histogram_of, quantiles_of
from batchtune.tuning.epoch_cost import Priced, Pricing, equal_to_best
from batchtune.tuning.recommend import knee, learning_rate_hint, recommend, trade_off
from batchtune.tuning.run_folder import clear_run, holds_other_lengths
from batchtune.tuning.saturation import saturation
from batchtune.tuning.sweep_settings import SweepSettings
from batchtune.tuning.targets import batch_seconds
from batchtune.tuning.two_dimensions import two_dimensional_rows


def run_sweep(
    lengths: Lengths,
    settings: SweepSettings,
    folder: Path,
    *,
    max_batch_length: float | None = None,
    force: bool = False,
    on_row: Callable[[Row], None] | None = None,
    current: Current | None = None,
) -> Sweep:
    """Sweep bucket counts and strategies with the run folder's probe, if it has one, and writes `sweep.json`.

    Args:
        lengths: The data set.
        settings: What to compare.
        folder: The run folder; made where missing.
        max_batch_length: The largest padded length of a batch, whatever the probe found; None: what it found.
        force: Throw away what the folder holds of other data.
        on_row: Called with each row as soon as it is known.
        current: The user's settings now.

    Raises:
        ResultError: The folder holds results of other data, or neither it nor the caller knows max_batch_length.
    """
    foreign = holds_other_lengths(lengths, folder, force=force)
    probe = None if foreign or not (folder / PROBE_FILE).exists() else read_result(folder / PROBE_FILE, Probe)
    limit = max_batch_length if max_batch_length is not None else probe.max_batch_length if probe else None
    if limit is None:
        raise ResultError(
            f"how large a batch may be is not known: there is no {PROBE_FILE} in {folder}",
            "Measure it with `batchtune probe-oom`, or give it with --max-batch-length.",
        )
    costs = costs_of(probe) if probe else Costs()
    if max_batch_length is not None:
        costs = capped(costs, max_batch_length)
    found = sweep(lengths, limit, settings, costs, on_row, current=current)
    if foreign:
        clear_run(folder)
    write_result(folder / SWEEP_FILE, found)
    return found


def sweep(
    lengths: Lengths,
    max_batch_length: float,
    settings: SweepSettings,
    costs: Costs,
    on_row: Callable[[Row], None] | None = None,
    *,
    current: Current | None = None,
) -> Sweep:
    """Work out the cost of an epoch with every strategy and bucket count, and recommend one.

    Nothing is drawn at random: padded lengths and times are exact expectations over shuffles.

    Args:
        lengths: The data set.
        max_batch_length: The largest padded length that a batch may have, in the unit of the lengths.
        settings: What to compare.
        costs: The measurements of a probe.
        on_row: Called with each row as soon as it is known.
        current: The user's settings now.

    Raises:
        UsageError: `max_batch_length` is not positive and finite.
    """
    if not (math.isfinite(max_batch_length) and max_batch_length > 0):
        raise UsageError(f"max_batch_length must be positive and finite, got {max_batch_length:g}")
    limits = _limits(lengths, max_batch_length, settings, costs)
    pricing = Pricing.of(lengths, max_batch_length, settings, costs)
    found: list[Priced] = []
    for priced in _rows(pricing, limits, settings):
        found.append(priced)
        if on_row is not None:
            on_row(priced.row)
    rows = _with_equals(found, pricing)
    now = None if current is None else _priced_now(current, lengths, limits, pricing, found)
    baselines = fixed_baselines(pricing, limits)
    others: list[Row | Baseline] = [*rows, *baselines, *([] if now is None else [now.row])]
    choice = recommend(rows, baselines, min_randomness=settings.min_randomness)
    recommended = None if choice.index is None else rows[choice.index]
    wrong_unit = limit_unit_hint(lengths, max_batch_length) if recommended is None else None
    epochs, spread = epoch_costs(rows), [row.effective_buckets for row in rows]
    curve = trade_off(epochs, spread)
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
            *([] if now is None else _current_warnings(now, recommended, settings)),
        ],
        current=None if now is None else now.row,
        current_fits=None if now is None else now.fits,
        current_settings=None if now is None else now.current.record(now.table),
        trade_off=curve,
        knee=knee(epochs, spread, curve),
        saturation=saturation(
            pricing,
            limits,
            max(settings.num_buckets) if recommended is None else len(recommended.boundaries),
            settings.throughput_fraction,
        ),
        learning_rate=_learning_rate(recommended, None if now is None else now.row, baselines),
        two_dimensional=two_dimensional_rows(pricing, limits, costs, rows),
        histogram=histogram_of(lengths),
        quantiles=quantiles_of(lengths),
        buckets=[] if recommended is None else bucket_uses(lengths, pricing, recommended, costs.proven_by),
    )


def _limits(lengths: Lengths, max_batch_length: float, settings: SweepSettings, costs: Costs) -> Limits:
    further = settings.multiple_of is not None
    return Limits(
        max_batch_length=max_batch_length,
        max_batch_size=settings.max_batch_size,
        frontier=(costs.continued_frontier or costs.frontier) if further else costs.frontier,
        measured_up_to=lengths.longest if further else None,
    )


def _rows(pricing: Pricing, limits: Limits, settings: SweepSettings) -> Iterator[Priced]:
    problems = {sizing: _problem(pricing, limits, sizing) for sizing in limits.sizings}
    for name in settings.strategies:
        strategy = STRATEGIES[name]
        for sizing in limits.sizings if strategy.depends_on_sizes else limits.sizings[:1]:
            found = strategy.boundaries(problems[sizing], settings.num_buckets)
            for num_buckets, boundaries in zip(settings.num_buckets, found, strict=True):
                if settings.multiple_of is not None:
                    boundaries = np.unique(padded_to(boundaries, settings.multiple_of))
                table = BucketTable(boundaries, limits.batch_sizes(boundaries, sizing))
                yield pricing.row(name, sizing, num_buckets, table)


def _problem(pricing: Pricing, limits: Limits, sizing: Sizing) -> Problem:
    histogram = pricing.lengths.histogram
    return Problem(
        histogram=histogram,
        max_batch_length=pricing.max_batch_length,
        batch_sizes=limits.batch_sizes(histogram.lengths, sizing),
        costs=None if pricing.step_seconds is None else _problem_costs(pricing),
    )


def _problem_costs(pricing: Pricing) -> ProblemCosts:
    """Return the cost that a row reports of an epoch, and that of the batches it is made of."""
    assert pricing.step_seconds is not None
    step_seconds = pricing.step_seconds

    def of_batch(batch_sizes: FloatArray, lengths: FloatArray, above: FloatArray | None = None) -> FloatArray:
        seconds = batch_seconds(step_seconds, pricing.targets, None if above is None else lambda _: above)
        return np.asarray(seconds(batch_sizes, lengths), dtype=np.float64)

    def of_epoch(histogram: Histogram, table: BucketTable) -> float:
        return pricing.epoch_seconds(expected_batches(histogram, table))

    return ProblemCosts(of_batch=of_batch, of_epoch=of_epoch)


@dataclass(frozen=True, slots=True, eq=False)
class _Now:
    """The user's settings now, the table they make, its row, and whether its batches stay within the limits."""

    current: Current
    table: CurrentTable
    row: Row
    fits: bool


def _priced_now(current: Current, lengths: Lengths, limits: Limits, pricing: Pricing, found: Sequence[Priced]) -> _Now:
    """Work out what the user's settings cost; their batches are padded as they come."""
    as_table = current.table(lengths)
    table, own = as_table.table, as_table.lengths
    now = replace(pricing, lengths=own, total=own.total).row("current", as_table.sizing, table.num_buckets, table)
    equal = equal_to_best([priced.cost for priced in (*found, now)], pricing.sigmas)
    sizes, longest = table.largest_batches(own.histogram)
    # A batch of one always fits.
    fits = bool(((sizes == 1) | (sizes <= limits.batch_sizes(longest, limits.sizings[-1]))).all())
    return _Now(current, as_table, msgspec.structs.replace(now.row, equal_to_best=equal[-1]), fits)


def _with_equals(found: Sequence[Priced], pricing: Pricing) -> list[Row]:
    """Return the rows, each with whether its time can be distinguished from the fastest one's."""
    equal = equal_to_best([priced.cost for priced in found], pricing.sigmas)
    return [msgspec.structs.replace(priced.row, equal_to_best=same) for priced, same in zip(found, equal, strict=True)]


def _ranks_cautions(pricing: Pricing) -> Iterator[str]:
    ranks = pricing.ranks
    if ranks.same_bucket and ranks.world_size == 1:
        yield "--same-bucket says nothing about one rank: give their number with --world-size"
    if pricing.step_seconds is None and ranks.world_size > 1:
        yield (
            f"what it costs that {ranks.world_size:,} ranks wait for each other is not known without step times: "
            "`batchtune probe-oom` measures them"
        )


def _current_warnings(now: _Now, recommended: Row | None, settings: SweepSettings) -> Iterator[str]:
    if not now.fits:
        yield (
            "your current config makes batches that are larger than what was found to fit (or than the "
            "max_batch_length that was given): its times are extrapolated, and it may run out of memory"
        )
    if settings.multiple_of is not None:
        yield "your current config is counted as its batches come, not padded to multiples as the others are"
    yield from now.current.cautions(now.table, now.row)
    name, most = now.current.kind.most_examples(now.current.settings) or ("", None)
    if most is not None and recommended is not None and max(recommended.batch_sizes) > most:
        swept = "" if settings.max_batch_size is None else f" (--max-batch-size {settings.max_batch_size})"
        yield (
            f"{name} of {YOURS} allows {most:,} examples in a batch, the recommended table up to "
            f"{max(recommended.batch_sizes):,}{swept}: to keep your limit, sweep with --max-batch-size {most}"
        )


def _learning_rate(recommended: Row | None, current: Row | None, baselines: Sequence[Baseline]) -> LearningRate | None:
    """Return the hint for going over to the recommended row from the current settings, or from a fixed batch size."""
    if recommended is None:
        return None
    if current is not None:
        return learning_rate_hint("current", current.mean_batch_size, recommended.mean_batch_size)
    fixed = baselines[0]
    return learning_rate_hint(fixed.name, float(fixed.batch_size), recommended.mean_batch_size)
