"""A probe's progress, what a caller can hook into, and the time that it may take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from batchtune.probe.confirmation import rounds_of
from batchtune.probe.supervisor import Supervisor
from batchtune.results import Device, Trial
from batchtune.shapes import BatchShape

SLOWER_IN_TURNS = 1.25
"""A step among other shapes, with its batch, may take so many times as long as in its trial."""

# Trials whose longest says how long the next may take.
_RECENT = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeProgress:
    """The progress of a probe: before and after each trial, and before each step of the confirmation.

    Attributes:
        trial: The outcome of the shape; None before it is known.
        done, total: Lengths whose largest batch is known, and all of them; steps while confirming.
        seconds_left: A guess, from the time that trials took so far; None at the beginning.
        confirming: Whether the shapes at the limit are run in turns.
        shortening: Whether the longest example does not fit, and the longest that does is searched for.
    """

    shape: BatchShape
    trial: Trial | None
    done: int
    total: int
    seconds_left: float | None
    device: Device
    confirming: bool = False
    shortening: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeHooks:
    """A caller's hooks; `measurer` takes the place of worker processes on the device that the settings name."""

    on_progress: Callable[[ProbeProgress], None] = lambda progress: None
    on_note: Callable[[str], None] = lambda text: None
    measurer: Supervisor | None = None


@dataclass(frozen=True, slots=True)
class ProbeClock:
    """How long a worker takes to start, and when the probe must end, on the monotonic clock; None: when it is done."""

    start_seconds: float
    deadline: float | None

    def leaves(self, seconds: float) -> bool:
        """Return whether so many seconds are left."""
        return self.deadline is None or time.monotonic() + seconds <= self.deadline

    def leaves_a_trial(self, trials: Sequence[Trial], limit_bytes: int) -> bool:
        """Return whether time is left for a trial as long as the recent ones, and to confirm what is known then."""
        recent = [trial.elapsed_seconds for trial in trials[-_RECENT:]]
        return self.leaves(
            max(recent, default=0.0) + self.confirmation_seconds(trials, limit_bytes)
        )

    def confirmation_seconds(self, trials: Sequence[Trial], limit_bytes: int) -> float:
        """Return about how long the confirmation will take: a step at each length, by the longest of its trials."""
        longest: dict[tuple[float, float | None], float] = {}
        for trial in trials:
            length = (trial.length, trial.target_length)
            longest[length] = max(longest.get(length, 0.0), trial.step_seconds or 0.0)
        return self.start_seconds + SLOWER_IN_TURNS * rounds_of(
            trials, limit_bytes
        ) * sum(longest.values())
