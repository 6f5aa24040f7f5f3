"""Says what went wrong with a loader: an exception of the user's code, or of torch's DataLoader, as an outcome."""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing import queues
from multiprocessing.process import BaseProcess
from typing import Any

from msgspec.structs import replace

from batchtune.errors import BatchtuneError, LoaderError, WorkloadError
from batchtune.loaders.base import OpenLoader
from batchtune.loaders.memory import shared_memory
from batchtune.loaders.protocol import Failed
from batchtune.probe.oom import error_verdict, message_verdict
from batchtune.processes.worker import oom_kills
from batchtune.results import LoaderOutcome
from batchtune.units import format_size
from batchtune.workloads.loading import first_line, raised_elsewhere, user_traceback

# As torch, Python and the C library write them.
_EXITED = re.compile(r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) exited unexpectedly")
_CUT = re.compile(r"(?:Connection\w*|BrokenPipe|EOF|FileNotFound)Error: (?!Caught)")
_NO_SHARED_MEMORY = re.compile(
    r"unable to (?:allocate|open|resize) shared memory|(?:shm|torch_)\S*.*No space left on device|out of shared memory"
)
# The last line of an error that a worker passed on.
_MEMORY_ERROR = re.compile(rf"[\w.]*(?:MemoryError|OutOfMemoryError)\b|\w+: \[Errno {errno.ENOMEM}\]")
_OTHER_SYSTEM_ERROR = re.compile(r"\w+: \[Errno \d+\]")  # it may name any file
_NO_FILES = re.compile(r"Too many open files|received 0 items of ancdata")
_TIMED_OUT = re.compile(r"DataLoader timed out after ([\d.]+) seconds")

_PICKLE = (
    "Workers that are spawned, or come from a fork server, are sent the data set: define its functions and classes at "
    "the top level of the file and open files and locks in the worker, or use fork."
)

# How long a process may take to end after its connections are cut.
_ENDING_SECONDS = 0.5
# How soon a death is noticed without a signal.
_LOOK_SECONDS = 0.2
_SENDING = "while a worker sent a batch"
_ENLARGE = "Enlarge it (docker run --shm-size=8g, or --ipc=host), or use fewer workers or a lower prefetch_factor."
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


class WorkerDied(BaseException):
    """A worker of torch's DataLoader ended with this exit code, negative for a signal. Passes `except Exception`."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class WorkerWatch:
    """Raises WorkerDied in the main thread as soon as a worker of torch's DataLoader dies while batches are taken.

    torch's own handler of SIGCHLD raises a RuntimeError wherever the main thread happens to be. An `except` there
    (`threading` and torch have some) swallows it, and torch then waits for its time limit; the workers of a fork server
    send no signal at all. So a thread looks too, and repeats the signal until taking ends.
    """

    def __init__(self) -> None:
        from torch.utils.data._utils import signal_handling, worker

        self._process, self._taking, self._quiet_until = os.getpid(), threading.Event(), 0.0
        self._death, self._workers = 0, list[BaseProcess]()
        start = BaseProcess.start

        def noted(process: BaseProcess) -> None:
            if process._target is worker._worker_loop:  # type: ignore[attr-defined]
                self._workers.append(process)
            start(process)

        BaseProcess.start = noted  # type: ignore[assignment, method-assign]
        signal_handling._set_SIGCHLD_handler()  # torch sets its own only once: this takes its place
        signal.signal(signal.SIGCHLD, self._raise)
        threading.Thread(target=self._look, daemon=True).start()

    def begin(self) -> None:
        """Begin to raise, for the workers that live now and those that are started."""
        self._workers[:] = [worker for worker in self._workers if worker.exitcode is None]
        self._death, self._quiet_until = 0, 0.0
        self._taking.set()

    def end(self) -> None:
        """Raise no more."""
        self._taking.clear()

    def cause(self, error: BaseException) -> BaseException:
        """Return the death of a worker if that is why an error was raised, else the error.

        The connection to the worker may be cut before its exit code is known.
        """
        said = _said(error)
        exited = _EXITED.search(said)
        deadline = time.monotonic() + (_ENDING_SECONDS if exited or _CUT.match(said) else 0.0)
        while not (code := self._first_death()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return WorkerDied(code) if code or exited else error

    def _first_death(self) -> int:
        """Return the exit code of the first worker that was seen to fail; 0: none has."""
        self._death = self._death or next((code for one in self._workers if (code := one.exitcode)), 0)
        return self._death

    def _raise(self, number: int, frame: object) -> None:
        if os.getpid() != self._process or not self._taking.is_set() or time.monotonic() < self._quiet_until:
            return  # in a forked worker, or before the last one was handled
        if self._first_death() not in (0, -signal.SIGTERM):  # torch terminates workers that do not end with their epoch
            self._quiet_until = time.monotonic() + _LOOK_SECONDS
            for worker in self._workers:
                if worker.pid:  # the others: torch would wait 5 s for each to end
                    worker.kill()
            raise WorkerDied(self._death)

    def _look(self) -> None:
        while self._taking.wait():
            time.sleep(_LOOK_SECONDS)
            if self._first_death():
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGCHLD)


def failed(error: BaseException, loader: OpenLoader | None = None, *, kills: int | None = None) -> Failed:
    """Return what an error was, in words.

    `loader` is the one whose epoch raised it; `kills` how many processes the kernel had ended for want of memory when
    it was opened.
    """
    if isinstance(error, BatchtuneError):
        last_lines = error.traceback if isinstance(error, WorkloadError) else None
        fatal = isinstance(error, WorkloadError)
        return Failed(outcome="error", message=error.message, hint=error.hint, traceback=last_lines, fatal=fatal)
    if isinstance(error, WorkerDied):
        death = _death(error.exit_code, kills)
        explained = loader.explain(error) if loader is not None and death.outcome == "crash" else None
        return replace(death, message=f"{death.message} ({explained})") if explained else death
    outcome, message, hint = _known(error)
    if message is not None:
        return Failed(outcome=outcome, message=message, hint=hint)
    first, last_lines = raised_elsewhere(error) or (first_line(error), user_traceback(error))
    explained = loader.explain(error) if loader is not None and isinstance(error, (Exception, SystemExit)) else None
    message = f"{first} ({explained})" if explained else first
    if hint == _UNSENT:
        message = f"a batch can't be sent to the training process: {first}"
    # Pickling fails in Python's own code, so its lines don't help.
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


def _death(code: int, kills: int | None) -> Failed:
    """Say why a worker of the loader died."""
    if code == -signal.SIGBUS:
        message = f"a worker was killed by a bus error: probably {_small_shared_memory()}"
        return Failed(outcome="shared_memory", message=message, hint=_ENLARGE)
    now = oom_kills()
    if code == -signal.SIGKILL and kills is not None and now is not None and now > kills:
        message = "the kernel killed a worker for want of memory"
        return Failed(outcome="oom", message=message, hint="Use fewer workers or prefetch less.")
    if code < 0:
        message = f"a worker was killed by {signal.Signals(-code).name}"
        return Failed(outcome="crash", message=message, hint="Look at what it printed, and run it with num_workers=0.")
    return Failed(
        outcome="crash",
        message="a worker ended unexpectedly" + (f" with exit code {code}" if code else ""),
        hint="Look at what it printed. Under spawn and forkserver, workers import your file again, by its name.",
    )


def _known(error: BaseException) -> tuple[LoaderOutcome, str | None, str | None]:
    """Recognise what torch and the system say; no message: it is the user's own error."""
    said = _said(error)
    if _NO_FILES.search(said) or f"[Errno {errno.EMFILE}]" in said:
        return (
            "error",
            "too many open files: each tensor that a worker sends takes one",
            "Raise the limit (ulimit -n 65536), or call torch.multiprocessing.set_sharing_strategy('file_system') in "
            "your file.",
        )
    if _NO_SHARED_MEMORY.search(said):
        return "shared_memory", _small_shared_memory(), _ENLARGE
    if _is_out_of_memory(error):
        return "oom", None, "Use fewer workers, a lower prefetch_factor or smaller batches."
    if match := _TIMED_OUT.search(said):
        return "timeout", f"no batch came within the DataLoader's own timeout of {match[1]} s", None
    if _SENDING in said:
        return "error", None, _UNSENT
    if "pickle" in said.lower():
        return "error", None, _PICKLE
    return "error", None, None


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


def _small_shared_memory() -> str:
    memory = shared_memory()
    size = f": it holds {format_size(memory.total)}" if memory else ""
    return f"/dev/shm is too small for the batches in flight{size}"


def _said(error: BaseException) -> str:
    """Return the types and messages of an exception and of those that it came from."""
    return "\n".join(f"{type(one).__name__}: {_text(one)}" for one in _linked(error))


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
