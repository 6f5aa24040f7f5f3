"""Writing files whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from batchtune.errors import ResultError
from batchtune.units import format_size

_OWNER = "owner"
"""A file in a temporary folder that its process holds locked."""


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
        make_folder(target.parent)
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


@contextlib.contextmanager
def temporary_folder(prefix: str, parent: str | Path | None) -> Iterator[Path]:
    """Make a folder that is removed at the end; if this process is killed, by the next that makes one there.

    Raises ResultError if it can't be made.
    """
    parent = Path(parent or tempfile.gettempdir())
    for stale in parent.glob(f"{prefix}*/{_OWNER}"):
        with contextlib.suppress(OSError):
            if stale.parent.lstat().st_uid == os.geteuid():
                with stale.open() as owner:
                    fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(stale.parent)
    try:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        unlocked = folder / f"{_OWNER}.part"
        owner = unlocked.open("w")
        with contextlib.suppress(OSError):  # a disk without locks
            fcntl.flock(owner, fcntl.LOCK_EX)
        unlocked.rename(folder / _OWNER)
    except OSError as error:
        raise unwritable(parent, error) from error
    with owner:
        try:
            yield folder
        finally:
            _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a folder as far as possible, with what lies in folders that may not be listed (overlayfs leaves some)."""
    for root, names, _ in os.walk(folder):
        for name in names:
            path = os.path.join(root, name)
            if not os.path.islink(path):
                with contextlib.suppress(OSError):
                    os.chmod(path, stat.S_IRWXU)
    shutil.rmtree(folder, ignore_errors=True)


def open_to_append(path: Path) -> int:
    """Open a file to add lines to, without following a link, and return its descriptor; its folder is made.

    Raises ResultError if it can't be written, or is not an ordinary file: a pipe would wait for its reader.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        make_folder(path.parent)
        file = os.open(path, flags | os.O_NONBLOCK, 0o666)
    except OSError as error:
        raise unwritable(path, error) from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise ResultError(f"{path} is not an ordinary file", "Remove it.")
    return file


def read_regular(
    path: Path, most_bytes: int, hint: str | None, *, name: str | None = None
) -> bytes:
    """Read a file that may come from anywhere, called `name` in messages, by default its path. Raises as `reading`."""
    with reading(path, most_bytes, hint, name=name) as file:
        # Read as much as there is: all that is asked for is allocated at once.
        return file.read(os.fstat(file.fileno()).st_size)


@contextlib.contextmanager
def reading(
    path: Path, most_bytes: int, hint: str | None = None, *, name: str | None = None
) -> Iterator[IO[bytes]]:
    """Open a file that may come from anywhere, called `name` in messages, by default its path.

    Raises ResultError if it is missing, unreadable, too large, or not an ordinary file: a pipe might never end.
    """
    name = name or str(path)
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise ResultError(
                f"{name} is {'a folder' if stat.S_ISDIR(found.st_mode) else 'not an ordinary file'}",
                hint,
            )
        if found.st_size > most_bytes:
            raise ResultError(
                f"{name} is larger than {format_size(most_bytes)}: batchtune writes no such file",
                hint,
            )
        with path.open("rb") as file:
            yield file
    except FileNotFoundError:
        raise ResultError(f"{name} does not exist", hint) from None
    except OSError as error:
        raise ResultError(
            f"{name} can't be read: {error.strerror or error}", hint
        ) from error


def check_writable(folder: Path) -> None:
    """Raise ResultError if no file can be made in the folder, before work whose result goes there."""
    if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
        raise ResultError(
            f"{folder} can't be written to: the folder, or its disk, is read-only for you",
            "Copy the run folder to a place of your own, and name that.",
        )


def make_folder(folder: Path) -> None:
    """Make a folder unless it exists, and those that it lies in. Raises ResultError if it can't be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResultError(
            f"the folder {folder} can't be created: {error.strerror or error}",
            "Choose another with --run or -o.",
        ) from error


def unwritable(path: Path, error: OSError) -> ResultError:
    """Return the error for a file that can't be written, with the system's reason."""
    return ResultError(
        f"{path} can't be written: {error.strerror or error}",
        "Nothing was left half-written. Make room or choose another place, then run the same command again.",
    )
