"""The worker process: builds the workload once and runs the trials it is told.

Forked by the nursery, or where that can't be, started as `python -m batchtune.probe.worker FD`. It speaks over its
socket alone: what the workload prints goes to the standard streams and disturbs nothing. Its keeper
(`batchtune.probe.keeper`) sees to it that it ends.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from batchtune.errors import BatchtuneError, WorkloadError
from batchtune.probe import leaks, protocol, timing
from batchtune.probe.caught import noting_ooms
from batchtune.probe.keeper import STACK_SIGNAL
from batchtune.probe.meters import Meter, identify, open_meter, torch_device
from batchtune.probe.oom import Verdict, error_verdict
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
    Stage,
    Step,
    Stepped,
)
from batchtune.probe.surroundings import gradient_bytes
from batchtune.shapes import BatchShape
from batchtune.units import counted
from batchtune.workloads.tracebacks import first_line, user_traceback

if TYPE_CHECKING:
    from batchtune.workloads import Workload


def main() -> None:
    """Serves the socket that the command line names."""
    serve(socket.socket(fileno=int(sys.argv[1])))


def serve(channel: socket.socket) -> None:
    """Serves requests until the supervisor closes the socket."""
    channel.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides when to stop
    # Where it hangs, if it does. Not to the stream itself: the workload may close or replace that.
    faulthandler.register(STACK_SIGNAL, file=os.dup(2), all_threads=False)
    session: Session | None = None
    with channel, channel.makefile("rb") as requests:
        for line in requests:
            request = protocol.decode_request(line)
            reply: protocol.Reply
            if isinstance(request, Identify):
                reply = _identify(request)
            elif isinstance(request, Load):
                reply = _load(request)
            elif isinstance(request, Setup):
                session, reply = _set_up(request)
            else:
                assert session is not None, "a trial before the setup"
                reply = session.measure(request) if isinstance(request, Measure) else session.step(request)
            channel.sendall(protocol.encode(reply) + b"\n")
    os._exit(0)  # no finalizer of the workload's may hang the end


def _identify(request: Identify) -> Identified | Failed:
    """Which device is meant; whatever goes wrong in that is the device's fault."""
    try:
        return identify(request.device)
    except BatchtuneError as error:
        return Failed(stage="device", message=error.message, hint=error.hint)
    except Exception as error:
        return Failed(stage="device", message=f"--device {request.device}: {first_line(error)}")


def _load(request: Load) -> Loaded | Failed:
    """Whether the workload can be imported and takes its options."""
    from batchtune.workloads import load_workload

    try:
        load_workload(request.workload, request.options)
    except BaseException as error:
        return _failed("import", error)
    return Loaded()


def _set_up(request: Setup) -> tuple[Session | None, Ready | Failed]:
    """Opens the device, limits it and builds the workload."""
    from batchtune.workloads import load_workload

    stage: Stage = "device"
    try:
        meter = open_meter(request.device, request.memory_bytes, request.memory_fraction, request.limit_bytes)
        import torch

        stage = "import"
        workload = load_workload(request.workload, request.options)
        stage = "device"
        meter.limit()
        stage = "setup"
        torch.manual_seed(request.seed)
        meter.reset()
        workload.setup(torch_device(meter))
        meter.synchronize()
        base_bytes = meter.peak()
        stage = "device"
        meter.settle(request.reserve_bytes, gradient_bytes() if request.ddp else 0)
    except BaseException as error:
        return None, _failed(stage, error)
    return Session(workload, meter), Ready(device=meter.device, base_bytes=base_bytes)


def _failed(stage: Stage, error: BaseException) -> Failed:
    """An error before any trial."""
    if isinstance(error, BatchtuneError):
        last_lines = error.traceback if isinstance(error, WorkloadError) else None
        return Failed(stage=stage, message=error.message, hint=error.hint, traceback=last_lines)
    return Failed(
        stage=stage,
        message=first_line(error),
        traceback=user_traceback(error),
        out_of_memory=error_verdict(error) == "oom",
    )


@dataclass
class _Attempt:
    """One try at a batch shape."""

    seconds: list[float] = field(default_factory=list)
    in_use: list[int] = field(default_factory=list)
    peaks: list[int | None] = field(default_factory=list)
    steps: int = 0
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    outside_bytes: int | None = None
    sm_clock_mhz: int | None = None
    throttle_reasons: list[str] | None = None
    other_processors: float | None = None
    retries: int = 0
    ooms: int = 0
    caught: list[str] = field(default_factory=list)
    stage: Stage | None = None
    error: str | None = None
    verdict: Verdict | None = None
    traceback: str | None = None
    leak: str | None = None

    @property
    def caught_oom(self) -> str | None:
        """The lack of memory that the workload caught itself; None where it caught none, or it failed anyway."""
        if self.error is not None or not (self.caught or self.ooms):
            return None
        return self.caught[0] if self.caught else f"the allocator ran out of memory ({counted(self.ooms, 'time')})"

    @property
    def steady_peak_bytes(self) -> int | None:
        """The highest peak of the batch's making and of the steps after the first."""
        peaks = [peak for peak in (*self.peaks[:1], *self._steady) if peak is not None]
        return max(peaks, default=None)

    @property
    def peak_spread_bytes(self) -> int | None:
        """By how much the peaks of the steps after the first differ."""
        peaks = [peak for peak in self._steady if peak is not None]
        return max(peaks) - min(peaks) if len(peaks) > 1 else None

    @property
    def _steady(self) -> list[int | None]:
        return self.peaks[1 + timing.WARM_UP_STEPS :]  # the first is of the batch's making


class Session:
    """A built workload on a limited device."""

    def __init__(self, workload: Workload, meter: Meter) -> None:
        self._workload = workload
        self._meter = meter
        self._stepped = False

    def measure(self, request: Measure) -> Measured:
        """Runs one trial: the allocator's cache is kept, as training keeps it.

        Where the steps passed only because the allocator emptied its cache, or because somebody caught its error, the
        trial is run once more from an empty cache: what is left over from other shapes must not count against this
        one, nor what a library tries only the first time.
        """
        shape = BatchShape(request.batch_size, request.length, request.target_length)
        attempt = self._attempt(shape, self._trial)
        if attempt.error is None and (attempt.retries or attempt.caught_oom):
            self._meter.release()
            attempt = self._attempt(shape, self._trial)
        if attempt.verdict == "oom" and leaks.grows(attempt.in_use, self._meter.device.limit_bytes):
            self._explain_by_leak(shape, attempt)
        self._tidy(failed=attempt.error is not None)
        return self._measured(attempt)

    def step(self, request: Step) -> Stepped:
        """Makes one batch and runs one step, as training does."""
        if request.release:
            gc.collect()
            self._meter.release()
        shape = BatchShape(request.batch_size, request.length, request.target_length)
        attempt = self._attempt(shape, self._one_step)
        if attempt.error is None and attempt.ooms:  # whose catch was it? A library may go on with a smaller workspace
            attempt.caught = self._attempt(shape, self._noted_step).caught
        outcome, error, _ = _judge(replace(attempt, retries=0, ooms=0))
        if outcome != "ok":
            self._tidy(failed=True)
        return Stepped(
            outcome=outcome,
            step_seconds=attempt.seconds[0] if outcome == "ok" else None,
            peak_bytes=attempt.peak_bytes,
            reserved_bytes=attempt.reserved_bytes,
            rest_bytes=self._meter.in_use(),
            alloc_retries=attempt.retries,
            error=error,
            stage=attempt.stage if error is not None else None,
            traceback=attempt.traceback,
            caught=attempt.caught_oom is not None,
            renew=self._renew(attempt),
        )

    def _attempt(self, shape: BatchShape, run: Callable[[BatchShape, _Attempt], None]) -> _Attempt:
        attempt = _Attempt()
        retries, ooms = self._meter.retries(), self._meter.ooms()
        failure: tuple[str, Verdict | None, str | None] | None = None
        try:
            run(shape, attempt)
        except BaseException as error:  # also sys.exit() and the like: nothing that a step raises ends the worker
            # Only text leaves this block: the exception holds the failed step's frames, and they its tensors.
            self._note_last_peak(attempt)
            failure = _told(error)
        if failure is not None:
            attempt.error, attempt.verdict, attempt.traceback = failure
        attempt.retries = self._meter.retries() - retries
        attempt.ooms = self._meter.ooms() - ooms
        return attempt

    def _note_last_peak(self, attempt: _Attempt) -> None:
        """Keeps the most memory that was in use before an error."""
        try:
            peak = self._meter.peak()
        except Exception:  # no memory left, or a device that answers nothing after a sticky error
            return
        if peak is not None:
            attempt.peak_bytes = max(peak, attempt.peak_bytes or 0)

    def _trial(self, shape: BatchShape, attempt: _Attempt) -> None:
        """A whole trial: steps until their time is known, and more where they seem to leak."""
        with noting_ooms(attempt.caught):
            batch = self._make(shape, attempt)
            for _ in range(timing.WARM_UP_STEPS):
                self._timed(batch, attempt)
        if attempt.caught:
            return
        self._meter.other_processors()  # from here on
        while not timing.enough(attempt.seconds):
            attempt.seconds.append(self._timed(batch, attempt))
        attempt.other_processors = self._meter.other_processors()
        attempt.sm_clock_mhz, attempt.throttle_reasons = self._meter.clocks()
        attempt.outside_bytes = self._meter.outside()
        if leaks.grows(attempt.in_use, self._meter.device.limit_bytes):
            self._watch(batch, attempt)

    def _one_step(self, shape: BatchShape, attempt: _Attempt) -> None:
        attempt.seconds.append(self._timed(self._make(shape, attempt), attempt))

    def _noted_step(self, shape: BatchShape, attempt: _Attempt) -> None:
        with noting_ooms(attempt.caught):
            self._one_step(shape, attempt)

    def _make(self, shape: BatchShape, attempt: _Attempt) -> Any:
        attempt.stage = "make_batch"
        self._meter.reset()
        batch = self._workload.make_batch(shape)
        self._meter.synchronize()
        self._note_peaks(attempt)
        return batch

    def _timed(self, batch: Any, attempt: _Attempt) -> float:
        """One step; its time in seconds."""
        attempt.stage = "step"
        self._meter.reset()
        started = time.perf_counter()
        self._workload.step(batch)
        self._meter.synchronize()
        elapsed = time.perf_counter() - started
        self._note_peaks(attempt)
        attempt.in_use.append(self._meter.in_use())
        attempt.steps += 1
        self._stepped = True
        return elapsed

    def _note_peaks(self, attempt: _Attempt) -> None:
        """Keeps the highest of the peaks, of the batch's making and of each step."""
        peak, reserved = self._meter.peak(), self._meter.reserved()
        attempt.peaks.append(peak)
        if peak is not None:
            attempt.peak_bytes = max(peak, attempt.peak_bytes or 0)
        if reserved is not None:
            attempt.reserved_bytes = max(reserved, attempt.reserved_bytes or 0)

    def _watch(self, batch: Any, attempt: _Attempt) -> None:
        """Runs more steps, to tell a leak from what grows at first only.

        What is merely waiting for Python's collector is no leak, so that is called after each step.
        """
        limit, seconds = self._meter.device.limit_bytes, 0.0
        gc.collect()
        in_use = [self._meter.in_use()]
        while seconds < leaks.WATCH_SECONDS:
            seconds += self._timed(batch, attempt)
            gc.collect()
            in_use.append(self._meter.in_use())
            if not leaks.grows(in_use[-2:], limit):
                return
            if leaks.certain(in_use, limit, seconds):
                attempt.leak = leaks.message(in_use)
                return

    def _explain_by_leak(self, shape: BatchShape, attempt: _Attempt) -> None:
        """Where memory ran out while each step left more in use: is that why?

        A batch of one example is watched. Unless it goes on leaking, this was a plain lack of memory. Where not even
        it passes any more, though the whole batch had passed, what was kept has used up the memory.
        """
        self._tidy(failed=True)
        single = BatchShape(1, shape.length, shape.target_length)
        again = self._attempt(single, self._watched)
        worse = again.verdict == "oom" and (shape.batch_size > 1 or again.steps < attempt.steps)
        if again.leak or worse:
            attempt.leak = leaks.message(attempt.in_use, ran_out=True)

    def _watched(self, shape: BatchShape, attempt: _Attempt) -> None:
        self._watch(self._make(shape, attempt), attempt)

    def _tidy(self, *, failed: bool) -> None:
        """Frees what the trial left behind; after a failure, what the allocator keeps of it too."""
        gc.collect()
        if failed:
            self._meter.release()

    def _measured(self, attempt: _Attempt) -> Measured:
        outcome, error, hint = _judge(attempt)
        passed = outcome == "ok"
        return Measured(
            outcome=outcome,
            steps=attempt.steps,
            step_seconds=statistics.median(attempt.seconds) if passed else None,
            step_seconds_spread=(
                timing.interquartile_range(attempt.seconds) if passed and len(attempt.seconds) > 1 else None
            ),
            mean_step_seconds=statistics.fmean(attempt.seconds) if passed else None,
            peak_bytes=attempt.peak_bytes if passed else None,
            steady_peak_bytes=attempt.steady_peak_bytes if passed else None,
            peak_spread_bytes=attempt.peak_spread_bytes if passed else None,
            reserved_bytes=attempt.reserved_bytes if passed else None,
            rest_bytes=self._meter.in_use(),
            outside_bytes=attempt.outside_bytes,
            sm_clock_mhz=attempt.sm_clock_mhz,
            throttle_reasons=attempt.throttle_reasons,
            failed_peak_bytes=None if passed else attempt.peak_bytes,
            caught=attempt.caught_oom is not None,
            other_processors=attempt.other_processors,
            alloc_retries=attempt.retries,
            error=error,
            hint=hint,
            stage=attempt.stage if error is not None else None,
            traceback=attempt.traceback,
            renew=self._renew(attempt),
        )

    def _renew(self, attempt: _Attempt) -> bool:
        """Whether the worker must be replaced.

        After anything but a plain lack of memory; and where the very first step ran out of it: the optimizer's state
        may be half made, and the next step would fail for want of the rest.
        """
        if self._meter.worn() or attempt.leak:
            return True
        if attempt.error is None:
            return False
        plain = attempt.verdict == "oom" and (self._stepped or attempt.stage != "step")
        return not (plain and self._meter.healthy())


def _told(error: BaseException) -> tuple[str, Verdict | None, str | None]:
    """An exception's message, what it says of memory, and its traceback.

    The failed step's variables are let go of first: where memory has run out there is none left to write a text.
    """
    try:
        cause: BaseException | None = error
        seen: set[int] = set()
        while cause is not None and id(cause) not in seen:
            seen.add(id(cause))
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__
        return first_line(error), error_verdict(error), user_traceback(error)
    except MemoryError:
        return "MemoryError, and no memory to say where", "oom", None


def _judge(attempt: _Attempt) -> tuple[Literal["ok", "oom", "error"], str | None, str | None]:
    """The outcome of a trial, the error's message, and what to do about it."""
    if attempt.leak is not None:
        return "error", attempt.leak, leaks.HINT
    if attempt.error is not None:
        return "oom" if attempt.verdict else "error", attempt.error, None
    if attempt.caught_oom is not None:
        return "oom", f"caught by the workload, whose step returned all the same: {attempt.caught_oom}", None
    if attempt.retries:
        return "oom", f"passed only after the allocator had emptied its cache {attempt.retries} times", None
    return "ok", None, None


if __name__ == "__main__":
    main()
