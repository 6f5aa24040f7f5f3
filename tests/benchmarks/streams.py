"""Streams, next to SpeechBrain's own code: `python tests/benchmarks/streams.py [speed] [sharding]`.

- `speed`: samples/s of SpeechBrain's `dynamic_bucketed_batch` and of the same batches by `speechbrain_batches`, on
  lengths alone, in turns in one process. LibriSpeech's lengths in random order, as whole numbers of audio samples and
  in seconds, which have to be added up in Python's order. The first call of a process, which loads or compiles code, is
  timed apart. The least CPU time of the repeats counts.
- `sharding`: which of 10 million examples in 10,000 shards each of 2 × 4 workers reads, in its order.

Prints Markdown.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from batching.conftest import load_speechbrain
from benchmarks.epochs import ROOT
from benchmarks.samplers import timed

from batchtune.batching.pivot import PivotSettings, speechbrain_batches
from batchtune.batching.sharding import Sharding
from batchtune.manifests import ReadOptions, load_lengths

SHARED = ROOT.parent / "shared" / "data"
LIBRISPEECH = "librispeech-wav2vec-tsv/train.tsv"
RATE = 16_000
# Seconds: the target and the maximum of a batch. The first is that of SpeechBrain's tutorial.
LIMITS = ((45, 60), (300, 400), (1200, 1500), (300, None))
BUFFERS = (128, 1024, 8192)
T = TypeVar("T")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the parts asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--data", type=Path, default=SHARED, help="folder of the shared data sets")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    for part in options.parts or PARTS:
        PARTS[part](options)


def speed(options: argparse.Namespace) -> None:
    """Times SpeechBrain's batches, real and reproduced."""
    real = load_speechbrain()[3].dynamic_bucketed_batch
    given = load_lengths([str(options.data / LIBRISPEECH)], ReadOptions()).values
    samples = np.random.default_rng(0).permutation(given).astype(np.int64)
    first, _ = timed(lambda: speechbrain_batches(samples, PivotSettings(target_batch_numel=RATE), random.Random(0)))
    print(f"First call: {first:.2f} s. {samples.size:,} examples, samples/s:\n")
    print("| target / maximum | buffer | lengths | SpeechBrain | reproduced | times |\n|---|--:|---|--:|--:|--:|")
    for buffer in BUFFERS:
        for target, most in LIMITS:
            for lengths, scale in ((samples, RATE), (samples / RATE, 1)):
                settings = PivotSettings(
                    target_batch_numel=target * scale,
                    max_batch_numel=None if most is None else most * scale,
                    buffersize=buffer,
                )
                theirs, ours = in_turns(real, lengths.tolist(), settings, options.repeats)
                print(
                    f"| {target} / {most} s | {buffer:,} | {'samples' if scale > 1 else 'seconds'} "
                    f"| {samples.size / theirs:,.0f} | {samples.size / ours:,.0f} | {theirs / ours:.0f} |",
                    flush=True,
                )


def in_turns(real: Callable[..., Any], lengths: list[float], settings: PivotSettings, repeats: int) -> list[float]:
    """The least CPU seconds of SpeechBrain's function and of ours."""
    sampler = {
        name: getattr(settings, name)
        for name in ("target_batch_numel", "max_batch_numel", "max_batch_size", "max_padding_ratio")
    }
    stream, array = list(enumerate(lengths)), np.array(lengths)

    def original() -> list[list[int]]:
        random.seed(1)
        batches = real(
            iter(stream),
            len_fn=lambda example: example[1],
            buffersize=settings.buffersize,
            collate_fn=lambda batch: [place for place, _ in batch],
            sampler_kwargs=sampler,
        )
        return list(batches)

    times: list[list[float]] = [[], []]
    for _ in range(repeats):
        seconds, batches = cpu_timed(original)
        times[0].append(seconds)
        seconds, found = cpu_timed(lambda: speechbrain_batches(array, settings, random.Random(1)))
        times[1].append(seconds)
        assert [batch.tolist() for batch in np.split(found.examples, found.ends[:-1])] == batches
    return [min(found) for found in times]


def cpu_timed(function: Callable[[], T]) -> tuple[float, T]:
    """CPU seconds, and the result."""
    started = time.process_time()
    result = function()
    return time.process_time() - started, result


def sharding(options: argparse.Namespace) -> None:
    """Times one epoch of all workers' streams."""
    dealt = Sharding(world_size=2, workers=4, shuffle_shards=100, shuffle_buffer=10_000)
    dealt.streams([100], seed=0, epoch=0)
    times = [cpu_timed(lambda: dealt.streams([1000] * 10_000, seed=0, epoch=0))[0] for _ in range(options.repeats)]
    print(f"\n10,000,000 examples dealt and shuffled in {min(times):.2f} s.")


PARTS = {"speed": speed, "sharding": sharding}

if __name__ == "__main__":
    main()
