"""Finds how many samples, frames or tokens of a training script are one unit of the manifest."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from batchtune.errors import shortened
from batchtune.scripts.relations import Numbers, Unclear
from batchtune.units import format_number

# Sampling rates and frame rates, per second and per millisecond; frames made of frames.
_PER_UNIT = [1, 8, 10, 11.025, 12.5, 16, 22.05, 24, 25, 32, 40, 44.1, 48, 50, 62.5, 75]
_PER_UNIT += [80, 22050 / 512, 22050 / 256, 100, 125, 1000, 8000, 11025, 16000, 22050]
_PER_UNIT += [24000, 32000, 44100, 48000, 96000]
_PER_UNIT += [1 / 2, 1 / 3, 1 / 4, 1 / 8, 1 / 10, 2, 3, 4]
# If unrelated sizes would fit this rarely, those that fit are related.
_CHANCE = 1e-6
# So few sizes are those of whole batches, which are as long as their longest example.
_FEW = 30


def units_per_length(seen: Sequence[int], lengths: Numbers, *, what: str) -> float:
    """Return how many units of the script's axis are one unit of the manifest: 16000 samples are 1 s.

    Args:
        seen: Sizes of the axis in a random part of the manifest's examples.
        lengths: Lengths of the manifest, ascending; with repetitions they tell more, in tokens for instance.
        what: The leaf that has the axis, for messages.

    Raises:
        Unclear: No plain ratio, or more than one, makes the manifest's lengths those that were seen.
    """
    sizes = np.sort(np.asarray(seen, dtype=np.float64))
    # Not one of the common ratios, but a plain one all the same.
    ratio = float(f"{np.median(sizes) / np.median(lengths):.2g}")
    matching = [
        per_unit
        for per_unit in (*_PER_UNIT, ratio)
        if (_misses(sizes, per_unit, lengths) <= 0).all()
    ]
    found = [one for one in matching if _is_telling(sizes, one, lengths)]
    if len(set(found)) != 1:
        # The manifest has nearly every length, so any size is close to one of them.
        common = [one for one in matching if one in _PER_UNIT]
        found = [one for one in common if _similar(sizes / one, lengths)]
        distinct = len(np.unique(lengths)) == len(lengths)
        if (1 in found or distinct) and np.isin(sizes, lengths).all():
            found = [1]
    if len(set(found)) == 1:
        return float(found[0])
    words = ", ".join(f"{per_unit:g}" for per_unit in found)
    fits = f"{words} to one would all fit" if found else "no plain ratio fits"
    raise Unclear(
        f"{shortened(what)} runs from {format_number(sizes[0])} to {format_number(sizes[-1])} in "
        f"{len(sizes)} examples or batches; the manifest from {format_number(lengths[0])} to "
        f"{format_number(lengths[-1])}: {fits}",
        "Say how many of the script's units are one of the manifest's, such as --per-unit 16000.",
    )


def _misses(sizes: Numbers, per_unit: float, lengths: Numbers) -> Numbers:
    """Return by how much each size misses the nearest length, beyond one unit or half a digit of the manifest."""
    expected = per_unit * lengths
    after = np.searchsorted(expected, sizes).clip(0, len(lengths) - 1)
    before = (after - 1).clip(0)
    apart = np.minimum(abs(expected[after] - sizes), abs(expected[before] - sizes))
    misses: Numbers = apart - max(1.0, per_unit * _digit(lengths) / 2)
    return misses


def _digit(lengths: Numbers) -> float:
    """Return what the manifest's lengths are rounded to: 1, 0.1, 0.01, 0.001, or 0 for more digits."""
    for digits in range(4):
        if abs(lengths - np.round(lengths, digits)).max() < 1e-9:
            return float(10.0**-digits)
    return 0.0


def _is_telling(sizes: Numbers, per_unit: float, lengths: Numbers) -> bool:
    """Return whether sizes spread evenly over the same range would hardly ever all fit."""
    even = np.round(np.linspace(sizes[0], sizes[-1], 2000)).astype(np.float64)
    share = float((_misses(even, per_unit, lengths) <= 0).mean())
    return share ** len(np.unique(sizes)) < _CHANCE


def _similar(scaled: Numbers, lengths: Numbers) -> bool:
    """Return whether a random part of the manifest's examples may have these lengths.

    The shares of n random examples below any length are within √(ln(2/p) / 2n) of the manifest's, but for a chance p of
    1e-4 (the Dvoretzky-Kiefer-Wolfowitz inequality, https://doi.org/10.1214/aop/1176990746).
    """
    places = np.unique(lengths)
    slack = (1 + 1e-9) * places + 0.5 * _digit(lengths)
    share = np.searchsorted(lengths, slack, side="right") / len(lengths)
    seen_share = np.searchsorted(scaled, slack, side="right") / len(scaled)
    band = math.sqrt(math.log(2 / 1e-4) / (2 * len(scaled)))
    shorter = float((seen_share - share).max())
    longer = float((share - seen_share).max())
    return shorter <= band and (longer <= band or len(scaled) < _FEW)
