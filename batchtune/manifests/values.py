"""Values as they stand in a file → numbers, and what is wrong with those that are none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from batchtune.lengths import FloatArray

# Beyond these no data set goes, whatever its unit; sums and squares of lengths must stay exact and finite.
SMALLEST = 1e-9
LARGEST = 1e15


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands for a value that could not be had, such as the length of a damaged audio file.

    Attributes:
        reason: In a few words, the same for all of a kind: by it they are counted.
        detail: What was seen, for the message; may be empty.
    """

    reason: str
    detail: str = ""

    def __repr__(self) -> str:
        return self.detail or "unreadable"


def number(value: object) -> float | None:
    """A value as a number, or None where it is none; text is read, `nan` and `inf` count as numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if isinstance(value, str) and "_" in value:  # Python's digit grouping, no number in a manifest
        return None
    try:
        return float(value)
    except ValueError:
        return None
    except OverflowError:
        return math.inf


def numbers(values: Sequence[object] | FloatArray) -> FloatArray:
    """Values as float64, shape (len(values),), NaN where one is no number."""
    if isinstance(values, np.ndarray):
        return values
    types = set(map(type, values))
    try:
        if types <= {int, float}:
            return np.array(values, dtype=np.float64)
        if types == {str} and "_" not in "".join(values):  # type: ignore[arg-type]  # all are str
            return np.fromiter(map(float, values), dtype=np.float64, count=len(values))  # type: ignore[arg-type]
    except (ValueError, OverflowError):
        pass  # one of them is no number: take them one by one
    found = map(number, values)
    return np.array([math.nan if value is None else value for value in found], dtype=np.float64)


def fault(value: object, scaled: float) -> str:
    """In a word or two, why a value is no valid length.

    Args:
        value: As it stands in the file.
        scaled: What `numbers` and the scale made of it.
    """
    if value is None:
        return "missing"
    if isinstance(value, Unreadable):
        return value.reason
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, str) and not value.strip():
        return "empty"
    if number(value) is None:
        return "text"
    if math.isnan(scaled):
        return "NaN"
    if math.isinf(scaled):
        return "infinite"
    if scaled > LARGEST:
        return "absurdly long"
    if 0 < scaled < SMALLEST:
        return "absurdly short"
    return "zero" if scaled == 0 else "negative"
