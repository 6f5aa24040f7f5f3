"""cost = max(floor, constant + linear·B·L + quadratic·B·L²), fitted to measured batch shapes.

The form is that of a network whose layers work on each position (linear in B·L) or on each pair of positions of
a sequence (attention: quadratic in L), over a constant part (parameters, optimizer state, launch overhead); the
floor is what the smallest shapes cost whatever their size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from batchtune.results import CostModel

FloatArray = npt.NDArray[np.float64]

# A richer form is believed only where it cuts the error to less than this share: with few trials the quadratic
# term would otherwise fit noise, and extrapolate it.
_WORTH_IT = 0.7


def predict(model: CostModel, batch_size: npt.ArrayLike, length: npt.ArrayLike) -> FloatArray:
    """The model's cost of batch shapes.

    Args:
        model: Fitted coefficients.
        batch_size: Any shape; broadcast against `length`.
        length: Lengths in the manifest's unit.

    Returns:
        Costs in the model's unit (bytes or seconds), of the broadcast shape.
    """
    size = np.asarray(batch_size, dtype=np.float64)
    long = np.asarray(length, dtype=np.float64)
    cost = model.constant + size * long * (model.linear + model.quadratic * long)
    return np.maximum(cost, model.floor)


def fit_cost(batch_sizes: Sequence[float], lengths: Sequence[float], costs: Sequence[float]) -> CostModel | None:
    """Fits the cost model by least squares of the relative error, with coefficients of at least 0.

    Args:
        batch_sizes: Batch size of each measurement.
        lengths: Length of each, in the manifest's unit.
        costs: What each cost, positive.

    Returns:
        The simplest form that explains the measurements about as well as any (without the quadratic term, without
        a floor), or None where there are fewer than two distinct padded lengths.
    """
    size = np.asarray(batch_sizes, dtype=np.float64)
    long = np.asarray(lengths, dtype=np.float64)
    cost = np.asarray(costs, dtype=np.float64)
    padded = size * long
    if np.unique(padded).size < 2 or not (cost > 0).all():
        return None
    with_quadratic = np.unique(long).size > 1
    best = _fit(size, long, cost, floor_count=0, quadratic=False)
    # The floor holds the measurements of the smallest padded lengths, however many they are: at least two, or it
    # would explain a single one away, and at least three must remain for the slopes.
    for quadratic in (False, True) if with_quadratic else (False,):
        for floor_count in (0, *range(2, cost.size - 2)):
            candidate = _fit(size, long, cost, floor_count=floor_count, quadratic=quadratic)
            more_terms = (quadratic, floor_count > 0) > (best.quadratic > 0, best.floor > 0)
            if candidate.relative_error < best.relative_error * (_WORTH_IT if more_terms else 1.0):
                best = candidate
    return best


def _fit(size: FloatArray, long: FloatArray, cost: FloatArray, *, floor_count: int, quadratic: bool) -> CostModel:
    from scipy.optimize import nnls

    order = np.argsort(size * long, kind="stable")
    floor = float(np.median(cost[order[:floor_count]])) if floor_count else 0.0
    rest = order[floor_count:]
    columns = [np.ones(rest.size), size[rest] * long[rest]]
    if quadratic:
        columns.append(size[rest] * long[rest] ** 2)
    matrix = np.stack(columns, axis=1) / cost[rest, None]
    # Columns differ by many orders of magnitude (1 against B·L²): scale them, or the solver's tolerance decides.
    scale = np.linalg.norm(matrix, axis=0)
    coefficients = nnls(matrix / scale, np.ones(rest.size))[0] / scale
    model = CostModel(
        floor=floor,
        constant=float(coefficients[0]),
        linear=float(coefficients[1]),
        quadratic=float(coefficients[2]) if quadratic else 0.0,
        relative_error=0.0,
    )
    error = float(np.sqrt(np.mean((predict(model, size, long) / cost - 1) ** 2)))
    return CostModel(
        floor=model.floor,
        constant=model.constant,
        linear=model.linear,
        quadratic=model.quadratic,
        relative_error=error,
    )
