"""Checks of what users of the sampler give by hand: each message says which entry is wrong and what to do."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from batchtune.batching.table import Buckets, BucketTable, numbers

Numbers: TypeAlias = npt.NDArray[np.number[Any]]

_AT_ONCE = 1 << 18


class OverlongError(ValueError):
    """Examples beyond the last boundary.

    Args:
        problem: Which, a sentence without a full stop.
        remedy: What to do, likewise.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(f"{problem}. {remedy}" if remedy else problem)
        self.problem = problem


def checked_lengths(lengths: npt.ArrayLike) -> Numbers:
    """Return the lengths as an array. Raises ValueError for one that is not positive and finite."""
    values: Numbers = numbers("lengths", lengths, "; for a manifest or a data set there is from_config")
    for start in range(0, values.size, _AT_ONCE):
        part = values[start : start + _AT_ONCE]
        wrong = ~((part > 0) & (part < np.inf))
        if wrong.any():
            index = start + int(wrong.argmax())
            raise ValueError(
                f"lengths must be positive and finite, but entry {index} is {values[index]}: fix it, or leave the "
                "example out of the data set"
            )
    return values


def bucketed(values: Numbers, table: BucketTable, overlong: str) -> tuple[BucketTable, Buckets]:
    """Return the bucket of each example, and the table, with one bucket more where there are overlong examples.

    Raises:
        OverlongError: There are overlong examples, and they are an error.
    """
    buckets = table.assign(values)
    beyond = np.flatnonzero(buckets == table.num_buckets)
    if beyond.size == 0:
        return table, buckets
    if overlong == "error":
        index, last = int(beyond[0]), float(table.boundaries[-1])
        raise OverlongError(
            f"example {index} has the length {values[index]}, beyond the last of bucket_boundaries, {last}; "
            f"{beyond.size:,} of {values.size:,} examples are",
            'Leave them out of the data set, add a boundary, or say overlong="single" for batches of one',
        )
    return table.extended_to(float(values[beyond].max())), buckets
