"""The loop of a worker process: it answers its supervisor's requests, one after another."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
from collections.abc import Callable
from typing import TypeVar

from batchtune.processes.worker import Message, encode

Request = TypeVar("Request")


def serve(
    channel: socket.socket,
    decode: Callable[[bytes], Request],
    answer: Callable[[Request], Message],
) -> None:
    """Answer requests until the supervisor closes the socket.

    What the user's code prints goes to the standard streams. On SIGUSR2 the process prints its stack.
    """
    channel.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides when to stop
    # To see where it hangs; to a copy of the stream, because the user's code may close or replace the stream.
    faulthandler.register(signal.SIGUSR2, file=os.dup(2), all_threads=False)
    with channel, channel.makefile("rb") as requests:
        for line in requests:
            channel.sendall(encode(answer(decode(line))) + b"\n")
