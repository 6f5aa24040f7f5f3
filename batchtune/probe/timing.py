"""How often a step is timed, and how far its times scatter."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

# The first step of a trial is not timed: it makes the optimizer's state, and the libraries choose their kernels in it.
WARM_UP_STEPS = 1
MOST_TIMED_STEPS = 15

_STEADY = 0.05
_FEW_STEPS = 5
_FEW_SECONDS = 0.25
_MOST_SECONDS = 1.0
_ONE_IS_ENOUGH_SECONDS = 5.0


def enough(seconds: Sequence[float]) -> bool:
    """Whether these timed steps tell the step time.

    Short steps scatter more and are cheap to repeat; long and steady ones need no more than two. Where they are not
    steady (the interquartile range is more than 5% of the median), it goes on for up to 15 steps or a second.
    """
    if len(seconds) < 2:
        return sum(seconds) >= _ONE_IS_ENOUGH_SECONDS
    total = sum(seconds)
    if len(seconds) >= MOST_TIMED_STEPS or total >= _MOST_SECONDS:
        return True
    few = len(seconds) >= _FEW_STEPS or total >= _FEW_SECONDS
    return few and interquartile_range(seconds) <= _STEADY * statistics.median(seconds)


def interquartile_range(values: Sequence[float]) -> float:
    """The distance between the quartiles, interpolated linearly (as `numpy.percentile` does); at least two values."""
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return third - first
