"""Which batch shape to try next: a pure function of the trials so far.

The search has no state of its own. Given the same trials it proposes the same shape, so that a search that was
interrupted goes on from its journal, and a made device tests it without torch.

For each of a set of lengths it brackets the largest batch size that fits between one that passed and one that
failed (or what the data can fill). Where to try next is told by a model of the peak memory fitted to all trials,
set right by what was measured at this very length and its neighbours; where that does not close in, bisection does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from batchtune.lengths import Lengths
from batchtune.probe.evidence import Evidence, PeakFit, SearchSettings
from batchtune.probe.guess import next_batch_size
from batchtune.probe.ladder import Ladder
from batchtune.results import CostModel, FrontierPoint, Trial
from batchtune.shapes import BatchShape

__all__ = ["FrontierSearch", "NothingFits", "Proposal", "SearchSettings", "SingleFails", "TooLong"]


@dataclass(frozen=True, slots=True)
class Proposal:
    """What to try next.

    Attributes:
        shape: The batch shape.
        fresh: Whether to try it in a new worker: its failure there would be believed.
    """

    shape: BatchShape
    fresh: bool = False


class NothingFits(Exception):
    """Even one example of the shortest length does not fit; carries the trial that showed it."""

    def __init__(self, trial: Trial) -> None:
        super().__init__(trial.error or trial.outcome)
        self.trial = trial


class TooLong(Exception):
    """The longest examples do not fit; carries the longest length that does, and how many are longer."""

    def __init__(self, fitting_length: float, too_long: int, trial: Trial) -> None:
        super().__init__(trial.error or trial.outcome)
        self.fitting_length = fitting_length
        self.too_long = too_long
        self.trial = trial


class SingleFails(Exception):
    """One example alone made the worker crash or hang, twice; carries the last trial that showed it."""

    def __init__(self, trial: Trial) -> None:
        super().__init__(trial.error or trial.outcome)
        self.trial = trial


class FrontierSearch:
    """Finds, for lengths that span the data, the largest batch size that fits.

    Args:
        lengths: The data set.
        settings: How to search.
        fit: Fits the model of peak memory.
    """

    def __init__(self, lengths: Lengths, settings: SearchSettings, fit: PeakFit) -> None:
        self._lengths = lengths
        self._histogram = lengths.histogram
        self._settings = settings
        self._fit = fit

    def propose(self, trials: Sequence[Trial]) -> Proposal | None:
        """What to try next, or None where all is known.

        Raises:
            NothingFits: Not one example of the shortest length fits.
            TooLong: Not one example of the longest length fits.
            SingleFails: One example alone fails with something that is no lack of memory.
        """
        evidence = self._evidence(trials)
        longest = self._lengths.longest
        if (alone := evidence.failure(1, longest)) is not None:
            return self._longest_that_fits(evidence, alone)
        for length in self._order(evidence):
            if (retry := evidence.to_retry(length)) is not None:
                return self._proposal(retry, length, fresh=True)
            if (batch_size := next_batch_size(evidence, self._ladder, length)) is not None:
                return self._proposal(batch_size, length)
        return None

    def frontier(self, trials: Sequence[Trial]) -> list[FrontierPoint]:
        """The lengths that are closed, in ascending order."""
        evidence = self._evidence(trials)
        points = []
        for length in sorted(self._order(evidence)):
            bracket = evidence.bracket(length)
            closed_by = evidence.closed_by(bracket)
            if closed_by is None or bracket.passed == 0:
                continue
            points.append(
                FrontierPoint(
                    length=length,
                    target_length=bracket.target_length,
                    batch_size=bracket.passed,
                    closed_by=closed_by,
                    oom_batch_size=bracket.failed if bracket.failed_by == "oom" else None,
                    step_seconds=evidence.median_seconds(bracket.passed, length),
                    peak_bytes=evidence.highest_peak(bracket.passed, length),
                )
            )
        return points

    def peak_model(self, trials: Sequence[Trial]) -> CostModel | None:
        """The model of peak memory that the trials give; None where there are too few."""
        return self._evidence(trials).model

    def not_monotone(self, trials: Sequence[Trial]) -> list[BatchShape]:
        """Shapes that ran out of memory twice, the second time in a fresh worker, though larger ones passed."""
        evidence = self._evidence(trials)
        shapes = {
            (trial.batch_size, trial.length): trial
            for trial in trials
            if trial.outcome == "oom" and not trial.confirmation
        }
        return [
            BatchShape(size, length, trial.target_length)
            for (size, length), trial in sorted(shapes.items())
            if evidence.failure(size, length) is not None and evidence.is_dominated(size, length)
        ]

    def progress(self, trials: Sequence[Trial]) -> tuple[int, int]:
        """How many lengths are closed, and how many there are in all, as far as is known."""
        evidence = self._evidence(trials)
        order = self._order(evidence)
        closed = sum(evidence.closed_by(evidence.bracket(length)) is not None for length in order)
        return closed, max(len(order), min(self._settings.num_lengths, self._histogram.lengths.size))

    def _evidence(self, trials: Sequence[Trial]) -> Evidence:
        return Evidence(self._lengths, self._settings, trials, self._fit)

    @cached_property
    def _ladder(self) -> Ladder:
        top = min(self._lengths.count, self._settings.max_batch_size or self._lengths.count)
        return Ladder(self._settings.tolerance, top)

    def _proposal(self, batch_size: int, length: float, *, fresh: bool = False) -> Proposal:
        return Proposal(BatchShape(batch_size, length, self._lengths.worst_target(length)), fresh)

    def _longest_that_fits(self, evidence: Evidence, alone: Trial) -> Proposal:
        """Bisects over the distinct lengths, one example at a time, for the longest that fits."""
        if alone.outcome != "oom":
            raise SingleFails(alone)
        distinct = self._histogram.lengths
        passed, failed = -1, distinct.size - 1
        while failed - passed > 1:
            # The shortest first: where even that fails, no other needs a try.
            middle = 0 if passed < 0 and evidence.tried(1, float(distinct[0])) == 0 else (passed + failed) // 2
            length = float(distinct[middle])
            if (retry := evidence.to_retry(length)) is not None:
                return self._proposal(retry, length, fresh=True)
            if (trial := evidence.failure(1, length)) is not None:
                if trial.outcome != "oom":
                    raise SingleFails(trial)
                if middle == 0:
                    raise NothingFits(trial)
                failed, alone = middle, trial
            elif evidence.passes(1, length):
                passed = middle
            else:
                return self._proposal(1, length)
        if passed < 0:
            raise NothingFits(alone)
        fitting = float(distinct[passed])
        raise TooLong(fitting, self._lengths.count - self._histogram.count_up_to(fitting), alone)

    # Which lengths

    def _order(self, evidence: Evidence) -> list[float]:
        """The lengths in the order in which they are probed: the longest, the shortest, then from the longer down.

        The longest comes first, for what it tells: how much fits at all. The others are chosen after it, so until
        its limit is known there is only it. Where a batch between the measured lengths was given up, its length is
        probed too.
        """
        longest, shortest = self._lengths.longest, self._lengths.shortest
        if longest == shortest:
            return [longest]
        cap = evidence.cap(longest)
        chosen_from = _first_failure(evidence.trials, longest) or (cap if evidence.passes(cap, longest) else None)
        if chosen_from is None:
            return [longest]
        between = {
            *self._lengths_between(chosen_from),
            *(trial.length for trial in evidence.trials if trial.confirmation),
        }
        return [longest, shortest, *sorted(between - {longest, shortest}, reverse=True)]

    def _lengths_between(self, longest_batch_size: int) -> list[float]:
        """Lengths to probe between the shortest and the longest, all of them lengths of the data.

        They are spread half by the logarithm of the length, half by where the data's total length lies. The lowest is
        where the data can just fill what memory allows: below, no batch can reach the limit.

        Args:
            longest_batch_size: About how many of the longest examples fit.
        """
        histogram = self._histogram
        lengths = histogram.lengths
        wanted = min(self._settings.num_lengths, lengths.size) - 2
        if wanted < 1:
            return []
        capacity = longest_batch_size * lengths[-1]
        filled = np.flatnonzero(histogram.cumulative * lengths >= capacity)
        first = min(max(1, int(filled[0]) if filled.size else 1), lengths.size - 1 - wanted)
        inner = slice(first, None)
        logs = np.log(lengths[inner] / lengths[first]) / np.log(lengths[-1] / lengths[first])
        totals = histogram.cumulative_total[inner] - histogram.cumulative_total[first]
        position = (logs + totals / totals[-1]) / 2
        marks = np.linspace(0, 1, wanted + 1)[:-1]
        indices = first + np.searchsorted(position, marks, side="left")
        # Marks may fall on the same length where the data have few: move the later ones up to the next free length,
        # but never so far that the ones behind have no place.
        chosen: list[int] = []
        for number, index in enumerate(indices):
            room = lengths.size - 1 - (wanted - number)
            chosen.append(min(max(int(index), chosen[-1] + 1 if chosen else first), room))
        return [float(lengths[index]) for index in chosen]


def _first_failure(trials: Sequence[Trial], longest: float) -> int | None:
    """The batch size at the longest length that the other lengths are chosen from.

    It must never change once they are, so it is the first that failed there, whatever is learnt later.
    """
    faults: set[int] = set()
    for trial in trials:
        if trial.length != longest or trial.outcome in ("ok", "error") or trial.confirmation:
            continue
        if trial.outcome == "oom" or trial.batch_size in faults:
            return trial.batch_size
        faults.add(trial.batch_size)
    return None
