"""Has the kernel's OOM killer struck? A process that was killed does not know, but the kernel counts (Linux)."""

from __future__ import annotations

import re
from pathlib import Path

_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def oom_kills(root: Path = Path("/")) -> int | None:
    """How many processes the kernel has killed for want of memory, where this process and its children live.

    The control group's own counter tells every kind of such a killing in it (Linux, cgroup-v2.rst, `memory.events`;
    in version 1 `memory.oom_control`). Only where there is none, as in the root group, is the machine's taken.

    Args:
        root: Where `proc` and `sys` are.

    Returns:
        A count that only its growth makes sense of; None where the kernel keeps none.
    """
    for path in (*_group_files(root), root / "proc/vmstat"):
        try:
            match = _COUNT.search(path.read_text())
        except (OSError, UnicodeDecodeError):
            continue
        if match:
            return int(match[1])
    return None


def _group_files(root: Path) -> list[Path]:
    """Where this process's control group may keep its counter; in a container its path may lead nowhere."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    files = []
    for line in lines:
        number, controllers, group = line.split(":", 2)
        if "memory" in controllers.split(","):
            mount, name = root / "sys/fs/cgroup/memory", "memory.oom_control"
        elif number == "0" and not controllers:
            mount, name = root / "sys/fs/cgroup", "memory.events"
        else:
            continue
        files += [mount / group.lstrip("/") / name, mount / name]
    return files
