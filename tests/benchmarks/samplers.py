"""SpeechBrain's sampler next to a whole sweep: `python tests/benchmarks/samplers.py`.

On made-up lengths (log-normal seconds; rounded to 10 ms, so that they repeat, and not), all in one run: constructing
SpeechBrain's sampler with `num_buckets` 10 to 20, which tells how many batches each makes; and batchtune's sweep of all
its strategies with as many buckets each, with their padding, from unsorted lengths on.

Prints JSON: seconds and how many times as fast.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from real_speechbrain import load_dynamic_batch_sampler

from batchtune.buckets.sweep import sweep
from batchtune.epochs.measured_costs import Costs
from batchtune.lengths import Lengths
from batchtune.results import SweepSettings

MAX_BATCH_LENGTH = 600.0
COUNT = 1_000_000
REPEATS = 10
NUM_BUCKETS = range(10, 21)


def main():
    """Measures and prints."""
    original = load_dynamic_batch_sampler()
    # Imports all there is to import.
    sweep(Lengths.of([1.0, 2.0]), MAX_BATCH_LENGTH, SweepSettings(), Costs())
    values = np.random.default_rng(1).lognormal(2.3, 0.5, COUNT)
    rounded = np.maximum(values.round(2), 0.01)
    found = {
        "rounded": sweeps(original, rounded),
        "unrounded": sweeps(original, values),
    }
    print(json.dumps(found, indent=2))


def timed(function):
    """Seconds, and what it gave."""
    started = time.perf_counter()
    result = function()
    return time.perf_counter() - started, result


def sweeps(original, values):
    """All constructions against all strategies."""
    as_list = values.tolist()
    theirs = 0.0
    batches = []
    for num_buckets in NUM_BUCKETS:
        settings = (range(values.size), MAX_BATCH_LENGTH, num_buckets)
        seconds, sampler = timed(partial(original, *settings, lengths_list=as_list))
        theirs += seconds
        batches.append(len(sampler))
    settings = SweepSettings(num_buckets=tuple(NUM_BUCKETS))
    runs = [
        timed(lambda: sweep(Lengths.of(values), MAX_BATCH_LENGTH, settings, Costs()))
        for _ in range(REPEATS)
    ]
    rows = runs[0][1].rows
    assert [row.batches for row in rows if row.strategy == "speechbrain"] == batches
    best = min(seconds for seconds, _ in runs)
    return {
        "distinct": int(np.unique(values).size),
        "rows": len(rows),
        "speechbrain_seconds": round(theirs, 3),
        "batchtune_seconds": round(best, 4),
        "times_as_fast": round(theirs / best, 1),
    }


if __name__ == "__main__":
    main()
