"""The memory of a process and all that it started, watched from outside while it works."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil

# Reading it holds the lock of a process's memory for a moment: it may take this share of the time at most.
_SHARE = 0.05
_MIN_SECONDS = 0.25


@dataclass(slots=True)
class MemoryUse:
    """The memory of the processes, as psutil's proportional set size: each shared page counts once among its sharers.

    Attributes:
        peak_bytes: Of all at once; worker_bytes: of the largest that is not the first.
        shared_bytes: Added to /dev/shm.
        history: (seconds on `time.monotonic`'s clock, bytes of all), in order.
    """

    peak_bytes: int = 0
    worker_bytes: int = 0
    shared_bytes: int = 0
    history: list[tuple[float, int]] = field(default_factory=list)


@contextlib.contextmanager
def watched_memory(pid: int) -> Iterator[MemoryUse]:
    """Look at a process and its descendants again and again, in a thread, until the block ends."""
    use = MemoryUse()
    done = threading.Event()
    shared_before = _shared_bytes()

    def watch() -> None:
        while True:
            began = time.monotonic()
            with contextlib.suppress(psutil.Error):
                _look(pid, use)
                use.shared_bytes = max(use.shared_bytes, _shared_bytes() - shared_before)
            if done.wait(max(_MIN_SECONDS, (time.monotonic() - began) / _SHARE)):
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield use
    finally:
        done.set()
        thread.join()


def shared_memory() -> Any:
    """Return the `total`, `used` and `free` bytes of /dev/shm; None without one."""
    try:
        return shutil.disk_usage("/dev/shm")
    except OSError:
        return None


def _shared_bytes() -> int:
    memory = shared_memory()
    if memory is None:
        return 0
    return int(memory.used)


def _look(pid: int, use: MemoryUse) -> None:
    seconds = time.monotonic()
    process = psutil.Process(pid)
    total = process.memory_full_info().pss
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            child_bytes = child.memory_full_info().pss
            total += child_bytes
            use.worker_bytes = max(use.worker_bytes, child_bytes)
    use.peak_bytes = max(use.peak_bytes, total)
    use.history.append((seconds, total))
