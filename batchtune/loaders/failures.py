"""Says what went wrong with a loader: an exception of the user's code, or of torch's DataLoader, as an outcome."""

from __future__ import annotations

import contextlib
import errno
import re
import shutil
import signal
import time
from collections.abc import Iterator
from multiprocessing import queues
from typing import Any

from batchtune.errors import BatchtuneError, LoaderError, WorkloadError
from batchtune.loaders.base import OpenLoader
from batchtune.loaders.protocol import Failed
from batchtune.processes.worker import oom_kills
from batchtune.results import LoaderOutcome
from batchtune.units import format_size
from batchtune.workloads.loading import first_line, raised_elsewhere, user_traceback

_SHARED_MEMORY = "/dev/shm"
# As torch, Python and the C library write them.
_KILLED = re.compile(r"DataLoader worker \(pid \d+\) is killed by signal: ([\w ]+)")
_EXITED = re.compile(r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) exited unexpectedly")
_CUT = re.compile(r"(?:Connection\w*|BrokenPipe|EOF|FileNotFound)Error: (?!Caught)")
_EXIT_CODE = re.compile(r"exited unexpectedly with exit code (\d+)")
_NO_SHARED_MEMORY = re.compile(
    r"unable to (?:allocate|open|resize) shared memory|(?:shm|torch_)\S*.*No space left on device|out of shared memory"
)
_NO_MEMORY = re.compile(
    r"DefaultCPUAllocator: (?:can't|not enough)|Cannot allocate memory|std::bad_alloc|CUDA out of memory|"
    r"Unable to allocate [\d.]+ [KMGT]?i?B"
)
_NO_FILES = re.compile(r"Too many open files|received 0 items of ancdata")
_TIMED_OUT = re.compile(r"DataLoader timed out after ([\d.]+) seconds")

_PICKLE = (
    "Workers that are spawned, or come from a fork server, are sent the data set: define its functions and classes at "
    "the top level of the file and open files and locks in the worker, or use fork."
)

# How long a process may take to end after its connections are cut.
_ENDING_SECONDS = 0.5
_SENDING = "while a worker sent a batch"
_UNSENT = "Return tensors, arrays and plain values from the data set and from collate_fn."


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
        last_lines = error.traceback if isinstance(error, WorkloadError) else None
        fatal = isinstance(error, WorkloadError)
        return Failed(outcome="error", message=error.message, hint=error.hint, traceback=last_lines, fatal=fatal)
    said = "\n".join(f"{type(one).__name__}: {_text(one)}" for one in _linked(error))
    outcome, message, hint = _known(said, loader, kills)
    if message is not None:
        return Failed(outcome=outcome, message=message, hint=hint)
    first, last_lines = raised_elsewhere(error) or (first_line(error), user_traceback(error))
    explained = loader.explain(error) if loader is not None and isinstance(error, Exception) else None
    message = f"{first} ({explained})" if explained else first
    if hint == _UNSENT:
        message = f"a batch can't be sent to the training process: {first}"
    # What can't be pickled fails in Python's own code.
    where = None if hint in (_PICKLE, _UNSENT) or last_lines == first else last_lines
    return Failed(outcome=outcome, message=message, hint=hint, traceback=where)


def missing_library(error: BaseException, spec: str) -> LoaderError | None:
    """Return the error that names the extra to install, if a library of one is missing."""
    for one in _linked(error):
        if isinstance(one, ModuleNotFoundError) and (one.name or "").split(".")[0] == "nvidia":
            return LoaderError(
                f"{spec} needs DALI, which is not installed: {one}",
                "Install it: pip install 'batchtune[dali]', with the nvidia-dali package for your CUDA.",
            )
    return None


def _known(said: str, loader: OpenLoader | None, kills: int | None) -> tuple[LoaderOutcome, str | None, str | None]:
    """Recognise what torch and the system say; no message: it is the user's own error."""
    if _NO_FILES.search(said) or f"[Errno {errno.EMFILE}]" in said:
        return (
            "error",
            "too many open files: each tensor that a worker sends takes one",
            "Raise the limit (ulimit -n 65536), or call torch.multiprocessing.set_sharing_strategy('file_system') in "
            "your file.",
        )
    code = _exit_code(said, loader)
    if code == -signal.SIGBUS or _NO_SHARED_MEMORY.search(said):
        size = ""
        with contextlib.suppress(OSError):
            size = f": it holds {format_size(shutil.disk_usage(_SHARED_MEMORY).total)}"
        small = f"{_SHARED_MEMORY} is too small for the batches in flight{size}"
        return (
            "shared_memory",
            f"a worker was killed by a bus error: probably {small}" if code == -signal.SIGBUS else small,
            "Enlarge it (docker run --shm-size=8g, or --ipc=host), or use fewer workers or a lower prefetch_factor.",
        )
    if code == -signal.SIGKILL:
        now = oom_kills()
        if kills is not None and now is not None and now > kills:
            return "oom", "the kernel killed a worker for want of memory", "Use fewer workers or prefetch less."
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return "crash", f"a worker was killed by {name}", "Look at what it printed, and run it with num_workers=0."
    if code is not None or _KILLED.search(said) or _EXITED.search(said):
        return (
            "crash",
            "a worker ended unexpectedly" + (f" with exit code {code}" if code else ""),
            "Look at what it printed. Under spawn and forkserver, workers import your file anew, by its name.",
        )
    if "MemoryError:" in said or _NO_MEMORY.search(said):
        return "oom", None, "Use fewer workers, a lower prefetch_factor or smaller batches."
    if match := _TIMED_OUT.search(said):
        return "timeout", f"no batch came within the DataLoader's own timeout of {match[1]} s", None
    if _SENDING in said:
        return "error", None, _UNSENT
    if "pickle" in said.lower():
        return "error", None, _PICKLE
    return "error", None, None


def _exit_code(said: str, loader: OpenLoader | None) -> int | None:
    """Return the exit code of a worker that died, negative for a signal; None: none has, or it can't be told.

    torch knows it only if it looks at the worker before multiprocessing does, and may find its connection cut first.
    """
    if killed := _KILLED.search(said):
        names = {signal.strsignal(number): -number for number in signal.Signals}
        return names.get(killed[1].strip())
    if code := _EXIT_CODE.search(said):
        return int(code[1])
    if loader is None or not (_EXITED.search(said) or _CUT.match(said)):
        return None
    deadline = time.monotonic() + _ENDING_SECONDS
    while not (codes := loader.exit_codes()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return codes[0] if codes else None


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # its own __str__ fails
        return ""


def _linked(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, and those that it came from."""
    seen: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in seen:
        yield one
        seen.append(one)
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
