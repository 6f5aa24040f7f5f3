"""Ranks on the command line: how many to start, and refusing to be one of them."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import cache

from batchtune.errors import UsageError, shortened

_MOST_RANKS = 1024  # as the files of a run hold
_LOOKING_SECONDS = 120.0


@cache
def parse_nproc(value: str, device: str | None) -> int:
    """Return the number of ranks of `--nproc-per-node N|auto`; `auto` counts the GPUs that torch sees here.

    Raises UsageError for anything else, and for `auto` without a GPU.
    """
    if value != "auto":
        if re.fullmatch(r"\d{1,4}", value) and 1 <= int(value) <= _MOST_RANKS:
            return int(value)
        raise UsageError(
            f"--nproc-per-node must be auto or a number from 1 to {_MOST_RANKS}, got {shortened(value)}",
            "It is the number of ranks to start on this machine, such as one for each GPU.",
        )
    gpus = 0
    if device != "cpu":
        from batchtune.probe.doctor import examine

        seen = examine(_LOOKING_SECONDS).gpus
        gpus = sum(gpu.device is not None for gpu in seen)
    if not gpus:
        raise UsageError(
            "--nproc-per-node auto starts a rank for each GPU, and there is none to use here",
            "Give a number for ranks on the CPU: --nproc-per-node 2",
        )
    return gpus


def refuse_to_be_a_rank(
    environment: Mapping[str, str] = os.environ, arguments: Sequence[str] | None = None
) -> None:
    """Raise UsageError if this process was started once a rank, with the command that starts it once a machine."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    ranks = _ranks_here(environment)
    if ranks is not None:
        where = "inside torchrun"
        if "TORCHELASTIC_RUN_ID" not in environment:
            where = f"as rank {environment['RANK']} of {environment['WORLD_SIZE']}"
        raise UsageError(
            f"batchtune was started {where}, once a rank, but starts the ranks itself",
            f"Start it once: {_command([], words, ranks)}",
        )
    tasks = _tasks(environment)
    if tasks > 1:
        raise UsageError(
            f"SLURM starts {tasks} tasks of batchtune on a machine, one a GPU, but batchtune starts the ranks itself",
            "Start one task a machine: "
            + _command(["srun", "--ntasks-per-node=1"], words, tasks),
        )


def _ranks_here(environment: Mapping[str, str]) -> int | None:
    """Return how many ranks a launcher started on this machine, if this process is one of them."""
    is_one_of_several = "RANK" in environment and _number(environment, "WORLD_SIZE") > 1
    if "TORCHELASTIC_RUN_ID" not in environment and not is_one_of_several:
        return None
    return _number(environment, "LOCAL_WORLD_SIZE") or _number(
        environment, "WORLD_SIZE"
    )


def _tasks(environment: Mapping[str, str]) -> int:
    """Return how many tasks SLURM starts on a machine; those of a step count before those of its job."""
    return _number(environment, "SLURM_STEP_TASKS_PER_NODE") or _number(
        environment, "SLURM_NTASKS_PER_NODE"
    )


def _number(environment: Mapping[str, str], name: str) -> int:
    """Return the number that a variable begins with, as in SLURM's `8(x4)`; 0 without one."""
    match = re.match(r"\d{1,9}", environment.get(name, ""))
    return int(match[0]) if match else 0


def _command(launcher: list[str], words: list[str], ranks: int) -> str:
    """Return the command line of this process as it should be; that of a script says itself how many ranks it has."""
    command = [*launcher, "batchtune", *words]
    if "--" not in words and not any(
        word.startswith(("--nproc-per-node", "--simulate-world-size")) for word in words
    ):
        command += ["--nproc-per-node", str(max(1, ranks))]
    return shlex.join(command)
