"""Ranks on the command line: how many to start, and refusing to be one of them."""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING

import typer

from batchtune import __version__
from batchtune.allocators import Environment, settings_in
from batchtune.cli import console
from batchtune.errors import UsageError, shortened

if TYPE_CHECKING:
    from batchtune.cli.options import WorkloadOptions
    from batchtune.probe.nodes import Greeting, Nodes
    from batchtune.probe.requests import Launch

_MOST_RANKS = 1024  # as the files of a run hold
_LOOKING_SECONDS = 120.0
_TOKEN_VARIABLE = "BATCHTUNE_NODES_TOKEN"
_LAST_PORT = 65535
# What node 0 tells all ranks must be what the others were started with.
_SAME_ON_ALL_NODES = (
    *("nnodes", "workload", "set", "device"),
    *("memory", "memory_fraction", "reserve", "allocator"),
)


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
    environment: Environment = os.environ, arguments: Sequence[str] | None = None
) -> None:
    """Raise UsageError if this process was started once a rank, with the command that starts it once a machine."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    ranks = _ranks_here(environment)
    if ranks is not None:
        where = "inside torchrun"
        if "TORCHELASTIC_RUN_ID" not in environment:
            where = f"as rank {environment['RANK']} of {environment['WORLD_SIZE']}"
        raise UsageError(
            f"batchtune was started {where}, once per rank, but starts the ranks itself",
            f"Start it once: {_command([], words, ranks)}",
        )
    # Those of a step count before those of its job.
    tasks = _number(environment, "SLURM_STEP_TASKS_PER_NODE") or _number(
        environment, "SLURM_NTASKS_PER_NODE"
    )
    if tasks > 1:
        raise UsageError(
            f"SLURM starts {tasks} tasks of batchtune on a machine, one per GPU, but batchtune starts the ranks itself",
            "Start one task a machine: "
            + _command(["srun", "--ntasks-per-node=1"], words, tasks),
        )


def _ranks_here(environment: Environment) -> int | None:
    """Return how many ranks a launcher started on this machine, if this process is one of them."""
    is_one_of_several = "RANK" in environment and _number(environment, "WORLD_SIZE") > 1
    if "TORCHELASTIC_RUN_ID" not in environment and not is_one_of_several:
        return None
    return _number(environment, "LOCAL_WORLD_SIZE") or _number(
        environment, "WORLD_SIZE"
    )


def _number(environment: Environment, name: str) -> int:
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


@contextmanager
def other_nodes(subject: WorkloadOptions, *, quiet: bool) -> Iterator[Nodes | None]:
    """Give the connections to the other nodes, once all have connected; None without other nodes.

    On another node than node 0, this does what node 0 says, and ends the program.
    """
    launch = _launch(subject)
    if launch is None:
        yield None
        return
    from batchtune.probe.nodes import Nodes, serve_node_0

    greeting = _greeting(subject, launch)
    place = f"{launch.host}:{launch.control_port}"
    if launch.node_rank > 0:
        console.note(
            f"Node {launch.node_rank} of {launch.nnodes}: starts ranks for node 0 ({place}).",
            quiet=quiet,
        )
        serve_node_0(launch, greeting, subject.setup_timeout)
        raise typer.Exit
    with Nodes(launch, greeting) as nodes:
        console.note(
            f"Waiting for {launch.nnodes - 1} of {launch.nnodes} nodes at {place}.",
            quiet=quiet,
        )
        nodes.gather(subject.setup_timeout)
        yield nodes


def _launch(subject: WorkloadOptions) -> Launch | None:
    """Return how to start the ranks of this node, or None if it is the only one. Raises UsageError if it is unclear."""
    nnodes = subject.nnodes or 1
    if nnodes == 1:
        for flag, value in (
            ("--node-rank", subject.node_rank or None),
            ("--rdzv-endpoint", subject.rdzv_endpoint),
        ):
            if value is not None:
                raise UsageError(
                    f"{flag} is for several machines", "Say how many with --nnodes N."
                )
        return None
    if subject.nproc_per_node is None:
        raise UsageError(
            "--nnodes is for ranks on several machines, but --nproc-per-node does not say how many each has",
            "Add --nproc-per-node N, or auto for one rank on each GPU. A training script is measured on one machine.",
        )
    node_rank = subject.node_rank
    if node_rank is None and "SLURM_NODEID" in os.environ:
        node_rank = _number(os.environ, "SLURM_NODEID")
    if node_rank is None:
        raise UsageError(
            f"which of the {nnodes} nodes is this one?",
            "Give --node-rank 0 on the node of --rdzv-endpoint, and 1 and so on elsewhere; srun says it by itself.",
        )
    if not 0 <= node_rank < nnodes:
        raise UsageError(
            f"node rank {node_rank} is not one of {nnodes} nodes",
            f"Give --node-rank from 0 to {nnodes - 1}, or the right --nnodes.",
        )
    from batchtune.probe.requests import Launch

    host, port = _endpoint(subject.rdzv_endpoint)
    return Launch(
        nproc_per_node=parse_nproc(subject.nproc_per_node, subject.device),
        nnodes=nnodes,
        node_rank=node_rank,
        host=host,
        port=port,
        leader_port=port + 2,
    )


def _endpoint(value: str | None) -> tuple[str, int]:
    """Return host and port of `--rdzv-endpoint`."""
    example = "Give node 0 as the others reach it: --rdzv-endpoint node0:29500"
    if value is None:
        raise UsageError("--nnodes needs --rdzv-endpoint HOST:PORT", example)
    match = re.fullmatch(r"([\w.-]+):(\d{1,5})", value)
    if match is None or not 1 <= int(match[2]) <= _LAST_PORT - 2:
        raise UsageError(
            f"--rdzv-endpoint must be HOST:PORT, got {shortened(value)}", example
        )
    return match[1], int(match[2])


def _greeting(subject: WorkloadOptions, launch: Launch) -> Greeting:
    """Return who this node is, and what must be the same on all."""
    from batchtune.probe.nodes import Greeting
    from batchtune.probe.settings import file_sha256

    torch = "not installed"
    with suppress(metadata.PackageNotFoundError):
        torch = metadata.version("torch")
    file = (subject.workload or "").rpartition(":")[0]
    facts = {
        "batchtune": __version__,
        "PyTorch": torch,
        "--nproc-per-node": str(launch.nproc_per_node),
        f"the SHA-256 of {file or 'the workload'}": str(file_sha256([file])),
    }
    for name in _SAME_ON_ALL_NODES:
        facts[f"--{name.replace('_', '-')}"] = str(getattr(subject, name))
    facts["PYTORCH_ALLOC_CONF"] = settings_in(os.environ) or "not set"
    return Greeting(
        token=os.environ.get(_TOKEN_VARIABLE, ""),
        node_rank=launch.node_rank,
        host=socket.gethostname(),
        facts=facts,
    )
