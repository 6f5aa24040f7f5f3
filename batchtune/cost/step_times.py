"""How long one training step takes: the model, and the measurements that it passes through."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchtune.cost.fitting import fit_cost
from batchtune.cost.models import FloatArray, needs_targets, predict
from batchtune.results import CostModel, Trial

# What no repetition of a measurement can mend, as a share of it: the model's own error, and that of another day.
_MODEL_ERROR = 0.05
# How far off the time of a single step may be, as a share of it.
_ONE_STEP_ERROR = 0.1
# The standard error of a median of n values, as a share of their interquartile range over √n, where they are normal.
_ERROR_OF_MEDIAN = 1.2533 / 1.349
# Shapes at a time: the distances to all measurements then stay in the processor's cache.
_CHUNK = 4096
# Of squared distances: at this one, all other measurements together weigh nothing beside.
_SAME = 1e-20


@dataclass(frozen=True, slots=True)
class _Timed:
    """One batch shape that was timed.

    Attributes:
        seconds: The median over its trials.
        error: Its standard error, as a share of it.
    """

    batch_size: float
    length: float
    target_length: float | None
    seconds: float
    error: float

    @property
    def weight(self) -> float:
        """How much its relative error counts in a fit."""
        return float(_MODEL_ERROR / np.hypot(_MODEL_ERROR, self.error))


def fit_step_seconds(trials: Sequence[Trial]) -> CostModel | None:
    """The step-time model that trials give; None where too few passed.

    Each shape counts once, with the median of its trials, and the less the more its steps' times differ.
    """
    timed = _timed(trials, with_targets=True)
    if not timed:
        return None
    targets = [shape.target_length for shape in timed]
    return fit_cost(
        [shape.batch_size for shape in timed],
        [shape.length for shape in timed],
        [shape.seconds for shape in timed],
        [target for target in targets if target is not None] if None not in targets else None,
        weights=[shape.weight for shape in timed],
    )


@dataclass(frozen=True, slots=True, eq=False)
class StepTimes:
    """Seconds of one training step of any batch shape.

    At a measured shape it is the measured median. Elsewhere it is the model times a correction: the geometric mean of
    the measured ratios to the model, weighted by the inverse fourth power of the distance (Shepard 1968), and by
    their certainty. Distances are in the logarithms of the length, of the padded length and, where the time depends
    on it, of the target length. The model takes part as if it had been measured at a distance of 1, a factor of e
    away: far from all measurements it is alone.

    Attributes:
        model: The step-time model.
        points: Shape (coordinates, measured).
        certainty: Shape (measured,), from above 0 to 1.
        ratios: Shape (measured,): the logarithm of measured / model.
        errors: Shape (measured,): the standard error of each measured time, as a share of it.
    """

    model: CostModel
    points: FloatArray
    certainty: FloatArray
    ratios: FloatArray
    errors: FloatArray

    @classmethod
    def of(cls, trials: Sequence[Trial], model: CostModel) -> StepTimes:
        """The times of trials, by a model that was fitted to them.

        Args:
            trials: In any order; those that did not pass, or have no time, are left out.
            model: Of the same shapes, as `fit_step_seconds` gives it.
        """
        timed = _timed(trials, with_targets=needs_targets(model))
        sizes, lengths, seconds = (
            np.array([getattr(shape, name) for shape in timed], dtype=np.float64)
            for name in ("batch_size", "length", "seconds")
        )
        targets = np.array([shape.target_length for shape in timed]) if needs_targets(model) else None
        fitted = predict(model, sizes, lengths, targets)
        return cls(
            model=model,
            points=_coordinates(sizes, lengths, targets),
            certainty=np.array([shape.weight**2 for shape in timed], dtype=np.float64),
            ratios=np.log(seconds / fitted),
            errors=np.array([shape.error for shape in timed], dtype=np.float64),
        )

    def __call__(
        self, batch_sizes: npt.ArrayLike, lengths: npt.ArrayLike, target_lengths: npt.ArrayLike | None = None
    ) -> FloatArray:
        """Seconds of one step, element by element.

        Args:
            batch_sizes: Any shape; all arguments are broadcast against each other.
            lengths: Longest lengths, in the manifest's unit.
            target_lengths: Longest target lengths; None where the batches have none.

        Raises:
            ValueError: The model needs target lengths, and there are none.
        """
        seconds = predict(self.model, batch_sizes, lengths, target_lengths)
        if not self.ratios.size:
            return seconds
        corrected: FloatArray = seconds.reshape(-1).copy()
        for part, shapes in self._chunks(seconds.shape, batch_sizes, lengths, target_lengths):
            corrected[part] *= np.exp(self._correction(self._closeness(shapes)))
        result: FloatArray = corrected.reshape(seconds.shape)
        return result

    @property
    def sigmas(self) -> FloatArray:
        """How uncertain the logarithms are that the times are made of, as standard deviations.

        Of a measured ratio: its own standard error, and with it (as root of the sum of squares) how far the others
        miss a measurement when it is left out, root mean square over all: what stands for shapes that were not
        measured. Of the model: its error over the trials it was fitted to.

        Returns:
            Shape (measured + 1,), the model's last.
        """
        missed = 0.0
        if self.ratios.size:
            closeness = self._closeness(self.points)
            np.fill_diagonal(closeness, 0.0)
            missed = float(np.sqrt(np.mean((self._correction(closeness) - self.ratios) ** 2)))
        return np.append(np.hypot(self.errors, missed), self.model.relative_error)

    def sensitivities(
        self,
        batch_sizes: npt.ArrayLike,
        lengths: npt.ArrayLike,
        target_lengths: npt.ArrayLike | None,
        counts: npt.ArrayLike,
    ) -> tuple[float, FloatArray]:
        """The time of many steps, and how it changes with the logarithms that `sigmas` are of.

        A step's time is model^W₀ · Π (what measurement p says)^W_p with weights that add up to 1, so its derivative
        by the logarithm of what p says is W_p times itself.

        Args:
            batch_sizes: Any shape; all arguments are broadcast against each other.
            lengths: Longest lengths, in the manifest's unit.
            target_lengths: Longest target lengths; None where the batches have none.
            counts: How many steps there are of each shape; need not be whole.

        Returns:
            The seconds of all steps, and their derivatives, in seconds, of shape (measured + 1,), the model's last.

        Raises:
            ValueError: The model needs target lengths, and there are none.
        """
        each = self(batch_sizes, lengths, target_lengths)
        seconds = np.broadcast_to(np.asarray(counts, dtype=np.float64), each.shape).reshape(-1) * each.reshape(-1)
        gradient = np.zeros(self.ratios.size + 1)
        for part, shapes in self._chunks(each.shape, batch_sizes, lengths, target_lengths):
            closeness = self._closeness(shapes)
            scaled = seconds[part] / (self.certainty @ closeness + 1.0)
            gradient[:-1] += self.certainty * (closeness @ scaled)
            gradient[-1] += scaled.sum()
        return float(seconds.sum()), gradient

    def _chunks(
        self,
        shape: tuple[int, ...],
        batch_sizes: npt.ArrayLike,
        lengths: npt.ArrayLike,
        target_lengths: npt.ArrayLike | None,
    ) -> Iterator[tuple[slice, FloatArray]]:
        """The coordinates of batch shapes, broadcast to `shape` and made flat, a few at a time."""
        given = [np.asarray(batch_sizes, dtype=np.float64), np.asarray(lengths, dtype=np.float64)]
        if needs_targets(self.model):
            given.append(np.asarray(target_lengths, dtype=np.float64))
        flat = [np.broadcast_to(values, shape).reshape(-1) for values in given]
        for start in range(0, flat[0].size, _CHUNK):
            part = slice(start, start + _CHUNK)
            size, long, *target = (values[part] for values in flat)
            yield part, _coordinates(size, long, *target)

    def _correction(self, closeness: FloatArray) -> FloatArray:
        """The logarithm of what the model's time is multiplied by, at shapes so close to the measured ones."""
        correction: FloatArray = (self.certainty * self.ratios) @ closeness / (self.certainty @ closeness + 1.0)
        return correction

    def _closeness(self, shapes: FloatArray) -> FloatArray:
        """Shape (measured, n): the inverse fourth powers of the distances; `shapes` is (coordinates, n)."""
        squares: FloatArray = np.full((self.ratios.size, shapes.shape[1]), _SAME)
        for points, values in zip(self.points, shapes, strict=True):
            difference = points[:, None] - values
            difference *= difference
            squares += difference
        squares *= squares
        return np.reciprocal(squares, out=squares)


def _coordinates(sizes: FloatArray, lengths: FloatArray, targets: FloatArray | None = None) -> FloatArray:
    """Shape (2, n), or (3, n) with targets."""
    columns = [np.log(lengths), np.log(sizes * lengths)]
    if targets is not None:
        columns.append(np.log1p(targets))
    return np.stack(columns)


def _timed(trials: Sequence[Trial], *, with_targets: bool) -> list[_Timed]:
    """The shapes that were timed, in the order in which they first were; targets apart only where they matter."""
    by_shape: dict[tuple[int, float, float | None], list[Trial]] = defaultdict(list)
    for trial in trials:
        if trial.outcome == "ok" and trial.step_seconds:
            by_shape[trial.batch_size, trial.length, trial.target_length if with_targets else None].append(trial)
    return [
        _Timed(
            batch_size=size,
            length=length,
            target_length=target,
            seconds=float(np.median([trial.step_seconds for trial in same if trial.step_seconds])),
            error=float(np.median([_error(trial) for trial in same])) / math.sqrt(len(same)),
        )
        for (size, length, target), same in by_shape.items()
    ]


def _error(trial: Trial) -> float:
    """The standard error of a trial's step time, as a share of it."""
    if trial.step_seconds_spread is None or not trial.step_seconds:
        return _ONE_STEP_ERROR
    measured = max(trial.steps - 1, 2)  # the first is a warm-up; of fewer than two there is no spread
    return _ERROR_OF_MEDIAN * trial.step_seconds_spread / trial.step_seconds / math.sqrt(measured)
