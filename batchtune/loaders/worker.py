"""The worker process: builds a loader once, and takes batches from it on request.

Forked by the nursery. It speaks over its socket alone: what the loader's code prints goes to the standard streams and
disturbs nothing.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import random
import resource
import signal
import socket
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from msgspec.structs import replace

from batchtune.errors import BatchtuneError, LoaderError
from batchtune.loaders import KINDS, kind_of
from batchtune.loaders.base import OpenLoader, Target
from batchtune.loaders.batches import digests_of, words_of
from batchtune.loaders.failures import failed, missing_library, report_unsent_batches
from batchtune.loaders.protocol import (
    Open,
    Opened,
    Reply,
    Request,
    Split,
    Stages,
    Take,
    Taken,
    decode_request,
)
from batchtune.processes.serving import serve
from batchtune.processes.worker import Failed, oom_kills
from batchtune.units import counted
from batchtune.workloads.loading import load_function

# So that the stacks of two processes do not mix.
_PRINTING_SECONDS = 0.02


def work(channel: int) -> None:
    """Serve requests until the supervisor closes the socket."""
    signal.signal(signal.SIGUSR2, _pass_on)
    report_unsent_batches()
    loaders = Loaders()
    serve(socket.socket(fileno=channel), decode_request, loaders.answer, after_stack=True)
    if loaders.loader is not None:
        loaders.loader.close()
    os._exit(0)  # no finalizer of the user's code may hang the end


def _pass_on(number: int, frame: object) -> None:
    """Send a signal to the workers that handle it too: those that were forked, one after another."""
    with contextlib.suppress(OSError, psutil.Error):  # one may just have ended; or no more files can be opened
        for process in psutil.Process().children(recursive=True):
            status = dict(line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
            if int(status["SigCgt"], 16) >> (number - 1) & 1:
                process.send_signal(number)
                time.sleep(_PRINTING_SECONDS)


class Loaders:
    """The loader that this worker process opened, and the answers to what is asked of it."""

    def __init__(self) -> None:
        self.loader: OpenLoader | None = None
        self._kills: int | None = None
        # Its traceback keeps torch's iterator, which would wait for its workers as it goes, or for a lock left closed.
        self._raised: BaseException | None = None

    def answer(self, request: Request) -> Reply:
        """Do what a request asks for."""
        if isinstance(request, Open):
            return self._open(request)
        assert self.loader is not None, "asked before the loader was opened"
        if isinstance(request, Take):
            return self._take(self.loader, request)
        assert isinstance(request, Split)
        try:
            return Stages(stages=self.loader.stages(request.seconds))
        except BaseException as error:
            return failed(error, kills=self._kills)

    def _open(self, request: Open) -> Opened | Failed:
        self._kills = oom_kills()
        target: Target | None = None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            try:
                os.sched_setaffinity(0, request.processors)
                _seed(request.seed, len(request.processors))
                device, device_name = _device(request.device)
                request = replace(request, device=device)
                target = _target(request)
                if request.inspect:
                    taken = {name: value for name, value in request.arguments.items() if name in target.takes}
                    request = replace(request, arguments=taken)
                self.loader = _opened(request, target)
                batches = self.loader.batches()
                examples = self.loader.examples()
            except BaseException as error:
                cause = missing_library(error, request.spec) or error
                # Whether it is due to the arguments, others will show.
                fatal = isinstance(cause, BatchtuneError) or target is None or not request.arguments
                return replace(failed(cause, kills=self._kills), fatal=fatal)
        shown = [
            f"{warning.category.__name__}: {warning.message}"
            for warning in caught
            if not issubclass(warning.category, ResourceWarning)
        ]
        return Opened(
            pid=os.getpid(),
            kind=self.loader.kind,
            takes=sorted(target.takes),
            device=device,
            device_name=device_name,
            batches=batches,
            examples=examples,
            exact=self.loader.exact,
            dealt=self.loader.dealt,
            warnings=list(dict.fromkeys(shown)),
        )

    def _take(self, loader: OpenLoader, request: Take) -> Taken | Failed:
        busy_before = _cpu_seconds()
        epoch = loader.epoch()
        try:
            taken = _take(loader, epoch, request)
        except BaseException as raised:
            self._raised = raised
            return replace(failed(raised, loader, kills=self._kills), fatal=False)
        taken = replace(taken, cpu_seconds=_cpu_seconds() - busy_before)
        try:
            epoch.close()  # type: ignore[attr-defined]
        except BaseException:  # workers that were stopped in the middle of a batch may end in disorder
            traceback.print_exc()
        if not taken.waits:
            message = "an epoch has no batch"
            if reason := loader.emptiness():
                message += f": {reason}"
            return Failed(outcome="empty", message=message)
        return taken


def _take(loader: OpenLoader, epoch: Iterator[Any], request: Take) -> Taken:
    """Take batches until the epoch or the request ends."""
    taken = Taken()
    largest = 0
    complete = False
    words = None
    started = asked = time.perf_counter()
    while request.batches is None or len(taken.waits) < request.batches:
        try:
            batch = next(epoch)
        except StopIteration:
            complete = True
            break
        delivered = time.perf_counter()
        taken.waits.append(delivered - asked)
        facts = loader.facts(batch)
        taken.examples.append(facts.examples)
        taken.lengths.append(facts.length)
        taken.total_lengths.append(facts.total_length)
        largest = max(largest, facts.size_bytes)
        words = words or words_of(batch)
        if request.digests:
            taken.digests.append(digests_of(batch))
        del batch
        if request.steps:
            step = request.steps[(len(taken.waits) - 1) % len(request.steps)]
            time.sleep(max(0.0, delivered + step - time.perf_counter()))
        asked = time.perf_counter()
        taken.steps.append(asked - delivered)
        if asked - started >= request.seconds:
            break
    return replace(
        taken,
        complete=complete or len(taken.waits) == loader.batches(),
        seconds=sum(taken.waits) + sum(taken.steps),  # at the end of an epoch, torch waits for its workers to end
        bytes=largest,
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

    available = device != "cpu" and torch.cuda.is_available()
    if not available and device in ("auto", "cpu"):
        return "cpu", "CPU"
    number = int(device.partition(":")[2] or 0)
    if not available or number >= torch.cuda.device_count():
        usable = "no GPUs"
        if available:
            usable = counted(torch.cuda.device_count(), "GPU")
        raise LoaderError(
            f"--device {device}: torch can use {usable} here",
            "Measure on the CPU with --device cpu, or name another.",
        )
    torch.cuda.set_device(number)
    return f"cuda:{number}", torch.cuda.get_device_name(number)


def _target(request: Open) -> Target:
    """Import what the request names."""
    if not request.spec.rpartition(":")[0].endswith(".py"):
        raise LoaderError(f"{request.spec!r} names no class or function in a file", "Write path/to/file.py:NAME.")
    given = {"seed", "device", *request.arguments}
    for kind in map(kind_of, KINDS):
        given.update(kind.GIVEN)
    function = load_function(request.spec, request.options, given=given)
    parameters: list[inspect.Parameter] = []
    with contextlib.suppress(TypeError, ValueError):  # written in C
        parameters += inspect.signature(function).parameters.values()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {parameter.name: parameter.default for parameter in parameters if parameter.kind in by_name}
    needed = {name for name, default in named.items() if default is inspect.Parameter.empty}
    return Target(
        function=function,
        options=request.options,
        takes=frozenset(named),
        needs=frozenset(needed - request.options.keys()),
        seed=request.seed,
        device=request.device,
        config=request.config,
    )


def _opened(request: Open, target: Target) -> OpenLoader:
    """Open the target as the kind that the user named, or as the first that recognises it."""
    if request.kind is not None:
        kind = kind_of(request.kind)
    else:
        kind = next(kind for kind in map(kind_of, KINDS) if kind.recognises(target))
    loader = kind.open(target, request.arguments)
    if request.kind not in (None, loader.kind):
        raise LoaderError(
            f"{request.spec} makes a loader of the kind {loader.kind}, but {request.kind} was asked for",
            f"Leave out --kind, or ask for {loader.kind}.",
        )
    return loader


def _cpu_seconds() -> float:
    """Return how long this process and all that it started have computed so far, those that have ended included."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        used = resource.getrusage(who)
        total += used.ru_utime + used.ru_stime
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.Error:  # it has just ended
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total
