"""Fits the cost model to measured batch shapes, and chooses how rich a form they support.

Every form is fitted by least squares of the relative error and counts only where all its coefficients are at least
0. As forms without some of a form's terms are tried too, that is what non-negative least squares would find. Forms
are compared by their error on measurements that they were not fitted to, leaving out one at a time: what a form
merely bends to, with few measurements, it can't predict.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
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
# Of the inverse's diagonal: beyond it, a column is a sum of the others to within rounding, as L² is with two lengths.
_SAYS_THE_SAME = 1e9
# Added to the squares' diagonal, which is 1.
_RIDGE = 1e-13
# So many floors of each form, those with which it fits best, are judged by leaving out measurements.
_FLOORS = 3

# Columns of the least squares, each by its coefficients of (1, B, and B times L, L², T, T², L·T). SUM is a term that
# works on all L + T positions alike, as a decoder-only language model does on prompt and answer; SUM2 is that for
# pairs of them.
_ONE, _B, _L, _L2, _T, _T2, _LT, _SUM, _SUM2 = range(9)
_MEANING = np.concatenate((np.eye(7), [[0, 0, 1, 0, 1, 0, 0], [0, 0, 0, 1, 0, 1, 2]]))

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
# The same with a constant per example. Without it, T would pass for one where targets follow the lengths. It comes
# after them all, so that it is not taken where another form fits as well.
_EACH_OF_LENGTHS: dict[_Form, int] = {(_B, _L): 2, (_B, _L2): 2, (_B, _L, _L2): 3}
_EACH_OF_TARGETS: dict[_Form, int] = {
    (_B, _SUM): 2,
    **dict.fromkeys([(_B, _L, _T), (_B, _L, _LT), (_B, _LT), (_B, _SUM, _SUM2), (_B, _SUM2)], 3),
    **dict.fromkeys([(_B, _L, _L2, _T), (_B, _L, _L2, _LT), (_B, _L, _T, _LT)], 4),
}


def fit_cost(
    batch_sizes: Sequence[float],
    lengths: Sequence[float],
    costs: Sequence[float],
    target_lengths: Sequence[float] | None = None,
    *,
    weights: Sequence[float] | None = None,
) -> CostModel | None:
    """Fit the cost model by least squares of the relative error, with coefficients of at least 0.

    Errors count by the square root of the cost: most at the limit of the memory, but not only there; and by
    `weights`. Costs and weights are positive.

    Returns:
        The simplest form that predicts measurements about as well as any, or None where there are fewer than two
        distinct padded lengths. Targets count only where they vary independently of the lengths; with a single
        length measured, its targets are taken to cost as much as the same number of lengths, which at shorter
        lengths errs on the safe side.
    """
    measured = _Measurements.of(batch_sizes, lengths, costs, target_lengths, weights)
    if measured is None:
        return None
    floor, coefficients = _chosen(measured)
    constant, example, linear, quadratic, target_linear, target_quadratic, cross = coefficients.tolist()
    model = CostModel(
        floor=floor,
        constant=constant,
        example=example,
        linear=linear,
        quadratic=quadratic,
        target_linear=target_linear,
        target_quadratic=target_quadratic,
        cross=cross,
        relative_error=0.0,
    )
    error = predict(model, measured.size, measured.long, measured.target) / measured.cost - 1
    return msgspec.structs.replace(
        model, relative_error=float(np.sqrt(np.mean(error**2))), largest_error=float(np.abs(error).max())
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Measurements:
    """What was measured, from the smallest padded length on; arrays of shape (n,) where nothing else is said.

    Attributes:
        size, long, target, cost: The measurements.
        weights: Their squares' mean is 1.
        floors: Shape (floors,): how many of the smallest a floor may hold; first 0, for no floor.
        levels: Shape (floors,): the floor that each of these sets.
        columns: Shape (n, columns): the columns over the cost, each of norm 1.
        scales: Shape (columns,): their norms before.
        pairs: Shape (n, columns²): each row's products of the weighted columns with each other.
        products: Shape (floors, columns, columns): their sums over what is not on the floor.
        sums: Shape (floors, columns): the columns' products with what they have to give, which is 1.
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
    pairs: FloatArray
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
        if not padded.size or np.ptp(padded) == 0 or not (cost > 0).all():
            return None
        order = np.argsort(padded, kind="stable")
        size, long, cost, other = size[order], long[order], cost[order], other[order]
        weight = (cost / cost.max()) ** _BY_COST
        if weights is not None:
            weight *= np.asarray(weights, dtype=np.float64)[order]
        weight /= np.sqrt(np.mean(weight**2))
        floors, levels = _possible_floors(cost)
        columns, scales = _columns(size, long, other, cost)
        weighted = columns * weight[:, None]
        # What is not on the floor are the last rows, so the normal equations are sums from the end.
        pairs = weighted[:, :, None] * weighted[:, None, :]
        products = np.cumsum(pairs[::-1], axis=0)[::-1]
        sums = np.cumsum((weighted * weight[:, None])[::-1], axis=0)[::-1]
        target = None if target_lengths is None else other
        return cls(
            size=size,
            long=long,
            target=target,
            cost=cost,
            weights=weight,
            floors=floors,
            levels=levels,
            columns=columns,
            scales=scales,
            pairs=pairs.reshape(cost.size, -1),
            products=products[floors],
            sums=sums[floors],
            forms=_forms(size, long, target),
        )


def _possible_floors(cost: FloatArray) -> tuple[npt.NDArray[np.intp], FloatArray]:
    """Return how many of the smallest may lie on the floor, and the floor that they set: their median.

    At least two, or it would explain a single one away; three must remain for the slopes; and what lies on a floor
    costs about the same.
    """
    counts, levels = [0], [0.0]
    lowest: list[float] = []
    for count, value in enumerate(cost[:-3].tolist(), 1):
        insort(lowest, value)
        if lowest[-1] > _LEVEL * lowest[0]:
            break
        if count > 1:
            counts.append(count)
            levels.append((lowest[(count - 1) // 2] + lowest[count // 2]) / 2)
    return np.array(counts), np.array(levels)


def _columns(size: FloatArray, long: FloatArray, other: FloatArray, cost: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The columns over the cost, scaled to norm 1 as they differ by many orders of magnitude, and their norms."""
    each = np.stack([np.ones(cost.size), long, long**2, other, other**2, long * other], axis=1) * size[:, None]
    columns = np.concatenate((np.ones((cost.size, 1)), each), axis=1) @ _MEANING.T / cost[:, None]
    scales = np.linalg.norm(columns, axis=0)
    scales[scales == 0] = 1.0
    return columns / scales, scales


def _forms(size: FloatArray, long: FloatArray, target: FloatArray | None) -> dict[_Form, int]:
    several = bool(np.ptp(long) > 0)
    # With a single batch size a constant per example says the same as the constant.
    each = several and bool(np.ptp(size) > 0)
    simple: dict[_Form, int] = _OF_LENGTHS if several else {(_L,): 1}
    alone = {**simple, **_EACH_OF_LENGTHS} if each else simple
    if target is None:
        return alone
    ratio = target / long
    if not several and np.ptp(ratio) == 0:
        return {(_SUM,): 1}
    if np.ptp(ratio) <= _PROPORTIONAL * ratio.max():
        return alone
    # Of targets that are all the same, T is the constant per example.
    if not each or np.ptp(target) == 0:
        return {**simple, **_OF_TARGETS}
    return {**simple, **_OF_TARGETS, **_EACH_OF_LENGTHS, **_EACH_OF_TARGETS}


def _chosen(measured: _Measurements) -> tuple[float, FloatArray]:
    """Return the floor and the coefficients, shape (7,), of the form that predicts best what it was not fitted to."""
    tried, coefficients, misfits = _non_negative(measured)
    # Shape (floors kept, forms): none, and those with which the form fits best.
    kept = np.concatenate((np.zeros((1, misfits.shape[1]), np.intp), np.argsort(misfits[1:], axis=0)[:_FLOORS] + 1))
    forms = np.arange(misfits.shape[1])
    sound = np.isfinite(misfits[kept, forms])
    at = (kept[sound], np.broadcast_to(forms, kept.shape)[sound])
    errors = np.full(kept.shape, np.inf)
    errors[sound] = _errors_left_out(measured, at[0], tried[at], coefficients[at])
    terms = np.array(list(measured.forms.values())) + (measured.levels[kept] > 0)
    scores = (errors + _NEGLIGIBLE) * (1 + _PREFERENCE * forms) / _WORTH_IT**terms
    # Too few measurements to judge by: the first form, without a floor.
    best = (0, 0) if np.isinf(errors[:, 0]).all() else np.unravel_index(np.argmin(scores), scores.shape)
    floor, form = kept[best], best[1]
    exact = _exactly(measured, measured.floors[floor], np.flatnonzero(tried[floor, form]))
    found = coefficients[floor, form] if exact is None else exact
    return float(measured.levels[floor]), found / measured.scales @ _MEANING


def _non_negative(measured: _Measurements) -> tuple[npt.NDArray[np.bool_], FloatArray, FloatArray]:
    """Return each form with a constant, or without one where it would be negative; the first also as a constant alone.

    Forms of fewer terms are candidates of their own, so a negative coefficient only rules a form out.

    Returns:
        Shape (floors, forms, columns): which columns are in it; their coefficients; and shape (floors, forms): the
        sum of squares that is left, infinite where a coefficient is negative.
    """
    forms = list(measured.forms)
    tried = [(_ONE, *form) for form in forms] + forms + [(_ONE,)]
    coefficients, misfits = _solve(measured, tried)
    count = len(forms)
    use = np.where(np.isfinite(misfits[:, :count]), 0, count) + np.arange(count)
    alone = np.isinf(misfits[:, 0]) & (misfits[:, -1] < misfits[:, count])
    use[alone, 0] = 2 * count
    contained = np.zeros((len(tried), len(_MEANING)), np.bool_)
    for index, form in enumerate(tried):
        contained[index, list(form)] = True
    floors = np.arange(measured.floors.size)[:, None]
    return contained[use], coefficients[floors, use], misfits[floors, use]


def _solve(measured: _Measurements, tried: Sequence[_Form]) -> tuple[FloatArray, FloatArray]:
    """Least squares over some sets of columns, once for each floor.

    Returns:
        Shape (floors, sets, columns): coefficients, those of columns that are not in it 0; and shape (floors, sets):
        the sum of squares that is left, infinite where a coefficient is negative.
    """
    coefficients = np.zeros((measured.floors.size, len(tried), len(_MEANING)))
    misfits = np.full(coefficients.shape[:2], np.inf)
    on_floor = np.arange(measured.cost.size) < measured.floors[:, None]
    level = measured.levels[:, None] / measured.cost
    to_explain = ((measured.weights * np.where(on_floor, level - 1, 1.0)) ** 2).sum(axis=1, keepdims=True)
    for width in set(map(len, tried)):
        sets = np.array([index for index, form in enumerate(tried) if len(form) == width])
        chosen = np.array([tried[index] for index in sets])
        # The ridge keeps columns that say the same from being an error.
        products = measured.products[:, chosen[:, :, None], chosen[:, None, :]] + _RIDGE * np.eye(width)
        sums = measured.sums[:, chosen]
        some = np.linalg.solve(products, sums[..., None])[..., 0]
        coefficients[:, sets[:, None], chosen] = some
        left = np.maximum(to_explain - (some * sums).sum(axis=-1), 0.0)
        misfits[:, sets] = np.where(some.min(axis=-1) < 0, np.inf, left)
    return coefficients, misfits


def _errors_left_out(
    measured: _Measurements, floors: npt.NDArray[np.intp], contained: npt.NDArray[np.bool_], coefficients: FloatArray
) -> FloatArray:
    """Return the root mean square of the relative error of each measurement, predicted from all others; shape (fits,).

    Leaving out row i of a least squares fit turns its residual r into r / (1 - h), h being the row's leverage
    (Allen 1974, the PRESS statistic), so that nothing has to be fitted anew. `floors`, of shape (fits,), are indices;
    `contained` and `coefficients` have shape (fits, columns). Infinite where some coefficient hangs on a single
    measurement, or on none.
    """
    both = contained[:, :, None] & contained[:, None, :]
    # Columns that are not in it are there as if they had nothing to do with the others.
    products = np.where(both, measured.products[floors], 0.0)
    products += np.where(contained, _RIDGE, 1.0)[:, :, None] * np.eye(len(_MEANING))
    inverse = np.where(both, np.linalg.inv(products), 0.0)
    # Not a matrix product: that would start threads, which wait for each other where others use the processor too.
    leverage = np.einsum("fc,nc->fn", inverse.reshape(len(floors), -1), measured.pairs)
    fitted = coefficients @ measured.columns.T
    count = measured.floors[floors][:, None]
    on_floor = np.arange(measured.cost.size) < count
    level = measured.levels[floors][:, None] / measured.cost
    alone = ~on_floor & (leverage > _DECIDES_ALONE)
    same = inverse.diagonal(axis1=1, axis2=2).max(axis=1) > _SAYS_THE_SAME
    residual = (1 - fitted) / np.where(on_floor | alone, 1.0, 1 - leverage)
    others = np.maximum(count, 2)
    without = np.where(on_floor, 1 + (level - 1) * others / (others - 1), level)
    error = np.maximum(np.where(on_floor, fitted, 1 - residual), without) - 1
    rms = np.sqrt(np.mean((measured.weights * error) ** 2, axis=1))
    return np.where(alone.any(axis=1) | same, np.inf, rms)


def _exactly(measured: _Measurements, floor: int, columns: npt.NDArray[np.intp]) -> FloatArray | None:
    """Return the coefficients, shape (columns,), from the rows themselves, as their products lose half of the digits.

    None where rounding makes one negative.
    """
    weights = measured.weights[floor:]
    rows = measured.columns[floor:, columns] * weights[:, None]
    some = np.linalg.lstsq(rows, weights)[0]
    if some.min() < 0:
        return None
    found = np.zeros(len(_MEANING))
    found[columns] = some
    return found
