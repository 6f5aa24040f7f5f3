"""Says what went wrong with a loader: an exception of the user's code, or of torch's DataLoader, as an outcome."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from multiprocessing import queues
from typing import Any

from msgspec.structs import replace

from batchtune.errors import BatchtuneError, LoaderError, OptionError, WorkloadError
from batchtune.loaders.base import OpenLoader
from batchtune.loaders.memory import shared_memory
from batchtune.probe.oom import error_verdict, message_verdict
from batchtune.processes.worker import Failed, oom_kills
from batchtune.units import format_size
from batchtune.workloads.loading import first_line, raised_elsewhere, user_traceback

# As torch, Python and the C library write them.
_DIED = re.compile(r"DataLoader worker \(pid.*?\) (?:is killed by signal|exited unexpectedly).*")
_NO_SHARED_MEMORY = re.compile(
    r"unable to (?:allocate|open|resize) shared memory|(?:shm|torch_)\S*.*No space left on device|out of shared memory"
)
# The last line of an error that a worker passed on.
_MEMORY_ERROR = re.compile(rf"[\w.]*(?:MemoryError|OutOfMemoryError)\b|\w+: \[Errno {errno.ENOMEM}\]")
_OTHER_SYSTEM_ERROR = re.compile(r"\w+: \[Errno \d+\]")  # it may name any file
_NO_FILES = re.compile(rf"Too many open files|received 0 items of ancdata|\[Errno {errno.EMFILE}\]")
_TIMED_OUT = re.compile(r"DataLoader timed out after ([\d.]+) seconds")

_SENDING = "while a worker sent a batch"
_FEWER = "Use fewer workers, a lower prefetch_factor or smaller batches."
_PICKLE = (
    "Workers that are spawned, or come from a fork server, are sent the data set: define its functions and classes at "
    "the top level of the file and open files and locks in the worker, or use fork."
)


def report_unsent_batches() -> None:
    """Make workers of torch's that are forked from this process pass on why a batch can't be sent.

    multiprocessing sends from a thread of its own, which prints the error and goes on: the DataLoader would wait for
    that batch forever.
    """
    from torch._utils import ExceptionWrapper
    from torch.utils.data import get_worker_info

    queue_class: Any = queues.Queue
    printed = queue_class._on_queue_feeder_error

    def report(queue: Any, error: Exception, item: Any) -> None:
        if get_worker_info() is None or not isinstance(item, tuple):
            printed(error, item)
        else:
            raised = (type(error), error, error.__traceback__)
            queue.put((item[0], ExceptionWrapper(raised, where=_SENDING)))  # type: ignore[no-untyped-call]

    queue_class._on_queue_feeder_error = report


def failed(error: BaseException, loader: OpenLoader | None = None, *, kills: int | None = None) -> Failed:
    """Return what an error was, in words.

    `loader` is the one whose epoch raised it; `kills` how many processes the kernel had ended for want of memory when
    it was opened.
    """
    if isinstance(error, BatchtuneError):
        failure = Failed(message=error.message, hint=error.hint)
        if isinstance(error, WorkloadError):
            failure = replace(failure, traceback=error.traceback, fatal=True)
        if isinstance(error, OptionError):
            failure = replace(failure, stage="options")
        return failure
    known = _known(error, kills)
    if known is not None:
        return known
    message, last_lines = raised_elsewhere(error) or (first_line(error), user_traceback(error))
    said = _said(error)
    # Pickling fails in Python's own code, so its lines don't help.
    if _SENDING in said:
        return Failed(
            message=f"a batch can't be sent to the training process: {message}",
            hint="Return tensors, arrays and plain values from the data set and from collate_fn.",
        )
    is_out_of_memory = _is_out_of_memory(error)
    if not is_out_of_memory and "pickle" in said.lower():
        return Failed(message=message, hint=_PICKLE)
    failure = Failed(message=message)
    if is_out_of_memory:
        failure = replace(failure, outcome="oom", hint=_FEWER)
    if last_lines != message:
        failure = replace(failure, traceback=last_lines)
    if loader is not None and isinstance(error, (Exception, SystemExit)):
        explained = loader.explain(error)
        if explained:
            failure = replace(failure, message=f"{message} ({explained})")
    return failure


def missing_library(error: BaseException, spec: str) -> LoaderError | None:
    """Return the error that names the extra to install, if a library of one is missing."""
    for cause in _causes(error):
        if isinstance(cause, ModuleNotFoundError) and (cause.name or "").split(".")[0] == "nvidia":
            return LoaderError(
                f"{spec} needs DALI, which is not installed: {cause}",
                "Install it: pip install 'batchtune[dali]', with the nvidia-dali package for your CUDA.",
            )
    return None


def _known(error: BaseException, kills: int | None) -> Failed | None:
    """Recognise what torch and the system say; None: it is the user's own error."""
    said = _said(error)
    if _NO_FILES.search(said):
        return Failed(
            message="too many open files: each tensor that a worker sends takes one",
            hint="Raise the limit (ulimit -n 65536), or call "
            "torch.multiprocessing.set_sharing_strategy('file_system') in your file.",
        )
    if _NO_SHARED_MEMORY.search(said):
        memory = shared_memory()
        message = "/dev/shm is too small for the batches in flight"
        if memory:
            message += f": it holds {format_size(memory.total)}"
        return Failed(
            outcome="shared_memory",
            message=message,
            hint="Enlarge it (docker run --shm-size=8g, or --ipc=host), or use fewer workers or a lower "
            "prefetch_factor.",
        )
    if deaths := _DIED.findall(said):
        death = deaths[-1].strip()  # torch's own cause names the signal
        now = oom_kills()
        if kills is not None and now is not None and now > kills:
            return Failed(outcome="oom", message=f"{death} The kernel killed it for want of memory.", hint=_FEWER)
        return Failed(
            outcome="crash",
            message=death,
            hint="Look at what it printed, and run it with num_workers=0. Under spawn and forkserver, workers import "
            "your file again, by its name.",
        )
    if match := _TIMED_OUT.search(said):
        return Failed(outcome="timeout", message=f"no batch came within the DataLoader's own timeout of {match[1]} s")
    return None


def _is_out_of_memory(error: BaseException) -> bool:
    """Judge an error as the probe does; of a worker's, which torch passes on as text, the lines that name errors."""
    _, passed_on, report = _said(error).rpartition("Original Traceback")
    if not passed_on:
        return error_verdict(error) == "oom"
    named = [line for line in report.splitlines() if line and not line[0].isspace()]
    return any(
        _MEMORY_ERROR.match(line) or (message_verdict(line) == "oom" and not _OTHER_SYSTEM_ERROR.match(line))
        for line in named
    )


def _said(error: BaseException) -> str:
    """Return the types and messages of an exception and of those that it came from."""
    return "\n".join(f"{type(cause).__name__}: {_text(cause)}" for cause in _causes(error))


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # its own __str__ fails
        return ""


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, and those that it came from."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        yield cause
        seen.append(cause)
        if cause.__cause__ is not None or cause.__suppress_context__:
            cause = cause.__cause__
        else:
            cause = cause.__context__
