"""The margin: the memory that a proven batch leaves free, because equal batches do not always take the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from statistics import median

from batchtune.results import BatchShape, Margin, Trial

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
_OF_ALL_TABLES = 0.3
# A cache holds pages (of 20 MiB in expandable segments), and some are only used in part: batches that leave less than
# this part of the limit may run out of memory after others. transformer-lm base in fp32 under 24 GiB did so with 1.1%
# free, in 2 of 3 shuffled epochs on the emulated device.
_IN_PART = 0.015
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
        self, limit_bytes: int, trials: Sequence[Trial], steps: Sequence[Trial]
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
        share = min(_OF_ALL_TABLES, _OF_EACH_TABLE * tables)
        self.fragments_bytes = int(share * limit_bytes)
        """What batches of tables leave free besides, for what the allocator can't use between its blocks."""
        self.may_leave_more_free = share < _OF_ALL_TABLES
        self.overhead = _overhead(trials, limit_bytes)
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
        return int(_IN_PART * self.limit_bytes) if self._reserved else 0

    def told_apart(self, tolerance: float) -> float:
        """Return the difference in size that matters, as a fraction, where the user asks for such a tolerance."""
        return max(tolerance, SCATTER) if self.overhead > 1 else tolerance

    @property
    def room_bytes(self) -> float:
        """The memory that a proven batch can use, by the limit."""
        usable = min(
            self.limit_bytes / self.overhead, self.limit_bytes - self.unusable_bytes
        )
        return usable - self.margin.bytes

    def share_in_a_table(self, peak_bytes: int) -> float:
        """Return the share of a batch with this peak that leaves free what failed in turns or in shuffled training.

        What it takes beyond what is in use between trials is taken to be in proportion to the batch: a table's own
        proof runs it.
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
