"""One probe at a time on a device: a lock that the system lets go of when its holder ends, however it does."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
from pathlib import Path

from batchtune.errors import ProbeError

FOLDER = "batchtune-locks"


class DeviceBusy(ProbeError):
    """Another probe holds the device; `process` is its process, None if unknown."""

    def __init__(self, device_name: str, process: int | None) -> None:
        self.process = process
        holder = f" (process {process})" if process is not None else ""
        super().__init__(
            f"another probe{holder} is using {device_name}",
            "Two at once would measure each other. Wait for it with --wait, stop it, or probe another device with "
            "--device.",
        )


class DeviceLock:
    """Holds a device for this process, from construction to `release`.

    The lock is an flock on a file in the machine's temporary folder, which several users may share. Whoever made
    the file, it is only opened if it is a plain file there, never followed elsewhere. Raises DeviceBusy if another
    process holds the device, and ProbeError if the lock can't be made.
    """

    def __init__(self, device_id: str, device_name: str) -> None:
        import fcntl  # not on Windows

        path = lock_path(device_id)
        try:
            self._handle: int | None = _open(path)
        except OSError as error:
            raise ProbeError(
                f"the device's lock {path} can't be used: {error.strerror or error}",
                "Remove it, or set TMPDIR to a folder that you can write to.",
            ) from error
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            written = os.pread(self._handle, 32, 0).strip()
            self.release()
            raise DeviceBusy(device_name, int(written) if written.isdigit() else None) from None
        with contextlib.suppress(OSError):  # another user's file may be closed to writing: the lock holds all the same
            os.ftruncate(self._handle, 0)
            os.write(self._handle, b"%d\n" % os.getpid())

    def release(self) -> None:
        """Let go of the device."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __enter__(self) -> DeviceLock:
        return self

    def __exit__(self, *raised: object) -> None:
        self.release()


def lock_path(device_id: str) -> Path:
    """Return where the lock of a device lies."""
    return Path(tempfile.gettempdir()) / FOLDER / (re.sub(r"[^A-Za-z0-9._-]", "_", device_id) + ".lock")


def _open(path: Path) -> int:
    """Open the lock's file, not inherited by any process that this one starts; make it and its folder for everybody."""
    # O_NONBLOCK, because opening a pipe that someone has put there would wait.
    flags = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    made = False
    with contextlib.suppress(FileExistsError):
        path.parent.mkdir()
        made = True
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if made:
            os.fchmod(folder, 0o1777)  # as /tmp is: the sticky bit
        # Made and opened by two calls: one that does either fails where /tmp is guarded (fs.protected_regular).
        with contextlib.suppress(FileExistsError):
            handle = os.open(path.name, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o666, dir_fd=folder)
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
