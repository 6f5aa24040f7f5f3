"""The worker process of a probe on several ranks: starts them, and answers with one reply for all of them.

torchrun starts the ranks (`probe.ranks`), never twice: after any failure the supervisor ends this process, and with it
all ranks, and starts a new one with a rendezvous of its own. Neither this process nor the supervisor uses torch, so
whatever a rank does to its device harms nothing here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping

from msgspec.structs import replace

from batchtune.allocators import worker_variables
from batchtune.errors import ProbeError
from batchtune.probe.nodes import listen, ports_hint
from batchtune.probe.ranks import GANG_VARIABLE, Ranks, merged
from batchtune.probe.requests import (
    Describe,
    Identify,
    Launch,
    Launched,
    Prepare,
    Replay,
    Reply,
    Request,
    RunTrial,
)
from batchtune.probe.worker import Worker
from batchtune.processes import command, import_for_good
from batchtune.processes.nursery import ready
from batchtune.processes.pool import die_with_parent
from batchtune.processes.worker import Failed, drain, oom_kills, serve, tail

# How often torchrun looks after its processes. One that has ended stays to be judged until then.
_MONITOR_SECONDS = 1.0
_DRAINING_SECONDS = 1.0
# What makes a library believe that other processes were started with this one, by another launcher.
_RANK_VARIABLES = {
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
}


def work(channel: int) -> None:
    """Serve requests in a forked process."""
    serve(channel, Request | Launch, Gang().answer)


def main() -> None:
    """Be torchrun, with the arguments of the command line; end with the process that started it."""
    die_with_parent()
    import_for_good("torch.distributed.run")
    from torch.distributed.run import main as torchrun

    torchrun(sys.argv[1:])


class Leader(ABC):
    """Starts ranks, passes requests on to them, and merges their replies into one."""

    _ranks: Ranks

    def answer(self, request: Request) -> Reply:
        """Pass a request on to all ranks, which the first one starts, and return one reply."""
        if isinstance(request, Identify | Replay):
            return Worker().answer(request)
        started = time.monotonic()
        if isinstance(request, Prepare | Describe):
            failed = self._start(request)
            if failed is not None:
                return failed
        self._ranks.send(request)
        spent_seconds = time.monotonic() - started
        replies = self._ranks.gather(request.timeout_seconds, spent_seconds)
        return self._one_of(replies, request)

    @abstractmethod
    def _start(self, request: Prepare | Describe) -> Failed | None:
        """Start the ranks, and wait until all have connected; return why they can't be started."""

    def _one_of(
        self, replies: Mapping[int, Reply], request: Prepare | Describe | RunTrial
    ) -> Reply:
        """Return one reply of those of the ranks."""
        return merged(replies, request, self._ranks.world_size)


class Gang(Leader):
    """Ranks that torchrun started, and the answers to what is asked of all of them."""

    def answer(self, request: Request | Launch) -> Reply:
        """Start the ranks of a node other than node 0, or pass a request on to all ranks."""
        if isinstance(request, Launch):
            _launched(request)
            return Launched()
        return super().answer(request)

    def _start(self, request: Prepare | Describe) -> Failed | None:
        assert isinstance(request, Prepare)
        timeout_seconds = request.timeout_seconds
        world_size = request.settings.world_size
        launch = request.launch
        if launch is None:
            launch = Launch(nproc_per_node=world_size)
        try:
            listener = listen(launch, launch.leader_port)
        except ProbeError as error:
            return Failed.of(error, "device")
        with listener:
            launch = replace(launch, leader_port=listener.getsockname()[1])
            torchrun, output = _launched(launch)
            self._ranks = Ranks(
                listener, launch.token, world_size, output.text, oom_kills()
            )
            if self._ranks.accept(timeout_seconds, lambda: torchrun.poll() is not None):
                return None
        last_words = tail(output.text(), lines=12)
        code = torchrun.poll()
        if code is None:
            message = f"torchrun did not start {world_size} ranks within {timeout_seconds:g} s"
            hint = "If it needs longer, allow that with --setup-timeout SECONDS."
            if launch.nnodes > 1:
                missing = self._ranks.missing
                nodes = sorted({rank // launch.nproc_per_node for rank in missing})
                message += f": none came from node {', '.join(map(str, nodes))}"
                hint = f"{hint} {ports_hint(launch)}"
            return Failed(
                stage="setup",
                outcome="timeout",
                message=message,
                hint=hint,
                traceback=last_words or None,
            )
        return Failed(
            stage="device",
            message=f"torchrun ended with exit code {code} before its ranks started: {last_words}",
            hint="`batchtune doctor` shows the version of PyTorch.",
        )


class PrintedOutput:
    """The end of what torchrun and its ranks print, all of which goes on to this process's own output."""

    def __init__(self) -> None:
        self._stream, self.end = os.pipe()
        self._printed = bytearray()
        arguments = [self._stream, self._printed, 2]
        self._reader = threading.Thread(target=drain, args=arguments, daemon=True)

    def follow(self) -> None:
        """Begin to read, now that the writing end is another process's."""
        os.close(self.end)
        self._reader.start()

    def finish(self) -> None:
        """Wait a moment until all of it is read, now that its processes have ended."""
        self._reader.join(_DRAINING_SECONDS)

    def text(self) -> str:
        """Return the end of it; what was printed by now has been read."""
        deadline = time.monotonic() + _DRAINING_SECONDS
        while ready([self._stream], 0) and time.monotonic() < deadline:
            time.sleep(0.005)
        return bytes(self._printed).decode(errors="replace")


def _launched(launch: Launch) -> tuple[subprocess.Popen[bytes], PrintedOutput]:
    """Start the ranks of this node, and follow what they print."""
    leader = f"{launch.host},{launch.leader_port},{launch.token}"
    output = PrintedOutput()
    environment = environment_of_ranks(launch.nproc_per_node) | {GANG_VARIABLE: leader}
    if launch.allocator is not None:
        environment |= worker_variables(launch.allocator, os.environ)
    torchrun = subprocess.Popen(
        _torchrun(launch),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output.end,
        stderr=output.end,
    )
    output.follow()
    return torchrun, output


def _torchrun(launch: Launch) -> list[str]:
    """Return the command that starts the ranks of this node."""
    rendezvous: tuple[str, ...] = ("--rdzv-backend", "static")
    if launch.nnodes == 1:
        # It takes any port. And not the name of this machine, which may lead nowhere.
        rendezvous = ("--rdzv-backend", "c10d", "--local-addr", launch.host)
    return command(
        "batchtune.probe.gang",
        *("--nnodes", launch.nnodes),
        *("--node-rank", launch.node_rank),
        *("--nproc-per-node", launch.nproc_per_node),
        *("--max-restarts", 0),
        *("--monitor-interval", _MONITOR_SECONDS),
        *rendezvous,
        *("--rdzv-endpoint", f"{launch.host}:{launch.port}"),
        *("--rdzv-id", launch.rdzv_id),
        # The ranks are started as all of batchtune's processes are, with nothing of the working folder on `sys.path`.
        "--no-python",
        *command("batchtune.probe.ranks"),
    )


def environment_of_ranks(nproc_per_node: int) -> dict[str, str]:
    """Return this process's environment for torchrun, without what another launcher has put there."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _RANK_VARIABLES
        and not name.startswith(("SLURM_", "TORCHELASTIC_"))
    }
    if nproc_per_node > 1:  # as torchrun sets it, with a warning
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment
