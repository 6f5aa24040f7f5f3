"""Does each step leave more memory in use than the one before? Then no batch size is the right one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from batchtune.units import format_size

SURE_STEPS = 10
# With steps so long that ten take too long, half as many are believed.
WATCH_SECONDS = 30.0
_SURE_STEPS_IF_LONG = 5

_FORESEEN_STEPS = 10_000
_HARMLESS_SHARE = 0.05

HINT = (
    "Something keeps tensors from step to step, such as a loss that is added to a list without .item() or .detach(). "
    "Mend it and run the same command again; the trials so far are kept. "
    "A cache that each step adds to looks the same: fill it in setup()."
)


def grows(in_use: Sequence[int], limit_bytes: int) -> bool:
    """Whether every step left more in use than the one before, and so much that it matters.

    Args:
        in_use: Bytes in use after each step, its batch still there.
        limit_bytes: The memory limit; what would take less than 5% of it in 10,000 more steps does no harm.
    """
    if len(in_use) < 2 or any(after <= before for before, after in pairwise(in_use)):
        return False
    return mean_growth(in_use) * _FORESEEN_STEPS > _HARMLESS_SHARE * limit_bytes


def certain(in_use: Sequence[int], limit_bytes: int, seconds: float) -> bool:
    """Whether that has gone on for so many steps of one shape that it is taken for a leak.

    A cache of something from each of more steps than these looks the same.

    Args:
        in_use: As for `grows`; with a first value from before the steps.
        limit_bytes: The memory limit.
        seconds: How long those steps took.
    """
    wanted = SURE_STEPS if seconds < WATCH_SECONDS else _SURE_STEPS_IF_LONG
    return len(in_use) > wanted and grows(in_use, limit_bytes)


def mean_growth(in_use: Sequence[int]) -> float:
    """Bytes that one step adds, on average."""
    return (in_use[-1] - in_use[0]) / (len(in_use) - 1)


def message(in_use: Sequence[int], *, ran_out: bool = False) -> str:
    """What is told of a leak.

    Args:
        in_use: As for `grows`.
        ran_out: Whether it went on until memory ran out.
    """
    steps = len(in_use) - 1
    in_a_row = f"{steps} steps in a row" if steps > 1 else "1 step"
    until = ", then memory ran out" if ran_out else ""
    return (
        f"the workload leaks: each step leaves about {format_size(mean_growth(in_use))} more in use ({in_a_row}{until})"
    )
