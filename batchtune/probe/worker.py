"""The worker process: builds the workload once and runs the trials it is told.

Started as `python -m batchtune.probe.worker FD PARENT`. It speaks over the socket FD alone: what the workload
prints goes to the standard streams and disturbs nothing. It dies with its parent.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batchtune.errors import BatchtuneError, WorkloadError
from batchtune.probe import protocol
from batchtune.probe.meters import Meter, open_meter, torch_device
from batchtune.probe.oom import error_verdict
from batchtune.probe.protocol import Failed, Measure, Measured, Ready, Setup, Stage
from batchtune.shapes import BatchShape
from batchtune.workloads.tracebacks import first_line, user_traceback

if TYPE_CHECKING:
    from batchtune.workloads import Workload

WARM_UP_STEPS = 1
MOST_MEASURED_STEPS = 5
ENOUGH_SECONDS = (
    0.25,
    1.0,
)  # two measured steps that took this long need no third; one that took this no second


def main() -> None:
    """Serves requests until the supervisor closes the socket."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    _die_with(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides when to stop
    with channel, channel.makefile("rb") as requests:
        session: Session | None = None
        for line in requests:
            request = protocol.decode_request(line)
            reply: protocol.Reply
            if isinstance(request, Setup):
                session, reply = _set_up(request)
            else:
                assert session is not None, "a trial before the setup"
                reply = session.measure(request)
            channel.sendall(protocol.encode(reply) + b"\n")
    os._exit(0)  # no finalizer of the workload's may hang the end


def _die_with(parent: int) -> None:
    """Asks the kernel to kill this process when the supervisor dies, however it does (Linux)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone already
        os._exit(1)


def _set_up(request: Setup) -> tuple[Session | None, Ready | Failed]:
    """Opens the device, limits it and builds the workload."""
    import torch

    from batchtune.workloads import load_workload

    stage: Stage = "device"
    try:
        meter = open_meter(request.device, request.memory_bytes, request.memory_fraction, request.limit_bytes)
        stage = "import"
        workload = load_workload(request.workload, request.options)
        stage = "device"
        meter.limit()
        stage = "setup"
        torch.manual_seed(request.seed)
        meter.reset()
        workload.setup(torch_device(meter))
        meter.synchronize()
    except BatchtuneError as error:
        last_lines = error.traceback if isinstance(error, WorkloadError) else None
        return None, Failed(stage=stage, message=error.message, hint=error.hint, traceback=last_lines)
    except BaseException as error:
        return None, Failed(
            stage=stage,
            message=first_line(error),
            traceback=user_traceback(error),
            out_of_memory=error_verdict(error) == "oom",
        )
    return Session(workload, meter), Ready(device=meter.device, base_bytes=meter.peak())


@dataclass
class _Attempt:
    """One try at a batch shape."""

    seconds: list[float] = field(default_factory=list)
    steps: int = 0
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    retries: int = 0
    stage: Stage | None = None
    error: str | None = None
    verdict: str | None = None
    traceback: str | None = None


class Session:
    """A built workload on a limited device."""

    def __init__(self, workload: Workload, meter: Meter) -> None:
        self._workload = workload
        self._meter = meter
        self._stepped = False

    def measure(self, request: Measure) -> Measured:
        """Runs one trial: the allocator's cache is kept, as training keeps it.

        Where the steps passed only because the allocator emptied its cache, the trial is run once more from an
        empty cache: what is left over from other shapes must not count against this one.
        """
        shape = BatchShape(request.batch_size, request.length, request.target_length)
        attempt = self._attempt(shape)
        if attempt.error is None and attempt.retries:
            self._meter.release()
            attempt = self._attempt(shape)
        self._tidy(failed=attempt.error is not None)
        return self._reply(attempt)

    def _attempt(self, shape: BatchShape) -> _Attempt:
        attempt = _Attempt()
        retries = self._meter.retries()
        failure: tuple[str, str | None, str] | None = None
        try:
            self._run(shape, attempt)
        except BaseException as error:  # also sys.exit() and the like: nothing that a step raises ends the worker
            # Only text leaves this block: the exception holds the failed step's frames, and they its tensors.
            failure = (first_line(error), error_verdict(error), user_traceback(error))
        if failure is not None:
            attempt.error, attempt.verdict, attempt.traceback = failure
        attempt.retries = self._meter.retries() - retries
        return attempt

    def _run(self, shape: BatchShape, attempt: _Attempt) -> None:
        meter = self._meter
        attempt.stage = "make_batch"
        meter.reset()
        batch = self._workload.make_batch(shape)
        meter.synchronize()
        self._note_peaks(attempt)
        attempt.stage = "step"
        while not _enough(attempt.seconds):
            meter.reset()
            started = time.perf_counter()
            self._workload.step(batch)
            meter.synchronize()
            elapsed = time.perf_counter() - started
            self._note_peaks(attempt)
            attempt.steps += 1
            self._stepped = True
            if attempt.steps > WARM_UP_STEPS:
                attempt.seconds.append(elapsed)

    def _note_peaks(self, attempt: _Attempt) -> None:
        """Keeps the highest of the peaks: the first step has no optimizer state yet, later ones do."""
        peak, reserved = self._meter.peak(), self._meter.reserved()
        if peak is not None:
            attempt.peak_bytes = max(peak, attempt.peak_bytes or 0)
        if reserved is not None:
            attempt.reserved_bytes = max(reserved, attempt.reserved_bytes or 0)

    def _tidy(self, *, failed: bool) -> None:
        """Frees what the trial left behind; after a failure, what the allocator keeps of it too."""
        gc.collect()
        if failed:
            self._meter.release()

    def _reply(self, attempt: _Attempt) -> Measured:
        outcome, error = "ok", attempt.error
        if error is not None:
            outcome = "oom" if attempt.verdict else "error"
        elif attempt.retries:
            outcome = "oom"
            error = f"passed only after the allocator had emptied its cache {attempt.retries} times"
        return Measured(
            outcome=outcome,  # type: ignore[arg-type]  # one of the three, by the lines above
            steps=attempt.steps,
            step_seconds=statistics.median(attempt.seconds) if outcome == "ok" else None,
            peak_bytes=attempt.peak_bytes if outcome == "ok" else None,
            reserved_bytes=attempt.reserved_bytes if outcome == "ok" else None,
            alloc_retries=attempt.retries,
            error=error,
            stage=attempt.stage if error is not None else None,
            traceback=attempt.traceback,
            renew=self._meter.worn() or (error is not None and not self._sound(attempt)),
        )

    def _sound(self, attempt: _Attempt) -> bool:
        """Whether the worker can go on after a failed attempt.

        Not after anything but a plain lack of memory; nor where the very first step ran out of it: the optimizer's
        state may be half made, and the next step would fail for want of the rest.
        """
        plain_oom = attempt.verdict == "oom" or attempt.error is None
        return plain_oom and (self._stepped or attempt.stage != "step") and self._meter.healthy()


def _enough(seconds: list[float]) -> bool:
    """Whether the measured steps tell the step time: short ones scatter more and are cheap to repeat."""
    two, one = ENOUGH_SECONDS
    total = sum(seconds)
    return total >= one or (len(seconds) >= 2 and total >= two) or len(seconds) == MOST_MEASURED_STEPS


if __name__ == "__main__":
    main()
