"""What users of the sampler give by hand, checked: each message says which entry is wrong and what to do."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from batchtune.batching import epochs
from batchtune.batching.table import BucketTable

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


def _numbers(name: str, given: npt.ArrayLike, hint: str = "") -> Numbers:
    values = np.asarray(given)
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"{name} must be one-dimensional and not empty, got shape {values.shape}{hint}")
    if values.dtype.kind not in "iuf":
        raise ValueError(f"{name} must be numbers, got {values.dtype}{hint}")
    return values


def checked_lengths(lengths: npt.ArrayLike) -> Numbers:
    """The lengths as an array, as they are. Raises ValueError for one that is not positive and finite."""
    values = _numbers("lengths", lengths, "; for a manifest or a data set there is from_config")
    for start in range(0, values.size, _AT_ONCE):
        part = values[start : start + _AT_ONCE]
        wrong = ~((part > 0) & (part < np.inf))
        if wrong.any():
            index = start + int(wrong.argmax())
            raise ValueError(
                f"lengths must be positive and finite, but entry {index} is {values[index]}: mend it, or leave the "
                "example out of the data set"
            )
    return values


def checked_table(boundaries: npt.ArrayLike, batch_sizes: npt.ArrayLike) -> BucketTable:
    """The table. Raises ValueError for what breaks one of its rules, with the entry."""
    edges = _numbers("bucket_boundaries", boundaries).astype(np.float64)
    sizes = _numbers("bucket_batch_sizes", batch_sizes)
    if sizes.size != edges.size:
        raise ValueError(
            f"{sizes.size} bucket_batch_sizes for {edges.size} bucket_boundaries: give one batch size for each boundary"
        )
    before = 0.0
    for index, edge in enumerate(edges.tolist()):
        if not 0 < edge < np.inf:
            raise ValueError(f"bucket_boundaries must be positive and finite, but entry {index} is {edge}: mend it")
        if edge <= before:
            raise ValueError(
                f"bucket_boundaries must ascend, but entry {index} ({edge}) follows {before}: sort them, each once, "
                "and their batch sizes with them"
            )
        before = edge
    for index, size in enumerate(sizes.tolist()):
        if not (1 <= size <= 2**53 and size == int(size)):
            raise ValueError(
                f"bucket_batch_sizes must be whole numbers from 1 to 2**53, but entry {index} is {size}: mend it"
            )
    return BucketTable(edges, sizes.astype(np.int64))


def bucketed(values: Numbers, table: BucketTable, overlong: str) -> tuple[BucketTable, npt.NDArray[np.integer[Any]]]:
    """The bucket of each example, and the table, with one bucket more where there are overlong examples.

    Raises:
        OverlongError: There are overlong examples, and they are an error.
    """
    buckets = epochs.assign(values, table.boundaries)
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
    longest = float(values[beyond].max())
    return BucketTable(np.append(table.boundaries, longest), np.append(table.batch_sizes, 1)), buckets
