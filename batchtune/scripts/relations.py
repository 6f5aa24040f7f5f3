"""Finds how sizes and values follow the axes of a batch, from pairs that were seen."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from batchtune.errors import WorkloadError, shortened
from batchtune.lengths import FloatArray
from batchtune.results import BatchShape
from batchtune.units import format_number

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


# Finds how many samples, frames or tokens of a training script are one unit of the manifest.

_PER_SECOND = [8000, 11025, 16000, 22050, 24000, 32000, 44100, 48000]
_PER_MILLISECOND = [rate / 1000 for rate in _PER_SECOND]
# Frames per second, and their hops at 22,050 Hz; per frame, those made of them.
_FRAMES = [10, 12.5, 25, 40, 50, 62.5, 75, 80, 22050 / 512, 22050 / 256, 100, 125, 1000]
_OTHERS = [1, 2, 3, 4, 0.5, 1 / 3, 0.25, 0.125, 0.1]
_PER_UNIT = np.unique([*_PER_SECOND, *_PER_MILLISECOND, *_FRAMES, *_OTHERS])
# Where the median of examples may lie among the manifest's lengths, as a share: of 200 random ones it always does.
_LOWEST = 0.35
_HIGHEST = 0.65
# So few sizes are those of batches, which are as long as their longest example.
_FEW = 30


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of a script's axis for a length of the manifest: `per_unit` × length + `offset`."""

    per_unit: float
    offset: int = 0

    def size(self, length: float) -> int:
        """Return the size of the axis, rounded up but for the error of a float."""
        size = self.per_unit * length
        return max(1, math.ceil(size - 1e-6 * size) + self.offset)


def scale_of(
    seen: Sequence[int], lengths: FloatArray, given: float | None, *, what: str
) -> Scale:
    """Return how an axis of the script follows a manifest in any order; `given` is --per-unit.

    Other arguments and errors are those of `units_per_length`.
    """
    if given is not None:
        return Scale(given)
    return Scale(units_per_length(seen, lengths, what=what))


def scale_by_rows(
    sizes: Sequence[int], lengths: Sequence[float], digit: float, given: float | None
) -> Scale | None:
    """Return how sizes follow the manifest's lengths of the same examples; None if they don't, or all are the same.

    A known ratio comes first, then the one that fits them best. `digit` is what the manifest's lengths are rounded to.

    Raises:
        Unclear: The ratio is another than `given`, --per-unit.
    """
    if len(set(lengths)) == 1:
        return None
    seen = np.asarray(sizes, np.float64)
    rows = np.asarray(lengths, np.float64)
    if _multiple(rows, seen):  # tokens, padded
        return _unless_given(Scale(1.0), given)
    # NumPy's fits set up BLAS, which holds 32 MiB of the script's memory from then on.
    slope = statistics.linear_regression(lengths, sizes).slope
    known = _PER_UNIT.tolist()
    if given is not None:
        known.append(given)
    for candidates in (known, [float(f"{slope:.5g}")]):
        spreads = {
            per_unit: float(np.ptp(seen - per_unit * rows))
            for per_unit in candidates
            if per_unit > 0
        }
        fits = [one for one in spreads if spreads[one] < 1.5 + one * digit]
        if fits:
            per_unit = min(fits, key=lambda one: spreads[one])
            without = [Scale(per_unit).size(length) for length in lengths]
            return _unless_given(Scale(per_unit, int((seen - without).max())), given)
    return None


def _unless_given(scale: Scale, given: float | None) -> Scale:
    """Return a scale that the rows show. Raises Unclear if another was given."""
    if given not in (None, scale.per_unit):
        raise Unclear(
            f"--per-unit {given:g} is wrong: by the manifest's rows it is {scale.per_unit:g}",
            "Leave it out.",
        )
    return scale


def units_per_length(seen: Sequence[int], lengths: FloatArray, *, what: str) -> float:
    """Return how many units of the script's axis are one unit of the manifest: 16000 samples are 1 s.

    Args:
        seen: Sizes of the axis in a random part of the manifest's examples.
        lengths: Lengths of the manifest, ascending, one for each example.
        what: The leaf that has the axis, for messages.

    Raises:
        Unclear: No common ratio, or more than one, makes the manifest's lengths those that were seen.
    """
    sizes = np.sort(np.asarray(seen, dtype=np.float64))
    found = [
        float(per_unit)
        for per_unit in _PER_UNIT
        if _are_members(sizes, per_unit, lengths) and _alike(sizes / per_unit, lengths)
    ]
    # Whole batches of tokens have few sizes: the manifest has their thirds and halves, too.
    if 1.0 in found and np.isin(sizes, lengths).all():
        return 1.0
    if len(found) == 1:
        return found[0]
    words = ", ".join(f"{per_unit:g}" for per_unit in found)
    fits = f"{words} to one would all fit" if found else "no common ratio fits"
    raise Unclear(
        f"{shortened(what)} runs from {format_number(sizes[0])} to {format_number(sizes[-1])} in "
        f"{len(sizes)} examples or batches; the manifest from {format_number(lengths[0])} to "
        f"{format_number(lengths[-1])}: {fits}",
        "Say how many of the script's units are one of the manifest's, such as --per-unit 16000.",
    )


def _are_members(sizes: FloatArray, per_unit: float, lengths: FloatArray) -> bool:
    """Return whether each size is a length of the manifest, to one unit or half a digit of the manifest."""
    slack = max(1.0, per_unit * digit_of(lengths) / 2)
    next_longer = np.searchsorted(per_unit * lengths, sizes - slack)
    nearest = per_unit * np.append(lengths, np.inf)[next_longer]
    return bool((nearest <= sizes + slack).all())


def digit_of(lengths: FloatArray) -> float:
    """Return what the manifest's lengths are rounded to: 1, 0.1, 0.01, 0.001, or 0 for more digits."""
    for digits in range(4):
        if abs(lengths - np.round(lengths, digits)).max() < 1e-9:
            return float(10.0**-digits)
    return 0.0


def _alike(scaled: FloatArray, lengths: FloatArray) -> bool:
    """Return whether half of the sizes are below the middle of the manifest's lengths, or above it in whole batches."""
    share = float((lengths <= np.median(scaled)).mean())
    return share >= _LOWEST and (share <= _HIGHEST or len(scaled) <= _FEW)
