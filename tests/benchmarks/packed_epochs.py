"""Epochs trained for real, packed and padded, under one memory limit: `python tests/benchmarks/packed_epochs.py`.

The built-in language model on the lengths of ShareGPT's chats, on the CPU: batchtune probes and
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
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.epochs import interleaved, shapes_of
from public_lengths import folder, sharegpt
from torch.utils.data import BatchSampler

from batchtune import BucketBatchSampler, PackedBatchSampler, PooledBatchSampler
from batchtune.buckets.packed import time_law_of
from batchtune.buckets.sweep import sweep
from batchtune.epochs.measured_costs import costs_of
from batchtune.lengths import Lengths
from batchtune.probe.probing import run_probe
from batchtune.probe.settings import ProbeSettings
from batchtune.probe.supervisor import Supervisor
from batchtune.results import BatchShape, Probe, Row, SweepSettings
from batchtune.units import parse_size

# Of the public lengths: so many chats, each with so small a part of its tokens, so that a tiny model trains in minutes.
CHATS = 600
PART = 8
Shapes = list[BatchShape]


def main() -> None:
    """Probes, sweeps, trains, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--memory", default="480MiB")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    lengths = chats()
    memory = parse_size(options.memory)
    with ExitStack() as stack:
        padded, pads = probed(lengths, memory, stack, packed=False)
        packed, packs = probed(lengths, memory, stack, packed=True)
        epoch_of = contenders(lengths, padded, packed)
        seconds: dict[str, list[float]] = {name: [] for name in epoch_of}
        ooms = dict.fromkeys(epoch_of, 0)
        for epoch in range(options.rounds):
            shapes = {name: shapes_in(epoch) for name, shapes_in in epoch_of.items()}
            spent = dict.fromkeys(shapes, 0.0)
            for name, shape in interleaved(shapes):
                worker = pads if shape.sequences is None else packs
                stepped = worker.step(shape).trial
                ooms[name] += stepped.outcome != "ok"
                spent[name] += stepped.step_seconds or 0.0
            for name, value in spent.items():
                seconds[name].append(value)
            print(f"epoch {epoch}: {spent}", file=sys.stderr)
    print(json.dumps(found(shapes, seconds, ooms), indent=2))


def probed(
    lengths: Lengths, memory: int, stack: ExitStack, *, packed: bool
) -> tuple[Probe, Supervisor]:
    """Probe packed or padded batches; return the probe, and a worker under its limit."""
    settings = ProbeSettings(
        workload="builtin:transformer-lm",
        options={"size": "tiny", "dim": 64, "vocab": 1024, "packed": packed},
        device="cpu",
        memory_bytes=memory,
    )
    with tempfile.TemporaryDirectory() as run:
        probe = run_probe(lengths, settings, Path(run))
    supervisor = Supervisor(settings, probe.device.limit_bytes, lengths=lengths)
    worker = stack.enter_context(supervisor)
    worker.start()
    return probe, worker


def chats() -> Lengths:
    """Return the lengths to train on."""
    data = folder()
    if data is None:
        sys.exit("the public lengths are not here")
    values = np.maximum(1, sharegpt(data)[:CHATS] // PART)
    return Lengths.of(values, unit="tokens")


def contenders(
    lengths: Lengths, padded: Probe, packed: Probe
) -> dict[str, Callable[[int], Shapes]]:
    """Return ways to batch, by name: the batch shapes of an epoch."""
    assert packed.packed is not None and packed.packed.step_seconds is not None
    values = lengths.values.astype(np.int64)
    swept = sweep(lengths, padded.max_batch_length, SweepSettings(), costs_of(padded))
    table = min((row for row in swept.rows if row.pool_size is None), key=cost_of)
    pools = min((row for row in swept.rows if row.pool_size), key=cost_of)
    assert pools.pool_size is not None
    packing = PackedBatchSampler(
        values,
        max_tokens=packed.packed.max_tokens,
        time_law=time_law_of(packed.packed.step_seconds),
    )
    pooling = PooledBatchSampler(
        values,
        pool_size=pools.pool_size,
        batch_overhead=pools.batch_overhead,
        bucket_boundaries=pools.boundaries,
        bucket_batch_sizes=pools.batch_sizes,
    )
    bucketing = BucketBatchSampler(
        values,
        bucket_boundaries=table.boundaries,
        bucket_batch_sizes=table.batch_sizes,
    )

    def packed_rows(epoch: int) -> Shapes:
        packing.set_epoch(epoch)
        return [BatchShape.packed(values[batch].tolist()) for batch in packing]

    def fixed(epoch: int) -> Shapes:
        generator = torch.Generator().manual_seed(epoch)
        shuffled = torch.randperm(values.size, generator=generator).tolist()
        size = swept.baselines[0].batch_size
        return shapes_of(values, list(BatchSampler(shuffled, size, drop_last=False)))

    def of_sampler(sampler: BucketBatchSampler) -> Callable[[int], Shapes]:
        def shapes_in(epoch: int) -> Shapes:
            sampler.set_epoch(epoch)
            return shapes_of(values, list(sampler))

        return shapes_in

    return {
        "packed": packed_rows,
        "pools": of_sampler(pooling),
        "table": of_sampler(bucketing),
        "fixed": fixed,
    }


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
