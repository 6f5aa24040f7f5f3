"""The memory of a process and all that it started, watched from outside while it works."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

# Reading it holds the lock of a process's memory for a moment: it may take this share of the time at most.
_SHARE = 0.05
_LEAST_SECONDS = 0.25


@dataclass(slots=True)
class MemoryUse:
    """The memory of the processes. Each shared page counts once among those that share it (proportional set size).

    Attributes:
        peak_bytes: Of all at once; worker_bytes: of the largest that is not the first.
        shared_bytes: Of the shared memory that they map, or of what was added to /dev/shm, whichever is more.
        history: (seconds on `time.monotonic`'s clock, bytes of all), in order.
    """

    peak_bytes: int = 0
    worker_bytes: int = 0
    shared_bytes: int = 0
    history: list[tuple[float, int]] = field(default_factory=list)


@contextlib.contextmanager
def watched_memory(pid: int) -> Iterator[MemoryUse]:
    """Look at a process and its descendants again and again, in a thread, until the block ends."""
    use, done, before = MemoryUse(), threading.Event(), shared_memory()

    def watch() -> None:
        while True:
            began = time.monotonic()
            with contextlib.suppress(psutil.Error):
                _look(pid, use, before.used if before else 0)
            if done.wait(max(_LEAST_SECONDS, (time.monotonic() - began) / _SHARE)):
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


def _look(pid: int, use: MemoryUse, shared_before: int) -> None:
    now, shared = time.monotonic(), shared_memory()
    others = [process.pid for process in psutil.Process(pid).children(recursive=True)]
    sizes = {one: size for one in (pid, *others) if (size := _proportional(one)) is not None}
    total = sum(size for size, _ in sizes.values())
    use.peak_bytes = max(use.peak_bytes, total)
    use.worker_bytes = max([use.worker_bytes, *(size for one, (size, _) in sizes.items() if one != pid)])
    added = shared.used - shared_before if shared else 0
    use.shared_bytes = max(use.shared_bytes, added, sum(mapped for _, mapped in sizes.values()))
    use.history.append((now, total))


def _proportional(pid: int) -> tuple[int, int] | None:
    """Return (proportional set size, the part of it that is shared memory) in bytes; None if the process has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return None
    found = dict(line.split(":", 1) for line in text.splitlines()[1:])
    whole, shared = (1024 * int(found.get(name, "0 kB").split()[0]) for name in ("Pss", "Pss_Shmem"))
    return whole, shared
