"""The part of the evidence harness that compares torch's allocator on a GPU with the emulated device's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from benchmarks.frontier import supervise
from gpu.evidence_bench import Bench

from batchtune.probe.settings import ProbeSettings
from batchtune.results import BatchShape, Trial

EMULATED = Path(__file__).with_name("evidence_emulated.json")
"""What the emulated device (tests/emulated_cuda) gave, of 140 GiB and capability 8.0: a sequence of `Held` a case."""
# Of a case's cells: the last but one does not fit.
SHARES = (0.5, 1, 0.8, 1, 0.3, 0.9, 1, 0.6, 4, 1)


class Case(NamedTuple):
    """A built-in workload, the largest padded length of its batches, and the lengths in turns."""

    workload: str
    options: dict[str, Any]
    cells: float
    lengths: tuple[float, ...]


TOKENS = (512.0, 64.0, 300.0, 37.0, 450.0)
SECONDS = (30.0, 4.0, 17.5, 2.1, 24.0)
CASES = {
    "LM base bf16": Case("transformer-lm", {"dtype": "bf16"}, 12_000, TOKENS),
    "LM base fp32": Case("transformer-lm", {"dtype": "fp32"}, 6_000, TOKENS),
    "LM base bf16 checkpointed": Case(
        "transformer-lm", {"dtype": "bf16", "checkpoint": True}, 20_000, TOKENS
    ),
    "conformer base bf16": Case("conformer-ctc", {"dtype": "bf16"}, 1_000, SECONDS),
    "conformer base fp32": Case("conformer-ctc", {"dtype": "fp32"}, 700, SECONDS),
    "conformer large bf16": Case(
        "conformer-ctc", {"dtype": "bf16", "size": "large"}, 500, SECONDS
    ),
}


class Held(NamedTuple):
    """What one step took, in bytes and in flushed caches."""

    outcome: str
    allocated: int | None
    reserved: int | None
    retries: int | None

    @classmethod
    def of(cls, trial: Trial) -> Held:
        """What a trial of one step holds."""
        return cls(
            trial.outcome, trial.peak_bytes, trial.reserved_bytes, trial.alloc_retries
        )


def calibration(bench: Bench) -> None:
    """Runs the same sequences of steps as the emulated device has, by both allocators, and says where they differ."""
    sequences = bench.record.data.setdefault("sequences", {})
    references = json.loads(EMULATED.read_text())
    allocators = ["native", "expandable"]
    if bench.device.startswith("cpu"):
        allocators = ["auto"]
    for allocator in allocators:
        for name, case in CASES.items():
            label = f"{name} {allocator}"
            if not bench.record.is_done(label):
                sequences[label] = sequence(bench, case, allocator)
                bench.record.done(label)
            _compare(bench, label, sequences[label], references.get(label, []))


def sequence(bench: Bench, case: Case, allocator: str) -> list[Held]:
    """What each step of a case takes, in one process."""
    options = {"size": "base", **case.options}
    if bench.quick:
        options |= {"size": "tiny", "dtype": "fp32"}
    settings = ProbeSettings(
        workload=f"builtin:{case.workload}",
        options=options,
        device=bench.device,
        memory_bytes=bench.memory_bytes,
        allocator=allocator,  # type: ignore[arg-type]
    )
    cells = case.cells / (100 if bench.quick else 1)
    held = []
    with supervise(settings) as supervisor:
        supervisor.start()
        for step, share in enumerate(SHARES):
            length = case.lengths[step % len(case.lengths)]
            size = max(1, int(share * cells / length))
            held.append(Held.of(supervisor.step(BatchShape(size, length)).trial))
    return held


def _compare(
    bench: Bench, label: str, ours: list[Held], emulated: list[list[Any]]
) -> None:
    """One figure: how many steps are the same, and the largest differences of the others."""
    here = msgspec.to_builtins(ours)
    same = sum(held == other for held, other in zip(here, emulated, strict=False))
    differences = {}
    for index, name in enumerate(Held._fields[1:], 1):
        differences[name] = max(
            (
                abs((held[index] or 0) - (other[index] or 0))
                for held, other in zip(here, emulated, strict=False)
            ),
            default=None,
        )
    outcomes = [held[0] for held in here] == [held[0] for held in emulated]
    told = f"{same} of {len(here)}; {'the same' if outcomes else 'others'}"
    bench.record.figure(
        f"{label}: steps as emulated; outcomes; largest differences",
        f"{told}; {json.dumps(differences)}",
        same=same,
        steps=len(here),
        same_outcomes=outcomes,
        **differences,
    )
