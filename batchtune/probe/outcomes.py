"""Decides from all trials of a shape whether it passed or failed.

A crash, or an out-of-memory error below a size that passed, needs a second trial.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from batchtune.probe.bounds import is_covered
from batchtune.probe.margin import Peaks
from batchtune.results import BatchShape, Trial


class Tried(NamedTuple):
    """What the trials of a row of shapes showed: of the batch sizes at a length, or of the tokens of a composition.

    Attributes:
        failures: Size → the trial that rules it out.
        failed: The smallest of them.
        ran: The sizes that ran at all, below any that failed, ascending.
        passed: The largest of these that is proven, or 0.
        over_margin: The smallest above that one, which ran but leaves no margin.
        peaks: (size, peak bytes) of those that ran.
        given_up: How many passed alone, and then failed in turns.
    """

    failures: dict[int, Trial]
    failed: int | None
    ran: list[int]
    passed: int
    over_margin: int | None
    peaks: tuple[tuple[int, float], ...]
    given_up: int


class Outcomes:
    """The outcome of each shape; memory is assumed to grow from a shape to one that contains it.

    A failure that contradicts this wins: it rules out every shape at least as large, whatever passed there.
    """

    def __init__(self, trials: Sequence[Trial], peaks: Peaks) -> None:
        self.trials = trials
        self.peaks = peaks
        self.of_shape: dict[BatchShape, list[Trial]] = defaultdict(list)
        self.passed: set[BatchShape] = set()
        for trial in trials:
            if trial.outcome != "error":  # the workload's own, fixed since
                self.of_shape[trial.shape].append(trial)
            if trial.outcome == "ok":
                self.passed.add(trial.shape)

    @cached_property
    def failures(self) -> dict[BatchShape, Trial]:
        """The trial that rules out each shape that failed."""
        failures = {}
        for shape in self.of_shape:
            failure = self._failure(shape)
            if failure is not None:
                failures[shape] = failure
        return failures

    def passed_trial(self, shape: BatchShape) -> Trial:
        """Return the first trial of a shape that passed."""
        return next(trial for trial in self.of_shape[shape] if trial.outcome == "ok")

    def median_seconds(self, shape: BatchShape) -> float | None:
        """Return the median step time of a shape; None if unknown."""
        times = [
            trial.step_seconds
            for trial in self.of_shape.get(shape, ())
            if trial.step_seconds is not None
        ]
        if not times:
            return None
        return float(np.median(times))

    def is_dominated(self, shape: BatchShape) -> bool:
        """Return whether a shape that contains this one passed."""
        return any(other.contains(shape) for other in self.passed)

    def is_proven(self, shape: BatchShape) -> bool:
        """Return whether it passed, never failed, and leaves the margin free."""
        if shape not in self.passed or shape in self.failures:
            return False
        return self.peaks.leaves_margin(shape)

    def proof(self, wanted: BatchShape) -> int | None:
        """Return the index of the trial that proves a shape: of the smallest proven one that covers it."""
        proofs = [
            (shape.padded_length, self.passed_trial(shape).index)
            for shape in self.of_shape
            if is_covered(wanted, [shape]) and self.is_proven(shape)
        ]
        _, index = min(proofs, default=(0.0, None))
        return index

    def _failure(self, shape: BatchShape) -> Trial | None:
        """Return the trial that rules a shape out: an OOM (two if a larger shape passed), a second crash or time-out.

        A failure while shapes took turns rules a shape out at once.
        """
        trials = self.of_shape[shape]
        ooms = [trial for trial in trials if trial.outcome == "oom"]
        faults = [trial for trial in trials if trial.outcome not in ("ok", "oom")]
        for trial in trials:
            if trial.outcome != "ok" and trial.confirmation:
                return trial
        if ooms and not self.is_dominated(shape):
            return ooms[0]
        # An allocator that empties its cache for one shape and not for a larger one has left gaps by chance.
        ooms = [trial for trial in ooms if not trial.flushed]
        if len(ooms) > 1:
            return ooms[0]
        if len(faults) > 1:
            return faults[-1]
        return None

    def tried(
        self, shapes: Mapping[int, BatchShape], *, beyond: int | None = None
    ) -> Tried:
        """Return what the trials of these shapes showed, given by size, ascending.

        Where none has failed, the size `beyond` is taken to have.
        """
        failures = {
            size: self.failures[shape]
            for size, shape in shapes.items()
            if shape in self.failures
        }
        failed = min(failures, default=beyond)
        ran = [
            size
            for size, shape in shapes.items()
            if shape in self.passed and (failed is None or size < failed)
        ]
        proven = [size for size in ran if self.is_proven(shapes[size])]
        passed = max(proven, default=0)
        peaks = [(size, self.peaks.highest(shapes[size])) for size in ran]
        return Tried(
            failures=failures,
            failed=failed,
            ran=ran,
            passed=passed,
            over_margin=min((size for size in ran if size > passed), default=None),
            peaks=tuple(
                (size, float(peak)) for size, peak in peaks if peak is not None
            ),
            given_up=sum(trial.confirmation for trial in failures.values()),
        )

    def needs_retry(self, shape: BatchShape) -> bool:
        """Return whether a shape must be tried again in a fresh worker before its failure is believed.

        Its only trial crashed, timed out, or ran out of memory though a larger shape passed.
        """
        trials = self.of_shape.get(shape, ())
        if len(trials) != 1:
            return False
        trial = trials[0]
        if trial.confirmation or trial.flushed or trial.outcome == "ok":
            return False
        return trial.outcome != "oom" or self.is_dominated(shape)
