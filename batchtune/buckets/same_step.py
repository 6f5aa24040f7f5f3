"""Rows that keep the examples of each optimizer step, and cut them into other micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from batchtune.buckets.advice import TOLERANCE
from batchtune.buckets.current import Current, own_current
from batchtune.epochs.batchers import Batching
from batchtune.epochs.layout import RankSplit
from batchtune.epochs.measured_costs import batch_seconds
from batchtune.epochs.own_steps import OwnSteps
from batchtune.epochs.pricing import Pricing, TimedRow
from batchtune.epochs.same_step import StepCutter
from batchtune.epochs.table import Limits
from batchtune.errors import UsageError
from batchtune.lengths import Lengths
from batchtune.results import Device, Keep, SweepSettings

SAME_STEP = "same-step"


def own_steps(current: Current | None, dealing: RankSplit) -> OwnSteps | None:
    """Return the steps of the user's current settings; None if those don't say which examples a step has."""
    if current is None or current.settings.random_batch_size is None:
        return None
    return OwnSteps(
        batch_size=current.settings.random_batch_size,
        dealing=dealing,
        unknown_sampler=current.settings.unknown_sampler,
    )


def kept(
    settings: SweepSettings, current: Current | None, own: OwnSteps | None, count: int
) -> Keep:
    """Return what the recommendation keeps as it is: what was asked for, or as much as is known of the training.

    `count` are the examples of the data. Raises UsageError if options contradict each other.
    """
    keep = settings.keep or _by_default(settings, current, own, count)
    if settings.min_steps is not None and keep != "steps":
        raise UsageError(
            f"--min-steps says how many steps to keep, and --keep {keep} does not keep a number of them",
            "Leave out one of the two.",
        )
    asked = settings.micro_batches is not None or settings.equal_counts
    if asked and keep != "same":
        raise UsageError(
            "--micro-batches and --equal-counts cut the examples of a step, which are not kept",
            "Say what a step is with --current batch_size=N and --accumulate N, and add --keep same.",
        )
    if keep == "same" and own is not None and own.examples > count:
        raise UsageError(
            f"--keep same: a step has {own.examples:,} examples, and the data {count:,}",
            "Keep the number of steps with --keep steps.",
        )
    return keep


def _by_default(
    settings: SweepSettings, current: Current | None, own: OwnSteps | None, count: int
) -> Keep:
    if settings.min_steps is not None:
        return "steps"
    if current is None:
        return "nothing"
    if own is not None and own.have_micro_batches and own.examples <= count:
        return "same"
    return "steps"


def examples_kept(
    lengths: Lengths, settings: SweepSettings, current: Current | None, device: Device
) -> int | None:
    """Return the examples of a step where the recommendation keeps them, so that no batch holds more; else None.

    `current` are the settings that the user gave; without them, those of the script that the device has run. Raises
    UsageError if options contradict each other, or ask for more micro-batches than a step has examples.
    """
    if current is None and device.script is not None:
        current = own_current(device.script)
    own_accumulate = None if current is None else current.settings.accumulate
    dealing = RankSplit(
        world_size=settings.world_size or device.world_size,
        accumulate=settings.accumulate or own_accumulate or device.accumulation,
    )
    own = own_steps(current, dealing)
    keep = kept(settings, current, own, lengths.count)
    if own is None or keep != "same":
        return None
    # More micro-batches than examples are refused now, and not after the probe.
    own.accumulations(1, settings.micro_batches)
    return own.examples


def same_step_rows(
    pricing: Pricing, limits: Limits, settings: SweepSettings, own: OwnSteps
) -> Iterator[TimedRow]:
    """Yield the rows of as many micro-batches as now, of those that take the least time, and of the fewest that fit.

    Where the user says how many (`micro_batches`), the row of these is the first.
    """
    sizing = limits.sizings[-1]
    table = limits.pooled_table(pricing.lengths.histogram)
    values = pricing.lengths.values
    ranks = own.dealing.world_size
    cutter = StepCutter(values, table, settings.equal_counts, world_size=ranks)
    # That each of many random steps fits into.
    fewest = max(map(cutter.fewest, own.random(values.size, settings.seed)))
    others = []
    if pricing.step_seconds is not None:
        cost = batch_seconds(pricing.step_seconds, pricing.targets)
        others.append(own.cheapest(cutter, fewest, cost, TOLERANCE, pricing.seed))
    for accumulate in own.accumulations(fewest, settings.micro_batches, *others):
        batching = Batching(
            table,
            own.examples,
            accumulate=accumulate,
            equal_counts=settings.equal_counts,
        )
        dealing = replace(pricing.dealing, accumulate=accumulate, same_bucket=False)
        of_steps = replace(pricing, dealing=dealing)
        batches = own.batches(pricing.lengths.count, accumulate)
        yield of_steps.of_pools(SAME_STEP, sizing, batching, batches, cheapest=True)
