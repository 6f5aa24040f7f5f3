"""The cost of a packed batch as a function of its sequences, fitted to measured ones.

cost = constant + token·Σ L + squared_token·Σ L² + sequence·n

Layers that work on each token, attention within each sequence, and what each sequence takes whatever its length, over
a constant part. The padded batches' model (`cost_model`) has the same terms of one length.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from batchtune.epochs.cost_model import nonnegative, weights_by_cost
from batchtune.lengths import FloatArray
from batchtune.results import BatchShape, PackedModel

# With fewer distinct batches a fit says nothing that they don't.
_FEWEST = 3
# Fits that miss by less are equally good.
_NEGLIGIBLE = 1e-3
# A term counts only if it cuts the error to less than this share.
_WORTH_IT = 0.8


def features_of(shape: BatchShape) -> tuple[int, int, int]:
    """Return a packed batch's Σ L, Σ L² and number of sequences."""
    return shape.tokens, shape.squared_tokens, shape.batch_size


def fit_packed(
    shapes: Sequence[BatchShape], costs: Sequence[float]
) -> PackedModel | None:
    """Fit the model to distinct packed batches by least squares of the relative error, with coefficients of at least 0.

    Errors count by the square root of the cost, as for padded batches. None for fewer than 3 batches, or if their
    tokens do not differ, or a cost is 0.
    """
    cost = np.array(costs, dtype=np.float64)
    features = np.array([features_of(shape) for shape in shapes], dtype=np.float64)
    if cost.size < _FEWEST or np.ptp(features[:, 0]) == 0 or not (cost > 0).all():
        return None
    coefficients, error = fit_terms(features, cost)
    constant, token, squared_token, sequence = coefficients.tolist()
    return PackedModel(
        constant=constant,
        token=token,
        squared_token=squared_token,
        sequence=sequence,
        relative_error=root_mean_square(error),
        largest_error=float(np.abs(error).max()),
    )


def fit_terms(features: FloatArray, costs: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Fit a constant and a coefficient of each feature, shape (batches, features), to positive costs.

    A feature after the first counts only if it explains the costs: few batches can't tell what follows from what.
    Return the coefficients, the constant first, and each batch's fit / measured - 1.
    """
    further = range(1, features.shape[1])
    candidates = []
    for count in range(features.shape[1]):
        for terms in combinations(further, count):
            coefficients, error = _fit(features, costs, (0, *terms))
            score = max(root_mean_square(error), _NEGLIGIBLE) / _WORTH_IT**count
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
