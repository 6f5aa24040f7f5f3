"""How long the optimal boundaries take, for all bucket counts up to 20 at once: `python tests/benchmarks/optimal.py`.

Three programmes, on made data: the cost per example (100,000 distinct lengths), the cost of whole batches with their
remainders (3,500 and 8,000 distinct lengths), and tables by length and target (30,000 examples). Prints seconds, each
the least of a few runs, as JSON. Also what the two more costly programmes gain over the first: batches in an epoch with
20 buckets, and the cost of a table of 20 buckets by length and target as a part of the cost of one by length alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from batchtune.batching.optimal import optimal_boundaries
from batchtune.batching.remainders import optimal_boundaries_with_remainders
from batchtune.batching.table import BucketTable, batch_sizes_for
from batchtune.batching.two_dimensional import optimal_table_2d
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
            seconds[f"{kind}, {name}"] = timed(lambda h=histogram, c=of: optimal_boundaries(h, c, NUM_BUCKETS))[0]
    return seconds


def with_remainders(distinct: int) -> dict[str, float]:
    """Seconds with remainders, and the batches of an epoch with and without."""
    rng = np.random.default_rng(1)
    lengths = np.arange(1.0, distinct + 1)
    histogram = Histogram(lengths, rng.integers(1, 17, distinct))
    sizes, one = batch_sizes_for(lengths, distinct * 20), np.ones(distinct)
    seconds, found = timed(
        lambda: optimal_boundaries_with_remainders(histogram, sizes, one, one, NUM_BUCKETS),
    )

    def batches(boundaries: FloatArray) -> int:
        table = BucketTable(boundaries, batch_sizes_for(boundaries, distinct * 20))
        return int(np.sum(-(-table.counts(histogram) // table.batch_sizes)))

    relaxed = optimal_boundaries(histogram, 1 / sizes, NUM_BUCKETS)
    return {"seconds": seconds, "batches": batches(found[-1]), "batches_without": batches(relaxed[-1])}


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

    flat_costs = costs(histogram.lengths, np.array([data.worst_target(length) for length in histogram.lengths]))
    flat = optimal_boundaries(histogram, flat_costs, NUM_BUCKETS)
    plain, _ = timed(lambda: optimal_table_2d(lengths, targets, sizes, costs, NUM_BUCKETS))
    candidates = np.unique(np.concatenate(flat))
    seconds, tables = timed(
        lambda: optimal_table_2d(lengths, targets, sizes, costs, NUM_BUCKETS, candidates=candidates)
    )
    best = tables[-1]
    cost = costs(best.boundaries, best.target_boundaries)[best.assign(lengths, targets)].sum()
    ends = np.searchsorted(histogram.lengths, flat[-1])
    flat_cost = np.sum(flat_costs[ends] * np.diff(histogram.cumulative[ends], prepend=0))
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
        "remainders_3500_distinct_lengths": with_remainders(3500),
        "remainders_8000_distinct_lengths": with_remainders(8000),
        "two_dimensions_30000_examples": two_dimensions(),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
