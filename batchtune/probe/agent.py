"""The agent on a node other than node 0: starts and ends its ranks on command. It never imports torch."""

from __future__ import annotations

import contextlib
import socket
import time

import msgspec
from msgspec.structs import replace

from batchtune.errors import ProbeError
from batchtune.probe.nodes import (
    Done,
    End,
    Ended,
    Greeting,
    Start,
    control_port,
    keep_alive,
    ports_hint,
)
from batchtune.probe.requests import Launch, Launched
from batchtune.probe.supervisor import worker_program
from batchtune.processes.worker import Connection, Nursery, WorkerLost, tail
from batchtune.results import MALFORMED
from batchtune.units import format_seconds

_POLL_SECONDS = 0.5
_STARTING_SECONDS = 60.0
_SHOWN_LINES = 12
_decode = msgspec.json.Decoder[Start | End | Done](Start | End | Done).decode


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
            request = replace(
                launch,
                rdzv_id=message.rdzv_id,
                token=message.token,
                allocator=message.allocator,
            )
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
    port = control_port(launch)
    while True:
        try:
            channel = socket.create_connection((launch.host, port), timeout_seconds)
            break
        except OSError as error:
            if time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
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
    where = f"node 0 ({launch.host}:{control_port(launch)})"
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
