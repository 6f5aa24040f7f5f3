"""Tables and pools side by side: `python tests/benchmarks/pools.py [tables] [frontier] [speed] [train]`.

- `tables`: real lengths (more of them with `--data`), in batches of at most as much as 50 examples of mean length hold,
  or one of the longest. A step takes as long as its padded length, and 5% of the largest batch besides: tables are
  optimal for that. The recommended table, pools of several sizes, and the fastest pools whose batch mates meet again
  no more often than the table's (`as random`). `mates again` is the figure of a sweep, which counts pairs: those of
  large batches, of short examples, count most. `of an example` is its mean over the examples.
- `frontier`: the same for LibriSpeech with batch sizes that the probe measured on a simulated device whose memory grows
  with the square of the length.
- `speed`: the sweep of 8 pool sizes; one epoch of BucketBatchSampler with 20 buckets and of PooledBatchSampler with 300
  lengths at which another number of examples fits, in turns, each in a new process; see `sampler_epoch.py`.
- `train`: epochs trained on the CPU with the sizes that a probe measured to fit one memory limit, their steps in turn,
  in CPU time on one thread: with several, threads wait for each other where other programs run. Every eighth length of
  LibriSpeech in frames of 100 ms, or `--manifest`; a narrower model than the example's. The probe measures sizes; the
  table and the pools are chosen by step times as in `tables`, which do not depend on the load.

Prints Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.epochs import ROOT, interleaved, shapes_of
from benchmarks.laws import probe_law
from benchmarks.sampler_epoch import OURS, measured
from benchmarks.samplers import made_up, timed
from memory_laws import LAWS, LawDevice
from real_lengths import COMMON_VOICE, librispeech_samples, librispeech_seconds

from batchtune import BucketBatchSampler, PooledBatchSampler
from batchtune.buckets.sweep import sweep
from batchtune.buckets.sweep_settings import SweepSettings
from batchtune.epochs.measured_costs import Costs, costs_of
from batchtune.lengths import FloatArray, Lengths
from batchtune.manifests import ReadOptions, load_lengths
from batchtune.probe.probing import run_probe
from batchtune.probe.settings import ProbeSettings
from batchtune.results import Row, Sweep
from batchtune.units import parse_size
from batchtune.workloads import load_workload

# Data sets that are not part of the tests: their files below a folder, and how they are read.
OTHERS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "LibriSpeechMix": ([f"librispeechmix-jsonl/dev-clean-{n}mix.jsonl.gz" for n in (2, 3)], {}),
    "Mooncake": (["mooncake-fast25/conversation_trace.jsonl.gz"], {"length_key": "input_length"}),
    "ShareGPT": (
        ["sharegpt-lengths/sharegpt_8k_filtered_stats_llama2_tokenizer.csv"],
        {"length_key": "num_total_tokens"},
    ),
    "arXiv summaries": (
        ["vidur-traces/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv"],
        {"length_key": "num_total_tokens"},
    ),
    "code files": (["code-file-lengths/code_file_lengths.tsv.gz"], {"length_key": "bytes", "skip_invalid": True}),
}
EXAMPLES_OF_A_BATCH, OVERHEAD = 50, 0.05
SIZES = (1000, 5000, 20000)
# Pools that are searched for those as random as the table: 24 numbers of pools, in even ratio, down to this size.
NUMBERS, SMALLEST = 24, 300
EXAMPLE = f"{ROOT / 'examples' / 'custom_workload.py'}:TinyTagger"
# As it is, a step takes too long for several epochs of each.
MODEL: dict[str, str | int | float | bool] = {"dim": 16, "tags": 200}
HEAD = ("", "batches", "padding", "time", "mates again", "of an example")


@dataclass(frozen=True)
class Compared:
    """What is compared on one data set."""

    swept: Sweep
    table: Row
    as_random: Row | None
    pools: list[Row]


def compare(lengths: Lengths, max_batch_length: float, costs: Costs) -> Compared:
    """Sweeps tables and many pools."""
    numbers = np.geomspace(1, max(1, lengths.count // SMALLEST), NUMBERS).astype(int).tolist()
    sizes = {min(size, lengths.count) for size in (*SIZES, lengths.count)}
    searched = {-(-lengths.count // number) for number in numbers}
    settings = SweepSettings(strategies=("optimal", "pooled"), pool_sizes=tuple(sorted(sizes | searched)))
    swept = sweep(lengths, max_batch_length, settings, costs)
    assert swept.recommended_table is not None, swept.reason
    table = swept.rows[swept.recommended_table]
    pools = [row for row in swept.rows if row.pool_size is not None]
    as_random = [row for row in pools if again(row) <= again(table)]
    return Compared(
        swept, table, min(as_random, key=seconds, default=None), [row for row in pools if row.pool_size in sizes]
    )


def again(row: Row) -> float:
    return row.mates_again or 0.0


def seconds(row: Row) -> float:
    return row.estimated_epoch_seconds or 0.0


def sampler_of(row: Row, values: FloatArray) -> BucketBatchSampler | PooledBatchSampler:
    """The sampler that runs a row."""
    table: dict[str, Any] = {"bucket_boundaries": row.boundaries, "bucket_batch_sizes": row.batch_sizes}
    if row.pool_size is None:
        return BucketBatchSampler(values, **table)
    return PooledBatchSampler(values, pool_size=row.pool_size, batch_overhead=row.batch_overhead, **table)


def again_by_example(row: Row, values: FloatArray, epochs: int = 4) -> float:
    """How often its mates are mates again in the next epoch, of an example on average."""
    sampler, batch_of = sampler_of(row, values), []
    for _ in range(epochs):
        found = np.empty(values.size, dtype=np.int64)
        for index, batch in enumerate(sampler):
            found[batch] = index
        batch_of.append(found)
    shares = []
    for first, second in itertools.pairwise(batch_of):
        _, which, met = np.unique(first * values.size + second, return_inverse=True, return_counts=True)
        mates = np.bincount(first)[first] - 1
        shares.append(np.mean((met[which] - 1)[mates > 0] / mates[mates > 0]))
    return float(np.mean(shares))


def table_lines(lengths: Lengths, found: Compared) -> Iterator[tuple[str, ...]]:
    """A line for each way to batch, its time relative to the table's."""
    values = lengths.values[np.random.default_rng(0).permutation(lengths.count)]

    def line(name: str, row: Row) -> tuple[str, ...]:
        return (
            name,
            f"{row.batches:,}",
            f"{row.padding_ratio:.1%}",
            f"{seconds(row) / seconds(found.table):.3f}",
            f"{again(row):.3f}",
            f"{again_by_example(row, values):.3f}",
        )

    bound = found.swept.lower_bound
    yield ("bound", f"{bound.batches:,}", "0", f"{(bound.estimated_epoch_seconds or 0) / seconds(found.table):.3f}")
    yield line(f"table of {found.table.num_buckets} buckets", found.table)
    if found.as_random is not None:
        yield line(f"{found.as_random.name}: as random", found.as_random)
    for row in found.pools:
        yield line(row.name + (": all" if row.pool_size == lengths.count else ""), row)
    recommended = found.swept.recommended_row
    if recommended is not None and recommended.pool_size is not None:
        yield line(f"{recommended.name}: recommended", recommended)


def show(title: str, head: Sequence[str], lines: Iterator[tuple[str, ...]]) -> None:
    """Prints a Markdown table."""
    print(f"\n{title}\n\n| {' | '.join(head)} |\n|---|{'--:|' * (len(head) - 1)}")
    for line in lines:
        print(f"| {' | '.join((*line, *[''] * (len(head) - len(line))))} |", flush=True)


def data_sets(folder: Path | None, *, quick: bool) -> Iterator[tuple[str, Lengths]]:
    """Real lengths of the tests, and those of the folder; or few that are made up."""
    if quick:
        yield "made-up lengths", Lengths.of(made_up(2_000, rounded=True))
        return
    yield "LibriSpeech-100", Lengths.of(librispeech_seconds(), unit="s")
    yield "Common Voice id", load_lengths(COMMON_VOICE)
    if folder is None:
        return
    for name, (paths, options) in OTHERS.items():
        yield name, load_lengths([str(folder / path) for path in paths], ReadOptions(**options))


def affine(max_batch_length: float) -> Costs:
    """Step times that grow with the padded length, from 5% of the largest batch on."""
    return Costs(step_seconds=lambda sizes, lengths, _=None: np.asarray(sizes) * lengths + OVERHEAD * max_batch_length)


def tables(options: argparse.Namespace) -> None:
    for name, lengths in data_sets(options.data, quick=options.quick):
        most = max(EXAMPLES_OF_A_BATCH * lengths.total / lengths.count, lengths.longest)
        found = compare(lengths, most, affine(most))
        title = f"{name}: {lengths.count:,} examples, batches of at most {most:,.6g} {lengths.unit or ''}"
        show(title, HEAD, table_lines(lengths, found))


def frontier(options: argparse.Namespace) -> None:
    name, lengths = next(data_sets(options.data, quick=options.quick))
    probe = probe_law(LawDevice(LAWS["quadratic"], lengths, fitting=EXAMPLES_OF_A_BATCH))
    found = compare(lengths, probe.max_batch_length, costs_of(probe))
    show(f"{name} with sizes measured on a simulated device", HEAD, table_lines(lengths, found))


def speed(options: argparse.Namespace) -> None:
    count, repeats = (100_000, 1) if options.quick else (10_000_000, 3)
    sweep(Lengths.of([1.0, 2.0]), 600.0, SweepSettings(), Costs())  # imports all there is to import
    print(f"\nsweep of 8 pool sizes with {count:,} examples, the best of {repeats}:", end="")
    for rounded in (True, False):
        lengths, runs = Lengths.of(made_up(count, rounded=rounded)), []
        for _ in range(repeats):
            before = time.process_time()
            wall, _ = timed(lambda of=lengths: sweep(of, 600.0, SweepSettings(strategies=("pooled",)), Costs()))
            runs.append((wall, time.process_time() - before))
        which = "in steps of 10 ms" if rounded else "all different"
        print(f" {min(runs)[0]:.1f} s, {min(runs)[1]:.1f} s of CPU (lengths {which})", end="\n" if not rounded else ";")
    ways = {
        f"{name}, {kind}": (*arguments, *decimals)
        for name, arguments in (("buckets", (20, 0)), ("pools of 20,000", (300, 20_000)), ("one pool", (300, count)))
        for kind, decimals in (("steps of 10 ms", (2,)), ("all different", ()))
    }
    code = OURS.replace("perf_counter", "process_time")  # which other programs change little
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, (buckets, *more) in ways.items():
            found[name].append(measured(code, count, 600, buckets, "random", *more))

    def line(name: str) -> tuple[str, ...]:
        setup, epoch, second, lists, batches, peak, kept = (
            statistics.median(run[key] for run in found[name])
            for key in ("setup", "epoch", "second", "lists", "batches", "peak", "kept")
        )
        per_second, each = f"{batches / lists:,.0f}", [f"{size / count:.1f}" for size in (peak, kept)]
        times = (f"{taken:.2f} s" for taken in (setup, epoch, second))
        return (name, *times, per_second, f"{batches:,.0f}", *each)

    head = (
        "",
        "set up",
        "first batch",
        "of the second epoch",
        "then batches/s",
        "batches",
        "peak bytes/example",
        "kept",
    )
    show(f"one epoch of {count:,} examples, CPU time, load {os.getloadavg()[0]:.1f}", head, map(line, ways))


def training(options: argparse.Namespace) -> None:
    lengths = trained_lengths(options)
    settings = ProbeSettings(
        workload=options.workload or EXAMPLE,
        options={} if options.workload else MODEL,
        device="cpu",
        memory_bytes=parse_size(options.memory),
        num_lengths=8,
        max_lengths=16,
    )
    with tempfile.TemporaryDirectory() as folder:
        probe = run_probe(lengths, settings, options.run or Path(folder))
    chosen_by = affine(probe.max_batch_length).step_seconds
    found = compare(lengths, probe.max_batch_length, replace(costs_of(probe), step_seconds=chosen_by))
    rows = {f"table of {found.table.num_buckets} buckets": found.table}
    if found.as_random is not None:
        rows[f"{found.as_random.name}: as random"] = found.as_random
    rows[f"{found.pools[-1].name}: all"] = found.pools[-1]
    values = lengths.values[np.random.default_rng(0).permutation(lengths.count)]
    samplers = {name: sampler_of(row, values) for name, row in rows.items()}
    table, *_ = rows
    taken: dict[str, list[float]] = {name: [] for name in rows}
    batches: dict[str, list[int]] = {name: [] for name in rows}
    for _ in range(1 if options.quick else options.repeats):
        epochs = {name: list(sampler) for name, sampler in samplers.items()}  # each pass is the next epoch
        for name, took in trained(settings, values, epochs).items():
            taken[name].append(took)
            batches[name].append(len(epochs[name]))
        print(*(f"{name}: {each[-1]:.1f} s" for name, each in taken.items()), sep="; ", file=sys.stderr)

    def line(name: str) -> tuple[str, ...]:
        ratios = [own / of_table for own, of_table in zip(taken[name], taken[table], strict=True)]
        return (
            name,
            f"{statistics.mean(batches[name]):.1f}",
            f"{rows[name].padding_ratio:.1%}",
            f"{statistics.mean(taken[name]):.1f} s",
            f"{statistics.mean(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
            f"{seconds(rows[name]) / seconds(rows[table]):.3f}",
            f"{again(rows[name]):.3f}",
            f"{again_by_example(rows[name], values):.3f}",
        )

    head = ("", "batches", "padding", "an epoch", "times the table's", "predicted", *HEAD[-2:])
    title = f"{len(taken[table])} epochs of {lengths.count:,} examples, load {os.getloadavg()[0]:.1f}"
    show(title, head, map(line, rows))


def trained(settings: ProbeSettings, values: FloatArray, epochs: dict[str, list[list[int]]]) -> dict[str, float]:
    """CPU time of each epoch's steps, in this process and on one thread."""
    torch.set_num_threads(1)
    workload = load_workload(settings.workload, settings.options)
    workload.setup(torch.device("cpu"))
    taken, shapes = dict.fromkeys(epochs, 0.0), {name: shapes_of(values, batches) for name, batches in epochs.items()}
    for of_sampler in shapes.values():  # the warm-up
        workload.step(workload.make_batch(of_sampler[0]))
    for name, shape in interleaved(shapes):
        batch = workload.make_batch(shape)
        before = time.thread_time()
        workload.step(batch)
        taken[name] += time.thread_time() - before
    return taken


def trained_lengths(options: argparse.Namespace) -> Lengths:
    """Every eighth length of LibriSpeech in frames of 100 ms, or those of the manifest."""
    if options.manifest is None:
        frames = np.sort(librispeech_samples() * (10 / 16000))[::-1]
        return Lengths.of(np.ceil(frames[:: 80 if options.quick else 8]), unit="frames")
    found = load_lengths([options.manifest], ReadOptions())
    return Lengths.of(found.values[::10]) if options.quick else found


PARTS = {"tables": tables, "frontier": frontier, "speed": speed, "train": training}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the parts asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--quick", action="store_true", help="little data, once")
    parser.add_argument("--data", type=Path, help="folder of more data sets, as in OTHERS")
    parser.add_argument("--manifest", help="of the training; default: every eighth length of LibriSpeech")
    parser.add_argument("--workload", help="of the training; default: the example's, narrower")
    parser.add_argument("--memory", default="448MiB")
    parser.add_argument("--run", type=Path, help="folder of the training's probe, which is made or used again")
    parser.add_argument("--repeats", type=int, default=5, help="epochs that are trained with each")
    options = parser.parse_args(arguments)
    for part in options.parts or PARTS:
        PARTS[part](options)


if __name__ == "__main__":
    main()
