"""Whether memory creeps from step to step: a leak, a cache that fills up, an allocator that fragments its memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from batchtune.lengths import FloatArray
from batchtune.units import format_size

FEWEST_STEPS = 12
"""With fewer steps growth can't be told from noise."""

# As for the trials of the probe: what would take less than 5% of the limit in 10,000 more steps does no harm.
_FORESEEN_STEPS = 10_000
_HARMLESS_SHARE = 0.05
# Growth counts if it is this many times as large as the spread of the figures.
_ABOVE_NOISE = 4.0
# Growth at the end below this fraction of the growth before slows down, as that of a cache that fills up.
_SAME_PACE = 2 / 3
# The end has at least this many steps, and so many that growth at the same pace is so many times the noise of its mean.
_FEWEST_AT_THE_END = 4
_END_ABOVE_NOISE = 8.0
# The allocator's cache settles after some steps more than once: it creeps if it has grown by this fraction of the
# limit from the second to the last quarter, and in each half of that.
_CACHE_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Growth:
    """How a figure in bytes grew over steps.

    Attributes:
        total_bytes: Median of the last quarter of the steps - median of the second.
        steps: Steps between the middles of these quarters.
        steady: Whether it grew from the second quarter to the third, and from that to the last.
        noise_bytes: By how much the figures spread around a straight line within a quarter: the interquartile range.
        pace: Growth per step at the end / from the second quarter to the third; 1 if it did not grow there.
    """

    total_bytes: float
    steps: float
    steady: bool
    noise_bytes: float
    pace: float

    @property
    def per_step_bytes(self) -> float:
        """Growth per step."""
        return self.total_bytes / self.steps

    def leaks(self, limit_bytes: int) -> bool:
        """Whether memory in use between steps creeps, and did so at the same pace to the end.

        A cache that these steps did not fill looks the same.
        """
        return self._creeps(limit_bytes) and self.pace >= _SAME_PACE

    def settles(self, limit_bytes: int) -> bool:
        """Whether memory in use between steps crept, but less at the end, like a cache that fills up."""
        return self._creeps(limit_bytes) and self.pace < _SAME_PACE

    def _creeps(self, limit_bytes: int) -> bool:
        if not self.steady or self.total_bytes < _ABOVE_NOISE * self.noise_bytes:
            return False
        return self.per_step_bytes * _FORESEEN_STEPS > _HARMLESS_SHARE * limit_bytes

    def fragments(self, limit_bytes: int) -> bool:
        """Whether the allocator's cache still grows; for the bytes that it holds beyond those in use between steps."""
        return self.steady and self.total_bytes > _CACHE_SHARE * limit_bytes

    def __str__(self) -> str:
        return (
            f"grew by {format_size(self.total_bytes)} in {self.steps:.0f} steps "
            f"({format_size(self.per_step_bytes)} a step)"
        )


def growth_of(figures: Sequence[int | None]) -> Growth | None:
    """Return how these figures, one per step, grew after the first quarter, in which they may still settle.

    Medians of quarters are compared, so single steps decide nothing. None if a figure is unknown, or if there are
    fewer than 12.
    """
    known = [figure for figure in figures if figure is not None]
    if len(known) < len(figures) or len(known) < FEWEST_STEPS:
        return None
    second, third, last = quarters = np.array_split(np.array(known, dtype=np.float64), 4)[1:]
    medians = [float(np.median(quarter)) for quarter in quarters]
    total, steps = medians[2] - medians[0], len(known) / 2
    steady = medians[0] < medians[1] < medians[2]
    return Growth(total, steps, steady, _noise(quarters, total / steps), _pace(second, third, last))


def interquartile_range(values: FloatArray) -> float:
    """Return the distance between the 25th and the 75th percentile."""
    low, high = np.percentile(values, (25, 75))
    return float(high - low)


def _noise(quarters: Sequence[FloatArray], rise: float) -> float:
    """Return the largest spread of the figures around a line that rises by so much per step."""
    return max(interquartile_range(quarter - rise * np.arange(quarter.size)) for quarter in quarters)


def _pace(second: FloatArray, third: FloatArray, end: FloatArray) -> float:
    """Return the growth per step at the end / before; the end is as short as the noise allows."""
    before = _rise(second, third)
    if before <= 0:
        return 1.0
    noise = _noise((second, third), before)  # without the last: a bend is no noise
    while True:
        later = end[end.size // 2 :]
        half = later.size / 2
        if later.size < _FEWEST_AT_THE_END or before * half < _END_ABOVE_NOISE * noise / math.sqrt(half):
            return _rise(*np.array_split(end, 2)) / before
        end = later


def _rise(first: FloatArray, second: FloatArray) -> float:
    """Return the growth per step from the middle of some steps to the middle of those that follow."""
    return float(np.median(second) - np.median(first)) / ((first.size + second.size) / 2)
