"""Judges what went wrong in a worker: whether an exception means out of memory, and whether a limit was lowered.

An exception is judged by its type, then by the messages along its causes.

The messages are those of the libraries themselves: PyTorch's allocators (CUDA, HIP, XPU, MPS, CPU), the CUDA
driver and runtime, cuBLAS, cuSOLVER, cuFFT, cuDNN, oneDNN, Triton, NCCL, DALI, RMM, Numba, CuPy, JAX and others. A
file's name may contain the same words: `error_verdict` is the one to ask, for workloads and loaders alike.
"""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from batchtune.errors import linked_errors
from batchtune.probe.devices import backends
from batchtune.units import format_size
from batchtune.workloads import first_line

# Each backend adds those of its devices. Compiled ahead: when an error comes, no memory may be left to do it.
_OOM_MESSAGES = [
    r"XPU out of memory",
    r"MPS backend out of memory",
    r"would exceed allowed memory",
    r"std::bad_alloc",
    r"Unable to allocate [\d.]+ [KMGTPE]?i?B for an array",  # NumPy
    r"\[Errno 12\] Cannot allocate memory",
    r"RESOURCE_EXHAUSTED: (?!.{0,200}(larger than|[Qq]uota))",  # JAX; gRPC says it of other resources
    r"OOM when allocating tensor",  # TensorFlow
]
_DISGUISED_MESSAGES = [
    r"could not create a (primitive|memory object)",
    r"can't start new thread",  # its stack needs memory too; but there may be too many threads
]
for _backend in backends():
    _OOM_MESSAGES += _backend.OOM_MESSAGES
    _DISGUISED_MESSAGES += _backend.DISGUISED_MESSAGES
# Neither within a word, a path or a quoted name, nor before a file's ending; but the words of a quoted exception count,
# as in `failed: RuntimeError('CUDA out of memory')`.
_MESSAGE = r"(?:(?<![\w/\\.'\"-])|(?<=\(['\"]))(?:{})(?!\w*[./\\]\w)"
_OOM = re.compile(_MESSAGE.format("|".join(_OOM_MESSAGES)))
_DISGUISED = re.compile(_MESSAGE.format("|".join(_DISGUISED_MESSAGES)))
_QUOTED = re.compile(r"""(?<![\w(])(['"])((?:(?!\1).)*)\1""")
_TRACEBACK = "Traceback (most recent call last)"
_INDENTED_LINES = re.compile(r"^[ \t].*$", re.MULTILINE)

_OOM_TYPES = {"OutOfMemoryError", "MemoryError"}
# Their messages quote names of files, keys and modules.
_NEVER_OOM = (LookupError, ImportError, SyntaxError, UnicodeError)

# Limits that look like a lack of memory, or end the process.
_LIMITS = ("RLIMIT_AS", "RLIMIT_DATA", "RLIMIT_NPROC", "RLIMIT_CPU")
# "Dynamo recompile limit exceeded"; before torch 2.7 "recompile_limit reached" and "cache_size_limit reached".
_RECOMPILE_LIMIT = re.compile(r"(recompile|cache_size)[ _]limit")

OomVerdict = Literal["oom", "disguised"]


def message_verdict(message: str) -> OomVerdict | None:
    """Judge an error message: `oom`, `disguised` (an OOM if a smaller shape passes), or None for neither."""
    if _TRACEBACK in message:  # of another process, with lines of its source
        message = _INDENTED_LINES.sub("", message)
    message = _QUOTED.sub(_without_path, message)
    if _OOM.search(message):
        return "oom"
    if _DISGUISED.search(message):
        return "disguised"
    return None


def _without_path(quoted: re.Match[str]) -> str:
    if "/" in quoted[2] or "\\" in quoted[2]:
        return ""
    return quoted[0]


def error_verdict(error: BaseException) -> OomVerdict | None:
    """Judge an exception by its own type and message, then by those of what it was raised from.

    After `raise ... from cause`, the cause's verdict holds. An exception raised while another was being handled (its
    `__context__`) may restate that one, or be a bug in the handler: if only the other one is an OOM, the verdict is
    `disguised`. After `raise ... from None` the other one does not count.
    """
    verdicts = {_own_verdict(cause) for cause in linked_errors(error)}
    if "oom" in verdicts:
        return "oom"
    if "disguised" in verdicts or any(
        _own_verdict(other) for other in linked_errors(error, contexts=True)
    ):
        return "disguised"
    return None


@contextmanager
def noting_ooms(noted: list[str]) -> Iterator[None]:
    """Note the first OOM raised within, and where, even if the workload catches it.

    Python calls back for every exception and call in this thread (`sys.settrace`), so time nothing in here.
    """
    before = sys.gettrace()
    sys.settrace(_OomTrace(noted))
    try:
        yield
    finally:
        sys.settrace(before)


class _OomTrace:
    """A trace function, of `noting_ooms`."""

    def __init__(self, noted: list[str]) -> None:
        self.noted = noted

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "call":
            frame.f_trace_lines = False
        elif (
            event == "exception"
            and not self.noted
            and error_verdict(argument[1]) == "oom"
        ):
            self.noted.append(
                f"{first_line(argument[1])} ({Path(frame.f_code.co_filename).name}, line {frame.f_lineno})"
            )
        return self


def first_noted(trace: Any) -> str | None:
    """Return the OOM that a trace function of `noting_ooms` has noted; None if there is none."""
    if isinstance(trace, _OomTrace) and trace.noted:
        return trace.noted[0]
    return None


def _own_verdict(error: BaseException) -> OomVerdict | None:
    if any(kind.__name__ in _OOM_TYPES for kind in type(error).__mro__):
        return "oom"
    if isinstance(error, _NEVER_OOM):
        return None
    try:
        if not isinstance(error, OSError):
            return message_verdict(str(error))
        if error.errno == errno.ENOMEM or f"[Errno {errno.ENOMEM}]" in str(error):
            return "oom"
        return None
    except Exception:  # its own __str__ fails: it says nothing
        return None


def process_limits() -> dict[str, int]:
    """Return the soft limits by name, those that are not set left out."""
    import resource  # not on Windows

    limits = {name: resource.getrlimit(getattr(resource, name))[0] for name in _LIMITS}
    return {
        name: limit for name, limit in limits.items() if limit != resource.RLIM_INFINITY
    }


def lowered_limit(before: Mapping[str, int]) -> str | None:
    """Return a message that names a limit lower than `before`; None if there is none.

    The limit is lifted again as far as possible: below it, the worker might lack the memory to answer.
    """
    import resource

    for name, limit in process_limits().items():
        if limit < before.get(name, limit + 1):
            kind = getattr(resource, name)
            _, hard = resource.getrlimit(kind)
            resource.setrlimit(kind, (hard, hard))
            value = f"{limit:,}"
            if name in ("RLIMIT_AS", "RLIMIT_DATA"):
                value = format_size(limit)
            return (
                f"the workload lowers the limit {name} of its process to {value}: the probe would measure that instead "
                "of memory. Take resource.setrlimit out of it, and give the limit with --memory"
            )
    return None


def compilations() -> int:
    """Return how many times torch.compile has compiled a function in this process, or tried to."""
    return int(_dynamo_counters().get("frames", {}).get("total", 0))


def at_recompile_limit() -> bool:
    """Return whether some function reached torch's limit of compiled versions: other shapes run it uncompiled."""
    return any(
        _RECOMPILE_LIMIT.search(reason)
        for reason in _dynamo_counters().get("unimplemented", {})
    )


def _dynamo_counters() -> Mapping[str, Mapping[str, Any]]:
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return getattr(dynamo, "counters", {})
