"""Numbers that users give as arguments of the Python interface."""

from __future__ import annotations

import numpy as np

from batchtune.errors import shortened

# Counters have 64 bits, and there are further epochs and batches after the largest.
_LARGEST = 2**62


def whole(name: str, value: float, lowest: int = 0, *, highest: int = _LARGEST) -> int:
    """Return the value as an int; raise ValueError unless it is a whole number from `lowest` to `highest`.

    Floats count, as a size may have been computed.
    """
    if not is_number(value) or value != value // 1 or value < lowest:
        raise ValueError(
            f"{name} must be a whole number, at least {lowest}, got {shortened(value)}"
        )
    if value > highest:
        raise ValueError(f"{name} must be at most {highest:,}, got {shortened(value)}")
    return int(value)


def is_number(value: object) -> bool:
    """Return whether the value is a number of Python or NumPy."""
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(
        value, bool
    )
