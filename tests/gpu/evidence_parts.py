"""The parts of the evidence harness, in order, and those that run commands as a user does."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from benchmarks.frontier import supervise
from gpu.evidence_bench import ROOT, Bench
from gpu.evidence_epoch import epoch
from gpu.evidence_record import Missing
from gpu.evidence_speech import SEARCHED, speech, speech_options, whole
from gpu.evidence_tests import run_tests

from batchtune.exports.run_configs import read_sampler_yaml
from batchtune.probe.settings import ProbeSettings
from batchtune.results import (
    PROBE_FILE,
    SAMPLER_FILE,
    SWEEP_FILE,
    VERIFY_FILE,
    Probe,
    Row,
    Sweep,
    Verification,
    read_result,
)
from batchtune.shapes import BatchShape

SOAK_STEPS, SOAK_FRACTION = 300, 0.95
QUICK_SOAK_STEPS, QUICK_SOAK_FRACTION = 10, 0.46
# Of the time that a soak has left for its steps, to end inside it.
SOAK_SHARE = 0.8
EXPANDABLE = "expandable_segments:True"


def soak(bench: Bench) -> None:
    """Runs shuffled steps of a table close to the limit, with each setting of the allocator."""
    lengths = bench.lengths()
    manifest = bench.manifest_of(lengths)
    allocators = [""] if bench.device.startswith("cpu") else ["", EXPANDABLE]
    fraction = QUICK_SOAK_FRACTION if bench.quick else SOAK_FRACTION
    run = bench.out / "soak-run"
    if not bench.record.is_done("tune"):
        workload = bench.probe_flags("conformer-ctc", **speech_options(bench, lengths, size="base"))
        few = [] if bench.quick else ["--num-lengths", "6", "--max-lengths", "8"]
        flags = [*workload, *few, "--memory-fraction", f"{fraction:g}", "--run", str(run), "--json"]
        bench.batchtune("tune", *manifest, *flags)
        bench.record.done("tune")
    for number, allocator in enumerate(allocators):
        if not bench.record.is_done(f"steps {allocator}"):
            _soak(bench, manifest, run, fraction, allocator, bench.seconds_left / (len(allocators) - number))


def _soak(bench: Bench, manifest: list[str], run: Path, fraction: float, allocator: str, seconds: float) -> None:
    """Verifies one table for as many of the wanted steps as there is time for."""
    wanted = QUICK_SOAK_STEPS if bench.quick else SOAK_STEPS
    what = f"--memory-fraction {fraction:g}" + (f", {allocator}" if allocator else "")
    row = read_result(run / SWEEP_FILE, Sweep).recommended_row
    if row is None or row.estimated_epoch_seconds is None:
        bench.record.miss(f"{what}: no table is recommended, or its steps' time is not known")
        return
    steps = min(wanted, int(SOAK_SHARE * seconds * row.batches / row.estimated_epoch_seconds))
    if steps < wanted:
        bench.record.miss(f"{what}: time for {max(0, steps)} of {wanted} steps")
    if steps < 1:
        return
    environment = {"PYTORCH_ALLOC_CONF": allocator, "PYTORCH_CUDA_ALLOC_CONF": allocator} if allocator else {}
    try:
        bench.batchtune("verify", *manifest, "--run", str(run), "--steps", str(steps), seconds=seconds, **environment)
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


def language(bench: Bench) -> None:
    """Tunes a transformer on two lengths, and runs the table over both, bucket by bucket."""
    lengths = bench.lengths(targets=True)
    manifest = bench.manifest_of(lengths)
    size = {"size": "tiny", "dtype": "fp32"} if bench.quick else {"size": "large", "dtype": "bf16"}
    choices = (True,) if bench.quick else (False, True)
    for index, checkpoint in enumerate(choices):
        what = f"a transformer {'with' if checkpoint else 'without'} checkpointing"
        if bench.record.is_done(what):
            continue
        run = bench.out / f"language-{'checkpointing' if checkpoint else 'plain'}"
        end = time.monotonic() + bench.seconds_left / (len(choices) - index)
        few = [] if bench.quick else ["--num-lengths", "6", "--max-lengths", "12"]
        flags = bench.probe_flags("transformer-lm", **size, checkpoint=str(checkpoint).lower())
        try:
            bench.batchtune("tune", *manifest, *flags, *few, "--run", str(run), seconds=end - time.monotonic())
        except Missing as missing:
            bench.record.miss(f"{what}: {missing}")
            continue
        found, swept = read_result(run / PROBE_FILE, Probe), read_result(run / SWEEP_FILE, Sweep)
        points, pairs = len(found.frontier), len(found.joint_frontier)
        trials = [trial for trial in found.trials if not trial.confirmation]
        ooms = sum(trial.outcome == "oom" for trial in trials)
        seconds = sum(trial.elapsed_seconds for trial in trials)
        bench.record.figure(
            f"{what}: lengths, and pairs with shorter targets, of its frontier; {SEARCHED}",
            f"{points}, {pairs}; {len(trials)}, {ooms}, {seconds:.0f} s",
            lengths=points,
            pairs=pairs,
            trials=len(trials),
            ooms=ooms,
            wall_seconds=seconds,
        )
        if _two_dimensional(bench, what, found, swept, end):
            bench.record.done(what)


def _two_dimensional(bench: Bench, what: str, found: Probe, swept: Sweep, end: float) -> bool:
    """Runs the largest batch of every bucket of the best table over both lengths, there and back; whether all ran."""
    if not swept.two_dimensional:
        bench.record.miss(f"{what}: no table over both lengths")
        return False
    best = min(swept.two_dimensional, key=lambda row: row.estimated_epoch_seconds or row.batches)
    shapes = [BatchShape(size, *pair) for size, pair in zip(best.batch_sizes, best.buckets, strict=True)]
    settings = ProbeSettings(
        workload=found.workload.spec,
        options=found.workload.options,
        device=bench.device,
        memory_bytes=bench.memory_bytes,
    )
    outcomes: list[str] = []
    with supervise(settings, found.device.limit_bytes) as supervisor:
        supervisor.start()
        for shape in [*shapes, *reversed(shapes)]:
            if time.monotonic() > end:
                break
            outcomes.append(supervisor.step(shape).trial.outcome)
    passed = outcomes.count("ok")
    if len(outcomes) < 2 * len(shapes):
        bench.record.miss(f"{what}: {len(outcomes)} of {2 * len(shapes)} batches of the table over both lengths ran")
    bench.record.figure(
        f"{what}: batches of its table over both lengths, of a table over one; largest batches run, passed",
        f"{best.batches}, {best.one_dimensional_batches}; {len(outcomes)}, {passed}",
        batches=best.batches,
        one_dimensional_batches=best.one_dimensional_batches,
        estimated_epoch_seconds=best.estimated_epoch_seconds,
        one_dimensional_epoch_seconds=best.one_dimensional_epoch_seconds,
        run=len(outcomes),
        passed=passed,
        outcomes=outcomes,
    )
    return len(outcomes) == 2 * len(shapes)


def verify(bench: Bench) -> None:
    """Runs `tune --verify` and `report` as a user does; the run folder is kept as an example."""
    run = bench.out / "verify-run"
    if not bench.record.is_done("tune"):
        _tune_and_verify(bench, run)
        bench.record.done("tune")
    for ending in ("html", "md"):
        bench.batchtune("report", str(run), "-o", str(bench.out / f"verify.{ending}"))


def _tune_and_verify(bench: Bench, run: Path) -> None:
    lengths = bench.lengths()
    flags = bench.probe_flags("conformer-ctc", **speech_options(bench, lengths, size="base"))
    few = ["--verify-steps", "10"]
    if not bench.quick:
        few = ["--num-lengths", "6", "--max-lengths", "12", "--verify-steps", "100"]
    started = time.monotonic()
    bench.batchtune("tune", *bench.manifest_of(lengths), *flags, *few, "--run", str(run), "--verify")
    seconds = time.monotonic() - started
    done, row = read_result(run / VERIFY_FILE, Verification), read_result(run / SWEEP_FILE, Sweep).recommended_row
    assert row is not None  # else there is nothing to verify
    bench.record.figure(
        "`tune --verify`: the recommended table; wall time",
        f"{_named(row)}; {seconds:.0f} s",
        wall_seconds=seconds,
        table=msgspec.to_builtins(read_sampler_yaml(run / SAMPLER_FILE)),
    )
    ratio = "not known" if done.time_ratio is None else f"{done.time_ratio:.2f} times"
    bench.record.figure(
        f"{done.steps} shuffled steps of that table: failures; an epoch measured against estimated; whether it holds",
        f"{len(done.failures)}; {ratio}; {'yes' if done.holds else 'no: ' + '; '.join(done.reasons)}",
        steps=done.steps,
        failures=len(done.failures),
        time_ratio=done.time_ratio,
        holds=done.holds,
        reasons=done.reasons,
        warnings=done.warnings,
    )


def _named(row: Row) -> str:
    return f"{row.strategy}, {row.num_buckets} buckets, {row.batches} batches, {row.padding_ratio:.1%} padding"


@dataclass(frozen=True)
class Part:
    """What one part measures, and the minutes that it may take, in all calls together."""

    run: Callable[[Bench], None]
    minutes: float


def part_of_tests(name: str, minutes: float) -> Part:
    """The part that runs `test_NAME_on_cuda.py`."""
    file = ROOT / "tests" / "gpu" / f"test_{name}_on_cuda.py"
    return Part(lambda bench: run_tests(bench, file), minutes)


# The most telling first. All minutes are 25.
PARTS = {
    "tests-probe": part_of_tests("probe", 3.0),
    "speech": Part(speech, 4.5),
    "soak": Part(soak, 3.0),
    "epoch": Part(epoch, 2.0),
    "tests-truth": part_of_tests("truth", 4.0),
    "whole": Part(whole, 2.5),
    "tests-surroundings": part_of_tests("surroundings", 2.0),
    "verify": Part(verify, 1.5),
    "language": Part(language, 2.0),
    "tests-loaders": part_of_tests("loaders", 0.25),
    "tests-dali": part_of_tests("dali", 0.25),
}
