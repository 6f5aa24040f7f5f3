"""The largest batch size that is proven to fit at any length, from the lengths that were measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchtune.lengths import FloatArray, Histogram, IntArray
from batchtune.results import FrontierPoint

_UNLIMITED = 2**53


@dataclass(frozen=True, eq=False)
class Frontier:
    """The measured frontier as a function of the length; nothing is interpolated.

    Between two measured lengths it is the batch size of the longer one: memory grows with the length, so what fits
    there fits at any shorter length. If a shorter length held fewer (not for want of examples), longer ones get no
    more.
    """

    lengths: FloatArray  # shape (points,), strictly ascending
    batch_sizes: IntArray  # shape (points,), never rising

    @classmethod
    def of(cls, points: Sequence[FrontierPoint]) -> Frontier:
        """Return the frontier through points of `probe.json`, which must be in strictly ascending order of length."""
        lengths = np.array([point.length for point in points])
        if lengths.size == 0 or (np.diff(lengths) <= 0).any():
            raise ValueError("frontier points must be given in strictly ascending order of length")
        sizes = np.array([point.batch_size for point in points], dtype=np.int64)
        # Where the data or the probe's time ended, the memory did not.
        is_open = [point.closed_by in ("data", "time") for point in points]
        held = np.where(is_open, _UNLIMITED, sizes)
        failed = np.array([point.oom_batch_size or _UNLIMITED for point in points], dtype=np.int64)
        # A step of the search lies between what passed and what failed, so only a failure shows a dip.
        dips = np.minimum.accumulate(np.where(np.append(held[:-1] < held[1:], False), held, failed - 1))
        return cls(lengths, np.maximum.accumulate(np.minimum(sizes, dips)[::-1])[::-1])

    def __call__(self, length: npt.ArrayLike) -> IntArray:
        """Return the largest batch size that fits, at least 1, in the shape of the lengths."""
        return np.maximum(self.proven(length), 1)

    def proven(self, length: npt.ArrayLike) -> IntArray:
        """Return the same, but 0 beyond the longest measured length."""
        index = np.searchsorted(self.lengths, np.asarray(length, dtype=np.float64), side="left")
        return np.append(self.batch_sizes, 0)[index]

    def continued(self, length: npt.ArrayLike) -> IntArray:
        """Return the same, and what should fit if batches are padded a little beyond the longest measured length.

        An example of length L needs at most (L / longest)² times the memory of the longest: memory grows with the
        length or its square. Such batches were not run.
        """
        stretched = np.maximum(np.asarray(length, dtype=np.float64) / self.lengths[-1], 1.0)
        beyond = np.maximum(1.0, np.floor(self.batch_sizes[-1] / stretched**2))
        return np.where(stretched > 1, beyond, self(length)).astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class JointFrontier:
    """The largest batch size of the measured shapes that are no smaller in length and target; falling sizes."""

    lengths: FloatArray
    targets: FloatArray
    batch_sizes: IntArray

    @classmethod
    def of(cls, points: Sequence[FrontierPoint]) -> JointFrontier:
        """Return the frontier through points of `probe.json` of both kinds, in any order, all with a target."""
        rows = [(-point.batch_size, point.length, point.target_length) for point in points]
        if not rows or any(target is None for _, _, target in rows):
            raise ValueError("points with target lengths are needed")
        sizes, lengths, targets = np.array(sorted(rows), dtype=np.float64).T
        return cls(lengths, targets, (-sizes).astype(np.int64))

    def __call__(self, lengths: npt.ArrayLike, targets: npt.ArrayLike) -> IntArray:
        """Return the largest batch size, at least 1, of lengths and targets broadcast against each other."""
        return np.maximum(self.proven(lengths, targets), 1)

    def proven(self, lengths: npt.ArrayLike, targets: npt.ArrayLike) -> IntArray:
        """Return the same, but 0 if no measured shape is as large."""
        long, target = np.broadcast_arrays(np.asarray(lengths, dtype=np.float64), np.asarray(targets, dtype=np.float64))
        sizes = np.zeros(long.shape, dtype=np.int64)
        # From the smallest size up, so that the largest stays.
        for length, longest_target, size in zip(
            self.lengths[::-1], self.targets[::-1], self.batch_sizes[::-1], strict=True
        ):
            sizes[(long <= length) & (target <= longest_target)] = size
        return sizes


def largest_max_batch_length(frontier: Frontier, histogram: Histogram, max_batch_size: int | None = None) -> float:
    """Return the largest M such that for every distinct length u max(1, int(M / u)) examples of length u fit.

    If the frontier reaches the number of examples of length at most u, or `max_batch_size`, beyond which nothing was
    tried, u sets no limit. Every example must fit alone. If all lengths are whole numbers, M is whole; else it is
    rounded down to six significant digits.
    """
    lengths = histogram.lengths
    fits = frontier(lengths)
    fillable = histogram.cumulative if max_batch_size is None else np.minimum(histogram.cumulative, max_batch_size)
    limited = fits < fillable
    if not limited.any():
        return float((lengths * fillable).max())
    beyond = float(((fits + 1) * lengths)[limited].min())  # int(M / u) = fits + 1 from here on
    if (lengths == np.floor(lengths)).all():
        return math.ceil(beyond) - 1.0
    digits = 10.0 ** (math.floor(math.log10(beyond)) - 5)
    rounded = math.floor(beyond / digits) * digits
    # Six digits of a binary fraction may lie a hair above the decimal one.
    while (np.maximum(1, (rounded / lengths).astype(np.int64)) > fits)[limited].any():
        rounded -= digits
    return float(f"{rounded:.6g}")
