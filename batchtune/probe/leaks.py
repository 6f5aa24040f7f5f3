"""The rule for leaks in a trial: memory that every step of one shape leaves in use, and enough of it to matter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from batchtune.units import format_size

WATCH_SECONDS = 30.0
"""The most that is spent on more steps, to tell a leak from memory that stops growing."""
LEAK_HINT = (
    "Something keeps tensors from step to step, such as a loss that is added to a list without .item() or .detach(). "
    "Fix it and run the same command again; the trials so far are kept. "
    "A cache that each step adds to looks the same: fill it in setup()."
)


def grows(in_use: Sequence[int], limit_bytes: int) -> bool:
    """Return whether every step left more bytes in use than the one before, over 5% of the limit in 10,000 steps."""
    if len(in_use) < 2 or any(after <= before for before, after in pairwise(in_use)):
        return False
    return _mean_growth(in_use) * 10_000 > 0.05 * limit_bytes


def leaks(in_use: Sequence[int], limit_bytes: int, seconds: float) -> bool:
    """Return whether memory grew in enough steps of one shape, which took these seconds, to count as a leak.

    `in_use` holds the bytes before the steps and after each. A cache that every step adds to looks the same.
    """
    wanted = 10 if seconds < WATCH_SECONDS else 5
    return len(in_use) > wanted and grows(in_use, limit_bytes)


def leak_message(in_use: Sequence[int], *, ran_out: bool = False) -> str:
    """Describe a leak; if `ran_out`, until memory ran out."""
    steps = len(in_use) - 1
    in_a_row = f"{steps} steps in a row" if steps > 1 else "1 step"
    until = ", then memory ran out" if ran_out else ""
    mean = format_size(_mean_growth(in_use))
    return f"the workload leaks: each step leaves about {mean} more in use ({in_a_row}{until})"


def _mean_growth(in_use: Sequence[int]) -> float:
    return (in_use[-1] - in_use[0]) / (len(in_use) - 1)
