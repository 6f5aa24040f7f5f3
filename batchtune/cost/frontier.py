"""The largest batch size that fits, at any length, from the lengths that were measured."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchtune.cost.models import needs_targets, per_example
from batchtune.lengths import FloatArray, Histogram, IntArray
from batchtune.results import CostModel, FrontierPoint


@dataclass(frozen=True, eq=False)
class Frontier:
    """The measured frontier, made a function of the length.

    At a measured length it is the measured batch size. Between two, 1 / batch size is interpolated linearly:
    1 / B(L) is proportional to what one example needs, b·L + c·L², which is convex, so the chord lies above it and
    the interpolated batch size at or below the true one. The chord's ends are batch sizes with their fraction: the
    part of one more example that the measured peak leaves room for, by the fit; rounded down to whole examples,
    small batch sizes would lose up to half. With targets, whose worst case jumps, the chord holds only between
    points with the same worst target. Elsewhere, and where it is more, the batch size of the next longer measured
    length is taken: what fits there fits at any shorter length. Where the measurements show the contrary, a shorter
    length that holds fewer (not for want of examples), the smaller of both is taken between them.

    Attributes:
        lengths: Shape (points,), strictly ascending.
        batch_sizes: Shape (points,), as measured.
        fractional_sizes: Shape (points,), at least `batch_sizes` and below `batch_sizes + 1`.
        chords: Shape (points,): whether lengths between the point before and this one are interpolated.
        dips: Shape (points,): whether the device held fewer at the point before than at this one.
    """

    lengths: FloatArray
    batch_sizes: IntArray
    fractional_sizes: FloatArray
    chords: npt.NDArray[np.bool_]
    dips: npt.NDArray[np.bool_]

    @classmethod
    def of(
        cls,
        points: Sequence[FrontierPoint],
        limit_bytes: int | None = None,
        peak_model: CostModel | None = None,
    ) -> Frontier:
        """The frontier through measured points, in ascending order of length.

        Args:
            points: As in `probe.json`.
            limit_bytes: The limit they were measured under; None: fractions are not known.
            peak_model: What a batch needs; None likewise.

        Raises:
            ValueError: No points, or not in ascending order.
        """
        lengths = np.array([point.length for point in points])
        if lengths.size == 0 or (np.diff(lengths) <= 0).any():
            raise ValueError("frontier points must be given in strictly ascending order of length")
        sizes = np.array([point.batch_size for point in points], dtype=np.int64)
        fractions = np.array([_fraction(point, limit_bytes, peak_model) for point in points])
        targets = [point.target_length for point in points]
        chords = np.array([False] + [before == after for before, after in itertools.pairwise(targets)])
        pairs = itertools.pairwise(points)
        dips = [False] + [a.batch_size < b.batch_size and a.closed_by != "data" for a, b in pairs]
        return cls(lengths, sizes, sizes + fractions, chords, np.array(dips))

    def __call__(self, length: npt.ArrayLike) -> IntArray:
        """The largest batch size that fits.

        Args:
            length: Any shape, in the manifest's unit.

        Returns:
            Batch sizes of the same shape, at least 1; 1 beyond the longest measured length, where nothing is known.
        """
        wanted = np.asarray(length, dtype=np.float64)
        index = np.searchsorted(self.lengths, wanted, side="left")
        right = np.minimum(index, self.lengths.size - 1)
        left = np.maximum(right - 1, 0)
        span = np.where(right > 0, self.lengths[right] - self.lengths[left], 1.0)
        share = np.clip((self.lengths[right] - wanted) / span, 0.0, 1.0)
        inverse = share / self.fractional_sizes[left] + (1 - share) / self.fractional_sizes[right]
        # 1e-9: at the points themselves the two divisions must give back the integers.
        on_chord = np.floor(1 / inverse * (1 + 1e-9)).astype(np.int64)
        measured = self.batch_sizes[right]
        inside = (wanted > self.lengths[left]) & (wanted < self.lengths[right])
        sizes = np.where(inside & self.chords[right], np.maximum(on_chord, measured), measured)
        sizes = np.where(inside & self.dips[right], self.batch_sizes[left], sizes)
        return np.where(index < self.lengths.size, sizes, 1).astype(np.int64)

    def continued(self, length: npt.ArrayLike) -> IntArray:
        """The same, and what must fit a little beyond the longest measured length, where batches are padded further.

        An example there needs at most (L / longest)² times the memory of the longest: memory grows with the length or
        its square.

        Args:
            length: Any shape, in the manifest's unit.

        Returns:
            Batch sizes of the same shape, at least 1.
        """
        wanted = np.asarray(length, dtype=np.float64)
        stretched = np.maximum(wanted / self.lengths[-1], 1.0)
        beyond = np.maximum(1.0, np.floor(self.fractional_sizes[-1] / stretched**2))
        return np.where(stretched > 1, beyond, self(wanted)).astype(np.int64)


def _fraction(point: FrontierPoint, limit_bytes: int | None, model: CostModel | None) -> float:
    """The part of one more example that fits, from 0 to just below 1; 0 where it is not known."""
    if limit_bytes is None or model is None or point.peak_bytes is None:
        return 0.0
    if needs_targets(model) and point.target_length is None:
        return 0.0
    # Where the model errs, it must not be towards what does not fit.
    need = float(per_example(model, point.length, point.target_length)) * (1 + model.relative_error)
    room = limit_bytes - point.peak_bytes
    return min(max(0.0, room / need), 1 - 1e-6) if need > 0 else 0.0


def largest_max_batch_length(frontier: Frontier, histogram: Histogram, max_batch_size: int | None = None) -> float:
    """The largest M such that for every distinct length u of the data max(1, int(M / u)) examples of length u fit.

    A batch never holds more examples of length at most u than there are in the data, so where the frontier reaches
    that number u sets no limit; nor does it where the frontier reaches `max_batch_size`, beyond which nothing was
    tried. Every example must fit alone.

    Returns:
        M in the manifest's unit. Where all lengths are whole numbers, the largest whole M; else M is rounded down
        to six significant digits.
    """
    lengths = histogram.lengths
    fits = frontier(lengths)
    most = histogram.cumulative if max_batch_size is None else np.minimum(histogram.cumulative, max_batch_size)
    limited = fits < most
    if not limited.any():
        return float((lengths * most).max())
    beyond = float(((fits + 1) * lengths)[limited].min())  # int(M / u) = fits + 1 from here on
    if (lengths == np.floor(lengths)).all():
        return math.ceil(beyond) - 1.0
    digits = 10.0 ** (math.floor(math.log10(beyond)) - 5)
    rounded = math.floor(beyond / digits) * digits
    # Six digits of a binary fraction may lie a hair above the decimal one.
    while (np.maximum(1, (rounded / lengths).astype(np.int64)) > fits)[limited].any():
        rounded -= digits
    return float(f"{rounded:.6g}")
