"""Rows that keep the examples of each optimizer step, and cut them into other micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from batchtune.buckets.advice import TOLERANCE
from batchtune.buckets.current import Current, own_current
from batchtune.buckets.strategies import pooled_table
from batchtune.epochs.batchers import Batching
from batchtune.epochs.layout import RankSplit
from batchtune.epochs.measured_costs import batch_seconds
from batchtune.epochs.pricing import Pricing, TimedRow
from batchtune.epochs.same_step import StepCutter, micro_batches
from batchtune.epochs.table import Limits
from batchtune.errors import UsageError
from batchtune.lengths import IntArray, Lengths
from batchtune.results import Device, Keep, SweepSettings

SAME_STEP = "same-step"
# The fewest micro-batches are those that all of this many random steps fit into.
_STEPS = 4096
# The least time is that of so many random steps, among so many numbers of micro-batches.
_COMPARED = 32
_NUMBERS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSteps:
    """The optimizer steps of a training whose batches are drawn at random.

    Attributes:
        batch_size: Examples of each batch.
        dealing: Its ranks, and how many batches each of them accumulates.
        unknown_sampler: Draws the examples, which are taken for random; None if they are.
    """

    batch_size: int
    dealing: RankSplit
    unknown_sampler: str | None = None

    @classmethod
    def of(cls, current: Current | None, dealing: RankSplit) -> OwnSteps | None:
        """Return the steps of the user's current settings; None if those don't say which examples a step has."""
        if current is None or current.settings.random_batch_size is None:
            return None
        return cls(
            batch_size=current.settings.random_batch_size,
            dealing=dealing,
            unknown_sampler=current.settings.unknown_sampler,
        )

    @property
    def examples(self) -> int:
        """The examples of a step on all ranks."""
        return self.batch_size * self.dealing.accumulate * self.dealing.world_size

    @property
    def have_micro_batches(self) -> bool:
        """Whether a step has several micro-batches, so that its examples can be cut otherwise."""
        return self.dealing.accumulate * self.dealing.world_size > 1

    def accumulations(self, fewest: int, asked: int | None, *others: int) -> list[int]:
        """Return the numbers of micro-batches to compare: `asked` for, as now, others, the `fewest` that hold a step.

        Of an unknown sampler only those asked for and as now, which hold its batches if these fit. Raises UsageError if
        a step can't be cut into as many as were asked for.
        """
        most = self.examples // self.dealing.world_size
        numbers = [max(self.dealing.accumulate, fewest)]
        if self.unknown_sampler is None:
            numbers += [*others, fewest]
        if asked is not None:
            if not fewest <= asked <= most:
                raise UsageError(
                    f"--micro-batches {asked:,}: a rank's share of a step makes {fewest:,} to {most:,}, limited by "
                    "what fits and by its number of examples",
                    f"Give a number from {fewest:,} to {most:,}.",
                )
            numbers.insert(0, asked)
        return list(dict.fromkeys(numbers))

    def random(self, count: int, seed: int) -> Iterator[IntArray]:
        """Yield the examples of many random steps of so many examples, some of them from the same epoch."""
        random = np.random.default_rng(seed)
        size = min(self.examples, count)
        steps = (
            step
            for _ in range(1 + _STEPS * size // count)
            for step in np.split(random.permutation(count), range(size, count, size))
        )
        return islice(steps, _STEPS)

    def steps(self, count: int) -> int:
        """Return the optimizer steps of an epoch of so many examples."""
        return -(-count // self.examples)

    def batches(self, count: int, accumulate: int) -> int:
        """Return the micro-batches of all ranks in an epoch whose steps are cut into `accumulate` on each rank."""
        ranks = self.dealing.world_size
        own = -(-count // (self.batch_size * ranks))
        return ranks * micro_batches(own, self.dealing.accumulate, accumulate)


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

    `current` are the settings that the user gave; without them, those of the script that the device has run.
    """
    if current is None and device.script is not None:
        current = own_current(device.script)
    own_accumulate = None if current is None else current.settings.accumulate
    dealing = RankSplit(
        world_size=settings.world_size or device.world_size,
        accumulate=settings.accumulate or own_accumulate or device.accumulation,
    )
    own = OwnSteps.of(current, dealing)
    if own is None or kept(settings, current, own, lengths.count) != "same":
        return None
    return own.examples


def same_step_rows(
    pricing: Pricing, limits: Limits, settings: SweepSettings, own: OwnSteps
) -> Iterator[TimedRow]:
    """Yield the rows of as many micro-batches as now, of those that take the least time, and of the fewest that fit.

    Where the user says how many (`micro_batches`), the row of these is the first.
    """
    sizing = limits.sizings[-1]
    table = pooled_table(pricing.lengths.histogram, limits)
    values = pricing.lengths.values
    ranks = own.dealing.world_size
    cutter = StepCutter(values, table, settings.equal_counts, world_size=ranks)
    # That each of many random steps fits into.
    fewest = max(map(cutter.fewest, own.random(values.size, settings.seed)))
    cheapest = _cheapest(pricing, cutter, own, fewest)
    for accumulate in own.accumulations(fewest, settings.micro_batches, *cheapest):
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


def _cheapest(
    pricing: Pricing, cutter: StepCutter, own: OwnSteps, fewest: int
) -> list[int]:
    """Return how many micro-batches of a rank take the least time, from the fewest to as many as now.

    Fewer ones save what each takes by itself, and pad more. Of those that take hardly more than the least, the most are
    taken, which need the least memory. Empty if times are not known.
    """
    if pricing.step_seconds is None:
        return []
    batch_cost = batch_seconds(pricing.step_seconds, pricing.targets)
    values = pricing.lengths.values
    steps = list(islice(own.random(values.size, pricing.seed), _COMPARED))
    most = max(own.dealing.accumulate, fewest)
    seconds: dict[int, float] = {}
    for number in np.geomspace(fewest, most, _NUMBERS).round().astype(int).tolist():
        batches = [batch for step in steps for batch in cutter.cut(step, number)[0]]
        sizes = np.array([batch.size for batch in batches])
        longest = np.array([values[batch].max() for batch in batches])
        seconds[number] = float(batch_cost(sizes, longest).sum())
    limit = min(seconds.values()) * (1 + TOLERANCE)
    return [max(number for number in seconds if seconds[number] <= limit)]
