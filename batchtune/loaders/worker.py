"""The worker process: builds a loader once, and takes batches from it on request.

Forked by the nursery. It speaks over its socket alone: what the loader's code prints goes to the standard streams and
disturbs nothing.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import os
import random
import re
import time
import traceback

import psutil
from msgspec.structs import replace

from batchtune.errors import BatchtuneError, LoaderError
from batchtune.loaders import KINDS, OpenLoader, Target, kind_of
from batchtune.loaders.batches import digests_of, words_of
from batchtune.loaders.protocol import (
    LoaderReply,
    LoaderRequest,
    Open,
    Opened,
    Take,
    Taken,
)
from batchtune.probe.failures import error_verdict
from batchtune.processes.worker import Failed, oom_kills, serve
from batchtune.workloads.loading import first_line, load_function, user_traceback

# As torch, Python and the C library write them.
_DIED = re.compile(
    r"DataLoader worker \(pid.*?\) (?:is killed by signal|exited unexpectedly).*"
)
_NO_SHARED_MEMORY = re.compile(
    r"unable to (?:allocate|open|resize) shared memory|(?:shm|torch_)\S*.*No space left on device|out of shared memory"
)

_FEWER = "Use fewer workers, a lower prefetch_factor or smaller batches."


def work(channel: int) -> None:
    """Serve requests until the supervisor closes the socket."""
    serve(channel, LoaderRequest, _Loaders().answer)


class _Loaders:
    """The loader that this worker process opened, and the answers to what is asked of it."""

    def __init__(self) -> None:
        self._loader: OpenLoader | None = None
        self._kills: int | None = None
        # Its traceback keeps torch's iterator, which would wait for its workers as it goes, or for a lock left closed.
        self._raised: BaseException | None = None

    def answer(self, request: LoaderRequest) -> LoaderReply:
        """Do what a request asks for."""
        try:
            if isinstance(request, Open):
                self._kills = oom_kills()
                return self._open(request)
            assert self._loader is not None, "asked before the loader was opened"
            return _take(self._loader, request)
        except BaseException as error:
            self._raised = error
            return failed(error, self._kills)

    def _open(self, request: Open) -> Opened:
        os.sched_setaffinity(0, request.processors)
        _seed(request.seed, len(request.processors))
        device, device_name = _device(request.device)
        target = _target(request, device)
        arguments = request.arguments
        if request.inspect:
            arguments = {
                name: value for name, value in arguments.items() if name in target.takes
            }
        if request.kind is not None:
            kind = kind_of(request.kind)
        else:
            kind = next(kind for kind in map(kind_of, KINDS) if kind.recognises(target))
        self._loader = kind.open(target, arguments)
        return Opened(
            pid=os.getpid(),
            kind=self._loader.kind,
            takes=sorted(target.takes),
            device=device,
            device_name=device_name,
            batches=self._loader.batches(),
            exact=self._loader.exact,
            dealt=self._loader.dealt,
        )


def _take(loader: OpenLoader, request: Take) -> Taken | Failed:
    """Take batches until the epoch or the request ends."""
    taken = Taken()
    complete = False
    words = None
    ending = math.inf
    steps = itertools.cycle(request.steps or ())
    busy_before = _cpu_seconds()
    asked = time.perf_counter()
    epoch = loader.epoch()
    for batch in epoch:
        delivered = time.perf_counter()
        taken.waits.append(delivered - asked)
        taken.batches.append(loader.facts(batch))
        words = words or words_of(batch)
        if request.digests:
            taken.digests.append(digests_of(batch))
        del batch
        if request.steps:
            step_ends = delivered + next(steps)
            time.sleep(max(0.0, step_ends - time.perf_counter()))
        asked = time.perf_counter()
        taken.steps.append(asked - delivered)
        ending = min(ending, delivered + request.seconds)
        if asked >= ending or len(taken.waits) == request.batches:
            break
    else:
        complete = True
    if not taken.waits:
        return Failed(
            outcome="empty",
            message="no batch in an epoch: is the data set empty, or smaller than a batch, with drop_last?",
        )
    cpu_seconds = _cpu_seconds() - busy_before
    # Workers that were stopped in the middle of a batch may end in disorder.
    with contextlib.suppress(Exception):
        epoch.close()
    return replace(
        taken,
        complete=complete or len(taken.waits) == loader.batches(),
        cpu_seconds=cpu_seconds,
        words=words,
    )


def _seed(seed: int, processors: int) -> None:
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)
    torch.set_num_threads(processors)  # as if it had started with them


def _device(device: str) -> tuple[str, str]:
    """Return the device that a `--device` value means, `cpu` or `cuda:N`, and its name; it is the current one then."""
    import torch

    usable = torch.cuda.device_count() if device != "cpu" else 0
    if not usable and device in ("auto", "cpu"):
        return "cpu", "CPU"
    number = int(device.partition(":")[2] or 0)
    if number >= usable:
        raise LoaderError(
            f"--device {device}: torch can use {usable or 'no'} GPUs here",
            "Measure on the CPU with --device cpu, or name another.",
        )
    torch.cuda.set_device(number)
    return f"cuda:{number}", torch.cuda.get_device_name(number)


def _target(request: Open, device: str) -> Target:
    """Import what the request names."""
    given = {"seed", "device", *request.arguments}
    for kind in map(kind_of, KINDS):
        given.update(kind.GIVEN)
    function = load_function(request.spec, request.options, given=given)
    parameters: list[inspect.Parameter] = []
    with contextlib.suppress(TypeError, ValueError):  # written in C
        parameters += inspect.signature(function).parameters.values()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.kind in by_name
    }
    needed = {
        name for name, default in named.items() if default is inspect.Parameter.empty
    }
    return Target(
        function=function,
        options=request.options,
        takes=frozenset(named),
        needs=frozenset(needed),
        seed=request.seed,
        device=device,
        config=request.config,
    )


def _cpu_seconds() -> float:
    """Return how long this process and all that it started have computed so far, those that have ended included."""
    ended = os.times()
    total = time.process_time() + ended.children_user + ended.children_system
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            # Its own and its children's, user and system.
            total += sum(process.cpu_times()[:4])
    return total


def failed(error: BaseException, kills: int | None) -> Failed:
    """Return what an error was, in words.

    `kills` is how many processes the kernel had ended for want of memory when the loader was opened.
    """
    if isinstance(error, BatchtuneError):
        return Failed.of(error)
    message = first_line(error)
    last_lines = user_traceback(error)
    # The error itself ends what torch passes on.
    if "in DataLoader worker process" in message:
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
