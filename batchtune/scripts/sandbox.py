"""Keeps a process from the user's disks: by mounts of its own, or by Landlock."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# Landlock: lets a process, and all that it starts, write beneath some folders only (Linux 6.2, without privileges).

# The same numbers on all architectures (include/uapi/asm-generic/unistd.h).
_CREATE_RULESET = 444
_ADD_RULE = 445
_RESTRICT_SELF = 446
_VERSION_FLAG = 1
_PATH_BENEATH = 1
_PR_SET_NO_NEW_PRIVS = 38
# Devices, shared memory, and what a process may change of itself.
_LANDLOCK_KERNELS = ("/dev", "/proc")
# Older versions can't forbid truncate(2).
_LEAST_VERSION = 3
# WRITE_FILE; REMOVE_DIR, REMOVE_FILE, MAKE_*, REFER and TRUNCATE (include/uapi/linux/landlock.h).
_WRITES = 1 << 1 | sum(1 << bit for bit in range(4, 15))

_libc = ctypes.CDLL(None, use_errno=True)


def call(function: str, *arguments: Any) -> int:
    """Call a function of the C library that Python lacks, and return its result. Raises OSError if that is negative."""
    result: int = getattr(_libc, function)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")
    return result


def confine(writable: Iterable[str]) -> None:
    """Let this process write, make and delete files beneath these folders only, and use devices.

    Raises OSError if Linux can't do that. What it can't forbid is to change the mode, the owner or the times of a file.
    """
    version = call("syscall", _CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION_FLAG)
    if version < _LEAST_VERSION:
        raise OSError(f"Landlock is of version {version}, not {_LEAST_VERSION}")
    handled = struct.pack("=Q", _WRITES)
    ruleset = call(
        "syscall", _CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0
    )
    for folder in (*writable, *_LANDLOCK_KERNELS):
        if not os.path.isdir(folder):
            continue
        parent = os.open(folder, os.O_PATH)
        rule = struct.pack("=Qi", _WRITES, parent)
        call("syscall", _ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
        os.close(parent)
    call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("syscall", _RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def stay_inside(options: Mapping[str, Any]) -> None:
    """Keep this process from the user's files, if a scheduler has started it outside of the script's own processes.

    Raises OSError where Landlock can't.

    Args:
        options: `outside`, a file that the script's own processes can't write to, and `writable` folders.
    """
    try:
        os.close(os.open(options["outside"], os.O_WRONLY))
    except OSError as error:
        if error.errno != errno.ENOENT:  # on another machine
            return
    confine(options["writable"])


_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000
_MS_RDONLY = 1
_MS_NOSUID = 2
_MS_NODEV = 4
_MS_REMOUNT = 32
_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_PRIVATE = 1 << 18
_MS_RELATIME = 1 << 21
# What a user namespace may not take from a mount: nosuid, nodev, noexec, noatime and nodiratime are the same in
# statvfs(3) as in mount(2).
_SAME_FLAGS = 2 | 4 | 8 | 1024 | 2048
_ST_RELATIME = 4096
_PR_CAPBSET_DROP = 24
_CAP_SYS_PTRACE = 19
_CAP_SYS_ADMIN = 21
# They hold devices and the kernel's own files.
_KERNELS = ("/proc", "/sys", "/dev")
# Under a layer, a program's socket answers no more; these are read-only instead.
_OF_SOCKETS = ("/run", "/var")
SHARED_MEMORY = "/dev/shm"


def enter(
    layers: Path,
    folder: Path,
    *,
    cached: Mapping[str, Path],
    writable: Iterable[str],
    read_only: str,
    privileged: bool = True,
) -> None:
    """Give this process, and all that it starts, mounts of its own, and go to its working `folder` there.

    Every disk gets a layer below `layers` that takes what is written, or is read-only where that can't be.

    Args:
        layers: A new folder.
        folder: Where the process works; it must be able to write there.
        cached: Folders with a layer of their own each.
        writable: Folders that stay as they are.
        read_only: A file that can't be written to.
        privileged: Whether to try without a user namespace, which takes root.

    Raises:
        OSError: The kernel or its settings don't allow this.
    """
    could_write = os.access(folder, os.W_OK)
    options = _unshare(privileged=privileged)
    _mount("none", "/", _MS_REC | _MS_PRIVATE)
    import psutil  # loaded here: `stay_inside` runs in every Python of a script

    disks = {part.mountpoint for part in psutil.disk_partitions(all=True)} - {"/"}
    top = [
        entry.path for entry in os.scandir("/") if entry.is_dir(follow_symlinks=False)
    ]
    handles = _handles([*disks, *top, *cached])
    targets = sorted(target for target in handles if not _is_in(target, _KERNELS))
    layer_handles = [
        _made_layer(cached.get(target, layers / str(number)))
        for number, target in enumerate(targets)
    ]
    kept = _handles([*writable, read_only])
    _own_shared_memory()
    for target, layer in zip(targets, layer_handles, strict=True):
        wants_layer = target not in _OF_SOCKETS or folder.is_relative_to(target)
        is_covered = wants_layer and _cover(target, handles[target], layer, options)
        if not is_covered and target in disks:
            _bind(handles[target], target, read_only=True)
    for target, handle in kept.items():
        _bind(handle, target, read_only=target == read_only)
    _make_read_only("/")
    os.chdir(folder)
    if could_write:
        # Neither on a disk that has no layer, nor in a folder of a group that the user namespace lacks.
        with tempfile.TemporaryFile(dir=folder):
            pass
    for capability in (_CAP_SYS_PTRACE, _CAP_SYS_ADMIN):
        with contextlib.suppress(PermissionError):  # it has none
            call("prctl", _PR_CAPBSET_DROP, capability, 0, 0, 0)


def _unshare(*, privileged: bool) -> str:
    """Get mounts of one's own, as root or in a user namespace; return the options that overlayfs then needs."""
    with contextlib.suppress(PermissionError):
        if privileged:
            call("unshare", _CLONE_NEWNS)
            return ""
    user = os.geteuid()
    group = os.getegid()
    call("unshare", _CLONE_NEWUSER | _CLONE_NEWNS)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return ",userxattr"


def _handles(paths: Iterable[str]) -> dict[str, int]:
    """Return descriptors of files and folders that no later mount hides; those that can't be reached are left out."""
    handles = {}
    for path in paths:
        with contextlib.suppress(OSError):
            handles[path] = os.open(path, os.O_PATH)
    return handles


def _made_layer(layer: Path) -> int:
    """Make a layer's folders, and return its descriptor."""
    (layer / "upper").mkdir(parents=True, exist_ok=True)
    (layer / "work").mkdir(exist_ok=True)
    return os.open(layer, os.O_PATH)


def _cover(target: str, handle: int, layer: int, options: str) -> bool:
    """Mount a layer over a folder; return whether overlayfs can do that."""
    top = f"/proc/self/fd/{layer}"
    folders = f"lowerdir=/proc/self/fd/{handle},upperdir={top}/upper,workdir={top}/work"
    with contextlib.suppress(OSError):
        _mount("overlay", target, 0, "overlay", folders + options)
        return True
    return False


def _own_shared_memory() -> None:
    """Mount new shared memory, as large. What running programs share stays theirs; folders there become read-only."""
    if not os.path.isdir(SHARED_MEMORY):
        return
    entries = list(os.scandir(SHARED_MEMORY))
    are_folders = {entry.path: entry.is_dir() for entry in entries}
    handles = _handles(are_folders)
    size = os.statvfs(SHARED_MEMORY)
    options = f"mode=1777,size={size.f_blocks * size.f_frsize}"
    _mount("tmpfs", SHARED_MEMORY, _MS_NOSUID | _MS_NODEV, "tmpfs", options)
    for path, handle in handles.items():
        with contextlib.suppress(OSError):  # it was removed meanwhile
            if are_folders[path]:
                os.mkdir(path)
            else:
                Path(path).touch()
            _bind(handle, path, read_only=are_folders[path])


def _bind(handle: int, target: str, *, read_only: bool) -> None:
    """Mount what a descriptor is of, which a layer may hide by now."""
    _mount(f"/proc/self/fd/{handle}", target, _MS_BIND | _MS_REC)
    if read_only:
        _make_read_only(target)


def _make_read_only(target: str) -> None:
    flags = os.statvfs(target).f_flag
    kept = flags & _SAME_FLAGS
    if flags & _ST_RELATIME:
        kept |= _MS_RELATIME
    _mount("none", target, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | kept)


def _mount(
    source: str, target: str, flags: int, kind: str = "", data: str = ""
) -> None:
    call(
        "mount",
        source.encode(),
        target.encode(),
        kind.encode(),
        ctypes.c_ulong(flags),
        data.encode(),
    )


def _is_in(path: str, folders: Iterable[str]) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in folders)
