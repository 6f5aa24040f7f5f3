"""What the trials so far say of each batch shape and each length; derived from them, never stored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np

from batchtune.lengths import Lengths
from batchtune.probe.ladder import step_at
from batchtune.results import ClosedBy, CostModel, Trial

PeakFit = Callable[
    [Sequence[float], Sequence[float], Sequence[float], "Sequence[float] | None"],
    "CostModel | None",
]
"""(batch sizes, lengths, peaks, target lengths) → the fitted model, or None where there are too few."""

# A success closes a length where the measured peak leaves less room than one step more needs. What it needs is known
# to a few per cent; where a step is many examples, that much of it is one too.
_SURE_OF_NEED = 0.9
_MANY = 10
# So well a length's own peaks and the model have to agree on what an example needs.
_AGREEMENT = 0.25
# A shape that takes at least this share of the memory tells what an example needs; a smaller one mostly what is there
# without any. So far the model may be set right by it.
_TELLING_SHARE = 0.3
_MOST_CORRECTION = 2.0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Bracket:
    """What is known at one length.

    Attributes:
        cap: Largest batch size worth trying: what the data can fill, or the user allows.
        passed: Largest batch size that passed, below any that failed; 0 if none did.
        failed: Smallest that failed, or None.
        failed_by: How it failed.
        tried: Number of batch sizes that were tried.
        failures: Number of them that failed.
        given_up: Number of them that failed in alternation with other shapes, after they had passed alone.
        peaks: (batch size, peak bytes) of those that passed, ascending by batch size.
        surely: Batch size that passed at a longer length; 0 where there is none.
        hardly: Batch size that ran out of memory at a shorter length; None where there is none.
    """

    length: float
    target_length: float | None
    cap: int
    passed: int
    failed: int | None
    failed_by: ClosedBy | None
    tried: int
    failures: int
    given_up: int
    peaks: tuple[tuple[int, float], ...]
    surely: int
    hardly: int | None

    def step(self, tolerance: float) -> int:
        """The smallest difference in batch size that matters.

        It doubles with each batch size given up in alternation: there the limit moves with what the other shapes
        leave behind, and creeping up to it would fail again and again.
        """
        return step_at(self.passed or self.failed or 1, tolerance) << max(0, self.given_up - 1)

    @property
    def beyond(self) -> int:
        """The smallest batch size that is out of the question."""
        return self.failed if self.failed is not None else self.cap + 1

    @property
    def peak(self) -> float | None:
        """Peak of the largest batch size that passed; None where it is not known."""
        return self.peaks[-1][1] if self.peaks and self.peaks[-1][0] == self.passed else None


class Evidence:
    """What follows from a list of trials.

    Args:
        lengths: The data set.
        settings: How to search.
        trials: In the order in which they were run.
        fit: Fits the model of peak memory.
    """

    def __init__(self, lengths: Lengths, settings: SearchSettings, trials: Sequence[Trial], fit: PeakFit) -> None:
        self.lengths = lengths
        self.settings = settings
        self.trials = trials
        self._fit = fit
        self._by_shape: dict[tuple[int, float], list[Trial]] = defaultdict(list)
        self._sizes: dict[float, list[int]] = defaultdict(list)
        for trial in trials:
            if trial.outcome == "error":  # the workload's own; it was shown, mended and runs anew
                continue
            if trial.target_length != lengths.worst_target(trial.length) and not trial.confirmation:
                continue  # timed with a typical target: it says nothing of the worst
            key = (trial.batch_size, trial.length)
            if key not in self._by_shape:
                self._sizes[trial.length].append(trial.batch_size)
            self._by_shape[key].append(trial)
        self._brackets: dict[float, Bracket] = {}

    # What happened to one shape

    def tried(self, batch_size: int, length: float) -> int:
        """How many trials a shape had."""
        return len(self._by_shape.get((batch_size, length), ()))

    def passes(self, batch_size: int, length: float) -> int:
        """How many trials of a shape passed."""
        return sum(trial.outcome == "ok" for trial in self._by_shape.get((batch_size, length), ()))

    def failure(self, batch_size: int, length: float) -> Trial | None:
        """The trial that rules a shape out.

        One that ran out of memory, unless a larger shape passed: then two. Two crashes or time-outs. One that failed
        in alternation with the others.
        """
        trials = self._by_shape.get((batch_size, length), ())
        faults = [trial for trial in trials if trial.outcome in ("crash", "timeout")]
        ooms = [trial for trial in trials if trial.outcome == "oom"]
        given_up = [trial for trial in trials if trial.confirmation and trial.outcome != "ok"]
        if given_up:
            return given_up[0]
        if len(ooms) > 1 or (ooms and not self.is_dominated(batch_size, length)):
            return ooms[0]
        return faults[-1] if len(faults) > 1 else None

    def to_retry(self, length: float) -> int | None:
        """A batch size at this length that is tried once more, in a fresh worker, before its failure is believed.

        One whose only trial crashed or timed out; or ran out of memory, though a larger shape passed.
        """
        for size in self._sizes.get(length, ()):
            trials = self._by_shape[size, length]
            if len(trials) != 1 or trials[0].confirmation:
                continue
            if trials[0].outcome in ("crash", "timeout"):
                return size
            if trials[0].outcome == "oom" and self.is_dominated(size, length):
                return size
        return None

    def is_dominated(self, batch_size: int, length: float) -> bool:
        """Whether a shape passed that is at least as large in every respect, and larger in one."""
        target = self._target(length)
        return any(
            size >= batch_size and longer >= length and (size, longer) != (batch_size, length)
            for (size, longer) in self._passed
            if self._target(longer) >= target
        )

    def highest_peak(self, batch_size: int, length: float) -> int | None:
        """The highest peak that was measured for a shape; None where none is known."""
        peaks = [trial.peak_bytes for trial in self._by_shape[batch_size, length] if trial.peak_bytes is not None]
        return max(peaks, default=None)

    def median_seconds(self, batch_size: int, length: float) -> float | None:
        """The median step time of a shape; None where none is known."""
        times = [trial.step_seconds for trial in self._by_shape[batch_size, length] if trial.step_seconds is not None]
        return float(np.median(times)) if times else None

    @cached_property
    def _passed(self) -> list[tuple[int, float]]:
        return [shape for shape in self._by_shape if self.passes(*shape)]

    @cached_property
    def _ran_out(self) -> list[tuple[int, float]]:
        return [shape for shape in self._by_shape if (trial := self.failure(*shape)) and trial.outcome == "oom"]

    def _target(self, length: float) -> float:
        return self.lengths.worst_target(length) or 0.0

    # What is known at one length

    def cap(self, length: float) -> int:
        """The largest batch size that the data can fill with examples of at most this length."""
        count = self.lengths.histogram.count_up_to(length)
        return min(count, self.settings.max_batch_size or count)

    def bracket(self, length: float) -> Bracket:
        """What is known at this length."""
        if length not in self._brackets:
            self._brackets[length] = self._bracket(length)
        return self._brackets[length]

    def _bracket(self, length: float) -> Bracket:
        sizes = sorted(self._sizes.get(length, ()))
        failures = {size: trial for size in sizes if (trial := self.failure(size, length)) is not None}
        failed = min(failures, default=None)
        passed = [size for size in sizes if self.passes(size, length) and (failed is None or size < failed)]
        peaks = [(size, peak) for size in passed if (peak := self.highest_peak(size, length)) is not None]
        cap, target = self.cap(length), self._target(length)
        surely = [size for size, longer in self._passed if longer > length and self._target(longer) >= target]
        hardly = [size for size, short in self._ran_out if short < length and self._target(short) <= target]
        return Bracket(
            length=length,
            target_length=self.lengths.worst_target(length),
            cap=cap,
            passed=max(passed, default=0),
            failed=failed,
            failed_by=None if failed is None else cast(ClosedBy, failures[failed].outcome),
            tried=len(sizes),
            failures=len(failures),
            given_up=sum(trial.confirmation for trial in failures.values()),
            peaks=tuple((size, float(peak)) for size, peak in peaks),
            surely=min(max(surely, default=0), cap),
            hardly=min(hardly, default=None),
        )

    @property
    def brackets(self) -> list[Bracket]:
        """Of every length that was tried."""
        return [self.bracket(length) for length in self._sizes]

    def closed_by(self, bracket: Bracket) -> ClosedBy | None:
        """What ends the search at this length; None where it goes on."""
        if bracket.passed >= bracket.cap:
            return "data"
        step = bracket.step(self.settings.tolerance)
        if bracket.failed is not None and bracket.failed - bracket.passed <= step and bracket.passed:
            return bracket.failed_by
        if bracket.failed == 1:
            return bracket.failed_by
        is_end = bracket.length in (self.lengths.longest, self.lengths.shortest)
        if is_end or bracket.passed == 0:
            return None
        need = self._sure_need(bracket, step)
        if need is None or bracket.peak is None:
            return None
        sure = _SURE_OF_NEED if step >= _MANY else 1.0
        return "memory" if self.usable_bytes - bracket.peak < need * step * sure else None

    def _sure_need(self, bracket: Bracket, step: int) -> float | None:
        """What one more example needs, where that is sure enough to close a length without a failure.

        Where memory grows in leaps, neither two peaks side by side nor a model through them tell the next step: they
        must agree with each other, or the model must be finer than the step.
        """
        if self.model is None or bracket.peak is None:
            return None
        by_model = self._need_by_model(bracket)
        if len(bracket.peaks) >= 2:
            own = self._own_need(bracket)
            if own is not None and abs(own - by_model) <= _AGREEMENT * by_model:
                return min(own, by_model)
        return by_model if self.model.relative_error * bracket.peak <= by_model * step else None

    def need(self, bracket: Bracket) -> float | None:
        """Bytes that one more example of this length needs: by its own trials, else by the model; None: unknown."""
        if (own := self._own_need(bracket)) is not None:
            return own
        known = [self._need_by_model(bracket)] if self.model is not None else []
        if len(bracket.peaks) == 1 and self.rest_bytes is not None:
            (size, peak) = bracket.peaks[0]
            if self.model is None or self._excess(size, bracket.length, peak) is None:
                # All that the step took beyond what is there at rest: no less than what the examples need.
                known.append((peak - self.rest_bytes) / size)
        return max(known, default=None)

    def _own_need(self, bracket: Bracket) -> float | None:
        """By two of this length's own peaks, the largest and one well below it; None where they do not tell."""
        if len(bracket.peaks) < 2:
            return None
        (small, low), (large, high) = bracket.peaks[0], bracket.peaks[-1]
        if len(bracket.peaks) > 2 and bracket.peaks[-2][0] * 2 <= large:
            small, low = bracket.peaks[-2]
        return (high - low) / (large - small) if high > low else None

    def _need_by_model(self, bracket: Bracket) -> float:
        assert self.model is not None
        need = self.model.per_example(bracket.length, bracket.target_length or 0.0)
        if bracket.peaks:
            size, peak = bracket.peaks[-1]
            return need * _bounded(self._excess(size, bracket.length, peak))
        return need * self._correction(bracket.length)

    def _excess(self, size: int, length: float, peak: float) -> float | None:
        """How many times what the model says the examples of a shape really took; None where that is not told."""
        model = self.model
        assert model is not None
        said = size * model.per_example(length, self._target(length))
        telling = model.constant + _TELLING_SHARE * (self.settings.limit_bytes - model.constant)
        if said <= 0 or peak < telling or model.constant + said <= model.floor * 1.05:
            return None
        return (peak - model.constant) / said

    def _correction(self, length: float) -> float:
        """What the nearest lengths on either side say of the model, between them by the logarithm of the length."""
        known = sorted(self._excesses.items())
        below = [item for item in known if item[0] < length]
        above = [item for item in known if item[0] > length]
        if not below or not above:
            return _bounded(above[0][1] if above else below[-1][1] if below else None)
        (short, low), (long, high) = below[-1], above[0]
        share = np.log(length / short) / np.log(long / short)
        return _bounded(float(low + share * (high - low)))

    @property
    def telling_lengths(self) -> int:
        """At how many lengths a shape has passed that tells what an example needs: two separate L from L²."""
        return len(self._excesses)

    @cached_property
    def _excesses(self) -> dict[float, float]:
        found = {}
        for length in self._sizes:
            peaks = self.bracket(length).peaks
            if peaks and (excess := self._excess(peaks[-1][0], length, peaks[-1][1])) is not None:
                found[length] = excess
        return found

    @cached_property
    def usable_bytes(self) -> float:
        """The memory that batches can really use: below the limit where shapes fail before they reach it.

        An allocator that can't use every last byte (fragments, large blocks) shows at the ends, where the search
        always goes on until a shape fails: two lengths must show it, and the more generous one counts.
        """
        limit = float(self.settings.limit_bytes)
        ends = []
        for length in self._sizes:
            bracket = self.bracket(length)
            near = bracket.failed is not None and bracket.failed - bracket.passed <= step_at(
                bracket.passed, self.settings.tolerance
            )
            if near and bracket.failed_by == "oom" and not bracket.given_up and len(bracket.peaks) > 1:
                assert bracket.failed is not None
                largest, last_peak = bracket.peaks[-1]
                ends.append(last_peak + (self._own_need(bracket) or 0.0) * (bracket.failed - largest))
        if len(ends) < 2:
            return limit
        highest = max((peak for size, length in self._passed if (peak := self.highest_peak(size, length))), default=0)
        return min(limit, max(*ends, float(highest)))

    @cached_property
    def model(self) -> CostModel | None:
        """The model of peak memory, fitted to every shape that passed; None where there are too few."""
        shapes = [
            (size, length, peak)
            for (size, length) in self._by_shape
            if self.passes(size, length) and (peak := self.highest_peak(size, length)) is not None
        ]
        if len(shapes) < 2:
            return None
        sizes, lengths, peaks = zip(*shapes, strict=True)
        return self._fit(sizes, lengths, peaks, self._targets_of(lengths))

    @cached_property
    def inverse_model(self) -> CostModel | None:
        """The share of the memory that one example needs, fitted to the batch sizes that were found to be largest.

        For systems that tell no peaks: at the limit, batch size × need = memory.
        """
        found = []
        for length in self._sizes:
            bracket = self.bracket(length)
            if bracket.passed and self.closed_by(bracket) not in (None, "data"):
                found.append((length, 1 / ((bracket.passed + bracket.beyond) / 2)))
        if not found:
            return None
        if len(found) == 1:
            ((length, share),) = found
            return CostModel(floor=0.0, constant=0.0, linear=share / length, quadratic=0.0, relative_error=0.0)
        lengths, shares = zip(*found, strict=True)
        return self._fit([1.0] * len(found), lengths, shares, self._targets_of(lengths))

    @cached_property
    def rest_bytes(self) -> int | None:
        """In use between trials: the parameters, the optimizer's state; None where it is not known."""
        known = [trial.rest_bytes for trial in self.trials if trial.outcome == "ok" and trial.rest_bytes is not None]
        return min(known, default=None)

    def _targets_of(self, lengths: Sequence[float]) -> list[float] | None:
        return None if self.lengths.targets is None else [self._target(length) for length in lengths]

    @cached_property
    def knows_peaks(self) -> bool:
        """Whether the system tells peaks; also where nothing has passed yet."""
        return not self._passed or any(self.highest_peak(*shape) is not None for shape in self._passed)


def _bounded(excess: float | None) -> float:
    return 1.0 if excess is None else min(max(excess, 1 / _MOST_CORRECTION), _MOST_CORRECTION)
