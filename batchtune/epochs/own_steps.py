"""The optimizer steps of a training that draws its batches at random, and the numbers of micro-batches to compare."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from batchtune.epochs.layout import RankSplit
from batchtune.epochs.measured_costs import BatchCost
from batchtune.epochs.same_step import StepCutter, micro_batches
from batchtune.errors import UsageError
from batchtune.lengths import IntArray

# The fewest micro-batches are those that all of this many random steps fit into.
_STEPS = 4096
# The cheapest number of micro-batches is chosen by this many random steps, among this many numbers.
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
        """Yield the examples of many random steps, some of them from the same epoch, in data of this many examples."""
        random = np.random.default_rng(seed)
        size = min(self.examples, count)
        steps = (
            step
            for _ in range(1 + _STEPS * size // count)
            for step in np.split(random.permutation(count), range(size, count, size))
        )
        return islice(steps, _STEPS)

    def steps(self, count: int) -> int:
        """Return how many optimizer steps an epoch of this many examples has."""
        return -(-count // self.examples)

    def batches(self, count: int, accumulate: int) -> int:
        """Return the micro-batches of all ranks in an epoch whose steps are cut into `accumulate` on each rank."""
        ranks = self.dealing.world_size
        own = -(-count // (self.batch_size * ranks))
        return ranks * micro_batches(own, self.dealing.accumulate, accumulate)

    def cheapest(
        self,
        cutter: StepCutter,
        fewest: int,
        cost: BatchCost,
        tolerance: float,
        seed: int,
    ) -> int:
        """Return how many micro-batches of a rank cost the least, from the `fewest` to as many as now.

        Fewer ones save what each takes by itself, and pad more. Of those that cost hardly more than the least, the most
        are taken, which need the least memory.
        """
        lengths = cutter.lengths
        steps = [*islice(self.random(lengths.size, seed), _COMPARED)]
        most = max(self.dealing.accumulate, fewest)
        costs: dict[int, float] = {}
        numbers = np.geomspace(fewest, most, _NUMBERS).round().astype(int)
        for number in numbers.tolist():
            batches = [batch for step in steps for batch in cutter.cut(step, number)[0]]
            sizes = np.array([batch.size for batch in batches])
            longest = np.array([lengths[batch].max() for batch in batches])
            costs[number] = float(cost(sizes, longest).sum())
        limit = min(costs.values()) * (1 + tolerance)
        return max(number for number in costs if costs[number] <= limit)
