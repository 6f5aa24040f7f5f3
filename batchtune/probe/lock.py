"""One probe at a time on a device: a lock that the system releases when its holder ends, however it ends."""

from __future__ import annotations

import contextlib
import io
import os
import re
import stat
import tempfile
from pathlib import Path

from batchtune.errors import ProbeError

FOLDER = "batchtune-locks"


class DeviceBusy(ProbeError):
    """Another probe holds the device; `process` is its id, None if unknown."""

    def __init__(self, device_name: str, process: int | None) -> None:
        self.process = process
        holder = f" (process {process})" if process is not None else ""
        super().__init__(
            f"another probe{holder} is using {device_name}",
            "Two at once would measure each other. Wait for it with --wait, stop it, or probe another device with "
            "--device.",
        )


def lock_device(device_id: str, device_name: str) -> io.FileIO:
    """Hold a device for this process until the returned file is closed.

    The lock is an flock on a file in the machine's temporary folder, which several users may share: only a plain file
    is opened, and no link is followed. Raises DeviceBusy if another process holds the device, ProbeError if the lock
    can't be made.
    """
    import fcntl  # not on Windows

    path = lock_path(device_id)
    try:
        lock = io.FileIO(_open(path))
    except OSError as error:
        raise ProbeError(
            f"the device's lock {path} can't be used: {error.strerror or error}",
            "Remove it, or set TMPDIR to a folder that you can write to.",
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with lock:
            written = os.pread(lock.fileno(), 32, 0).strip()
        raise DeviceBusy(
            device_name, int(written) if written.isdigit() else None
        ) from None
    with contextlib.suppress(
        OSError
    ):  # another user's file may not be writable: the lock holds anyway
        os.ftruncate(lock.fileno(), 0)
        os.write(lock.fileno(), b"%d\n" % os.getpid())
    return lock


def lock_path(device_id: str) -> Path:
    """Return where the lock of a device lies."""
    return (
        Path(tempfile.gettempdir())
        / FOLDER
        / (re.sub(r"[^A-Za-z0-9._-]", "_", device_id) + ".lock")
    )


def _open(path: Path) -> int:
    """Open the lock's file, created with its folder for all users; processes that this one starts don't inherit it."""
    # O_NONBLOCK, because opening a pipe that someone has put there would wait.
    flags = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    made = False
    with contextlib.suppress(FileExistsError):
        path.parent.mkdir()
        made = True
    folder = os.open(
        path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    )
    try:
        if made:
            os.fchmod(folder, 0o1777)  # as /tmp is: the sticky bit
        # Two calls: one that creates or opens fails where /tmp is guarded (fs.protected_regular).
        with contextlib.suppress(FileExistsError):
            handle = os.open(
                path.name,
                os.O_RDWR | os.O_CREAT | os.O_EXCL | flags,
                0o666,
                dir_fd=folder,
            )
            os.fchmod(handle, 0o666)
            return handle
        try:
            handle = os.open(path.name, os.O_RDWR | flags, dir_fd=folder)
        except PermissionError:
            handle = os.open(path.name, os.O_RDONLY | flags, dir_fd=folder)
    finally:
        os.close(folder)
    facts = os.fstat(handle)
    # A hard link could lead to a file that must not be written.
    if not stat.S_ISREG(facts.st_mode) or facts.st_nlink != 1:
        os.close(handle)
        raise OSError("it is not a plain file")
    return handle
