"""The time of one training step: the model, and the measurements that it passes through."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from batchtune.epochs.cost.fitting import fit_cost, needs_targets, predict, scaled
from batchtune.lengths import FloatArray
from batchtune.results import CostModel, Trial

# The relative error that no repetition of a measurement reduces: the model's own, and that of another day.
_MODEL_ERROR = 0.05
# The relative error of the time of a single step.
_ONE_STEP_ERROR = 0.1
# The standard error of a median of n normal values, as a share of their interquartile range over √n.
_ERROR_OF_MEDIAN = 1.2533 / 1.349
# Slow steps that no trial may have seen, which the error of the mean allows for: half the square of two standard
# errors, as in the score interval of a count (Wilson 1927). And how many medians longer each may take.
_UNSEEN_STEPS = 2.0
_SLOW_EXCESS = 2.0
# The share of the leave-one-out error that all shapes have in common: if the true law has another form than the
# model, as where another kernel takes over, neighbours are missed in the same direction.
_MISSED_ALIKE = 0.5
# At least this share of its square is not noise: noise can't be told apart exactly.
_LEAST_MISSED = 0.5
# Least squares of relative errors are too low by no more than this multiple of the noise's mean square.
_MOST_BIAS = 4.0
# About as many terms as a model has.
_MODEL_TERMS = 4
# Shapes at a time, so that the distances to all measurements stay in the processor's cache.
_CHUNK = 4096
# A squared distance at which the other measurements weigh nothing.
_SAME = 1e-20


class _Timed:
    """The batch shapes that were timed, in the order of their first trials; arrays of shape (measured,)."""

    def __init__(self, trials: Sequence[Trial], *, with_targets: bool) -> None:
        """Take the shapes of trials that passed; targets tell them apart only `with_targets`."""
        # The standard error of the mean over the median is common to all times.
        mean_to_median, self.common_error = _mean_to_median(trials)
        by_shape: dict[tuple[int, float, float | None], list[Trial]] = defaultdict(list)
        for trial in trials:
            if trial.outcome == "ok" and trial.step_seconds:
                by_shape[trial.batch_size, trial.length, trial.target_length if with_targets else None].append(trial)
        seconds = []
        errors = []
        noise = []
        for same in by_shape.values():
            # A single step needs no factor.
            expected = [(trial.step_seconds or 0.0) * (mean_to_median if _steps(trial) > 1 else 1.0) for trial in same]
            seconds.append(np.median(expected))
            errors.append(np.median([_error(trial) for trial in same]) / math.sqrt(len(same)))
            # The quartiles of few steps lie closer together: those of 3 by the factor 0.63.
            steps = max(2.0, float(np.median([_steps(trial) for trial in same])))
            noise.append(errors[-1] / (1 - 1.1 / steps))
        shapes = np.array(list(by_shape), dtype=np.float64).reshape(-1, 3)  # an unknown target is NaN
        self.sizes, self.lengths, targets = np.ascontiguousarray(shapes.T)
        self.targets = targets if with_targets and not np.isnan(targets).any() else None
        # The expected time of a step, the median over its trials times the mean over the median; its relative error.
        self.seconds = np.array(seconds)
        self.errors = np.array(errors)
        self.noise = np.array(noise)  # the same error, not too small if the steps are few
        self.weights = _MODEL_ERROR / np.hypot(_MODEL_ERROR, self.errors)


def fit_step_seconds(trials: Sequence[Trial]) -> CostModel | None:
    """Fit the model of a step's expected time to trials; None if too few passed.

    Each shape counts once, with the median of its trials, and the less the more its steps' times differ. All are
    multiplied by the mean over the median of a step, if the trials have means. Least squares of relative errors come
    out too low, by about twice the square of the noise: the model is scaled to the measured times' mean ratio to it, as
    far as noise can be the reason.
    """
    timed = _Timed(trials, with_targets=True)
    model = fit_cost(timed.sizes, timed.lengths, timed.seconds, timed.targets, weights=timed.weights)
    if model is None:
        return None
    ratios = timed.seconds / predict(model, timed.sizes, timed.lengths, timed.targets)
    mean_ratio = float(ratios.mean())  # not weighted: steps that were slow make a time less certain
    by_noise = _MOST_BIAS * float(np.mean(timed.noise**2))
    return scaled(model, min(max(mean_ratio, 1 - by_noise), 1 + by_noise))


@dataclass(frozen=True, slots=True, eq=False)
class StepTimes:
    """Seconds that one training step of any batch shape takes on average: an epoch is a sum of steps.

    At a measured shape it is the measured median times the mean over the median of all trials: a single trial is too
    short to see the steps that are slow only now and then. Elsewhere it is the model times a correction: the geometric
    mean of the measured ratios to the model, weighted by the inverse fourth power of the distance (Shepard 1968) and by
    their certainty. A ratio counts only as far as noise does not explain it, also at its own shape: else the table with
    the least estimate would be one whose batches were fast by chance, and slower when trained.

    Distances are in the logarithms of the length, of the padded length and, if the time depends on it, of the target
    length. The model takes part as if measured at a distance of 1, a factor of e away: far from all measurements it is
    alone.
    """

    model: CostModel
    points: FloatArray  # shape (coordinates, measured)
    certainty: FloatArray  # shape (measured,), from above 0 to 1
    ratios: FloatArray  # shape (measured,): the logarithm of measured / model
    errors: FloatArray  # shape (measured,): the relative standard error of each time
    kept: FloatArray  # shape (measured,), 0 to 1: the share of each ratio that counts
    common_error: float  # of the mean over the median, which all times have in common

    @classmethod
    def of(cls, trials: Sequence[Trial], model: CostModel) -> StepTimes:
        """Return the times of trials that passed, and of other shapes by a model that was fitted to them."""
        timed = _Timed(trials, with_targets=needs_targets(model))
        ratios = np.log(timed.seconds / predict(model, timed.sizes, timed.lengths, timed.targets))
        return cls(
            model=model,
            points=_coordinates(timed.sizes, timed.lengths, timed.targets),
            certainty=np.float_power(timed.weights, 2),
            ratios=ratios,
            errors=timed.errors,
            kept=_beyond_noise(ratios, timed.noise),
            common_error=timed.common_error,
        )

    def __call__(
        self, batch_sizes: npt.ArrayLike, lengths: npt.ArrayLike, target_lengths: npt.ArrayLike | None = None
    ) -> FloatArray:
        """Return the seconds of one step of each batch shape; arguments and errors are those of `predict`."""
        seconds = predict(self.model, batch_sizes, lengths, target_lengths)
        if not self.ratios.size:
            return seconds
        corrected = seconds.reshape(-1).copy()
        for part, closeness in self._chunks(seconds.shape, batch_sizes, lengths, target_lengths):
            logarithm = (self.certainty * self.kept * self.ratios) @ closeness / (self.certainty @ closeness + 1.0)
            corrected[part] *= np.exp(logarithm)
        return cast(FloatArray, corrected.reshape(seconds.shape))

    @property
    def sigmas(self) -> FloatArray:
        """The standard deviations of the logarithms that the times are made of, shape (measured + 2,).

        For a measured ratio: the root of the sum of squares of its own standard error and the leave-one-out error,
        which stands for shapes that were not measured. Next to last, for the model: its error over the trials it was
        fitted to. Last, for all times in common: the error of the mean over the median, and half of the leave-one-out
        error.
        """
        missed = 0.0
        if self.ratios.size:
            closeness = self._closeness(self.points)
            np.fill_diagonal(closeness, 0.0)
            weights = self.certainty[:, None] * closeness / (self.certainty @ closeness + 1.0)
            square = np.mean(((self.kept * self.ratios) @ weights - self.ratios) ** 2)
            noise = np.mean(self.errors**2 + (self.kept * self.errors) ** 2 @ weights**2)
            missed = math.sqrt(max(square - noise, _LEAST_MISSED * square))
        common = math.hypot(self.common_error, _MISSED_ALIKE * missed)
        # What is noise in the model's misses is smaller in the model itself, which has few terms.
        model = self.model.relative_error**2
        if self.errors.size:
            of_chance = float(np.minimum(model, np.mean(self.errors**2)))
            model += of_chance * (min(1.0, _MODEL_TERMS / self.errors.size) - 1)
        return np.append(np.hypot(self.errors, missed), (math.sqrt(model), common))

    def sensitivities(
        self, batch_sizes: npt.ArrayLike, lengths: npt.ArrayLike, targets: npt.ArrayLike | None, counts: npt.ArrayLike
    ) -> tuple[float, FloatArray]:
        """Return the seconds of many steps, and their derivatives by the logarithms of `sigmas`, shape (measured + 2,).

        A step's time is common · model^W₀ · Π measured_p^W_p with weights that add up to 1, so its derivative by the
        logarithm of measured_p is W_p times itself, and by that of the common factor, itself. There are `counts` steps
        of each shape, not necessarily whole; the other arguments and errors are those of `predict`.
        """
        each = self(batch_sizes, lengths, targets)
        seconds = np.broadcast_to(np.asarray(counts, dtype=np.float64), each.shape).reshape(-1) * each.reshape(-1)
        gradient = np.zeros(self.ratios.size + 2)
        for part, closeness in self._chunks(each.shape, batch_sizes, lengths, targets):
            shared = seconds[part] / (self.certainty @ closeness + 1.0)
            gradient[:-2] += self.certainty * self.kept * (closeness @ shared)
        gradient[-2] = seconds.sum() - gradient[:-2].sum()
        gradient[-1] = seconds.sum()
        return float(seconds.sum()), gradient

    def _chunks(
        self, shape: tuple[int, ...], batch_sizes: npt.ArrayLike, lengths: npt.ArrayLike, targets: npt.ArrayLike | None
    ) -> Iterator[tuple[slice, FloatArray]]:
        """Yield the closeness of batch shapes, broadcast to `shape` and made flat, a few at a time."""
        given = [batch_sizes, lengths, *([targets] if targets is not None and needs_targets(self.model) else [])]
        flat = [np.broadcast_to(np.asarray(values, dtype=np.float64), shape).reshape(-1) for values in given]
        for start in range(0, flat[0].size, _CHUNK):
            part = slice(start, start + _CHUNK)
            yield part, self._closeness(_coordinates(*(values[part] for values in flat)))

    def _closeness(self, shapes: FloatArray) -> FloatArray:
        """Return shape (measured, n): the inverse fourth powers of the distances; `shapes` is (coordinates, n)."""
        squares: FloatArray = np.full((self.ratios.size, shapes.shape[1]), _SAME)
        for points, values in zip(self.points, shapes, strict=True):
            difference = points[:, None] - values
            difference *= difference
            squares += difference
        squares *= squares
        return np.reciprocal(squares, out=squares)


def _beyond_noise(ratios: FloatArray, noise: FloatArray) -> FloatArray:
    """Return the share of each ratio's variance that is not noise: the mean of what it may be, given what was seen.

    The scatter beyond noise must exceed what chance adds to it, one standard deviation of n squares.
    """
    if not ratios.size:
        return np.ones(0)
    explained = float(np.mean(noise**2)) * (1 + math.sqrt(2 / ratios.size))
    real = max(0.0, float(np.mean(ratios**2)) - explained)
    return np.where(noise > 0, real / np.maximum(real + noise**2, np.finfo(np.float64).tiny), 1.0)


def _coordinates(sizes: FloatArray, lengths: FloatArray, targets: FloatArray | None = None) -> FloatArray:
    return np.stack([np.log(lengths), np.log(sizes * lengths), *([] if targets is None else [np.log1p(targets)])])


def _mean_to_median(trials: Sequence[Trial]) -> tuple[float, float]:
    """Return a step's mean over its median, and the standard error of that; 1 and 0 if no trial has a mean.

    A trial of a few steps seldom sees one that is slow only now and then, and its median leaves that out. All trials
    together show how much such steps add: the mean of each trial's mean / median, weighted by its steps, with its error
    from their scatter. Weighted by steps, it is not biased by trials that go on while their steps differ (Wald 1944). A
    single step is its own median, so it does not count.
    """
    known = [
        (_steps(trial), trial.mean_step_seconds / trial.step_seconds)
        for trial in trials
        if trial.outcome == "ok" and trial.step_seconds and trial.mean_step_seconds
    ]
    if not known:
        return 1.0, 0.0
    unseen = math.sqrt(_UNSEEN_STEPS) * _SLOW_EXCESS / sum(steps for steps, _ in known)
    several = np.array([pair for pair in known if pair[0] > 1], dtype=np.float64).reshape(-1, 2)
    if not several.size:
        return 1.0, unseen
    steps, ratios = several.T
    mean = float(np.average(ratios, weights=steps))
    scatter = float(np.linalg.norm(steps * (ratios - mean)) / steps.sum())
    # Not divided by the mean: if few slow steps were seen, both are too low.
    return mean, math.hypot(scatter, unseen)


def _error(trial: Trial) -> float:
    """Return the relative standard error of a trial's step time."""
    if trial.step_seconds_spread is None or not trial.step_seconds:
        return _ONE_STEP_ERROR
    return _ERROR_OF_MEDIAN * trial.step_seconds_spread / trial.step_seconds / math.sqrt(_steps(trial))


def _steps(trial: Trial) -> int:
    """Return the steps of a trial without the warm-up; those that only looked for a leak count too."""
    if trial.step_seconds_spread is None:
        return 1
    return max(trial.steps - 1, 2)
