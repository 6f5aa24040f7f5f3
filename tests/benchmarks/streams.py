"""Streams, next to SpeechBrain's own code: `python tests/benchmarks/streams.py [seconds] [sweep] [train]`.

- `seconds`: CPU time of `sweep-stream` on a million made-up lengths, with step times and a measured frontier, for one
  worker and for eight.
- `sweep`: batches and padding of simulated epochs with SpeechBrain's function in the proportions of its WebDataset
  tutorial (target_batch_numel is three quarters of max_batch_numel, everything else its default) and with the
  parameters that sweep-stream recommends; with the best row of `BucketedStream`, chosen by the same rule; and, for what
  streaming costs, with the recommended bucket table over all examples, as a sampler with random access runs it. No
  batch is larger than the limit, except single examples; buffers hold 1,024 examples; two workers read shards of 1,000.
  Real lengths (more of them with `--data`), in batches of at most as much as 50 examples of mean length hold, or one of
  the longest; LibriSpeech's also in the tutorial's 60 s. Chosen by the number of batches, as without a probe; and by
  time, if a step takes as long as its padded length and 5% of the largest batch besides. Times are relative to the
  tutorial's.
- `train`: the same four trained on the CPU with the sizes that a probe measured to fit one memory limit, as in
  `pools.py train`: their steps in turn, in CPU time on one thread; settings are chosen by such step times. Every eighth
  length of LibriSpeech in frames of 100 ms, or `--manifest`; another order in each epoch, one worker. SpeechBrain's
  batches are made by SpeechBrain itself, ours by `BucketedStream`.

Prints Markdown.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.stream_epochs import sweeps, training

from batchtune.epochs.measured_costs import Costs
from batchtune.lengths import FloatArray, IntArray, Lengths, StreamLengths
from batchtune.streams.stream_settings import StreamSettings
from batchtune.streams.stream_sweep import sweep_stream


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the parts asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--data", type=Path, help="folder of more data sets, as in pools.py")
    parser.add_argument("--quick", action="store_true", help="sweep and train with little data, once")
    parser.add_argument("--manifest", help="of the training; default: every eighth length of LibriSpeech")
    parser.add_argument("--workload", help="of the training; default: that of the example, narrower")
    parser.add_argument("--memory", default="352MiB", help="of the training")
    parser.add_argument("--run", type=Path, help="folder of the training's probe, which is made or used again")
    parser.add_argument("--repeats", type=int, default=5, help="how often each is timed, or epochs trained with each")
    options = parser.parse_args(arguments)
    for part in options.parts or PARTS:
        PARTS[part](options)


def seconds(options: argparse.Namespace) -> None:
    """Times the sweep of a million examples."""
    lengths = np.clip(np.random.default_rng(0).normal(13, 4, 20_000 if options.quick else 1_000_000), 1.4, 24.5)
    stream = StreamLengths(lengths=Lengths.of(lengths), values=lengths, targets=None, shards=[], repeated_ids=None)
    costs = Costs(step_seconds=lambda sizes, longest: 0.02 + 1e-3 * sizes * longest, frontier=fitting, proven=fitting)
    print("| workers | ways | CPU seconds |\n|--:|--:|--:|")
    for workers in (1, 8):
        started = time.process_time()
        swept = sweep_stream(stream, 600, StreamSettings(workers=workers), costs)
        print(f"| {workers} | {len(swept.rows)} | {time.process_time() - started:.1f} |", flush=True)


def fitting(lengths: FloatArray) -> IntArray:
    """The batch sizes of a memory that grows faster than the padded length."""
    return np.maximum(1, (600 / (lengths + 0.02 * lengths**2)).astype(np.int64))


PARTS = {"seconds": seconds, "sweep": sweeps, "train": training}

if __name__ == "__main__":
    main()
