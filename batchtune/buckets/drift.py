"""Measures drift: what a tuned table costs on other lengths than those it was tuned for."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
from msgspec import structs

from batchtune.buckets.current import Current, fixed_batches
from batchtune.buckets.strategies import STRATEGIES
from batchtune.buckets.sweep import sweep
from batchtune.epochs.batchers import Batching
from batchtune.epochs.measured_costs import Costs, capped
from batchtune.epochs.pricing import Pricing
from batchtune.epochs.table import batch_sizes_for
from batchtune.errors import ResultError, shortened
from batchtune.lengths import Lengths
from batchtune.results import (
    MOST_BUCKETS,
    Drift,
    Row,
    Sweep,
    SweepSettings,
    epoch_costs,
)

_AGAIN = "Make sweep.json again with `batchtune sweep-buckets`."


def drift(lengths: Lengths, tuned: Sweep, costs: Costs) -> Drift:
    """Return how stale the recommended table of a sweep is on other lengths.

    The newly tuned table has the strategy, sizing and number of buckets (or pool size) of the recommended one, and the
    sweep's settings. For the sweep's own lengths staleness is 0 by definition. `costs` are those of the
    probe that the sweep was made with, `Costs()` without one.

    Raises ResultError if the sweep recommends nothing, is damaged, is of lengths in another unit, or was made with a
    probe whose costs are not given.
    """
    row = tuned.recommended_row
    unit = tuned.lengths.unit
    if row is None:
        raise ResultError(
            "the sweep recommends no table, so there is nothing to compare other lengths with",
            _AGAIN,
        )
    if lengths.unit is not None and unit is not None and lengths.unit != unit:
        raise ResultError(
            f"the manifest is in {lengths.unit}, the run in {unit}",
            "Read them with the same --length-key, or convert them with --length-scale and --unit.",
        )
    as_swept = _as_swept(costs, tuned, row)
    if row.strategy not in STRATEGIES and not row.keeps_examples:
        raise ResultError(
            f"the sweep is edited or damaged: unknown strategy {shortened(row.strategy)}",
            _AGAIN,
        )
    swept_with = msgspec.convert(tuned.settings, SweepSettings)
    own = None
    if row.keeps_examples:
        own = _own_of(row, swept_with)
        swept_with = structs.replace(swept_with, micro_batches=row.accumulate)
    settings = structs.replace(
        swept_with,
        strategies=(row.strategy if own is None else "pooled",),
        num_buckets=(min(row.num_buckets, MOST_BUCKETS),),
        pool_sizes=() if row.pool_size is None else (row.pool_size,),
    )
    changed = lengths.fingerprint != tuned.lengths.fingerprint
    pricing = Pricing.of(lengths, tuned.max_batch_length, settings, as_swept)
    if row.accumulate is not None:
        in_steps = replace(pricing.dealing, accumulate=row.accumulate)
        pricing = replace(pricing, dealing=in_steps)
    # Examples beyond its boundaries make batches of one.
    batching = Batching.of(row)
    extended = batching.table.extended_to(pricing.lengths.longest)
    now = pricing.priced(
        row.strategy, row.sizing, replace(batching, table=extended)
    ).row
    best = now
    if changed:
        retuned = sweep(lengths, tuned.max_batch_length, settings, as_swept, own)
        best = next(
            other
            for other in retuned.rows
            if other.sizing == row.sizing and other.keeps_examples == row.keeps_examples
        )
    tuned_cost, best_cost = epoch_costs([now, best], steps_kept=row.keeps_examples)
    return Drift(
        lengths=lengths.summary(),
        changed=changed,
        beyond=lengths.count_beyond(row.boundaries[-1]),
        batches=now.batches,
        retuned_batches=best.batches,
        epoch_seconds=now.estimated_epoch_seconds,
        retuned_epoch_seconds=best.estimated_epoch_seconds,
        stale=max(0.0, tuned_cost / best_cost - 1),
    )


def _own_of(row: Row, settings: SweepSettings) -> Current:
    """Return the user's own batches, of whose steps a row keeps the examples."""
    assert row.pool_size is not None
    batches = (settings.world_size or 1) * (settings.accumulate or 1)
    return fixed_batches(max(1, row.pool_size // batches), "the run")


def _as_swept(costs: Costs, tuned: Sweep, row: Row) -> Costs:
    """Return the costs without what the sweep did not know, since it may be older than the probe."""
    by_frontier = [other for other in tuned.rows if other.sizing == "frontier"]
    timed = row.estimated_epoch_seconds is not None
    if (row.sizing == "frontier" and costs.frontier is None) or (
        timed and costs.step_seconds is None
    ):
        raise ResultError(
            "the recommended table was tuned by what a probe measured, but the run has no probe.json that tells it",
            "Put probe.json back, or probe and sweep again with `batchtune tune`.",
        )
    frontier = None
    if by_frontier:
        # The other lengths may be longer than what was measured.
        frontier = costs.continued_frontier or costs.frontier
    as_swept = replace(
        costs, joint_frontier=None, frontier=frontier, continued_frontier=frontier
    )
    if not timed:
        as_swept = replace(as_swept, step_seconds=None)
    if not by_frontier:
        return as_swept
    sizes = np.concatenate([other.batch_sizes for other in by_frontier])
    boundaries = np.concatenate([other.boundaries for other in by_frontier])
    if (sizes <= batch_sizes_for(boundaries, tuned.max_batch_length)).all():
        # The sweep may have been given a smaller --max-batch-length than the probe's.
        return capped(as_swept, tuned.max_batch_length)
    return as_swept
