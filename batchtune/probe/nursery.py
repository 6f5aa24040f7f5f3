"""The nursery: a process that has imported PyTorch, and forks the workers of one supervisor (Linux).

Started as `python -m batchtune.probe.nursery REQUESTS SUPERVISOR`. Each message over the socket REQUESTS brings a
worker's control socket, channel and output; for it a keeper is forked (`batchtune.probe.keeper`), which forks the
worker. Importing PyTorch takes seconds; this does it once. It uses no device, so each worker finds one untouched. It
ends with the supervisor, however that ends.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
import warnings
from collections.abc import Sequence

from batchtune.probe import keeper
from batchtune.probe.devices import backends

_NEEDED = ("torch", "batchtune.probe.worker", "batchtune.workloads")


def main() -> None:
    """Serve requests until the supervisor closes the socket, or ends."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    requests.set_inheritable(False)
    ends = ends_of(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides when to stop
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers tell of themselves
    _import_ahead()
    while keeper.ready([requests.fileno(), *ends]) == [requests.fileno()]:
        message, descriptors, _, _ = socket.recv_fds(requests, 16, 3)
        if not message:
            break
        if _fork() == 0:
            requests.close()
            _keep(descriptors, ends)
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)
    os._exit(0)


def ends_of(supervisor: int) -> list[int]:
    """Return a descriptor that becomes readable when the supervisor has ended; none on a kernel that has no such thing.

    Besides the socket's end, which a process forked from the supervisor may hold open, too.
    """
    ends = []
    with contextlib.suppress(AttributeError, OSError):
        ends.append(os.pidfd_open(supervisor))
    if os.getppid() != supervisor:
        os._exit(0)
    return ends


def _import_ahead() -> None:
    """Import what workers need. What fails here fails in the worker again, and is shown there."""
    with contextlib.suppress(BaseException):
        for module in _NEEDED:
            importlib.import_module(module)


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads: those of numpy's BLAS, which knows of forks
        return os.fork()


def _keep(descriptors: Sequence[int], ends: Sequence[int]) -> None:
    control, channel, output = descriptors
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)

    def work() -> None:
        from batchtune.probe.worker import serve

        if any(backend.is_broken_by_fork() for backend in backends()):
            os.set_inheritable(channel, True)
            os.execv(sys.executable, [sys.executable, "-m", "batchtune.probe.worker", str(channel)])
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed()  # else each worker would draw the same; Python's own generator sees to itself
        serve(socket.socket(fileno=channel))

    keeper.keep(socket.socket(fileno=control), ends, channel, work)


if __name__ == "__main__":
    main()
