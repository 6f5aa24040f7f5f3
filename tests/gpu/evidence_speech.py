"""The parts of the evidence harness that find a conformer's frontier, under a cap and on the whole device."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.frontier import PEERS, OutOfTime, Searched, peer, probe
from gpu.evidence_bench import QUICK_FRACTION, QUICK_LENGTHS, Bench
from gpu.evidence_record import Missing

from batchtune.lengths import Lengths
from batchtune.probe.settings import ProbeSettings
from batchtune.results import (
    PROBE_FILE,
    Probe,
    read_result,
)
from batchtune.units import format_size

SPEECH_UNITS = ("s", "ms", "samples", "frames")
# The searches of others take several times as long: they get every fourth length, the longest among them.
PEERS_EVERY = 4


def speech_settings(bench: Bench, lengths: Lengths) -> ProbeSettings:
    """The built-in conformer; a tiny one with --quick."""
    settings = ProbeSettings(
        workload="builtin:conformer-ctc",
        options=speech_options(bench, lengths),
        device=bench.device,
        memory_bytes=bench.memory_bytes,
    )
    few = {
        "num_lengths": QUICK_LENGTHS,
        "max_lengths": QUICK_LENGTHS,
        "memory_fraction": QUICK_FRACTION,
    }
    return msgspec.structs.replace(settings, **few) if bench.quick else settings


def speech_options(
    bench: Bench, lengths: Lengths, size: str = "large"
) -> dict[str, Any]:
    """Of the built-in conformer, in the lengths' unit."""
    if lengths.unit not in SPEECH_UNITS:
        raise Missing(
            f"lengths of utterances are needed, in {', '.join(SPEECH_UNITS)}; these are in {lengths.unit}"
        )
    chosen = (
        {"size": "tiny", "dtype": "fp32"}
        if bench.quick
        else {"size": size, "dtype": "bf16"}
    )
    return {**chosen, "unit": lengths.unit}


def speech(bench: Bench) -> None:
    """Finds the frontier of a conformer, and a part of it by the searches of others."""
    lengths = bench.lengths()
    settings = speech_settings(bench, lengths)
    folder = bench.out / "speech-run"
    if not bench.record.is_done("probe"):
        ours, found, confirming = in_time(lengths, settings, folder, bench)
        bench.record.data["searched"] = asdict(ours)
        _probe_figures(bench, ours, found, confirming)
        bench.record.done("probe")
    searched = bench.record.data["searched"]
    known = {float(length): size for length, size in searched.pop("found").items()}
    ours = Searched(**searched, found=known)
    bench.record.data["searched"] = asdict(ours)
    points = read_result(folder / PROBE_FILE, Probe).frontier[::-1][::PEERS_EVERY][::-1]
    for index, (name, search) in enumerate(PEERS.items()):
        if bench.record.is_done(name):
            continue
        share = bench.seconds_left / (len(PEERS) - index)
        other = peer(name, search, lengths, points, settings, time.monotonic() + share)
        _peer_figure(bench, other, ours, len(points))
        if len(other.found) == len(points):
            bench.record.done(name)


def whole(bench: Bench) -> None:
    """Finds the same conformer's frontier on the whole device, at few lengths."""
    lengths = bench.lengths()
    settings = speech_settings(bench, lengths)
    if not bench.device.startswith("cpu"):
        settings = msgspec.structs.replace(
            settings, memory_bytes=None, num_lengths=4, max_lengths=4
        )
    _probe_figures(bench, *in_time(lengths, settings, bench.out / "whole-run", bench))


def in_time(
    lengths: Lengths, settings: ProbeSettings, folder: Path, bench: Bench
) -> tuple[Searched, Probe, float]:
    """A probe that goes on where an earlier call was stopped, until the deadline."""
    try:
        return probe(lengths, settings, folder, bench.deadline)
    except OutOfTime:
        raise Missing(
            f"the probe ran out of time; its trials are in {folder}"
        ) from None


def _probe_figures(
    bench: Bench, ours: Searched, found: Probe, confirming: float
) -> None:
    limit = format_size(found.device.limit_bytes)
    told, seen = _searched(ours)
    bench.record.figure(
        f"a frontier of {len(ours.found)} lengths under {limit}: {SEARCHED}",
        told,
        **seen,
    )
    confirmation = found.confirmation
    assert confirmation is not None
    bench.record.figure(
        "confirming that frontier in turns: steps, given up, wall time",
        f"{confirmation.steps}, {confirmation.given_up}, {confirming:.0f} s",
        steps=confirmation.steps,
        given_up=confirmation.given_up,
        wall_seconds=confirming,
        time_ratio=confirmation.time_ratio,
    )


SEARCHED = "trials, of them out of memory, wall time"


def _searched(one: Searched) -> tuple[str, dict[str, Any]]:
    shown = f"{one.trials}, {one.ooms}, {one.seconds:.0f} s"
    return shown, {
        "trials": one.trials,
        "ooms": one.ooms,
        "wall_seconds": one.seconds,
        "lengths": len(one.found),
    }


def _peer_figure(bench: Bench, other: Searched, ours: Searched, asked: int) -> None:
    if len(other.found) < asked:
        bench.record.miss(
            f"“{other.name}” came to {len(other.found)} of {asked} lengths"
        )
    if not other.found:
        return
    # In proportion where it did not come to all lengths.
    each = len(other.found) / len(ours.found)
    trials, seconds = (
        other.trials / ours.trials / each,
        other.seconds / ours.seconds / each,
    )
    sizes = [other.found[length] / ours.found[length] for length in other.found]
    told, seen = _searched(other)
    bench.record.figure(
        f"{len(other.found)} of its lengths by “{other.name}”: {SEARCHED}; batch sizes against batchtune's",
        f"{told}: {trials:.1f} times the trials, {seconds:.1f} times the time, a length; "
        f"{min(sizes):.3f} to {max(sizes):.3f} times",
        **seen,
        times_the_trials=trials,
        times_the_time=seconds,
        batch_sizes=other.found,
        batchtune_batch_sizes=ours.found,
    )
