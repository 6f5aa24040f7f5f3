"""The ways to choose boundaries, the settings that say which to compare, and the optimal tables.

To add one: a subclass of `Strategy` here, and a line in `STRATEGIES`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from batchtune.epochs.batchers import Batching
from batchtune.epochs.expectation import (
    BatchCounts,
    BucketCosts,
    ExpectedCosts,
)
from batchtune.epochs.measured_costs import BatchCost, Costs
from batchtune.epochs.pricing import MOST_SIMULATED, Pricing
from batchtune.epochs.table import BucketTable, Limits, ends_of_runs, speechbrain_table
from batchtune.errors import UsageError, did_you_mean, shortened
from batchtune.lengths import SPEECH_UNITS, FloatArray, Histogram, IntArray, Lengths
from batchtune.results import (
    MOST_BUCKETS,
    Row,
    SweepSettings,
    TwoDimensionalRow,
    checked,
)
from batchtune.units import format_length, format_number

# The boundaries over one length that no others beat, by exact dynamic programmes.
#
# They minimise the cost of an example or of whole buckets.

# Sums of the same costs in another order differ by rounding: smaller differences than this are ties.
TIE = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class BestBuckets:
    """The cheapest buckets for each number of buckets."""

    totals: FloatArray  # shape (max_buckets,): the least cost in 1, 2, ... buckets; infinite if there are fewer ends
    # For each number, shape (ends + 1,): the end before each end in the cheapest buckets up to it, counted from 1.
    previous: Sequence[IntArray] | npt.NDArray[np.int32]

    def improving(self, least_gain: float) -> list[int]:
        """Return 1 and each number of buckets that costs less than every smaller one by more than this share.

        Costs of more buckets never change the result for fewer.
        """
        numbers = [1]
        for buckets, total in enumerate(self.totals.tolist(), 1):
            if total < self.totals[numbers[-1] - 1] * (1 - least_gain):
                numbers.append(buckets)
        return numbers

    def ends(self, buckets: int) -> IntArray:
        """Return the ends of this number of cheapest buckets, counted from 0, ascending."""
        ends = [self.previous[0].size - 1]
        for layer in range(buckets - 1, 0, -1):
            ends.append(int(self.previous[layer][ends[-1]]))
        return np.array(sorted(set(ends))) - 1  # an end before itself: fewer buckets


def fewest(totals: FloatArray) -> int:
    """Return the least number of buckets that ties with the least of the costs in 1, 2, ... buckets."""
    return 1 + int(np.argmax(totals <= totals.min() * (1 + TIE)))


def best_buckets(costs: BucketCosts, max_buckets: int) -> BestBuckets:
    """Find the cheapest buckets for each number from 1 to `max_buckets`, at most the number of ends.

    Unlike the cost per example (`optimal_boundaries`), the cost of whole batches depends on more than a bucket's end:
    each bucket adds a batch that is half empty on average. So more buckets are not always better, and no end can be
    left out beforehand. With c(i, j) the cost of the bucket (u_i, u_j], not negative and finite, the least cost of the
    examples up to u_j in exactly k buckets is f_k(j) = min over i < j of f_{k-1}(i) + c(i, j), for any c. It takes
    O(K·U²) steps, as array operations over i and k for each j, and O(K·U) memory.
    """
    ends = costs.num_ends
    layers = min(max_buckets, ends)
    lowest_costs = np.full((layers + 1, ends + 1), np.inf)
    lowest_costs[0, 0] = 0.0
    previous = np.zeros((layers, ends + 1), dtype=np.int32)
    scratch = np.empty(layers * ends)
    for end in range(1, ends + 1):
        # One contiguous block for each end: the minimum then runs along memory, without a copy.
        reachable = min(layers, end)
        sums = scratch[: reachable * end].reshape(reachable, end)
        np.add(lowest_costs[:reachable, :end], costs.up_to(end), out=sums)
        before = np.argmin(sums, axis=1)
        previous[:reachable, end] = before
        lowest_costs[1 : reachable + 1, end] = sums[np.arange(reachable), before]
    return BestBuckets(lowest_costs[1:, -1], previous)


def representative_ends(
    histogram: Histogram, batch_sizes: IntArray, max_ends: int
) -> IntArray:
    """Return the indices of at most `max_ends` distinct lengths, ascending, that stand for all as ends.

    They include the longest length, and up to `max_ends` / 2 lengths after which the batch size
    changes: a bucket that ends at the last length of a batch size holds the most examples of that
    size. The others share out the range of lengths, the number of examples and their total length:
    between two of them lie at most 18 / `max_ends` of any of the three.

    `batch_sizes`, shape (distinct lengths,), are those of buckets that end there; `max_ends` is at least 8.
    """
    lengths = histogram.lengths
    if lengths.size <= max_ends:
        return np.arange(lengths.size)
    changes = np.flatnonzero(np.diff(batch_sizes))
    if changes.size > max_ends // 2:
        changes = changes[
            np.linspace(0, changes.size - 1, max_ends // 2).astype(np.int64)
        ]
    place = (
        histogram.cumulative / histogram.count
        + histogram.cumulative_total / histogram.cumulative_total[-1]
        + (lengths - lengths[0]) / (lengths[-1] - lengths[0])
    )
    place *= (max_ends - 2 - changes.size) / 3
    shared = np.flatnonzero(np.diff(np.ceil(place)))
    # Each takes the place of two others.
    lumps = np.flatnonzero(np.diff(place) >= 2) + 1
    return np.unique(np.concatenate((changes, shared, lumps, [lengths.size - 1])))


def optimal_boundaries(
    histogram: Histogram, example_costs: FloatArray, num_buckets: Sequence[int]
) -> list[FloatArray]:
    """Return the boundaries that minimise the cost of all examples, for several bucket counts in one run.

    What an example costs depends on its bucket's end: a bucket (u_i, u_j] costs w_j·(C_j - C_i), where w are the
    example costs and C the number of examples up to a length. With f_k(j) the least cost of the examples up to u_j in
    at most k buckets, f_k(j) = w_j·C_j + min over i of (f_{k-1}(i) - w_j·C_i): the least of lines at w_j, read off the
    lower convex hull of the points (C_i, f_{k-1}(i)).

    Two facts make it O(K·U); both hold for any costs:

    - An end u_j with a later u_m that costs no more is never needed: extending the bucket to u_m (over whole
      buckets if they cost no less) is no dearer. So only ends with w_j < w_m for all m > j take part, and
      along those the costs rise strictly.
    - With rising costs, i > j never gives less than i = j (an empty bucket): each example between them costs
      more than w_j in f_{k-1}(i). So the minimum may run over all i, and one hull serves every j of a layer.

    Args:
        histogram: U distinct lengths and their counts.
        example_costs: Shape (U,), not negative and finite, in any order: what an example costs in a bucket that ends
            at that length.
        num_buckets: The largest number of buckets allowed, at least 1 each: for each the boundaries are returned, the
            last one the longest length. Of those that cost the same it is the fewest.
    """
    least_after = np.minimum.accumulate(example_costs[::-1])[::-1]
    ends = np.flatnonzero(np.append(example_costs[:-1] < least_after[1:], True))
    costs = example_costs[ends]
    counts = np.concatenate(([0], histogram.cumulative[ends])).astype(np.float64)
    own_ends = np.arange(1, counts.size)
    lowest_costs = np.concatenate(([0.0], costs * counts[1:]))
    totals = [lowest_costs[-1]]
    previous = [np.zeros(counts.size, dtype=np.int64)]
    for _ in range(min(max(num_buckets), ends.size) - 1):
        hull = _lower_hull(counts.tolist(), lowest_costs.tolist())
        slopes = np.diff(lowest_costs[hull]) / np.diff(counts[hull])
        # Rounding can make an end beyond one's own look equally cheap; it never is cheaper.
        before = np.minimum(hull[np.searchsorted(slopes, costs)], own_ends)
        lowest_costs = np.concatenate(
            ([0.0], lowest_costs[before] + costs * (counts[1:] - counts[before]))
        )
        totals.append(lowest_costs[-1])
        previous.append(np.concatenate(([0], before)))
    best = BestBuckets(np.array(totals), previous)
    return [
        histogram.lengths[ends[best.ends(fewest(best.totals[:limit]))]]
        for limit in num_buckets
    ]


def _lower_hull(x: list[float], y: list[float]) -> npt.NDArray[np.intp]:
    """Return the indices of the lower convex hull's vertices, for strictly ascending x (Andrew's monotone chain)."""
    hull: list[int] = []
    for i in range(len(x)):
        while len(hull) > 1:
            a = hull[-2]
            b = hull[-1]
            if (y[b] - y[a]) * (x[i] - x[b]) < (y[i] - y[b]) * (x[b] - x[a]):
                break
            hull.pop()
        hull.append(i)
    return np.array(hull, dtype=np.intp)


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
        batch_sizes: Shape (distinct lengths,): that of a bucket that ends at each length, at least
            1, in any order.
        batch_cost: The cost of a batch by its shape, to minimise; None: the number of batches.
        epoch_cost: The cost of an epoch of all lengths with a table, as reports show it.
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
        """Return SpeechBrain's boundaries, and the longest length if it is beyond the last of them.

        In this additional bucket, max_batch_length / boundary is below 1, or 1 where rounding put
        SpeechBrain's last boundary just below max_batch_length. So the common rule gives it a batch
        size of 1.
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
        """Warn of bucket counts that keep batches small; not for text, which nobody batches like this."""
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
    """Warn of rows whose batches a larger max_batch_length can't enlarge: the first boundary grows with it.

    The first bucket's batch size is about exp(2·z_N), with z_N the normal quantile at N / (N + 1).
    Once all examples fall into the first bucket, all batches have this size.
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
    """The optimal boundaries."""

    depends_on_sizes = True

    def boundaries(
        self, problem: Problem, num_buckets: Sequence[int]
    ) -> list[FloatArray]:
        """Minimise the cost of an epoch's batches, the last one of each bucket included, in at most that many buckets.

        Without a cost function, the cost is the number of batches, Σ ceil(n_b / B_b). With one, a
        batch's cost follows from its expected longest length; the best tables for each number of
        buckets are then compared by their reported cost, so allowing more buckets never costs more.
        On a tie, the fewest buckets are taken.

        Up to 4,096 distinct lengths (320 with a cost function) may all be boundaries: then no other
        boundaries among the lengths give fewer batches, or cost less. With more lengths, that many
        of them are candidates.
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
        """Return the longest length of each run of equal batch sizes, whatever number of buckets is asked for."""
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
# Named like a strategy, but it makes no padded batches: `buckets.micro_batches` compares packers.
PACKED = "packed"


def checked_settings(**values: Any) -> SweepSettings:
    """Return a sweep's settings; UsageError for an unknown strategy, a wrong value, or pool sizes without pools."""
    settings = checked(SweepSettings, values)
    for name in settings.strategies:
        known = (*STRATEGIES, PACKED)
        if name not in known:
            raise UsageError(
                f"unknown strategy {shortened(name)} (--strategy)",
                f"{did_you_mean(name, known)}Known strategies: {', '.join(known)}.",
            )
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
    """Return the sizes of pools or buffers for this many examples, ascending, each once."""
    return sorted({count if size == "all" else min(size, count) for size in sizes})


# The tables over length and target length that no others beat, by an exact dynamic programme.
#
# They are those that NVIDIA NeMo takes as `bucket_duration_bins: [[4.1, 30], [4.1, 48], [8.0, 51], …]`, ascending pairs
# of (largest duration, largest number of tokens), with one entry of `bucket_batch_size` each. It finds an example's
# bucket in `find_smallest_bucket` of nemo/collections/common/data/lhotse/sampling.py (NVIDIA/NeMo, commit 23d2d02):
#
# - strict (`bucketing_2d_strict_mode: true`, the default): of the pairs with the smallest duration that is not below
#   the   example's, the first whose number of tokens is not below the example's; without one, the example is left out;
# - otherwise: the first pair with neither number below the example's, which may be one of longer examples.

_ANY_BATCH_SIZE = 2**53

ExampleCostsOf = Callable[[FloatArray, FloatArray], FloatArray]
"""(boundaries, target boundaries) → what one example costs in each such bucket, element by element."""
# Target boundaries are chosen from at most so many quantiles of the targets.
_TOPS = 64


def two_dimensional_rows(
    pricing: Pricing, limits: Limits, costs: Costs, rows: Sequence[Row]
) -> list[TwoDimensionalRow]:
    """Return the best tables over both lengths, next to the best over length alone with the same number of buckets.

    Times and numbers of batches are those of simulated epochs on one rank, the same shuffles for
    both. They compare the rows with the fewest and the most buckets among those with boundaries for
    the frontier. Without such rows, targets or a joint frontier the list is empty.
    """
    joint = costs.joint_frontier
    step_seconds = pricing.step_seconds
    lengths = pricing.lengths
    by_count = {
        row.num_buckets: row
        for row in rows
        if row.sizing == "frontier" and not row.uses_pools
    }
    if joint is None or not lengths.has_targets or not by_count:
        return []
    sample = lengths.evenly(MOST_SIMULATED)
    assert sample.targets is not None
    compared = [by_count[count] for count in sorted({min(by_count), max(by_count)})]

    def sizes(long: FloatArray, target: FloatArray) -> IntArray:
        return np.minimum(joint(long, target), limits.max_batch_size or _ANY_BATCH_SIZE)

    def example_costs(long: FloatArray, target: FloatArray) -> FloatArray:
        batch = sizes(long, target).astype(np.float64)
        if step_seconds is None:
            return 1 / batch
        return step_seconds(batch, long, target) / batch

    tables = optimal_table_2d(
        sample.values,
        sample.targets,
        example_costs,
        [row.num_buckets for row in compared],
        candidates=np.unique(
            np.concatenate([costs.joint_lengths, *(row.boundaries for row in compared)])
        ),
    )
    tables_compared = []
    for row, unsized in zip(compared, tables, strict=True):
        table = replace(unsized, batch_sizes=sizes(*unsized.pairs))
        flat_batches, flat_seconds = pricing.on_one_rank(Batching.of(row))
        batches, seconds = pricing.on_one_rank(Batching(table))
        proven = costs.joint_proven and costs.joint_proven(*table.pairs)
        tables_compared.append(
            TwoDimensionalRow(
                num_buckets=row.num_buckets,
                buckets=list(
                    zip(*(edges.tolist() for edges in table.pairs), strict=True)
                ),
                batch_sizes=table.batch_sizes.tolist(),
                batches=batches,
                estimated_epoch_seconds=seconds,
                one_dimensional_batches=flat_batches,
                one_dimensional_epoch_seconds=flat_seconds,
                unproven=None
                if proven is None
                else int(np.count_nonzero(table.batch_sizes > proven)),
            )
        )
    return tables_compared


def optimal_table_2d(
    lengths: FloatArray,
    targets: FloatArray,
    costs: ExampleCostsOf,
    num_buckets: Sequence[int],
    *,
    candidates: FloatArray | None = None,
    resolution: int = 64,
) -> list[BucketTable]:
    """Return the tables that minimise the cost of all examples, for several bucket counts in one run.

    The lengths are cut into bins, and each bin's targets into as many sub-bins as pay off. The last
    sub-bin of a bin ends at the largest target in it, so every example has its bucket, with and
    without NeMo's strict mode. The table is the best of all those whose length boundaries are among
    at most `resolution` quantiles of the lengths and the `candidates`, and whose other target
    boundaries are among at most 64 quantiles of the targets. With no more distinct values, these
    are all tables, whatever the costs.

    Two programmes, one in the other: with c(u, v) the cost of one example, the examples of a bin (u_i, u_j] up to its
    target v_t cost, in exactly m sub-bins, g_m(t) = min over s < t of g_{m-1}(s) + c(u_j, v_t)·(number of targets in
    (v_s, v_t]); the examples up to u_j, in exactly k buckets, f_k(j) = min over i < j and m of f_{k-m}(i) + g_m(largest
    target of the bin). With E length ends and R quantiles, O(K·E²·R²) steps.

    If costs do not fall as a boundary rises, and `candidates` has the boundaries of a one-dimensional table, the result
    costs no more than that table with the same number of buckets: each of its buckets is a bin with one sub-bin.

    Args:
        lengths: Shape (examples,), positive and finite, in any order.
        targets: Shape (examples,), not negative and finite: the target length of the same example.
        costs: The cost of an example in a bucket, not negative and finite; called with two-dimensional arrays.
        num_buckets: The largest number of buckets allowed, at least 1 each: for each a table is returned, with batches
            of one. Of tables that cost the same it is the one with the fewest buckets.
        candidates: More length boundaries to choose from; the longest length not above each takes its place.
        resolution: The most quantiles of the lengths, at least 1.
    """
    ends = _quantiles(lengths, resolution)
    if candidates is not None:
        distinct = np.unique(lengths)
        not_above = np.searchsorted(distinct, candidates, side="right") - 1
        ends = np.union1d(ends, distinct[not_above[not_above >= 0]])
    bins = _Bins(lengths, targets, ends, costs)
    max_buckets = max(num_buckets)
    # For each end, shape (sub-bins, begins): the least cost of the bins that end there.
    of_bins = [
        bins.ending_at(end, slice(0, end)).lowest_costs(max_buckets)[-1]
        for end in range(1, ends.size + 1)
    ]
    # Row k: the least cost of the examples up to each end in exactly k buckets.
    lowest_costs = np.full((max_buckets + 1, ends.size + 1), np.inf)
    lowest_costs[0, 0] = 0.0
    for end, of_bin in enumerate(of_bins, 1):
        for sub_bins, each in enumerate(of_bin, 1):
            sums = lowest_costs[:-sub_bins, :end] + each
            lowest_costs[sub_bins:, end] = np.minimum(
                lowest_costs[sub_bins:, end], sums.min(axis=1)
            )
    return [_traced_table(bins, of_bins, lowest_costs, limit) for limit in num_buckets]


def _quantiles(values: FloatArray, max_count: int) -> FloatArray:
    """Return all distinct values, or up to `max_count` quantiles of them if they are more; ascending."""
    distinct = np.unique(values)
    if distinct.size <= max_count:
        return distinct
    ranks = -(-values.size * np.arange(1, max_count + 1) // max_count)
    return np.unique(np.sort(values)[ranks - 1])


class _Bins:
    """The examples counted by length and target, and the bins (u_begin, u_end] that they make.

    Ends are counted from 1; the end 0 is before the shortest length. In each bin a sub-bin may end at each of the tops,
    or at the bin's largest target where that is below the top.
    """

    def __init__(
        self,
        lengths: FloatArray,
        targets: FloatArray,
        ends: FloatArray,
        costs: ExampleCostsOf,
    ) -> None:
        self.ends = ends
        self._costs = costs
        self._tops = _quantiles(targets, _TOPS)
        rows = np.searchsorted(ends, lengths)
        columns = np.searchsorted(self._tops, targets) + 1
        counts = np.zeros((ends.size + 1, self._tops.size + 1), dtype=np.int64)
        np.add.at(counts, (rows + 1, columns), 1)
        # Shape (ends + 1, tops + 1): number of examples up to the end and the top; the first are none.
        self._counts = counts.cumsum(axis=0).cumsum(axis=1)
        # Shape (ends,): the largest target among the lengths between the end before and this end.
        self._largest = np.zeros(ends.size)
        np.maximum.at(self._largest, rows, targets)

    def ending_at(self, end: int, begins: slice) -> _Cuts:
        """Return the cuts of the bins that begin there and end here."""
        largest = np.maximum.accumulate(self._largest[:end][::-1])[::-1][begins]
        tops = np.minimum(self._tops[:, np.newaxis], largest)
        costs = self._costs(np.full_like(tops, self.ends[end - 1]), tops)
        return _Cuts(tops, (self._counts[end] - self._counts[begins]).T.copy(), costs)


class _Cuts(NamedTuple):
    """Where the targets of some bins may be cut; arrays of the shape (cuts, bins), `counts` with a first row of 0."""

    tops: FloatArray  # ascending in each bin; the last is the largest target in the bin
    counts: IntArray  # number of the bin's examples up to that target
    costs: FloatArray  # of an example in a sub-bin that ends there

    def last_sub_bin(self, cut: int) -> FloatArray:
        """Return the cost of the sub-bin up to this cut, from the bin's beginning and each earlier cut."""
        return cast(
            FloatArray,
            self.costs[cut] * (self.counts[cut + 1] - self.counts[: cut + 1]),
        )

    def lowest_costs(self, max_sub_bins: int) -> FloatArray:
        """Return the least cost up to each cut in exactly 1, 2, … sub-bins, shape (cuts, sub-bins, bins)."""
        cuts, bins = self.tops.shape
        lowest_costs = np.full((cuts, min(max_sub_bins, cuts), bins), np.inf)
        for cut in range(cuts):
            last = self.last_sub_bin(cut)
            lowest_costs[cut, 0] = last[0]
            if cut:
                sums = lowest_costs[:cut, :-1] + last[1:, np.newaxis]
                lowest_costs[cut, 1:] = sums.min(axis=0)
        return lowest_costs


def _traced_table(
    bins: _Bins, of_bins: list[FloatArray], lowest_costs: FloatArray, max_buckets: int
) -> BucketTable:
    """Trace the best table of at most `max_buckets` buckets back from its last bucket; of equal ones the fewest."""
    buckets = fewest(lowest_costs[1 : max_buckets + 1, -1])
    end = lowest_costs.shape[1] - 1
    pairs = []
    while end > 0:
        # The same sums as before, to the bit, so their least is the one that was taken.
        sums = [
            lowest_costs[buckets - sub_bins, :end] + each
            for sub_bins, each in enumerate(of_bins[end - 1][:buckets], 1)
        ]
        more, begin = (
            int(i) for i in np.unravel_index(np.argmin(sums), (len(sums), end))
        )
        cuts = bins.ending_at(end, slice(begin, begin + 1))
        up_to = cuts.lowest_costs(more + 1)
        cut = cuts.tops.shape[0] - 1
        for before in range(more, -1, -1):
            pairs.append((bins.ends[end - 1], cuts.tops[cut, 0]))
            if before:
                cut = int(
                    np.argmin(
                        up_to[:cut, before - 1, 0] + cuts.last_sub_bin(cut)[1:, 0]
                    )
                )
        end = begin
        buckets = buckets - more - 1
    boundaries, target_boundaries = np.array(pairs[::-1]).T.copy()
    return BucketTable(
        boundaries, np.ones(len(pairs), dtype=np.int64), target_boundaries
    )
