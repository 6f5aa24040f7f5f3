"""One try at a batch shape: makes the batch, runs its steps, and judges what they took."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, Protocol

from batchtune.probe.devices import Meter
from batchtune.probe.failures import (
    OomVerdict,
    at_recompile_limit,
    compilations,
    noting_ooms,
)
from batchtune.probe.requests import Stage
from batchtune.results import BatchShape, Trial
from batchtune.units import counted, format_size

if TYPE_CHECKING:
    from batchtune.workloads import Workload
MOST_TIMED_STEPS = 30
# A step in which torch.compile compiles is not timed. Its limit of 8 versions a function ends that sooner.
_MOST_COMPILING_STEPS = 20
# Steps whose interquartile range is at most this part of their median are steady.
_STEADY_TIMES = 0.05
# Two steps count as equal if they differ by at most this in time (the interquartile range over the median: a single
# step is then known to about 10%) and in memory (over the limit).
_EQUAL_TIMES = 0.12
_EQUAL_PEAKS = 0.001
# How long steps are timed: steady ones, and others.
_STEADY_SECONDS = 0.1
_UNSTEADY_SECONDS = 0.75
# A leak: ten steps in a row that each leave more in use, or as many as run in half a minute, but five at least.
_LEAKING_STEPS = 10
_FEWEST_LEAKING_STEPS = 5
_WATCH_SECONDS = 30.0


OOM_COUNTED = "the allocator ran out of memory"
"""What is known of an error that only the allocator's count shows."""


class Agree(Protocol):
    """Asks all ranks: whatever decides how many steps run, or which, must be decided by all together."""

    def __call__(self, wanted: bool, caught: str | None = None) -> bool:
        """Return whether any rank wants it, once all have asked; `caught` as in `Vote`."""


def alone(wanted: bool, caught: str | None = None) -> bool:
    """Decide for a process that is the only one."""
    return wanted


@dataclass
class Attempt:
    """One try at a batch shape, and its results so far.

    In a `single` step among others, as in training, the allocator may empty its cache, and a library may catch one of
    its errors and go on; in a trial either is a failure. In a brief trial one timed step may be enough.
    """

    workload: Workload
    meter: Meter
    shape: BatchShape
    single: bool
    is_brief: bool
    agree: Agree = alone
    held_bytes: int = 0  # before it
    seconds: list[float] = field(default_factory=list)  # of the timed steps
    in_use: list[int] = field(default_factory=list)  # bytes after each completed step
    # bytes, of making the batch and of each step.
    peaks: list[int | None] = field(default_factory=list)
    reserved: list[int | None] = field(default_factory=list)
    # Further fields of the trial.
    surroundings: dict[str, Any] = field(default_factory=dict)
    retries: int = 0
    ooms: int = 0
    compilations: int = 0
    caught: list[str] = field(default_factory=list)
    stage: Stage | None = None
    error: str | None = None
    verdict: OomVerdict | None = None
    traceback: str | None = None
    leak: str | None = None

    def run(self) -> None:
        """Make the batch and run a single step, or a trial's."""
        self.held_bytes = self.meter.in_use()
        if self.single:
            self._run_timed(self._make())
            return
        flushed, _ = self.meter.retries_and_ooms()
        with noting_ooms(self.caught):
            batch = self._make()
            # A warm-up: it makes the optimizer's state, and libraries choose their kernels.
            self._step(batch)
        is_flushed = self.meter.retries_and_ooms()[0] > flushed
        if self.agree(bool(self.caught) or is_flushed, next(iter(self.caught), None)):
            return
        self.meter.surroundings()  # count from here
        self._run_timed(batch)
        self.surroundings = self.meter.surroundings()
        # Two steps of a brief trial show too little, and the trials before it showed no leak.
        may_show_a_leak = not self.is_brief or len(self.in_use) > 2
        if self.agree(
            may_show_a_leak and grows(self.in_use, self.meter.device.limit_bytes)
        ):
            self._watch(batch)

    def _make(self) -> Any:
        self.stage = "make_batch"
        self.meter.reset()
        batch = self.workload.make_batch(self.shape)
        self.meter.synchronize()
        self._note_peaks()
        return batch

    def _run_timed(self, batch: Any) -> None:
        """Run steps until their time is known."""
        compiling = 0
        needs_more = True
        while needs_more:
            compiled = compilations()
            seconds = self._step(batch, watched=not self.single and not self.seconds)
            has_compiled = self.agree(compilations() > compiled)
            if has_compiled and compiling < _MOST_COMPILING_STEPS:
                compiling += 1
                continue
            self.seconds.append(seconds)
            needs_more = not self.single and self.agree(
                not enough(self.seconds, brief=self.is_brief)
            )

    def _step(self, batch: Any, *, watched: bool = False) -> float:
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
        whole_step_seconds = getattr(self.workload, "whole_step_seconds", float)
        return float(whole_step_seconds(elapsed))

    def _note_peaks(self) -> None:
        self.peaks.append(self.meter.peak())
        self.reserved.append(self.meter.reserved())

    def _watch(self, batch: Any) -> None:
        """Run more steps, to tell a leak from memory that stops growing or waits for Python's garbage collector."""
        limit = self.meter.device.limit_bytes
        started = time.monotonic()
        gc.collect()
        in_use = [self.meter.allocated()]
        while self.agree(
            len(in_use) <= _LEAKING_STEPS
            and time.monotonic() - started < _WATCH_SECONDS
        ):
            self._step(batch)
            gc.collect()
            in_use.append(self.meter.allocated())
            if not self.agree(grows(in_use[-2:], limit)):
                return
        if len(in_use) <= _FEWEST_LEAKING_STEPS or not grows(in_use, limit):
            return
        steps = len(in_use) - 1
        mean = format_size((in_use[-1] - in_use[0]) / steps)
        self.leak = f"the workload leaks: each step leaves about {mean} more in use ({steps} steps in a row)"

    @property
    def caught_oom(self) -> str | None:
        """The OOM that the workload caught itself; None if it caught none, or failed anyway."""
        if self.error is not None:
            return None
        if self.caught:
            return self.caught[0]
        if self.ooms and not self.single:
            return f"{OOM_COUNTED} ({counted(self.ooms, 'time')})"
        return None

    def judged(self) -> tuple[Literal["ok", "oom", "error"], str | None]:
        """Return the outcome, and the error."""
        if self.leak is not None:
            return "error", self.leak
        if self.verdict is not None:
            return "oom", self.error
        if self.error is not None:
            return "error", self.error
        if self.caught_oom is not None:
            return (
                "oom",
                f"caught by the workload, whose step still returned: {self.caught_oom}",
            )
        if self.retries and not self.single:
            return (
                "oom",
                f"passed only after the allocator had emptied its cache {self.retries} times",
            )
        return "ok", None

    @property
    def _later_peaks(self) -> list[int]:
        """The known peaks in bytes of the steps after the warm-up."""
        return [peak for peak in self.peaks[2:] if peak is not None]

    @property
    def has_equal_steps(self) -> bool:
        """Whether several steps took about equal time and memory."""
        if len(self.seconds) < 2:
            return False
        spread = max(self._later_peaks, default=0) - min(self._later_peaks, default=0)
        return (
            _are_equal(self.seconds, _EQUAL_TIMES)
            and spread <= _EQUAL_PEAKS * self.meter.device.limit_bytes
        )

    def trial(self) -> Trial:
        """Return its record. Failures have no times and no peaks, except a single step's peak."""
        outcome, error = self.judged()
        peak_bytes = _highest(self.peaks)
        facts: dict[str, Any] = {"failed_peak_bytes": peak_bytes}
        if outcome == "ok" and not self.seconds:  # another rank failed
            facts = {}
        elif outcome == "ok":
            later = self._later_peaks
            facts = {
                "step_seconds": statistics.median(self.seconds),
                "mean_step_seconds": statistics.fmean(self.seconds),
                "steady_peak_bytes": _highest([self.peaks[0], *later]),
            }
            if len(self.seconds) > 1:
                facts["step_seconds_spread"] = interquartile_range(self.seconds)
            if len(later) > 1:
                facts["peak_spread_bytes"] = max(later) - min(later)
        if outcome == "ok" or self.single:
            facts["peak_bytes"] = peak_bytes
            facts["reserved_bytes"] = _highest(self.reserved)
        return Trial.of(
            self.shape,
            outcome,
            error=error,
            steps=len(self.in_use),
            held_bytes=self.held_bytes,
            rest_bytes=self.meter.in_use(),
            caught=self.caught_oom is not None,
            flushed=outcome == "oom" and self.error is None and self.caught_oom is None,
            alloc_retries=self.retries,
            compilations=self.compilations,
            at_recompile_limit=at_recompile_limit(),
            **self.surroundings,
            **facts,
        )


def grows(in_use: Sequence[int], limit_bytes: int) -> bool:
    """Return whether every step left more bytes in use than the one before, over 5% of the limit in 10,000 steps."""
    if len(in_use) < 2 or any(after <= before for before, after in pairwise(in_use)):
        return False
    mean_growth = (in_use[-1] - in_use[0]) / (len(in_use) - 1)
    return mean_growth * 10_000 > 0.05 * limit_bytes


def enough(seconds: Sequence[float], *, brief: bool = False) -> bool:
    """Return whether these timed steps are enough to know the step time.

    Short steps vary more and are cheap to repeat: run up to 30 of them, for a tenth of a second, or
    for up to three quarters of a second if they are not steady (interquartile range above 5% of the
    median). At least three are run, to show one that is slow by chance, unless the first takes 10
    seconds; in a `brief` trial, one step of a tenth of a second is enough. The model of step times
    averages the remaining scatter over trials.
    """
    total = sum(seconds)
    if len(seconds) < 3:
        return len(seconds) == 1 and total >= (_STEADY_SECONDS if brief else 10.0)
    is_steady = _are_equal(seconds, _STEADY_TIMES)
    wanted_seconds = _STEADY_SECONDS if is_steady else _UNSTEADY_SECONDS
    return len(seconds) >= MOST_TIMED_STEPS or total >= wanted_seconds


def _are_equal(seconds: Sequence[float], within: float) -> bool:
    """Return whether the interquartile range is at most this part of the median."""
    return interquartile_range(seconds) <= within * statistics.median(seconds)


def interquartile_range(values: Sequence[float]) -> float:
    """Return the distance between the quartiles, interpolated linearly (as `numpy.percentile` does)."""
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return third - first


def _highest(values: Sequence[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)
