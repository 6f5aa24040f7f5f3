"""Drives the worker process: starts it, requests trials, replaces it when it dies or hangs. Never imports torch."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from msgspec.structs import replace

from batchtune.errors import OptionError, ProbeError, WorkloadError
from batchtune.probe.devices import backends
from batchtune.probe.lock import DeviceBusy, lock_device
from batchtune.probe.protocol import Identified, Prepare, Ran, Ready, Reply, Run
from batchtune.probe.settings import ProbeSettings
from batchtune.processes.worker import Failed, Nursery, WorkerLost
from batchtune.results import Device, DeviceProcess, Trial
from batchtune.shapes import BatchShape
from batchtune.units import format_seconds
from batchtune.workloads.loading import last_frame

Prepared = TypeVar("Prepared", Identified, Ready)

_POLL_SECONDS = 0.5  # while waiting for another probe to end


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
        """Build the workload in a worker of a fresh process, as training starts; once more if that dies.

        On the CPU, the processes of the device include another probe that uses it.

        Raises:
            WorkloadError: The workload can't be imported or built.
            ProbeError: The device can't be used, or the workload alone exceeds the limit.
            DeviceBusy: Another probe uses the GPU, and did not end in time.
        """
        self._drop()
        self._nursery.close()
        return self._start_worker()

    def measure(self, shape: BatchShape, index: int, *, fresh: bool = False, timing: bool = False) -> Ran:
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
            if lost.outcome == "timeout":
                error = f"no answer within {limit:g} s{_hangs_at('; ', lost)}"
            else:
                error = f"the worker process {lost}"
                if tail := _tail(lost.output, lines=3):
                    error += f": {tail}"
            ran = Ran(trial=Trial.of(request.shape, lost.outcome, error), renew=True)
        if ran.renew:
            self._drop()
        elapsed = round(time.monotonic() - started, 6)
        return replace(ran, trial=replace(ran.trial, worker=self.worker, elapsed_seconds=elapsed))

    def _start_worker(self) -> Device:
        """Build the workload in a new worker, which may be forked from the same process as the last one."""
        for is_last in (False, True):
            try:
                self._renew()
                if self._lock is None:
                    self._take_device()
                device = self._prepare("setup", Ready).device
                break
            except WorkerLost as died:
                self._drop()
                if died.outcome == "oom":
                    raise self._too_small(str(died)) from None
                if is_last:
                    raise WorkloadError(
                        f"{self._settings.workload}: the worker process {died} while it built the workload, twice",
                        "Its last output may say why. If something outside kills it (a job's or a container's limit), "
                        "it needs less memory or time, or a higher limit there.",
                        _tail(died.output),
                    ) from None
                self._note(f"The worker process {died} while it built the workload: it is built once more.")
            except BaseException:
                self._drop()
                raise
        assert device is not None
        self._limit_bytes = device.limit_bytes
        self._unused = True
        if self._lock is not None or self._busy is None or self._busy.process is None:
            return device
        other = DeviceProcess(pid=self._busy.process, used_bytes=None)
        return replace(device, other_processes=1, processes=[other])

    def _take_device(self) -> None:
        """Lock the device for this probe; if another holds the CPU, go on without.

        The workload's own errors are raised before any waiting, and before DeviceBusy.
        """
        known = self._prepare("device", Identified)
        deadline = 0.0
        while self._lock is None:
            try:
                self._lock = lock_device(known.id, known.name)
            except DeviceBusy as busy:
                if self._busy is None:
                    self._prepare("import", Ready)
                    self._renew()  # importing it must not count against the device
                    if (seconds := self._settings.wait_seconds) > 0:
                        most = "" if math.isinf(seconds) else f", for at most {format_seconds(seconds)}"
                        self._note(f"Waiting for it to end{most}: {busy.message}.")
                    deadline = time.monotonic() + seconds
                self._busy = busy
                if (left := deadline - time.monotonic()) > 0:
                    time.sleep(min(_POLL_SECONDS, left))
                elif known.shared:
                    return
                else:
                    raise

    def _prepare(self, up_to: Literal["device", "import", "setup"], kind: type[Prepared]) -> Prepared:
        """Ask the new worker for what comes before any trial."""
        settings = self._settings
        workload = self._settings.workload
        limit = self._limit_bytes
        request = Prepare(
            workload=workload,
            options=settings.options,
            settings=settings,
            limit_bytes=limit,
            examples=self._examples,
            up_to=up_to,
        )
        try:
            reply = self._nursery.ask(request, (kind, Failed), settings.setup_timeout_seconds)
        except WorkerLost as lost:
            if lost.outcome != "timeout":
                raise
            seconds = format_seconds(settings.setup_timeout_seconds)
            if up_to == "device":
                raise ProbeError(
                    f"--device {settings.device}: PyTorch did not answer within {seconds} which device it is",
                    "`batchtune doctor` shows the devices of this machine.",
                ) from None
            raise WorkloadError(
                f"{workload}: its setup took longer than {seconds}{_hangs_at(': ', lost)}",
                "If it needs longer, to download or to compile, allow that with --setup-timeout SECONDS.",
                lost.output or None,
            ) from None
        if not isinstance(reply, Failed):
            assert isinstance(reply, kind)
            return reply
        if reply.stage == "device":
            raise ProbeError(reply.message, reply.hint)
        if reply.stage == "options":
            raise OptionError(reply.message, reply.hint)
        if reply.outcome == "oom":
            raise self._too_small(reply.message)
        message = reply.message
        if reply.stage == "setup":
            message = f"{workload}: its setup failed: {message}"
        raise WorkloadError(message, reply.hint, reply.traceback)

    def _renew(self) -> None:
        self._drop()
        self.worker += 1
        self._nursery.start_worker()
        self._has_worker = True

    def _drop(self) -> None:
        if self._has_worker:
            self._has_worker = False
            self._nursery.end_worker()

    def _too_small(self, reason: str) -> ProbeError:
        return ProbeError(
            f"the memory limit is too small: {self._settings.workload} ran out of it in its setup, "
            f"before any batch ({reason})",
            "Give more with --memory, or take a smaller model with --set.",
        )


def _tail(output: str, lines: int = 12) -> str:
    return "\n".join(output.rstrip().splitlines()[-lines:])


def _hangs_at(lead: str, lost: WorkerLost) -> str:
    if not lost.output:
        return ""
    return f"{lead}it hangs at {last_frame(lost.output)}"
