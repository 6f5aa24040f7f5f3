"""What torch's allocator holds in each step on a GPU, next to the emulated device: where they differ is what not to
trust of that.

    python tests/benchmarks/calibration.py

runs the same steps of six workloads with both allocators under 16 GiB, and prints for each of the twelve how many
steps took as many bytes as on the emulated device, whether they ended alike, and the largest differences. `--write`
keeps what this device gives as what to compare with: for the emulated device (tests/emulated_cuda) alone.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

from batchtune.probe.settings import ProbeSettings
from batchtune.probe.supervisor import Supervisor
from batchtune.results import BatchShape
from batchtune.units import parse_size

EMULATED = Path(__file__).with_name("emulated_steps.json")
"""What the emulated device gave, by `Case` and allocator: of each step the outcome, and the figures of `FIGURES`."""
FIGURES = ("peak_bytes", "reserved_bytes", "alloc_retries")
# Of a case's cells: the last but one does not fit.
SHARES = (0.5, 1, 0.8, 1, 0.3, 0.9, 1, 0.6, 4, 1)
TOKENS = (512.0, 64.0, 300.0, 37.0, 450.0)
SECONDS = (30.0, 4.0, 17.5, 2.1, 24.0)


class Case(NamedTuple):
    """A built-in workload, the largest padded length of its batches, and the lengths in turns."""

    workload: str
    options: dict[str, Any]
    cells: float
    lengths: tuple[float, ...]


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


def steps_of(case, allocator, device, memory):
    """The outcome and figures of each step of a case, in one process."""
    settings = ProbeSettings(
        workload=f"builtin:{case.workload}",
        options={"size": "base", **case.options},
        device=device,
        memory_bytes=parse_size(memory),
        allocator=allocator,
    )
    steps = []
    with Supervisor(settings) as supervisor:
        supervisor.start()
        for number, share in enumerate(SHARES):
            length = case.lengths[number % len(case.lengths)]
            shape = BatchShape(max(1, int(share * case.cells / length)), length)
            trial = supervisor.step(shape).trial
            steps.append([trial.outcome, *(getattr(trial, name) for name in FIGURES)])
    return steps


def compared(steps, emulated):
    """How many steps are the same, how they ended, and the largest differences."""
    pairs = list(zip(steps, emulated, strict=True))
    same = sum(ours == theirs for ours, theirs in pairs)
    ended = "ended alike"
    if any(ours[0] != theirs[0] for ours, theirs in pairs):
        ended = "ended otherwise"
    largest = []
    for place, name in enumerate(FIGURES, 1):
        apart = max(
            abs((ours[place] or 0) - (theirs[place] or 0)) for ours, theirs in pairs
        )
        largest.append(f"{name} {apart:,}")
    return f"{same} of {len(pairs)} steps the same, {ended}; differences up to {', '.join(largest)}"


def main():
    """Run the cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    emulated = json.loads(EMULATED.read_text())
    found = {}
    for allocator in ("native", "expandable"):
        for name, case in CASES.items():
            label = f"{name} {allocator}"
            found[label] = steps_of(case, allocator, "cuda", "16GiB")
            print(f"{label}: {compared(found[label], emulated[label])}", flush=True)
    if options.write:
        lines = (
            f"{json.dumps(label)}: {json.dumps(steps)}"
            for label, steps in found.items()
        )
        EMULATED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
