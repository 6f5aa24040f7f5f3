"""The keeper: a small process between the supervisor and its worker, that leaves nothing running behind it (Linux).

Run as `python -I -S keeper.py CONTROL SUPERVISOR CHANNEL COMMAND...`: it starts COMMAND with the socket CHANNEL, and
adopts whatever the worker's children leave behind, as a *child subreaper* (man 2 prctl): a process that left its
session or whose parent has ended still comes to it. When the worker ends, when the supervisor says so or goes away,
however it does, the keeper kills all that is left, tells the worker's exit code over the socket CONTROL, and ends.
It passes STACK_SIGNAL on to the worker, whose process id only it knows.

It imports next to nothing: it is started with every worker.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_STOPPING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
# Asks the worker to print its stack.
STACK_SIGNAL = signal.SIGUSR2
# Every process has been sent SIGKILL long before; one that the kernel can't end yet (in a driver) is left to it.
_PATIENCE_SECONDS = 30.0


def main() -> None:
    """Starts the worker, waits until it is over, and clears up."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    channel = int(sys.argv[3])
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wakeup, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGINT, STACK_SIGNAL, *_STOPPING_SIGNALS):
        signal.signal(number, _no_more_than_a_wake_up)
    worker = _start(libc, sys.argv[4:])
    os.close(channel)
    exit_codes: dict[int, int] = {}
    _wait(worker, control, int(sys.argv[2]), wakeup, exit_codes)
    _clear_up(wakeup, exit_codes)
    try:
        control.sendall(b"%d\n" % exit_codes.get(worker, -signal.SIGKILL))
    except OSError:  # nobody is there to be told
        pass


def _no_more_than_a_wake_up(number: int, frame: object) -> None:
    """Its number arrives through the wake-up pipe."""


def _start(libc: ctypes.CDLL, command: list[str]) -> int:
    """The worker, in a session of its own, killed by the kernel if this process should be."""
    keeper = os.getpid()
    worker = os.fork()
    if worker:
        return worker
    try:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == keeper:
            os.setsid()
            os.execv(command[0], command)
    except BaseException as error:
        sys.stderr.write(f"{command[0]} can't be started: {error}\n")
        sys.stderr.flush()
    os._exit(127)


def _wait(worker: int, control: socket.socket, supervisor: int, wakeup: int, exit_codes: dict[int, int]) -> None:
    """Returns when the worker has ended, or is wanted no more."""
    watched = [control.fileno(), wakeup]
    # Besides the socket's end, which a process forked from the supervisor may hold open, too.
    try:
        watched.append(os.pidfd_open(supervisor))
    except (AttributeError, OSError):  # an old kernel, or one that forbids it
        pass
    if os.getppid() != supervisor:
        return
    while _reap(exit_codes) and worker not in exit_codes:
        ready = _ready(watched)
        if ready == [wakeup]:
            numbers = os.read(wakeup, 4096)
            if any(number in _STOPPING_SIGNALS for number in numbers):
                return
            if STACK_SIGNAL in numbers:
                os.kill(worker, STACK_SIGNAL)
        elif ready:
            return


def _ready(watched: list[int], milliseconds: int | None = None) -> list[int]:
    """Which of these descriptors have something to read, or have ended; `select.select` knows none above 1023."""
    waiting = select.poll()
    for number in watched:
        waiting.register(number, select.POLLIN)
    return [number for number, _ in waiting.poll(milliseconds)]


def _reap(exit_codes: dict[int, int]) -> bool:
    """Notes every child that has ended; False where none is left at all."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        exit_codes[pid] = os.waitstatus_to_exitcode(status)


def _clear_up(wakeup: int, exit_codes: dict[int, int]) -> None:
    """Kills all descendants, again and again until there are none: each pass may find what was just forked."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while _reap(exit_codes) and time.monotonic() < deadline:
        for pid in _descendants(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:  # gone, or another user's
                pass
        if _ready([wakeup], milliseconds=10):
            os.read(wakeup, 4096)


def _descendants(ancestor: int) -> list[int]:
    """Every process below this one, by /proc."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, IndexError, ValueError):  # it has ended
            continue
        children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    waiting = [ancestor]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


if __name__ == "__main__":
    main()
