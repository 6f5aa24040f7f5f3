"""Whether recommended tables fit in shuffled training on a CUDA device: `python tests/benchmarks/cuda_truth.py`.

`tune` probes, sweeps and proves. Then the truth: whole epochs of its sampler (at most `--steps` steps), each with
another seed and in a fresh process under the limit that was probed. A row for each case: trials and OOMs a length of
the probe, tables that the proof ran, then processes that ran out of memory, steps, and the highest reserved share of
the limit. `--smallest` is one case that takes a few minutes, for CI. With `--brute-force`, the largest batch of the
longest example by trying every size from the answer upwards, and the answer's share of it.

Runs on a GPU, or on the emulated device, whose memory is torch's own allocator's: the row then says `emulated`. Exits
with 1 where a proven table runs out of memory, or where one is not proven.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import batchtune
from batchtune.exports.run_configs import read_sampler_yaml
from batchtune.lengths import Lengths
from batchtune.probe.supervisor import Supervisor
from batchtune.results import BatchShape, Probe, Sweep
from batchtune.units import format_percent, parse_size
from batchtune.verify.plan import VerifyPlan, VerifySettings, subject_of

FIRST_SEED = 1000  # none that the proof has run
EXPANDABLE = "expandable_segments:True"


def made_lengths(count: int, workload: str) -> Lengths:
    """Tokens of 6 to 512 with a long tail; for a conformer a 16th of them, as seconds."""
    drawn = np.exp(np.random.default_rng(1).normal(4.9, 0.8, count))
    tokens = drawn.round().clip(6, 512)
    if "conformer" in workload:
        return Lengths.of(tokens / 16, unit="s")
    return Lengths.of(tokens, unit="tokens")


@contextlib.contextmanager
def allocator(name: str) -> Iterator[None]:
    """Set the allocator in the environment, as users do."""
    before = os.environ.pop("PYTORCH_ALLOC_CONF", None)
    if name == "expandable":
        os.environ["PYTORCH_ALLOC_CONF"] = EXPANDABLE
    try:
        yield
    finally:
        os.environ.pop("PYTORCH_ALLOC_CONF", None)
        if before is not None:
            os.environ["PYTORCH_ALLOC_CONF"] = before


def epochs_that_fail(
    lengths: Lengths, probe: Probe, folder: Path, seeds: int, most: int
) -> tuple[int, int, int]:
    """How many processes ran out of memory, the steps of all, and the most bytes reserved."""
    config = read_sampler_yaml(folder / "sampler.yaml")
    subject = subject_of(lengths, probe, {}, folder)
    failed, steps, reserved = 0, 0, 0
    with Supervisor(subject.settings, subject.limit_bytes, lengths=lengths) as stepper:
        for seed in range(FIRST_SEED, FIRST_SEED + seeds):
            settings = VerifySettings(seed=seed)
            plan = VerifyPlan(lengths=lengths, config=config, settings=settings)
            stepper.start()
            epoch = min(most, len(plan.first_epoch))
            for batch in itertools.islice(plan.shuffled_batches(), epoch):
                trial = stepper.step(batch.shape).trial
                steps += 1
                reserved = max(reserved, trial.reserved_bytes or 0)
                if trial.outcome != "ok":
                    failed += 1
                    break
    return failed, steps, reserved


def share_of_brute_force(lengths: Lengths, probe: Probe, folder: Path) -> float:
    """The largest batch of the longest example / the largest that passes alone, up to three failures in a row."""
    point = probe.frontier[-1]
    subject = subject_of(lengths, probe, {}, folder)
    largest, failed, size = 0, 0, int(point.batch_size * 0.9)
    with Supervisor(subject.settings, subject.limit_bytes, lengths=lengths) as measurer:
        while failed < 3:
            ran = measurer.measure(BatchShape(size, point.length), 0)
            failed += ran.trial.outcome != "ok"
            if ran.trial.outcome == "ok":
                largest, failed = size, 0
            size += 1
    return point.batch_size / largest


def run_case(arguments: argparse.Namespace, name: str, folder: Path) -> bool:
    """Tune, run the truth, and print its row; whether the table is proven and never ran out of memory."""
    lengths = made_lengths(arguments.examples, arguments.workload)
    given: dict[str, Any] = {"memory_bytes": None}
    if arguments.memory is not None:
        given["memory_bytes"] = parse_size(arguments.memory)
    if arguments.minutes is not None:
        given["minutes"] = arguments.minutes
    tuned = batchtune.tune(
        arguments.workload,
        lengths,
        run=folder,
        device="cuda",
        options={"size": arguments.size, "dtype": arguments.dtype},
        **given,
    )
    assert isinstance(tuned.probe, Probe) and isinstance(tuned.sweep, Sweep)
    probe, proof = tuned.probe, tuned.sweep.proof
    failed, steps, reserved = epochs_that_fail(
        lengths, probe, folder, arguments.seeds, arguments.steps
    )
    measured = len({trial.length for trial in probe.trials})
    ooms = sum(trial.outcome == "oom" for trial in probe.trials)
    cells = {
        "device": "emulated" if "emulated" in probe.device.name.lower() else "real",
        "model": f"{arguments.workload} {arguments.size} {arguments.dtype}",
        "memory": f"{probe.device.total_bytes / 2**30:.0f} GiB",
        "allocator": name,
        "trials a length": f"{len(probe.trials) / measured:.1f}",
        "OOMs a length": f"{ooms / measured:.2f}",
        "tables": str(None if proof is None else proof.tables),
        "proven": str(proof is not None and proof.holds),
        "OOMs": f"{failed} of {arguments.seeds} processes, {steps} steps",
        "reserved": format_percent(reserved / probe.device.limit_bytes),
    }
    if arguments.brute_force:
        share = share_of_brute_force(lengths, probe, folder)
        cells["of brute force"] = format_percent(share)
    print("; ".join(f"{column} {cell}" for column, cell in cells.items()), flush=True)
    return failed == 0 and proof is not None and proof.holds


def main() -> int:
    """Run the cases of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", default="builtin:transformer-lm")
    parser.add_argument("--size", default="base")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--memory", help="a cap, such as 2GiB (default: the device's)")
    parser.add_argument("--examples", type=int, default=60_000)
    parser.add_argument(
        "--allocator",
        choices=["native", "expandable"],
        nargs="+",
        default=["native", "expandable"],
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--brute-force", action="store_true")
    parser.add_argument("--smallest", action="store_true")
    arguments = parser.parse_args()
    if arguments.smallest:
        arguments.size, arguments.seeds, arguments.steps = "tiny", 2, 100
        arguments.examples, arguments.allocator = 20_000, ["native"]
    holds = True
    for name in arguments.allocator:
        with tempfile.TemporaryDirectory() as folder, allocator(name):
            holds &= run_case(arguments, name, Path(folder))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
