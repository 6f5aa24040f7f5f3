"""The cost of a batch shape as a function of its size and lengths, fitted to measured shapes.

cost = max(floor, constant + B·(example + linear·L + quadratic·L² + target_linear·T + target_quadratic·T² + cross·L·T))

The form is that of a network whose layers work on each example whatever its length (example: a pooled vector, a
memory of fixed size), on each position (linear), on each pair of positions of a sequence (attention: quadratic) or of
an input and a target (a transducer's joint network, a decoder's attention to an encoder: cross), over a constant part
(parameters, optimizer state, launch overhead); the floor is the cost of the smallest shapes whatever their size.

Every form is fitted by least squares of the relative error and counts only if all its coefficients are at least 0. As
forms without some of its terms are tried too, that is what non-negative least squares would find. Forms are compared by
their leave-one-out error, so that one that merely bends to few measurements loses.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from batchtune.lengths import FloatArray
from batchtune.results import CostModel

# A term counts only if it cuts the error to less than this share: a spurious one would be extrapolated.
_WORTH_IT = 0.8
# How a measurement's weight grows with its cost: 0 would count relative errors, 1 absolute ones. Relative errors let
# a batch of one, or of one short example, decide as much as those at the limit, which are what the model is for;
# absolute errors leave the small ones, which the last batch of a bucket can be, to chance.
_BY_COST = 0.5
# Forms with smaller errors are equally good; the order of the forms decides between them, and between near-equals.
_NEGLIGIBLE = 1e-6
_PREFERENCE = 0.01
# Costs on a floor differ by no more than this factor.
_LEVEL = 1.5
# Targets that are the same multiple of the length, to within this, add nothing to the lengths.
_PROPORTIONAL = 0.05
# With this leverage, a measurement alone decides a coefficient, and can't be left out.
_DECIDES_ALONE = 1 - 1e-7
# With a larger diagonal of the inverse, a column is a sum of the others to within rounding, as L² is with two lengths.
_SAYS_THE_SAME = 1e9
# Added to the squares' diagonal, which is 1.
_RIDGE = 1e-13
# The floors of each form, those with which it fits best, that are judged by leaving out measurements.
_FLOORS = 3

# Columns of the least squares, each by its coefficients of (1, B, and B times L, L², T, T², L·T). SUM is a term for
# all L + T positions alike, as in a decoder-only language model with prompt and answer; SUM2 for pairs of them.
_ONE, _B, _L, _L2, _T, _T2, _LT, _SUM, _SUM2 = range(9)
_MEANING = np.concatenate((np.eye(7), [[0, 0, 1, 0, 1, 0, 0], [0, 0, 0, 1, 0, 1, 2]]))

_COEFFICIENTS = ("floor", "constant", "example", "linear", "quadratic", "target_linear", "target_quadratic", "cross")

_Form = tuple[int, ...]
# Forms and the number of terms that each counts as. A form without a term in L counts as much as the one with it, which
# it stands for if that term would be negative: if targets hardly vary, T passes for a constant per example and L·T for
# L, and long examples with short targets would seem to cost nothing.
_OF_LENGTHS: dict[_Form, int] = {(_L,): 1, (_L2,): 1, (_L, _L2): 2}
_OF_TARGETS: dict[_Form, int] = {
    **dict.fromkeys([(_SUM,)], 1),
    **dict.fromkeys([(_SUM, _SUM2), (_L, _T), (_L, _LT), (_SUM, _L2), (_L, _T2), (_SUM2,), (_LT,), (_T,)], 2),
    **dict.fromkeys([(_L, _L2, _T), (_L, _T, _LT), (_L, _L2, _LT), (_L, _T, _T2), (_L, _L2, _T2)], 3),
    **dict.fromkeys([(_T, _LT), (_L2, _T), (_T, _T2)], 3),
    **dict.fromkeys([(_L, _L2, _T, _LT), (_L, _L2, _T, _T2), (_L, _T, _T2, _LT)], 4),
    (_L, _L2, _T, _T2, _LT): 5,
}
# The same with a constant per example; without it, T would pass for one if targets follow the lengths. They come last,
# so that another form that fits as well is preferred.
_EACH_OF_LENGTHS: dict[_Form, int] = {(_B, _L): 2, (_B, _L2): 2, (_B, _L, _L2): 3}
_EACH_OF_TARGETS: dict[_Form, int] = {
    (_B, _SUM): 2,
    **dict.fromkeys([(_B, _L, _T), (_B, _L, _LT), (_B, _LT), (_B, _SUM, _SUM2), (_B, _SUM2)], 3),
    **dict.fromkeys([(_B, _L, _L2, _T), (_B, _L, _L2, _LT), (_B, _L, _T, _LT)], 4),
}


def predict(
    model: CostModel, batch_size: npt.ArrayLike, length: npt.ArrayLike, target_length: npt.ArrayLike | None = None
) -> FloatArray:
    """Return the model's cost of batch shapes, all arguments broadcast against each other, in bytes or seconds.

    Raises ValueError if the model needs target lengths and gets none.
    """
    if target_length is None and needs_targets(model):
        raise ValueError("the cost model was fitted with target lengths and needs them to predict")
    size = np.asarray(batch_size, dtype=np.float64)
    long = np.asarray(length, dtype=np.float64)
    target = 0.0 if target_length is None else np.asarray(target_length, dtype=np.float64)
    return np.maximum(model.constant + size * model.per_example(long, target), model.floor)


def scaled(model: CostModel, factor: float) -> CostModel:
    """Return the same model with every cost multiplied by a positive factor; its relative errors stay."""
    return msgspec.structs.replace(model, **{name: factor * getattr(model, name) for name in _COEFFICIENTS})


def needs_targets(model: CostModel) -> bool:
    """Return whether the cost depends on the target length."""
    return bool(model.target_linear or model.target_quadratic or model.cross)


def fit_cost(
    batch_sizes: npt.ArrayLike,
    lengths: npt.ArrayLike,
    costs: npt.ArrayLike,
    target_lengths: npt.ArrayLike | None = None,
    *,
    weights: npt.ArrayLike | None = None,
) -> CostModel | None:
    """Fit the cost model by least squares of the relative error, with coefficients of at least 0.

    Errors count by the square root of the cost, so most at the limit of the memory, and by `weights`, both positive. Of
    the forms that predict measurements about as well as any, return the simplest; None for fewer than two distinct
    padded lengths. Targets count only if they vary independently of the lengths; if only one length was measured, a
    unit of its targets is taken to cost as much as one of its length, which is safe at shorter lengths.
    """
    size, long, cost = (np.asarray(values, dtype=np.float64) for values in (batch_sizes, lengths, costs))
    if target_lengths is None:
        target = np.zeros(cost.size)
    else:
        target = np.asarray(target_lengths, dtype=np.float64)
    padded = size * (long + target)
    if not padded.size or np.ptp(padded) == 0 or not (cost > 0).all():
        return None
    order = np.argsort(padded, kind="stable")
    size = size[order]
    long = long[order]
    cost = cost[order]
    target = target[order]
    weight = (cost / cost.max()) ** _BY_COST
    if weights is not None:
        weight *= np.asarray(weights, dtype=np.float64)[order]
    each = np.stack([np.ones(cost.size), long, long**2, target, target**2, long * target], axis=1) * size[:, None]
    terms = np.concatenate((np.ones((cost.size, 1)), each), axis=1)
    forms = _forms(size, long, None if target_lengths is None else target)
    floor, coefficients = _Fit(terms, cost, weight / np.sqrt(np.mean(weight**2)), forms).best()
    named = dict(zip(_COEFFICIENTS, (floor, *coefficients.tolist()), strict=True))
    model = CostModel(**named, relative_error=0.0)
    error = predict(model, size, long, None if target_lengths is None else target) / cost - 1
    return msgspec.structs.replace(
        model, relative_error=float(np.sqrt(np.mean(error**2))), largest_error=float(np.abs(error).max())
    )


def _forms(size: FloatArray, long: FloatArray, target: FloatArray | None) -> dict[_Form, int]:
    """Return the forms to try in the order of preference, each with the number of terms that it counts as."""
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
    # If targets are all the same, T is the constant per example.
    if not each or np.ptp(target) == 0:
        return {**simple, **_OF_TARGETS}
    return {**simple, **_OF_TARGETS, **_EACH_OF_LENGTHS, **_EACH_OF_TARGETS}


class _Fit:
    """Fits all forms to n measurements, from the smallest padded length on, and chooses one."""

    def __init__(self, terms: FloatArray, cost: FloatArray, weights: FloatArray, forms: dict[_Form, int]) -> None:
        self.forms = forms
        self.weights = weights  # shape (n,); their squares' mean is 1
        self.floors, self.levels = _possible_floors(cost)  # shape (floors,)
        # Shape (n, columns): the columns over the cost, of norm 1 as they differ by many orders of magnitude.
        columns = terms @ _MEANING.T / cost[:, None]
        self.scales = np.linalg.norm(columns, axis=0)
        self.scales[self.scales == 0] = 1.0
        self.columns = columns / self.scales
        weighted = self.columns * weights[:, None]
        # The last rows are above the floor, so the normal equations are sums from the end.
        pairs = weighted[:, :, None] * weighted[:, None, :]
        self.pairs = pairs.reshape(cost.size, -1)  # shape (n, columns²)
        # Shapes (floors, columns, columns) and (floors, columns): the columns' products with each other and with 1.
        self.products = np.cumsum(pairs[::-1], axis=0)[::-1][self.floors]
        self.sums = np.cumsum((weighted * weights[:, None])[::-1], axis=0)[::-1][self.floors]
        # Shape (floors, n): whether it is on the floor, and the floor over the cost.
        self.on_floor = np.arange(cost.size) < self.floors[:, None]
        self.level = self.levels[:, None] / cost

    def best(self) -> tuple[float, FloatArray]:
        """Return the floor and the coefficients, shape (7,), of the form that predicts left-out measurements best."""
        tried, coefficients, misfits = self._non_negative()
        # Shape (floors kept, forms): no floor, and those with which the form fits best.
        kept = np.concatenate((np.zeros((1, misfits.shape[1]), np.intp), np.argsort(misfits[1:], axis=0)[:_FLOORS] + 1))
        forms = np.arange(misfits.shape[1])
        sound = np.isfinite(misfits[kept, forms])
        at = (kept[sound], np.broadcast_to(forms, kept.shape)[sound])
        errors = np.full(kept.shape, np.inf)
        errors[sound] = self._errors_left_out(at[0], tried[at], coefficients[at])
        terms = np.array(list(self.forms.values())) + (self.levels[kept] > 0)
        scores = (errors + _NEGLIGIBLE) * (1 + _PREFERENCE * forms) / _WORTH_IT**terms
        # Too few measurements to judge by: the first form, without a floor.
        best = (0, 0) if np.isinf(errors[:, 0]).all() else np.unravel_index(np.argmin(scores), scores.shape)
        floor = kept[best]
        form = best[1]
        chosen_coefficients = coefficients[floor, form]
        # From the rows themselves, as their products lose half of the digits, unless rounding makes one negative.
        chosen = np.flatnonzero(tried[floor, form])
        rows = slice(self.floors[floor], None)
        exact = np.linalg.lstsq(self.columns[rows, chosen] * self.weights[rows, None], self.weights[rows])[0]
        if exact.min() >= 0:
            chosen_coefficients = np.zeros(len(_MEANING))
            chosen_coefficients[chosen] = exact
        return float(self.levels[floor]), chosen_coefficients / self.scales @ _MEANING

    def _non_negative(self) -> tuple[npt.NDArray[np.bool_], FloatArray, FloatArray]:
        """Fit each form with a constant, or without if that would be negative; the first also as a constant alone.

        Return its columns, shape (floors, forms, columns), their coefficients, and the sum of squared errors, shape
        (floors, forms), infinite if a coefficient is negative: forms of fewer terms are candidates of their own.
        """
        forms = list(self.forms)
        tried = [(_ONE, *form) for form in forms] + forms + [(_ONE,)]
        coefficients, misfits = self._solve(tried)
        count = len(forms)
        use = np.where(np.isfinite(misfits[:, :count]), 0, count) + np.arange(count)
        alone = np.isinf(misfits[:, 0]) & (misfits[:, -1] < misfits[:, count])
        use[alone, 0] = 2 * count
        contained = np.zeros((len(tried), len(_MEANING)), np.bool_)
        for index, form in enumerate(tried):
            contained[index, list(form)] = True
        floors = np.arange(self.floors.size)[:, None]
        return contained[use], coefficients[floors, use], misfits[floors, use]

    def _solve(self, tried: Sequence[_Form]) -> tuple[FloatArray, FloatArray]:
        """Return coefficients and sums of squared errors over some sets of columns, once for each floor."""
        coefficients = np.zeros((self.floors.size, len(tried), len(_MEANING)))
        misfits = np.full(coefficients.shape[:2], np.inf)
        to_explain = (self.weights * np.where(self.on_floor, self.level - 1, 1.0)) ** 2
        for width in set(map(len, tried)):
            sets = np.array([index for index, form in enumerate(tried) if len(form) == width])
            chosen = np.array([tried[index] for index in sets])
            # The ridge keeps linearly dependent columns from being an error.
            products = self.products[:, chosen[:, :, None], chosen[:, None, :]] + _RIDGE * np.eye(width)
            sums = self.sums[:, chosen]
            some = np.linalg.solve(products, sums[..., None])[..., 0]
            coefficients[:, sets[:, None], chosen] = some
            left = np.maximum(to_explain.sum(axis=1, keepdims=True) - (some * sums).sum(axis=-1), 0.0)
            misfits[:, sets] = np.where(some.min(axis=-1) < 0, np.inf, left)
        return coefficients, misfits

    def _errors_left_out(
        self, floors: npt.NDArray[np.intp], contained: npt.NDArray[np.bool_], coefficients: FloatArray
    ) -> FloatArray:
        """Return the root mean square of the relative error of each measurement, predicted from all others.

        Leaving out row i of a least squares fit turns its residual r into r / (1 - h), h being the row's leverage
        (Allen 1974, the PRESS statistic), so that nothing has to be fitted anew. `floors`, of shape (fits,), are
        indices; `contained` and `coefficients` have shape (fits, columns). The result, of shape (fits,), is infinite
        if some coefficient hangs on a single measurement, or on none.
        """
        both = contained[:, :, None] & contained[:, None, :]
        # Columns that are not in the form are independent of the others.
        products = np.where(both, self.products[floors], 0.0)
        products += np.where(contained, _RIDGE, 1.0)[:, :, None] * np.eye(len(_MEANING))
        inverse = np.where(both, np.linalg.inv(products), 0.0)
        # Not a matrix product: its threads would wait for each other on a busy processor.
        leverage = np.einsum("fc,nc->fn", inverse.reshape(len(floors), -1), self.pairs)
        fitted = coefficients @ self.columns.T
        on_floor = self.on_floor[floors]
        level = self.level[floors]
        alone = ~on_floor & (leverage > _DECIDES_ALONE)
        same = inverse.diagonal(axis1=1, axis2=2).max(axis=1) > _SAYS_THE_SAME
        residual = (1 - fitted) / np.where(on_floor | alone, 1.0, 1 - leverage)
        others = np.maximum(self.floors[floors][:, None], 2)
        without = np.where(on_floor, 1 + (level - 1) * others / (others - 1), level)
        error = np.maximum(np.where(on_floor, fitted, 1 - residual), without) - 1
        rms = np.sqrt(np.mean((self.weights * error) ** 2, axis=1))
        return np.where(alone.any(axis=1) | same, np.inf, rms)


def _possible_floors(cost: FloatArray) -> tuple[npt.NDArray[np.intp], FloatArray]:
    """Return how many of the smallest costs may lie on the floor, and the floor that they set: their median.

    At least two, or a floor would explain a single one away; three must remain for the slopes; and costs on a floor are
    about the same.
    """
    counts = [0]
    levels = [0.0]
    lowest: list[float] = []
    for count, value in enumerate(cost[:-3].tolist(), 1):
        insort(lowest, value)
        if lowest[-1] > _LEVEL * lowest[0]:
            break
        if count > 1:
            counts.append(count)
            levels.append((lowest[(count - 1) // 2] + lowest[count // 2]) / 2)
    return np.array(counts), np.array(levels)
