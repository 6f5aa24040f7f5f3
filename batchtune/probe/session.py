"""A built workload on a limited device: runs trials and single steps, and judges their outcomes."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from batchtune.probe.compiling import at_recompile_limit, compilations
from batchtune.probe.devices.base import Meter
from batchtune.probe.leaks import LEAK_HINT, WATCH_SECONDS, grows, leak_message, leaks
from batchtune.probe.oom import Verdict, error_verdict, noting_ooms
from batchtune.probe.process_limits import lowered_limit, process_limits
from batchtune.probe.protocol import Ran, Stage
from batchtune.results import Trial
from batchtune.shapes import BatchShape
from batchtune.units import counted
from batchtune.workloads.loading import first_line, user_traceback

if TYPE_CHECKING:
    from batchtune.workloads import Workload

MOST_TIMED_STEPS = 30
# A step in which torch.compile compiles is not timed. Its limit of 8 versions a function ends that sooner.
_MOST_COMPILING_STEPS = 20
# A failure that leaves more than this part of the limit in use costs the worker.
_HELD_SHARE = 0.002
# Steps whose interquartile range is at most this part of their median are steady, and so are peaks that differ by at
# most this part of the limit. After so many steady trials in a row, one timed step may be enough.
_STEADY_TIMES = 0.05
_STEADY_PEAKS = 0.001
_STEADY_TRIALS = 3
# How long steps are timed: steady ones, and others.
_STEADY_SECONDS = 0.1
_UNSTEADY_SECONDS = 0.75


@dataclass
class Session:
    """A built workload on a limited device."""

    _workload: Workload
    _meter: Meter
    _stepped: bool = False
    _limits: dict[str, int] = field(default_factory=process_limits)
    _steady_trials: int = 0  # the last ones in a row whose equal steps took equal time and memory
    _rest_bytes: int = field(init=False)  # in use after the setup, then after the last step or trial that passed

    def __post_init__(self) -> None:
        self._rest_bytes = self._meter.in_use()

    def measure(self, shape: BatchShape) -> Ran:
        """Run one trial, with the allocator's cache kept as in training.

        If the steps passed only because the allocator emptied its cache, or because something caught its error, the
        trial runs once more from an empty cache: neither leftovers of other shapes nor what a library tries only the
        first time may count against this shape.
        """
        attempt = self._attempt(shape, _Attempt.run_trial)
        if attempt.error is None and (attempt.retries or attempt.caught_oom):
            self._meter.release()
            attempt = self._attempt(shape, _Attempt.run_trial)
        if attempt.verdict == "oom" and grows(attempt.in_use, self._meter.device.limit_bytes):
            # Did each step leave more in use? Watch a batch of one example. If it goes on leaking, or no longer passes
            # though the whole batch had, a leak used up the memory; otherwise the batch was simply too large.
            self._free()
            again = self._attempt(replace(shape, batch_size=1), _Attempt.run_watched)
            fewer = shape.batch_size > 1 or len(again.in_use) < len(attempt.in_use)
            if again.leak or (again.verdict == "oom" and fewer):
                attempt.leak = leak_message(attempt.in_use, ran_out=True)
        gc.collect()
        if len(attempt.seconds) > 1:
            self._steady_trials = self._steady_trials + 1 if attempt.is_steady else 0
        return self._ran(attempt)

    def step(self, shape: BatchShape, *, release: bool = False) -> Ran:
        """Make one batch and run one step, as in training; if `release`, empty the allocator's cache first."""
        if release:
            self._free()
        attempt = self._attempt(shape, _Attempt.run_step, single=True)
        if attempt.error is None and attempt.ooms:  # who caught it? A library may go on with a smaller workspace
            with noting_ooms(attempt.caught):
                self._attempt(shape, _Attempt.run_step)
        return self._ran(attempt)

    def _attempt(self, shape: BatchShape, run: Callable[[_Attempt], None], *, single: bool = False) -> _Attempt:
        meter = self._meter
        brief = self._steady_trials >= _STEADY_TRIALS
        attempt = _Attempt(self._workload, meter, shape, single=single, brief=brief)
        retries, ooms = meter.retries_and_ooms()
        compiled = compilations()
        try:
            run(attempt)
        except BaseException as error:  # also sys.exit() and the like: nothing that a step raises ends the worker
            # No memory may be left, or a device that no longer answers after a sticky error.
            with contextlib.suppress(Exception):
                attempt.peak_bytes = _highest(meter.peak(), attempt.peak_bytes)
            # Only text leaves this block: the exception holds the failed step's frames, and they its tensors.
            attempt.error, attempt.verdict, attempt.traceback = _described(error)
        retries_now, ooms_now = meter.retries_and_ooms()
        attempt.retries = retries_now - retries
        attempt.ooms = ooms_now - ooms
        attempt.compilations = compilations() - compiled
        if lowered := lowered_limit(self._limits):
            attempt.error = lowered
            attempt.verdict = None
        self._stepped = self._stepped or bool(attempt.in_use)
        return attempt

    def _free(self) -> None:
        """Free what a failure may have left behind, and the allocator's cache."""
        drain_autograd()
        gc.collect()
        self._meter.release()

    def _ran(self, attempt: _Attempt) -> Ran:
        passed = attempt.judged()[0] == "ok"
        if not passed:
            self._free()
        trial = attempt.trial()
        # Any error but a plain OOM costs the worker. So does an OOM in its very first step: the optimizer's state may
        # be incomplete, and the next step would fail because of that.
        plain = attempt.verdict == "oom" and (self._stepped or attempt.stage != "step")
        harmless = attempt.error is None or (plain and self._meter.healthy())
        worn = not attempt.single and self._meter.worn()  # steps go on with what earlier ones left, as training does
        return Ran(
            trial=trial,
            stage=attempt.stage if trial.error is not None else None,
            traceback=attempt.traceback,
            hint=LEAK_HINT if attempt.leak is not None else None,
            renew=attempt.leak is not None or not harmless or self._holds_more(passed) or worn,
        )

    def _holds_more(self, passed: bool) -> bool:
        """Return whether a failure left memory in use that can't be freed: it would count against the next shapes."""
        in_use = self._meter.in_use()
        if passed:
            self._rest_bytes = in_use
        return in_use - self._rest_bytes > _HELD_SHARE * self._meter.device.limit_bytes


@dataclass
class _Attempt:
    """One try at a batch shape, and its results so far.

    In a `single` step among others, as in training, the allocator may empty its cache, and a library may catch one of
    its errors and go on; in a trial either is a failure. In a `brief` trial one timed step may be enough.
    """

    workload: Workload
    meter: Meter
    shape: BatchShape
    single: bool = False
    brief: bool = False
    seconds: list[float] = field(default_factory=list)  # of the timed steps
    in_use: list[int] = field(default_factory=list)  # bytes after each completed step
    peaks: list[int | None] = field(default_factory=list)  # bytes, of making the batch and of each step
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    surroundings: dict[str, Any] = field(default_factory=dict)  # further fields of the trial
    retries: int = 0
    ooms: int = 0
    compilations: int = 0
    caught: list[str] = field(default_factory=list)
    stage: Stage | None = None
    error: str | None = None
    verdict: Verdict | None = None
    traceback: str | None = None
    leak: str | None = None

    def run_trial(self) -> None:
        """Run steps until their time is known, and more if they seem to leak."""
        flushed, _ = self.meter.retries_and_ooms()
        with noting_ooms(self.caught):
            batch = self._make()
            self._timed(batch)  # a warm-up: it makes the optimizer's state, and libraries choose their kernels
        if self.caught or self.meter.retries_and_ooms()[0] > flushed:
            return
        self.meter.surroundings()  # count from here
        compiling = 0
        while not enough(self.seconds, brief=self.brief):
            compiled = compilations()
            seconds = self._timed(batch, watched=not self.seconds)
            if compilations() > compiled and compiling < _MOST_COMPILING_STEPS:
                compiling += 1
            else:
                self.seconds.append(seconds)
        self.surroundings = self.meter.surroundings()
        if grows(self.in_use, self.meter.device.limit_bytes):
            self._watch(batch)

    def run_step(self) -> None:
        batch = self._make()
        compiled = compilations()
        seconds = self._timed(batch)
        if compilations() > compiled:
            seconds = self._timed(batch)
        self.seconds.append(seconds)

    def run_watched(self) -> None:
        self._watch(self._make())

    def _make(self) -> Any:
        self.stage = "make_batch"
        self.meter.reset()
        batch = self.workload.make_batch(self.shape)
        self.meter.synchronize()
        self._note_peaks()
        return batch

    def _timed(self, batch: Any, *, watched: bool = False) -> float:
        """Run one step; return its time in seconds. If `watched`, note the device's clock while it works."""
        self.stage = "step"
        self.meter.reset()
        started = time.perf_counter()
        self.workload.step(batch)
        if watched:
            self.meter.note_clock()
        self.meter.synchronize()
        elapsed = time.perf_counter() - started
        self._note_peaks()
        self.in_use.append(self.meter.in_use())
        return elapsed

    def _note_peaks(self) -> None:
        self.peaks.append(self.meter.peak())
        self.peak_bytes = _highest(self.peaks[-1], self.peak_bytes)
        self.reserved_bytes = _highest(self.meter.reserved(), self.reserved_bytes)

    def _watch(self, batch: Any) -> None:
        """Run more steps, to tell a leak from memory that stops growing or waits for Python's garbage collector."""
        limit = self.meter.device.limit_bytes
        seconds = 0.0
        gc.collect()
        in_use = [self.meter.in_use()]
        while seconds < WATCH_SECONDS:
            seconds += self._timed(batch)
            gc.collect()
            in_use.append(self.meter.in_use())
            if not grows(in_use[-2:], limit):
                return
            if leaks(in_use, limit, seconds):
                self.leak = leak_message(in_use)
                return

    @property
    def caught_oom(self) -> str | None:
        """The OOM that the workload caught itself; None if it caught none, or failed anyway."""
        if self.error is not None:
            return None
        if self.caught:
            return self.caught[0]
        if self.ooms and not self.single:
            return f"the allocator ran out of memory ({counted(self.ooms, 'time')})"
        return None

    def judged(self) -> tuple[Literal["ok", "oom", "error"], str | None]:
        if self.leak is not None:
            return "error", self.leak
        if self.error is not None:
            return "oom" if self.verdict else "error", self.error
        if self.caught_oom is not None:
            return "oom", f"caught by the workload, whose step returned all the same: {self.caught_oom}"
        if self.retries and not self.single:
            return "oom", f"passed only after the allocator had emptied its cache {self.retries} times"
        return "ok", None

    @property
    def later_peaks(self) -> list[int]:
        """The known peaks in bytes of the steps after the warm-up."""
        return [peak for peak in self.peaks[2:] if peak is not None]

    @property
    def is_steady(self) -> bool:
        """Whether its steps, of which there are several, took equal time and memory."""
        spread = max(self.later_peaks, default=0) - min(self.later_peaks, default=0)
        return _are_steady(self.seconds) and spread <= _STEADY_PEAKS * self.meter.device.limit_bytes

    def trial(self) -> Trial:
        """Return its record. Failures have no times and no peaks, except a single step's peak."""
        outcome, error = self.judged()
        facts: dict[str, Any] = {"failed_peak_bytes": self.peak_bytes}
        if outcome == "ok":
            later = self.later_peaks
            facts = {
                "step_seconds": statistics.median(self.seconds),
                "step_seconds_spread": interquartile_range(self.seconds) if len(self.seconds) > 1 else None,
                "mean_step_seconds": statistics.fmean(self.seconds),
                "steady_peak_bytes": _highest(*self.peaks[:1], *later),
                "peak_spread_bytes": max(later) - min(later) if len(later) > 1 else None,
            }
        if outcome == "ok" or self.single:
            facts |= {"peak_bytes": self.peak_bytes, "reserved_bytes": self.reserved_bytes}
        return Trial.of(
            self.shape,
            outcome,
            error,
            steps=len(self.in_use),
            rest_bytes=self.meter.in_use(),
            caught=self.caught_oom is not None,
            alloc_retries=self.retries,
            compilations=self.compilations,
            at_recompile_limit=at_recompile_limit(),
            **self.surroundings,
            **facts,
        )


def drain_autograd() -> None:
    """Free what a failed backward pass left in this thread: torch keeps its queue until the next one begins."""
    import torch

    with contextlib.suppress(Exception), torch.inference_mode(False), torch.enable_grad():
        torch.autograd.backward(torch.ones(1, device="cpu", requires_grad=True).sum())


def _highest(*values: int | None) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _described(error: BaseException) -> tuple[str, Verdict | None, str | None]:
    """Return an exception's message, its verdict, and its traceback.

    The failed step's variables are freed first: if memory has run out, none is left to write a text.
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


def enough(seconds: Sequence[float], *, brief: bool = False) -> bool:
    """Return whether these timed steps are enough to know the step time.

    Short steps vary more and are cheap to repeat: run up to 30 of them, for a tenth of a second, or for up to three
    quarters of a second if they are not steady (interquartile range above 5% of the median). Three are the least, to
    show one that is slow by chance, unless the first takes 10 seconds; in a `brief` trial one is enough that takes a
    tenth of a second. What still scatters is averaged over trials by the model of step times.
    """
    total = sum(seconds)
    if len(seconds) < 3:
        return len(seconds) == 1 and total >= (_STEADY_SECONDS if brief else 10.0)
    wanted_seconds = _STEADY_SECONDS if _are_steady(seconds) else _UNSTEADY_SECONDS
    return len(seconds) >= MOST_TIMED_STEPS or total >= wanted_seconds


def _are_steady(seconds: Sequence[float]) -> bool:
    return interquartile_range(seconds) <= _STEADY_TIMES * statistics.median(seconds)


def interquartile_range(values: Sequence[float]) -> float:
    """Return the distance between the quartiles, interpolated linearly (as `numpy.percentile` does)."""
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return third - first
