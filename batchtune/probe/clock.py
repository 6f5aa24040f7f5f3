"""The time that a probe may take, and how long its confirmation will."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from batchtune.probe.confirmation import rounds_of
from batchtune.results import Trial

SLOWER_IN_TURNS = 1.25
"""A step among other shapes, with its batch, may take so many times as long as in its trial."""

# Trials whose longest says how long the next may take.
_RECENT = 5


@dataclass(frozen=True, slots=True)
class ProbeClock:
    """How long a worker takes to start, and when the probe must end, on the monotonic clock; None: when it is done."""

    start_seconds: float
    deadline: float | None

    @classmethod
    def of(cls, started: float, minutes: float | None) -> ProbeClock:
        """Return the clock of a probe whose first worker was started at that time and is ready now."""
        return cls(time.monotonic() - started, None if minutes is None else started + 60 * minutes)

    def leaves(self, seconds: float) -> bool:
        """Return whether so many seconds are left."""
        return self.deadline is None or time.monotonic() + seconds <= self.deadline

    def leaves_a_trial(self, trials: Sequence[Trial], limit_bytes: int) -> bool:
        """Return whether time is left for a trial as long as the recent ones, and to confirm what is known then."""
        recent = [trial.elapsed_seconds for trial in trials[-_RECENT:]]
        return self.leaves(max(recent, default=0.0) + self.confirmation_seconds(trials, limit_bytes))

    def confirmation_seconds(self, trials: Sequence[Trial], limit_bytes: int) -> float:
        """Return about how long the confirmation will take: a step at each length, by the longest of its trials."""
        longest: dict[tuple[float, float | None], float] = {}
        for trial in trials:
            length = (trial.length, trial.target_length)
            longest[length] = max(longest.get(length, 0.0), trial.step_seconds or 0.0)
        return self.start_seconds + SLOWER_IN_TURNS * rounds_of(trials, limit_bytes) * sum(longest.values())
