"""Measures on a real GPU what batchtune promises: `python tests/gpu/evidence.py [PART...]`.

Each part is a command of this checkout, of a test file or a benchmark. What it prints is appended to `DIR/PART.txt`,
after the machine and the command; the last line says `complete`, or why not. Without names all parts run, the most
telling first: the first four fit into 15 minutes. A part may take its minutes, and a call ends after `--minutes` (7).
The next call leaves out what is complete; of tests it runs those that are left. So where a machine is lent for a few
minutes and starts bare, give DIR the files of earlier calls, and run the same command again until it ends with 0.

    calibration tests/benchmarks/calibration.py: each step's memory, next to the emulated device
    truth       tests/benchmarks/cuda_truth.py: whether tables fit in shuffled training, with both allocators
    speech      the same of a conformer
    recipes     tests/benchmarks/recipes.py: seconds an epoch of two recipes
    tests-NAME  tests/gpu/test_NAME_on_cuda.py
    frontier    tests/benchmarks/frontier.py: the frontier of a conformer of 104 million parameters under 16 GiB, by
                batchtune and by the searches of NeMo and Lightning, and the truth by brute force
    whole       the same as `truth` on the whole device

Needs what batchtune needs, and pytest, hypothesis and pytest-timeout. The checkout need not be installed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from batchtune.probe.doctor import examine

ROOT = Path(__file__).parents[2]

REPORT = "EVIDENCE_REPORT"
"""Environment variable: a file that gets a line of JSON after each test, see conftest.py."""
COMPLETE = "complete"
NOTHING_LEFT = 5  # pytest's exit code if it collected no test


@dataclass(frozen=True)
class Part:
    """What one part runs, after `python`, and the minutes that a call gives it."""

    command: tuple[str, ...]
    minutes: float


def tests(name, minutes):
    """The part that runs `test_NAME_on_cuda.py`."""
    options = ("-q", "-p", "no:cacheprovider")
    return Part(
        ("-m", "pytest", f"tests/gpu/test_{name}_on_cuda.py", *options), minutes
    )


def benchmark(name, *arguments, minutes):
    """The part that runs a benchmark."""
    return Part((f"tests/benchmarks/{name}.py", *arguments), minutes)


# The most telling first.
PARTS = {
    "calibration": benchmark("calibration", minutes=3.5),
    "truth": benchmark(
        "cuda_truth", "LM base bf16", "--memory", "16GiB", "--brute-force", minutes=3.5
    ),
    "speech": benchmark(
        *("cuda_truth", "conformer base bf16", "--memory", "16GiB"),
        minutes=3.0,
    ),
    "recipes": benchmark(
        "recipes", "ctc", "sft", "--device", "cuda", "--minutes", "4", minutes=4.5
    ),
    "tests-probe": tests("probe", 3.0),
    "frontier": benchmark("frontier", "gpu", minutes=4.5),
    "tests-truth": tests("truth", 3.0),
    "whole": benchmark(
        "cuda_truth",
        "LM base bf16",
        "--seeds",
        "1",
        "--allocator",
        "expandable",
        minutes=2.5,
    ),
    "tests-ranks": tests("ranks", 2.0),
    "tests-packed": tests("packed", 0.5),
    "tests-scripts": tests("scripts", 1.5),
    "tests-surroundings": tests("surroundings", 1.0),
    "tests-loaders": tests("loaders", 0.25),
    "tests-dali": tests("dali", 0.25),
}


def machine():
    """The GPUs of this machine, or its CPU."""
    found = examine(120)
    gpus = [gpu.name for gpu in found.gpus if gpu.device is not None]
    return ", ".join(gpus) or f"{found.cpu.name} (CPU)"


def run_part(name, folder, here, deadline):
    """Run a part that is not complete; whether it is now.

    Raises:
        SystemExit: The file is of another machine.
    """
    path = folder / f"{name}.txt"
    lines = path.read_text().splitlines() if path.exists() else [here]
    if lines[0] != here:
        raise SystemExit(f"{path} is of {lines[0]}; this is {here}: give another --out")
    if lines[-1] == COMPLETE:
        print(f"{name}: {COMPLETE}", flush=True)
        return True
    part = PARTS[name]
    print(f"{name}: at most {part.minutes:g} min", flush=True)
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    report = str((folder / f"{name}.jsonl").absolute())
    with path.open("a") as file:
        print(here, shlex.join(("python", *part.command)), sep="\n", file=file)
        file.flush()
        try:
            ended = subprocess.run(
                [sys.executable, *part.command],
                cwd=ROOT,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(paths),
                    REPORT: report,
                },
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=max(0.0, min(60 * part.minutes, deadline - time.monotonic())),
            )
        except subprocess.TimeoutExpired:
            outcome = "out of time"
        else:
            failed = ended.returncode not in (0, NOTHING_LEFT)
            outcome = f"exit code {ended.returncode}" if failed else COMPLETE
        print(outcome, file=file)
    print(f"{name}: {outcome}", flush=True)
    return outcome == COMPLETE


def main(argv):
    """Run the parts; 1 where one is not complete."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path("evidence"))
    parser.add_argument("--minutes", type=float, default=7.0)
    options = parser.parse_args(argv)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown part {min(unknown)!r}: choose from {', '.join(PARTS)}")
    deadline = time.monotonic() + 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    here = machine()
    complete = [
        run_part(part, options.out, here, deadline) for part in options.parts or PARTS
    ]
    print(f"{sum(complete)} of {len(complete)} parts are complete")
    return 0 if all(complete) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
