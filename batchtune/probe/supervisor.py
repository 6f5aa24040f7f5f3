"""Drives the worker process: starts it, asks for trials, replaces it when it dies or hangs. Never imports torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn, TypeVar

import msgspec

from batchtune.errors import ProbeError, WorkloadError
from batchtune.probe.guards import Nursery
from batchtune.probe.lock import DeviceBusy, DeviceLock
from batchtune.probe.process import WorkerDied, WorkerHung, WorkerProcess
from batchtune.probe.protocol import (
    Failed,
    Identified,
    Identify,
    Load,
    Loaded,
    Measure,
    Measured,
    Ready,
    Setup,
    Step,
    Stepped,
)
from batchtune.results import Device, DeviceProcess, Outcome, Trial
from batchtune.shapes import BatchShape
from batchtune.units import format_seconds
from batchtune.workloads.tracebacks import last_frame

Answer = TypeVar("Answer", Measured, Stepped)
Built = TypeVar("Built", Identified, Loaded, Ready)

SETUP_TIMEOUT_SECONDS = 600.0
# What is waited for ends at no known time: so often it is looked for.
_POLL_SECONDS = 0.5


class Supervisor:
    """Measures batch shapes, with a fresh worker wherever the last one died, hung or was damaged.

    Use as a context manager: no process outlives it, and the device is held for it alone, from `start` to the end.

    Args:
        setup: What to build, and where. The limit that the first worker worked out is kept for all that follow.
        trial_timeout_seconds: Longest that one trial, or one step, may take.
        setup_timeout_seconds: Longest that building the workload may take.
        first_worker: Number of the first worker process.
        wait_seconds: Longest to wait for another probe of the device to end.
        on_note: Told, in a sentence, what the user should know while it happens.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        trial_timeout_seconds: float,
        setup_timeout_seconds: float = SETUP_TIMEOUT_SECONDS,
        first_worker: int = 1,
        wait_seconds: float = 0.0,
        on_note: Callable[[str], None] | None = None,
    ) -> None:
        self._setup = setup
        self._trial_timeout_seconds = trial_timeout_seconds
        self._setup_timeout_seconds = setup_timeout_seconds
        self._number = first_worker - 1
        self._nursery = Nursery()
        self._worker: WorkerProcess | None = None
        self._unused = False
        self._lock: DeviceLock | None = None
        self._wait_seconds = wait_seconds
        self._busy: DeviceBusy | None = None
        self._note = on_note or (lambda text: None)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._drop()
        self._nursery.close()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @property
    def worker(self) -> int:
        """Number of the current worker process, or the last one where there is none just now."""
        return self._number

    def start(self) -> Device:
        """Builds the workload in a new worker of a fresh process, as training starts; once more where that dies.

        Returns:
            The device and the limit that is enforced on it. On the CPU another probe that uses it, too, is among the
            device's processes.

        Raises:
            WorkloadError: The workload can't be imported or built.
            DeviceBusy: Another probe uses the GPU, and did not end in time.
            ProbeError: The device can't be used, or the workload alone needs more than the limit.
        """
        self._drop()
        self._nursery.close()
        return self._start_next()

    def _start_next(self) -> Device:
        """Does as `start` in a worker that may share what the last one was forked from."""
        try:
            device = self._start_once()
        except WorkerDied as died:
            if died.out_of_memory:
                raise self._died(died) from None
            self._note(f"The worker process {died} while it built the workload: it is built once more.")
            try:
                device = self._start_once()
            except WorkerDied as again:
                raise self._died(again) from None
        self._setup = msgspec.structs.replace(self._setup, limit_bytes=device.limit_bytes)
        self._unused = True
        return device

    def _start_once(self) -> Device:
        """Starts a worker, takes the device and builds the workload. Raises WorkerDied, and what `start` raises."""
        self._renew()
        try:
            if self._lock is None:
                self._take_device()
            device = self._build(self._setup, Ready).device
        except BaseException:
            self._drop()
            raise
        if self._lock is not None or self._busy is None or self._busy.process is None:
            return device
        other = DeviceProcess(pid=self._busy.process, used_bytes=None)
        return msgspec.structs.replace(device, other_processes=1, processes=[other])

    def _take_device(self) -> None:
        """Holds the device for this probe alone, or goes on without where another one holds the CPU.

        The workload's own errors come before that of a device that is in use, and before any waiting.
        """
        known = self._build(Identify(device=self._setup.device), Identified)
        try:
            self._lock = DeviceLock(known.id, known.name)
            return
        except DeviceBusy as busy:
            if self._busy is None:
                self._build(Load(workload=self._setup.workload, options=self._setup.options), Loaded)
                self._renew()  # what importing it did must not count against the device
                self._lock = self._wait(known, busy)
            if self._lock is None and known.id != "cpu":
                raise
            self._busy = busy

    def _wait(self, known: Identified, busy: DeviceBusy) -> DeviceLock | None:
        """Waits for another probe to end; None where it does not, in time."""
        if self._wait_seconds > 0:
            most = "" if math.isinf(self._wait_seconds) else f", for at most {format_seconds(self._wait_seconds)}"
            self._note(f"Waiting for it to end{most}: {busy.message}.")
        deadline = time.monotonic() + self._wait_seconds
        while time.monotonic() < deadline:
            time.sleep(min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())))
            try:
                return DeviceLock(known.id, known.name)
            except DeviceBusy:
                continue
        return None

    def measure(
        self, shape: BatchShape, index: int, *, fresh: bool = False, timing: bool = False
    ) -> tuple[Trial, Measured | None]:
        """Runs one trial.

        Args:
            shape: The batch to measure.
            index: Of the trial, for the journal.
            fresh: In a new worker, that has run nothing before.
            timing: Whether it is run for its time alone.

        Returns:
            The trial for the journal, and the worker's own words (None where it died or hung).

        Raises:
            WorkloadError, ProbeError: A new worker was needed and can't be built.
        """
        started = time.monotonic()
        request = Measure(batch_size=shape.batch_size, length=shape.length, target_length=shape.target_length)
        measured, outcome, error = self._run(request, Measured, fresh=fresh)
        trial = Trial(
            index=index,
            batch_size=shape.batch_size,
            length=shape.length,
            target_length=shape.target_length,
            outcome=outcome,
            steps=measured.steps if measured else 0,
            step_seconds=measured.step_seconds if measured else None,
            step_seconds_spread=measured.step_seconds_spread if measured else None,
            mean_step_seconds=measured.mean_step_seconds if measured else None,
            peak_bytes=measured.peak_bytes if measured else None,
            steady_peak_bytes=measured.steady_peak_bytes if measured else None,
            peak_spread_bytes=measured.peak_spread_bytes if measured else None,
            reserved_bytes=measured.reserved_bytes if measured else None,
            failed_peak_bytes=measured.failed_peak_bytes if measured else None,
            caught=measured.caught if measured else False,
            other_processors=measured.other_processors if measured else None,
            rest_bytes=measured.rest_bytes if measured else None,
            outside_bytes=measured.outside_bytes if measured else None,
            alloc_retries=measured.alloc_retries if measured else None,
            sm_clock_mhz=measured.sm_clock_mhz if measured else None,
            throttle_reasons=measured.throttle_reasons if measured else None,
            worker=self._number,
            timing=timing,
            error=error,
            elapsed_seconds=round(time.monotonic() - started, 6),
        )
        return trial, measured

    def step(self, shape: BatchShape, *, release: bool = False) -> Stepped:
        """Makes one batch and runs one training step, the allocator's cache kept, as training would.

        Args:
            shape: The batch.
            release: Empty the allocator's cache before.

        Returns:
            What it showed; where the worker died or hung, that (`crash`, `oom`, `timeout`).

        Raises:
            WorkloadError, ProbeError: A new worker was needed and can't be built.
        """
        request = Step(
            batch_size=shape.batch_size, length=shape.length, target_length=shape.target_length, release=release
        )
        stepped, outcome, error = self._run(request, Stepped)
        return stepped or Stepped(outcome=outcome, error=error)

    def _run(
        self, request: Measure | Step, kind: type[Answer], *, fresh: bool = False
    ) -> tuple[Answer | None, Outcome, str | None]:
        """Asks for a trial or a step, of a new worker where there is none; drops one that is of no more use.

        Returns:
            The worker's answer (None where it died or hung), the outcome, and the error's message.
        """
        if self._worker is None or (fresh and not self._unused):
            self._start_next()
        assert self._worker is not None
        self._unused = False
        try:
            reply = self._worker.ask(request, (kind,), self._trial_timeout_seconds)
        except WorkerDied as died:
            self._drop()
            words = f"the worker process {died}" + (f": {tail}" if (tail := _tail(died.output, lines=3)) else "")
            return None, "oom" if died.out_of_memory else "crash", words
        except WorkerHung as hung:
            self._drop()
            where = f"; it hangs at {last_frame(hung.stack)}" if hung.stack else ""
            return None, "timeout", f"no answer within {self._trial_timeout_seconds:g} s{where}"
        assert isinstance(reply, kind)
        if reply.renew:
            self._drop()
        return reply, reply.outcome, reply.error

    def _build(self, request: Identify | Load | Setup, kind: type[Built]) -> Built:
        """Asks the new worker for what comes before any trial."""
        assert self._worker is not None
        try:
            reply = self._worker.ask(request, (kind, Failed), self._setup_timeout_seconds)
        except WorkerHung as hung:
            seconds = format_seconds(self._setup_timeout_seconds)
            if isinstance(request, Identify):
                raise ProbeError(
                    f"--device {request.device}: PyTorch did not tell within {seconds} what it is",
                    "`batchtune doctor` tells more.",
                ) from None
            raise WorkloadError(
                f"{self._setup.workload}: its setup took longer than {seconds}"
                + (f": it hangs at {last_frame(hung.stack)}" if hung.stack else ""),
                "If it needs longer, to download or to compile, allow that with --setup-timeout SECONDS.",
                hung.stack or None,
            ) from None
        if isinstance(reply, Failed):
            self._raise(reply)
        assert isinstance(reply, kind)
        return reply

    def _died(self, died: WorkerDied) -> ProbeError | WorkloadError:
        """What the user is told of a worker that ended before any trial."""
        if died.out_of_memory:
            return self._too_small(str(died))
        return WorkloadError(
            f"{self._setup.workload}: the worker process {died} while it built the workload, twice",
            "What it printed last may say why. If something outside kills it (a job's limit, a container's), it needs "
            "less memory or time, or a higher limit there.",
            _tail(died.output),
        )

    def _renew(self) -> None:
        """A new worker in the place of the one that is there."""
        self._drop()
        self._number += 1
        self._worker = WorkerProcess(self._nursery)

    def _drop(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _raise(self, failed: Failed) -> NoReturn:
        if failed.stage == "device":
            raise ProbeError(failed.message, failed.hint)
        if failed.out_of_memory:
            raise self._too_small(failed.message)
        message = failed.message
        if failed.stage == "setup":
            message = f"{self._setup.workload}: its setup failed: {message}"
        raise WorkloadError(message, failed.hint, failed.traceback)

    def _too_small(self, reason: str) -> ProbeError:
        return ProbeError(
            f"the memory limit is too small: {self._setup.workload} ran out of it in its setup, "
            f"before any batch ({reason})",
            "Give more with --memory, or take a smaller model with --set.",
        )


def _tail(output: str, lines: int = 12) -> str:
    return "\n".join(output.rstrip().splitlines()[-lines:])
