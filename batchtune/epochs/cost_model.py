"""The cost of a batch shape as a function of its size and lengths, fitted to measured shapes.

cost = max(floor, constant + B·(example + linear·L + quadratic·L² + target_linear·T + target_quadratic·T² + cross·L·T))

The form is that of a network whose layers work on each example whatever its length (example: a pooled vector, a
memory of fixed size), on each position (linear), on each pair of positions of a sequence (attention: quadratic) or of
an input and a target (a transducer's joint network, a decoder's attention to an encoder: cross), over a constant part
(parameters, optimizer state, launch overhead); the floor is the cost of the smallest shapes whatever their size.

Forms with some of these terms are fitted by non-negative least squares of the relative error, and compared by their
leave-one-out error, so that one that merely bends to few measurements loses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple, cast

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
# With a smaller diagonal of the triangular factor, a column is a sum of the others, as L² is with two lengths.
_SAYS_THE_SAME = 1e-5
# The floors that are tried: those with which a form of all terms fits best.
_FLOORS = 3

_TERMS = (
    "example",
    "linear",
    "quadratic",
    "target_linear",
    "target_quadratic",
    "cross",
)
_COEFFICIENTS = ("floor", "constant", *_TERMS)
# Terms for all L + T positions alike, as in a decoder-only language model with prompt and answer; for their pairs.
_SUMS = {
    "sum": ("linear", "target_linear"),
    "sum of pairs": ("quadratic", "target_quadratic", "cross", "cross"),
}

_Form = tuple[str, ...]


def predict(
    model: CostModel,
    batch_size: npt.ArrayLike,
    length: npt.ArrayLike,
    target_length: npt.ArrayLike | None = None,
) -> FloatArray:
    """Return the model's cost of batch shapes, all arguments broadcast against each other, in bytes or seconds.

    Raises ValueError if the model needs target lengths and gets none.
    """
    if target_length is None and needs_targets(model):
        raise ValueError(
            "the cost model was fitted with target lengths and needs them to predict"
        )
    size = np.asarray(batch_size, dtype=np.float64)
    long = np.asarray(length, dtype=np.float64)
    target = (
        0.0 if target_length is None else np.asarray(target_length, dtype=np.float64)
    )
    return np.maximum(
        model.constant + size * model.per_example(long, target), model.floor
    )


def scaled(model: CostModel, factor: float) -> CostModel:
    """Return the same model with every cost multiplied by a positive factor; its relative errors stay."""
    return msgspec.structs.replace(
        model, **{name: factor * getattr(model, name) for name in _COEFFICIENTS}
    )


def weights_by_cost(costs: FloatArray) -> FloatArray:
    """Return how much the relative error of each measurement counts, shape (measured,)."""
    return cast(FloatArray, (costs / costs.max()) ** _BY_COST)


def nonnegative(columns: FloatArray, weights: FloatArray) -> FloatArray:
    """Return coefficients of at least 0 with which the columns come closest to 1, by weighted least squares.

    Columns have the shape (measured, coefficients).
    """
    from scipy.optimize import nnls

    scaled_to_one, scales = scaled_columns(columns)
    coefficients, _ = nnls(
        scaled_to_one * weights[:, np.newaxis], weights, maxiter=1000
    )
    found: FloatArray = coefficients / scales
    return found


def scaled_columns(columns: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return columns of norm 1, and what they were divided by: they may differ by many orders of magnitude."""
    norms = np.linalg.norm(columns, axis=0)
    scales = np.where(norms > 0, norms, 1.0)
    return columns / scales, scales


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
    size, long, cost = (
        np.asarray(values, dtype=np.float64) for values in (batch_sizes, lengths, costs)
    )
    target = np.zeros(cost.size)
    if target_lengths is not None:
        target = np.asarray(target_lengths, dtype=np.float64)
    padded = size * (long + target)
    if not padded.size or np.ptp(padded) == 0 or not (cost > 0).all():
        return None
    weight = weights_by_cost(cost)
    if weights is not None:
        weight *= np.asarray(weights, dtype=np.float64)
    order = np.argsort(padded, kind="stable")
    terms = dict(
        zip(
            _TERMS,
            (np.ones(cost.size), long, long**2, target, target**2, long * target),
            strict=True,
        )
    )
    columns = {name: (size * values / cost)[order] for name, values in terms.items()}
    for name, summed in _SUMS.items():
        columns[name] = np.sum([columns[term] for term in summed], axis=0)
    columns["constant"] = 1 / cost[order]
    measured = _Measured(
        list(columns),
        *scaled_columns(np.stack(list(columns.values()), axis=1)),
        cost[order],
        weight[order] / np.sqrt(np.mean(weight**2)),
    )
    model = measured.best(list(_forms(size, long, target)))
    error = predict(model, size, long, target) / cost - 1
    return msgspec.structs.replace(
        model,
        relative_error=float(np.sqrt(np.mean(error**2))),
        largest_error=float(np.abs(error).max()),
    )


def _forms(size: FloatArray, long: FloatArray, target: FloatArray) -> Iterator[_Form]:
    """Yield the forms to try in the order of preference.

    Those with a constant per example come last: without it, T would pass for one if targets follow the lengths.
    """
    several = bool(np.ptp(long) > 0)
    each: list[_Form] = [()]
    # With a single batch size a constant per example says the same as the constant.
    if several and np.ptp(size) > 0:
        each.append(("example",))
    of_lengths: list[_Form] = [("linear",)]
    if several:
        of_lengths += [("quadratic",), ("linear", "quadratic")]
    of_targets: list[_Form] = []
    if target.any():
        ratio = target / long
        if not several and np.ptp(ratio) == 0:
            yield ("sum",)
            return
        if np.ptp(ratio) > _PROPORTIONAL * ratio.max():
            of_targets += [
                ("sum",),
                ("sum of pairs",),
                ("sum", "sum of pairs"),
                ("sum", "quadratic"),
            ]
            for count in (1, 2, 3, 5):
                of_targets += [
                    form
                    for form in combinations(_TERMS[1:], count)
                    if set(form) - {"linear", "quadratic"}
                ]
        if np.ptp(target) == 0:  # then T is the constant per example
            each = [()]
    for example in each:
        for form in (*of_lengths, *of_targets):
            yield (*example, *form)


def _weight_of(form: _Form) -> int:
    """Return the number of terms that a form counts as.

    One without a term in L counts as much as with it, which it stands for if that term would be negative: if targets
    hardly vary, T passes for a constant per example and L·T for L.
    """
    has_targets = any(term not in ("example", "linear", "quadratic") for term in form)
    return len(form) + (has_targets and not {"linear", "sum"} & set(form))


class _Fit(NamedTuple):
    """The terms of a form that have a positive coefficient, by their columns, and these coefficients."""

    terms: tuple[int, ...]
    coefficients: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class _Measured:
    """Measurements, from the smallest padded length on.

    Attributes:
        terms: The names of the columns.
        columns: Shape (measured, terms): each term's share of the cost, per unit of its coefficient, over its scale.
        scales: Shape (terms,).
        cost, weights: Shape (measured,); the mean of the weights' squares is 1.
    """

    terms: list[str]
    columns: FloatArray
    scales: FloatArray
    cost: FloatArray
    weights: FloatArray

    def best(self, forms: list[_Form]) -> CostModel:
        """Return the model that predicts left-out measurements best; if they are too few, the first form's."""
        candidates = []
        for floor in (_AboveFloor(self, 0, 0.0), *self._floors(forms)):
            known = set()
            for index, form in enumerate(forms):
                fit = floor.fit(form)
                # An earlier form may say the same with fewer terms.
                if fit.terms not in known:
                    known.add(fit.terms)
                    score = (
                        (floor.error_of_left_out(fit) + _NEGLIGIBLE)
                        * (1 + _PREFERENCE * index)
                        / _WORTH_IT ** (_weight_of(form) + (floor.level > 0))
                    )
                    candidates.append((score, floor, fit))
        best = min(candidates, key=lambda candidate: candidate[0])
        if all(np.isinf(score) for score, floor, _ in candidates if not floor.count):
            best = candidates[0]
        _, floor, fit = best
        return floor.model(fit)

    def _floors(self, forms: list[_Form]) -> list[_AboveFloor]:
        """Return the floors on which some of the smallest costs may lie, at the level of their median.

        At least two, or a floor would explain a single one away; three must remain for the slopes; and costs on a floor
        are about the same.
        """
        floors = []
        richest = max(forms, key=len)
        for count in range(2, self.cost.size - 2):
            lowest = self.cost[:count]
            if lowest.max() > _LEVEL * lowest.min():
                break
            floor = _AboveFloor(self, count, float(np.median(lowest)))
            floors.append((floor.error(floor.fit(richest)), count, floor))
        return [floor for _, _, floor in sorted(floors)[:_FLOORS]]


class _AboveFloor:
    """Measurements whose first `count` lie on a floor of this level. Forms are fitted to the others."""

    def __init__(self, measured: _Measured, count: int, level: float) -> None:
        self.count = count
        self.level = level
        self._measured = measured
        self._floors = level / measured.cost
        # The level is a mean of what lies on the floor: without one of them it is that of the others.
        others = max(count, 2)
        self._floors_of_left_out = self._floors.copy()
        self._floors_of_left_out[:count] += (self._floors[:count] - 1) / (others - 1)
        self._weights = measured.weights[count:, np.newaxis]
        self._columns = measured.columns[count:] * self._weights
        columns, self._scales = scaled_columns(measured.columns[count:])
        self._scaled_columns = columns * self._weights

    def fit(self, form: _Form) -> _Fit:
        """Fit a form."""
        from scipy.optimize import nnls

        terms = [self._measured.terms.index(name) for name in ("constant", *form)]
        columns = self._scaled_columns.take(terms, axis=1)
        coefficients, _ = nnls(columns, self._weights.ravel(), maxiter=1000)
        used = coefficients.nonzero()[0]
        places = tuple(terms[place] for place in used.tolist())
        return _Fit(places, coefficients[used] / self._scales.take(places))

    def model(self, fit: _Fit) -> CostModel:
        """Return the model of a fit, without its errors."""
        coefficients = fit.coefficients / self._measured.scales.take(fit.terms)
        named = dict.fromkeys(_COEFFICIENTS, 0.0) | {"floor": self.level}
        for place, coefficient in zip(fit.terms, coefficients.tolist(), strict=True):
            name = self._measured.terms[place]
            for term in _SUMS.get(name, (name,)):
                named[term] += coefficient
        return CostModel(**named, relative_error=0.0)

    def error(self, fit: _Fit) -> float:
        """Return the root mean square of the relative errors of a fit."""
        columns = self._measured.columns.take(fit.terms, axis=1)
        return self._mean_error(np.maximum(columns @ fit.coefficients, self._floors))

    def error_of_left_out(self, fit: _Fit) -> float:
        """Return the root mean square of the relative error of each measurement as predicted from all others.

        Leaving out row i of a least squares fit turns its residual r into r / (1 - h), h being the row's leverage
        (Allen 1974, the PRESS statistic), so that nothing has to be fitted anew. It is infinite if some coefficient
        hangs on a single measurement, or on none.
        """
        from scipy.linalg.lapack import dgeqrf, dorgqr

        triangular, reflections, *_ = dgeqrf(self._columns.take(fit.terms, axis=1))
        independent, *_ = dorgqr(triangular, reflections)
        leverage = (independent**2).sum(axis=1)
        if (
            leverage.max() >= _DECIDES_ALONE
            or np.abs(triangular.diagonal()).min() <= _SAYS_THE_SAME
        ):
            return np.inf
        columns = self._measured.columns.take(fit.terms, axis=1)
        predicted = columns @ fit.coefficients
        above = slice(self.count, None)
        predicted[above] = 1 - (1 - predicted[above]) / (1 - leverage)
        return self._mean_error(np.maximum(predicted, self._floors_of_left_out))

    def _mean_error(self, predicted: FloatArray) -> float:
        """Return the root mean square of the weighted relative errors of predicted / measured costs."""
        weighted = self._measured.weights * (predicted - 1)
        return math.sqrt((weighted**2).mean())
