"""The bucket table: boundaries and one batch size per bucket, what every sampler config comes down to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from batchtune.lengths import FloatArray, Histogram, IntArray

# Nobody can fill a batch beyond this size, and a quotient far beyond it would not fit int64.
_LARGEST_BATCH_SIZE = 2**53


@dataclass(frozen=True, slots=True, eq=False)
class BucketTable:
    """Boundaries and one batch size per bucket.

    Attributes:
        boundaries: Shape (buckets,), strictly ascending, positive and finite; bucket b holds the lengths in
            (boundaries[b - 1], boundaries[b]].
        batch_sizes: Shape (buckets,), at least 1 each.

    Raises:
        ValueError: The arrays are empty, differ in shape, or break one of these rules.
    """

    boundaries: FloatArray
    batch_sizes: IntArray

    def __post_init__(self) -> None:
        if self.boundaries.ndim != 1 or self.boundaries.size == 0:
            raise ValueError(f"boundaries must be a non-empty one-dimensional array, got {self.boundaries.shape}")
        if self.batch_sizes.shape != self.boundaries.shape:
            raise ValueError(f"{self.batch_sizes.size} batch sizes for {self.boundaries.size} boundaries")
        if not (np.isfinite(self.boundaries).all() and self.boundaries[0] > 0):
            raise ValueError("boundaries must be positive and finite")
        if (np.diff(self.boundaries) <= 0).any():
            raise ValueError("boundaries must be strictly ascending")
        if self.batch_sizes.min() < 1:
            raise ValueError(f"batch sizes must be at least 1, got {self.batch_sizes.min()}")

    @property
    def num_buckets(self) -> int:
        """Number of buckets, empty ones included."""
        return int(self.boundaries.size)

    def assign(self, lengths: npt.ArrayLike) -> IntArray:
        """The bucket of each length.

        Args:
            lengths: Any shape.

        Returns:
            The same shape: `numpy.searchsorted(boundaries, length)`, left side.

        Raises:
            ValueError: A length is beyond the last boundary.
        """
        buckets = np.searchsorted(self.boundaries, np.asarray(lengths, dtype=np.float64), side="left")
        if buckets.size and int(buckets.max()) == self.num_buckets:
            raise ValueError(f"a length is beyond the last boundary {self.boundaries[-1]}")
        return cast(IntArray, buckets.astype(np.int64))

    def edges(self, histogram: Histogram) -> IntArray:
        """Where the buckets begin and end in the distinct lengths.

        Returns:
            Shape (buckets + 1,): bucket b holds the distinct lengths edges[b] : edges[b + 1].

        Raises:
            ValueError: The longest length is beyond the last boundary.
        """
        if histogram.lengths[-1] > self.boundaries[-1]:
            raise ValueError(f"length {histogram.lengths[-1]} is beyond the last boundary {self.boundaries[-1]}")
        ends = np.searchsorted(histogram.lengths, self.boundaries, side="right")
        return cast(IntArray, np.concatenate(([0], ends)).astype(np.int64))

    def counts(self, histogram: Histogram) -> IntArray:
        """Shape (buckets,): the number of examples in each bucket.

        Raises:
            ValueError: The longest length is beyond the last boundary.
        """
        ends = self.edges(histogram)[1:]
        up_to = np.where(ends > 0, histogram.cumulative[ends - 1], 0)
        return np.diff(up_to, prepend=0)


def batch_sizes_for(boundaries: npt.ArrayLike, max_batch_length: float, max_batch_size: int | None = None) -> IntArray:
    """The batch size of each bucket: max(1, int(max_batch_length / boundary)), at most `max_batch_size`.

    The division and the cut are SpeechBrain's own, so that the sizes agree in every case of rounding.

    Args:
        boundaries: Shape (buckets,), positive.
        max_batch_length: The largest padded length of a batch, in the unit of the boundaries.
        max_batch_size: The most examples in a batch, or None.

    Returns:
        Shape (buckets,).

    Raises:
        ValueError: `max_batch_length` is not positive and finite, or `max_batch_size` is below 1.
    """
    if not (math.isfinite(max_batch_length) and max_batch_length > 0):
        raise ValueError(f"max_batch_length must be positive and finite, got {max_batch_length}")
    if max_batch_size is not None and max_batch_size < 1:
        raise ValueError(f"max_batch_size must be at least 1, got {max_batch_size}")
    cap = _LARGEST_BATCH_SIZE if max_batch_size is None else max_batch_size
    with np.errstate(over="ignore"):
        sizes = max_batch_length / np.asarray(boundaries, dtype=np.float64)
    return cast(IntArray, np.clip(sizes, 1, cap).astype(np.int64))
