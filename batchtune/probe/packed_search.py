"""Finds the token budget of packed batches: a pure function of the trials so far, as the search of padded ones is.

A budget holds if seven micro-batches with exactly that many tokens fit. For each of them the search
brackets the most tokens between a trial that passed and one that failed; a law of the peak memory,
fitted to all that passed, says where to try next. It follows the composition that fits the fewest
tokens, and runs the others only at the budget that this one leaves.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, cast, get_args

import numpy as np

from batchtune.epochs.cost_model import (
    features_of,
    fit_packed,
    fit_terms,
    root_mean_square,
)
from batchtune.lengths import FloatArray, IntArray, Lengths
from batchtune.probe.messages import (
    IgnoresShape,
    least_budget_fails,
    pads_though,
)
from batchtune.probe.outcomes import Outcomes, Peaks, is_covered, step_at
from batchtune.probe.search import NextTrial, are_alike, longest_that_fits
from batchtune.probe.settings import ProbeSettings
from batchtune.results import BatchShape, ClosedBy, PackedModel, Trial

# The micro-batches of exactly so many tokens that are the worst for memory, and a typical one.
#
# Of all with as many tokens, that of the longest sequences has the most Σ L², that of the shortest the most sequences.
# Between them stand those with a share of their tokens in the longest, the rest in the shortest: one of them contains
# nearly every micro-batch that training packs.

Composition = Literal["longest", "99%", "95%", "80%", "halves", "typical", "shortest"]
COMPOSITIONS: tuple[Composition, ...] = get_args(Composition)
# With these, at most 1.8% of the micro-batches of long public data are contained in none, mostly none; with halves
# alone, up to all are.
_IN_LONGEST: dict[Composition, float] = {
    "longest": 1.0,
    "99%": 0.99,
    "95%": 0.95,
    "80%": 0.8,
    "halves": 0.5,
    "shortest": 0.0,
}

# So many stand for all sequences where a typical batch is drawn.
_MOST_DRAWN = 1 << 20
# What a trial may record; no training packs as many.
_MOST_SEQUENCES = 10**7


@dataclass(frozen=True, eq=False)
class _Line:
    """Sequences in a line: lengths, each so many times, shape (runs,)."""

    lengths: IntArray
    counts: IntArray

    @cached_property
    def _sums(self) -> FloatArray:
        """The tokens, their squares and the sequences of the first runs, none to all of them, shape (runs + 1, 3)."""
        lengths = self.lengths.astype(np.float64)
        of_runs = self.counts * np.stack((lengths, lengths**2, np.ones_like(lengths)))
        return np.vstack((np.zeros(3), of_runs.cumsum(axis=1).T))

    def _cut(self, tokens: int) -> tuple[int, int, int]:
        """Return how many runs fit in so many tokens, how many whole sequences of the next one, and what is left."""
        totals = self._sums[:, 0]
        whole = int(np.searchsorted(totals, tokens, side="right")) - 1
        left = tokens - int(totals[whole])
        if not left:
            return whole, 0, 0
        length = int(self.lengths[whole])
        return whole, left // length, left % length

    def first(self, tokens: int) -> list[int]:
        """Return the lengths of the first sequences that add up to this many tokens, the last of them cut."""
        whole, more, cut = self._cut(tokens)
        lengths: list[int] = np.repeat(
            self.lengths[:whole], self.counts[:whole]
        ).tolist()
        if more:
            lengths += [int(self.lengths[whole])] * more
        if cut:
            lengths.append(cut)
        return lengths

    def features(self, tokens: int) -> FloatArray:
        """Return the Σ L, Σ L² and number of the first sequences that add up to this many tokens."""
        whole, more, cut = self._cut(tokens)
        features: FloatArray = self._sums[whole].copy()
        if more:
            length = float(self.lengths[whole])
            features += more * np.array([length, length**2, 1.0])
        if cut:
            features += np.array([cut, float(cut) ** 2, 1.0])
        return features


class Compositions:
    """The compositions of a data set whose lengths are all whole tokens."""

    def __init__(self, lengths: Lengths, seed: int) -> None:
        histogram = lengths.histogram
        distinct = histogram.lengths.astype(np.int64)
        self.longest = int(distinct[-1])
        """The tokens of the longest sequence, the least budget."""
        self.all_tokens = int(
            histogram.total_of(np.array(min(lengths.count, _MOST_SEQUENCES)))
        )
        """The tokens of the whole data set, or of as many sequences as a trial can have."""
        self._shortest_first = _Line(distinct, histogram.counts)
        self._longest_first = _Line(distinct[::-1], histogram.counts[::-1])
        drawn = lengths.evenly(_MOST_DRAWN).values.astype(np.int64)
        np.random.default_rng(seed).shuffle(drawn)
        drawn = np.tile(drawn, -(-self.all_tokens // int(drawn.sum())))
        self._drawn = _Line(drawn, np.ones(drawn.size, np.int64))
        self._shapes: dict[tuple[Composition, int], BatchShape] = {}

    def shape(self, composition: Composition, tokens: int) -> BatchShape:
        """Return the batch with this many tokens."""
        key = (composition, tokens)
        if key not in self._shapes:
            lengths: list[int] = []
            for line, share in self._parts(composition, tokens):
                lengths += line.first(share)
            self._shapes[key] = BatchShape.packed(lengths)
        return self._shapes[key]

    def features(self, composition: Composition, tokens: int) -> FloatArray:
        """Return that batch's Σ L, Σ L² and number of sequences, without making it."""
        features = np.zeros(3)
        for line, share in self._parts(composition, tokens):
            features += line.features(share)
        return features

    def _parts(self, composition: Composition, tokens: int) -> list[tuple[_Line, int]]:
        """Return the lines that a batch begins, and how many of its tokens are from each."""
        if composition == "typical":
            return [(self._drawn, tokens)]
        in_longest = round(_IN_LONGEST[composition] * tokens)
        return [
            (self._longest_first, in_longest),
            (self._shortest_first, tokens - in_longest),
        ]

    def padded_alike(self, sequences: int) -> BatchShape:
        """Return one longest sequence and short ones: padded, the shape of `sequences` longest ones."""
        shortest = int(self._shortest_first.lengths[0])
        return BatchShape.packed([self.longest, *[shortest] * (sequences - 1)])


MOST_TRIALS = 15
"""Until all run in turns, those that prove the budget included; what fails there, or is tried again, takes more.

So does a second budget, where the margin has grown too much to prove the first.
"""
MOST_UNEVEN_TRIALS = 18
"""The same where no even law explains the peaks, or all are equal: only all tokens show if the batch is ignored."""

# The second trial has so many times the tokens of the longest sequence, where failures are dear so many.
_FIRST_STEP = 4
_FIRST_DEAR_STEP = 2
_LEAST_STEP = 1.3
# Where the batch is little of the memory, it says little about the limit: no more than so many times its tokens.
_LITTLE = 0.1
_FARTHEST = 8
# A law that misses its trials by more is trusted less than a composition's own last two.
_MISFIT = 0.02
# A law with the square of all tokens, as of a mask over the whole row, must miss by less than this share of the other.
_WORTH_A_TERM = 0.5
# The first batch that is compared has so many times the tokens of the longest sequence.
_CONTRAST = 1.25
# Padding test: a batch with half of its tokens in the shortest sequences takes this much more memory than one of the
# longest ones alone, relative to that batch's growth: suspect padding. The workload pads if padding alone explains
# `_AS_PADDED` of the difference.
_SUSPICIOUS = 0.25
_AS_PADDED = 0.75
# Peaks of so near numbers of tokens, as a share, differ by chance.
_APART = 0.05
# With fewer trials above a floor, all that exceeds it is taken to be in proportion to the tokens.
_FEWEST_ABOVE_A_FLOOR = 4
# What holds by now is a poor budget if it is below this share of what the law says.
_FAR_BELOW = 0.9
# A failure below the law's limit: an allocator may fail to use this share of the memory; what fails below is a leap.
_UNUSABLE = 0.03


@dataclass(slots=True)
class PackedTask:
    """The goal of a search: the data, the memory, and the steps that were run in turns so far.

    Attributes:
        cap: The largest budget that is tried: all tokens of the data, or --max-tokens.
        expandable: Whether the device's allocator has expandable segments.
    """

    compositions: Compositions
    settings: ProbeSettings
    limit_bytes: int
    cap: int
    steps: list[Trial] = field(default_factory=list)
    expandable: bool = False


def _well_below(tokens: int, last: int) -> bool:
    """Return whether so many tokens are so far below the last that their peaks show a slope."""
    return tokens <= last * (1 - _APART)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBracket:
    """The bounds of the tokens of one composition.

    Attributes:
        low: The most that are proven, or 0.
        high: The fewest above that failed, or ran without leaving the margin; above the cap: none did.
        high_by: What ended it there.
        ran: (tokens, peak bytes) of those that ran, ascending.
        failures: How many failed.
        step: The smallest difference that matters; it doubles with each that failed in turns after the first.
    """

    composition: Composition
    low: int
    high: int
    high_by: ClosedBy
    ran: tuple[tuple[int, float], ...]
    failures: int
    step: int

    @property
    def has_crept(self) -> bool:
        """Whether the last two that ran are proven and near each other, but the limit is not: the law is wrong here."""
        if len(self.ran) < 2 or self.ran[-1][0] != self.low:
            return False
        return not _well_below(self.ran[-2][0], self.low)


@dataclass(frozen=True, slots=True)
class _Limit:
    """The most tokens of a composition: the proven ones if something closes it, else where to try next."""

    bracket: TokenBracket
    tokens: int
    closed_by: ClosedBy | None


@dataclass(frozen=True, slots=True, eq=False)
class _Law:
    """Peak bytes by the features of a batch.

    Attributes:
        coefficients: Of 1, Σ L, Σ L², the number of sequences, and of (Σ L)² where the trials show that.
        floor: What small batches take whatever their size, as by the optimizer's step; 0 without one.
        error: Root mean square of fit / measured - 1.
    """

    coefficients: FloatArray
    floor: float
    error: float

    @classmethod
    def of(
        cls, features: FloatArray, peaks: FloatArray, rest_bytes: float, equal: float
    ) -> _Law:
        """Fit it to the features of batches, shape (batches, 3), and their peaks, which are equal to within `equal`.

        Above a floor, nothing but what is in use between steps may show the constant part.
        """
        tokens = features[:, 0]
        is_flat = peaks <= peaks.min() + equal
        floor = 0.0
        if np.ptp(tokens[is_flat]) > tokens.min() and not is_flat.all():
            floor = float(peaks.min())
            features = np.vstack((features[~is_flat], np.zeros(3)))
            peaks = np.append(peaks[~is_flat], max(rest_bytes, 1.0))
            if len(peaks) - 1 < _FEWEST_ABOVE_A_FLOOR:
                features[:, 1:] = 0.0  # they can't tell the terms apart
        plain, errors = fit_terms(features, peaks)
        error = root_mean_square(errors)
        with_row = np.column_stack((features, features[:, 0] ** 2))
        dense, dense_errors = fit_terms(with_row, peaks)
        dense_error = root_mean_square(dense_errors)
        if error > _MISFIT and dense_error < _WORTH_A_TERM * error:
            return cls(dense, floor, dense_error)
        return cls(np.append(plain, 0.0), floor, error)

    def __call__(self, features: FloatArray) -> float:
        """Return the peak of a batch, in whole bytes: how a processor rounds a fit must not decide what is tried."""
        terms = np.array([1.0, *features, features[0] ** 2])
        return max(self.floor, round(float(self.coefficients @ terms)))


class PackedKnowledge(Outcomes):
    """All that is known from a list of trials; derived from them, never stored.

    If `confirmed` is not None, a batch can only be proven if one of the confirmed batches contains
    it.
    """

    def __init__(
        self,
        task: PackedTask,
        trials: Sequence[Trial],
        confirmed: Collection[BatchShape] | None = None,
    ) -> None:
        alone = [trial for trial in trials if not trial.shuffled]
        super().__init__(
            alone,
            Peaks(task.limit_bytes, trials, task.steps, expandable=task.expandable),
        )
        self.task = task
        self.confirmed = confirmed
        self.tolerance = self.peaks.told_apart(task.settings.tolerance)

    def shapes(self, tokens: int) -> dict[Composition, BatchShape]:
        """Return the batches with this many tokens that prove a budget; some may be the same."""
        compositions = self.task.compositions
        return {name: compositions.shape(name, tokens) for name in COMPOSITIONS}

    def unproven(self, tokens: int) -> list[Composition]:
        """Return the compositions that are not proven with this many tokens, those that take the most memory first."""
        missing = [
            name for name, shape in self.shapes(tokens).items() if not self.holds(shape)
        ]
        return sorted(missing, key=lambda name: -(self.predicted(name, tokens) or 0.0))

    def holds(self, shape: BatchShape) -> bool:
        """Return whether a batch is proven, by its own trial or by that of one that contains it."""
        if self.confirmed is not None and not is_covered(shape, self.confirmed):
            return False
        return shape not in self.failures and self.proof(shape) is not None

    @cached_property
    def budgets(self) -> list[int]:
        """The numbers of tokens that were tried, ascending."""
        return sorted({shape.tokens for shape in self.of_shape})

    @property
    def proven_budget(self) -> int | None:
        """The largest budget whose compositions are all proven, and leave free what turns lacked; None without one."""
        below = min(bracket.high for bracket in self.brackets.values())
        budgets = [self._in_training(tokens) for tokens in self.budgets]
        held = (tokens for tokens in budgets if not self.unproven(tokens))
        return max((tokens for tokens in held if tokens < below), default=None)

    def _in_training(self, tokens: int) -> int:
        peaks = [self.peaks.highest(shape) for shape in self.shapes(tokens).values()]
        share = self.peaks.share_in_a_table(max(peak or 0 for peak in peaks))
        return max(self.task.compositions.longest, int(tokens * share))

    @property
    def reached_budget(self) -> int | None:
        """The most tokens that passed in each composition that ran, by now; None if the longest sequence did not."""
        lows = [bracket.low for bracket in self.brackets.values() if bracket.ran]
        if not self.brackets["longest"].low:
            return None
        return min(low for low in lows if low)

    @property
    def oom_tokens(self) -> int | None:
        """The fewest tokens that ran out of memory; None if none did."""
        ooms = [
            shape.tokens
            for shape, failure in self.failures.items()
            if failure.outcome == "oom"
        ]
        return min(ooms, default=None)

    @cached_property
    def brackets(self) -> dict[Composition, TokenBracket]:
        """The bounds of each composition."""
        return {name: self._bracket(name) for name in COMPOSITIONS}

    def shapes_of(self, name: Composition) -> dict[int, BatchShape]:
        """Return the batches of a composition, by the numbers of tokens that were tried."""
        shape = self.task.compositions.shape
        return {tokens: shape(name, tokens) for tokens in self.budgets}

    def _bracket(self, name: Composition) -> TokenBracket:
        cap = self.task.cap
        tried = self.tried(self.shapes_of(name), beyond=cap + 1)
        failed = tried.failed or cap + 1
        high = min(failed, tried.over_margin or failed)
        high_by: ClosedBy = "memory"
        if high in tried.failures:
            high_by = cast(ClosedBy, tried.failures[high].outcome)
        step = step_at(tried.passed or high, self.tolerance)
        return TokenBracket(
            composition=name,
            low=tried.passed,
            high=high,
            high_by=high_by,
            ran=tried.peaks,
            failures=len(tried.failures),
            step=step << max(0, tried.given_up - 1),
        )

    # What the peaks say

    @cached_property
    def room_bytes(self) -> float:
        """The memory that a proven batch can use."""
        return self.peaks.room_bytes

    @cached_property
    def measured(self) -> tuple[list[BatchShape], list[float]]:
        """The batches that passed, and their peaks in bytes."""
        shapes = []
        peaks = []
        for shape in self.of_shape:
            peak = self.peaks.highest(shape)
            if shape in self.passed and peak:
                shapes.append(shape)
                peaks.append(float(peak))
        return shapes, peaks

    @property
    def is_uneven(self) -> bool:
        """Whether the law misses its trials, or there is nothing to fit: nothing failed, and all took equal memory."""
        if self.law is not None and self.law.error > _MISFIT:
            return True
        _, peaks = self.measured
        return not self.failures and max(peaks) - min(peaks) <= self.peaks.margin.bytes

    @property
    def time_model(self) -> PackedModel | None:
        """The model of the step time, fitted to all that passed."""
        known = {}
        for shape in (
            self.of_shape
        ):  # in the order of the trials: sums are rounded by their order
            seconds = self.median_seconds(shape)
            if shape in self.passed and seconds:
                known[shape] = seconds
        return fit_packed(list(known), list(known.values()))

    @cached_property
    def law(self) -> _Law | None:
        """The law of memory, by all that passed; None if only one composition did, which can't tell its terms apart."""
        shapes, peaks = self.measured
        if set(shapes) <= set(self.shapes_of("longest").values()):
            return None
        return _Law.of(
            np.array([features_of(shape) for shape in shapes], dtype=np.float64),
            np.array(peaks),
            rest_bytes=float(self.peaks.rest_bytes or 0),
            equal=float(self.peaks.margin.bytes),
        )

    @property
    def needs_a_mask(self) -> bool:
        """Whether memory grows with the square of all tokens."""
        return self.law is not None and bool(self.law.coefficients[-1] > 0)

    def predicted(self, name: Composition, tokens: int) -> float | None:
        """Return the peak of a batch: by the law, through the last trial of its composition; None if unknown."""
        ran = self.brackets[name].ran
        if len(ran) > 1 and (self.law is None or self.law.error > _MISFIT):
            last, peak = ran[-1]
            before, low = max(
                (
                    tokens_and_peak
                    for tokens_and_peak in ran
                    if _well_below(tokens_and_peak[0], last)
                ),
                default=ran[0],
            )
            return peak + max(0.0, peak - low) * (tokens - last) / (last - before)
        if self.law is None:
            return None
        features = self.task.compositions.features
        by_law = self.law(features(name, tokens))
        if not ran:
            return by_law
        last, peak = ran[-1]
        return by_law + peak - self.law(features(name, last))

    # Where to try next

    def limit(self, bracket: TokenBracket) -> _Limit:
        """Return the most tokens of a composition, as far as they are known."""
        cap = self.task.cap
        low = bracket.low
        if low >= cap:
            return _Limit(bracket, cap, "data")
        if low and bracket.high - low <= bracket.step:
            return _Limit(bracket, low, bracket.high_by)
        if low and self._leaves_no_room(bracket):
            return _Limit(bracket, low, "memory")
        return _Limit(bracket, self._guess(bracket), None)

    def _leaves_no_room(self, bracket: TokenBracket) -> bool:
        """Return whether a step more surely does not fit, by the peaks of the composition and the law."""
        peaks = dict(bracket.ran)
        beyond = min(bracket.low + bracket.step, self.task.cap)
        more = self.predicted(bracket.composition, beyond)
        if more is None or bracket.low not in peaks:
            return False
        peak = peaks[bracket.low]
        here = self.predicted(bracket.composition, bracket.low)
        assert here is not None
        # The need is known to a few per cent, which is at least a token if a step is many.
        need = 0.9 * (more - here)
        return 0 < need and self.room_bytes - peak < need

    def _guess(self, bracket: TokenBracket) -> int:
        """Return how many tokens to try next."""
        cap = self.task.cap
        least = self.task.compositions.longest
        lowest = max(least, bracket.low + 1)
        if bracket.low:
            lowest = max(lowest, min(bracket.low + bracket.step, bracket.high - 1))
        highest = min(cap, self._reach(bracket))
        if bracket.high <= cap:
            highest = min(highest, bracket.high - 1)
        guess = max(lowest, self._by_law(bracket, lowest, highest))
        if bracket.has_crept:
            guess = min(highest, self._by_last_step(bracket))
            if bracket.high <= cap:
                guess = min(guess, (bracket.low + bracket.high) // 2)
            return max(lowest, guess)
        if bracket.high > cap or guess < bracket.high - bracket.step:
            return guess
        # A failure refutes the guess. Not all memory may be usable, or memory leaps somewhere below.
        near = bracket.step
        # What ran, but left too little of the margin, shows how much memory there is.
        if bracket.high_by != "memory":
            near = max(near, int(_UNUSABLE * bracket.high))
        beyond = self.predicted(bracket.composition, min(cap, bracket.high + near))
        is_near = beyond is not None and beyond > self.room_bytes
        if is_near and bracket.failures < 2 and bracket.high - near > bracket.low:
            return max(lowest, bracket.high - near)
        low = max(bracket.low, least)
        if bracket.high > 2 * low:
            return max(lowest, int((low * bracket.high) ** 0.5))
        return max(lowest, (low + bracket.high) // 2)

    def _reach(self, bracket: TokenBracket) -> int:
        """Return how far the trials of a composition lead at most."""
        dear = self.task.settings.failures_are_dear
        first_step = _FIRST_STEP
        if dear:
            first_step = _FIRST_DEAR_STEP
        if bracket.low and not bracket.ran:
            return first_step * bracket.low
        if not bracket.ran:
            return self.task.cap
        last, peak = bracket.ran[-1]
        rest = float(self.peaks.rest_bytes or 0)
        used = max(1.0, peak - rest)
        # As if all that is not in use between steps grew with the tokens.
        in_proportion = int(last * (self.room_bytes - rest) / used)
        if self.law is None:
            # A floor of memory would hold it at the first batch.
            least = int(_LEAST_STEP * last)
            return min(first_step * last, max(least, int(0.9 * in_proportion)))
        is_telling = used >= _LITTLE * (self.room_bytes - rest)
        is_trusted = len(bracket.ran) > 2 and self.law.error <= _MISFIT
        if dear and is_telling and not is_trusted:
            return max(int(_LEAST_STEP * last), in_proportion)
        return _FARTHEST * last

    def _by_last_step(self, bracket: TokenBracket) -> int:
        """Return the tokens at the limit if memory grows on as between the last two; the cap if it did not grow."""
        (before, low), (last, peak) = bracket.ran[-2:]
        if peak - low <= self.peaks.margin.bytes:
            return self.task.cap
        return last + int((self.room_bytes - peak) * (last - before) / (peak - low))

    def _by_law(self, bracket: TokenBracket, lowest: int, highest: int) -> int:
        """Return the most tokens within bounds that leave room for half a step, by the law."""
        name = bracket.composition
        if self.predicted(name, highest) is None:
            return highest
        passed = lowest - 1
        failed = highest + 1
        while failed - passed > 1:
            tokens = (passed + failed) // 2
            half_a_step = step_at(tokens, self.tolerance) // 2
            predicted = self.predicted(name, min(tokens + half_a_step, highest))
            if predicted is not None and predicted <= self.room_bytes:
                passed = tokens
            else:
                failed = tokens
        return passed


class PackedSearch:
    """Finds the largest token budget with which every composition fits."""

    def __init__(
        self, lengths: Lengths, settings: ProbeSettings, limit_bytes: int
    ) -> None:
        compositions = Compositions(lengths, settings.seed)
        cap = min(settings.max_tokens or np.inf, compositions.all_tokens)
        self.task = PackedTask(compositions, settings, limit_bytes, int(cap))
        self._lengths = lengths
        self._least = compositions.longest
        self._first = compositions.shape("longest", self._least)

    def known(
        self, trials: Sequence[Trial], confirmed: Collection[BatchShape] | None = None
    ) -> PackedKnowledge:
        """Return the conclusions from the trials."""
        return PackedKnowledge(self.task, trials, confirmed)

    def propose(self, trials: Sequence[Trial]) -> NextTrial | None:
        """Return what to try next, or None if all is known.

        Raises what `FrontierSearch.propose` does, ProbeError if the longest sequence fits but the
        same number of tokens of others does not, or WorkloadError if the workload pads its batches.
        """
        known = self.known(trials)
        task = self.task
        if self._first in known.failures:
            return longest_that_fits(
                known,
                self._lengths,
                lambda length: BatchShape.packed([int(length)]),
                task.settings.workload,
            )
        for shape in known.of_shape:
            if known.needs_retry(shape):
                return NextTrial(shape, fresh=True)
        if self._first not in known.passed:
            return NextTrial(self._first)
        wanted = self._contrast(known) or self._at_the_limit(known)
        # A batch that was tried shows nothing new: the search must not go in circles.
        if wanted is None or wanted in known.of_shape:
            return None
        return NextTrial(wanted)

    def _contrast(self, known: PackedKnowledge) -> BatchShape | None:
        """Return a batch that tells apart what memory depends on; None if that is known.

        The same tokens, half of them in the shortest sequences, tell the cost of a sequence. If they take far more than
        all in the longest ones, the workload may pad: then one of the longest with a few of the shortest takes as much
        as a few of the longest. Raises WorkloadError if it does.
        """
        bracket = known.brackets["longest"]
        least = _CONTRAST * self._least
        budgets = [tokens for tokens, _ in bracket.ran if tokens >= least]
        if not budgets:
            return None
        tokens = budgets[0]
        compositions = self.task.compositions
        longest = compositions.shape("longest", tokens)
        halves = compositions.shape("halves", tokens)
        if halves not in known.of_shape:
            return halves
        first = known.peaks.highest(self._first) or 0
        grown = (known.peaks.highest(longest) or 0) - first
        if grown <= known.peaks.margin.bytes:
            return None
        excess = (known.peaks.highest(halves) or np.inf) - first - grown
        alike = compositions.padded_alike(longest.batch_size)
        tells = 2 * (alike.tokens - self._least) < tokens - self._least
        if excess < _SUSPICIOUS * grown or not tells:
            return None
        if alike not in known.of_shape:
            return alike
        grown_alike = (known.peaks.highest(alike) or 0) - first
        if grown_alike > _AS_PADDED * grown:
            trials = map(known.passed_trial, (self._first, longest, alike))
            raise pads_though(self.task.settings.workload, trials)
        return None

    def _at_the_limit(self, known: PackedKnowledge) -> BatchShape | None:
        """Return the batch to try at the limit of some composition, or to prove what is left."""
        limits = [known.limit(bracket) for bracket in known.brackets.values()]
        self._check(known)
        settled = min(
            (limit.tokens for limit in limits if limit.closed_by), default=None
        )
        still_open = [limit for limit in limits if limit.closed_by is None]
        worst = min(still_open, key=lambda limit: limit.tokens, default=None)
        shape_of = self.task.compositions.shape
        if worst is not None and not self._is_settled(known, settled, worst):
            trials_left = self._trials_left(known)
            if trials_left > len(COMPOSITIONS):
                return shape_of(_telling(known, worst), worst.tokens)
            # By now, what holds as far as is known: numbers of tokens that ran, or a little below what failed.
            candidates = list(known.budgets)
            nearest = min(known.brackets.values(), key=lambda bracket: bracket.high)
            if trials_left > 0:
                below = int((1 - _UNUSABLE) * nearest.high)
                candidates.append(max(self._least, below))
            held = [
                tokens
                for tokens in candidates
                if tokens <= self.task.cap and self._seems_to_hold(known, tokens)
            ]
            settled = max(held, default=known.budgets[0])
            # Nothing near the limit may hold any more where the margin has grown. Without trials left, a budget well
            # below it takes no more of them than a small one.
            well_below = max(self._least, int(_FAR_BELOW * worst.tokens))
            near = well_below
            if not known.is_uneven:
                near = worst.tokens - step_at(worst.tokens, known.tolerance)
            if trials_left > 0 and settled < near:
                settled = worst.tokens
            elif (
                nearest.high_by == "memory"  # it ran, but left too little
                and trials_left > -len(COMPOSITIONS)
                and settled < _FAR_BELOW * well_below
            ):
                settled = well_below
        assert settled is not None
        for name in known.unproven(settled):
            return shape_of(name, settled)
        return None

    def _is_settled(
        self, known: PackedKnowledge, settled: int | None, worst: _Limit
    ) -> bool:
        """Return whether all seem to hold the tokens that some hold; `worst` has the least limit yet to be found."""
        if settled is None:
            return False
        step = step_at(settled, known.tolerance)
        return worst.tokens >= settled - step and self._seems_to_hold(known, settled)

    def _seems_to_hold(self, known: PackedKnowledge, tokens: int) -> bool:
        """Return whether each composition is proven with so many tokens, or nothing speaks against it."""
        for bracket in known.brackets.values():
            predicted = known.predicted(bracket.composition, tokens) or 0.0
            is_proven = bracket.low >= tokens
            if not is_proven and (
                bracket.high <= tokens or predicted > known.room_bytes
            ):
                return False
        return True

    def _trials_left(self, known: PackedKnowledge) -> int:
        """Return how many trials the search may take yet; each batch that fails in turns gives it more."""
        counted = [trial for trial in known.trials if trial.outcome != "error"]
        given_up = sum(trial.confirmation for trial in known.trials)
        most = MOST_TRIALS
        if known.is_uneven:
            most = MOST_UNEVEN_TRIALS
        return most + len(COMPOSITIONS) * given_up - len(counted)

    def _check(self, known: PackedKnowledge) -> None:
        """Raise what the trials show to be wrong: nothing depends on the batch, or not even the least budget fits."""
        for bracket in known.brackets.values():
            if bracket.high <= self._least:
                shape = self.task.compositions.shape(bracket.composition, self._least)
                raise least_budget_fails(
                    self._lengths,
                    self.task.limit_bytes,
                    known.failures.get(shape) or known.passed_trial(shape),
                )
        equal = self.equal_batches(known)
        if equal is not None:
            raise equal

    def equal_batches(self, known: PackedKnowledge) -> IgnoresShape | None:
        """Return an error if the longest sequence, and all tokens that may be tried, take the same; None if not."""
        largest = self.task.compositions.shape("longest", self.task.cap)
        ratio = self.task.cap / self._least
        shapes = (self._first, largest)
        if not are_alike(known, shapes, ratio):
            return None
        return IgnoresShape(
            self._lengths,
            self.task.settings.workload,
            [known.passed_trial(shape) for shape in shapes],
        )

    # Results

    def closed_by(self, known: PackedKnowledge, tokens: int) -> ClosedBy:
        """Return why a proven budget is not larger."""
        if tokens >= self.task.cap:
            return "data"
        nearest = min(known.brackets.values(), key=lambda bracket: bracket.high)
        is_near = nearest.high - tokens <= 2 * nearest.step
        by_memory = any(
            known.limit(bracket).closed_by == "memory"
            for bracket in known.brackets.values()
        )
        if nearest.high > self.task.cap or (by_memory and not is_near):
            return "memory"
        return nearest.high_by

    def does_not_fit(self, trials: Sequence[Trial]) -> bool:
        """Return whether the longest sequence alone failed."""
        return self._first in self.known(trials).failures

    def progress(self, trials: Sequence[Trial]) -> tuple[int, int]:
        """Return how many trials there were, and how many there will be at most."""
        if self.does_not_fit(trials):
            distinct = self._lengths.histogram.lengths.size
            most = 2 + (distinct - 2).bit_length()
        else:
            most = MOST_TRIALS
        return len(trials), max(len(trials) + 1, most)


def _telling(known: PackedKnowledge, worst: _Limit) -> Composition:
    """Return the composition to try: where the number of sequences is too much in the halves, that of the shortest."""
    brackets = known.brackets
    is_by_number = brackets["longest"].low >= brackets["halves"].high
    if (
        worst.bracket.composition == "halves"
        and is_by_number
        and brackets["shortest"].low < worst.tokens < brackets["shortest"].high
    ):
        return "shortest"
    return worst.bracket.composition
