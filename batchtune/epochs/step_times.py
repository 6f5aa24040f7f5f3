"""The time of one training step: the model, and the measurements that it passes through."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from batchtune.epochs.cost_model import fit_cost, needs_targets, predict, scaled
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
# Shapes whose coordinates differ by less take the same time, but for noise; so many pairs of them show it.
_ALIKE = 0.04
_FEWEST_ALIKE = 5
# Shapes at a time, so that the distances to all measurements stay in the processor's cache.
_CHUNK = 4096
# A squared distance at which the other measurements weigh nothing.
_SAME = 1e-20


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
    sigmas: FloatArray  # shape (measured,): the relative standard error of each time
    kept: FloatArray  # shape (measured,), 0 to 1: the share of each ratio that counts
    common_error: float  # of the mean over the median, which all times have in common

    @classmethod
    def fit(cls, trials: Sequence[Trial]) -> StepTimes | None:
        """Fit the model and its corrections to trials; None if too few passed.

        Each shape counts once, with the median of its trials, and the less the more its steps' times differ. All are
        multiplied by the mean over the median of a step, if the trials have means. Least squares of relative errors
        come out too low, by about twice the square of the noise: the model is scaled to the measured times' mean ratio
        to it, as far as noise can be the reason.
        """
        timed = _Timed.of(trials, with_targets=True)
        model = fit_cost(
            timed.sizes,
            timed.lengths,
            timed.seconds,
            timed.targets,
            weights=np.sqrt(timed.certainty),
        )
        if model is None:
            return None
        ratios = timed.seconds / predict(
            model, timed.sizes, timed.lengths, timed.targets
        )
        # Not weighted: steps that were slow make a time less certain.
        mean_ratio = float(ratios.mean())
        by_noise = _MOST_BIAS * float(np.mean(timed.errors**2))
        return cls.of(
            trials, scaled(model, min(max(mean_ratio, 1 - by_noise), 1 + by_noise))
        )

    @classmethod
    def of(cls, trials: Sequence[Trial], model: CostModel) -> StepTimes:
        """Return the times of trials that passed, and of other shapes by a model that was fitted to them."""
        timed = _Timed.of(trials, with_targets=needs_targets(model))
        ratios = np.log(
            timed.seconds / predict(model, timed.sizes, timed.lengths, timed.targets)
        )
        return cls(
            model=model,
            points=_coordinates(timed.sizes, timed.lengths, timed.targets),
            certainty=timed.certainty,
            ratios=ratios,
            sigmas=timed.errors,
            kept=_beyond_noise(ratios, timed.errors),
            common_error=timed.common_error,
        )

    def scaled(self, factor: float) -> StepTimes:
        """Return the same times, all multiplied by a factor."""
        return replace(self, model=scaled(self.model, factor))

    def __call__(
        self,
        batch_sizes: npt.ArrayLike,
        lengths: npt.ArrayLike,
        target_lengths: npt.ArrayLike | None = None,
    ) -> FloatArray:
        """Return the seconds of one step of each batch shape; arguments and errors are those of `predict`."""
        seconds = predict(self.model, batch_sizes, lengths, target_lengths)
        shapes = self._shapes(seconds.shape, batch_sizes, lengths, target_lengths)
        corrections = np.empty(shapes.shape[1])
        for start in range(0, corrections.size, _CHUNK):
            part = slice(start, start + _CHUNK)
            corrections[part] = (self.kept * self.ratios) @ self._weights(
                shapes[:, part]
            )
        return seconds * np.exp(corrections).reshape(seconds.shape)

    def errors(
        self,
        batch_sizes: npt.ArrayLike,
        lengths: npt.ArrayLike,
        targets: npt.ArrayLike | None,
        counts: FloatArray | float,
    ) -> FloatArray:
        """Return the relative standard errors of the time of many steps by their causes, shape (measured + 2,).

        There are `counts` steps of each shape, not necessarily whole; the other arguments and errors are those of
        `predict`. A step's time is common · model^W₀ · Π measured_p^W_p with weights that add up to 1, so a measured
        time's error counts by its share of the weights. It is the root of the sum of squares of the time's own error
        and the leave-one-out error, which stands for shapes that were not measured. Next to last is the model's error,
        last the common one: of the mean over the median, and half of the leave-one-out error.
        """
        seconds = counts * self(batch_sizes, lengths, targets)
        weights = self._weights(
            self._shapes(seconds.shape, batch_sizes, lengths, targets)
        )
        shares = self.kept * (weights @ seconds.ravel() / seconds.sum())
        missed = self._missed()
        common = math.hypot(self.common_error, _MISSED_ALIKE * missed)
        of_model = (1 - shares.sum()) * self._model_error()
        return np.append(shares * np.hypot(self.sigmas, missed), (of_model, common))

    def _model_error(self) -> float:
        """Return the model's error over the trials; its noise is smaller in few terms."""
        square = self.model.relative_error**2
        if not self.sigmas.size:
            return math.sqrt(square)
        noise = min(square, float(np.mean(self.sigmas**2)))
        return math.sqrt(
            square - noise * (1 - min(1.0, _MODEL_TERMS / self.sigmas.size))
        )

    def _missed(self) -> float:
        """Return the root mean square of what each measured ratio is off from what the others say, less the noise."""
        if not self.ratios.size:
            return 0.0
        weights = self._weights(self.points, left_out=True)
        square = float(
            np.mean(((self.kept * self.ratios) @ weights - self.ratios) ** 2)
        )
        noise = float(
            np.mean(self.sigmas**2 + (self.kept * self.sigmas) ** 2 @ weights**2)
        )
        return math.sqrt(max(square - noise, _LEAST_MISSED * square))

    def _shapes(
        self, shape: tuple[int, ...], *given: npt.ArrayLike | None
    ) -> FloatArray:
        """Return shape (coordinates, shapes) of batch sizes, lengths and maybe targets, broadcast to `shape`."""
        if not needs_targets(self.model):
            given = given[:2]
        return _coordinates(
            *(
                np.broadcast_to(np.asarray(each, np.float64), shape).ravel()
                for each in given
            )
        )

    def _weights(self, shapes: FloatArray, *, left_out: bool = False) -> FloatArray:
        """Return shape (measured, shapes): how much each ratio counts; if `left_out`, at measured shapes the others."""
        squares: FloatArray = np.full((self.ratios.size, shapes.shape[1]), _SAME)
        for points, values in zip(self.points, shapes, strict=True):
            squares += (points[:, np.newaxis] - values) ** 2
        closeness = self.certainty[:, np.newaxis] / squares**2
        if left_out:
            np.fill_diagonal(closeness, 0.0)
        weights: FloatArray = closeness / (closeness.sum(axis=0) + 1.0)
        return weights


@dataclass(frozen=True, slots=True, eq=False)
class _Timed:
    """The batch shapes that were timed, in the order of their first trials; arrays of shape (measured,).

    Attributes:
        targets: None if they are not known, or do not count.
        seconds: The expected time of a step: the median over its trials times the mean over the median.
        errors: Its relative standard error: by the steps of its trials, or by how far shapes that are alike differ.
        common_error: The standard error of the mean over the median, common to all times.
    """

    sizes: FloatArray
    lengths: FloatArray
    targets: FloatArray | None
    seconds: FloatArray
    errors: FloatArray
    common_error: float

    @classmethod
    def of(cls, trials: Sequence[Trial], *, with_targets: bool) -> _Timed:
        """Return the shapes of trials that passed; targets tell them apart only `with_targets`."""
        mean_to_median, common_error = _mean_to_median(trials)
        by_shape: dict[tuple[int, float, float | bool | None], list[Trial]] = (
            defaultdict(list)
        )
        for trial in trials:
            if trial.outcome == "ok" and trial.step_seconds:
                target = trial.target_length
                if not with_targets:
                    target = None
                by_shape[trial.batch_size, trial.length, target].append(trial)
        seconds = []
        errors = []
        for same in by_shape.values():
            # A single step needs no factor.
            expected = [
                (trial.step_seconds or 0.0)
                * (mean_to_median if _steps(trial) > 1 else 1.0)
                for trial in same
            ]
            seconds.append(np.median(expected))
            errors.append(
                np.median([_error(trial) for trial in same]) / math.sqrt(len(same))
            )
        sizes, lengths, targets = (
            np.array(list(by_shape), dtype=np.float64).reshape(-1, 3).T
        )
        known_targets = None
        if with_targets and not np.isnan(targets).any():
            known_targets = targets
        points = _coordinates(sizes, lengths, known_targets)
        scatter = _scatter_of_alike(points, np.array(seconds) / (sizes * lengths))
        return cls(
            sizes,
            lengths,
            known_targets,
            np.array(seconds),
            np.maximum(errors, scatter),
            common_error,
        )

    @property
    def certainty(self) -> FloatArray:
        """How much each time counts, from above 0 to 1."""
        return _MODEL_ERROR**2 / (_MODEL_ERROR**2 + self.errors**2)


def _beyond_noise(ratios: FloatArray, noise: FloatArray) -> FloatArray:
    """Return the share of each ratio's variance that is not noise: the mean of what it may be, given what was seen.

    The scatter beyond noise must exceed what chance adds to it, one standard deviation of n squares.
    """
    if not ratios.size:
        return np.ones(0)
    explained = float(np.mean(noise**2)) * (1 + math.sqrt(2 / ratios.size))
    real = max(0.0, float(np.mean(ratios**2)) - explained)
    return np.where(
        noise > 0, real / np.maximum(real + noise**2, np.finfo(np.float64).tiny), 1.0
    )


def _scatter_of_alike(points: FloatArray, seconds_per_unit: FloatArray) -> float:
    """Return the relative standard error that times of nearly equal shapes show; 0 with too few of them.

    A slow moment of a shared machine may last a whole trial: then the steps of that trial do not show it.
    """
    apart = np.abs(points[:, :, np.newaxis] - points[:, np.newaxis]).max(axis=0)
    first, second = np.nonzero(np.triu(apart < _ALIKE, 1))
    if first.size < _FEWEST_ALIKE:
        return 0.0
    differences = np.log(seconds_per_unit[first] / seconds_per_unit[second])
    return float(np.sqrt(np.mean(differences**2) / 2))


def _coordinates(
    sizes: FloatArray, lengths: FloatArray, targets: FloatArray | None = None
) -> FloatArray:
    coordinates = [np.log(lengths), np.log(sizes * lengths)]
    if targets is not None:
        coordinates.append(np.log1p(targets))
    return np.stack(coordinates)


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
    steps, ratios = np.array(known).T
    unseen = math.sqrt(_UNSEEN_STEPS) * _SLOW_EXCESS / float(steps.sum())
    steps = np.where(steps > 1, steps, 0.0)
    if not steps.any():
        return 1.0, unseen
    mean = float(np.average(ratios, weights=steps))
    scatter = float(np.linalg.norm(steps * (ratios - mean)) / steps.sum())
    # Not divided by the mean: if few slow steps were seen, both are too low.
    return mean, math.hypot(scatter, unseen)


def _error(trial: Trial) -> float:
    """Return the relative standard error of a trial's step time."""
    if trial.step_seconds_spread is None or not trial.step_seconds:
        return _ONE_STEP_ERROR
    steps = _steps(trial)
    error = (
        _ERROR_OF_MEDIAN
        * trial.step_seconds_spread
        / trial.step_seconds
        / math.sqrt(steps)
    )
    # The quartiles of few steps lie closer together: those of 3 by the factor 0.63.
    return error / (1 - 1.1 / steps)


def _steps(trial: Trial) -> int:
    """Return the steps of a trial without the warm-up; those that only looked for a leak count too."""
    if trial.step_seconds_spread is None:
        return 1
    return max(trial.steps - 1, 2)
