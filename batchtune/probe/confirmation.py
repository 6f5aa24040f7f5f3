"""Checks that the batches at the limit also fit one after the other: training never runs only one shape.

An allocator keeps what it freed in blocks that another shape may not fit into. So the shapes run in turns with the
cache kept, first in the search's last worker, then in a fresh one, as training starts. The first step of a fresh worker
may need more than later ones with the same batch: the margin covers the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TypeVar

from batchtune.probe.protocol import Ran
from batchtune.probe.supervisor import Supervisor
from batchtune.results import Trial
from batchtune.shapes import BatchShape

ROUNDS = (2, 1)  # of turns in the search's worker, and in the fresh one
_FEWEST_TIMED = 3  # shapes, to compare step times in turns with those repeated

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Turns:
    """The outcome of the turns."""

    steps: int = 0  # that passed
    alloc_retries: int = 0  # how often the allocator emptied its cache to go on
    reserved_growth_bytes: int | None = None  # of its cache, after each shape had run once; None if it has no cache
    failures: list[Ran] = field(default_factory=list)  # they take no further turns, and no fresh worker starts
    # From each shape's steps that passed, without the first step of a fresh worker.
    peaks: dict[BatchShape, list[int]] = field(default_factory=dict)
    seconds: dict[BatchShape, list[float]] = field(default_factory=dict)
    first_step: tuple[BatchShape, int] | None = None  # of the last fresh worker: its shape and its peak, if it passed
    first_failed: Ran | None = None  # the shape that ran out of memory in such a step; it may fit in later ones
    reserved_first: int = 0  # the largest cache of the current worker while each shape ran once

    def time_ratio(self, trials: Sequence[Trial]) -> float | None:
        """Return the time of steps in turns / that of the same shapes' trials; None for too few shapes."""
        alone = {trial.shape: trial.mean_step_seconds for trial in trials if trial.mean_step_seconds}
        both = [(fmean(seconds), alone[shape]) for shape, seconds in self.seconds.items() if shape in alone]
        if len(both) < _FEWEST_TIMED:
            return None
        return sum(in_turns for in_turns, _ in both) / sum(repeated for _, repeated in both)

    def passed(self, step: Trial, *, again: bool, first: bool) -> None:
        """Record a step that passed: the `first` of the fresh worker, or `again` after an earlier turn of this one."""
        self.steps += 1
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


def confirm(stepper: Supervisor, shapes: Sequence[BatchShape], on_step: Callable[[BatchShape], None]) -> Turns:
    """Run the shapes in turns, and find all that fail in the first worker, or if none does, in the fresh one.

    A shape fails if it runs out of memory, or crashes or hangs twice. It passes, with a count, if the allocator has to
    empty its cache: it fits, at the cost of time. `on_step` is called before each step. Raises as `Supervisor.start`.
    """
    turns = Turns()
    faults: set[BatchShape] = set()

    def run_worker(rounds: int, *, fresh: bool) -> bool:
        """Run one worker's turns; return whether it died, so that they must be run again."""
        turns.reserved_first = 0
        if fresh:
            stepper.start()
        for number in range(rounds * len(shapes)):
            shape, first = shapes[number % len(shapes)], number == 0
            if any(failed.trial.shape == shape for failed in turns.failures):
                continue
            on_step(shape)
            worker_before = stepper.worker
            ran = stepper.step(shape, release=first and not fresh)
            # An OOM may have cost the worker before, so that a new one ran this step.
            first_of_process = (first and fresh) or stepper.worker != worker_before
            outcome = ran.trial.outcome
            if outcome in ("crash", "timeout") and shape not in faults:
                faults.add(shape)
                return True
            if outcome == "ok":
                turns.passed(ran.trial, again=number >= len(shapes), first=first_of_process)
            elif first_of_process and outcome == "oom":
                turns.first_failed = ran
                if fresh:
                    break
            else:
                turns.failures.append(ran)
            if outcome == "error":  # the workload's own, which ends the probe
                break
        return False

    for worker, rounds in enumerate(ROUNDS):
        while run_worker(rounds, fresh=worker > 0):
            pass
        if turns.failures:
            break
    return turns


def error_in_turns(step: Trial) -> str:
    """Describe a failure in turns in a few words."""
    return f"in turns with the other shapes: {step.error or step.outcome}"


def alternating(shapes: list[T]) -> list[T]:
    """Alternate large and small shapes, given in order of size: this fragments an allocator's cache most."""
    return [shape for pair in zip(shapes, reversed(shapes), strict=True) for shape in pair][: len(shapes)]


def first_step_excess(stepper: Supervisor, shape: BatchShape) -> int | None:
    """Return how many bytes a fresh worker's first step needs beyond the second of the same batch; None: unknown."""
    stepper.start()
    steps = [stepper.step(shape).trial for _ in range(2)]
    peaks = [step.peak_bytes for step in steps if step.outcome == "ok" and step.peak_bytes is not None]
    return max(0, peaks[0] - peaks[1]) if len(peaks) == 2 else None
