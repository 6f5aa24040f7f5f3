"""A scratch working folder for a script that is only measured: what it writes there leaves the user's files alone."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections import deque
from pathlib import Path
from typing import Any

# Larger files are linked, and so are all once this much is copied.
_LARGEST_COPY = 32 << 20
_MOST_COPIED = 512 << 20
# Folders with more entries (data), those further down, and those beyond so many entries in all, are linked as a whole.
_MOST_ENTRIES = 1000
_DEEPEST = 4
_MOST_IN_ALL = 5000
_WRITING = os.O_WRONLY | os.O_RDWR


def mirror(folder: Path, scratch: Path) -> None:
    """Make `scratch` look like `folder`: folders are made anew, files up to 32 MiB copied, others are links.

    What lies higher comes first, as a script's own files do, before its data.
    """
    room = _MOST_COPIED
    entries = 0
    scratch.mkdir()
    folders = deque([(folder, scratch, 0)])
    while folders:
        source, target, depth = folders.popleft()
        for entry in os.scandir(source):
            copy = target / entry.name
            if entry.is_dir() and not entry.is_symlink() and depth < _DEEPEST:
                count = _count_entries(entry.path)
                if count <= min(_MOST_ENTRIES, _MOST_IN_ALL - entries):
                    entries += count
                    copy.mkdir()
                    folders.append((Path(entry), copy, depth + 1))
                    continue
            size = 0
            with contextlib.suppress(OSError):  # a link to nothing, or no permission
                if entry.is_file():
                    size = entry.stat().st_size
                    if size <= min(room, _LARGEST_COPY):
                        shutil.copy2(entry, copy)
                        room -= size
                        continue
            copy.symlink_to(os.path.abspath(entry))


def _count_entries(folder: str) -> int:
    """Return the number of entries of a folder; too many if they may not be listed."""
    try:
        return len(os.listdir(folder))
    except PermissionError:
        return _MOST_ENTRIES + 1


def keep_links_unwritten(scratch: str) -> None:
    """Replace a link in the scratch folder by a copy when this process opens it for writing."""

    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(arguments[0], (str, os.PathLike)):
            return
        flags = arguments[2]
        if not isinstance(flags, int) or not flags & _WRITING:
            return
        path = os.path.abspath(os.fspath(arguments[0]))
        if path.startswith(scratch) and os.path.islink(path) and os.path.isfile(path):
            target = os.path.realpath(path)
            os.unlink(path)
            if not flags & os.O_TRUNC:
                shutil.copyfile(target, path)

    sys.addaudithook(on_event)
