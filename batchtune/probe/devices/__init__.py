"""The kinds of devices that can be probed: their registry, the base classes, and the lock for one probe at a time.

Each kind is one module, registered here. Importing this imports none of them.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import stat
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from batchtune.errors import ProbeError

if TYPE_CHECKING:
    import torch

    from batchtune.results import Device, DoctorGpu, ProbedWith

# The `--device` names, each a module with its `BACKEND`, imported when needed. `auto` takes the first available one.
_KINDS = ("cuda", "cpu")
DEVICE_FORMS = "auto, cpu, cuda or cuda:N"
"""The forms of a `--device` value."""
LOCKS_FOLDER = "batchtune-locks"


def is_device(name: str) -> bool:
    """Return whether `--device` takes this, on some machine, besides a law."""
    return re.fullmatch(r"auto|cpu|cuda(:\d+)?", name) is not None


def backends() -> Iterator[DeviceBackend]:
    """Yield all backends, in the order in which `auto` prefers them."""
    return map(_backend, _KINDS)


def backend_for(device: str) -> DeviceBackend:
    """Return the backend of a valid `--device` value; `auto` may import torch to find it."""
    if device == "auto":
        return next(backend for backend in backends() if backend.is_available())
    return _backend(device.partition(":")[0])


def describe_environment() -> dict[str, str]:
    """Return the variables that affect a step's memory or time, if they are set."""
    variables = {}
    for backend in backends():
        for name in backend.VARIABLES:
            if os.environ.get(name):
                variables[name] = os.environ[name]
    return variables


def _backend(kind: str) -> DeviceBackend:
    backend: DeviceBackend = import_module(f"{__name__}.{kind}").BACKEND
    return backend


class DeviceIdentity(NamedTuple):
    """A device that was asked for by name."""

    id: str  # unique on this machine: `cpu`, or the UUID
    name: str  # for people
    shared: bool = False  # whether a probe may start while another one uses it; times are then unreliable


class Meter(ABC):
    """One device, opened in the worker process: limits its memory, so that running out is real, and measures it.

    Open it, `hold` what training holds, `limit` it, set up the workload, `settle` it; then read it for each trial.
    """

    device: Device  # as it is recorded, complete once settled
    torch_device: torch.device

    @abstractmethod
    def limit(self) -> None:
        """Enforce `device.limit_bytes` from now on."""

    def hold(self, examples: int, spent_bytes: int = 0) -> None:
        """Allocate the memory that training needs in addition to its steps: a sampler's, a data loader's.

        Less `spent_bytes`, which this process spends on what training will not need.
        """
        return

    @abstractmethod
    def settle(self, reserve_bytes: int, ddp_bytes: int) -> None:
        """Compute and enforce the final limit, with the workload set up. Raises ProbeError if nothing is left.

        Keeps `reserve_bytes` free for the user, and `ddp_bytes` for one copy of the gradients.
        """

    @abstractmethod
    def lower(self, limit_bytes: int) -> None:
        """Enforce a limit no higher than the settled one: that of another rank. Raises ProbeError likewise."""

    @abstractmethod
    def reset(self) -> None:
        """Start a new peak."""

    @abstractmethod
    def peak(self) -> int | None:
        """Return the most bytes in use since the reset; None if the system can't tell."""

    @abstractmethod
    def in_use(self) -> int:
        """Return the bytes in use now."""

    def allocated(self) -> int:
        """Return the same without free memory that the allocator can't give back, as far as that is known."""
        return self.in_use()

    def reserved(self) -> int | None:
        """Return the most bytes the allocator held since the reset, with its cache; None if it has no cache."""
        return None

    def retries_and_ooms(self) -> tuple[int, int]:
        """Return how often this process's allocator has emptied its cache to go on, and run out of memory."""
        return 0, 0

    def note_clock(self) -> None:
        """Note the device's clock for `surroundings`: called with a step in its queue, as an idle device lowers it."""
        return

    def surroundings(self) -> dict[str, Any]:
        """Return what a trial records of other programs since the last call, the clock, and memory outside torch."""
        return {}

    def synchronize(self) -> None:
        """Wait for all that was queued on the device."""
        return

    def release(self) -> None:
        """Give cached memory back to the device."""
        return

    def free_workspaces(self) -> None:
        """Free what libraries keep from their first call on: in training other tensors lie around it."""
        return

    def healthy(self) -> bool:
        """Return whether the device still answers, after an error."""
        return True

    def switches(self) -> dict[str, Any]:
        """Return the settings of this kind of device that affect memory and time, after the workload's setup."""
        return {}

    def worn(self) -> bool:
        """Return whether too much is held between trials to compare the next one with the first."""
        return False


class DeviceBackend(ABC):
    """One kind of device."""

    # Patterns of errors that mean out of memory, and of those that do if a smaller shape passes.
    OOM_MESSAGES: ClassVar[Sequence[str]] = ()
    DISGUISED_MESSAGES: ClassVar[Sequence[str]] = ()
    # Environment variables that affect memory or time, which are recorded.
    VARIABLES: ClassVar[Sequence[str]] = ()
    # Set before a worker process starts.
    WORKER_ENVIRONMENT: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def is_available(self) -> bool:
        """Return whether this machine has such a device that torch can use."""

    @abstractmethod
    def identify(self, device: str) -> DeviceIdentity:
        """Return which device a `--device` value means, without using its memory. Raises ProbeError if missing."""

    @abstractmethod
    def open(self, device: str, settings: ProbedWith, limit_bytes: int | None) -> Meter:
        """Open the device with the settings' cap and fraction, or with the limit of a continued run.

        Raises ProbeError if it is missing, or has less memory free than the limit needs.
        """

    def is_broken_by_fork(self) -> bool:
        """Return whether an import used a device before this process was forked, which makes it unusable here."""
        return False

    def seen_by_torch(self) -> list[DoctorGpu]:
        """Describe the devices of this kind that torch sees; none if torch can't be used."""
        return []

    def seen_by_driver(self) -> tuple[list[DoctorGpu], str | None, str | None]:
        """Describe the devices that the driver knows; then the driver's version, and why it can't be asked."""
        return [], None, None


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
    # Another user's file may not be writable: the lock holds anyway.
    with contextlib.suppress(OSError):
        os.ftruncate(lock.fileno(), 0)
        os.write(lock.fileno(), b"%d\n" % os.getpid())
    return lock


def lock_path(device_id: str) -> Path:
    """Return the path of a device's lock file."""
    return (
        Path(tempfile.gettempdir())
        / LOCKS_FOLDER
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
