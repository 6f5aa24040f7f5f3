"""Finds how many samples, frames or tokens of a training script are one unit of the manifest."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from batchtune.errors import shortened
from batchtune.lengths import FloatArray
from batchtune.scripts.relations import Unclear
from batchtune.units import format_number

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
        Unclear: It is another than `given`, --per-unit.
    """
    if len(set(lengths)) == 1:
        return None
    seen = np.asarray(sizes, np.float64)
    rows = np.asarray(lengths, np.float64)
    multiple = int(np.gcd.reduce(seen.astype(np.int64)))
    if np.array_equal(np.ceil(rows / multiple) * multiple, seen):
        return _unless_given(Scale(1.0), given)  # tokens, padded to a multiple
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
