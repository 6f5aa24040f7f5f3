"""Batch shapes and the bounds that they give each other: what contains a shape that passed, or one that failed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batchtune.lengths import FloatArray, Lengths
from batchtune.probe.settings import ProbeSettings
from batchtune.results import ClosedBy, CostModel
from batchtune.shapes import BatchShape

PeakFit = Callable[[Sequence[float], Sequence[float], Sequence[float], "Sequence[float] | None"], "CostModel | None"]
"""(batch sizes, lengths, peaks, target lengths) → the fitted model, or None if they are too few."""


Mask = npt.NDArray[np.bool_]


class Anchor(NamedTuple):
    """Where the largest batch size is searched: a batch's longest length and longest target (None: no targets)."""

    length: float
    target_length: float | None

    def shape(self, batch_size: int) -> BatchShape:
        """Return a batch of this size here."""
        return BatchShape(batch_size, self.length, self.target_length)

    def is_within(self, other: Anchor) -> bool:
        """Return whether neither its length nor its target is larger than the other's."""
        return self.length <= other.length and (self.target_length or 0.0) <= (other.target_length or 0.0)

    @property
    def arrays(self) -> tuple[FloatArray, FloatArray]:
        """Its length and its target, each as an array of one."""
        return np.array([self.length]), np.array([self.target_length or 0.0])


class Shapes:
    """Batch shapes, to compare with arrays of lengths and targets, shape (n,) each."""

    def __init__(self, shapes: Iterable[BatchShape]) -> None:
        rows = sorted((shape.batch_size, shape.length, shape.target_length or 0.0) for shape in shapes)
        columns = np.array(rows, dtype=np.float64).reshape(-1, 3)
        self.sizes = np.ascontiguousarray(columns[:, 0])
        self.lengths = np.ascontiguousarray(columns[:, 1])
        self.targets = np.ascontiguousarray(columns[:, 2])

    def exceeds(self, shape: BatchShape) -> bool:
        """Return whether one of them contains a shape, as `BatchShape.contains` has it."""
        target = shape.target_length or 0.0
        contains = (self.sizes >= shape.batch_size) & (self.lengths >= shape.length) & (self.targets >= target)
        same = (self.sizes == shape.batch_size) & (self.lengths == shape.length) & (self.targets == target)
        return bool((contains & ~same).any())

    def largest_beyond(self, lengths: FloatArray, targets: FloatArray, among: Mask | bool = True) -> FloatArray:
        """Return the largest batch size at a length and target no shorter, or 0; shape (n,)."""
        beyond = (lengths[:, None] <= self.lengths) & (targets[:, None] <= self.targets)
        largest: FloatArray = np.where(beyond & among, self.sizes, 0.0).max(axis=1, initial=0.0)
        return largest

    def smallest_below(self, lengths: FloatArray, targets: FloatArray, among: Mask | bool = True) -> FloatArray:
        """Return the smallest batch size at a length and target no longer, or infinity; shape (n,)."""
        below = (lengths[:, None] >= self.lengths) & (targets[:, None] >= self.targets)
        smallest: FloatArray = np.where(below & among, self.sizes, np.inf).min(axis=1, initial=np.inf)
        return smallest

    def elsewhere(self, anchor: Anchor) -> Mask:
        """Return which have another length or target; shape (shapes,)."""
        other: Mask = (self.lengths != anchor.length) | (self.targets != (anchor.target_length or 0.0))
        return other


@dataclass(slots=True)
class Task:
    """The goal of a search: the data, the memory, and what was seen outside the trials."""

    lengths: Lengths
    settings: ProbeSettings
    limit_bytes: int
    fit: PeakFit
    rungs: Sequence[int]  # the batch sizes that the tolerance tells apart
    spread_bytes: int = 0  # how far peaks of equal batches differed outside the trials
    first_step_bytes: int = 0  # how far a process's first step exceeded later ones
    held_bytes: int = 0  # the most that a process held between steps outside the trials


@dataclass(frozen=True, slots=True, kw_only=True)
class Bracket:
    """The bounds of the batch size at one length and target."""

    anchor: Anchor
    cap: int  # what the data can fill, or the user allows
    passed: int  # largest proven by its own trial, below any that failed, or 0
    ran: int  # largest that ran at all, below any that failed; above `passed` if it leaves no margin
    tight: int | None  # smallest above `passed` that ran but leaves no margin
    failed: int | None  # smallest that failed
    failed_by: ClosedBy | None
    tried: int  # how many batch sizes were tried
    failures: int  # how many of them failed
    given_up: int  # how many failed in turns with others, after they had passed alone
    peaks: tuple[tuple[int, float], ...]  # (batch size, peak bytes) of those that ran, ascending by batch size
    surely: int  # proven by a trial with a longer length or target, or 0
    hardly: int | None  # failed, or left no margin, at a shorter length or target
    # The smallest difference in batch size that matters. It doubles with each size given up in turns: there the limit
    # depends on what the other shapes leave behind, and creeping up to it would fail again and again.
    step: int

    @property
    def beyond(self) -> int:
        """The smallest batch size ruled out here."""
        return min(self.failed or self.cap + 1, self.tight or self.cap + 1)

    @property
    def nearest_beyond(self) -> int:
        """The smallest batch size ruled out here, or at a shorter length or target."""
        return min(self.beyond, self.hardly or self.beyond)

    @property
    def peak(self) -> float | None:
        """Peak of the largest batch size proven here; None if unknown."""
        return next((peak for size, peak in self.peaks if size == self.passed), None)

    @property
    def proven(self) -> int:
        """The largest batch size proven, here or at a longer length or target."""
        return max(self.passed, self.surely)


def is_covered(shape: BatchShape, shapes: Iterable[BatchShape]) -> bool:
    """Return whether one of the shapes is this one, or contains it."""
    return any(other == shape or other.contains(shape) for other in shapes)


def step_at(size: int, tolerance: float) -> int:
    """Return the smallest difference in batch size that matters, at least 1."""
    return max(1, int(size * tolerance))
