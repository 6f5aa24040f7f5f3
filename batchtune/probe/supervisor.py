"""Drives the worker process: starts it, requests trials, replaces it when it dies or hangs. Never imports torch.

The messages between the two are defined here too.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from msgspec.structs import replace

from batchtune.errors import BatchtuneError, OptionError, ProbeError, WorkloadError
from batchtune.probe.devices import DeviceBusy, DeviceIdentity, backends, lock_device
from batchtune.probe.settings import ProbeSettings
from batchtune.processes.worker import Failed, Message, Nursery, WorkerLost
from batchtune.results import BatchShape, Device, DeviceProcess, ProbedWith, Trial
from batchtune.units import format_seconds
from batchtune.workloads.loading import last_frame

Stage = Literal["device", "import", "setup", "make_batch", "step"]

_POLL_SECONDS = 0.5  # while waiting for another probe to end


class Identify(Message, frozen=True):
    """Asks which device a name such as `auto` or `cuda:1` means, without using its memory (`Identified`)."""

    device: str


class Prepare(Message, frozen=True):
    """Asks to open the device, to limit its memory, and to build the workload on it (`Ready`)."""

    workload: str
    options: dict[str, Any]
    settings: ProbedWith
    limit_bytes: int | None  # to enforce; None: computed from the cap and the fraction
    examples: int  # of the data that training will sample


class Identified(Message, frozen=True):
    """The device that is meant."""

    device: DeviceIdentity


class Ready(Message, frozen=True):
    """The workload is built, on this device."""

    device: Device


class Run(Message, frozen=True):
    """Asks for a trial (several steps with one batch), or for a `single` step of a new batch, as in training.

    A single step has no warm-up, and keeps the allocator's cache unless `release` empties it first.
    """

    shape: BatchShape
    single: bool = False
    release: bool = False


class Ran(Message, frozen=True):
    """A trial, or a single step as a trial of one."""

    trial: Trial  # the supervisor fills in its index, worker and wall time
    stage: Stage | None = None  # where the error was raised
    traceback: str | None = None  # the last lines of the workload's own frames
    hint: str | None = None  # how to fix the error
    renew: bool = False  # the worker must be replaced: damaged by a sticky device error, or its memory is full of holes


Request = Identify | Prepare | Run
Reply = Identified | Ready | Ran | Failed

Prepared = TypeVar("Prepared", Identified, Ready)


def worker_program() -> tuple[str, Any, dict[str, str]]:
    """Return the module that a probe's workers run, the type of their replies, and their environment."""
    environment: dict[str, str] = {}
    for backend in backends():
        environment |= backend.WORKER_ENVIRONMENT
    return "batchtune.probe.worker", Reply, environment


class Supervisor:
    """Measures batch shapes, with a fresh worker whenever the last one died, hung or was damaged.

    Use as a context manager: no process outlives it, and it holds the device for itself from `start` to the end.
    `limit_bytes` is the memory limit of a continued run; None: the first worker computes it. Training will sample from
    so many `examples`. `on_note` is called with sentences that the user should read meanwhile.
    """

    def __init__(
        self,
        settings: ProbeSettings,
        limit_bytes: int | None = None,
        *,
        first_worker: int = 1,
        examples: int = 0,
        on_note: Callable[[str], None] | None = None,
    ) -> None:
        self._settings = settings
        self._examples = examples
        self._limit_bytes = limit_bytes
        self.worker = first_worker - 1
        self._nursery = Nursery(*worker_program())
        self._has_worker = False
        self._unused = False
        self._lock: io.FileIO | None = None
        self._busy: DeviceBusy | None = None
        self._note = on_note or (lambda text: None)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *raised: object) -> None:
        self._drop()
        self._nursery.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def start(self) -> Device:
        """Build the workload in a worker of a fresh process, as training starts.

        On the CPU, the processes of the device include another probe that uses it.

        Raises:
            WorkloadError: The workload can't be imported or built.
            ProbeError: The device can't be used, or the workload alone exceeds the limit.
            DeviceBusy: Another probe uses the GPU, and did not end in time.
        """
        self._drop()
        self._nursery.close()
        return self._start_worker()

    def measure(
        self,
        shape: BatchShape,
        index: int,
        *,
        fresh: bool = False,
        timing: bool = False,
    ) -> Ran:
        """Run one trial, the journal's entry `index`; if `fresh`, in a worker that has run nothing before.

        If the worker dies or hangs, that is the trial's outcome (`crash`, `oom`, `timeout`). Raises as `start`.
        """
        ran = self._run(Run(shape=shape), fresh=fresh)
        return replace(ran, trial=replace(ran.trial, index=index, timing=timing))

    def step(self, shape: BatchShape, *, release: bool = False) -> Ran:
        """Run one step of a new batch with the allocator's cache as it is, or emptied first if `release`."""
        return self._run(Run(shape=shape, single=True, release=release))

    def _run(self, request: Run, *, fresh: bool = False) -> Ran:
        started = time.monotonic()
        if not self._has_worker or (fresh and not self._unused):
            self._start_worker()
        self._unused = False
        limit = self._settings.trial_timeout_seconds
        try:
            ran = self._nursery.ask(request, (Ran,), limit)
        except WorkerLost as lost:
            error = f"the worker process {lost}"
            if lost.outcome == "timeout":
                error = f"no answer within {limit:g} s{_hangs_at(lost)}"
            elif lost.output:
                error += f": {_tail(lost.output, lines=3)}"
            ran = Ran(
                trial=Trial.of(request.shape, lost.outcome, error=error), renew=True
            )
        if ran.renew:
            self._drop()
        elapsed = round(time.monotonic() - started, 6)
        return replace(
            ran, trial=replace(ran.trial, worker=self.worker, elapsed_seconds=elapsed)
        )

    def _start_worker(self) -> Device:
        """Build the workload in a new worker, which may be forked from the same process as the last one."""
        self._drop()
        self.worker += 1
        self._nursery.start_worker()
        self._has_worker = True
        settings = self._settings
        request = Prepare(
            workload=settings.workload,
            options=settings.options,
            settings=settings,
            limit_bytes=self._limit_bytes,
            examples=self._examples,
        )
        try:
            if self._lock is None:
                self._take_device()
            device = self._ask(request, Ready).device
        except BaseException:
            self._drop()
            raise
        self._limit_bytes = device.limit_bytes
        self._unused = True
        if self._lock is not None or self._busy is None or self._busy.process is None:
            return device
        other = DeviceProcess(pid=self._busy.process, used_bytes=None)
        return replace(device, other_processes=1, processes=[other])

    def _take_device(self) -> None:
        """Lock the device for this probe; if another holds the CPU, go on without."""
        request = Identify(device=self._settings.device)
        device = self._ask(request, Identified).device
        wait_seconds = self._settings.wait_seconds
        deadline = time.monotonic() + wait_seconds
        while self._lock is None:
            try:
                self._lock = lock_device(device.id, device.name)
            except DeviceBusy as busy:
                if self._busy is None and wait_seconds > 0:
                    self._note(f"Waiting for it to end: {busy.message}.")
                self._busy = busy
                if time.monotonic() < deadline:
                    time.sleep(_POLL_SECONDS)
                elif device.shared:
                    return
                else:
                    raise

    def _ask(self, request: Identify | Prepare, kind: type[Prepared]) -> Prepared:
        """Ask the new worker for what comes before any trial."""
        try:
            reply = self._nursery.ask(
                request, (kind, Failed), self._settings.setup_timeout_seconds
            )
        except WorkerLost as lost:
            raise self._setup_error(lost) from None
        if isinstance(reply, kind):
            return reply
        assert isinstance(reply, Failed)
        if reply.stage == "device":
            raise ProbeError(reply.message, reply.hint)
        if reply.stage == "options":
            raise OptionError(reply.message, reply.hint)
        if reply.outcome == "oom":
            raise self._too_small(reply.message)
        message = reply.message
        if reply.stage == "setup":
            message = f"{self._settings.workload}: its setup failed: {message}"
        raise WorkloadError(message, reply.hint, reply.traceback)

    def _setup_error(self, lost: WorkerLost) -> BatchtuneError:
        """Return the error for a worker that died or hung before any trial."""
        if lost.outcome == "oom":
            return self._too_small(str(lost))
        workload = self._settings.workload
        if lost.outcome == "timeout":
            return WorkloadError(
                f"{workload}: its setup took longer than "
                f"{format_seconds(self._settings.setup_timeout_seconds)}{_hangs_at(lost)}",
                "If it needs longer, to download or to compile, allow that with --setup-timeout SECONDS.",
                lost.output or None,
            )
        return WorkloadError(
            f"{workload}: the worker process {lost} while it built the workload",
            "Its last output may say why. If something outside kills it (a job's or a container's limit), it needs "
            "less memory or time, or a higher limit there.",
            _tail(lost.output, lines=12),
        )

    def _too_small(self, reason: str) -> ProbeError:
        return ProbeError(
            f"the memory limit is too small: {self._settings.workload} ran out of it in its setup, "
            f"before any batch ({reason})",
            "Give more with --memory, or take a smaller model with --set.",
        )

    def _drop(self) -> None:
        if self._has_worker:
            self._has_worker = False
            self._nursery.end_worker()


def _tail(output: str, lines: int) -> str:
    return "\n".join(output.rstrip().splitlines()[-lines:])


def _hangs_at(lost: WorkerLost) -> str:
    if not lost.output:
        return ""
    return f"; it hangs at {last_frame(lost.output)}"
