"""The cost of a batch shape, padded or packed, as a function of its size and lengths, fitted to measured shapes.

cost = max(floor, constant + B·(example + linear·L + quadratic·L² + target_linear·T + target_quadratic·T² + cross·L·T))

The form is that of a network whose layers work on each example whatever its length (example: a pooled vector, a
memory of fixed size), on each position (linear), on each pair of positions of a sequence (attention: quadratic) or of
an input and a target (a transducer's joint network, a decoder's attention to an encoder: cross), over a constant part
(parameters, optimizer state, launch overhead); the floor is the cost of the smallest shapes whatever their size.

Forms with some of these terms are fitted by non-negative least squares of the relative error, and
compared by their leave-one-out error, so that a form that merely overfits a few measurements loses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt

from batchtune.epochs import floats
from batchtune.lengths import BoolArray, FloatArray, IntArray
from batchtune.results import BatchShape, CostModel, PackedModel

# With a smaller diagonal of the triangular factor, of columns of norm 1, a column is a sum of the others.
_DEPENDENT = 1e-12
# A column that would raise the fit by less, relative to the target's norm, does so by rounding.
_ROUNDING = 1e-13


def nonnegative_fits(
    columns: FloatArray, target: FloatArray, forms: BoolArray
) -> FloatArray:
    """Return each form's non-negative coefficients that bring its columns closest to the target.

    Such a fit is the least-squares fit of the columns whose coefficients are positive, and no other column of the
    form could be added with a positive one (the Kuhn-Tucker conditions: Lawson and Hanson 1974, chapter 23). Of the
    subsets that meet this, the smallest is taken.

    Args:
        columns: Shape (measured, columns), of any scales.
        target: Shape (measured,).
        forms: Shape (forms, columns): which columns each form has.

    Returns:
        Shape (forms, columns), 0 for unused columns.
    """
    scaled, scales = scaled_columns(columns)
    # The triangular factor is fitted as the columns are.
    independent, factor = np.linalg.qr(scaled)
    reduced = target @ independent
    bits = 1 << np.arange(scales.size)
    form_bits = forms @ bits
    subsets = _subsets_of(form_bits, bits)
    coefficients, determined = _fits(factor, reduced, subsets)
    residuals = reduced - coefficients @ factor.T
    rising = residuals @ factor > _ROUNDING * np.linalg.norm(target)
    could_be_added = (rising & ~subsets) @ bits
    complete = (could_be_added[:, np.newaxis] & form_bits) == 0
    # Should rounding leave a form without a complete subset, the closest is taken.
    distances = (residuals**2).sum(axis=1)
    ranks = np.where(complete, -1.0, distances[:, np.newaxis])
    allowed = determined & ((coefficients > 0) == subsets).all(axis=1)
    within = ((subsets @ bits)[:, np.newaxis] & ~form_bits) == 0
    best = np.where(within & allowed[:, np.newaxis], ranks, np.inf).argmin(axis=0)
    return cast(FloatArray, coefficients[best] / scales)


def scaled_columns(columns: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return columns of norm 1, and what they were divided by: they may differ by many orders of magnitude."""
    norms = np.linalg.norm(columns, axis=0)
    scales = np.where(norms > 0, norms, 1.0)
    return columns / scales, scales


def leverages(columns: FloatArray, subsets: BoolArray) -> tuple[FloatArray, FloatArray]:
    """Return the leverage of each measurement in the fits of subsets of the columns, and how independent these are.

    The leverages have the shape (subsets, measured). Independence is the least absolute value on the diagonal of
    the triangular factor of the subset's columns.
    """
    split = _split(columns, subsets)
    independent = split.independent[:, : len(columns)] * split.used[:, np.newaxis]
    return (independent**2).sum(axis=2), split.diagonal.min(axis=1)


class _Split(NamedTuple):
    """The QR factors of subsets of columns, the columns that are used first; `order` are their places."""

    order: IntArray
    used: BoolArray
    independent: FloatArray
    triangular: FloatArray

    @property
    def diagonal(self) -> FloatArray:
        """The absolute values of the triangular factors' diagonals, shape (subsets, columns); inf where not used."""
        diagonal = np.abs(self.triangular.diagonal(axis1=1, axis2=2))
        return np.where(self.used, diagonal, np.inf)


def _split(columns: FloatArray, subsets: BoolArray) -> _Split:
    """Split subsets of columns; rows of 0 are added where there are fewer rows than columns."""
    order = np.argsort(~subsets, axis=1, kind="stable")
    used = np.arange(subsets.shape[1]) < subsets.sum(axis=1)[:, np.newaxis]
    rows, count = columns.shape
    padded = np.vstack((columns, np.zeros((max(0, count - rows), count))))
    chosen = padded.T[order].swapaxes(1, 2) * used[:, np.newaxis]
    return _Split(order, used, *np.linalg.qr(chosen))


def _fits(
    factor: FloatArray, target: FloatArray, subsets: BoolArray
) -> tuple[FloatArray, BoolArray]:
    """Return the subsets' coefficients, 0 for other columns, and whether a subset determines them."""
    split = _split(factor, subsets)
    fixed = split.diagonal > _DEPENDENT
    # Without 0 on the diagonal each has a solution: that of an unused column is 0.
    replaced = ~(fixed & split.used)
    triangular = split.triangular + replaced[:, np.newaxis] * np.eye(len(replaced.T))
    projected = (target @ split.independent[:, : target.size]) * split.used
    solved = np.linalg.solve(triangular, projected[..., np.newaxis])[..., 0]
    coefficients = np.zeros_like(solved)
    np.put_along_axis(coefficients, split.order, solved, axis=1)
    return coefficients, cast(BoolArray, fixed.all(axis=1))


def _subsets_of(form_bits: IntArray, bits: IntArray) -> BoolArray:
    """Return every subset of any form, shape (subsets, columns), the smallest first."""
    numbers = np.arange(2 * bits[-1])
    within = (numbers[:, np.newaxis] & ~form_bits) == 0
    subsets = (numbers[within.any(axis=1), np.newaxis] & bits) > 0
    return subsets[np.argsort(subsets.sum(axis=1), kind="stable")]


AnyModel = TypeVar("AnyModel", CostModel, PackedModel)

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
# In a form's order.
_COLUMNS = ("constant", "example", *_SUMS, *_TERMS[1:])

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
    size = floats(batch_size)
    long = floats(length)
    target = 0.0 if target_length is None else floats(target_length)
    return np.maximum(
        model.constant + size * model.per_example(long, target), model.floor
    )


def scaled(model: AnyModel, factor: float) -> AnyModel:
    """Return the same model with every cost multiplied by a positive factor; its relative errors stay."""
    names = [name for name in model.__struct_fields__ if not name.endswith("_error")]
    costs = {name: factor * getattr(model, name) for name in names}
    return msgspec.structs.replace(model, **costs)


def weights_by_cost(costs: FloatArray) -> FloatArray:
    """Return how much the relative error of each measurement counts, shape (measured,)."""
    return cast(FloatArray, (costs / costs.max()) ** _BY_COST)


def nonnegative(columns: FloatArray, weights: FloatArray) -> FloatArray:
    """Return coefficients of at least 0 with which the columns come closest to 1, by weighted least squares.

    Columns have the shape (measured, coefficients).
    """
    every = np.ones((1, columns.shape[1]), dtype=bool)
    weighted = columns * weights[:, np.newaxis]
    return cast(FloatArray, nonnegative_fits(weighted, weights, every)[0])


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

    Errors are weighted by the square root of the cost, so that they count most near the memory
    limit, and by `weights`; both are positive. Of the forms that predict measurements about as well
    as any, return the simplest; None for fewer than two distinct padded lengths. Targets count only
    if they vary independently of the lengths; if only one length was measured, a unit of its
    targets is assumed to cost as much as one of its length, which is safe at shorter lengths.
    """
    size, long, cost = map(floats, (batch_sizes, lengths, costs))
    target = np.zeros(cost.size)
    if target_lengths is not None:
        target = floats(target_lengths)
    padded = size * (long + target)
    if not padded.size or np.ptp(padded) == 0 or not (cost > 0).all():
        return None
    weight = weights_by_cost(cost)
    if weights is not None:
        weight *= floats(weights)
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
    forms = list(_forms(size, long, target))
    in_use = {"constant"}.union(*forms)
    names = [name for name in _COLUMNS if name in in_use]
    measured = _Measured(
        names,
        *scaled_columns(np.stack([columns[name] for name in names], axis=1)),
        cost[order],
        weight[order] / np.sqrt(np.mean(weight**2)),
    )
    model = measured.best(forms)
    errors = predict(model, size, long, target) / cost - 1
    return msgspec.structs.replace(model, **_error_fields(errors))


def _error_fields(errors: FloatArray) -> dict[str, float]:
    """Return the fields of a model that hold its relative errors."""
    return {
        "relative_error": root_mean_square(errors),
        "largest_error": float(np.abs(errors).max()),
    }


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
    of_targets = []
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


@dataclass(frozen=True, slots=True, eq=False)
class _Measured:
    """Measurements, from the smallest padded length on.

    Attributes:
        names: The names of the columns.
        columns: Shape (measured, columns): each term's share of the cost, per unit of its coefficient, over its scale.
        scales: Shape (columns,).
        cost, weights: Shape (measured,); the mean of the weights' squares is 1.
    """

    names: list[str]
    columns: FloatArray
    scales: FloatArray
    cost: FloatArray
    weights: FloatArray

    def best(self, forms: list[_Form]) -> CostModel:
        """Return the model that predicts left-out measurements best; if they are too few, the first form's."""
        candidates = []
        columns = np.array(
            [[name in ("constant", *form) for name in self.names] for form in forms]
        )
        for floor in (_AboveFloor(self, columns, 0, 0.0), *self._floors(columns)):
            fits = floor.fits
            # An earlier form may say the same with fewer terms.
            _, distinct = np.unique(fits > 0, axis=0, return_index=True)
            distinct.sort()
            errors = floor.errors_of_left_out(fits[distinct])
            for index, error in zip(distinct.tolist(), errors, strict=True):
                score = (
                    (error + _NEGLIGIBLE)
                    * (1 + _PREFERENCE * index)
                    / _WORTH_IT ** (_weight_of(forms[index]) + (floor.level > 0))
                )
                candidates.append((score, floor, fits[index]))
        best = min(candidates, key=lambda candidate: candidate[0])
        if all(np.isinf(score) for score, floor, _ in candidates if not floor.count):
            best = candidates[0]
        _, floor, coefficients = best
        return floor.model(coefficients)

    def _floors(self, forms: BoolArray) -> list[_AboveFloor]:
        """Return the floors on which some of the smallest costs may lie, at the level of their median.

        At least two, or a floor would explain a single one away; three must remain for the slopes; and costs on a floor
        are about the same.
        """
        floors = []
        for count in range(2, self.cost.size - 2):
            lowest = self.cost[:count]
            if lowest.max() > _LEVEL * lowest.min():
                break
            floors.append(_AboveFloor(self, forms, count, float(np.median(lowest))))
        richest = forms.sum(axis=1).argmax()
        floors.sort(key=lambda floor: floor.error(floor.fits[richest]))
        return floors[:_FLOORS]


class _AboveFloor:
    """Measurements whose first `count` lie on a floor of this level. Forms are fitted to the others.

    `fits` are the forms' coefficients, shape (forms, columns).
    """

    def __init__(
        self, measured: _Measured, forms: BoolArray, count: int, level: float
    ) -> None:
        self.count = count
        self.level = level
        self._measured = measured
        self._floors = level / measured.cost
        # The level is a mean of what lies on the floor: without one of them it is that of the others.
        others = max(count, 2)
        self._floors_of_left_out = self._floors.copy()
        self._floors_of_left_out[:count] += (self._floors[:count] - 1) / (others - 1)
        weights = measured.weights[count:]
        self._columns = measured.columns[count:] * weights[:, np.newaxis]
        self.fits = nonnegative_fits(self._columns, weights, forms)

    def model(self, coefficients: FloatArray) -> CostModel:
        """Return the model of a fit, without its errors."""
        named = dict.fromkeys(_COEFFICIENTS, 0.0) | {"floor": self.level}
        shares = (coefficients / self._measured.scales).tolist()
        for name, coefficient in zip(self._measured.names, shares, strict=True):
            for term in _SUMS.get(name, (name,)):
                named[term] += coefficient
        return CostModel(**named, relative_error=0.0)

    def error(self, coefficients: FloatArray) -> float:
        """Return the root mean square of the relative errors of a fit."""
        predicted = self._measured.columns @ coefficients
        return float(self._mean_errors(np.maximum(predicted, self._floors)))

    def errors_of_left_out(self, fits: FloatArray) -> FloatArray:
        """Return the root mean square of the relative error of each measurement as predicted from all others.

        Leaving out row i of a least squares fit turns its residual r into r / (1 - h), h being the
        row's leverage (Allen 1974, the PRESS statistic), so that nothing has to be fitted anew. It
        is infinite if some coefficient depends on a single measurement, or on none.
        """
        leverage, independence = leverages(self._columns, fits > 0)
        unknown = (leverage.max(axis=1) >= _DECIDES_ALONE) | (
            independence <= _SAYS_THE_SAME
        )
        predicted = fits @ self._measured.columns.T
        above = predicted[:, self.count :]
        with np.errstate(divide="ignore", invalid="ignore"):
            predicted[:, self.count :] = 1 - (1 - above) / (1 - leverage)
        errors = self._mean_errors(np.maximum(predicted, self._floors_of_left_out))
        return np.where(unknown, np.inf, errors)

    def _mean_errors(self, predicted: FloatArray) -> FloatArray:
        """Return the root mean squares of the weighted relative errors of predicted / measured costs, the last axis."""
        weighted = self._measured.weights * (predicted - 1)
        return cast(FloatArray, np.sqrt((weighted**2).mean(axis=-1)))


# The cost of a packed batch as a function of its sequences, fitted to measured ones.
#
# cost = constant + token·Σ L + squared_token·Σ L² + sequence·n
#
# Layers that work on each token, attention within each sequence, and what each sequence takes whatever its length, over
# a constant part. The padded batches' model (`cost_model`) has the same terms of one length.

# With fewer distinct batches a fit says nothing that they don't.
_FEWEST_PACKED = 3
# Fits that miss by less are equally good.
_NEGLIGIBLE_IF_PACKED = 1e-3


def features_of(shape: BatchShape) -> tuple[int, int, int]:
    """Return a packed batch's Σ L, Σ L² and number of sequences."""
    return shape.tokens, shape.squared_tokens, shape.batch_size


def fit_packed(
    shapes: Sequence[BatchShape], costs: Sequence[float]
) -> PackedModel | None:
    """Fit the model to distinct packed batches by least squares of the relative error, with coefficients of at least 0.

    Errors are weighted by the square root of the cost, as for padded batches. None for fewer than 3
    batches, or if their tokens do not differ, or a cost is 0.
    """
    cost = np.array(costs, dtype=np.float64)
    features = np.array([features_of(shape) for shape in shapes], dtype=np.float64)
    if (
        cost.size < _FEWEST_PACKED
        or np.ptp(features[:, 0]) == 0
        or not (cost > 0).all()
    ):
        return None
    coefficients, errors = fit_terms(features, cost)
    names = ("constant", "token", "squared_token", "sequence")
    fitted = dict(zip(names, coefficients.tolist(), strict=True))
    return PackedModel(**fitted, **_error_fields(errors))


def fit_terms(features: FloatArray, costs: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Fit a constant and a coefficient of each feature, shape (batches, features), to positive costs.

    A feature after the first counts only if it explains the costs: a few batches can't tell
    correlated features apart. Return the coefficients, the constant first, and each batch's fit /
    measured - 1.
    """
    further = range(1, features.shape[1])
    candidates = []
    for count in range(features.shape[1]):
        for terms in combinations(further, count):
            coefficients, error = _fit(features, costs, (0, *terms))
            score = (
                max(root_mean_square(error), _NEGLIGIBLE_IF_PACKED) / _WORTH_IT**count
            )
            candidates.append((score, coefficients, error))
    _, coefficients, error = min(candidates, key=lambda candidate: candidate[0])
    return coefficients, error


def _fit(
    features: FloatArray, costs: FloatArray, terms: tuple[int, ...]
) -> tuple[FloatArray, FloatArray]:
    """Fit the constant and these features; the other coefficients are 0."""
    columns = np.column_stack((np.ones(costs.size), features)) / costs[:, np.newaxis]
    used = [0, *(1 + term for term in terms)]
    coefficients = np.zeros(1 + features.shape[1])
    coefficients[used] = nonnegative(columns[:, used], weights_by_cost(costs))
    return coefficients, columns @ coefficients - 1


def root_mean_square(errors: FloatArray) -> float:
    """Return the root of the mean of the squares."""
    return float(np.sqrt(np.mean(errors**2)))
