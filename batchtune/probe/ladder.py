"""The batch sizes that a tolerance tells apart: what bisection has to choose between."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class _Flight:
    """Rungs at an even distance: first, first + step, ..."""

    first: int
    step: int
    count: int

    @property
    def last(self) -> int:
        return self.first + (self.count - 1) * self.step


class Ladder:
    """Batch sizes from 1 to `top`, each about `tolerance` above the one before, one at least.

    Between two neighbours nothing needs to be tried: they are as close as `--tolerance` asks for. So bisection over
    the n rungs between two batch sizes takes n.bit_length() trials at most.

    Args:
        tolerance: Distance as a share of the batch size; 0: every batch size is a rung.
        top: Largest batch size worth trying.
    """

    def __init__(self, tolerance: float, top: int) -> None:
        self._flights: list[_Flight] = []
        rung = 1
        while rung <= top:
            step = step_at(rung, tolerance)
            # As long as the step stays the same; a division may miss its end by one, which costs no more than a
            # flight of one rung.
            end = math.ceil((step + 1) / tolerance) if tolerance * top >= step + 1 else top + 1
            count = max(1, -(-(min(end, top + 1) - rung) // step))
            while count > 1 and step_at(rung + (count - 1) * step, tolerance) != step:
                count -= 1
            self._flights.append(_Flight(rung, step, count))
            rung += count * step
        self._firsts = [flight.first for flight in self._flights]
        self._before = [0, *accumulate(flight.count for flight in self._flights)]

    def up_to(self, size: int) -> int:
        """Return how many rungs are at most `size`."""
        number = bisect_right(self._firsts, size) - 1
        if number < 0:
            return 0
        flight = self._flights[number]
        return self._before[number] + min(flight.count, (size - flight.first) // flight.step + 1)

    def rung(self, index: int) -> int:
        """Return the rung with that index, from 0."""
        number = bisect_right(self._before, index) - 1
        flight = self._flights[number]
        return flight.first + (index - self._before[number]) * flight.step

    def has(self, size: int) -> bool:
        """Return whether a batch size, at least 1, is a rung."""
        return self.rung(self.up_to(size) - 1) == size

    def between(self, low: int, high: int) -> range:
        """Return the indices of the rungs strictly between two batch sizes."""
        return range(self.up_to(low), max(self.up_to(low), self.up_to(high - 1)))

    def within(self, guess: int, low: int, high: int, trials: int) -> int:
        """Return the batch size next to `guess` that keeps the promise of `trials`, this one included.

        Whatever its outcome, the rest can be bisected in `trials - 1`. Where nothing can keep it, the middle rung.
        `low` passed (or is 0), `high` failed or is out of the question; the guess lies between.
        """
        rungs = self.between(low, high)
        if not rungs:
            return guess
        most = (1 << max(0, trials - 1)) - 1  # rungs that the trials after this one can tell apart
        if len(rungs) > 2 * most + 1:
            return self.rung(rungs[len(rungs) // 2])
        lowest, highest = rungs[max(0, len(rungs) - 1 - most)], rungs[min(len(rungs) - 1, most)]
        # Off the rungs a guess leaves as many on one side as the rung below it, on the other one as that above.
        return min(max(guess, self.rung(lowest)), self.rung(highest))


def step_at(size: int, tolerance: float) -> int:
    """Return the smallest difference in batch size that matters, at least 1."""
    return max(1, int(size * tolerance))
