"""What the parts of the evidence harness are given: a device, lengths, time, and processes to run."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from gpu.evidence_record import Missing, Record

from batchtune.lengths import Lengths
from batchtune.manifests import ReadOptions, load_lengths
from batchtune.units import parse_size

ROOT = Path(__file__).parents[2]
# With --quick: so few examples, lengths and steps, and so much of the memory, that a tiny model takes seconds.
QUICK_EXAMPLES = 200
QUICK_LENGTHS = 3
QUICK_FRACTION = 0.46
QUICK_SPEECH_SECONDS = 6.0


class Bench:
    """What a part is given: the device, the lengths, the time, and where its figures go.

    Args:
        options: The command line.
        part: Its name.
        record: Where its figures go.
        deadline: Until when it may run, on the monotonic clock.
    """

    def __init__(
        self, options: argparse.Namespace, part: str, record: Record, deadline: float
    ) -> None:
        self.device: str = options.device
        self.memory: str | None = options.memory
        self.quick: bool = options.quick
        self.manifest: str | None = options.manifest
        self.out: Path = options.out
        self.part = part
        self.record = record
        self.deadline = deadline

    @property
    def memory_bytes(self) -> int | None:
        """The cap on the worker's memory; None: the whole device."""
        return None if self.memory is None else parse_size(self.memory)

    @property
    def seconds_left(self) -> float:
        """Until the deadline, at least 0."""
        return max(0.0, self.deadline - time.monotonic())

    def lengths(self) -> Lengths:
        """The data set; few short examples with --quick."""
        if self.manifest is None:
            lengths = made_utterances()
            self.record.note("Its lengths are made, not those of a data set.")
        else:
            lengths = load_lengths([self.manifest], ReadOptions())
        if self.quick:
            values = np.random.default_rng(0).permutation(lengths.values)[
                :QUICK_EXAMPLES
            ]
            lengths = Lengths.of(
                values * (QUICK_SPEECH_SECONDS / values.max()), unit=lengths.unit
            )
        self.record.data["lengths"] = msgspec.to_builtins(lengths.summary())
        return lengths

    def manifest_of(self, lengths: Lengths, name: str) -> list[str]:
        """Arguments that give the same lengths to a command: a file of them in DIR, and its unit."""
        path = self.out / f"{self.part}-{name}.csv"
        np.savetxt(path, lengths.values, fmt="%.17g", header="length", comments="")
        unit = [] if lengths.unit is None else ["--unit", lengths.unit]
        return [str(path), "--length-key", "length", *unit]

    def probe_flags(self, workload: str, **options: object) -> list[str]:
        """The device, its memory and a built-in workload, for a command."""
        flags = ["--device", self.device, "--workload", f"builtin:{workload}"]
        flags += [f"--set={name}={value}" for name, value in options.items()]
        if self.memory is not None:
            flags += ["--memory", self.memory]
        if self.quick:
            flags += [
                f"--num-lengths={QUICK_LENGTHS}",
                f"--max-lengths={QUICK_LENGTHS}",
            ]
            flags.append(f"--memory-fraction={QUICK_FRACTION}")
        return flags

    def batchtune(
        self, *arguments: str, seconds: float | None = None, **environment: str
    ) -> str:
        """Runs a command of batchtune's as a user would, until the deadline, and returns what it printed.

        Exit code 3, a rule that fails or a verification that does not hold, is a result.

        Raises:
            Missing: It failed, or time ran out; it was interrupted then, and keeps what it has.
        """
        return self.run(
            [sys.executable, "-m", "batchtune", *arguments],
            {0, 3},
            seconds,
            **environment,
        )

    def run(
        self,
        command: Sequence[str],
        good: set[int],
        seconds: float | None = None,
        **environment: str,
    ) -> str:
        """Runs a process as `batchtune` does; exit codes in `good` are results."""
        seconds = (
            self.seconds_left if seconds is None else min(seconds, self.seconds_left)
        )
        shown = shlex.join(command[2:])
        paths = os.pathsep.join(
            [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        with (self.out / f"{self.part}.log").open("a") as log:
            print(f"+ {shown}", file=log, flush=True)
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": paths, **environment},
            )
            try:
                printed, _ = process.communicate(timeout=seconds)
            except BaseException as error:
                process.send_signal(signal.SIGINT)
                try:
                    process.communicate(timeout=30)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.communicate()
                if isinstance(error, subprocess.TimeoutExpired):
                    raise Missing(f"out of time in `{shown}`") from None
                raise
            log.write(printed)
        if process.returncode not in good:
            raise Missing(
                f"`{shown}` exited with {process.returncode}; {log.name} says why"
            )
        return printed


def made_utterances(count: int = 20_000) -> Lengths:
    """Durations of 1 to 30 s, many short and few long."""
    return Lengths.of(
        np.random.default_rng(7).gamma(3.0, 3.5, count).clip(1, 30).round(2), unit="s"
    )
