"""Forks the processes that supervisors of this test process start, from one that has imported PyTorch already.

A supervisor starts a nursery, which imports PyTorch: two seconds of a processor, in a hundred tests. Here one process
of each test process imports it, and forks a nursery for whoever starts one, unless the environment has changed since.
Started as `python warm_nursery.py REQUESTS`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from batchtune.probe.devices import backends

PR_SET_CHILD_SUBREAPER = 36
MARK = "BATCHTUNE_PROBE_WORKER"
MARK_BYTES = 200
# They differ from test to test, and mean nothing to a workload.
FREE = {MARK, "PYTEST_CURRENT_TEST"}


class WarmNursery:
    """The process that has imported PyTorch; it starts when it is first needed."""

    def __init__(self) -> None:
        needed = {name: value for backend in backends() for name, value in backend.WORKER_ENVIRONMENT.items()}
        self._environment = _shared({**os.environ, **needed, "PYTHONUNBUFFERED": "1"})
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None

    @property
    def popen(self) -> type[subprocess.Popen[bytes]]:
        """A class to put in the place of `subprocess.Popen`; what is no nursery is started as ever."""
        warm = self

        class Popen(subprocess.Popen):  # type: ignore[type-arg]
            def __new__(cls, args: Any, *others: Any, **options: Any) -> Any:
                nursery = isinstance(args, list) and "batchtune.probe.nursery" in args
                if not nursery or _shared(options["env"]) != warm._environment:
                    return super().__new__(cls)
                return warm.fork(args[args.index("batchtune.probe.nursery") + 1 :], options["env"])

        return Popen

    def fork(self, words: list[str], environment: dict[str, str]) -> Forked:
        """Fork a nursery: a child of this process, with the words of its command line."""
        if self._requests is None:
            self._requests, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, __file__, str(theirs.fileno())],
                    env={**self._environment, MARK: "x" * MARK_BYTES},
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        request = {"words": words, "environment": environment, "folder": os.getcwd()}
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # it comes to this process when what forked it has ended
        socket.send_fds(self._requests, [json.dumps(request).encode()], [int(words[0])])
        pid = int(self._requests.recv(64))
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        return Forked(pid)

    def close(self) -> None:
        if self._process is not None and self._requests is not None:
            self._requests.close()
            self._process.wait()


def _shared(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in FREE}


class Forked:
    """A child of this process, of which all is known that a supervisor asks."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self, options: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        return self.poll(0)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def serve(requests: socket.socket) -> None:
    """Import PyTorch, then fork a nursery for each request."""
    import torch

    import batchtune.probe.nursery
    import batchtune.probe.worker
    import batchtune.workloads  # noqa: F401

    assert torch.__version__
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 1)
        if not message:
            return
        supervisor = os.getppid()
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            nursery = os.fork()
            if nursery == 0:
                for open_here in (reading, writing, requests.detach()):
                    os.close(open_here)
                become(json.loads(message), descriptors[0], supervisor)
            os.write(writing, b"%d" % nursery)
            os._exit(0)
        os.waitpid(between, 0)
        requests.sendall(os.read(reading, 64))  # from now on it is the supervisor's child
        for passed_on in (reading, writing, descriptors[0]):
            os.close(passed_on)


def become(request: dict[str, Any], descriptor: int, supervisor: int) -> None:
    """Be what the request asks for, as if it had just been started."""
    from batchtune.probe import nursery

    os.setsid()
    until = time.monotonic() + 10
    while os.getppid() != supervisor:  # what forked it is about to end
        if time.monotonic() > until:
            os._exit(1)
        time.sleep(0.001)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    mark = request["environment"][MARK].encode()
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    ctypes.memmove(libc.getenv(MARK.encode()), mark.ljust(MARK_BYTES, b"\0"), MARK_BYTES)  # what /proc shows
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.path[0] = request["folder"]
    sys.argv = ["nursery", str(descriptor), *request["words"][1:]]
    try:
        nursery.main()
    finally:
        os._exit(1)


if __name__ == "__main__":
    sys.path.pop(0)
    sys.path.insert(0, "")
    serve(socket.socket(fileno=int(sys.argv[1])))
