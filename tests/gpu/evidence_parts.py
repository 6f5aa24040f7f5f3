"""The parts of the evidence harness, in order, and those that run commands as a user does."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gpu.evidence_bench import QUICK_EXAMPLES, ROOT, Bench
from gpu.evidence_calibration import calibration
from gpu.evidence_epoch import epoch
from gpu.evidence_record import Missing
from gpu.evidence_speech import speech, speech_options, whole
from gpu.evidence_tests import run_tests

from batchtune.lengths import Lengths
from batchtune.results import (
    SWEEP_FILE,
    VERIFY_FILE,
    Sweep,
    Verification,
    read_result,
)

PROOF_STEPS = 500
QUICK_PROOF_STEPS = 10
QUICK_PROOF_FRACTION = 0.46
# So little that a step is short.
PROOF_MEMORY = "2GiB"
# Of the time that is left for a table's steps, to end inside it.
STEPS_SHARE = 0.8
RECIPES = ("ctc", "tts")


def proof(bench: Bench) -> None:
    """Tunes speech and a language model with both of torch's allocators, and runs shuffled steps of each table."""
    allocators = ["native", "expandable"]
    if bench.device.startswith("cpu"):
        allocators = ["auto"]
    cases = list(itertools.product(_models(bench).items(), allocators))
    for number, ((model, (manifest, flags)), allocator) in enumerate(cases):
        name = f"{model} {allocator}"
        folder = bench.out / f"proof-{model}-{allocator}"
        source = [*manifest, "--run", str(folder)]
        if not bench.record.is_done(f"tune {name}"):
            few = [] if bench.quick else ["--num-lengths", "6", "--max-lengths", "8"]
            chosen = [*flags, *few, "--allocator", allocator]
            bench.batchtune("tune", *source, *chosen, "--json")
            bench.record.done(f"tune {name}")
        if not bench.record.is_done(f"steps {name}"):
            share = bench.seconds_left / (len(cases) - number)
            _shuffled_steps(bench, source, folder, name, share)


def _models(bench: Bench) -> dict[str, tuple[list[str], list[str]]]:
    """The lengths of each model, and its workload and memory, for a command."""
    speech = bench.lengths()
    tokens = made_tokens()
    language = {"size": "small", "dtype": "bf16"}
    memory = ["--memory", PROOF_MEMORY]
    if bench.quick:
        tokens = Lengths.of(2.0 + np.arange(QUICK_EXAMPLES) % 5, unit="tokens")
        language = {"size": "tiny"}
        memory = [f"--memory-fraction={QUICK_PROOF_FRACTION}"]
    return {
        "speech": (
            bench.manifest_of(speech, "speech"),
            bench.probe_flags(
                "conformer-ctc", **speech_options(bench, speech, size="base")
            )
            + memory,
        ),
        "LM": (
            bench.manifest_of(tokens, "tokens"),
            bench.probe_flags("transformer-lm", **language) + memory,
        ),
    }


def made_tokens(count: int = 20_000) -> Lengths:
    """Tokens of 6 to 512 with a long tail."""
    drawn = np.exp(np.random.default_rng(1).normal(4.9, 0.8, count))
    return Lengths.of(drawn.round().clip(6, 512), unit="tokens")


def _shuffled_steps(
    bench: Bench, source: list[str], folder: Path, name: str, seconds: float
) -> None:
    """Verifies one table for as many of the wanted steps as there is time for."""
    wanted = QUICK_PROOF_STEPS if bench.quick else PROOF_STEPS
    swept = read_result(folder / SWEEP_FILE, Sweep)
    row = swept.recommended_row
    if row is None or row.estimated_epoch_seconds is None or swept.proof is None:
        bench.record.miss(
            f"{name}: no table is recommended, or its steps' time is not known"
        )
        return
    each = row.estimated_epoch_seconds / row.batches
    steps = min(wanted, int(STEPS_SHARE * seconds / each))
    if steps < wanted:
        bench.record.miss(f"{name}: time for {max(0, steps)} of {wanted} steps")
    if steps < 1:
        return
    try:
        bench.batchtune("verify", *source, "--steps", str(steps), seconds=seconds)
    except Missing as missing:
        bench.record.miss(f"{name}: {missing}")
        return
    done = read_result(folder / VERIFY_FILE, Verification)
    held = done.reserved_bytes or done.peak_bytes or 0
    limit = done.device.limit_bytes
    ooms = sum(failure.outcome == "oom" for failure in done.failures)
    retries = "not known" if done.alloc_retries is None else done.alloc_retries
    bench.record.figure(
        f"{name}: tables run to prove one; its shuffled steps; out of memory; allocator retries; most held, of the "
        "limit",
        f"{swept.proof.tables}, {'proven' if swept.proof.holds else 'not proven'}; {done.steps}; {ooms}; {retries}; "
        f"{held / limit:.1%}",
        tables=swept.proof.tables,
        proven=swept.proof.holds,
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
        bench.record.done(f"steps {name}")


def recipes(bench: Bench) -> None:
    """Times the README's recipes whose lengths are in the checkout (`tests/benchmarks/recipes.py`)."""
    if bench.device.startswith("cpu"):
        raise Missing("the recipes are timed on a GPU here")
    for number, name in enumerate(RECIPES):
        if bench.record.is_done(name):
            continue
        share = bench.seconds_left / (len(RECIPES) - number)
        out = bench.out / "recipes"
        command = [
            *(sys.executable, str(ROOT / "tests" / "benchmarks" / "recipes.py"), name),
            *("--device", bench.device, "--minutes", f"{STEPS_SHARE * share / 60:.2f}"),
            *("--out", str(out), "--work", str(bench.out / "recipes-work")),
        ]
        bench.run([*command, "--quick"] if bench.quick else command, {0, 1}, share)
        path = out / f"{name}.json"
        if not path.exists():
            bench.record.miss(f"{name}: no round of it was complete")
            continue
        found = json.loads(path.read_text())
        bench.record.data[name] = found
        rounds = found["rounds"]
        told = {}
        for contender in found["contenders"]:
            trained = [each[contender] for each in rounds if contender in each]
            seconds = statistics.fmean(one["seconds"] for one in trained)
            told[contender] = f"{seconds:.2f}"
            if any(one["oom"] for one in trained):
                told[contender] = "out of memory"
        bench.record.figure(
            f"recipe {name}: seconds an epoch, {len(rounds)} rounds",
            "; ".join(f"{contender} {time}" for contender, time in told.items()),
            rounds=len(rounds),
            contenders=told,
        )
        bench.record.done(name)


@dataclass(frozen=True)
class Part:
    """What one part measures, and the minutes that it is expected to take, and may, in all calls together."""

    run: Callable[[Bench], None]
    minutes: float
    expected_minutes: float | None = None


def part_of_tests(name: str, minutes: float) -> Part:
    """The part that runs `test_NAME_on_cuda.py`."""
    file = ROOT / "tests" / "gpu" / f"test_{name}_on_cuda.py"
    return Part(lambda bench: run_tests(bench, file), minutes)


# The most telling first: the first three fit into the 15 minutes for which a machine is lent.
PARTS = {
    "calibration": Part(calibration, 3.5, 2.0),
    "proof": Part(proof, 6.5, 5.0),
    "recipes": Part(recipes, 5.0, 4.5),
    "tests-probe": part_of_tests("probe", 3.0),
    "speech": Part(speech, 4.5),
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
