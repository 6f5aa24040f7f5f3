"""Says what went wrong with a loader: an exception of the user's code, or of torch's DataLoader, as an outcome."""

from __future__ import annotations

import re
import traceback

from msgspec.structs import replace

from batchtune.errors import BatchtuneError, OptionError, WorkloadError
from batchtune.probe.oom import error_verdict
from batchtune.processes.worker import Failed, oom_kills
from batchtune.workloads.loading import first_line, user_traceback

# As torch, Python and the C library write them.
_DIED = re.compile(
    r"DataLoader worker \(pid.*?\) (?:is killed by signal|exited unexpectedly).*"
)
_NO_SHARED_MEMORY = re.compile(
    r"unable to (?:allocate|open|resize) shared memory|(?:shm|torch_)\S*.*No space left on device|out of shared memory"
)

_FEWER = "Use fewer workers, a lower prefetch_factor or smaller batches."


def failed(error: BaseException, kills: int | None) -> Failed:
    """Return what an error was, in words.

    `kills` is how many processes the kernel had ended for want of memory when the loader was opened.
    """
    if isinstance(error, BatchtuneError):
        failure = Failed(message=error.message, hint=error.hint)
        if isinstance(error, WorkloadError):
            failure = replace(failure, traceback=error.traceback)
        if isinstance(error, OptionError):
            failure = replace(failure, stage="options")
        return failure
    message = first_line(error)
    last_lines = user_traceback(error)
    if (
        "in DataLoader worker process" in message
    ):  # the error itself ends what torch passes on
        message = last_lines.rstrip().rpartition("\n")[2]
    said = "".join(traceback.format_exception(error, limit=0))
    if _NO_SHARED_MEMORY.search(said):
        return Failed(
            outcome="shared_memory",
            message="/dev/shm is too small for the batches in flight",
            hint=f"Enlarge it (docker run --shm-size=8g, or --ipc=host). {_FEWER}",
        )
    if deaths := _DIED.findall(said):
        death = deaths[-1].strip()  # torch's own cause names the signal
        if (oom_kills() or 0) > (kills or 0):
            return Failed(
                outcome="oom",
                message=f"{death} The kernel killed it for want of memory.",
                hint=_FEWER,
            )
        return Failed(
            outcome="crash",
            message=death,
            hint="Look at what it printed, and run it with num_workers=0. Under spawn and forkserver, workers import "
            "your file again, by its name.",
        )
    if error_verdict(error) == "oom":
        return Failed(outcome="oom", message=message, hint=_FEWER, traceback=last_lines)
    hint = None
    if "pickle" in said.lower():
        hint = (
            "What workers are sent (under spawn, the data set) and send must be picklable: define functions and "
            "classes at the top level of the file, open files and locks in the worker, and return tensors."
        )
    return Failed(message=message, hint=hint, traceback=last_lines)
