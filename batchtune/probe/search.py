"""Which batch shape to try next: a pure function of the trials so far.

The search has no state of its own. Given the same trials it proposes the same shape, so that a search that was
interrupted goes on from its journal, and a made device tests it without torch.

For each of a set of lengths it brackets the largest batch size that fits between one that passed and one that
failed (or what the data can fill). Where to try next is told by a model of the peak memory fitted to all trials,
anchored in what was measured at this very length; where that does not close in fast enough, bisection takes over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np

from batchtune.lengths import Lengths
from batchtune.results import ClosedBy, CostModel, FrontierPoint, Trial
from batchtune.shapes import BatchShape

PeakFit = Callable[[Sequence[float], Sequence[float], Sequence[float]], CostModel | None]
"""(batch sizes, lengths, peaks) → the fitted model, or None where there are too few."""

# A growth beyond this factor is not extrapolated while the batch has used too little of the memory for its slope
# to be known: allocators round, and the peak of a small batch is mostly constant.
_GROWTH = 8
_KNOWN_SHARE = 0.1
# So many trials at one length may follow the model, and so many of them fail; where that has not closed the length,
# the model does not hold there and bisection takes over.
_GUIDED_TRIALS = 10
_GUIDED_FAILURES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    """How to search.

    Attributes:
        num_lengths: How many lengths to probe, the shortest and the longest among them.
        tolerance: How far below the true limit a batch size may be, as a share of it; one example at least.
        max_batch_size: Never try more examples; None: what the data can fill.
        limit_bytes: Memory limit that is enforced on the device.
    """

    num_lengths: int
    tolerance: float
    max_batch_size: int | None
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class Bracket:
    """What is known at one length.

    Attributes:
        cap: Largest batch size worth trying.
        passed: Largest batch size that passed, below any that failed; 0 if none did.
        failed: Smallest that failed, or None.
        failed_by: How it failed.
        tried: Number of trials.
        failures: Number of batch sizes that failed.
        peaks: (batch size, peak bytes) of those that passed, ascending by batch size.
    """

    length: float
    target_length: float | None
    cap: int
    passed: int
    failed: int | None
    failed_by: ClosedBy | None
    tried: int
    failures: int
    peaks: tuple[tuple[int, float], ...]

    def step(self, tolerance: float) -> int:
        """The smallest difference in batch size that matters."""
        return max(1, int((self.passed or self.failed or 1) * tolerance))

    @property
    def beyond(self) -> int:
        """The smallest batch size that is out of the question."""
        return self.failed if self.failed is not None else self.cap + 1


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

    def propose(self, trials: Sequence[Trial]) -> BatchShape | None:
        """The next shape to try, or None where all is known.

        Raises:
            NothingFits: Not one example of the shortest length fits.
            TooLong: Not one example of the longest length fits.
            SingleFails: One example alone fails with something that is no lack of memory.
        """
        view = _View(self, trials)
        longest = self._lengths.longest
        if (alone := view.failure(1, longest)) is not None:
            return self._longest_that_fits(view, alone)
        for length in view.order:
            if (retry := view.to_retry(length)) is not None:
                return self._shape(retry, length)
            if (batch_size := view.next_batch_size(length)) is not None:
                return self._shape(batch_size, length)
        for length in view.confirmation_order:
            bracket = view.bracket(length)
            if view.passes(bracket.passed, length) < 2:
                return self._shape(bracket.passed, length)
        return None

    def frontier(self, trials: Sequence[Trial]) -> list[FrontierPoint]:
        """The lengths that are closed, in ascending order."""
        view = _View(self, trials)
        points = []
        for length in sorted(view.order):
            bracket = view.bracket(length)
            closed_by = view.closed_by(bracket)
            if closed_by is None or bracket.passed == 0:
                continue
            points.append(
                FrontierPoint(
                    length=length,
                    target_length=bracket.target_length,
                    batch_size=bracket.passed,
                    closed_by=closed_by,
                    oom_batch_size=bracket.failed if bracket.failed_by == "oom" else None,
                    step_seconds=view.median_seconds(bracket.passed, length),
                    peak_bytes=view.highest_peak(bracket.passed, length),
                )
            )
        return points

    def peak_model(self, trials: Sequence[Trial]) -> CostModel | None:
        """The model of peak memory that the trials give; None where there are too few."""
        return _View(self, trials).model

    def progress(self, trials: Sequence[Trial]) -> tuple[int, int]:
        """Work done and work in all: one for each length closed and one for each confirmed, as far as is known."""
        view = _View(self, trials)
        brackets = [view.bracket(length) for length in view.order]
        closed = sum(view.closed_by(bracket) is not None for bracket in brackets)
        to_confirm = view.confirmation_order
        confirmed = sum(view.passes(view.bracket(length).passed, length) >= 2 for length in to_confirm)
        total = max(len(view.order), min(self._settings.num_lengths, self._histogram.lengths.size))
        return closed + confirmed, total + (len(to_confirm) if closed == len(brackets) else total)

    def _shape(self, batch_size: int, length: float) -> BatchShape:
        return BatchShape(batch_size, length, self._lengths.worst_target(length))

    def _longest_that_fits(self, view: _View, alone: Trial) -> BatchShape:
        """Bisects over the distinct lengths, one example at a time, for the longest that fits."""
        if alone.outcome != "oom":
            raise SingleFails(alone)
        distinct = self._histogram.lengths
        passed, failed = -1, distinct.size - 1
        while failed - passed > 1:
            # The shortest first: where even that fails, no other needs a try.
            middle = 0 if passed < 0 and view.tried(1, float(distinct[0])) == 0 else (passed + failed) // 2
            length = float(distinct[middle])
            if (retry := view.to_retry(length)) is not None:
                return self._shape(retry, length)
            if (trial := view.failure(1, length)) is not None:
                if trial.outcome != "oom":
                    raise SingleFails(trial)
                if middle == 0:
                    raise NothingFits(trial)
                failed, alone = middle, trial
            elif view.passes(1, length):
                passed = middle
            else:
                return self._shape(1, length)
        if passed < 0:
            raise NothingFits(alone)
        fitting = float(distinct[passed])
        raise TooLong(fitting, self._lengths.count - self._histogram.count_up_to(fitting), alone)


class _View:
    """Everything that follows from a list of trials; derived, never stored."""

    def __init__(self, search: FrontierSearch, trials: Sequence[Trial]) -> None:
        self._search = search
        self._settings = search._settings
        self._trials = trials
        self._by_shape: dict[tuple[int, float], list[Trial]] = defaultdict(list)
        self._sizes: dict[float, list[int]] = defaultdict(list)
        for trial in trials:
            if trial.outcome == "error":  # the workload's own; it was shown, mended and runs anew
                continue
            key = (trial.batch_size, trial.length)
            if key not in self._by_shape:
                self._sizes[trial.length].append(trial.batch_size)
            self._by_shape[key].append(trial)
        self._brackets: dict[float, Bracket] = {}

    # What happened to one shape

    def tried(self, batch_size: int, length: float) -> int:
        return len(self._by_shape.get((batch_size, length), ()))

    def passes(self, batch_size: int, length: float) -> int:
        return sum(trial.outcome == "ok" for trial in self._by_shape.get((batch_size, length), ()))

    def failure(self, batch_size: int, length: float) -> Trial | None:
        """The trial that rules the shape out: one OOM, or two crashes or time-outs."""
        trials = self._by_shape.get((batch_size, length), ())
        faults = [trial for trial in trials if trial.outcome in ("crash", "timeout")]
        ooms = [trial for trial in trials if trial.outcome == "oom"]
        return ooms[0] if ooms else faults[-1] if len(faults) > 1 else None

    def to_retry(self, length: float) -> int | None:
        """A batch size whose only trial crashed or timed out: it has one more, in a fresh worker."""
        for size in self._sizes.get(length, ()):
            trials = self._by_shape[size, length]
            if len(trials) == 1 and trials[0].outcome in ("crash", "timeout"):
                return size
        return None

    def highest_peak(self, batch_size: int, length: float) -> int | None:
        peaks = [trial.peak_bytes for trial in self._by_shape[batch_size, length] if trial.peak_bytes is not None]
        return max(peaks, default=None)

    def median_seconds(self, batch_size: int, length: float) -> float | None:
        times = [trial.step_seconds for trial in self._by_shape[batch_size, length] if trial.step_seconds is not None]
        return float(np.median(times)) if times else None

    # What is known at one length

    def cap(self, length: float) -> int:
        """The largest batch size that the data can fill with examples of at most this length."""
        count = self._search._histogram.count_up_to(length)
        return min(count, self._settings.max_batch_size or count)

    def bracket(self, length: float) -> Bracket:
        if length not in self._brackets:
            self._brackets[length] = self._bracket(length)
        return self._brackets[length]

    def _bracket(self, length: float) -> Bracket:
        sizes = sorted(self._sizes.get(length, ()))
        failures = {size: trial for size in sizes if (trial := self.failure(size, length)) is not None}
        failed = min(failures, default=None)
        passed = [size for size in sizes if self.passes(size, length) and (failed is None or size < failed)]
        peaks = [(size, peak) for size in passed if (peak := self.highest_peak(size, length)) is not None]
        return Bracket(
            length=length,
            target_length=self._search._lengths.worst_target(length),
            cap=self.cap(length),
            passed=max(passed, default=0),
            failed=failed,
            failed_by=None if failed is None else cast(ClosedBy, failures[failed].outcome),
            tried=sum(self.tried(size, length) for size in sizes),
            failures=len(failures),
            peaks=tuple((size, float(peak)) for size, peak in peaks),
        )

    def closed_by(self, bracket: Bracket) -> ClosedBy | None:
        """What ends the search at this length; None where it goes on."""
        if bracket.passed >= bracket.cap:
            return "data"
        step = bracket.step(self._settings.tolerance)
        if bracket.failed is not None and bracket.failed - bracket.passed <= step:
            return bracket.failed_by
        is_end = bracket.length in (self._search._lengths.longest, self._search._lengths.shortest)
        if is_end or bracket.passed == 0:
            return None
        need = self._slope(bracket)
        peak = dict(bracket.peaks).get(bracket.passed)
        if need is None or peak is None:
            return None
        return "memory" if self._settings.limit_bytes - peak < need * step else None

    def next_batch_size(self, length: float) -> int | None:
        """The next batch size to try; None where the length is closed."""
        bracket = self.bracket(length)
        if self.closed_by(bracket) is not None:
            return None
        step = bracket.step(self._settings.tolerance)
        guided = bracket.tried < _GUIDED_TRIALS and bracket.failures <= _GUIDED_FAILURES
        guess = self._guess(bracket) if guided else None
        if guess is None:
            # Upwards in leaps as long as nothing failed: the data's own cap may be absurdly far beyond.
            leap = 2 if guided else _GROWTH
            bisect = (bracket.passed + bracket.beyond) // 2
            guess = max(1, bracket.passed * leap) if bracket.failed is None else bisect
        # One step more is the least that tells anything, from either side.
        guess = max(guess, bracket.passed + step if bracket.passed else 1)
        if bracket.failed is not None:
            # Where nothing passed yet the model was wrong here: step back further each time.
            back = step if bracket.passed else step << max(0, bracket.failures - 1)
            guess = min(guess, bracket.failed - back)
        return max(bracket.passed + 1, min(guess, bracket.beyond - 1))

    def _guess(self, bracket: Bracket) -> int | None:
        """The batch size at the limit, by the model; None where nothing is known of the slope."""
        room = self._settings.limit_bytes
        need = self._slope(bracket)
        if need is None or need <= 0:
            return 1 if bracket.passed == 0 else None
        if not bracket.peaks:
            model = self.model
            assert model is not None
            # A little below where the model puts the limit: a success closes the length, a failure does not.
            margin = max(model.relative_error, self._settings.tolerance / 2)
            size = int((room - model.constant) / need * (1 - min(margin, 0.5)))
            return max(1, min(size, bracket.cap))
        largest, peak = bracket.peaks[-1]
        size = int(min(largest + (room - peak) / need, 2.0 * bracket.cap))
        used = peak - (self.model.constant if self.model else bracket.peaks[0][1])
        if used < _KNOWN_SHARE * (room - (peak - used)):
            size = min(size, largest * _GROWTH)
        return size

    def _slope(self, bracket: Bracket) -> float | None:
        """Bytes that one example more of this length needs: from this length's own trials, else from the model."""
        if len(bracket.peaks) >= 2:
            (small, low), (large, high) = bracket.peaks[0], bracket.peaks[-1]
            if len(bracket.peaks) > 2 and bracket.peaks[-2][0] * 2 <= large:
                small, low = bracket.peaks[-2]
            if high > low:
                return (high - low) / (large - small)
        if self.model is None:
            return None
        length = bracket.length
        return length * (self.model.linear + self.model.quadratic * length)

    @cached_property
    def model(self) -> CostModel | None:
        """The model of peak memory, fitted to every trial that passed."""
        shapes = [
            (size, length, peak)
            for (size, length) in self._by_shape
            if self.passes(size, length) and (peak := self.highest_peak(size, length)) is not None
        ]
        if len(shapes) < 2:
            return None
        sizes, lengths, peaks = zip(*shapes, strict=True)
        return self._search._fit(sizes, lengths, peaks)

    # Which lengths

    @cached_property
    def order(self) -> list[float]:
        """The lengths in the order in which they are probed: the longest, the shortest, then from the longer down.

        The longest comes first, for what it tells: how much fits at all. The others are chosen after it, so until
        its limit is known there is only it.
        """
        longest = self._search._lengths.longest
        shortest = self._search._lengths.shortest
        if longest == shortest:
            return [longest]
        bracket = self.bracket(longest)
        if self.closed_by(bracket) is None and not self._chosen_from(longest):
            return [longest]
        between = _lengths_between(self._search, self._chosen_from(longest) or bracket.passed)
        return [longest, shortest, *sorted(between, reverse=True)]

    def _chosen_from(self, longest: float) -> int | None:
        """The batch size at the longest length that the other lengths are chosen from.

        It must never change once they are, so it is the first that failed there, whatever is learnt later.
        """
        faults: set[int] = set()
        for trial in self._trials:
            if trial.length != longest or trial.outcome in ("ok", "error"):
                continue
            if trial.outcome == "oom" or trial.batch_size in faults:
                return trial.batch_size
            faults.add(trial.batch_size)
        return None

    @cached_property
    def confirmation_order(self) -> list[float]:
        """Lengths whose largest batch is run once more, longest and shortest in alternation.

        In one worker, its cache kept: what fits alone must fit after any other. What the data limit is left out.
        """
        near = [
            length
            for length in sorted(self.order, reverse=True)
            if (bracket := self.bracket(length)).passed and self.closed_by(bracket) not in (None, "data")
        ]
        return [length for pair in zip(near, reversed(near), strict=True) for length in pair][: len(near)]


def _lengths_between(search: FrontierSearch, longest_batch_size: int) -> list[float]:
    """Lengths to probe between the shortest and the longest, all of them lengths of the data.

    They are spread half by the logarithm of the length, half by where the data's total length lies. The lowest is
    where the data can just fill what memory allows: below, no batch can reach the limit.

    Args:
        search: The search.
        longest_batch_size: About how many of the longest examples fit.
    """
    histogram = search._histogram
    lengths = histogram.lengths
    wanted = min(search._settings.num_lengths, lengths.size) - 2
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
