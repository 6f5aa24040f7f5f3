"""A scratch working folder for a script that is only measured: what it writes there leaves the user's files alone."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from pathlib import Path
from typing import Any

# Larger files are linked, and so are all once this much is copied.
_LARGEST_COPY = 32 << 20
_MOST_COPIED = 512 << 20
# Folders with more entries (data), and those further down, are linked as a whole.
_MOST_ENTRIES = 1000
_DEEPEST = 4
_WRITING = os.O_WRONLY | os.O_RDWR


def mirror(
    folder: Path, scratch: Path, depth: int = 0, room: int = _MOST_COPIED
) -> int:
    """Make `scratch` look like `folder`: folders are made anew, files up to 32 MiB copied, others are links.

    `room` is how many bytes may be copied; returns what is left of it.
    """
    scratch.mkdir()
    for entry in os.scandir(folder):
        copy = scratch / entry.name
        is_small = False
        if entry.is_dir() and not entry.is_symlink() and depth < _DEEPEST:
            with contextlib.suppress(PermissionError):
                is_small = len(os.listdir(entry)) <= _MOST_ENTRIES
        if is_small:
            room = mirror(Path(entry), copy, depth + 1, room)
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
    return room


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
