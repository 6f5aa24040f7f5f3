"""Finds how sizes and values follow the axes of a batch, from pairs that were seen."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import numpy as np

from batchtune.errors import WorkloadError
from batchtune.lengths import FloatArray
from batchtune.results import BatchShape

# A leaf's path, and what of it is measured: the size of an axis, its largest `value`, its longest item (`inner`).
LeafAxis = tuple[str, int | str]
# One number for each example or batch.
Seen = dict[LeafAxis, FloatArray]
Terms = dict[str, FloatArray]

# What would fit this rarely without being related is taken for related.
_CHANCE = 1e-4
# From so many examples even a ratio or a rounding that is not plain is known well enough.
MANY = 30
# Values that are not whole may be rounded: durations to 0.01 s.
_ROUNDED = 0.005


class Unclear(WorkloadError):
    """What a training script's examples or batches don't tell: the message shows what was seen, the hint what helps."""


class AxisShape(BatchShape):
    """A batch's shape in units of its own axes, such as samples or tokens, not in the manifest's unit."""

    __slots__ = ()

    @property
    def row(self) -> tuple[float, ...]:
        """The length of each example; in a padded batch all are the same."""
        return self.sequences or (self.length,) * self.batch_size

    def terms(self) -> dict[str, float]:
        """Return what sizes can follow: an axis, or the total over a packed batch."""
        terms: dict[str, float] = {
            "B": self.batch_size,
            "L": self.length,
            "ΣL": sum(self.row),
        }
        if self.target_length is not None:
            terms["T"] = self.target_length
        return terms


@dataclass(frozen=True)
class Relation:
    """How a size or value follows a term: step·⌊ratio·term + offset⌋, or ratio·term if it is not whole.

    A relation is `sure` unless unrelated numbers may have fitted it, or another rounding would have fitted too.
    """

    term: str
    ratio: float = 1.0
    offset: float = 0.0
    step: int = 1
    whole: bool = True
    sure: bool = True

    def at(self, axes: AxisShape) -> float:
        """Return the size or value in a batch of this shape."""
        value = self.ratio * axes.terms()[self.term] + self.offset
        return self.step * math.floor(value + 1e-6) if self.whole else value

    def term_of(self, seen: float) -> int:
        """Return the largest term that has this size or value."""
        if not self.whole:
            return math.ceil(seen * (1 + _ROUNDED) / self.ratio)
        beyond = (seen / self.step + 1 - self.offset) / self.ratio
        return math.ceil(beyond - 1e-6) - 1

    def __str__(self) -> str:
        if self.step > 1:
            return f"{self.term} to a multiple of {self.step}"
        word = f"{self.ratio:g}·{self.term}"
        if self.ratio == 1:
            word = self.term
        elif self.ratio < 1:
            word = f"1/{1 / self.ratio:g}·{self.term}"
        offset = math.trunc(self.offset)
        return f"{word}{offset:+}" if offset else word


def fitted(term: str, base: FloatArray, seen: FloatArray) -> Relation | None:
    """Return the relation that all seen sizes or values follow, plain ratios first; None if they follow none.

    `base` is the term in each of the batches or examples, `seen` the size or value there.
    """
    if np.array_equal(seen, base):
        return Relation(term)
    if np.ptp(base) == 0 or np.ptp(seen) == 0:
        return None
    if (seen != np.round(seen)).any():
        return _proportional(term, base, seen)
    multiple = _multiple(base, seen)
    if multiple:
        sure = _is_sure(seen / multiple)
        return Relation(term, 1 / multiple, 1 - 1 / multiple, multiple, sure=sure)
    # NumPy's fits set up BLAS, which holds 32 MiB of the script's memory from then on.
    slope = statistics.linear_regression(base.tolist(), seen.tolist()).slope
    if slope <= 0:
        return None
    plain = round(slope) if slope >= 1 else 1 / round(1 / slope)
    for ratio in (plain, slope):
        found = _with_ratio(term, ratio, base, seen)
        if found is not None:
            return found
    multiple = _multiple(seen, base)
    if multiple:  # a length without its padding
        return Relation(term, sure=_is_sure(seen / multiple))
    return None


def _multiple(lengths: FloatArray, padded: FloatArray) -> int:
    """Return the multiple that lengths are padded to; 0 if they are not."""
    multiple = int(np.gcd.reduce(padded.astype(np.int64)))
    if np.array_equal(np.ceil(lengths / multiple) * multiple, padded):
        return multiple
    return 0


def _with_ratio(
    term: str, ratio: float, base: FloatArray, seen: FloatArray
) -> Relation | None:
    """Return the relation with this ratio if one offset explains every number."""
    rest = np.round(seen - ratio * base, 9)
    lowest = float(rest.max())
    beyond = float(rest.min()) + 1
    if lowest >= beyond:
        return None
    # Rounded up, rounded down, and one for each stride begun, as in a spectrogram.
    offsets = [one for one in (1 - ratio, 0, 1) if lowest <= one + 1e-8 < beyond]
    is_only = len(offsets) == 1 or lowest + 1 == beyond
    sure = _is_sure(seen) and (is_only or len(seen) >= MANY)
    return Relation(term, ratio, [*offsets, lowest][0], sure=sure)


def _is_sure(seen: FloatArray) -> bool:
    """Return whether unrelated numbers hardly ever fit a line to within 1: two of them always do."""
    share = 1 / (np.ptp(seen) + 1)
    return bool(share ** (len(seen) - 2) < _CHANCE)


def _proportional(term: str, base: FloatArray, seen: FloatArray) -> Relation | None:
    """Return the relation of values that are not whole, such as durations, which may be rounded; all are above 0."""
    ratio = float(base @ seen / (base @ base))
    width = _ROUNDED * seen.max()
    if np.abs(ratio * base - seen).max() > width:
        return None
    per_unit = float(f"{1 / ratio:.5g}")
    return Relation(term, 1 / per_unit, whole=False, sure=_is_sure(seen / (2 * width)))


def first_fit(terms: Terms, seen: FloatArray) -> Relation | None:
    """Return the relation to the first term that explains what was seen; None without one."""
    for term, base in terms.items():
        found = fitted(term, base, seen)
        if found is not None:
            return found
    return None
