"""Writing files whole or not at all."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from batchtune.errors import ResultError
from batchtune.units import format_size


def write_whole(path: Path, content: str | bytes, *, follow: bool = True) -> None:
    """Write a file so that a reader sees the old content or the new, never a part; arguments as in `writing_whole`."""
    with writing_whole(path, follow=follow) as stream:
        stream.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def writing_whole(
    path: Path, *, synced: bool = True, follow: bool = True
) -> Iterator[IO[bytes]]:
    """Open a temporary file in the same folder that takes its name when the block ends, or vanishes on failure.

    The folder is created if missing; a file that exists keeps its permissions. If `synced`, the file survives a power
    loss. If `follow`, a link is followed, and a device or pipe written to: not in a run folder, which may come from
    anywhere, with links to any file. Raises ResultError if the file can't be written.
    """
    temporary: str | None = None
    try:
        target = path.resolve() if follow else path
        if follow and target.exists() and not target.is_file() and not target.is_dir():
            with target.open("wb") as stream:
                yield stream
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(
            dir=target.parent, prefix=f".{target.name}.", suffix=".part"
        )
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            if synced:
                os.fsync(stream.fileno())
        mask = os.umask(0)
        os.umask(mask)
        permissions = 0o666 & ~mask
        if target.is_file():
            permissions = stat.S_IMODE(target.lstat().st_mode)
        os.chmod(temporary, permissions)
        os.replace(temporary, target)
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def open_to_append(path: Path) -> int:
    """Open a file to add lines to, without following a link, and return its descriptor; its folder is made.

    Raises ResultError if it can't be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, 0o666)
    except OSError as error:
        raise unwritable(path, error) from error


def read_regular(
    path: Path, most_bytes: int, hint: str | None = None, *, name: str | None = None
) -> bytes:
    """Read a file that may come from anywhere, called `name` in messages, by default its path.

    Raises ResultError if it is missing, unreadable, too large, or not an ordinary file: a pipe might never end.
    """
    name = name or str(path)
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise ResultError(
                f"{name} is {'a folder' if stat.S_ISDIR(mode) else 'not an ordinary file'}",
                hint,
            )
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except FileNotFoundError:
        raise ResultError(f"{name} does not exist", hint) from None
    except OSError as error:
        raise ResultError(
            f"{name} can't be read: {error.strerror or error}", hint
        ) from error
    if len(content) > most_bytes:
        raise ResultError(
            f"{name} is larger than {format_size(most_bytes)}: batchtune writes no such file",
            hint,
        )
    return content


def check_writable(folder: Path) -> None:
    """Raise ResultError if no file can be made in the folder, before work whose result goes there."""
    if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
        raise ResultError(
            f"{folder} can't be written to: the folder, or its disk, is read-only for you",
            "Copy the run folder to a place of your own, and name that.",
        )


def unwritable(path: Path, error: OSError) -> ResultError:
    """Return the error for a file that can't be written, with the system's reason."""
    return ResultError(
        f"{path} can't be written: {error.strerror or error}",
        "Nothing was left half-written. Make room or choose another place, then run the same command again.",
    )
