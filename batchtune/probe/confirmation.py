"""Checks that the batches at the limit also fit one after the other: training never runs only one shape.

An allocator keeps what it freed in blocks that another shape may not fit into. So the shapes run in turns with the
cache kept, in a fresh worker, as training starts: the search's own has just run them among others. The first step of
a fresh worker may need more than later ones with the same batch: the margin covers the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TypeVar

from batchtune.probe.margin import Peaks
from batchtune.probe.protocol import Ran
from batchtune.probe.supervisor import Supervisor
from batchtune.results import Confirmation, Trial
from batchtune.shapes import BatchShape

_EQUAL_PEAKS = 0.001  # of the limit: peaks that differ by less are equal
# Measure the first step of a process with this part of a batch that runs out of memory in it.
_SMALLER = 0.75
_FEWEST_TIMED = 8  # shapes, to compare step times in turns with those repeated: fewer single steps may all be slow

T = TypeVar("T")


def rounds_of(trials: Sequence[Trial], limit_bytes: int) -> int:
    """Return how often each shape runs: once, unless that shows too little.

    Twice if the allocator keeps a cache, which may grow after all have run; three times if peaks of equal batches
    differ: the more are seen, the surer the margin.
    """
    if any((trial.peak_spread_bytes or 0) > _EQUAL_PEAKS * limit_bytes for trial in trials):
        return 3
    return 2 if any(trial.reserved_bytes is not None for trial in trials) else 1


@dataclass(slots=True, kw_only=True)
class Turns:
    """The outcome of the turns."""

    steps: int = 0  # that passed
    alloc_retries: int = 0  # how often the allocator emptied its cache to go on
    reserved_growth_bytes: int | None = None  # of its cache, after each shape had run once; None if it has no cache
    confirmed: set[BatchShape] = field(default_factory=set)  # that passed and never failed
    failures: list[Ran] = field(default_factory=list)  # they take no further turns
    held_bytes: int = 0  # the most that the worker held between steps
    # From each shape's steps that passed, without the first step of a fresh worker.
    peaks: dict[BatchShape, list[int]] = field(default_factory=dict)
    seconds: dict[BatchShape, list[float]] = field(default_factory=dict)
    first_step: tuple[BatchShape, int] | None = None  # of the last fresh worker: its shape and its peak, if it passed
    first_failed: Ran | None = None  # the shape that ran out of memory in such a step; it may fit in later ones
    reserved_first: int = 0  # the largest cache of the current worker while each shape ran once

    def time_ratio(self, trials: Sequence[Trial]) -> float | None:
        """Return the time of steps in turns / that of the same shapes' trials; None for too few shapes.

        It is the median over the steps: so few can't show how many steps are slow, which the trials' means do.
        """
        alone = {trial.shape: trial.step_seconds for trial in trials if trial.step_seconds}
        known = [(seconds, alone[shape]) for shape, seconds in self.seconds.items() if shape in alone]
        if len(known) < _FEWEST_TIMED:
            return None
        ratios = []
        for in_turns, repeated in known:
            ratios += [seconds / repeated for seconds in in_turns]
        return median(ratios)

    def record(self, trials: Sequence[Trial]) -> Confirmation:
        """Return what `probe.json` holds of them; the probe's trials include the failures in turns."""
        return Confirmation(
            shapes=len(self.confirmed),
            steps=self.steps,
            workers=1 if self.steps else 0,
            alloc_retries=self.alloc_retries,
            reserved_growth_bytes=self.reserved_growth_bytes,
            given_up=sum(trial.confirmation for trial in trials),
            time_ratio=self.time_ratio(trials),
        )

    def passed(self, step: Trial, *, again: bool, first: bool) -> None:
        """Record a step that passed: the `first` of the fresh worker, or `again` after an earlier turn of this one."""
        self.steps += 1
        self.confirmed.add(step.shape)
        self.held_bytes = max(self.held_bytes, step.rest_bytes or 0)
        self.alloc_retries += step.alloc_retries or 0
        if step.step_seconds is not None and not first:
            self.seconds.setdefault(step.shape, []).append(step.step_seconds)
        if step.peak_bytes is not None and first:
            self.first_step = step.shape, step.peak_bytes
        elif step.peak_bytes is not None:
            self.peaks.setdefault(step.shape, []).append(step.peak_bytes)
        if step.reserved_bytes is not None and not again:
            self.reserved_first = max(self.reserved_first, step.reserved_bytes)
        elif step.reserved_bytes is not None:
            growth = step.reserved_bytes - self.reserved_first
            self.reserved_growth_bytes = max(0, growth, self.reserved_growth_bytes or 0)


def confirm(
    stepper: Supervisor, shapes: Sequence[BatchShape], rounds: int, on_step: Callable[[BatchShape], bool]
) -> Turns:
    """Run the shapes in turns in a fresh worker, and find all that fail.

    A shape fails if it runs out of memory, or crashes or hangs twice. It passes, with a count, if the allocator has to
    empty its cache: it fits, at the cost of time. `on_step` is called before each step; if it returns False, no more
    shapes are run. Raises as `Supervisor.start`.
    """
    turns = Turns()
    faults: set[BatchShape] = set()
    while _run_worker(stepper, list(shapes) * rounds, on_step, turns, faults):  # it died, so all run again
        pass
    turns.confirmed -= {failed.trial.shape for failed in turns.failures}
    return turns


def _run_worker(
    stepper: Supervisor,
    shapes: Sequence[BatchShape],
    on_step: Callable[[BatchShape], bool],
    turns: Turns,
    faults: set[BatchShape],
) -> bool:
    """Run the turns in a fresh worker; return whether it died. `faults` are the shapes that killed one before."""
    turns.reserved_first = 0
    stepper.start()
    started: set[BatchShape] = set()
    for number, shape in enumerate(shapes):
        if any(failed.trial.shape == shape for failed in turns.failures):
            continue
        if not on_step(shape):
            break
        worker_before = stepper.worker
        ran = stepper.step(shape)
        # An OOM may have cost the worker before, so that a new one ran this step.
        first_of_process = number == 0 or stepper.worker != worker_before
        outcome = ran.trial.outcome
        if outcome in ("crash", "timeout") and shape not in faults:
            faults.add(shape)
            return True
        if outcome == "ok":
            turns.passed(ran.trial, again=shape in started, first=first_of_process)
        elif first_of_process and outcome == "oom":
            turns.first_failed = ran
        else:
            turns.failures.append(ran)
        started.add(shape)
        if outcome == "error":  # the workload's own, which ends the probe
            break
    return False


def error_in_turns(step: Trial) -> str:
    """Describe a failure in turns in a few words."""
    return f"in turns with the other shapes: {step.error or step.outcome}"


def alternating(shapes: list[T]) -> list[T]:
    """Alternate large and small shapes, given in order of size: this fragments an allocator's cache most."""
    alternated = []
    for small, large in zip(shapes, reversed(shapes), strict=True):
        alternated += [small, large]
    return alternated[: len(shapes)]


def lifted_by(turns: Turns, peaks: Peaks) -> int:
    """Return by how much more a process may hold between steps than that of the turns did."""
    if peaks.rest_bytes is None or not turns.held_bytes:
        return 0
    return peaks.rest_bytes - turns.held_bytes


def first_step_bytes(stepper: Supervisor, turns: Turns, peaks: Peaks, limit_bytes: int) -> int:
    """Return by how much the first step of the fresh worker exceeded later ones of the same shape.

    If it ran out of memory, smaller batches show it in fresh workers. Raises as `Supervisor.start`.
    """
    if turns.first_step is not None:
        shape, first_peak = turns.first_step
        lifted = lifted_by(turns, peaks)
        later = [peak + lifted for peak in turns.peaks.get(shape, ())]
        highest = max(peaks.highest(shape) or 0, *later, 0)
        if not highest:
            return 0
        return max(0, first_peak + lifted - highest)
    if turns.first_failed is None:
        return 0
    shape = turns.first_failed.trial.shape
    known_peak = peaks.highest(shape)
    if known_peak is None:
        return 0
    excess = None
    size = shape.batch_size
    while excess is None and size > 1:
        size = int(size * _SMALLER)
        excess = _first_step_excess(stepper, replace(shape, batch_size=size))
    return max(limit_bytes - known_peak, excess or 0)


def _first_step_excess(stepper: Supervisor, shape: BatchShape) -> int | None:
    """Return how many bytes a fresh worker's first step needs beyond the second of the same batch; None: unknown."""
    stepper.start()
    steps = [stepper.step(shape).trial for _ in range(2)]
    peaks = [step.peak_bytes for step in steps if step.outcome == "ok" and step.peak_bytes is not None]
    if len(peaks) < 2:
        return None
    return max(0, peaks[0] - peaks[1])
