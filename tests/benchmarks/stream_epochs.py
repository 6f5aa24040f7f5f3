"""Epochs of a stream, batched in four ways; see `streams.py`."""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.pools import (
    EXAMPLE,
    EXAMPLES_OF_A_BATCH,
    MODEL,
    OVERHEAD,
    affine,
    data_sets,
    sampler_of,
    show,
    trained,
    trained_lengths,
)
from epochs.conftest import load_speechbrain

from batchtune import BucketedStream
from batchtune.epochs.measured_costs import Costs, costs_of
from batchtune.lengths import FloatArray, Lengths, StreamLengths
from batchtune.probe.probing import run_probe
from batchtune.probe.settings import ProbeSettings
from batchtune.results import Row, StreamRow
from batchtune.streams.current import CurrentStream
from batchtune.streams.pivot import PivotSettings
from batchtune.streams.recommend_stream import recommend_stream
from batchtune.streams.stream_sweep import StreamSettings, sweep_stream
from batchtune.units import parse_size

BUFFER = 1024
TUTORIAL = 45 / 60  # target_batch_numel / max_batch_numel
TUTORIAL_SECONDS = 60
TUTORIAL_NAME = "SpeechBrain, as in its tutorial"
AnyRow = StreamRow | Row


def compare(lengths: Lengths, max_batch_length: float, settings: StreamSettings, costs: Costs) -> dict[str, AnyRow]:
    """Sweeps a stream of the lengths in random order."""
    values = lengths.values[np.random.default_rng(0).permutation(lengths.count)]
    stream = StreamLengths(lengths=lengths, values=values, targets=None, shards=[], repeated_ids=None)
    tutorial = PivotSettings(
        target_batch_numel=TUTORIAL * max_batch_length, max_batch_numel=max_batch_length, buffersize=BUFFER
    )
    current = CurrentStream(batching=tutorial, settings={})
    swept = sweep_stream(stream, max_batch_length, replace(settings, current=current), costs)
    own = [row for row in swept.rows if not row.by_speechbrain]
    ours = recommend_stream(own, swept.map_style).row
    assert ours is not None and swept.recommended_speechbrain is not None, swept.reason
    assert swept.current is not None and swept.map_style is not None
    return {
        TUTORIAL_NAME: swept.current,
        "SpeechBrain, tuned": swept.rows[swept.recommended_speechbrain],
        f"BucketedStream: {own[ours].algorithm}": own[ours],
        "table, random access": swept.map_style,
    }


def seconds(row: AnyRow) -> float:
    return row.estimated_epoch_seconds or 0.0


def sweeps(options: argparse.Namespace) -> None:
    """Simulates epochs of real lengths."""
    settings = StreamSettings(workers=2, buffer_sizes=(BUFFER,))
    for name, lengths in data_sets(options.data, quick=options.quick):
        most = max(EXAMPLES_OF_A_BATCH * lengths.total / lengths.count, lengths.longest)
        for limit in (TUTORIAL_SECONDS, most) if name.startswith("LibriSpeech-") else (most,):
            # The tutorial's row is the same in both.
            rows = {
                name if name == TUTORIAL_NAME else f"{name}, {by}": row
                for by, costs in (("by batches", Costs()), ("by time", affine(limit)))
                for name, row in compare(lengths, limit, settings, costs).items()
            }
            times = {way: row.padded_length + OVERHEAD * limit * row.batches for way, row in rows.items()}
            first, *_ = times.values()
            lines = (
                (
                    way,
                    f"{row.batches:,}",
                    f"{row.padding_ratio:.1%}",
                    f"{times[way] / first:.3f}",
                    f"{row.mates_again or 0:.3f}",
                )
                for way, row in rows.items()
            )
            title = f"{name}: {lengths.count:,} examples, batches of at most {limit:,.6g} {lengths.unit or ''}"
            show(title, ("", "batches", "padding", "time", "mates again"), lines)


def training(options: argparse.Namespace) -> None:
    """Trains epochs on the CPU."""
    lengths = trained_lengths(options)
    settings = ProbeSettings(
        workload=options.workload or EXAMPLE,
        options={} if options.workload else MODEL,
        device="cpu",
        memory_bytes=parse_size(options.memory),
    )
    with tempfile.TemporaryDirectory() as folder:
        probe = run_probe(lengths, settings, options.run or Path(folder))
    limit = probe.max_batch_length
    costs = replace(costs_of(probe), step_seconds=affine(limit).step_seconds)
    stream = StreamSettings(workers=1, buffer_sizes=(BUFFER,), shard_size=100)
    rows = compare(lengths, limit, stream, costs)
    values = lengths.values[np.random.default_rng(0).permutation(lengths.count)]
    taken: dict[str, list[float]] = {name: [] for name in rows}
    batches: dict[str, list[int]] = {name: [] for name in rows}
    padding: dict[str, list[float]] = {name: [] for name in rows}
    for number in range(1 if options.quick else options.repeats):
        order = np.random.default_rng(number).permutation(values.size).tolist()
        epochs = {name: epoch_of(row, values, order, number) for name, row in rows.items()}
        for name, took in trained(settings, values, epochs).items():
            taken[name].append(took)
            batches[name].append(len(epochs[name]))
            cells = sum(len(batch) * values[batch].max() for batch in epochs[name])
            padding[name].append(1 - values[np.concatenate(epochs[name])].sum() / cells)
        print(*(f"{name}: {each[-1]:.1f} s" for name, each in taken.items()), sep="; ", file=sys.stderr)
    tutorial, *_ = rows

    def line(name: str) -> tuple[str, ...]:
        row, first = rows[name], rows[tutorial]
        ratios = [own / theirs for own, theirs in zip(taken[name], taken[tutorial], strict=True)]
        return (
            name,
            f"{statistics.mean(batches[name]):.1f}",
            f"{statistics.mean(padding[name]):.1%}",
            f"{statistics.mean(taken[name]):.1f} s",
            f"{statistics.mean(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
            f"{row.batches:,}, {row.padding_ratio:.1%}, {seconds(row) / seconds(first):.3f}",
        )

    title = f"{len(taken[tutorial])} epochs of {lengths.count:,} examples in batches of at most {limit:,.6g} "
    title += f"{lengths.unit or ''}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}"
    show(title, ("", "batches", "padding", "an epoch", "times the tutorial's", "predicted"), map(line, rows))


def epoch_of(row: AnyRow, values: FloatArray, order: list[int], epoch: int) -> list[list[int]]:
    """The batches that a row's own code makes of a stream in this order."""
    if isinstance(row, Row):
        sampler = sampler_of(row, values)
        sampler.set_epoch(epoch)
        return list(sampler)
    if row.by_speechbrain:
        random.seed(epoch)
        names = ("target_batch_numel", "max_batch_numel", "max_batch_size", "max_padding_ratio")
        made: Any = load_speechbrain()[3].dynamic_bucketed_batch(
            order,
            len_fn=values.__getitem__,
            buffersize=row.buffer_size,
            collate_fn=list,
            sampler_kwargs={name: getattr(row, name) for name in names},
        )
        return list(made)
    stream = BucketedStream(
        order,
        length_of=values.__getitem__,
        bucket_boundaries=row.boundaries,
        bucket_batch_sizes=row.batch_sizes,
        algorithm=row.algorithm,  # type: ignore[arg-type]  # it is not SpeechBrain's
        buffer_size=row.buffer_size,
        max_padding_ratio=row.max_padding_ratio,
        epoch=epoch,
    )
    return list(stream)
