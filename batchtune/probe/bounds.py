"""Batch shapes and the bounds that they give each other: what contains a shape that passed, or one that failed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batchtune.lengths import FloatArray
from batchtune.results import BatchShape, ClosedBy

Mask = npt.NDArray[np.bool_]
# Two peaks show how memory grows if they lie apart by this many times as much as those of equal batches.
_TELLING = 4


class Anchor(NamedTuple):
    """Where the largest batch size is searched: a batch's longest length and longest target (None: no targets)."""

    length: float
    target_length: float | None

    def shape(self, batch_size: int) -> BatchShape:
        """Return a batch of this size here."""
        return BatchShape(batch_size, self.length, self.target_length)

    def is_within(self, other: Anchor) -> bool:
        """Return whether neither its length nor its target is larger than the other's."""
        return self.length <= other.length and (self.target_length or 0.0) <= (
            other.target_length or 0.0
        )

    @property
    def arrays(self) -> tuple[FloatArray, FloatArray]:
        """Its length and its target, each as an array of one."""
        return np.array([self.length]), np.array([self.target_length or 0.0])


class Shapes:
    """Batch shapes, to compare with arrays of lengths and targets, shape (n,) each."""

    def __init__(self, shapes: Iterable[BatchShape]) -> None:
        rows = sorted(
            (shape.batch_size, shape.length, shape.target_length or 0.0)
            for shape in shapes
        )
        self._rows = np.array(rows, dtype=np.float64).reshape(-1, 3)
        self.sizes, self._lengths, self._targets = np.ascontiguousarray(self._rows.T)

    def exceeds(self, shape: BatchShape) -> bool:
        """Return whether one of them contains a shape, as `BatchShape.contains` has it."""
        row = np.array([shape.batch_size, shape.length, shape.target_length or 0.0])
        return bool(
            ((self._rows >= row).all(axis=1) & (self._rows > row).any(axis=1)).any()
        )

    def largest_beyond(
        self, lengths: FloatArray, targets: FloatArray, among: Mask | bool = True
    ) -> FloatArray:
        """Return the largest batch size at a length and target no shorter, or 0; shape (n,)."""
        beyond = (lengths[:, None] <= self._lengths) & (
            targets[:, None] <= self._targets
        )
        largest: FloatArray = np.where(beyond & among, self.sizes, 0.0).max(
            axis=1, initial=0.0
        )
        return largest

    def smallest_below(
        self, lengths: FloatArray, targets: FloatArray, among: Mask | bool = True
    ) -> FloatArray:
        """Return the smallest batch size at a length and target no longer, or infinity; shape (n,)."""
        below = (lengths[:, None] >= self._lengths) & (
            targets[:, None] >= self._targets
        )
        smallest: FloatArray = np.where(below & among, self.sizes, np.inf).min(
            axis=1, initial=np.inf
        )
        return smallest

    def elsewhere(self, anchor: Anchor) -> Mask:
        """Return which have another length or target; shape (shapes,)."""
        other: Mask = (self._lengths != anchor.length) | (
            self._targets != (anchor.target_length or 0.0)
        )
        return other


@dataclass(frozen=True, slots=True, kw_only=True)
class Bracket:
    """The bounds of the batch size at one length and target.

    Attributes:
        cap: What the data can fill, or the user allows.
        passed: The largest proven by its own trial, below any that failed, or 0.
        ran: The largest that ran at all, below any that failed; above `passed` if it leaves no margin.
        over_margin: The smallest above `passed` that ran but leaves no margin.
        failed: The smallest that failed.
        flushed: Whether that one would have fitted, had the allocator emptied its cache.
        tried, failures, given_up: How many sizes were tried, failed, and failed in turns after they had passed alone.
        peaks: (batch size, peak bytes) of those that ran, ascending by batch size.
        implied_low: Proven by a trial with a longer length or target, or 0.
        implied_high: Failed, or left no margin, at a shorter length or target.
        step: The smallest difference in batch size that matters. It doubles with each size given up in turns: there the
            limit depends on what the other shapes leave behind, and creeping up to it would fail again and again.
        spread_bytes: How far the peaks of equal batches lie apart.
        is_blurred: Whether that is as much as sizes do that the tolerance should tell apart.
    """

    anchor: Anchor
    cap: int
    passed: int
    ran: int
    over_margin: int | None
    failed: int | None
    failed_by: ClosedBy | None
    flushed: bool
    tried: int
    failures: int
    given_up: int
    peaks: tuple[tuple[int, float], ...]
    implied_low: int
    implied_high: int | None
    step: int
    spread_bytes: int
    is_blurred: bool

    @property
    def beyond(self) -> int:
        """The smallest batch size ruled out here."""
        return min(self.failed or self.cap + 1, self.over_margin or self.cap + 1)

    @property
    def nearest_beyond(self) -> int:
        """The smallest batch size ruled out here, or at a shorter length or target."""
        return min(self.beyond, self.implied_high or self.beyond)

    @property
    def peak(self) -> float | None:
        """Peak of the largest batch size proven here; None if unknown."""
        return dict(self.peaks).get(self.passed)

    @property
    def proven(self) -> int:
        """The largest batch size proven, here or at a longer length or target."""
        return max(self.passed, self.implied_low)

    @property
    def has_crept(self) -> bool:
        """Whether the two largest sizes that ran are a step apart: their peaks lead no further."""
        sizes = [size for size, _ in self.peaks[-2:]]
        return len(sizes) == 2 and sizes[1] - sizes[0] <= self.step

    def measured_need(self) -> float | None:
        """Return the need of an example by the largest peak and one well below; None if they don't show it."""
        if len(self.peaks) < 2:
            return None
        large, high = self.peaks[-1]
        small, low = self.peaks[-2]
        if small * 2 > large:
            small, low = self.peaks[0]
        if high - low <= _TELLING * self.spread_bytes:
            return None
        return (high - low) / (large - small)


def is_covered(shape: BatchShape, shapes: Iterable[BatchShape]) -> bool:
    """Return whether one of the shapes is this one, or contains it."""
    return any(other == shape or other.contains(shape) for other in shapes)


def step_at(size: int, tolerance: float) -> int:
    """Return the smallest difference in batch size that matters, at least 1."""
    return max(1, int(size * tolerance))


def ladder(tolerance: float, top: int) -> Sequence[int]:
    """Return batch sizes from 1 to `top`, each above the one before by a `tolerance` fraction of it, at least by one.

    Nothing needs to be tried between two neighbours, so bisecting n rungs takes at most n.bit_length() trials.
    """
    if tolerance * top < 2:
        return range(1, top + 1)
    rungs = []
    rung = 1
    while rung <= top:
        rungs.append(rung)
        rung += step_at(rung, tolerance)
    return rungs


def between(rungs: Sequence[int], low: int, high: int) -> Sequence[int]:
    """Return the rungs strictly between two batch sizes."""
    return rungs[bisect_right(rungs, low) : bisect_left(rungs, high)]
