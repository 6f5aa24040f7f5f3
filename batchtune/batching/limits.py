"""What limits the batch size at a length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from batchtune.batching.table import batch_sizes_for
from batchtune.lengths import FloatArray, IntArray
from batchtune.results import Sizing

Frontier = Callable[[FloatArray], IntArray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Everything that limits the batch size.

    Attributes:
        max_batch_length: The largest padded length that a batch may have.
        max_batch_size: The most examples in a batch, or None.
        frontier: Lengths → the largest batch size that fits on the device, at least 1; None without a probe.
        measured_up_to: Beyond this length max_batch_length was not measured: there the frontier limits every size.
    """

    max_batch_length: float
    max_batch_size: int | None = None
    frontier: Frontier | None = None
    measured_up_to: float | None = None

    @property
    def sizings(self) -> tuple[Sizing, ...]:
        """Where batch sizes can come from."""
        return ("length",) if self.frontier is None else ("length", "frontier")

    def batch_sizes(self, lengths: FloatArray, sizing: Sizing) -> IntArray:
        """The batch size of a bucket that ends at each length.

        Raises:
            ValueError: `frontier` is asked for where there is none, or it gave a size below 1.
        """
        if sizing == "length":
            sizes = batch_sizes_for(lengths, self.max_batch_length, self.max_batch_size)
            if self.measured_up_to is None or self.frontier is None:
                return sizes
            return np.where(lengths > self.measured_up_to, np.minimum(sizes, self.frontier(lengths)), sizes)
        if self.frontier is None:
            raise ValueError("sizing by the frontier needs a frontier")
        sizes = np.asarray(self.frontier(lengths), dtype=np.int64)
        if sizes.size and sizes.min() < 1:
            raise ValueError(f"the frontier must be at least 1 everywhere, got {sizes.min()}")
        return sizes if self.max_batch_size is None else np.minimum(sizes, self.max_batch_size)

    def largest_batch_sizes(self, lengths: FloatArray) -> IntArray:
        """The largest batch size that any sizing gives a bucket that ends at each length."""
        sizes = [self.batch_sizes(lengths, sizing) for sizing in self.sizings]
        return sizes[0] if len(sizes) == 1 else np.maximum(*sizes)
