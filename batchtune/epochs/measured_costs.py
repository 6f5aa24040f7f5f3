"""The costs that a probe measured: which batches fit, and how long a step takes, by a model and the measurements.

The memory must hold the longest target of all examples. An actual batch has the longest target of
its own few: the step time by longest length alone uses how long that is on average.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from batchtune.epochs import floats
from batchtune.epochs.cost_model import (
    features_of,
    fit_cost,
    needs_targets,
    predict,
    scaled,
)
from batchtune.epochs.table import SizeFunction, batch_sizes_for
from batchtune.lengths import FloatArray, Histogram, IntArray, Lengths
from batchtune.results import (
    CostModel,
    FrontierPoint,
    PackedModel,
    PackedProbe,
    Probe,
    Script,
    Trial,
)
from batchtune.trust import (
    WITHOUT_COMMUNICATION,
    WORST_COMPARED_ERROR,
    WORST_TIME_ERROR,
    rough_times,
)

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

    At a measured shape it is the measured median times the mean over the median of all trials: a
    single trial is too short to see the steps that are slow only now and then. Elsewhere it is the
    model times a correction: the geometric mean of the measured ratios to the model, weighted by
    the inverse fourth power of the distance (Shepard 1968) and by their certainty. A ratio counts
    only as far as noise does not explain it, even at its own shape: otherwise the table with the
    lowest estimate would be one whose batches were fast by chance, and slower in training.

    Distances are in the logarithms of the length, of the padded length and, if the time depends on
    it, of the target length. The model takes part as if measured at a distance of 1, a factor of e
    away: far from all measurements, only the model counts.
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

        Each shape counts once, with the median of its trials; it counts less, the more its step
        times differ. All are multiplied by the mean over the median of a step, if the trials have
        means. Least squares of relative errors come out too low, by about twice the square of the
        noise: the model is scaled to the measured times' mean ratio to it, as far as noise can be
        the reason.
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

        There are `counts` steps of each shape, not necessarily whole; the other arguments and
        errors are those of `predict`. A step's time is common · model^W₀ · Π measured_p^W_p with
        weights that add up to 1, so a measured time's error counts by its share of the weights.
        That error is the root of the sum of squares of the time's own error and the leave-one-out
        error, which stands for shapes that were not measured. The last but one is the model's
        error. The last is the common error: that of the mean over the median, and half of the
        leave-one-out error.
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


_UNLIMITED = 2**53


@dataclass(frozen=True, slots=True, eq=False)
class Frontier:
    """The measured frontier as a function of the length, and of the target if shapes have one; nothing is interpolated.

    Memory grows with the shape, so what fits at a measured one fits at any that is no larger: the batch size is the
    largest of those.
    """

    lengths: FloatArray  # shape (points,)
    targets: FloatArray  # shape (points,), infinite if the worst targets were measured at each length
    batch_sizes: IntArray  # shape (points,), ascending

    @classmethod
    def of(cls, points: Sequence[FrontierPoint]) -> Frontier:
        """Return the frontier by length alone of points in strictly ascending order of length.

        If fewer fit at a shorter length (and the data did not limit them), longer ones get no more.
        """
        sizes = np.array([point.batch_size for point in points], dtype=np.int64)
        # Where the data or the probe's time ended, the memory did not.
        is_open = [point.closed_by in ("data", "time") for point in points]
        held = np.where(is_open, _UNLIMITED, sizes)
        failed = np.array(
            [point.oom_batch_size or _UNLIMITED for point in points], dtype=np.int64
        )
        # A step of the search lies between what passed and what failed, so only a failure shows a dip.
        dips = np.minimum.accumulate(
            np.where(np.append(held[:-1] < held[1:], False), held, failed - 1)
        )
        return cls._sorted(points, np.full(sizes.size, np.inf), np.minimum(sizes, dips))

    @classmethod
    def of_pairs(cls, points: Sequence[FrontierPoint]) -> Frontier:
        """Return the frontier by length and target, through points in any order, all with a target."""
        targets = np.array([point.target_length for point in points], dtype=np.float64)
        sizes = np.array([point.batch_size for point in points], dtype=np.int64)
        return cls._sorted(points, targets, sizes)

    @classmethod
    def _sorted(
        cls, points: Sequence[FrontierPoint], targets: FloatArray, sizes: IntArray
    ) -> Frontier:
        lengths = np.array([point.length for point in points])
        order = np.argsort(sizes, kind="stable")
        return cls(lengths[order], targets[order], sizes[order])

    def __call__(
        self, lengths: npt.ArrayLike, targets: npt.ArrayLike = 0.0
    ) -> IntArray:
        """Return the largest batch size that fits, at least 1, of lengths and targets broadcast against each other."""
        return np.maximum(self.proven(lengths, targets), 1)

    def proven(self, lengths: npt.ArrayLike, targets: npt.ArrayLike = 0.0) -> IntArray:
        """Return the largest batch size that fits, but 0 if no measured shape is as large."""
        long, target = np.broadcast_arrays(floats(lengths), floats(targets))
        proven = np.zeros(long.shape, dtype=np.int64)
        # From the smallest size up, so that the largest stays.
        for length, longest_target, size in zip(
            self.lengths, self.targets, self.batch_sizes, strict=True
        ):
            proven[(long <= length) & (target <= longest_target)] = size
        return proven

    def continued(self, lengths: npt.ArrayLike) -> IntArray:
        """Return what fits, and what should fit if batches are padded a little beyond the longest measured length.

        An example of length L needs at most (L / longest)² times the memory of the longest: memory grows with the
        length or its square. Such batches were not run.
        """
        longest = self.lengths.max()
        stretched = np.maximum(floats(lengths) / longest, 1.0)
        beyond = np.maximum(1.0, np.floor(self.proven(longest) / stretched**2))
        return np.where(stretched > 1, beyond, self(lengths)).astype(np.int64)


def largest_max_batch_length(
    frontier: SizeFunction, histogram: Histogram, max_batch_size: int | None = None
) -> float:
    """Return the largest M such that for every distinct length u max(1, int(M / u)) examples of length u fit.

    If the frontier reaches the number of examples of length at most u, or `max_batch_size`, beyond which nothing was
    tried, u sets no limit. Every example must fit alone. If all lengths are whole numbers, M is whole; else it is
    rounded down to six significant digits.
    """
    lengths = histogram.lengths
    fits = frontier(lengths)
    fillable = (
        histogram.cumulative
        if max_batch_size is None
        else np.minimum(histogram.cumulative, max_batch_size)
    )
    limited = fits < fillable
    if not limited.any():
        return float((lengths * fillable).max())
    # int(M / u) = fits + 1 from here on.
    beyond = float(((fits + 1) * lengths)[limited].min())
    if (lengths == np.floor(lengths)).all():
        return math.ceil(beyond) - 1.0
    digits = _sixth_digit(beyond)
    rounded = math.floor(beyond / digits) * digits
    # Six digits of a binary fraction may lie a hair above the decimal one.
    while (np.maximum(1, (rounded / lengths).astype(np.int64)) > fits)[limited].any():
        rounded -= digits
    return float(f"{rounded:.6g}")


def shrunk_limit(max_batch_length: float, share: float, lengths: Lengths) -> float:
    """Return this share of max_batch_length, rounded down; no less than the shortest length.

    It is whole if all lengths are whole numbers, else it has six significant digits.
    """
    smaller = max_batch_length * share
    values = lengths.histogram.lengths
    digits = 1.0
    if (values != np.floor(values)).any():
        digits = _sixth_digit(smaller)
    rounded = float(f"{math.floor(smaller / digits) * digits:.15g}")
    return max(rounded, lengths.shortest)


def _sixth_digit(value: float) -> float:
    """Return the unit of a number's sixth significant digit."""
    return 10.0 ** (math.floor(math.log10(value)) - 5)


# Targets are told apart by so many even steps of their logarithm.
_LEVELS = 64
# Groups of examples next to each other in length; a bucket is taken to hold whole groups.
_GROUPS = 1024
# Without a known bucket, a batch is taken to be of one of this many, with as many examples each.
_BUCKETS = 16
JointSizes: TypeAlias = Callable[[FloatArray, FloatArray], IntArray]
ProvenBy: TypeAlias = Callable[[float, int], "int | None"]
StepTimeFunction: TypeAlias = Callable[..., FloatArray]
"""Batch sizes, longest lengths and (if any) longest target lengths → seconds of one training step, by element."""

BatchCost = Callable[[FloatArray, FloatArray], FloatArray]
"""(batch sizes, lengths of their longest examples) → cost of each batch, element by element."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedCosts:
    """The measurements of a probe of packed batches.

    Attributes:
        max_tokens: The token budget; without proofs the largest that passed.
        proofs: Shape (proofs, 4): tokens, Σ of their squares, sequences and the longest of each proven batch.
        step_seconds: The time of a batch among others, as training runs it; None if it is not known.
        why_unproven: Why there are no proofs, if the probe was not interrupted.
    """

    max_tokens: int
    proofs: FloatArray
    step_seconds: PackedModel | None
    why_unproven: str | None = None

    @classmethod
    def of(cls, probe: Probe, packed: PackedProbe) -> PackedCosts:
        """Return those of a probe."""
        shapes = [probe.trials[index].shape for index in packed.proofs]
        if probe.why_unproven is not None:
            shapes = []
        proofs = [(*features_of(shape), shape.length) for shape in shapes]
        model = packed.step_seconds
        if model is not None and model.relative_error > WORST_TIME_ERROR:
            model = None
        if model is not None:
            model = scaled(model, _time_ratio(probe))
        return cls(
            max_tokens=packed.max_tokens,
            proofs=np.array(proofs, dtype=np.float64).reshape(-1, 4),
            step_seconds=model,
            why_unproven=probe.why_unproven,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The measurements of a probe; all None without one.

    Attributes:
        world_size: Number of ranks that trained together.
        accumulate: How many batches an optimizer step trains on; `step_seconds` is the time of one of them.
        max_batch_size: The most examples that were tried in a batch; None: as many as the data has.
        unfinished: Whether larger batches may fit, which a probe had no time to try.
        warnings: Why the times may be wrong, each with its remedy.
        frontier: Lengths → the largest batch size that fits, at least 1.
        continued_frontier: The same, also beyond the longest length, where batches are padded further.
        joint_frontier: (lengths, target lengths) → the same; None if only the longest targets were measured.
        proven: Lengths → the largest batch size that is proven to fit, 0 without a proof; `joint_proven` likewise.
        joint_lengths: The lengths at which pairs were measured.
        proven_by: (longest length, batch size) → index of the trial that proves such a batch, or None.
        compares_times: Whether the step times are exact enough to tell which batches are faster.
        packed: What a probe of packed batches measured; padded ones were then not measured.
        script: What was learned of an unchanged script.
    """

    frontier: SizeFunction | None = None
    continued_frontier: SizeFunction | None = None
    step_seconds: StepTimeFunction | None = None
    device_name: str | None = None
    world_size: int = 1
    accumulate: int = 1
    max_batch_size: int | None = None
    unfinished: bool = False
    warnings: tuple[str, ...] = ()
    joint_frontier: JointSizes | None = None
    proven: SizeFunction | None = None
    joint_proven: JointSizes | None = None
    joint_lengths: FloatArray = field(default_factory=lambda: np.empty(0))
    proven_by: ProvenBy | None = None
    compares_times: bool = True
    packed: PackedCosts | None = None
    script: Script | None = None


def nothing_proven(lengths: FloatArray) -> IntArray:
    """Return the largest batch size that is proven to fit at each length where nothing is: 0."""
    return np.zeros(lengths.shape, dtype=np.int64)


def costs_of(probe: Probe) -> Costs:
    """Return what is proven to fit, and the step times, by the model between measured ones.

    No times are known if the model is far from even the measurements. Nothing is proven by a probe
    that was interrupted before its batches ran in turns.
    """
    measured = Costs(
        device_name=probe.device.text,
        world_size=probe.device.world_size,
        max_batch_size=probe.settings.get("max_batch_size"),
        accumulate=probe.device.accumulation,
        unfinished=probe.unfinished,
        script=probe.device.script,
    )
    if probe.packed is not None:
        packed = PackedCosts.of(probe, probe.packed)
        timed = packed.step_seconds is not None
        return replace(measured, packed=packed, warnings=_cautions(probe, timed))
    model = probe.models.step_seconds
    times = None
    if model is not None and model.relative_error <= WORST_TIME_ERROR:
        # Corrections are ratios to the model: this scales all times.
        times = StepTimes.of(probe.trials, model).scaled(_time_ratio(probe))
    compares_times = (
        model is not None
        and model.relative_error <= WORST_COMPARED_ERROR
        and not rough_times(probe.device, probe.trials)
    )
    frontier = Frontier.of(probe.frontier)

    def proven_by(longest: float, batch_size: int) -> int | None:
        is_larger = batch_size > int(frontier.proven(longest))
        if is_larger or probe.why_unproven is not None:
            return None
        fitting = (
            point
            for point in probe.frontier
            if point.length >= longest and point.batch_size >= batch_size
        )
        return next(fitting).trial

    costs = replace(
        measured,
        frontier=frontier,
        continued_frontier=frontier.continued,
        proven=frontier.proven if probe.is_proven else nothing_proven,
        proven_by=proven_by,
        step_seconds=times,
        compares_times=compares_times,
        warnings=_cautions(probe, timed=times is not None),
    )
    if not probe.joint_frontier:
        return costs
    joint = Frontier.of_pairs([*probe.frontier, *probe.joint_frontier])
    return replace(
        costs,
        joint_frontier=joint,
        joint_proven=joint.proven,
        joint_lengths=np.unique(joint.lengths),
    )


def _time_ratio(probe: Probe) -> float:
    """Return the time of a batch among others, as in training / that of a step of a trial.

    Such a step trains on all batches of an optimizer step, which are equal.
    """
    ratio = 1.0
    if probe.confirmation is not None:
        ratio = probe.confirmation.time_ratio or 1.0
    return ratio / probe.device.accumulation


def _cautions(probe: Probe, timed: bool) -> tuple[str, ...]:
    """Say why times, if there are any, may be wrong."""
    if timed and probe.device.simulated:
        return (WITHOUT_COMMUNICATION,)
    return ()


def capped(costs: Costs, max_batch_length: float) -> Costs:
    """Return the same costs, but no batch longer than the user wants."""
    return _with_sizes(
        costs,
        lambda sizes, lengths: np.minimum(
            sizes, batch_sizes_for(lengths, max_batch_length)
        ),
    )


def shrunk(costs: Costs, share: float) -> Costs:
    """Return the same costs, but no batch larger than this share of what fits."""
    return _with_sizes(costs, lambda sizes, lengths: share_of(sizes, share))


def share_of(sizes: IntArray, share: float) -> IntArray:
    """Return this share of batch sizes, in whole examples, at least 1."""
    whole: IntArray = np.floor(share * sizes).astype(np.int64)
    return np.maximum(1, whole)


def _with_sizes(
    costs: Costs, change: Callable[[IntArray, FloatArray], IntArray]
) -> Costs:
    """Return the same costs with other batch sizes that fit: `change` gets sizes and the lengths that they are for."""

    def changed(
        sizes: Callable[..., IntArray] | None,
    ) -> Callable[..., IntArray] | None:
        if sizes is None:
            return None
        return lambda lengths, *targets: change(sizes(lengths, *targets), lengths)

    return replace(
        costs,
        frontier=changed(costs.frontier),
        continued_frontier=changed(costs.continued_frontier),
        joint_frontier=changed(costs.joint_frontier),
    )


@dataclass(frozen=True, slots=True, eq=False)
class TypicalTargets:
    """The longest target that a batch has on average, by its size and its longest length.

    Attributes:
        histogram: The lengths.
        means: The mean target of each of its distinct lengths.
        levels: Shape (levels,), ascending: the targets to tell apart.
        examples_up_to: Shape (groups + 1, levels): how many of the examples in the first groups,
            from the shortest length on, have targets up to each level. All groups have the same
            number of examples, to within one.
    """

    histogram: Histogram
    means: FloatArray
    levels: FloatArray
    examples_up_to: IntArray

    @classmethod
    def of(cls, lengths: Lengths) -> TypicalTargets | None:
        """Return those of a data set; None without targets."""
        runs = lengths.runs
        if runs.targets is None:
            return None
        targets = runs.targets
        edges = np.expm1(
            np.linspace(np.log1p(targets.min()), np.log1p(targets.max()), _LEVELS)
        )
        groups = min(lengths.count, _GROUPS)
        # Group g holds the examples from the g / groups-th on; a run may be in several.
        firsts = -(-np.arange(groups) * lengths.count // groups)
        parts = np.union1d(firsts, lengths.count - runs.ends)
        run = runs.at(lengths.count - 1 - parts)
        group = np.searchsorted(firsts, parts, side="right") - 1
        level = np.searchsorted(edges[:-1], targets)
        counts = np.zeros((groups, _LEVELS), dtype=np.int64)
        np.add.at(counts, (group, level[run]), np.diff(parts, append=lengths.count))
        up_to = np.concatenate(
            (
                np.zeros((1, _LEVELS), dtype=np.int64),
                counts.cumsum(axis=0).cumsum(axis=1),
            )
        )
        in_level = counts.sum(axis=0)
        totals = targets * runs.counts
        of_levels = np.bincount(level, totals, _LEVELS) / np.maximum(in_level, 1)
        starts = np.flatnonzero(np.diff(runs.values, prepend=np.nan) != 0)
        means = np.add.reduceat(totals, starts)[::-1] / lengths.histogram.counts
        return cls(
            lengths.histogram, means, np.where(in_level > 0, of_levels, edges), up_to
        )

    def __call__(
        self,
        batch_sizes: npt.ArrayLike,
        lengths: npt.ArrayLike,
        above: npt.ArrayLike | None = None,
    ) -> FloatArray:
        """Return the mean of the longest target over batches drawn from the examples up to a length.

        With F the distribution of the targets there, the longest of B has F^B (but for examples that can't be drawn
        twice). All examples are longer than `above`, the boundary of the bucket before; without it the sixteenth of the
        data that is nearest in length is taken. Arguments are broadcast against each other.
        """
        length = floats(lengths)
        count = self.histogram.count
        end = np.maximum(self.histogram.counts_up_to(length), 1)
        if above is None:
            start = end - max(1, count // _BUCKETS)
        else:
            start = self.histogram.counts_up_to(floats(above))
        groups_each = (self.examples_up_to.shape[0] - 1) / count
        last = np.ceil(end * groups_each).astype(np.int64)
        first = np.round(start * groups_each).astype(np.int64).clip(0, last - 1)
        examples = self.examples_up_to[last] - self.examples_up_to[first]
        sizes = floats(batch_sizes)[..., np.newaxis]
        within = (examples / examples[..., -1:]) ** sizes
        below: FloatArray = np.sum(within[..., :-1] * np.diff(self.levels), axis=-1)
        return float(self.levels[-1]) - below


def batch_seconds(
    step_seconds: StepTimeFunction, targets: TypicalTargets | None
) -> BatchCost:
    """Return the time of one step by batch size and longest length alone, with the target that is typical of both."""
    if targets is None:
        return step_seconds
    return lambda batch_sizes, lengths: step_seconds(
        batch_sizes, lengths, targets(batch_sizes, lengths)
    )
