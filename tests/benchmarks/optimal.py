"""How long the optimal boundaries take, for all bucket counts up to 20 at once: `python tests/benchmarks/optimal.py`.

On made data with 100,000 distinct lengths. Prints seconds, each the least of a few runs, as JSON.
"""

from __future__ import annotations

import json
import time

import numpy as np

from batchtune.buckets.optimal import optimal_boundaries
from batchtune.lengths import FloatArray, Histogram

RUNS = 3
NUM_BUCKETS = range(1, 21)
DISTINCT = 100_000


def timed(histogram: Histogram, costs: FloatArray) -> float:
    """The least of some runs' seconds."""
    seconds = []
    for _ in range(RUNS):
        started = time.perf_counter()
        optimal_boundaries(histogram, costs, NUM_BUCKETS)
        seconds.append(time.perf_counter() - started)
    return round(min(seconds), 4)


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
            seconds[f"{kind}, {name}"] = timed(histogram, of)
    return seconds


def main() -> None:
    """Prints everything as JSON."""
    print(json.dumps(many_lengths(), indent=1))


if __name__ == "__main__":
    main()
