"""One of several ranks, started by torchrun: joins the process group, then answers like a worker that is alone.

It answers over a socket of its own. Where the next collective depends on something, all ranks decide it together.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, BinaryIO, NoReturn

import msgspec
from msgspec.structs import replace

from batchtune.probe.devices import backend_for
from batchtune.probe.gang import GANG_VARIABLE
from batchtune.probe.requests import Decision, Hello, Prepare, Ready, Request, Vote
from batchtune.probe.worker import Worker
from batchtune.processes import import_for_good
from batchtune.processes.pool import die_with_parent, total_memory
from batchtune.processes.worker import Message, encode
from batchtune.results import ProbedWith, RankDevice

if TYPE_CHECKING:
    from batchtune.probe.devices import Meter
    from batchtune.workloads import Workload

# Whoever leads the ranks ends them all when their time is over: no collective does that by itself.
_COLLECTIVE_TIMEOUT = timedelta(days=30)
_BACKENDS = {"cuda": "nccl", "cpu": "gloo"}

_decode = msgspec.json.Decoder[Request | Decision](Request | Decision).decode


def main() -> None:
    """Connect, and serve requests until the other side closes the connection."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides when to stop
    import_for_good("torch", "torch.distributed")
    host, port, token = os.environ.pop(GANG_VARIABLE).split(",")
    rank, world_size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    place = RankPlace.connected((host, int(port)), token, rank, world_size)
    place.serve(RankWorker(place))


class RankPlace:
    """This process among the ranks, and its connection to whoever leads them."""

    def __init__(
        self, channel: socket.socket, replies: BinaryIO, rank: int, world_size: int
    ) -> None:
        self.channel = channel
        self._replies = replies
        self.rank = rank
        self.world_size = world_size
        self.local_rank = int(os.environ.get("LOCAL_RANK", rank))
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        self.nnodes = self.world_size // self.local_world_size
        self.host = socket.gethostname()

    @classmethod
    def connected(
        cls, address: tuple[str, int], token: str, rank: int, world_size: int
    ) -> RankPlace:
        """Connect this process, and say which rank it is.

        From then on it prints its stack to the channel whenever the other side sends urgent data, to see where it
        hangs: the kernel then sends SIGURG, wherever the other side is.
        """
        channel = socket.create_connection(address)
        channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        fcntl.fcntl(channel, fcntl.F_SETOWN, os.getpid())
        faulthandler.register(signal.SIGURG, file=channel.fileno(), all_threads=False)
        place = cls(channel, channel.makefile("rb"), rank, world_size)
        place.say(place.hello(token))
        return place

    def hello(self, token: str) -> Hello:
        """Return what this rank says first."""
        return Hello(
            token=token,
            rank=self.rank,
            world_size=self.world_size,
            host=self.host,
            pid=os.getpid(),
            node_rank=self.rank // self.local_world_size,
        )

    def say(self, message: Message) -> None:
        """Send a message."""
        self.channel.sendall(encode(message) + b"\n")

    def serve(self, worker: Worker) -> NoReturn:
        """Answer requests until the other side closes the connection; then end this process.

        Nothing else runs: no finalizer, which may hang, and no script's checkpoint, validation or upload.
        """
        for line in self._replies:
            request = _decode(line)
            assert not isinstance(request, Decision)
            self.say(worker.answer(request))
        os._exit(0)

    def largest(self, value: int, caught: str | None = None) -> int:
        """Return the largest value that a rank gives, once all have called this."""
        if self.world_size == 1:
            return value
        self.say(Vote(value=value, caught=caught))
        line = self._replies.readline()
        if not line:
            os._exit(0)  # another rank has failed
        decision = _decode(line)
        assert isinstance(decision, Decision)
        return decision.value

    def agree(self, wanted: bool, caught: str | None = None) -> bool:
        """Return whether any rank wants it, once all have called this."""
        return self.largest(int(wanted), caught) > 0


class RankWorker(Worker):
    """A worker whose process group exists before its workload is built."""

    _backend: str | None = None  # of the process group; None: there is none

    def __init__(self, place: RankPlace) -> None:
        super().__init__(place.agree)
        self._place = place

    def _open(self, request: Prepare) -> Meter:
        """Open this rank's device, and join the process group."""
        import torch
        from torch import distributed

        device = request.settings.device
        kind = device.partition(":")[0]
        if kind == "auto":
            kind = "cuda" if torch.cuda.is_available() else "cpu"
        if kind == "cuda":
            device = f"cuda:{self._place.local_rank}"
        meter = self._open_device(device, request)
        self._backend = _BACKENDS[kind]
        distributed.init_process_group(self._backend, timeout=_COLLECTIVE_TIMEOUT)
        distributed.all_reduce(torch.ones(1, device=meter.torch_device))
        meter.synchronize()
        return meter

    def _open_device(self, device: str, request: Prepare) -> Meter:
        """Open a device; ranks on the CPU of one machine share its memory, unless each was given a limit."""
        backend = backend_for(device)
        settings = request.settings
        ranks = self._place.local_world_size
        if device == "cpu" and settings.memory_bytes is None and ranks > 1:
            settings = replace(settings, memory_bytes=total_memory() // ranks)
        return backend.open(device, settings, request.limit_bytes)

    def _ready(
        self, workload: Workload, meter: Meter, probed_with: ProbedWith
    ) -> Ready:
        """Settle the limit: the smallest of all ranks is enforced on all."""
        ready = super()._ready(workload, meter, probed_with)
        if self._backend is None:
            return ready
        device = ready.device
        place = self._place
        meter.lower(-place.largest(-device.limit_bytes))
        own = RankDevice(
            rank=place.rank,
            host=place.host,
            name=device.name,
            limit_bytes=device.limit_bytes,
            outside_bytes=device.outside_bytes,
            base_bytes=meter.in_use(),
        )
        return replace(
            ready,
            device=replace(
                device,
                limit_bytes=meter.device.limit_bytes,
                ranks=[own],
                world_size=place.world_size,
                nnodes=place.nnodes,
                backend=self._backend,
            ),
        )
