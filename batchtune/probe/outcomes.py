"""Concludes from trials: which shapes passed or failed, what they imply for others, and how much memory batches need.

A crash, or an out-of-memory error below a size that passed, needs a second trial.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batchtune.epochs import floats
from batchtune.epochs.cost_model import fit_cost, predict
from batchtune.lengths import FloatArray
from batchtune.results import BatchShape, ClosedBy, CostModel, Margin, Trial

# Batch shapes and the bounds that they give each other: what contains a shape that passed, or one that failed.

Mask = npt.NDArray[np.bool_]
# Two peaks show how memory grows if they lie apart by this many times as much as those of equal batches.
_TELLING = 4


class Anchor(NamedTuple):
    """Where the largest batch size is searched: a batch's longest length and longest target (None: no targets)."""

    length: float
    target_length: float | None

    def shape(self, batch_size: int) -> BatchShape:
        """Return a batch of this size here."""
        return BatchShape(batch_size, self.length, self.target_length)

    def is_within(self, other: Anchor) -> bool:
        """Return whether neither its length nor its target is larger than the other's."""
        return self.length <= other.length and (self.target_length or 0.0) <= (
            other.target_length or 0.0
        )

    @property
    def arrays(self) -> tuple[FloatArray, FloatArray]:
        """Its length and its target, each as an array of one."""
        return np.array([self.length]), np.array([self.target_length or 0.0])


class Shapes:
    """Batch shapes, to compare with arrays of lengths and targets, shape (n,) each."""

    def __init__(self, shapes: Iterable[BatchShape]) -> None:
        rows = sorted(
            (shape.batch_size, shape.length, shape.target_length or 0.0)
            for shape in shapes
        )
        self._rows = np.array(rows, dtype=np.float64).reshape(-1, 3)
        self.sizes, self._lengths, self._targets = np.ascontiguousarray(self._rows.T)

    def exceeds(self, shape: BatchShape) -> bool:
        """Return whether one of them contains a shape, as `BatchShape.contains` has it."""
        row = np.array([shape.batch_size, shape.length, shape.target_length or 0.0])
        return bool(
            ((self._rows >= row).all(axis=1) & (self._rows > row).any(axis=1)).any()
        )

    def largest_beyond(
        self, lengths: FloatArray, targets: FloatArray, among: Mask | bool = True
    ) -> FloatArray:
        """Return the largest batch size at a length and target no shorter, or 0; shape (n,)."""
        beyond = (lengths[:, None] <= self._lengths) & (
            targets[:, None] <= self._targets
        )
        largest: FloatArray = np.where(beyond & among, self.sizes, 0.0).max(
            axis=1, initial=0.0
        )
        return largest

    def smallest_below(
        self, lengths: FloatArray, targets: FloatArray, among: Mask | bool = True
    ) -> FloatArray:
        """Return the smallest batch size at a length and target no longer, or infinity; shape (n,)."""
        below = (lengths[:, None] >= self._lengths) & (
            targets[:, None] >= self._targets
        )
        smallest: FloatArray = np.where(below & among, self.sizes, np.inf).min(
            axis=1, initial=np.inf
        )
        return smallest

    def elsewhere(self, anchor: Anchor) -> Mask:
        """Return which have another length or target; shape (shapes,)."""
        other: Mask = (self._lengths != anchor.length) | (
            self._targets != (anchor.target_length or 0.0)
        )
        return other


@dataclass(frozen=True, slots=True, kw_only=True)
class Bracket:
    """The bounds of the batch size at one length and target.

    Attributes:
        cap: What the data can fill, or the user allows.
        passed: The largest proven by its own trial, below any that failed, or 0.
        ran: The largest that ran at all, below any that failed; above `passed` if it leaves no margin.
        over_margin: The smallest above `passed` that ran but leaves no margin.
        failed: The smallest that failed.
        flushed: Whether that one would have fitted, had the allocator emptied its cache.
        tried, failures, given_up: How many sizes were tried, failed, and failed in turns after they had passed alone.
        peaks: (batch size, peak bytes) of those that ran, ascending by batch size.
        implied_low: Proven by a trial with a longer length or target, or 0.
        implied_high: Failed, or left no margin, at a shorter length or target.
        step: The smallest difference in batch size that matters. It doubles with each size given up in turns: there the
            limit depends on what the other shapes leave behind, and creeping up to it would fail again and again.
        spread_bytes: How far the peaks of equal batches lie apart.
        is_blurred: Whether that is as far as the peaks of sizes that the tolerance should tell
            apart.
    """

    anchor: Anchor
    cap: int
    passed: int
    ran: int
    over_margin: int | None
    failed: int | None
    failed_by: ClosedBy | None
    flushed: bool
    tried: int
    failures: int
    given_up: int
    peaks: tuple[tuple[int, float], ...]
    implied_low: int
    implied_high: int | None
    step: int
    spread_bytes: int
    is_blurred: bool

    @property
    def beyond(self) -> int:
        """The smallest batch size ruled out here."""
        return min(self.failed or self.cap + 1, self.over_margin or self.cap + 1)

    @property
    def nearest_beyond(self) -> int:
        """The smallest batch size ruled out here, or at a shorter length or target."""
        return min(self.beyond, self.implied_high or self.beyond)

    @property
    def peak(self) -> float | None:
        """Peak of the largest batch size proven here; None if unknown."""
        return dict(self.peaks).get(self.passed)

    @property
    def proven(self) -> int:
        """The largest batch size proven, here or at a longer length or target."""
        return max(self.passed, self.implied_low)

    @property
    def has_crept(self) -> bool:
        """Whether the two largest sizes that ran are a step apart: their peaks lead no further."""
        sizes = [size for size, _ in self.peaks[-2:]]
        return len(sizes) == 2 and sizes[1] - sizes[0] <= self.step

    def measured_need(self) -> float | None:
        """Return the need of an example by the largest peak and one well below; None if they don't show it."""
        if len(self.peaks) < 2:
            return None
        large, high = self.peaks[-1]
        small, low = self.peaks[-2]
        if small * 2 > large:
            small, low = self.peaks[0]
        if high - low <= _TELLING * self.spread_bytes:
            return None
        return (high - low) / (large - small)


def is_covered(shape: BatchShape, shapes: Iterable[BatchShape]) -> bool:
    """Return whether one of the shapes is this one, or contains it."""
    return any(other == shape or other.contains(shape) for other in shapes)


def step_at(size: int, tolerance: float) -> int:
    """Return the smallest difference in batch size that matters, at least 1."""
    return max(1, int(size * tolerance))


def ladder(tolerance: float, top: int) -> Sequence[int]:
    """Return batch sizes from 1 to `top`, each above the one before by a `tolerance` fraction of it, at least by one.

    Nothing needs to be tried between two neighbours, so bisecting n rungs takes at most n.bit_length() trials.
    """
    if tolerance * top < 2:
        return range(1, top + 1)
    rungs = []
    rung = 1
    while rung <= top:
        rungs.append(rung)
        rung += step_at(rung, tolerance)
    return rungs


def between(rungs: Sequence[int], low: int, high: int) -> Sequence[int]:
    """Return the rungs strictly between two batch sizes."""
    return rungs[bisect_right(rungs, low) : bisect_left(rungs, high)]


# The margin: the memory that a proven batch leaves free, because equal batches do not always take the same.

# The margin: this multiple of the widest spread seen, plus this fraction of the limit.
_SPREADS = 1.1
_LEAST_MARGIN = 0.001
# The first step of a process that runs out of memory needs more than was free: this multiple of it, by a guess.
_BEYOND_WHAT_WAS_FREE = 4
# With each table that failed in shuffled training, and each failure in turns where the allocator fragments, this much
# more of the limit stays free, up to so much. A batch a little smaller fails as often: tables of transformer-lm and
# conformer failed at 0.98, 0.95 and 0.9 of the sizes that pass alone, none at 0.85. With 5% of the limit free, one ran
# out of memory in 2 of 3 epochs.
_OF_EACH_TABLE = 0.075
# With expandable segments only pages are used in part, and a little less is enough.
_OF_EACH_EXPANDABLE_TABLE = 0.025
_OF_ALL_TABLES = 0.3
# A cache holds pages (of 20 MiB in expandable segments), and some are only used in part, so batches leave this part of
# the limit free. With expandable segments, the replay of a proof leaves it free, too: a table of transformer-lm base in
# fp32 under 24 GiB, proven with all of the limit, ran out of memory in 3 of 5 epochs on the emulated device.
IN_PART = 0.01
# Batch sizes up to which a caching allocator goes without emptying its cache, by what it happens to hold: equal trials
# differ by this fraction (transformer-lm base in 24 GiB, expandable segments, on the emulated device). Steps of half of
# it ended where a conformer ran out of memory in 4 of 5 epochs. Where peaks scatter, nearer sizes are not told apart.
SCATTER = 0.03
# Peaks of at least this part of the limit show how much more the allocator reserves: smaller ones are mostly gaps.
_TELLING_SHARE = 0.6


class Peaks:
    """The peaks of all trials and of the steps in turns, and the margin that they ask for.

    Baseline memory differs between processes from their start on, whatever they run: each peak is shifted to the
    baseline of the process that holds the most. What a process holds after a trial may be buffers of that trial's size,
    which its own peak includes. The first step of a process may need more than later ones, and counts apart.
    """

    def __init__(
        self,
        limit_bytes: int,
        trials: Sequence[Trial],
        steps: Sequence[Trial],
        *,
        expandable: bool = False,
    ) -> None:
        self.limit_bytes = limit_bytes
        self._peaks: dict[BatchShape, list[int]] = defaultdict(list)
        self._reserved: dict[BatchShape, int] = {}  # by its trials, if there is a cache
        self._passed_first: set[BatchShape] = set()
        self._repetitions = 0
        # Steps first: a worker that goes on with trials after its turns has taken its first step there.
        evidence = [*steps, *trials]
        # Of turns in an earlier run of the probe only the failures are journalled: what began such a worker is unknown.
        first_of_worker: dict[int, int | None] = {}
        for number, trial in enumerate(evidence):
            if trial.worker is not None:
                began = None if trial.confirmation else number
                first_of_worker.setdefault(trial.worker, began)
        firsts = set(first_of_worker.values())
        after_turns = {
            worker for worker, began in first_of_worker.items() if began is None
        }
        passed = [
            (number, trial)
            for number, trial in enumerate(evidence)
            if trial.outcome == "ok"
        ]
        self._starts: dict[int | None, int] = {}
        for trial in evidence:
            held = trial.rest_bytes if trial.held_bytes is None else trial.held_bytes
            if held is not None and trial.worker not in after_turns:
                self._starts.setdefault(trial.worker, held)
        self._rests: dict[int | None, list[int]] = defaultdict(list)
        rests = []
        largest = defaultdict[int | None, float](float)
        for number, trial in passed:
            if trial.rest_bytes is not None:
                rests.append(trial.rest_bytes + self._lift(trial))
                worker = trial.worker
                # What it kept of much smaller batches does not compare.
                if trial.shape.padded_length > 2 * largest[worker]:
                    self._rests.pop(worker, None)
                largest[worker] = max(largest[worker], trial.shape.padded_length)
                if number not in firsts:
                    self._rests[worker].append(trial.rest_bytes)
        self.rest_bytes = min(rests, default=None)
        """In use between trials (parameters, optimizer state) in the process that holds the most; None if unknown."""
        self.are_known = not passed or any(
            trial.peak_bytes is not None for _, trial in passed
        )
        """Whether peaks can be measured here; True before anything has passed."""
        tables = sum(trial.shuffled for trial in trials)
        of_each = _OF_EACH_EXPANDABLE_TABLE if expandable else _OF_EACH_TABLE
        share = min(_OF_ALL_TABLES, of_each * tables)
        self.fragments_bytes = int(share * limit_bytes)
        """What batches of tables leave free besides, for what the allocator can't use between its blocks."""
        self.may_leave_more_free = share < _OF_ALL_TABLES
        self.overhead = _overhead(trials, limit_bytes)
        self._expandable = expandable
        self._first_steps = [
            step for number, step in enumerate(steps) if number in firsts
        ]
        for trial in trials:
            if trial.reserved_bytes is not None:
                before_it = self._reserved.get(trial.shape, 0)
                self._reserved[trial.shape] = max(before_it, trial.reserved_bytes)
        for number, trial in passed:
            is_first = number in firsts
            if is_first:
                self._passed_first.add(trial.shape)
            if not is_first or number >= len(steps):
                self._add(trial, is_first=is_first)

    def _add(self, trial: Trial, *, is_first: bool) -> None:
        peak = trial.peak_bytes
        if is_first and trial.steady_peak_bytes is not None:
            peak = trial.steady_peak_bytes
        if peak is not None:
            peak += self._lift(trial)
            self._peaks[trial.shape] += [peak, peak - (trial.peak_spread_bytes or 0)]
            self._repetitions += max(1, trial.steps - 1)

    def _lift(self, trial: Trial) -> int:
        if trial.worker not in self._starts:
            return 0
        return max(self._starts.values()) - self._starts[trial.worker]

    def leaves_margin(self, shape: BatchShape) -> bool:
        """Return whether a shape that passed leaves the margin free.

        One that passed as the first of its process needs no room for that beyond its own.
        """
        lowest = min(self._peaks.get(shape, ()), default=None)
        if lowest is None:
            return True
        unusable_bytes = self.unusable_bytes if shape.batch_size > 1 else 0
        if self.limit_bytes - lowest < self._margin_bytes(0.0) + unusable_bytes:
            return False
        if shape in self._passed_first:
            return True
        wanted = self._margin_bytes(float(self.margin.first_step_bytes))
        return self._free(shape, lowest) >= wanted

    @property
    def unusable_bytes(self) -> int:
        """What tensors can't use of the limit, beyond the margin, if there is a cache."""
        return int(IN_PART * self.limit_bytes) if self._reserved else 0

    def told_apart(self, tolerance: float) -> float:
        """Return the difference in size that matters, as a fraction, where the user asks for such a tolerance."""
        return max(tolerance, SCATTER) if self.overhead > 1 else tolerance

    @property
    def room_bytes(self) -> float:
        """The memory that a proven batch can use, by the limit."""
        return self._room_bytes(self.overhead)

    def room_beside(self, shape: BatchShape, peak: float) -> float:
        """Return that memory for this shape, counting what expandable segments reserved for it if that is more."""
        reserved = self._reserved.get(shape)
        if reserved is None or not self._expandable:
            return self.room_bytes
        return self._room_bytes(max(self.overhead, reserved / peak))

    def _room_bytes(self, overhead: float) -> float:
        usable = min(
            self.limit_bytes / overhead, self.limit_bytes - self.unusable_bytes
        )
        return usable - self.margin.bytes

    def share_in_a_table(self, peak_bytes: int) -> float:
        """Return the share of a batch with this peak that leaves free what failed in turns or in shuffled training.

        What it takes beyond what is in use between trials is assumed to be proportional to the
        batch; the table's own proof checks this.
        """
        if not self.fragments_bytes:
            return 1.0
        rest = self.rest_bytes or 0
        room = self.limit_bytes - self.margin.free_bytes - self.unusable_bytes - rest
        return min(1.0, max(0.0, room / max(1, peak_bytes - rest)))

    @cached_property
    def margin(self) -> Margin:
        """The memory that a proven batch leaves free."""
        first_step_bytes = self._first_step_bytes()
        return Margin(
            bytes=self._margin_bytes(first_step_bytes),
            spread_bytes=self._spread_bytes,
            first_step_bytes=first_step_bytes,
            repetitions=self._repetitions,
            fragments_bytes=self.fragments_bytes,
        )

    def _margin_bytes(self, first_step_bytes: float) -> int:
        if not self.are_known:
            return 0
        return int(
            max(_SPREADS * self._spread_bytes, first_step_bytes)
            + _LEAST_MARGIN * self.limit_bytes
        )

    @cached_property
    def _spread_bytes(self) -> int:
        measured = list(self._peaks.values())
        enough = _TELLING_SHARE * self.limit_bytes
        # A validation pass between two steps takes more than a small batch: that says nothing of large ones.
        telling = [peaks for peaks in measured if max(peaks) >= enough] or measured
        spreads = [max(peaks) - min(peaks) for peaks in telling]
        spreads += [max(rests) - int(median(rests)) for rests in self._rests.values()]
        return max(spreads, default=0)

    def _first_step_bytes(self) -> int:
        """Return how far the first step of a process may exceed later ones."""
        excesses = []
        were_free = [0]
        for step in self._first_steps:
            highest = self.highest(step.shape)
            if highest is None:
                continue
            if step.outcome == "oom":
                were_free.append(self._free(step.shape, highest))
            elif step.peak_bytes is not None:
                excesses.append(step.peak_bytes + self._lift(step) - highest)
        return max([*excesses, _BEYOND_WHAT_WAS_FREE * max(were_free)])

    def _free(self, shape: BatchShape, peak_bytes: int) -> int:
        """Return what a shape with this peak leaves of the limit, which is one of what the allocator reserves."""
        return self.limit_bytes - max(peak_bytes, self._reserved.get(shape, 0))

    def highest(self, shape: BatchShape) -> int | None:
        """Return the highest peak measured for a shape; None if unknown."""
        return max(self._peaks.get(shape, ()), default=None)

    @property
    def highest_of_all(self) -> int:
        """The highest peak of all shapes; 0 without one."""
        return max((max(peaks) for peaks in self._peaks.values()), default=0)


def _overhead(trials: Sequence[Trial], limit_bytes: int) -> float:
    """Return the memory reserved / the peak, as a median over batches near the limit; 1 without a cache.

    The limit is one of what the allocator reserves: its blocks are larger than the tensors, and lie apart.
    """
    ratios = [
        trial.reserved_bytes / trial.peak_bytes
        for trial in trials
        if trial.reserved_bytes
        and trial.peak_bytes
        and trial.peak_bytes >= _TELLING_SHARE * limit_bytes
    ]
    return median(ratios) if ratios else 1.0


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


# The fit: what an example needs at each length, by the peaks of all that ran, and how much memory batches can use.

# A peak shows what an example needs if it is at least this fraction of the memory; smaller ones are mostly constant.
_TELLING_SHARE_OF_MEMORY = 0.3
# An allocator may fail to use up to this share of the memory that is not in use between trials.
_UNUSABLE = 0.03
# A length is closed if the room is less than this share of what the model says the next size needs.
_SURELY_MISSING = 0.75
_MOST_CORRECTION = 2.0  # of the model, as a factor


class MemoryFit:
    """The need of an example, from the peaks of the shapes that passed and the brackets of all that was tried."""

    def __init__(
        self, peaks: Peaks, passed: Sequence[BatchShape], brackets: Sequence[Bracket]
    ) -> None:
        self._peaks = peaks
        self._brackets = brackets
        self._limit_bytes = peaks.limit_bytes
        shapes = [shape for shape in passed if peaks.highest(shape) is not None]
        sizes = floats([shape.batch_size for shape in shapes])
        lengths = floats([shape.length for shape in shapes])
        targets = floats([shape.target_length or 0.0 for shape in shapes])
        measured = floats([peaks.highest(shape) or 0 for shape in shapes])
        has_targets = any(shape.target_length is not None for shape in shapes)
        self.model = fit_cost(
            sizes, lengths, measured, targets if has_targets else None
        )
        """The model of peak memory, fitted to every shape that passed; None if they are too few."""
        self.error = 0.0
        """The model's error, relative to the peaks."""
        if self.model is not None:
            errors = predict(self.model, sizes, lengths, targets) / measured - 1
            # In a cache a batch of one may take far more than its examples need: there, large peaks count most.
            weights = measured if peaks.overhead > 1 else np.ones(measured.size)
            self.error = float(np.sqrt(np.average(errors**2, weights=weights)))
        # Far off, so that a length's own peaks are trusted more.
        self.is_misfit = self.error > 0.02

    # The memory that an example needs

    def need(self, bracket: Bracket) -> float | None:
        """Return the bytes that one more example needs, by this length's trials, else by the model; None: unknown."""
        measured = bracket.measured_need()
        if measured is not None:
            return measured
        needs = []
        if self.model is not None:
            needs.append(self._need_by_model(bracket, self.model))
        rest_bytes = self._peaks.rest_bytes
        if (
            len(bracket.peaks) == 1
            and rest_bytes is not None
            and self._excess(bracket) is None
        ):
            # All that the step took beyond what is in use between trials: at least what the examples need.
            size, peak = bracket.peaks[0]
            needs.append((peak - rest_bytes) / size)
        return max(needs, default=None)

    def _need_by_model(self, bracket: Bracket, model: CostModel) -> float:
        """Return the need by the model, corrected by the peaks of this length, else of its neighbours."""
        length, target = bracket.anchor
        excess = self._excess(bracket)
        if self.is_misfit and self._intercept is not None and bracket.peaks:
            size, peak = bracket.peaks[-1]
            if self._is_telling(peak, self._intercept):
                return (peak - self._intercept) / size
        if excess is None and not bracket.peaks:
            excess = float(np.max(self._nearest_excesses(np.array([length]))))
        need = model.per_example(length, target or 0.0)
        if excess is None:
            return need
        return need * min(max(excess, 1 / _MOST_CORRECTION), _MOST_CORRECTION)

    def _nearest_excesses(self, lengths: FloatArray) -> FloatArray:
        """Return the excesses of the nearest lengths on either side that show one, shape (2, n); 1 if none does."""
        telling = np.array(sorted(self.excesses))
        if not telling.size:
            return np.ones((2, lengths.size))
        excesses = np.array([self.excesses[length] for length in telling.tolist()])
        after = np.searchsorted(telling, lengths)
        nearest = np.array(
            [np.maximum(after - 1, 0), np.minimum(after, telling.size - 1)]
        )
        near: FloatArray = excesses[nearest].clip(
            1 / _MOST_CORRECTION, _MOST_CORRECTION
        )
        return near

    def leaves_no_room(self, bracket: Bracket, peak: float, step: int) -> bool:
        """Return whether a step more surely does not fit, so that a length is closed without a failure.

        Memory may leap, so two peaks and the model must agree, or the model's error must be smaller than the step.
        """
        if self.model is None:
            return False
        need = self._need_by_model(bracket, self.model)
        measured = bracket.measured_need()
        room = self.room_at(bracket) - peak
        if measured is not None and abs(measured - need) <= 0.25 * need:
            need = min(measured, need)
        elif self.error * peak > need * step:
            if self.is_misfit and (
                self._intercept is None or peak < 0.8 * self.room_bytes
            ):
                return False
            # Even if the model overrates the need by a third, the next size does not fit.
            if not self.is_misfit and room >= _SURELY_MISSING * need * step:
                return False
        # The need is known to a few per cent, which is at least one example if a step is many.
        return room < need * step * (0.9 if step >= 10 else 1.0)

    @cached_property
    def excesses(self) -> dict[float, float]:
        """Length → measured / modelled memory of its largest shape, with the longest target that shows it."""
        excesses: dict[float, float] = {}
        for bracket in sorted(
            self._brackets, key=lambda bracket: bracket.anchor.target_length or 0.0
        ):
            excess = self._excess(bracket)
            if excess is not None:
                excesses[bracket.anchor.length] = excess
        return excesses

    def _excess(self, bracket: Bracket) -> float | None:
        """Return measured / modelled memory of the examples of the largest shape; None if the peak does not show it."""
        model = self.model
        if model is None or not bracket.peaks:
            return None
        size, peak = bracket.peaks[-1]
        length, target = bracket.anchor
        modelled = size * model.per_example(length, target or 0.0)
        is_at_floor = model.constant + modelled <= model.floor * 1.05
        if modelled <= 0 or is_at_floor or not self._is_telling(peak, model.constant):
            return None
        return (peak - model.constant) / modelled

    def _is_telling(self, peak: float, constant: float) -> bool:
        return peak >= constant + _TELLING_SHARE_OF_MEMORY * (
            self._limit_bytes - constant
        )

    @cached_property
    def _intercept(self) -> float | None:
        """The memory of an empty batch, by the lengths at which several batch sizes ran; None if unknown."""
        intercepts = []
        for bracket in self._brackets:
            need = bracket.measured_need()
            if need is not None:
                size, peak = bracket.peaks[-1]
                intercepts.append(peak - need * size)
        if len(intercepts) < 2:
            return None
        # Where memory leaps between two sizes, their slope is too steep or too flat. To take an example's need for too
        # large costs a trial that passes; for too small, one that fails.
        low = float(np.quantile(intercepts, 0.25))
        return max(low, float(self._peaks.rest_bytes or 0))

    # The memory that batches can use

    @cached_property
    def room_bytes(self) -> float:
        """The memory that a proven batch can use: the limit - the margin, or less if shapes fail a little before.

        An allocator that can't use every last byte (fragments, large blocks) fails where the peak
        would have been lower than the limit. The usable memory is then between that peak and the
        highest one that ran. Two lengths must show it: failures further below the limit, or below
        that peak, are leaps of memory. But shapes that only fit once the allocator has emptied its
        cache show it however far below the limit. What ran in a cache and left no margin, at two
        lengths, had too much.
        """
        over_margin = [
            dict(bracket.peaks)[bracket.over_margin]
            for bracket in self._brackets
            if bracket.over_margin is not None
        ]
        if len(over_margin) > 1 and self._peaks.overhead > 1:
            return min(*over_margin, self._usable_bytes)
        return self._usable_bytes

    def room_at(self, bracket: Bracket) -> float:
        """Return the memory that a proven batch can use at one length, by its largest that passed."""
        size, peak = bracket.peaks[-1]
        shape = bracket.anchor.shape(size)
        return min(self.room_bytes, self._peaks.room_beside(shape, peak))

    @cached_property
    def _usable_bytes(self) -> float:
        """The same by the limit and what ran out of memory."""
        highest = float(self._peaks.highest_of_all)
        flushed_at = [
            self._would_be(bracket) for bracket in self._brackets if bracket.flushed
        ]
        too_much = [would_be for would_be in flushed_at if would_be is not None]
        if len(too_much) > 1:
            typical = median(too_much)
            usable = (min(highest, typical) + typical) / 2
            return min(self._peaks.room_bytes, usable - self._peaks.margin.bytes)
        limit = self._limit_bytes / self._peaks.overhead
        unusable = _UNUSABLE * (limit - (self._peaks.rest_bytes or 0))
        usable = max(highest, limit - unusable)
        failed_at = []
        for bracket in self._brackets:
            would_be = self._would_be(bracket)
            if would_be is not None and usable <= would_be < limit:
                failed_at.append(would_be)
        if len(failed_at) < 2 or self._leaps:
            return self._peaks.room_bytes
        return (usable + min(failed_at)) / 2 - self._peaks.margin.bytes

    def _would_be(self, bracket: Bracket) -> float | None:
        """Return what the smallest size that ran out of memory alone would have taken; None if that is unknown."""
        is_oom = bracket.failed_by == "oom" and not bracket.given_up
        if bracket.failed is None or not is_oom:
            return None
        need = self.need(bracket) or 0.0
        if bracket.peaks:
            size, peak = bracket.peaks[-1]
            return peak + need * (bracket.failed - size)
        if self.model is None or not bracket.flushed:
            return None
        return self.model.constant + need * bracket.failed

    def largest_sizes(
        self, lengths: FloatArray, targets: FloatArray
    ) -> FloatArray | None:
        """Return the largest batch sizes that may fit by the model and its error, shape (n,); None if it can't tell."""
        model = self.model
        if model is None or not self.excesses or model.floor > self.room_bytes:
            return None
        with np.errstate(divide="ignore"):
            need = model.per_example(lengths, targets) * self._nearest_excesses(
                lengths
            ).min(axis=0)
            sizes: FloatArray = (self.room_bytes - model.constant) / need
        return sizes * (1 + min(self.error, 0.5))

    # Memory that grows in leaps

    def quantum(self, size: int) -> int:
        """Return the power of two whose next multiple needs no more memory than this batch size; mostly 1.

        It divides the sizes just above which memory leapt, only those no smaller if there are several.
        """
        beyond = {leap for leap in self._leaps if leap >= size}
        leaps = beyond if len(beyond) > 1 else self._leaps
        if len(leaps) < 2:
            return 1
        divisor = math.gcd(*leaps)
        quantum = divisor & -divisor
        while self._grows_within(quantum):
            quantum //= 2
        return quantum

    def _grows_within(self, quantum: int) -> bool:
        """Return whether two sizes with the same next multiple, not the first, needed different memory."""
        if quantum == 1:
            return False
        for bracket in self._brackets:
            for (small, low), (large, high) in pairwise(bracket.peaks):
                if (
                    0 < (small - 1) // quantum == (large - 1) // quantum
                    and high - low > self._peaks.margin.bytes
                ):
                    return True
        return False

    @cached_property
    def _leaps(self) -> list[int]:
        """The sizes just above which a batch failed though its length's peaks left room for it."""
        distances = []  # (the size that passed, how far above it the next one failed)
        for bracket in self._brackets:
            is_oom = bracket.failed_by == "oom" and not bracket.flushed
            if not bracket.failed or not is_oom or bracket.peak is None:
                continue
            distance = bracket.failed - bracket.passed
            need = bracket.measured_need()
            if not need and self.model is not None:
                need = self._need_by_model(bracket, self.model)
            if need and self._peaks.room_bytes - bracket.peak > max(2, distance) * need:
                distances.append((bracket.passed, distance))
        single = [size for size, distance in distances if distance == 1]
        if len(single) < 2:
            return []
        quantum = math.gcd(*single)
        return [size for size, distance in distances if distance <= quantum]
