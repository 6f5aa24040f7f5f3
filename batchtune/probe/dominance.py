"""Which batch shapes are at least as large as which others, in batch size, length and target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batchtune.lengths import FloatArray, IntArray
from batchtune.shapes import BatchShape


class Anchor(NamedTuple):
    """Where a largest batch size is searched: what the batch's longest example and its longest target are.

    Attributes:
        length: Longest length.
        target_length: Longest target length; None where the data have none.
    """

    length: float
    target_length: float | None

    def shape(self, batch_size: int) -> BatchShape:
        """Return a batch of this size here."""
        return BatchShape(batch_size, self.length, self.target_length)

    def is_within(self, other: Anchor) -> bool:
        """Return whether it is no larger than another in any respect."""
        return self.length <= other.length and (self.target_length or 0.0) <= (other.target_length or 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Shapes:
    """Many batch shapes, to be compared with many lengths; shape (shapes,) each, ascending by batch size."""

    sizes: FloatArray
    lengths: FloatArray
    targets: FloatArray

    @classmethod
    def of(cls, shapes: Sequence[BatchShape]) -> Shapes:
        """From single shapes, in any order."""
        rows = sorted((shape.batch_size, shape.length, shape.target_length or 0.0) for shape in shapes)
        columns = np.array(rows, dtype=np.float64).reshape(-1, 3).T
        return cls(*np.ascontiguousarray(columns))

    def exceeds(self, shape: BatchShape) -> bool:
        """Return whether one is at least as large as another in every respect, and not the same."""
        own = (shape.batch_size, shape.length, shape.target_length or 0.0)
        no_less = (self.sizes >= own[0]) & (self.lengths >= own[1]) & (self.targets >= own[2])
        same = (self.sizes == own[0]) & (self.lengths == own[1]) & (self.targets == own[2])
        return bool((no_less & ~same).any())

    def largest_beyond(
        self, lengths: FloatArray, targets: FloatArray | None, apart_from: Anchor | None = None
    ) -> FloatArray:
        """Return shape (n,): the largest batch size at no shorter length and target; 0 where there is none."""
        found = np.where(self._beyond(lengths, targets) & self._others(apart_from), self.sizes, 0.0)
        largest: FloatArray = found.max(axis=1, initial=0.0)
        return largest

    def smallest_within(
        self, lengths: FloatArray, targets: FloatArray | None, apart_from: Anchor | None = None
    ) -> FloatArray:
        """Return shape (n,): the smallest batch size at no longer length and target; infinite where there is none."""
        within = lengths[:, None] >= self.lengths
        if targets is not None:
            within &= targets[:, None] >= self.targets
        found = np.where(within & self._others(apart_from), self.sizes, np.inf)
        smallest: FloatArray = found.min(axis=1, initial=np.inf)
        return smallest

    def largest_below(self, lengths: FloatArray, targets: FloatArray | None, failed: Shapes) -> IntArray:
        """Shape (n,): the largest batch size at no shorter length and target that is below all that failed within."""
        below = self.sizes < failed.smallest_within(lengths, targets)[:, None]
        found = np.where(self._beyond(lengths, targets) & below, self.sizes, 0.0)
        largest: IntArray = found.max(axis=1, initial=0.0).astype(np.int64)
        return largest

    def _beyond(self, lengths: FloatArray, targets: FloatArray | None) -> npt.NDArray[np.bool_]:
        beyond: npt.NDArray[np.bool_] = lengths[:, None] <= self.lengths
        if targets is not None:
            beyond &= targets[:, None] <= self.targets
        return beyond

    def _others(self, anchor: Anchor | None) -> npt.NDArray[np.bool_]:
        if anchor is None:
            return np.ones(self.sizes.shape, dtype=np.bool_)
        others: npt.NDArray[np.bool_] = (self.lengths != anchor.length) | (
            self.targets != (anchor.target_length or 0.0)
        )
        return others


def as_arrays(anchor: Anchor) -> tuple[FloatArray, FloatArray | None]:
    """Return its length and its target, each an array of one; None where the data have no targets."""
    target = anchor.target_length
    return np.array([anchor.length]), None if target is None else np.array([target])
