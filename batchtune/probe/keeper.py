"""The keeper: a process between the supervisor and its worker, that leaves nothing running behind it (Linux).

It starts the worker, and adopts whatever the worker's children leave behind, as a *child subreaper* (man 2 prctl): a
process that left its session or whose parent has ended still comes to it. When the worker ends, when the supervisor
says so or goes away, however it does, the keeper kills all that is left, tells the worker's exit code over a socket,
and ends. It passes STACK_SIGNAL on to the worker, whose process id only it knows.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_STOPPING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
# Asks the worker to print its stack.
STACK_SIGNAL = signal.SIGUSR2
_HEEDED_SIGNALS = (signal.SIGCHLD, signal.SIGINT, STACK_SIGNAL, *_STOPPING_SIGNALS)
# Every process has been sent SIGKILL long before; one that the kernel can't end yet (in a driver) is left to it.
_PATIENCE_SECONDS = 30.0


def keep(control: socket.socket, ends: Sequence[int], channel: int, work: Callable[[], object]) -> None:
    """Start a worker, waits until it is over, and clears up.

    Args:
        control: Tells the supervisor this process's id, and at the end the worker's exit code, a line each. When the
            supervisor closes its end, the worker is wanted no more.
        ends: Descriptors that become readable when the supervisor has ended.
        channel: The worker's socket, the only descriptor besides the standard streams that it gets.
        work: What the worker does, in a process of its own.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wakeup, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in _HEEDED_SIGNALS:
        signal.signal(number, _no_more_than_a_wake_up)
    own = [control.fileno(), wakeup, wake, *ends]
    worker = _start(libc, work, own)
    os.close(channel)
    exit_codes: dict[int, int] = {}
    with contextlib.suppress(OSError):  # nobody is there to be told
        control.sendall(b"%d\n" % os.getpid())
        _wait(worker, [control.fileno(), *ends], wakeup, exit_codes)
    _clear_up(wakeup, exit_codes)
    with contextlib.suppress(OSError):
        control.sendall(b"%d\n" % exit_codes.get(worker, -signal.SIGKILL))


def _no_more_than_a_wake_up(number: int, frame: object) -> None:
    """Its number arrives through the wake-up pipe."""


def _start(libc: ctypes.CDLL, work: Callable[[], object], own: Sequence[int]) -> int:
    """Fork the worker, into a session of its own; the kernel kills it if this process is killed."""
    keeper = os.getpid()
    worker = os.fork()
    if worker:
        return worker
    try:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == keeper:
            signal.set_wakeup_fd(-1)
            for number in _HEEDED_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for descriptor in own:
                os.close(descriptor)
            os.setsid()
            work()
            os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(127)


def _wait(worker: int, watched: Sequence[int], wakeup: int, exit_codes: dict[int, int]) -> None:
    """Wait until the worker has ended, or is wanted no more."""
    while _reap(exit_codes) and worker not in exit_codes:
        woken = ready([*watched, wakeup])
        if woken == [wakeup]:
            numbers = os.read(wakeup, 4096)
            if any(number in _STOPPING_SIGNALS for number in numbers):
                return
            if STACK_SIGNAL in numbers:
                os.kill(worker, STACK_SIGNAL)
        elif woken:
            return


def ready(watched: Sequence[int | socket.socket], seconds: float | None = None) -> list[int]:
    """Return which descriptors have something to read, or have ended; `select.select` knows none above 1023."""
    waiting = select.poll()
    for stream in watched:
        waiting.register(stream, select.POLLIN)
    return [number for number, _ in waiting.poll(None if seconds is None else seconds * 1000)]


def _reap(exit_codes: dict[int, int]) -> bool:
    """Note every child that has ended; False where none is left at all."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        exit_codes[pid] = os.waitstatus_to_exitcode(status)


def _clear_up(wakeup: int, exit_codes: dict[int, int]) -> None:
    """Kill all descendants, again and again until there are none: each pass may find what was just forked."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while _reap(exit_codes) and time.monotonic() < deadline:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):  # gone, or another user's
                process.kill()
        if ready([wakeup], seconds=0.01):
            os.read(wakeup, 4096)
