"""The margin: the memory that a proven batch leaves free, because equal batches do not always take the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from statistics import median

from batchtune.probe.bounds import Task
from batchtune.results import Margin, Trial
from batchtune.shapes import BatchShape

# The margin: this multiple of the widest spread seen, plus this fraction of the limit.
_SPREADS = 1.1
_LEAST_MARGIN = 0.001


class Peaks:
    """The peaks of all trials, each as in the process that holds the most between trials, and the margin they ask for.

    `trials_of` are the trials of each shape, without those that ended with the workload's own error.
    """

    def __init__(self, task: Task, trials: Sequence[Trial], trials_of: Mapping[BatchShape, Sequence[Trial]]) -> None:
        self._task = task
        self._trials = trials
        self._trials_of = trials_of
        self._first_of_worker: set[int] = set()
        worker: int | None = None
        for trial in trials:
            if trial.worker is not None and trial.worker != worker and not trial.confirmation:
                worker = trial.worker
                self._first_of_worker.add(trial.index)

    def leaves_margin(self, shape: BatchShape) -> bool:
        """Return whether a shape that passed leaves the margin free.

        One that passed as the first of its process needs no room for that beyond its own.
        """
        lowest = min(self._of(shape), default=None)
        if lowest is None:
            return True
        room = self._task.limit_bytes - lowest
        if room >= self.margin.bytes:
            return True
        return room >= self._steady_margin_bytes and any(
            trial.outcome == "ok" and trial.index in self._first_of_worker for trial in self._trials_of[shape]
        )

    @cached_property
    def margin(self) -> Margin:
        """The memory that a proven batch leaves free."""
        spread = max(self._task.spread_bytes, 0)
        repetitions = 0
        for shape, trials in self._trials_of.items():
            peaks = self._of(shape)
            if peaks and (len(trials) > 1 or any(trial.peak_spread_bytes is not None for trial in trials)):
                spread = max(spread, max(peaks) - min(peaks))
                repetitions += sum(max(1, trial.steps - 1) for trial in trials if trial.peak_bytes is not None)
        for worker, rests in self._rests.items():
            spread = max(spread, max(rests) - self._held[worker])
        return Margin(
            bytes=self._margin_bytes(max(_SPREADS * spread, self._task.first_step_bytes)),
            spread_bytes=spread,
            first_step_bytes=self._task.first_step_bytes,
            repetitions=repetitions,
        )

    @cached_property
    def _steady_margin_bytes(self) -> int:
        """The margin without what the first step of a process needs."""
        return self._margin_bytes(_SPREADS * self.margin.spread_bytes)

    def _margin_bytes(self, spread: float) -> int:
        if not self.are_known:
            return 0
        return int(spread + _LEAST_MARGIN * self._task.limit_bytes)

    @cached_property
    def are_known(self) -> bool:
        """Whether peaks can be measured here; True before anything has passed."""
        passed = [shape for shape, trials in self._trials_of.items() if any(trial.outcome == "ok" for trial in trials)]
        return not passed or any(self.highest(shape) is not None for shape in passed)

    def highest(self, shape: BatchShape) -> int | None:
        """Return the highest peak measured for a shape; None if unknown."""
        return max(self._of(shape), default=None)

    @cached_property
    def highest_of_all(self) -> int:
        """The highest peak of all shapes; 0 if none is known."""
        return max((self.highest(shape) or 0 for shape in self._trials_of), default=0)

    def range(self, shape: BatchShape, others: Sequence[int] = ()) -> int:
        """Return how far the peaks of a shape's trials, and these others, differ."""
        peaks = [*self._of(shape), *others]
        if not peaks:
            return 0
        return max(peaks) - min(peaks)

    @cached_property
    def rest_bytes(self) -> int | None:
        """In use between trials (parameters, optimizer state) in the process that holds the most; None if unknown."""
        if not self._held:
            return None
        return max(*self._held.values(), self._task.held_bytes)

    def _of(self, shape: BatchShape) -> list[int]:
        """Return the highest and lowest peak of each trial, without what a process's first step adds.

        Some processes hold more between steps than others, whatever they run, and more after a while: all peaks are as
        in the one that holds the most.
        """
        peaks = []
        for trial in self._trials_of.get(shape, ()):
            peak = trial.peak_bytes
            if peak is None:
                continue
            if trial.steady_peak_bytes is not None and trial.index in self._first_of_worker:
                peak = trial.steady_peak_bytes
            if trial.rest_bytes is not None:
                peak += (self.rest_bytes or 0) - trial.rest_bytes
            peaks += [peak, peak - (trial.peak_spread_bytes or 0)]
        return peaks

    @cached_property
    def _rests(self) -> dict[int | None, list[int]]:
        """Each worker's bytes in use after its trials that passed; without the first, if others did."""
        rests: dict[int | None, list[int]] = defaultdict(list)
        firsts = {}
        for trial in self._trials:
            if trial.outcome != "ok" or trial.rest_bytes is None:
                continue
            if trial.index in self._first_of_worker:
                firsts[trial.worker] = [trial.rest_bytes]
            else:
                rests[trial.worker].append(trial.rest_bytes)
        return firsts | rests

    @cached_property
    def _held(self) -> dict[int | None, int]:
        """What each worker holds between trials."""
        return {worker: int(median(rests)) for worker, rests in self._rests.items()}
