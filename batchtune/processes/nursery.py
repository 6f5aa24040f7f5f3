"""The nursery: a process that has imported PyTorch, forks one worker after another, and clears up after each (Linux).

Started with the arguments CONTROL SUPERVISOR MODULE IMPORTS... (`processes.worker`): a worker is a call of the
module's `work(channel)`, and the other imports are usually PyTorch's, which takes seconds. This does it once, and uses
no device, so each worker finds one untouched. Over the socket CONTROL the supervisor sends `start` (with a worker's
channel, output and folder), `stack` (the worker prints its stack) and `end`. The nursery answers `started`, and the
worker's exit code once nothing is left of it.

As a *child subreaper* (man 2 prctl) it adopts whatever a worker's children leave behind, even a process that left its
session or whose parent has ended. When the worker ends, or the supervisor ends or asks for it, the nursery kills all
that is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence

import psutil

from batchtune.processes import import_for_good

_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_STOPPING_SIGNALS = {signal.SIGTERM, signal.SIGHUP}
_HANDLED_SIGNALS = (signal.SIGCHLD, signal.SIGINT, *_STOPPING_SIGNALS)
# Every process was sent SIGKILL long before; one that the kernel can't end yet (in a driver) is left to it.
_PATIENCE_SECONDS = 30.0
_ALONE_SECONDS = 1.0
# They remove semaphores and shared memory of Python's, joblib's and torch's processes once those have ended.
_TIDYING = ("resource_tracker", "torch_shm_manager")
_TIDYING_SECONDS = 3.0


def main() -> None:
    """Serve the supervisor that the command line names."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    # While it imports it can't watch the supervisor. Later this would end it with the thread that started it.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # What fails here fails in the worker again, and is shown there.
    with contextlib.suppress(BaseException):
        import_for_good(*sys.argv[3:])
    _libc.prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)
    serve(control, int(sys.argv[2]), _work)


def serve(
    control: socket.socket, supervisor: int, work: Callable[[int], object]
) -> None:
    """Fork workers as the supervisor asks for them; end the process when the supervisor closes the socket, or ends.

    `supervisor` is its process id: a process forked from it may hold the socket open. `work` is called in each worker's
    process with its channel, the only descriptor but the standard streams.
    """
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wakeup, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in _HANDLED_SIGNALS:  # Ctrl-C too: the supervisor decides when to stop
        # Its number arrives through the pipe.
        signal.signal(number, lambda number, frame: None)
    supervisor_ends = []
    with contextlib.suppress(AttributeError, OSError):  # a kernel before Linux 5.3
        supervisor_ends.append(os.pidfd_open(supervisor))
    if os.getppid() != supervisor:
        os._exit(0)
    inherited = [control.fileno(), wakeup, wake, *supervisor_ends]
    worker = 0
    exit_codes: dict[int, int] = {}
    with contextlib.suppress(OSError):  # the supervisor is gone
        while not set(supervisor_ends) & set(
            woken := ready([control, wakeup, *supervisor_ends])
        ):
            if wakeup in woken and _STOPPING_SIGNALS & set(os.read(wakeup, 4096)):
                break
            message = b""
            if control.fileno() in woken:
                message, descriptors, _, _ = socket.recv_fds(control, 16, 3)
                if not message:
                    break
                if message == b"start":
                    worker = _fork(inherited, work, *descriptors)
                    for descriptor in descriptors:
                        os.close(descriptor)
                    control.send(b"started")
                elif message == b"stack" and worker:
                    os.kill(worker, signal.SIGUSR2)
            _reap(exit_codes)
            if worker and (message == b"end" or worker in exit_codes):
                _clear_up(worker, exit_codes)
                control.send(b"%d" % exit_codes.get(worker, -signal.SIGKILL))
                worker = 0
                exit_codes.clear()
    _clear_up(worker, exit_codes)
    os._exit(0)


def ready(watched: Sequence[int | socket.socket], seconds: float = -1.0) -> list[int]:
    """Return which descriptors have something to read, or have ended; a negative time is unlimited.

    `select.select` takes none above 1023.
    """
    waiting = select.poll()
    for stream in watched:
        waiting.register(stream, select.POLLIN)
    return [number for number, _ in waiting.poll(seconds * 1000)]


def _fork(
    inherited: Sequence[int],
    work: Callable[[int], object],
    channel: int,
    output: int,
    folder: int,
) -> int:
    """Fork a worker, into a session of its own; the kernel kills it if this process is killed."""
    nursery = os.getpid()
    with warnings.catch_warnings():
        # Of threads: those of numpy's BLAS, which handles forks.
        warnings.simplefilter("ignore")
        if worker := os.fork():
            return worker
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == nursery:
            signal.set_wakeup_fd(-1)
            for number in _HANDLED_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.fchdir(folder)
            for descriptor in (*inherited, output, folder):
                os.close(descriptor)
            os.setsid()
            work(channel)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _work(channel: int) -> None:
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # otherwise each worker would draw the same; Python's own generator is reseeded
    importlib.import_module(sys.argv[3]).work(channel)


def _reap(exit_codes: dict[int, int]) -> bool:
    """Note every child that has ended; return whether others are left."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return True
            exit_codes[pid] = os.waitstatus_to_exitcode(status)
    return False


def _clear_up(worker: int, exit_codes: dict[int, int]) -> None:
    """Kill all descendants, again and again until all are gone: each pass may find what was just forked."""
    started = time.monotonic()
    while (
        _reap(exit_codes)
        and (elapsed := time.monotonic() - started) < _PATIENCE_SECONDS
    ):
        if worker and worker not in exit_codes:
            os.kill(worker, signal.SIGKILL)
        # Not before the worker has ended: to look for others takes memory, which later workers would inherit.
        if worker in exit_codes or not worker or elapsed > _ALONE_SECONDS:
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):  # gone, or another user's
                    command = " ".join(process.cmdline())
                    if elapsed > _TIDYING_SECONDS or not any(
                        map(command.count, _TIDYING)
                    ):
                        process.kill()
        time.sleep(0.005)
