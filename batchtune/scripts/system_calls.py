"""The system calls of `mounts` and `landlock`, which Python's library lacks."""

from __future__ import annotations

import ctypes
import os
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAPBSET_DROP = 24


def call(function: str, *arguments: Any) -> int:
    """Return what a function of the C library returns. Raises OSError if that is negative."""
    result: int = getattr(_libc, function)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")
    return result


def system_call(number: int, *arguments: Any) -> int:
    """Return what a system call returns. Raises OSError if that is negative."""
    return call("syscall", number, *arguments)


def give_up_new_privileges() -> None:
    """Let no program that this process executes gain privileges."""
    call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def give_up_capability(capability: int) -> None:
    """Let no program that this process executes have a capability, not even as root."""
    call("prctl", _PR_CAPBSET_DROP, capability, 0, 0, 0)
