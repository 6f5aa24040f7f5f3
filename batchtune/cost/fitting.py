"""Fits the cost model to measured batch shapes, and chooses how rich a form they support.

Every form is fitted by least squares of the relative error and counts only where all its coefficients are at least
0. As forms without some of a form's terms are tried too, that is what non-negative least squares would find. Forms
are compared by their error on measurements that they were not fitted to, leaving out one at a time: what a form
merely bends to, with few measurements, it can't predict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchtune.cost.models import FloatArray, predict
from batchtune.results import CostModel

# A term is believed only where it cuts the error to less than this share: a spurious one would be extrapolated.
_WORTH_IT = 0.8
# How a measurement's weight grows with its cost: 0 would count relative errors, 1 absolute ones. Relative errors let
# a batch of one, or of one short example, decide as much as those at the limit, which are what the model is for;
# absolute errors leave the small ones, which the last batch of a bucket can be, to chance.
_BY_COST = 0.5
# Below this, forms are equally good; then, and where they nearly are, the order of the forms decides.
_NEGLIGIBLE = 1e-6
_PREFERENCE = 0.01
# What a floor holds differs by no more than this factor.
_LEVEL = 1.5
# Targets that are the same multiple of the length, to within this, say nothing that the lengths do not say.
_PROPORTIONAL = 0.05
# Where a measurement alone decides a coefficient, leaving it out leaves nothing to judge by.
_DECIDES_ALONE = 1 - 1e-7

# Columns of the least squares, each by its coefficients of (1, L, L², T, T², L·T). SUM is a term that works on all
# L + T positions alike, as a decoder-only language model does on prompt and answer; SUM2 is that for pairs of them.
_ONE, _L, _L2, _T, _T2, _LT, _SUM, _SUM2 = range(8)
_MEANING = np.concatenate((np.eye(6), [[0, 1, 0, 1, 0, 0], [0, 0, 1, 0, 1, 2]]))

_Form = tuple[int, ...]
# By how many terms a form counts as. Forms without a term in L come in only as the edge of one with it, where that
# term would be negative, and count as much as that one: where targets hardly vary, T passes for a constant per
# example and L·T for L, and would say that long examples with short targets cost nothing.
_OF_LENGTHS: dict[_Form, int] = {(_L,): 1, (_L2,): 1, (_L, _L2): 2}
_OF_TARGETS: dict[_Form, int] = {
    **dict.fromkeys([(_SUM,)], 1),
    **dict.fromkeys([(_SUM, _SUM2), (_L, _T), (_L, _LT), (_SUM, _L2), (_L, _T2), (_SUM2,), (_LT,), (_T,)], 2),
    **dict.fromkeys([(_L, _L2, _T), (_L, _T, _LT), (_L, _L2, _LT), (_L, _T, _T2), (_L, _L2, _T2)], 3),
    **dict.fromkeys([(_T, _LT), (_L2, _T), (_T, _T2)], 3),
    **dict.fromkeys([(_L, _L2, _T, _LT), (_L, _L2, _T, _T2), (_L, _T, _T2, _LT)], 4),
    (_L, _L2, _T, _T2, _LT): 5,
}


def fit_cost(
    batch_sizes: Sequence[float],
    lengths: Sequence[float],
    costs: Sequence[float],
    target_lengths: Sequence[float] | None = None,
    *,
    weights: Sequence[float] | None = None,
) -> CostModel | None:
    """Fits the cost model by least squares of the relative error, with coefficients of at least 0.

    Errors count by the square root of the cost: most at the limit of the memory, but not only there.

    Args:
        batch_sizes: Batch size of each measurement.
        lengths: Length of each, in the manifest's unit.
        costs: What each cost, positive.
        target_lengths: Target length of each; None where there are none.
        weights: How much each relative error counts besides, positive; None: all alike.

    Returns:
        The simplest form that predicts measurements about as well as any, or None where there are fewer than two
        distinct padded lengths. Targets count only where they vary independently of the lengths; with a single
        length measured, its targets are taken to cost as much as the same number of lengths, which at shorter
        lengths errs on the safe side.
    """
    measured = _Measurements.of(batch_sizes, lengths, costs, target_lengths, weights)
    if measured is None:
        return None
    found = [_best_floor(measured, form, rank) for rank, form in enumerate(measured.forms)]
    # Too few measurements to judge by: the first form, without a floor.
    chosen = found[0] if math.isinf(found[0].error) else min(found, key=lambda candidate: candidate.score)
    fitted = measured.model(chosen, 0.0)
    error = predict(fitted, measured.size, measured.long, measured.target) / measured.cost - 1
    return measured.model(chosen, float(np.sqrt(np.mean(error**2))))


@dataclass(frozen=True, slots=True, eq=False)
class _Measurements:
    """What was measured, from the smallest padded length on; arrays of shape (n,) where nothing else is said.

    Attributes:
        size, long, target, cost: The measurements.
        weights: Their squares' mean is 1.
        floors: Shape (floors,): how many of the smallest a floor may hold.
        levels: Shape (floors,): the floor that each of these sets.
        columns: Shape (n, 8): the columns over the cost, each of norm 1.
        scales: Shape (8,): their norms before.
        products: Shape (floors, 8, 8): the columns' products with each other, over what is not on the floor.
        sums: Shape (floors, 8): their products with what they have to give, which is 1.
        forms: To try, in the order in which they are preferred where all else is equal, each with how many terms
            it counts as.
    """

    size: FloatArray
    long: FloatArray
    target: FloatArray | None
    cost: FloatArray
    weights: FloatArray
    floors: npt.NDArray[np.intp]
    levels: FloatArray
    columns: FloatArray
    scales: FloatArray
    products: FloatArray
    sums: FloatArray
    forms: dict[_Form, int]

    @classmethod
    def of(
        cls,
        batch_sizes: Sequence[float],
        lengths: Sequence[float],
        costs: Sequence[float],
        target_lengths: Sequence[float] | None,
        weights: Sequence[float] | None,
    ) -> _Measurements | None:
        """None where they are too few for any slope."""
        size, long, cost = (np.asarray(values, dtype=np.float64) for values in (batch_sizes, lengths, costs))
        other = np.zeros(cost.size) if target_lengths is None else np.asarray(target_lengths, dtype=np.float64)
        padded = size * (long + other)
        if np.unique(padded).size < 2 or not (cost > 0).all():
            return None
        order = np.argsort(padded, kind="stable")
        size, long, cost, other = size[order], long[order], cost[order], other[order]
        weight = (cost / cost.max()) ** _BY_COST
        if weights is not None:
            weight *= np.asarray(weights, dtype=np.float64)[order]
        weight /= np.sqrt(np.mean(weight**2))
        floors = _possible_floors(cost)
        columns, scales = _columns(size, long, other, cost)
        weighted = columns * weight[:, None]
        # What is not on the floor are the last rows, so the normal equations are sums from the end.
        products = np.cumsum((weighted[:, :, None] * weighted[:, None, :])[::-1], axis=0)[::-1]
        sums = np.cumsum((weighted * weight[:, None])[::-1], axis=0)[::-1]
        return cls(
            size=size,
            long=long,
            target=None if target_lengths is None else other,
            cost=cost,
            weights=weight,
            floors=floors,
            levels=np.array([np.median(cost[:count]) if count else 0.0 for count in floors]),
            columns=columns,
            scales=scales,
            products=products[floors],
            sums=sums[floors],
            forms=_forms(long, None if target_lengths is None else other),
        )

    def model(self, chosen: _Candidate, relative_error: float) -> CostModel:
        """A candidate as a model."""
        constant, linear, quadratic, target_linear, target_quadratic, cross = chosen.coefficients.tolist()
        return CostModel(
            floor=chosen.floor,
            constant=constant,
            linear=linear,
            quadratic=quadratic,
            target_linear=target_linear,
            target_quadratic=target_quadratic,
            cross=cross,
            relative_error=relative_error,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Candidate:
    """One fit.

    Attributes:
        floor: Of the cost model.
        coefficients: Shape (6,): of 1, L, L², T, T², L·T.
        error: Root mean square of the relative error of each measurement predicted from the others; infinite where
            some coefficient hangs on a single one.
        score: The error, more with every term.
    """

    floor: float
    coefficients: FloatArray
    error: float
    score: float


def _possible_floors(cost: FloatArray) -> npt.NDArray[np.intp]:
    """How many of the smallest may lie on the floor.

    At least two, or it would explain a single one away; three must remain for the slopes; and what lies on a floor
    costs about the same.
    """
    level = np.maximum.accumulate(cost) <= _LEVEL * np.minimum.accumulate(cost)
    return np.array([0, *(count for count in range(2, cost.size - 2) if level[count - 1])])


def _columns(size: FloatArray, long: FloatArray, other: FloatArray, cost: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The columns over the cost, scaled to norm 1 as they differ by many orders of magnitude, and their norms."""
    monomials = np.stack([long, long**2, other, other**2, long * other], axis=1) * size[:, None]
    columns = np.concatenate((np.ones((cost.size, 1)), monomials), axis=1) @ _MEANING.T / cost[:, None]
    scales = np.linalg.norm(columns, axis=0)
    scales[scales == 0] = 1.0
    return columns / scales, scales


def _forms(long: FloatArray, target: FloatArray | None) -> dict[_Form, int]:
    several = np.unique(long).size > 1
    simple: dict[_Form, int] = _OF_LENGTHS if several else {(_L,): 1}
    if target is None:
        return simple
    ratio = target / long
    if not several and np.ptp(ratio) == 0:
        return {(_SUM,): 1}
    if np.ptp(ratio) <= _PROPORTIONAL * ratio.max():
        return simple
    return {**simple, **_OF_TARGETS}


def _best_floor(measured: _Measurements, form: _Form, rank: int) -> _Candidate:
    """The form with the floor that serves it best."""
    fits = _non_negative(measured, form, is_first=rank == 0)
    terms = measured.forms[form] + (measured.levels > 0)
    scores = (fits.errors + _NEGLIGIBLE) * (1 + _PREFERENCE * rank) / _WORTH_IT**terms
    best = int(np.argmin(scores))
    return _Candidate(
        floor=float(measured.levels[best]),
        coefficients=fits.coefficients[best] / measured.scales @ _MEANING,
        error=float(fits.errors[best]),
        score=float(scores[best]),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Fits:
    """Least squares over some columns, once for each floor.

    Attributes:
        coefficients: Shape (floors, 8), those of the other columns 0.
        residuals: Shape (floors,): sum of squares; infinite where a coefficient is negative.
        errors: Shape (floors,): as in `_Candidate`; infinite likewise.
    """

    coefficients: FloatArray
    residuals: FloatArray
    errors: FloatArray

    def or_better(self, other: _Fits) -> _Fits:
        """For each floor the one of both that is nearer to the measurements."""
        ours = self.residuals <= other.residuals
        return _Fits(
            np.where(ours[:, None], self.coefficients, other.coefficients),
            np.where(ours, self.residuals, other.residuals),
            np.where(ours, self.errors, other.errors),
        )


def _non_negative(measured: _Measurements, form: _Form, *, is_first: bool) -> _Fits:
    """The form with a constant, or without one where it would be negative; the first form also as a constant alone.

    Forms of fewer terms are candidates of their own, so a negative coefficient only rules this one out.
    """
    fits = _solve(measured, (_ONE, *form))
    if np.isinf(fits.residuals).any():
        fits = fits.or_better(_solve(measured, form))
        if is_first:
            fits = fits.or_better(_solve(measured, (_ONE,)))
    return fits


def _solve(measured: _Measurements, form: _Form) -> _Fits:
    chosen = list(form)
    # The ridge keeps columns that say the same from being an error.
    inverse = np.linalg.inv(measured.products[:, chosen][:, :, chosen] + 1e-13 * np.eye(len(chosen)))
    some = (inverse @ measured.sums[:, chosen, None])[..., 0]
    columns = measured.columns[:, chosen]
    fitted = some @ columns.T
    weighted = columns * measured.weights[:, None]
    leverage = ((weighted @ inverse) * weighted).sum(axis=-1)
    on_floor = np.arange(measured.cost.size) < measured.floors[:, None]
    squares = np.where(on_floor, 0.0, measured.weights * (fitted - 1)) ** 2
    negative = some.min(axis=1) < 0
    coefficients = np.zeros((measured.floors.size, len(_MEANING)))
    coefficients[:, chosen] = some
    return _Fits(
        coefficients=coefficients,
        residuals=np.where(negative, np.inf, squares.sum(axis=1)),
        errors=np.where(negative, np.inf, _errors_left_out(measured, fitted, leverage, on_floor)),
    )


def _errors_left_out(
    measured: _Measurements, fitted: FloatArray, leverage: FloatArray, on_floor: npt.NDArray[np.bool_]
) -> FloatArray:
    """The root mean square of the relative error of each measurement, predicted from all others.

    Leaving out row i of a least squares fit turns its residual r into r / (1 - h), h being the row's leverage
    (Allen 1974, the PRESS statistic), so that nothing has to be fitted anew.

    Args:
        measured: The measurements.
        fitted: Shape (floors, n): fit / measured, without the floor.
        leverage: Shape (floors, n).
        on_floor: Shape (floors, n): which measurements the floor holds; the fit did not see them.
    """
    level = measured.levels[:, None] / measured.cost
    alone = ~on_floor & (leverage > _DECIDES_ALONE)
    residual = (1 - fitted) / np.where(on_floor | alone, 1.0, 1 - leverage)
    others = np.maximum(measured.floors, 2)[:, None]
    without = np.where(on_floor, 1 + (level - 1) * others / (others - 1), level)
    error = np.maximum(np.where(on_floor, fitted, 1 - residual), without) - 1
    rms = np.sqrt(np.mean((measured.weights * error) ** 2, axis=1))
    return np.where(alone.any(axis=1), np.inf, rms)
