"""Epochs trained for real, packed and padded, under one memory limit: `python tests/benchmarks/packed_epochs.py`.

The built-in language model on the lengths of ShareGPT's chats, or of any manifest, on the CPU: batchtune probes and
sweeps it padded and packed; then workers under the same limit train whole shuffled epochs with

- PackedBatchSampler, at the token budget that is proven;
- PooledBatchSampler and BucketBatchSampler, with the best pools and the best table of the sweep;
- fixed batches, shuffled, the largest size that fits the longest example.

All take turns step by step, in proportion, so that a machine that slows down slows all of them. Each round is another
epoch of each. Prints JSON: what ran out of memory, seconds of each epoch, and times relative to packing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.epochs import interleaved
from public_lengths import folder, sharegpt
from torch.utils.data import BatchSampler

from batchtune import BucketBatchSampler, PackedBatchSampler, PooledBatchSampler
from batchtune.buckets.packed import time_law_of
from batchtune.buckets.sweep import sweep
from batchtune.epochs.measured_costs import costs_of
from batchtune.lengths import IntArray, Lengths
from batchtune.manifests import ReadOptions, load_lengths
from batchtune.probe.probing import run_probe
from batchtune.probe.settings import ProbeSettings
from batchtune.probe.supervisor import Supervisor
from batchtune.results import BatchShape, Probe, Row, SweepSettings
from batchtune.units import parse_size

WORKLOAD = "builtin:transformer-lm"
MODEL = {"size": "tiny", "dim": 64, "vocab": 1024}
# Of the public lengths: so many chats, each with so small a part of its tokens, so that a tiny model trains in minutes.
CHATS = 600
PART = 8
Shapes = list[BatchShape]


def main() -> None:
    """Probes, sweeps, trains, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--manifest", help="of lengths in tokens; default: ShareGPT's")
    parser.add_argument("--memory", default="480MiB")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    lengths = lengths_of(options.manifest)
    settings = {}
    probes = {}
    for packed in (False, True):
        settings[packed] = ProbeSettings(
            workload=WORKLOAD,
            options={**MODEL, "packed": packed},
            device="cpu",
            memory_bytes=parse_size(options.memory),
        )
        with tempfile.TemporaryDirectory() as run:
            probes[packed] = run_probe(lengths, settings[packed], Path(run))
        trials = probes[packed].trials
        ooms = sum(trial.outcome == "oom" for trial in trials)
        print(
            f"{'packed' if packed else 'padded'}: {len(trials)} trials, {ooms} OOMs, "
            f"max_batch_length {probes[packed].max_batch_length:g}",
            file=sys.stderr,
        )
    contenders = Contenders(lengths, probes[False], probes[True])
    seconds: dict[str, list[float]] = {name: [] for name in contenders.NAMES}
    ooms = dict.fromkeys(contenders.NAMES, 0)
    with ExitStack() as stack:
        workers = {}
        for packed in (False, True):
            limit_bytes = probes[packed].device.limit_bytes
            supervisor = Supervisor(settings[packed], limit_bytes, lengths=lengths)
            workers[packed] = stack.enter_context(supervisor)
            workers[packed].start()
        for epoch in range(options.rounds):
            shapes = contenders.epoch(epoch)
            spent = dict.fromkeys(shapes, 0.0)
            for name, shape in interleaved(shapes):
                stepped = workers[shape.sequences is not None].step(shape).trial
                ooms[name] += stepped.outcome != "ok"
                spent[name] += stepped.step_seconds or 0.0
            for name, value in spent.items():
                seconds[name].append(value)
            print(f"epoch {epoch}: {spent}", file=sys.stderr)
    print(json.dumps(found(shapes, seconds, ooms), indent=2))


def lengths_of(manifest: str | None) -> Lengths:
    """Return the lengths to train on."""
    if manifest is not None:
        return load_lengths([manifest], ReadOptions())
    data = folder()
    if data is None:
        sys.exit("the public lengths are not here: give a --manifest")
    values = np.maximum(1, sharegpt(data)[:CHATS] // PART)
    return Lengths.of(values, unit="tokens")


class Contenders:
    """Ways to batch, by name, and the batch shapes of their epochs."""

    NAMES = ("packed", "pools", "table", "fixed")

    def __init__(self, lengths: Lengths, padded: Probe, packed: Probe) -> None:
        self._values: IntArray = lengths.values.astype(np.int64)
        swept = sweep(
            lengths, padded.max_batch_length, SweepSettings(), costs_of(padded)
        )
        tables = [row for row in swept.rows if row.pool_size is None]
        table = min(tables, key=cost_of)
        pools = min((row for row in swept.rows if row.pool_size), key=cost_of)
        assert pools.pool_size is not None
        assert packed.packed is not None
        assert packed.packed.step_seconds is not None
        self._fixed = swept.baselines[0].batch_size
        self._samplers = {
            "packed": PackedBatchSampler(
                self._values,
                max_tokens=packed.packed.max_tokens,
                time_law=time_law_of(packed.packed.step_seconds),
            ),
            "pools": PooledBatchSampler(
                self._values,
                pool_size=pools.pool_size,
                batch_overhead=pools.batch_overhead,
                bucket_boundaries=pools.boundaries,
                bucket_batch_sizes=pools.batch_sizes,
            ),
            "table": BucketBatchSampler(
                self._values,
                bucket_boundaries=table.boundaries,
                bucket_batch_sizes=table.batch_sizes,
            ),
        }

    def epoch(self, epoch: int) -> dict[str, Shapes]:
        """Return the batch shapes of an epoch of each."""
        shapes = {}
        for name, sampler in self._samplers.items():
            sampler.set_epoch(epoch)
            shapes[name] = [self._shape(name, batch) for batch in sampler]
        generator = torch.Generator().manual_seed(epoch)
        shuffled = torch.randperm(self._values.size, generator=generator).tolist()
        batches = BatchSampler(shuffled, self._fixed, drop_last=False)
        shapes["fixed"] = [self._shape("fixed", batch) for batch in batches]
        return shapes

    def _shape(self, name: str, batch: list[int]) -> BatchShape:
        values = self._values[batch]
        if name == "packed":
            return BatchShape.packed(values.tolist())
        return BatchShape(values.size, float(values.max()))


def cost_of(row: Row) -> float:
    """Return the estimated seconds of an epoch."""
    return row.estimated_epoch_seconds or float("inf")


def found(
    shapes: dict[str, Shapes], seconds: dict[str, list[float]], ooms: dict[str, int]
) -> dict[str, object]:
    """Return what is printed of each contender."""
    results: dict[str, object] = {}
    for name, epochs in seconds.items():
        ratios = [
            value / packed
            for value, packed in zip(epochs, seconds["packed"], strict=True)
        ]
        results[name] = {
            "batches": len(shapes[name]),
            "out_of_memory": ooms[name],
            "epoch_seconds": [round(value, 2) for value in epochs],
            "times_packed": round(statistics.mean(ratios), 3),
            "spread_of_rounds": round(max(ratios) - min(ratios), 3),
        }
    return results


if __name__ == "__main__":
    main()
