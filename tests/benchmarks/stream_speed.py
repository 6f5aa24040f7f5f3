"""BucketedStream next to SpeechBrain's dynamic_bucketed_batch: `python tests/benchmarks/stream_speed.py`.

On lengths alone, in turns in one process: samples/s of CPU time, the best of some rounds. The lengths are made up, in
seconds as those of read speech; the tables allow 600 s a batch, as SpeechBrain's max_batch_numel does.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from real_speechbrain import load_speechbrain

from batchtune import BucketedStream
from batchtune.epochs.table import batch_sizes_for

COUNT = 60_000
ROUNDS = 5
MAX_BATCH_LENGTH = 600.0
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "bucket": (12, {}),
    "pivot": (200, {"algorithm": "pivot"}),
}


def main():
    """Measures and prints."""
    values = np.clip(np.random.default_rng(0).normal(13, 4, COUNT), 1.4, 24.5)
    print("| buffer | way | samples/s | times SpeechBrain |\n|--:|---|--:|--:|")
    for buffer_size in (1024, 4096):
        ways = {"SpeechBrain": speechbrain(values.tolist(), buffer_size)}
        ways |= {name: stream(values, buffer_size, *way) for name, way in WAYS.items()}
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(ROUNDS):
            for name, run in ways.items():
                start = time.process_time()
                run()
                best[name] = min(best[name], time.process_time() - start)
        for name, seconds in best.items():
            print(
                f"| {buffer_size:,} | {name} | {values.size / seconds:,.0f} | {best['SpeechBrain'] / seconds:.1f} |"
            )


def speechbrain(lengths, buffer_size):
    """Returns SpeechBrain's function on the lengths."""
    original = load_speechbrain()[3].dynamic_bucketed_batch
    limits = {
        "target_batch_numel": MAX_BATCH_LENGTH,
        "max_batch_numel": MAX_BATCH_LENGTH,
    }

    def run():
        random.seed(0)
        return sum(
            1
            for _ in original(
                lengths,
                None,
                float,
                None,
                None,
                buffer_size,
                len,
                sampler_kwargs=limits,
            )
        )

    return run


def stream(values, buffer_size, num_buckets, options):
    """Returns a stream of the lengths."""
    edges = np.unique(np.quantile(values, np.linspace(0, 1, num_buckets + 1)[1:]))
    sizes = batch_sizes_for(edges, MAX_BATCH_LENGTH)
    given = {
        "bucket_boundaries": edges,
        "bucket_batch_sizes": sizes,
        "buffer_size": buffer_size,
        **options,
    }
    made = BucketedStream(values.tolist(), length_of=float, collate_fn=len, **given)
    return lambda: sum(1 for _ in made)


if __name__ == "__main__":
    main()
