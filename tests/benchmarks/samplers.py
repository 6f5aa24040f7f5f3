"""SpeechBrain's sampler next to a whole sweep: `python tests/benchmarks/samplers.py`.

On made-up lengths (log-normal seconds; rounded to 10 ms, so that they repeat, and not), all in one run:

- `sweep`: constructing SpeechBrain's sampler with `num_buckets` 10 to 20, which tells how many batches each makes; and
  batchtune's sweep of all its strategies with as many buckets each, with their padding, from unsorted lengths on.
- `command`: the whole process `batchtune sweep-buckets` on a Parquet file of more lengths (`--command-count`).

Prints JSON: seconds and how many times as fast.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from real_speechbrain import load_dynamic_batch_sampler

from batchtune.buckets.sweep import sweep
from batchtune.epochs.measured_costs import Costs
from batchtune.lengths import FloatArray, Lengths
from batchtune.results import SweepSettings

MAX_BATCH_LENGTH = 600.0
REPEATS = 10
NUM_BUCKETS = range(10, 21)
T = TypeVar("T")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--count", type=int, default=1_000_000, help="lengths of the sweep"
    )
    parser.add_argument(
        "--command-count", type=int, default=6_000_000, help="lengths of the command"
    )
    options = parser.parse_args()
    original = load_dynamic_batch_sampler()
    # Imports all there is to import.
    sweep(Lengths.of([1.0, 2.0]), MAX_BATCH_LENGTH, SweepSettings(), Costs())
    found = {
        name: {
            "distinct": int(np.unique(values).size),
            "sweep": sweeps(original, values),
            "command": command(made_up(options.command_count, rounded=rounded)),
        }
        for rounded, name in ((True, "rounded"), (False, "unrounded"))
        for values in [made_up(options.count, rounded=rounded)]
    }
    print(
        json.dumps(
            {"count": options.count, "command_count": options.command_count, **found},
            indent=2,
        )
    )


def made_up(count: int, *, rounded: bool) -> FloatArray:
    """Lengths in seconds, around 10."""
    seconds = np.random.default_rng(1).lognormal(2.3, 0.5, count)
    return np.maximum(seconds.round(2), 0.01) if rounded else seconds


def timed(function: Callable[[], T]) -> tuple[float, T]:
    """Seconds, and what it gave."""
    started = time.perf_counter()
    result = function()
    return time.perf_counter() - started, result


def sweeps(original: Any, values: FloatArray) -> dict[str, Any]:
    """All constructions against all strategies."""
    as_list = values.tolist()
    theirs = 0.0
    batches = []
    for num_buckets in NUM_BUCKETS:

        def construct(num_buckets: int = num_buckets) -> Any:
            return original(
                range(values.size), MAX_BATCH_LENGTH, num_buckets, lengths_list=as_list
            )

        seconds, sampler = timed(construct)
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
        "rows": len(rows),
        **compared("speechbrain_seconds", theirs, "batchtune_seconds", best),
    }


def command(values: FloatArray) -> dict[str, float]:
    """The whole process, start-up and reading included."""
    import pyarrow
    import pyarrow.parquet

    with tempfile.TemporaryDirectory() as folder:
        manifest = Path(folder) / "lengths.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"duration": values}), manifest)
        arguments = [
            "--max-batch-length",
            str(MAX_BATCH_LENGTH),
            "--run",
            str(Path(folder) / "run"),
            "--quiet",
        ]
        run = [
            sys.executable,
            "-m",
            "batchtune",
            "sweep-buckets",
            str(manifest),
            *arguments,
        ]
        seconds, _ = timed(
            lambda: subprocess.run(run, stdout=subprocess.DEVNULL, check=True)
        )
    return {"seconds": round(seconds, 2)}


def compared(
    their_name: str, theirs: float, our_name: str, ours: float
) -> dict[str, float]:
    """Both, and the ratio."""
    return {
        their_name: round(theirs, 3),
        our_name: round(ours, 4),
        "times_as_fast": round(theirs / ours, 1),
    }


if __name__ == "__main__":
    main()
