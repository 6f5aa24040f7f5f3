"""How long the optimal boundaries take, for all bucket counts up to 20 at once: `python tests/benchmarks/optimal.py`.

Three programmes, on made data: the cost per example (100,000 distinct lengths), what `optimal` minimises, the number of
batches or a time by the expected longest (3,500, 8,000 and 1,000,000 distinct lengths), and tables by length and target
(30,000 examples). Prints seconds, each the least of a few runs, as JSON. Also what the two more costly programmes gain
over the first with 20 buckets: batches and seconds in an epoch, and the cost of a table by length and target as a part
of the cost of one by length alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np

from batchtune.buckets.optimal import optimal_boundaries, optimal_table_2d
from batchtune.buckets.strategies import STRATEGIES, Problem
from batchtune.epochs.expectation import expected_batches
from batchtune.epochs.table import BucketTable, batch_sizes_for
from batchtune.lengths import FloatArray, Histogram, IntArray, Lengths

RUNS = 3
NUM_BUCKETS = range(1, 21)
DISTINCT = 100_000

Result = TypeVar("Result")


def timed(run: Callable[[], Result]) -> tuple[float, Result]:
    """The least of some runs' seconds, and what they give."""
    seconds = []
    for _ in range(RUNS):
        started = time.perf_counter()
        result = run()
        seconds.append(time.perf_counter() - started)
    return round(min(seconds), 4), result


def many_lengths() -> dict[str, float]:
    """Seconds of the programme without remainders, by kind of costs and counts."""
    lengths = np.arange(1.0, DISTINCT + 1)
    rng = np.random.default_rng(0)
    costs = {
        "rising": lengths,
        "steep": np.exp(lengths / DISTINCT * 20),
        "logarithmic": np.log1p(lengths),
        "whole_batch_sizes": 1 / np.maximum(1, np.floor(1e7 / lengths)),
        "noisy": lengths * (1 + 1e-6 * rng.standard_normal(DISTINCT)),
        "falling": 1 / lengths,
    }
    counts = {
        "equal": np.ones(DISTINCT),
        "heavy_tailed": (rng.pareto(0.7, DISTINCT) * 5 + 1).clip(max=1e6),
        "thinning_out": np.maximum(1, 1e6 * np.exp(-lengths / 3000)),
        "thinning_out_slowly": np.maximum(1, 1e12 / lengths**3),
    }
    seconds = {}
    for name, each in counts.items():
        histogram = Histogram(lengths, each.astype(np.int64))
        for kind, of in costs.items():
            seconds[f"{kind}, {name}"] = timed(
                lambda h=histogram, c=of: optimal_boundaries(h, c, NUM_BUCKETS)
            )[0]
    return seconds


def step_seconds(
    batch_sizes: FloatArray, lengths: FloatArray, above: FloatArray | None = None
) -> FloatArray:
    """A made step time."""
    return 0.005 + 1e-6 * batch_sizes * lengths


def as_reported(histogram: Histogram, max_batch_length: float) -> dict[str, float]:
    """Seconds to find the boundaries, and what an epoch takes with them and with those of the cost per example."""
    sizes = batch_sizes_for(histogram.lengths, max_batch_length)

    def epoch(table: BucketTable) -> float:
        return expected_batches(histogram, table).sum_of(step_seconds)

    def table_of(boundaries: FloatArray) -> BucketTable:
        return BucketTable(boundaries, batch_sizes_for(boundaries, max_batch_length))

    counted = Problem(
        histogram=histogram, max_batch_length=max_batch_length, batch_sizes=sizes
    )
    timed_by = replace(counted, batch_cost=step_seconds, epoch_cost=epoch)
    seconds_of_counts, fewest = timed(
        lambda: STRATEGIES["optimal"].boundaries(counted, NUM_BUCKETS)
    )
    seconds_of_times, fastest = timed(
        lambda: STRATEGIES["optimal"].boundaries(timed_by, NUM_BUCKETS)
    )
    relaxed = optimal_boundaries(histogram, 1 / sizes, NUM_BUCKETS)
    each = step_seconds(sizes.astype(np.float64), histogram.lengths) / sizes
    by_example = optimal_boundaries(histogram, each, NUM_BUCKETS)
    return {
        "seconds_by_batches": seconds_of_counts,
        "batches": expected_batches(histogram, table_of(fewest[-1])).tally.batches,
        "batches_without_remainders": expected_batches(
            histogram, table_of(relaxed[-1])
        ).tally.batches,
        "seconds_by_time": seconds_of_times,
        "epoch_seconds": epoch(table_of(fastest[-1])),
        "epoch_seconds_by_example": epoch(table_of(by_example[-1])),
    }


def few_lengths(distinct: int) -> Histogram:
    """Each of so many lengths up to 16 times."""
    counts = np.random.default_rng(1).integers(1, 17, distinct)
    return Histogram(np.arange(1.0, distinct + 1), counts)


def different_lengths(examples: int) -> Histogram:
    """As many lengths as examples."""
    return Lengths.of(
        np.random.default_rng(0).gamma(4, 300, examples).clip(50, 3500)
    ).histogram


def two_dimensions() -> dict[str, float]:
    """Seconds for tables by length and target, and their cost as a part of that of tables by length alone."""
    rng = np.random.default_rng(2)
    values = rng.lognormal(5.5, 1.0, 30_000).clip(4, 8000).round()
    data = Lengths.of(values, (values * rng.uniform(0.1, 1.5, values.size)).round())
    assert data.targets is not None
    lengths, targets, histogram = data.values, data.targets, data.histogram

    def sizes(of: FloatArray, by: FloatArray) -> IntArray:
        return batch_sizes_for(of + by, 60_000)

    def costs(of: FloatArray, by: FloatArray) -> FloatArray:
        return 1e-3 / sizes(of, by) + 1e-6 * (of + by)

    flat_costs = costs(
        histogram.lengths,
        np.array([data.worst_target(length) for length in histogram.lengths]),
    )
    flat = optimal_boundaries(histogram, flat_costs, NUM_BUCKETS)
    plain, _ = timed(lambda: optimal_table_2d(lengths, targets, costs, NUM_BUCKETS))
    candidates = np.unique(np.concatenate(flat))
    seconds, tables = timed(
        lambda: optimal_table_2d(
            lengths, targets, costs, NUM_BUCKETS, candidates=candidates
        )
    )
    best = tables[-1]
    cost = costs(*best.pairs)[best.assign(lengths, targets)].sum()
    ends = np.searchsorted(histogram.lengths, flat[-1])
    flat_cost = np.sum(
        flat_costs[ends] * np.diff(histogram.cumulative[ends], prepend=0)
    )
    return {
        "seconds": plain,
        "seconds_with_candidates": seconds,
        "candidates": int(candidates.size),
        "cost_ratio": round(float(cost / flat_cost), 4),
    }


def main() -> None:
    """Prints everything as JSON."""
    result = {
        "100000_distinct_lengths": many_lengths(),
        "as_reported_3500_distinct_lengths": as_reported(few_lengths(3500), 70_000),
        "as_reported_8000_distinct_lengths": as_reported(few_lengths(8000), 160_000),
        "as_reported_1000000_distinct_lengths": as_reported(
            different_lengths(1_000_000), 40_000
        ),
        "two_dimensions_30000_examples": two_dimensions(),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
