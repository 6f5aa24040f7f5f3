"""The ways to choose boundaries, and the settings that say which are compared.

To add one: a subclass of `Strategy` here, and a line in `STRATEGIES`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from batchtune.buckets.optimal import TIE, best_buckets, representative_ends
from batchtune.epochs.expectation import (
    BatchCounts,
    BucketCosts,
    ExpectedCosts,
)
from batchtune.epochs.measured_costs import BatchCost
from batchtune.epochs.table import BucketTable, ends_of_runs, speechbrain_table
from batchtune.errors import UsageError, did_you_mean, shortened
from batchtune.lengths import SPEECH_UNITS, FloatArray, Histogram, IntArray, Lengths
from batchtune.results import MOST_BUCKETS, Row, SweepSettings, checked
from batchtune.units import format_length, format_number

# The most lengths that may be ends of buckets, if batches are counted, and if they have a cost, which takes longer:
# the best table of 320 ends costs about 0.1% more than with all of them.
_MOST_ENDS = 4096
_MOST_COSTED_ENDS = 320
# One bucket more must gain at least this share of the cost to be looked at.
_LEAST_GAIN = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """The data and limits that boundaries are chosen for.

    Attributes:
        batch_sizes: Shape (distinct lengths,): of a bucket that ends at each, at least 1, in any order.
        batch_cost: The cost of a batch by its shape, to minimise; None: the number of batches.
        epoch_cost: That of an epoch of all lengths with a table, as it is reported.
    """

    histogram: Histogram
    max_batch_length: float
    batch_sizes: IntArray
    batch_cost: BatchCost | None = None
    epoch_cost: Callable[[BucketTable], float] | None = None


class Strategy(ABC):
    """A way to choose boundaries."""

    # Whether the boundaries depend on `Problem.batch_sizes`, so that each way to size buckets has its own.
    depends_on_sizes: ClassVar[bool] = False
    # Whether batches are made in sorted pools: a sweep varies their size, and boundaries only limit batch sizes.
    in_pools: ClassVar[bool] = False

    @abstractmethod
    def boundaries(
        self, problem: Problem, num_buckets: Sequence[int]
    ) -> list[FloatArray]:
        """Return the boundaries for each of the bucket counts; all at once, since one run can answer them all.

        They are strictly ascending and positive, the last at least the longest length, and the same for the same
        problem.
        """

    def cautions(
        self, lengths: Lengths, max_batch_length: float, rows: Sequence[Row]
    ) -> Iterator[str]:
        """Yield warnings about this strategy's rows, each without a full stop."""
        return iter(())

    def practice(self, num_buckets: int) -> str | None:
        """Return the name of this number of buckets if many train with it today, else None."""
        return None


class SpeechBrain(Strategy):
    """SpeechBrain's own boundaries."""

    def boundaries(
        self, problem: Problem, num_buckets: Sequence[int]
    ) -> list[FloatArray]:
        """Return SpeechBrain's boundaries, and one more, the longest length, where that is beyond its last.

        max_batch_length / boundary is below 1 in that one more bucket, or 1 where rounding put SpeechBrain's last
        boundary just below max_batch_length: its batch size is 1 by the common rule too.
        """
        histogram = problem.histogram
        limit = problem.max_batch_length
        return [
            speechbrain_table(histogram, limit, num_buckets=buckets).boundaries
            for buckets in num_buckets
        ]

    def cautions(
        self, lengths: Lengths, max_batch_length: float, rows: Sequence[Row]
    ) -> Iterator[str]:
        """Warn of numbers of buckets that keep batches small; of text, nobody takes SpeechBrain's."""
        if lengths.unit not in (*SPEECH_UNITS, None):
            return
        yield from capped_by_num_buckets(lengths, max_batch_length, rows, "speechbrain")
        if any(row.num_buckets == 1 for row in rows):
            yield "speechbrain with num_buckets=1 makes batches of one example: its only boundary is max_batch_length"

    def practice(self, num_buckets: int) -> str | None:
        """Return a name for 10 to 20 buckets, which SpeechBrain's recipes and its documentation set."""
        if 10 <= num_buckets <= 20:
            return f"SpeechBrain's num_buckets={num_buckets}"
        return None


def capped_by_num_buckets(
    lengths: Lengths, max_batch_length: float, rows: Sequence[Row], who: str
) -> Iterator[str]:
    """Warn of rows whose batches max_batch_length can't make larger: the first boundary grows with it.

    It is about exp(2·z_N), z_N the normal quantile at N / (N + 1); once everything falls into the first
    bucket it is the size of all batches.
    """
    capped = [
        row
        for row in rows
        if row.num_buckets > 1
        and lengths.longest <= row.boundaries[0]
        and row.batch_sizes[0] == int(max_batch_length / row.boundaries[0])
        and row.batch_sizes[0] < lengths.count
    ]
    if not capped:
        return
    first = capped[0]
    warning = (
        f"{who} with num_buckets={first.num_buckets} can't make a batch of more than {first.batch_sizes[0]} examples "
        f"whatever max_batch_length is: its fullest batch here is {format_number(first.largest_padded_length)} of "
        f"{format_length(max_batch_length, lengths.unit)}; raising max_batch_length changes nothing"
    )
    if len(capped) > 1:
        warning += f"; the same holds up to num_buckets={capped[-1].num_buckets}"
    yield warning


class Quantile(Strategy):
    """Buckets of the same total length, as NeMo and Lhotse estimate their duration bins."""

    def boundaries(
        self, problem: Problem, num_buckets: Sequence[int]
    ) -> list[FloatArray]:
        """Give each bucket the same total length, as near as the lengths allow."""
        lengths = problem.histogram.lengths
        so_far = problem.histogram.cumulative_total
        shares = (
            so_far[-1] * np.arange(1, buckets) / buckets for buckets in num_buckets
        )
        return [
            _up_to(lengths[np.searchsorted(so_far, each)], float(lengths[-1]))
            for each in shares
        ]


@dataclass(frozen=True)
class Spaced(Strategy):
    """Buckets that cut the span from the shortest to the longest length: of equal width, or of equal ratio."""

    space: Callable[..., Any]

    def boundaries(
        self, problem: Problem, num_buckets: Sequence[int]
    ) -> list[FloatArray]:
        """Return the upper edges of buckets that are spaced evenly."""
        shortest = float(problem.histogram.lengths[0])
        longest = float(problem.histogram.lengths[-1])
        return [
            _up_to(self.space(shortest, longest, buckets + 1)[1:], longest)
            for buckets in num_buckets
        ]


def _up_to(edges: FloatArray, longest: float) -> FloatArray:
    """Return upper edges without duplicates, the last one the longest length; rounding makes no bucket below it."""
    return np.unique(np.append(edges[edges < longest * (1 - 1e-12)], longest))


class Optimal(Strategy):
    """The boundaries that no others beat."""

    depends_on_sizes = True

    def boundaries(
        self, problem: Problem, num_buckets: Sequence[int]
    ) -> list[FloatArray]:
        """Minimise the cost of an epoch's batches, the last one of each bucket included, in at most that many buckets.

        Without a cost it is the number of batches, Σ ceil(n_b / B_b). With one, each batch costs by its expected
        longest, and the best tables of each number of buckets are then compared by their cost as it is reported, so
        allowing more buckets never costs more. Of equal ones the fewest buckets are taken.

        No other boundaries among the lengths give fewer batches, or cost less, up to 4,096 distinct lengths (320 with a
        cost), which may all be boundaries; of more, 4,096 (320 with a cost).
        """
        histogram = problem.histogram
        sizes = problem.batch_sizes
        cost = problem.batch_cost
        ends = representative_ends(
            histogram, sizes, _MOST_ENDS if cost is None else _MOST_COSTED_ENDS
        )
        least_gain = TIE
        of_buckets: BucketCosts
        if cost is None:
            of_buckets = BatchCounts(histogram, ends, sizes[ends])
        else:
            of_buckets = ExpectedCosts(histogram, ends, sizes[ends], cost)
            if ends.size < histogram.lengths.size:
                least_gain = _LEAST_GAIN
        best = best_buckets(of_buckets, max(num_buckets))
        candidates = []
        for buckets in best.improving(least_gain):
            chosen = ends[best.ends(buckets)]
            total = float(best.totals[buckets - 1])
            if problem.epoch_cost is not None:
                total = problem.epoch_cost(
                    BucketTable(histogram.lengths[chosen], sizes[chosen])
                )
            candidates.append((total, buckets, histogram.lengths[chosen]))
        tables = []
        for limit in num_buckets:
            allowed = [candidate for candidate in candidates if candidate[1] <= limit]
            tables.append(min(allowed, key=lambda candidate: candidate[:2])[2])
        return tables


class Pooled(Strategy):
    """Pools: the boundaries are the lengths at which another number of examples fits."""

    in_pools = True

    def boundaries(
        self, problem: Problem, num_buckets: Sequence[int]
    ) -> list[FloatArray]:
        """Return the longest lengths of each run of equal batch sizes, whatever the number asked for."""
        ends = ends_of_runs(problem.batch_sizes)
        return [problem.histogram.lengths[ends]] * len(num_buckets)


STRATEGIES: dict[str, Strategy] = {
    "speechbrain": SpeechBrain(),
    "quantile": Quantile(),
    "linear": Spaced(np.linspace),
    "exponential": Spaced(np.geomspace),
    "optimal": Optimal(),
    "pooled": Pooled(),
}
# Named like a strategy, but it makes no padded batches: `buckets.packed` compares packers.
PACKED = "packed"


def checked_settings(**values: Any) -> SweepSettings:
    """Return the settings of a sweep; UsageError for an unknown strategy, a wrong value, or sizes of no pools."""
    settings = checked(SweepSettings, values)
    for name in settings.strategies:
        known = (*STRATEGIES, PACKED)
        if name not in known:
            hint = f"{did_you_mean(name, known)}Known strategies: {', '.join(known)}."
            raise UsageError(f"unknown strategy {shortened(name)} (--strategy)", hint)
    compared = settings.strategies or STRATEGIES
    if settings.pool_sizes and not any(
        name != PACKED and STRATEGIES[name].in_pools for name in compared
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
        first = 0
        last = 0
        if match is not None:
            first = int(match[1])
            last = int(match[2] or first)
        if not 1 <= first <= last <= MOST_BUCKETS:
            raise UsageError(
                f"--num-buckets must be from 1 to {MOST_BUCKETS}, or ascending ranges, got {shortened(text)}",
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
