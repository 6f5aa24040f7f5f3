"""Do a trial's steps agree: in their time, and in the memory that they leave in use?"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise

from batchtune.units import format_size

# The first step of a trial is not timed: it makes the optimizer's state, and the libraries choose their kernels in it.
WARM_UP_STEPS = 1
MOST_TIMED_STEPS = 30

_STEADY = 0.05
_FEWEST_STEPS = 3
_ENOUGH_SECONDS = 0.25
_MOST_SECONDS = 1.0
_ONE_IS_ENOUGH_SECONDS = 10.0

SURE_STEPS = 10
# With steps so long that ten take too long, half as many are believed.
WATCH_SECONDS = 30.0
_SURE_STEPS_IF_LONG = 5

# A leak that would take less than this share of the limit in so many more steps does no harm.
_FORESEEN_STEPS = 10_000
_HARMLESS_SHARE = 0.05

LEAK_HINT = (
    "Something keeps tensors from step to step, such as a loss that is added to a list without .item() or .detach(). "
    "Fix it and run the same command again; the trials so far are kept. "
    "A cache that each step adds to looks the same: fill it in setup()."
)


def enough(seconds: Sequence[float]) -> bool:
    """Return whether these timed steps are enough to know the step time.

    Short steps scatter more and are cheap to repeat: up to 30, for a quarter of a second. If they are not steady
    (the interquartile range is more than 5% of the median), for up to a second. A step that is slow only now and then
    shows as such among three, so there are no fewer, unless the first takes 10 seconds.
    """
    total = sum(seconds)
    if len(seconds) < _FEWEST_STEPS:
        return len(seconds) == 1 and total >= _ONE_IS_ENOUGH_SECONDS
    steady = interquartile_range(seconds) <= _STEADY * statistics.median(seconds)
    return len(seconds) >= MOST_TIMED_STEPS or total >= (_ENOUGH_SECONDS if steady else _MOST_SECONDS)


def interquartile_range(values: Sequence[float]) -> float:
    """Return the distance between the quartiles, interpolated linearly (as `numpy.percentile` does)."""
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return third - first


def grows(in_use: Sequence[int], limit_bytes: int) -> bool:
    """Return whether every step left more bytes in use than the one before, and so much that it matters."""
    if len(in_use) < 2 or any(after <= before for before, after in pairwise(in_use)):
        return False
    return _mean_growth(in_use) * _FORESEEN_STEPS > _HARMLESS_SHARE * limit_bytes


def leaks(in_use: Sequence[int], limit_bytes: int, seconds: float) -> bool:
    """Return whether memory has grown in so many steps of one shape, in so many seconds, that it counts as a leak.

    `in_use` holds the bytes before the steps and after each, its batch still there. A cache of something from each of
    more steps than these looks the same.
    """
    wanted = SURE_STEPS if seconds < WATCH_SECONDS else _SURE_STEPS_IF_LONG
    return len(in_use) > wanted and grows(in_use, limit_bytes)


def leak_message(in_use: Sequence[int], *, ran_out: bool = False) -> str:
    """Describe a leak; `ran_out`: it went on until memory ran out."""
    steps = len(in_use) - 1
    in_a_row = f"{steps} steps in a row" if steps > 1 else "1 step"
    until = ", then memory ran out" if ran_out else ""
    mean = format_size(_mean_growth(in_use))
    return f"the workload leaks: each step leaves about {mean} more in use ({in_a_row}{until})"


def _mean_growth(in_use: Sequence[int]) -> float:
    return (in_use[-1] - in_use[0]) / (len(in_use) - 1)
