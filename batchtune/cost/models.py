"""The cost of a batch shape, as a function of its size and lengths.

cost = max(floor, constant + B·(example + linear·L + quadratic·L² + target_linear·T + target_quadratic·T² + cross·L·T))

The form is that of a network whose layers work on each example whatever its length (example: a pooled vector, a
memory of fixed size), on each position (linear), on each pair of positions of a sequence (attention: quadratic) or of
an input and a target (a transducer's joint network, a decoder's attention to an encoder: cross), over a constant part
(parameters, optimizer state, launch overhead); the floor is the cost of the smallest shapes whatever their size.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from batchtune.results import CostModel

FloatArray = npt.NDArray[np.float64]


def predict(
    model: CostModel, batch_size: npt.ArrayLike, length: npt.ArrayLike, target_length: npt.ArrayLike | None = None
) -> FloatArray:
    """Return the model's cost of batch shapes, all arguments broadcast against each other, in bytes or seconds.

    Raises:
        ValueError: The model needs target lengths, and there are none.
    """
    if target_length is None and needs_targets(model):
        raise ValueError("the cost model was fitted with target lengths and needs them to predict")
    size, long = np.asarray(batch_size, dtype=np.float64), np.asarray(length, dtype=np.float64)
    target = 0.0 if target_length is None else np.asarray(target_length, dtype=np.float64)
    return np.maximum(model.constant + size * model.per_example(long, target), model.floor)


def scaled(model: CostModel, factor: float) -> CostModel:
    """Return the same model with every cost multiplied by a positive factor; its relative errors stay."""
    costs = ("floor", "constant", "example", "linear", "quadratic", "target_linear", "target_quadratic", "cross")
    return msgspec.structs.replace(model, **{name: factor * getattr(model, name) for name in costs})


def needs_targets(model: CostModel) -> bool:
    """Return whether the cost depends on the target length."""
    return bool(model.target_linear or model.target_quadratic or model.cross)
