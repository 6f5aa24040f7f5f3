"""The memory of a process and all that it started, watched from outside while it works."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

# Reading it holds the lock of a process's memory for a moment: it may take this share of the time at most.
_SHARE = 0.05
_LEAST_SECONDS = 0.25
SHARED_MEMORY = Path("/dev/shm")


@dataclass(slots=True)
class MemoryUse:
    """What the processes held. Each shared page counts once among those that share it (proportional set size).

    Attributes:
        peak_bytes: Of all at once; worker_bytes: of the largest that is not the first.
        shared_bytes: Of the shared memory that they map, or of what was added to /dev/shm, whichever is more.
        history: (seconds on `time.monotonic`'s clock, bytes of all), in order.
    """

    peak_bytes: int = 0
    worker_bytes: int = 0
    shared_bytes: int = 0
    history: list[tuple[float, int]] = field(default_factory=list)


class MemoryWatch:
    """Looks at a process and its descendants again and again, in a thread, until the block ends."""

    def __init__(self, pid: int) -> None:
        self.use = MemoryUse()
        self._pid = pid
        self._shared_before = shared_memory_used()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemoryUse:
        self._thread.start()
        return self.use

    def __exit__(self, *raised: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            began = time.monotonic()
            self._look(began)
            took = time.monotonic() - began
            if self._done.wait(max(_LEAST_SECONDS, took / _SHARE)):
                return

    def _look(self, now: float) -> None:
        with contextlib.suppress(psutil.Error):
            first = psutil.Process(self._pid)
            others = [process.pid for process in first.children(recursive=True)]
            sizes = {pid: size for pid in (self._pid, *others) if (size := _proportional(pid)) is not None}
            total = sum(size for size, _ in sizes.values())
            added = max(0, shared_memory_used() - self._shared_before)
            use = self.use
            use.peak_bytes = max(use.peak_bytes, total)
            use.worker_bytes = max([use.worker_bytes, *(size for pid, (size, _) in sizes.items() if pid in others)])
            use.shared_bytes = max(use.shared_bytes, added, sum(shared for _, shared in sizes.values()))
            use.history.append((now, total))


def _proportional(pid: int) -> tuple[int, int] | None:
    """Return (proportional set size, the part of it that is shared memory) in bytes; None if the process has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return None
    found = dict(line.split(":", 1) for line in text.splitlines()[1:])
    return tuple(1024 * int(found.get(name, "0 kB").split()[0]) for name in ("Pss", "Pss_Shmem"))  # type: ignore[return-value]


def shared_memory_used() -> int:
    """Return how many bytes of /dev/shm are taken; 0 where there is none."""
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:
        return 0
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def shared_memory_free() -> int | None:
    """Return how many bytes of /dev/shm are free; None where there is none."""
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize
