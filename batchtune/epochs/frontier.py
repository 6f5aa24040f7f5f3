"""The largest batch size that is proven to fit at any length, from the shapes that were measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchtune.lengths import FloatArray, Histogram, IntArray
from batchtune.results import FrontierPoint

_UNLIMITED = 2**53


@dataclass(frozen=True, slots=True, eq=False)
class Frontier:
    """The measured frontier as a function of the length, and of the target if shapes have one; nothing is interpolated.

    Memory grows with the shape, so what fits at a measured one fits at any that is no larger: the batch size is the
    largest of those.
    """

    lengths: FloatArray  # shape (points,)
    targets: FloatArray  # shape (points,), infinite if the worst targets were measured at each length
    batch_sizes: IntArray  # shape (points,), ascending

    @classmethod
    def of(cls, points: Sequence[FrontierPoint]) -> Frontier:
        """Return the frontier by length alone of points in strictly ascending order of length.

        If a shorter length held fewer (not for want of examples), longer ones get no more.
        """
        lengths = np.array([point.length for point in points])
        sizes = np.array([point.batch_size for point in points], dtype=np.int64)
        # Where the data or the probe's time ended, the memory did not.
        is_open = [point.closed_by in ("data", "time") for point in points]
        held = np.where(is_open, _UNLIMITED, sizes)
        failed = np.array(
            [point.oom_batch_size or _UNLIMITED for point in points], dtype=np.int64
        )
        # A step of the search lies between what passed and what failed, so only a failure shows a dip.
        dips = np.minimum.accumulate(
            np.where(np.append(held[:-1] < held[1:], False), held, failed - 1)
        )
        return cls._sorted(
            lengths, np.full(lengths.size, np.inf), np.minimum(sizes, dips)
        )

    @classmethod
    def of_pairs(cls, points: Sequence[FrontierPoint]) -> Frontier:
        """Return the frontier by length and target, through points in any order, all with a target."""
        targets = np.array([point.target_length for point in points], dtype=np.float64)
        lengths = np.array([point.length for point in points])
        sizes = np.array([point.batch_size for point in points], dtype=np.int64)
        return cls._sorted(lengths, targets, sizes)

    @classmethod
    def _sorted(
        cls, lengths: FloatArray, targets: FloatArray, sizes: IntArray
    ) -> Frontier:
        order = np.argsort(sizes, kind="stable")
        return cls(lengths[order], targets[order], sizes[order])

    def __call__(
        self, lengths: npt.ArrayLike, targets: npt.ArrayLike = 0.0
    ) -> IntArray:
        """Return the largest batch size that fits, at least 1, of lengths and targets broadcast against each other."""
        return np.maximum(self.proven(lengths, targets), 1)

    def proven(self, lengths: npt.ArrayLike, targets: npt.ArrayLike = 0.0) -> IntArray:
        """Return the same, but 0 if no measured shape is as large."""
        long, target = np.broadcast_arrays(
            np.asarray(lengths, dtype=np.float64), np.asarray(targets, dtype=np.float64)
        )
        proven = np.zeros(long.shape, dtype=np.int64)
        # From the smallest size up, so that the largest stays.
        for length, longest_target, size in zip(
            self.lengths, self.targets, self.batch_sizes, strict=True
        ):
            proven[(long <= length) & (target <= longest_target)] = size
        return proven

    def continued(self, lengths: npt.ArrayLike) -> IntArray:
        """Return the same, and what should fit if batches are padded a little beyond the longest measured length.

        An example of length L needs at most (L / longest)² times the memory of the longest: memory grows with the
        length or its square. Such batches were not run.
        """
        longest = self.lengths.max()
        stretched = np.maximum(np.asarray(lengths, dtype=np.float64) / longest, 1.0)
        beyond = np.maximum(1.0, np.floor(self.proven(longest) / stretched**2))
        return np.where(stretched > 1, beyond, self(lengths)).astype(np.int64)


def largest_max_batch_length(
    frontier: Frontier, histogram: Histogram, max_batch_size: int | None = None
) -> float:
    """Return the largest M such that for every distinct length u max(1, int(M / u)) examples of length u fit.

    If the frontier reaches the number of examples of length at most u, or `max_batch_size`, beyond which nothing was
    tried, u sets no limit. Every example must fit alone. If all lengths are whole numbers, M is whole; else it is
    rounded down to six significant digits.
    """
    lengths = histogram.lengths
    fits = frontier(lengths)
    fillable = (
        histogram.cumulative
        if max_batch_size is None
        else np.minimum(histogram.cumulative, max_batch_size)
    )
    limited = fits < fillable
    if not limited.any():
        return float((lengths * fillable).max())
    beyond = float(
        ((fits + 1) * lengths)[limited].min()
    )  # int(M / u) = fits + 1 from here on
    if (lengths == np.floor(lengths)).all():
        return math.ceil(beyond) - 1.0
    digits = 10.0 ** (math.floor(math.log10(beyond)) - 5)
    rounded = math.floor(beyond / digits) * digits
    # Six digits of a binary fraction may lie a hair above the decimal one.
    while (np.maximum(1, (rounded / lengths).astype(np.int64)) > fits)[limited].any():
        rounded -= digits
    return float(f"{rounded:.6g}")
