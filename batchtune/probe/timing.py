"""How often a step is timed, and how far its times scatter."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

# The first step of a trial is not timed: it makes the optimizer's state, and the libraries choose their kernels in it.
WARM_UP_STEPS = 1
MOST_TIMED_STEPS = 30

_STEADY = 0.05
_FEWEST_STEPS = 3
_ENOUGH_SECONDS = 0.25
_MOST_SECONDS = 1.0
_ONE_IS_ENOUGH_SECONDS = 10.0


def enough(seconds: Sequence[float]) -> bool:
    """Whether these timed steps tell the step time.

    Short steps scatter more and are cheap to repeat: up to 30, for a quarter of a second. Where they are not steady
    (the interquartile range is more than 5% of the median), it goes on for up to a second. A step that is slow only
    now and then shows as such among three, so there are no fewer, unless the first takes 10 seconds.
    """
    total = sum(seconds)
    if len(seconds) < _FEWEST_STEPS:
        return len(seconds) == 1 and total >= _ONE_IS_ENOUGH_SECONDS
    if len(seconds) >= MOST_TIMED_STEPS:
        return True
    steady = interquartile_range(seconds) <= _STEADY * statistics.median(seconds)
    return total >= (_ENOUGH_SECONDS if steady else _MOST_SECONDS)


def interquartile_range(values: Sequence[float]) -> float:
    """The distance between the quartiles, interpolated linearly (as `numpy.percentile` does); at least two values."""
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return third - first
