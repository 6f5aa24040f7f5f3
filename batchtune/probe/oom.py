"""Was it a lack of memory? Judged by the exception's type, then from the messages along its causes.

The messages are those of the libraries themselves: PyTorch's allocators (CUDA, HIP, XPU, MPS, CPU), the CUDA
driver and runtime, cuBLAS, cuSOLVER, cuFFT, cuDNN, oneDNN, Triton and NCCL.
"""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from batchtune.probe.devices import backends
from batchtune.units import parse_size
from batchtune.workloads.tracebacks import first_line

# Those of one kind of device are in its backend. Compiled ahead: when an error comes, no memory may be left for it.
_OOM = re.compile(
    "|".join(
        [
            r"\bXPU out of memory(?!\.\w)",  # not the name of a file
            r"MPS backend out of memory",
            r"would exceed allowed memory",
            r"std::bad_alloc",
            *(pattern for backend in backends() for pattern in backend.OOM_MESSAGES),
        ]
    )
)
_DISGUISED = re.compile(
    "|".join(
        [
            r"could not create a (primitive|memory object)",
            r"can't start new thread",  # its stack needs memory, too; but it may be the number of threads
            *(pattern for backend in backends() for pattern in backend.DISGUISED_MESSAGES),
        ]
    )
)

# How PyTorch's allocators (CPU; CUDA and others) and NumPy write how much they could not get.
_REQUESTED_BYTES = re.compile(r"you tried to allocate (\d+) bytes")
_REQUESTED_SIZE = re.compile(r"(?:Tried|Unable) to allocate ([\d.]+ [KMGT]iB)")

_OOM_TYPES = {"OutOfMemoryError", "MemoryError", "_ArrayMemoryError"}

Verdict = Literal["oom", "disguised"]


def message_verdict(message: str) -> Verdict | None:
    """Return what an error message says: `oom`, `disguised` (an OOM if a smaller shape passes), or None for neither."""
    if _OOM.search(message):
        return "oom"
    return "disguised" if _DISGUISED.search(message) else None


def error_verdict(error: BaseException) -> Verdict | None:
    """Return what an exception says, its own type and message first, then those of what it was raised from.

    `raise ... from cause` says that the cause is why, so the cause's verdict is taken. An exception that came up
    while another was being handled (its `__context__`) may be that one in other words, or a fault in the handling;
    so where only that other was a lack of memory, this is one if a smaller shape passes: `disguised`. `from None`
    says that it has nothing to do with it.
    """
    verdicts = {_own_verdict(cause) for cause in _causes(error)}
    if "oom" in verdicts:
        return "oom"
    if "disguised" in verdicts or any(_own_verdict(other) for other in _contexts(error)):
        return "disguised"
    return None


@contextmanager
def noting_ooms(found: list[str]) -> Iterator[None]:
    """Note the first lack of memory that is raised within, and where, whether or not the workload catches it.

    Python calls back for every exception that passes a frame of this thread (`sys.settrace`), and for every call: a
    step takes a little longer, so none that is timed should run in here.
    """

    def on_event(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "call":
            frame.f_trace_lines = False
        elif event == "exception" and not found and error_verdict(argument[1]) == "oom":
            found.append(f"{first_line(argument[1])} ({Path(frame.f_code.co_filename).name}, line {frame.f_lineno})")
        return on_event

    before = sys.gettrace()
    sys.settrace(on_event)
    try:
        yield
    finally:
        sys.settrace(before)


def requested_bytes(message: str) -> int | None:
    """Return how much memory was asked for where an error says that it was not there; None where it does not say."""
    if match := _REQUESTED_BYTES.search(message):
        return int(match[1])
    match = _REQUESTED_SIZE.search(message)
    return parse_size(match[1]) if match else None


def _own_verdict(error: BaseException) -> Verdict | None:
    if isinstance(error, MemoryError) or any(kind.__name__ in _OOM_TYPES for kind in type(error).__mro__):
        return "oom"
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return "oom"
    try:
        return message_verdict(str(error))
    except Exception:  # its own __str__ fails: it says nothing
        return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Return the exception and what it was raised from, each once."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__


def _contexts(error: BaseException) -> Iterator[BaseException]:
    """Return what was being handled when the exception, or one of those behind it, came up; each once."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        current = waiting.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        waiting.append(current.__cause__)
        if not current.__suppress_context__:
            waiting.append(current.__context__)
