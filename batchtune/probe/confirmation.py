"""Checks that the batches at the limit also fit one after the other: training never runs only one shape.

An allocator keeps what it freed in blocks that another shape may not fit into. So the shapes run in turns with the
cache kept, in a fresh worker, as training starts: the search's own has just run them among others. The first step of
a fresh worker may need more than later ones with the same batch: the margin covers the difference.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

from batchtune.probe.requests import Measurer, Ran
from batchtune.results import BatchShape, Confirmation, FrontierPoint, Trial

_EQUAL_PEAKS = 0.001  # of the limit: peaks that differ by less are equal
_FEWEST_TIMED = 8  # shapes, to compare step times in turns with those repeated: fewer single steps may all be slow

T = TypeVar("T")


def rounds_of(trials: Sequence[Trial], limit_bytes: int) -> int:
    """Return how often each shape runs: once, unless that shows too little.

    Twice if the allocator keeps a cache, which may grow after all have run; three times if peaks of
    equal batches differ: more peaks make the margin more certain.
    """
    if any(
        (trial.peak_spread_bytes or 0) > _EQUAL_PEAKS * limit_bytes for trial in trials
    ):
        return 3
    if any(trial.reserved_bytes is not None for trial in trials):
        return 2
    return 1


@dataclass(slots=True, kw_only=True)
class Turns:
    """The outcome of the turns.

    Attributes:
        steps: Those that passed, in order; and the first step of a worker even if it ran out of memory: its shape may
            fit in later ones.
        failures: Of shapes, which take no further turns.
        cut_short: Whether the last failure ended the turns of all.
    """

    steps: list[Trial] = field(default_factory=list)
    failures: list[Ran] = field(default_factory=list)
    cut_short: bool = False

    @property
    def passed(self) -> list[Trial]:
        """The steps that passed."""
        return [step for step in self.steps if step.outcome == "ok"]

    @property
    def confirmed(self) -> set[BatchShape]:
        """The shapes that passed and never failed."""
        return {step.shape for step in self.passed} - self.failed

    @property
    def failed(self) -> set[BatchShape]:
        """The shapes that failed."""
        return {failure.trial.shape for failure in self.failures}

    def record(self, trials: Sequence[Trial]) -> Confirmation:
        """Return what `probe.json` holds of them; the probe's trials include the failures in turns."""
        return Confirmation(
            shapes=len(self.confirmed),
            steps=len(self.passed),
            workers=len({step.worker for step in self.passed}),
            alloc_retries=self.alloc_retries,
            reserved_growth_bytes=self._reserved_growth_bytes(),
            given_up=sum(trial.confirmation for trial in trials),
            time_ratio=self._time_ratio(trials),
        )

    @property
    def alloc_retries(self) -> int:
        """How often the allocator emptied its cache to go on."""
        return sum(step.alloc_retries or 0 for step in self.passed)

    def _reserved_growth_bytes(self) -> int | None:
        """Return the growth of the last worker's cache after each shape had run once; None if it has no cache."""
        started: set[BatchShape] = set()
        first = 0
        growth = None
        for step in self.passed:
            if step.worker != self.passed[-1].worker or step.reserved_bytes is None:
                continue
            if step.shape in started:
                growth = max(growth or 0, step.reserved_bytes - first)
            else:
                first = max(first, step.reserved_bytes)
            started.add(step.shape)
        return growth

    def _time_ratio(self, trials: Sequence[Trial]) -> float | None:
        """Return the time of steps in turns / that of the same shapes' trials; None for too few shapes.

        It is the median over the steps: so few can't show how many steps are slow, which the trials' means do.
        """
        alone = {
            trial.shape: trial.step_seconds for trial in trials if trial.step_seconds
        }
        ratios = []
        timed = set()
        workers = set()
        for step in self.passed:
            seconds = alone.get(step.shape)
            if (
                step.step_seconds is not None
                and seconds is not None
                and step.worker in workers
            ):
                ratios.append(step.step_seconds / seconds)
                timed.add(step.shape)
            workers.add(step.worker)  # its first step takes longer
        if len(timed) < _FEWEST_TIMED:
            return None
        return median(ratios)


def confirm(
    stepper: Measurer,
    shapes: Sequence[BatchShape],
    on_step: Callable[[BatchShape], bool],
    ends_all: Callable[[Trial], bool] = lambda failed: False,
    batches_per_step: int = 1,
) -> Turns:
    """Run the shapes in turns in a fresh worker, and find all that fail.

    The first failure for which `ends_all` is true stops this. So does the workload's own error, which ends the probe.
    A shape fails if it runs out of memory, or crashes or hangs twice. It passes, with a count, if the allocator has to
    empty its cache: it fits, at the cost of time. `on_step` is called before each; if it returns False, no more shapes
    are run. An optimizer step takes as many of them as it takes batches. Raises as `Measurer.start`.
    """
    turns = Turns()
    faults: set[BatchShape] = set()  # that killed a worker
    stepper.start()
    worker = None
    left = list(shapes)
    while left:
        # The first step shows what a process needs beyond others. Which of several has killed it, only one alone shows.
        is_alone = stepper.worker != worker or bool(faults)
        step = left[: 1 if is_alone else batches_per_step]
        if not all(map(on_step, step)):
            break
        ran = stepper.step(step[0], step[1:])
        outcome = ran.trial.outcome
        if outcome in ("crash", "timeout") and ran.trial.shape not in faults:
            # For the first time: it and all others run again.
            faults.add(ran.trial.shape)
            stepper.start()
            worker = None
            left = list(shapes)
            continue
        left = left[len(step) :]
        is_first = stepper.worker != worker  # an OOM may have cost the worker before
        worker = stepper.worker
        if outcome == "ok":
            turns.steps += ran.trial.of_each(step)
            continue
        turns.cut_short = outcome == "error" or ends_all(ran.trial)
        if is_first and outcome == "oom" and not turns.cut_short:
            turns.steps.append(ran.trial)
        else:
            turns.failures.append(ran)
        if turns.cut_short:
            break
        others = [shape for shape in step if shape != ran.trial.shape]
        left = [shape for shape in [*others, *left] if shape not in turns.failed]
    return turns


def error_in_turns(step: Trial) -> str:
    """Describe a failure in turns in a few words."""
    return f"interleaved with the other shapes: {step.error or step.outcome}"


def in_steps(batches: Iterable[T], batches_per_step: int) -> Iterator[list[T]]:
    """Yield the batches of each optimizer step; too few for the last one are repeated."""
    remaining = iter(batches)
    while step := list(itertools.islice(remaining, batches_per_step)):
        yield list(itertools.islice(itertools.cycle(step), batches_per_step))


def in_turns(points: Sequence[FrontierPoint]) -> list[BatchShape]:
    """Return the points' batches that no other one contains, large and small ones in turns."""
    shapes = {point.shape for point in points}
    largest = [
        shape for shape in shapes if not any(other.contains(shape) for other in shapes)
    ]
    return alternating(
        sorted(largest, key=lambda shape: (-shape.padded_length, str(shape)))
    )


def alternating(shapes: list[T]) -> list[T]:
    """Alternate large and small shapes, given in order of size: this fragments an allocator's cache most."""
    alternated = []
    for small, large in zip(shapes, reversed(shapes), strict=True):
        alternated += [small, large]
    return alternated[: len(shapes)]
