"""CPU time of `sweep-stream` on a million made-up lengths, with step times and a measured frontier, as Markdown.

`python tests/benchmarks/streams.py`: for one worker and for eight.
"""

from __future__ import annotations

import time

import numpy as np

from batchtune.epochs.measured_costs import Costs
from batchtune.lengths import FloatArray, IntArray, Lengths, StreamLengths
from batchtune.streams.stream_sweep import StreamSettings, sweep_stream


def main() -> None:
    """Times the sweep."""
    lengths = np.clip(np.random.default_rng(0).normal(13, 4, 1_000_000), 1.4, 24.5)
    stream = StreamLengths(
        lengths=Lengths.of(lengths),
        values=lengths,
        targets=None,
        shards=[],
        repeated_ids=None,
    )
    costs = Costs(
        step_seconds=lambda sizes, longest: 0.02 + 1e-3 * sizes * longest,
        frontier=fitting,
        proven=fitting,
    )
    print("| workers | ways | CPU seconds |\n|--:|--:|--:|")
    for workers in (1, 8):
        started = time.process_time()
        swept = sweep_stream(stream, 600, StreamSettings(workers=workers), costs)
        print(
            f"| {workers} | {len(swept.rows)} | {time.process_time() - started:.1f} |",
            flush=True,
        )


def fitting(lengths: FloatArray) -> IntArray:
    """The batch sizes of a memory that grows faster than the padded length."""
    return np.maximum(1, (600 / (lengths + 0.02 * lengths**2)).astype(np.int64))


if __name__ == "__main__":
    main()
