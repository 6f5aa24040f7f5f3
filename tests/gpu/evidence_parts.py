"""The parts of the evidence harness, in order, and those that run commands as a user does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpu.evidence_bench import ROOT, Bench
from gpu.evidence_epoch import epoch
from gpu.evidence_record import Missing
from gpu.evidence_speech import speech, speech_options, whole
from gpu.evidence_tests import run_tests

from batchtune.results import (
    SWEEP_FILE,
    VERIFY_FILE,
    Sweep,
    Verification,
    read_result,
)

SOAK_STEPS, SOAK_FRACTION = 300, 0.95
QUICK_SOAK_STEPS, QUICK_SOAK_FRACTION = 10, 0.46
# Of the time that a soak has left for its steps, to end inside it.
SOAK_SHARE = 0.8


def soak(bench: Bench) -> None:
    """Runs shuffled steps of a table close to the limit, probed and run with each of torch's allocators."""
    lengths = bench.lengths()
    manifest = bench.manifest_of(lengths)
    allocators = ["native", "expandable"]
    if bench.device.startswith("cpu"):
        allocators = ["auto"]
    fraction = QUICK_SOAK_FRACTION if bench.quick else SOAK_FRACTION
    for allocator in allocators:
        if bench.record.is_done(f"tune {allocator}"):
            continue
        workload = bench.probe_flags(
            "conformer-ctc", **speech_options(bench, lengths, size="base")
        )
        few = [] if bench.quick else ["--num-lengths", "6", "--max-lengths", "8"]
        flags = [
            *workload,
            *few,
            *("--memory-fraction", f"{fraction:g}"),
            *("--allocator", allocator),
            *("--run", str(bench.out / f"soak-{allocator}")),
            "--json",
        ]
        bench.batchtune("tune", *manifest, *flags)
        bench.record.done(f"tune {allocator}")
    for number, allocator in enumerate(allocators):
        if not bench.record.is_done(f"steps {allocator}"):
            _soak(
                bench,
                manifest,
                bench.out / f"soak-{allocator}",
                fraction,
                allocator,
                bench.seconds_left / (len(allocators) - number),
            )


def _soak(
    bench: Bench,
    manifest: list[str],
    run: Path,
    fraction: float,
    allocator: str,
    seconds: float,
) -> None:
    """Verifies one table for as many of the wanted steps as there is time for."""
    wanted = QUICK_SOAK_STEPS if bench.quick else SOAK_STEPS
    what = f"--memory-fraction {fraction:g}, --allocator {allocator}"
    row = read_result(run / SWEEP_FILE, Sweep).recommended_row
    if row is None or row.estimated_epoch_seconds is None:
        bench.record.miss(
            f"{what}: no table is recommended, or its steps' time is not known"
        )
        return
    steps = min(
        wanted, int(SOAK_SHARE * seconds * row.batches / row.estimated_epoch_seconds)
    )
    if steps < wanted:
        bench.record.miss(f"{what}: time for {max(0, steps)} of {wanted} steps")
    if steps < 1:
        return
    try:
        bench.batchtune(
            "verify",
            *manifest,
            "--run",
            str(run),
            "--steps",
            str(steps),
            seconds=seconds,
        )
    except Missing as missing:
        bench.record.miss(f"{what}: {missing}")
        return
    done = read_result(run / VERIFY_FILE, Verification)
    held, limit = done.reserved_bytes or done.peak_bytes or 0, done.device.limit_bytes
    ooms = sum(failure.outcome == "oom" for failure in done.failures)
    retries = "not known" if done.alloc_retries is None else done.alloc_retries
    bench.record.figure(
        f"shuffled steps with {what}: how many; out of memory; allocator retries; most memory held, of the limit",
        f"{done.steps}; {ooms}; {retries}; {held / limit:.1%}",
        steps=done.steps,
        ooms=ooms,
        failures=len(done.failures),
        alloc_retries=done.alloc_retries,
        peak_bytes=done.peak_bytes,
        reserved_bytes=done.reserved_bytes,
        limit_bytes=limit,
        holds=done.holds,
        time_ratio=done.time_ratio,
    )
    if steps == wanted:
        bench.record.done(f"steps {allocator}")


@dataclass(frozen=True)
class Part:
    """What one part measures, and the minutes that it may take, in all calls together."""

    run: Callable[[Bench], None]
    minutes: float


def part_of_tests(name: str, minutes: float) -> Part:
    """The part that runs `test_NAME_on_cuda.py`."""
    file = ROOT / "tests" / "gpu" / f"test_{name}_on_cuda.py"
    return Part(lambda bench: run_tests(bench, file), minutes)


# The most telling first; in all at most 25 minutes.
PARTS = {
    "tests-probe": part_of_tests("probe", 3.0),
    "speech": Part(speech, 4.5),
    "soak": Part(soak, 3.0),
    "epoch": Part(epoch, 2.0),
    "tests-truth": part_of_tests("truth", 3.0),
    "whole": Part(whole, 2.5),
    "tests-ranks": part_of_tests("ranks", 2.0),
    "tests-packed": part_of_tests("packed", 0.5),
    "tests-scripts": part_of_tests("scripts", 1.5),
    "tests-surroundings": part_of_tests("surroundings", 1.0),
    "tests-loaders": part_of_tests("loaders", 0.25),
    "tests-dali": part_of_tests("dali", 0.25),
}
