"""The time of a packed micro-batch."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

from batchtune.errors import shortened
from batchtune.lengths import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLaw:
    """The time of a micro-batch, from its total tokens, the sum of its squared lengths and its number of sequences.

    Attention within each sequence makes the time grow with the squares. Only ratios count when micro-batches are
    evened out, so the coefficients may also be FLOPs.

    Raises:
        ValueError: A coefficient is negative or not finite, or none but `seconds_per_batch` is positive.
    """

    seconds_per_token: float
    seconds_per_squared_token: float = 0.0
    seconds_per_sequence: float = 0.0
    seconds_per_batch: float = 0.0

    def __post_init__(self) -> None:
        coefficients = astuple(self)
        are_numbers = all(isinstance(value, Real) for value in coefficients)
        if not are_numbers or not all(0 <= value < math.inf for value in coefficients):
            raise ValueError(
                "the coefficients of a time law must be numbers, finite and at least 0, got "
                f"{shortened(coefficients)}"
            )
        if not any(coefficients[:-1]):
            raise ValueError(
                "a time law needs a positive seconds_per_token, seconds_per_squared_token or seconds_per_sequence"
            )

    def of_sequences(self, lengths: npt.NDArray[Any]) -> FloatArray:
        """Return the seconds that each sequence adds to its micro-batch, shape (sequences,)."""
        tokens = lengths.astype(np.float64)
        linear = self.seconds_per_token + self.seconds_per_squared_token * tokens
        return linear * tokens + self.seconds_per_sequence


# The FLOPs of a dense model with a hidden size of 4,096: 12·h²·L + 2·h·L² a layer, divided by 2·h. verl balances by it.
DENSE_7B = TimeLaw(seconds_per_token=24576.0, seconds_per_squared_token=1.0)
