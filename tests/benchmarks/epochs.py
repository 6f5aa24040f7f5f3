"""One epoch trained for real with four samplers, next to what was predicted: `python tests/benchmarks/epochs.py`.

The example's workload and lengths, on the CPU, under one memory limit: batchtune probes and sweeps; then a worker under
the same limit trains one epoch with

- SpeechBrain's DynamicBatchSampler itself, `num_buckets=20`, with the max_batch_length that was measured;
- Lhotse's bins (20, of equal total length) with the largest batch sizes that were measured to fit them;
- fixed batches, shuffled, the largest size that fits the longest example;
- batchtune's BucketBatchSampler with the recommended table.

All four epochs run in one process, their steps interleaved in proportion, so that a machine that slows down slows all
of them. The prediction is that of exactly these batches, by the step times that the probe measured. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.recipe_peers import lhotse_batches, lhotse_cuts
from real_speechbrain import load_dynamic_batch_sampler
from torch.utils.data import BatchSampler

from batchtune import BucketBatchSampler
from batchtune.buckets.sweep import sweep
from batchtune.epochs.measured_costs import costs_of
from batchtune.lengths import FloatArray, IntArray, Lengths
from batchtune.manifests import ReadOptions, load_lengths
from batchtune.probe.probing import run_probe
from batchtune.probe.settings import ProbeSettings
from batchtune.probe.supervisor import Supervisor
from batchtune.results import BatchShape, Probe, Sweep, SweepSettings
from batchtune.units import parse_size

ROOT = Path(__file__).parents[2]
NUM_BUCKETS = 20
Batches = list[list[int]]


def main() -> None:
    """Probes, sweeps, trains, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workload", default=f"{ROOT / 'examples' / 'custom_workload.py'}:TinyTagger"
    )
    parser.add_argument("--memory", default="1GiB")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    lengths = load_lengths(
        [str(ROOT / "examples" / "stdlib_lengths.csv")], ReadOptions()
    )
    settings = ProbeSettings(
        workload=options.workload,
        options={},
        device=options.device,
        memory_bytes=parse_size(options.memory),
    )
    with tempfile.TemporaryDirectory() as folder:
        probe = run_probe(lengths, settings, Path(folder))
    swept = sweep(lengths, probe.max_batch_length, SweepSettings(), costs_of(probe))
    # As in a data set, not sorted.
    order = np.random.default_rng(0).permutation(lengths.count)
    values = lengths.values[order]
    epochs = {
        name: make(values, lengths, probe, swept) for name, make in SAMPLERS.items()
    }
    measured = train(settings, probe.device.limit_bytes, values, epochs)
    step_seconds = costs_of(probe).step_seconds
    assert step_seconds is not None
    report(values, epochs, measured, step_seconds)


def with_speechbrain(
    values: FloatArray, lengths: Lengths, probe: Probe, swept: Sweep
) -> Batches:
    """The real one."""
    sampler = load_dynamic_batch_sampler()(
        range(values.size),
        probe.max_batch_length,
        num_buckets=NUM_BUCKETS,
        lengths_list=values.tolist(),
        shuffle=True,
        seed=0,
    )
    return [list(batch) for batch in sampler]


def with_lhotse(
    values: FloatArray, lengths: Lengths, probe: Probe, swept: Sweep
) -> Batches:
    """The real one, with its own bins."""
    from lhotse.dataset.sampling.dynamic_bucketing import (
        FixedBucketBatchSizeConstraint,
        estimate_duration_buckets,
    )

    cuts = lhotse_cuts(values, range(values.size))
    bins = estimate_duration_buckets(cuts, num_buckets=NUM_BUCKETS)
    edges = [*bins, lengths.longest]
    frontier = costs_of(probe).frontier
    assert frontier is not None
    constraint = FixedBucketBatchSizeConstraint(edges, frontier(edges).tolist())
    return lhotse_batches(cuts, duration_bins=bins, constraint=constraint)(0)


def with_fixed(
    values: FloatArray, lengths: Lengths, probe: Probe, swept: Sweep
) -> Batches:
    """Shuffled as torch does."""
    shuffled = torch.randperm(
        values.size, generator=torch.Generator().manual_seed(0)
    ).tolist()
    return list(BatchSampler(shuffled, swept.baselines[0].batch_size, drop_last=False))


def with_batchtune(
    values: FloatArray, lengths: Lengths, probe: Probe, swept: Sweep
) -> Batches:
    """The best table."""
    assert swept.recommended_table is not None
    row = swept.rows[swept.recommended_table]
    return list(
        BucketBatchSampler(
            values, bucket_boundaries=row.boundaries, bucket_batch_sizes=row.batch_sizes
        )
    )


SAMPLERS: dict[str, Callable[[FloatArray, Lengths, Probe, Sweep], Batches]] = {
    "speechbrain": with_speechbrain,
    "lhotse": with_lhotse,
    "fixed": with_fixed,
    "batchtune": with_batchtune,
}


def train(
    settings: ProbeSettings,
    limit_bytes: int,
    values: FloatArray,
    epochs: dict[str, Batches],
) -> dict[str, float]:
    """Seconds of each epoch's steps; what fails for lack of memory is told and counts as nothing."""
    seconds = dict.fromkeys(epochs, 0.0)
    with Supervisor(settings, limit_bytes) as supervisor:
        supervisor.start()
        shapes = {name: shapes_of(values, batches) for name, batches in epochs.items()}
        for of_sampler in shapes.values():  # the warm-up: the largest batch of each
            supervisor.step(max(of_sampler, key=lambda shape: shape.padded_length))
        for name, shape in interleaved(shapes):
            stepped = supervisor.step(shape).trial
            if stepped.outcome != "ok":
                print(f"{name}: {shape} ended with {stepped.outcome}", file=sys.stderr)
            seconds[name] += stepped.step_seconds or 0.0
    return seconds


def shapes_of(values: FloatArray, batches: Batches) -> list[BatchShape]:
    """What the batches take."""
    return [BatchShape(len(batch), float(values[batch].max())) for batch in batches]


def interleaved(
    shapes: dict[str, list[BatchShape]],
) -> Iterator[tuple[str, BatchShape]]:
    """All of them, each sampler's evenly spread over the whole."""
    places = [
        ((index + 0.5) / len(of_sampler), name, shape)
        for name, of_sampler in shapes.items()
        for index, shape in enumerate(of_sampler)
    ]
    return (
        (name, shape) for _, name, shape in sorted(places, key=lambda place: place[:2])
    )


def report(
    values: FloatArray,
    epochs: dict[str, Batches],
    measured: dict[str, float],
    step_seconds: Callable[[IntArray, FloatArray], FloatArray],
) -> None:
    """Prints what each epoch took, beside its prediction."""
    found = {}
    for name, batches in epochs.items():
        shapes = shapes_of(values, batches)
        sizes = np.array([shape.batch_size for shape in shapes])
        longest = np.array([shape.length for shape in shapes])
        predicted = float(np.sum(step_seconds(sizes, longest)))
        found[name] = {
            "batches": len(batches),
            "measured_seconds": round(measured[name], 2),
            "measured_over_predicted": round(measured[name] / predicted, 3),
            "times_batchtune": round(measured[name] / measured["batchtune"], 3),
        }
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
