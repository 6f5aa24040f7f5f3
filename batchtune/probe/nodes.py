"""Several nodes: node 0 searches, and an agent on each other one starts and ends its ranks on command.

Each agent holds a connection to node 0, on the port after that of the rendezvous. It begins with a `Greeting`; then it
hears `Start`, `End` (which it answers with `Ended`) and at last `Done`. The ranks' leader, on the port after that, is
another process after each failure.
"""

from __future__ import annotations

import contextlib
import socket
import time

import msgspec
from msgspec.structs import asdict, replace

from batchtune.allocators import Choice
from batchtune.errors import BatchtuneError, ProbeError
from batchtune.probe.requests import Launch, Launched, Start, worker_program
from batchtune.processes.nursery import ready
from batchtune.processes.worker import (
    Connection,
    Entrance,
    Introduction,
    Message,
    Nursery,
    WorkerLost,
    tail,
)
from batchtune.results import MALFORMED
from batchtune.units import format_seconds

_POLL_SECONDS = 0.2
_CONNECTING_POLL_SECONDS = 0.5
_STARTING_SECONDS = 60.0
_SHOWN_LINES = 12  # of what an agent's ranks printed last
# How long an agent may take to end its ranks.
_ENDING_SECONDS = 90.0
# After this long without a sign of the other machine, three more signs are waited for.
_QUIET_SECONDS = 30


class Greeting(Introduction, frozen=True):
    """What an agent says first.

    Attributes:
        token: What the user gave all nodes in `BATCHTUNE_NODES_TOKEN`; empty without.
        facts: What must be the same on all nodes, by name.
    """

    node_rank: int
    host: str
    facts: dict[str, str]


class End(Message, frozen=True):
    """Tells an agent to end its ranks (`Ended`)."""


class Ended(Message, frozen=True):
    """An agent's ranks have ended; the end of what they printed."""

    output: str


class Done(Message, frozen=True):
    """Tells an agent that node 0 has ended, and its error, if any."""

    error: str | None = None
    hint: str | None = None


_decode = msgspec.json.Decoder[Start | End | Done](Start | End | Done).decode


class Nodes:
    """The connections of node 0 to the agents of all other nodes.

    Use as a context manager: at the end it tells the agents that node 0 has ended, and why.
    """

    def __init__(self, launch: Launch, own: Greeting) -> None:
        """Listen for agents; `launch` is that of node 0. Raises ProbeError if a port is in use."""
        self._launch = launch
        self._own = own
        self._agents: dict[int, Connection] = {}
        self._hosts: dict[int, str] = {}
        self._has_started = False
        self._lost: list[int] = []
        self.last_words: list[str] = []
        for port in (launch.port, launch.leader_port):
            listen(launch, port).close()
        self._listener = listen(launch, launch.control_port)

    def __enter__(self) -> Nodes:
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        done = Done()
        if isinstance(error, BatchtuneError):
            done = Done(error=error.message, hint=error.hint)
        elif error is not None:
            done = Done(error=f"it was stopped ({type(error).__name__})")
        self._listener.close()
        for agent in self._agents.values():
            agent.send(done)
            agent.channel.close()

    def gather(self, timeout_seconds: float) -> None:
        """Wait until an agent of every other node has connected; nobody else can from then on.

        Raises ProbeError if one does not come in time, or differs in what must be the same on all nodes.
        """
        deadline = time.monotonic() + timeout_seconds
        entrance = Entrance(self._listener)
        while missing := self._missing():
            if time.monotonic() > deadline:
                launch = self._launch
                raise ProbeError(
                    f"no sign of node {', '.join(map(str, missing))} of {launch.nnodes} within "
                    f"{format_seconds(timeout_seconds)} at {launch.host}:{launch.control_port}",
                    f"Start the same command on every node. {ports_hint(launch)} "
                    "--setup-timeout SECONDS waits longer.",
                )
            for agent in entrance.greeted(_POLL_SECONDS):
                if not self._welcome(agent):
                    agent.channel.close()
        entrance.close()
        self._listener.close()

    def _missing(self) -> list[int]:
        """Return the nodes without an agent; one that has gone may come again."""
        for rank, agent in [*self._agents.items()]:
            if has_closed(agent):
                agent.channel.close()
                del self._agents[rank]
        return [
            rank for rank in range(1, self._launch.nnodes) if rank not in self._agents
        ]

    def _welcome(self, agent: Connection) -> bool:
        """Keep the connection of an agent; return whether it is one. Raises ProbeError if its node differs."""
        greeting = agent.introduction(Greeting, self._own.token)
        if greeting is None:
            return False
        rank = greeting.node_rank
        if not 1 <= rank < self._launch.nnodes:
            return False
        difference = _difference(greeting, self._own)
        if rank not in self._missing():
            difference = ProbeError(
                f"both {self._hosts[rank]} and {greeting.host} say that they are node {rank}",
                "Give each node its own --node-rank.",
            )
        if difference is not None:
            agent.send(Done(error=difference.message, hint=difference.hint))
            agent.channel.close()
            raise difference
        keep_alive(agent.channel)
        self._agents[rank] = agent
        self._hosts[rank] = greeting.host
        return True

    def start(self, allocator: Choice) -> Launch:
        """Start the ranks of the other nodes; return how to start those of node 0. Raises ProbeError as `check`."""
        start = Start(allocator=allocator)
        launch = replace(self._launch, **asdict(start))
        self._has_started = True
        for rank, agent in self._agents.items():
            agent.send(start)
            if has_closed(agent):
                self._lost.append(rank)
        self.check()
        return launch

    def end(self) -> None:
        """End the ranks of the other nodes, and wait until they have ended."""
        if not self._has_started:
            return
        self._has_started = False
        self.last_words = []
        for agent in self._agents.values():
            agent.send(End())
        deadline = time.monotonic() + _ENDING_SECONDS
        for rank, agent in self._agents.items():
            line = agent.wait_for_line(deadline)
            try:
                output = msgspec.json.decode(line or b"", type=Ended).output
            except MALFORMED:
                self._lost.append(rank)
                continue
            if output:
                self.last_words.append(
                    f"Node {rank} ({self._hosts[rank]}) printed last:\n{output}"
                )

    def check(self) -> None:
        """Raise ProbeError if a node was lost."""
        if not self._lost:
            return
        lost = [f"node {rank} ({self._hosts[rank]})" for rank in sorted({*self._lost})]
        raise ProbeError(
            f"lost {' and '.join(lost)}: batchtune has ended there, or the machine does not answer",
            "Its output there may say why. The same command on all nodes goes on from here; what ran just now is not "
            "counted.",
        )


def ports_hint(launch: Launch) -> str:
    """Return what to look at if other nodes do not come."""
    return (
        f"Other nodes must reach TCP ports {launch.port} to {launch.leader_port} of {launch.host}, and ranks must "
        "reach each other: a firewall may forbid it."
    )


def listen(launch: Launch, port: int) -> socket.socket:
    """Listen on a port of node 0, where other nodes reach it if there are any. Raises ProbeError if it is in use."""
    address = "" if launch.nnodes > 1 else "127.0.0.1"
    try:
        return socket.create_server((address, port))
    except OSError as error:
        raise ProbeError(
            f"node 0 can't listen on port {port} of {socket.gethostname()}: {error.strerror}",
            "Several nodes need the port of --rdzv-endpoint and the two after it. Give another port there.",
        ) from error


def has_closed(connection: Connection) -> bool:
    """Return whether the other side has closed a connection over which it has nothing to say."""
    return bool(ready([connection.channel], 0)) and not connection.receive()


def keep_alive(channel: socket.socket) -> None:
    """Have the kernel close a connection to a machine that does not answer any more."""
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _QUIET_SECONDS)
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _difference(greeting: Greeting, own: Greeting) -> ProbeError | None:
    """Return the error if a node differs in what must be the same on all."""
    differing = [
        f"{name} is {greeting.facts.get(name, 'unknown')} there, {value} on node 0 ({own.host})"
        for name, value in own.facts.items()
        if greeting.facts.get(name) != value
    ]
    if not differing:
        return None
    return ProbeError(
        f"node {greeting.node_rank} ({greeting.host}) differs: {'; '.join(differing)}",
        "Start the same command on all nodes, with the same versions and the same workload file.",
    )


# The other side: the agent


def serve_node_0(launch: Launch, greeting: Greeting, timeout_seconds: float) -> None:
    """Do what node 0 says until it is done.

    Raises ProbeError if node 0 does not answer in time, ends without a word, or has failed itself.
    """
    node_0 = _connected(launch, timeout_seconds)
    node_0.send(greeting)
    nursery = Nursery(*worker_program(ranks=True))
    has_ranks = False
    try:
        while True:
            message = _heard(node_0, launch)
            if isinstance(message, Done):
                break
            if has_ranks:
                nursery.end_worker()
                has_ranks = False
            if isinstance(message, End):
                node_0.send(Ended(output=tail(nursery.output(), _SHOWN_LINES)))
                continue
            nursery.start_worker()
            has_ranks = True
            request = replace(launch, **asdict(message))
            with contextlib.suppress(WorkerLost):  # its ranks do not come to node 0
                nursery.ask(request, (Launched,), _STARTING_SECONDS)
    finally:
        if has_ranks:
            nursery.end_worker()
        nursery.close()
        node_0.channel.close()
    if message.error is not None:
        raise ProbeError(f"node 0 has ended: {message.error}", message.hint)


def _connected(launch: Launch, timeout_seconds: float) -> Connection:
    """Connect to node 0, which may start later. Raises ProbeError if it does not answer in time."""
    deadline = time.monotonic() + timeout_seconds
    port = launch.control_port
    while True:
        try:
            channel = socket.create_connection((launch.host, port), timeout_seconds)
            break
        except OSError as error:
            if time.monotonic() < deadline:
                time.sleep(_CONNECTING_POLL_SECONDS)
                continue
            raise ProbeError(
                f"node 0 does not answer at {launch.host}:{port} within {format_seconds(timeout_seconds)} ({error})",
                f"Start the same command there, as node 0. {ports_hint(launch)} --setup-timeout SECONDS waits longer.",
            ) from error
    channel.settimeout(None)
    keep_alive(channel)
    return Connection(channel)


def _heard(node_0: Connection, launch: Launch) -> Start | End | Done:
    """Return what node 0 says next. Raises ProbeError if it has gone."""
    line = node_0.wait_for_line(None)
    where = f"node 0 ({launch.host}:{launch.control_port})"
    if line is None:
        raise ProbeError(
            f"{where} has closed the connection: it ended, or was killed",
            "Its own output may say why. If it goes on waiting: BATCHTUNE_NODES_TOKEN must be the same on all nodes.",
        )
    try:
        message: Start | End | Done = _decode(line)
    except MALFORMED as error:
        raise ProbeError(
            f"what answers in place of {where} is not batchtune",
            "Give another port with --rdzv-endpoint.",
        ) from error
    return message
