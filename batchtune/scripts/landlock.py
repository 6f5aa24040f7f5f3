"""Landlock: lets a process, and all that it starts, write beneath some folders only (Linux 6.2, without privileges)."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterable, Mapping
from typing import Any

# The same numbers on all architectures (include/uapi/asm-generic/unistd.h).
_CREATE_RULESET = 444
_ADD_RULE = 445
_RESTRICT_SELF = 446
_VERSION_FLAG = 1
_PATH_BENEATH = 1
_PR_SET_NO_NEW_PRIVS = 38
# Devices, shared memory, and what a process may change of itself.
_KERNELS = ("/dev", "/proc")
# Older versions can't forbid truncate(2).
_LEAST_VERSION = 3
# WRITE_FILE; REMOVE_DIR, REMOVE_FILE, MAKE_*, REFER and TRUNCATE (include/uapi/linux/landlock.h).
_WRITES = 1 << 1 | sum(1 << bit for bit in range(4, 15))

_libc = ctypes.CDLL(None, use_errno=True)


def call(function: str, *arguments: Any) -> int:
    """Return what a function of the C library, which Python's lacks, returns. Raises OSError if that is negative."""
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
    for folder in (*writable, *_KERNELS):
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
