"""A built workload on a limited device: runs trials and single steps, and judges what they show."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from batchtune.probe import steady
from batchtune.probe.devices.base import Meter
from batchtune.probe.oom import Verdict, error_verdict, noting_ooms
from batchtune.probe.protocol import Measure, Ran, Stage, Step
from batchtune.results import Trial
from batchtune.shapes import BatchShape
from batchtune.units import counted
from batchtune.workloads.tracebacks import first_line, user_traceback

if TYPE_CHECKING:
    from batchtune.workloads import Workload


class Session:
    """A built workload on a limited device."""

    def __init__(self, workload: Workload, meter: Meter) -> None:
        self._workload = workload
        self._meter = meter
        self._stepped = False

    def measure(self, request: Measure) -> Ran:
        """Run one trial, with the allocator's cache kept as in training.

        If the steps passed only because the allocator emptied its cache, or because something caught its error, the
        trial runs once more from an empty cache: leftovers of other shapes must not count against this one, nor what a
        library tries only the first time.
        """
        attempt = self._attempt(request.shape, _Attempt.run_trial)
        if attempt.error is None and (attempt.retries or attempt.caught_oom):
            self._meter.release()
            attempt = self._attempt(request.shape, _Attempt.run_trial)
        if attempt.verdict == "oom" and steady.grows(attempt.in_use, self._meter.device.limit_bytes):
            # Was it because each step left more in use? A batch of one example is watched. Unless it goes on leaking,
            # this was a plain lack of memory. If not even it passes any more, though the whole batch had passed, the
            # leak has used up the memory.
            self._free(failed=True)
            again = self._attempt(replace(request.shape, batch_size=1), _Attempt.run_watched)
            fewer = request.shape.batch_size > 1 or len(again.in_use) < len(attempt.in_use)
            if again.leak or (again.verdict == "oom" and fewer):
                attempt.leak = steady.leak_message(attempt.in_use, ran_out=True)
        self._free(failed=attempt.error is not None)
        return self._ran(attempt)

    def step(self, request: Step) -> Ran:
        """Make one batch and run one step, as in training."""
        if request.release:
            self._free(failed=True)
        attempt = self._attempt(request.shape, _Attempt.run_step, single=True)
        if attempt.error is None and attempt.ooms:  # who caught it? A library may go on with a smaller workspace
            with noting_ooms(attempt.caught):
                self._attempt(request.shape, _Attempt.run_step)
        if attempt.judged()[0] != "ok":
            self._free(failed=True)
        return self._ran(attempt)

    def _attempt(self, shape: BatchShape, run: Callable[[_Attempt], None], *, single: bool = False) -> _Attempt:
        meter = self._meter
        attempt = _Attempt(self._workload, meter, shape, single=single)
        retries, ooms = meter.retries(), meter.ooms()
        try:
            run(attempt)
        except BaseException as error:  # also sys.exit() and the like: nothing that a step raises ends the worker
            # No memory may be left, or a device that answers nothing after a sticky error.
            with contextlib.suppress(Exception):
                attempt.peak_bytes = max(_known([meter.peak(), attempt.peak_bytes]), default=None)
            # Only text leaves this block: the exception holds the failed step's frames, and they its tensors.
            attempt.error, attempt.verdict, attempt.traceback = _described(error)
        attempt.retries, attempt.ooms = meter.retries() - retries, meter.ooms() - ooms
        self._stepped = self._stepped or bool(attempt.in_use)
        return attempt

    def _free(self, *, failed: bool) -> None:
        """Free what a trial left behind; after a failure, also what the allocator keeps of it."""
        gc.collect()
        if failed:
            self._meter.release()

    def _ran(self, attempt: _Attempt) -> Ran:
        trial = attempt.trial()
        # After anything but a plain lack of memory the worker must be replaced. So must it be if the very first step
        # ran out of memory: the optimizer's state may be half made, and the next step would fail for want of the rest.
        plain = attempt.verdict == "oom" and (self._stepped or attempt.stage != "step")
        harmless = attempt.error is None or (plain and self._meter.healthy())
        return Ran(
            trial=trial,
            stage=attempt.stage if trial.error is not None else None,
            traceback=attempt.traceback,
            hint=steady.LEAK_HINT if attempt.leak is not None else None,
            renew=attempt.leak is not None or not harmless or self._meter.worn(),
        )


@dataclass
class _Attempt:
    """One try at a batch shape, and its results so far.

    Attributes:
        single: Whether it is a single step among others, as in training. There it is no failure if the allocator
            empties its cache, or if a library catches an error of the allocator's and goes on.
        in_use: Bytes after each step that was run to its end.
        peaks: Bytes, of making the batch and of each step.
        surroundings: What else the trial's record says of the device.
    """

    workload: Workload
    meter: Meter
    shape: BatchShape
    single: bool = False
    seconds: list[float] = field(default_factory=list)
    in_use: list[int] = field(default_factory=list)
    peaks: list[int | None] = field(default_factory=list)
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    surroundings: dict[str, Any] = field(default_factory=dict)
    retries: int = 0
    ooms: int = 0
    caught: list[str] = field(default_factory=list)
    stage: Stage | None = None
    error: str | None = None
    verdict: Verdict | None = None
    traceback: str | None = None
    leak: str | None = None

    def run_trial(self) -> None:
        """Run steps until their time is known, and more if they seem to leak."""
        with noting_ooms(self.caught):
            batch = self._make()
            for _ in range(steady.WARM_UP_STEPS):
                self._timed(batch)
        if self.caught:
            return
        self.meter.other_processors()  # from here on
        while not steady.enough(self.seconds):
            self.seconds.append(self._timed(batch))
        clock, reasons = self.meter.clocks()
        self.surroundings = {
            "other_processors": self.meter.other_processors(),
            "outside_bytes": self.meter.outside(),
            "sm_clock_mhz": clock,
            "throttle_reasons": reasons,
        }
        if steady.grows(self.in_use, self.meter.device.limit_bytes):
            self._watch(batch)

    def run_step(self) -> None:
        """Run one step of a new batch."""
        self.seconds.append(self._timed(self._make()))

    def run_watched(self) -> None:
        """Run steps of a new batch, to see whether they leak."""
        self._watch(self._make())

    def _make(self) -> Any:
        self.stage = "make_batch"
        self.meter.reset()
        batch = self.workload.make_batch(self.shape)
        self.meter.synchronize()
        self._note_peaks()
        return batch

    def _timed(self, batch: Any) -> float:
        """Run one step; return its time in seconds."""
        self.stage = "step"
        self.meter.reset()
        started = time.perf_counter()
        self.workload.step(batch)
        self.meter.synchronize()
        elapsed = time.perf_counter() - started
        self._note_peaks()
        self.in_use.append(self.meter.in_use())
        return elapsed

    def _note_peaks(self) -> None:
        self.peaks.append(self.meter.peak())
        self.peak_bytes = max(_known([self.peaks[-1], self.peak_bytes]), default=None)
        self.reserved_bytes = max(_known([self.meter.reserved(), self.reserved_bytes]), default=None)

    def _watch(self, batch: Any) -> None:
        """Run more steps, to tell a leak from memory that grows at first only.

        What is merely waiting for Python's collector is no leak, so it runs after each step.
        """
        limit, seconds = self.meter.device.limit_bytes, 0.0
        gc.collect()
        in_use = [self.meter.in_use()]
        while seconds < steady.WATCH_SECONDS:
            seconds += self._timed(batch)
            gc.collect()
            in_use.append(self.meter.in_use())
            if not steady.grows(in_use[-2:], limit):
                return
            if steady.leaks(in_use, limit, seconds):
                self.leak = steady.leak_message(in_use)
                return

    @property
    def caught_oom(self) -> str | None:
        """The lack of memory that the workload caught itself; None if it caught none, or failed anyway."""
        if self.error is not None:
            return None
        if self.caught:
            return self.caught[0]
        if self.ooms and not self.single:
            return f"the allocator ran out of memory ({counted(self.ooms, 'time')})"
        return None

    def judged(self) -> tuple[Literal["ok", "oom", "error"], str | None]:
        """Return the outcome, and the error's message."""
        if self.leak is not None:
            return "error", self.leak
        if self.error is not None:
            return "oom" if self.verdict else "error", self.error
        if self.caught_oom is not None:
            return "oom", f"caught by the workload, whose step returned all the same: {self.caught_oom}"
        if self.retries and not self.single:
            return "oom", f"passed only after the allocator had emptied its cache {self.retries} times"
        return "ok", None

    def trial(self) -> Trial:
        """Return its record. Failures have no times and no peaks, but for a single step's peak."""
        outcome, error = self.judged()
        facts: dict[str, Any] = {"step_seconds": None, "failed_peak_bytes": self.peak_bytes}
        if outcome == "ok":
            later = _known(self.peaks[1 + steady.WARM_UP_STEPS :])
            facts = {
                "step_seconds": statistics.median(self.seconds),
                "step_seconds_spread": steady.interquartile_range(self.seconds) if len(self.seconds) > 1 else None,
                "mean_step_seconds": statistics.fmean(self.seconds),
                "steady_peak_bytes": max([*_known(self.peaks[:1]), *later], default=None),
                "peak_spread_bytes": max(later) - min(later) if len(later) > 1 else None,
            }
        holds = outcome == "ok" or self.single
        return Trial(
            index=0,
            batch_size=self.shape.batch_size,
            length=self.shape.length,
            target_length=self.shape.target_length,
            outcome=outcome,
            steps=len(self.in_use),
            peak_bytes=self.peak_bytes if holds else None,
            reserved_bytes=self.reserved_bytes if holds else None,
            rest_bytes=self.meter.in_use(),
            caught=self.caught_oom is not None,
            alloc_retries=self.retries,
            error=error,
            elapsed_seconds=0.0,
            **self.surroundings,
            **facts,
        )


def _known(values: list[int | None]) -> list[int]:
    return [value for value in values if value is not None]


def _described(error: BaseException) -> tuple[str, Verdict | None, str | None]:
    """Return an exception's message, what it says of memory, and its traceback.

    The failed step's variables are let go of first: where memory has run out, none is left to write a text.
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
