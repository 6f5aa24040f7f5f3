"""The memory of this machine."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def available_memory() -> int:
    """Return how much more memory processes can take without swapping, in bytes."""
    import psutil

    return min(total_memory(), int(psutil.virtual_memory().available))


def total_memory() -> int:
    """Return the memory of the machine, or of the container if that is less, in bytes."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in (
        "/sys/fs/cgroup/memory.max",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    ):
        with contextlib.suppress(OSError, ValueError):
            total = min(total, int(Path(limit).read_text()))
    return total
