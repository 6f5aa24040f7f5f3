"""A device whose memory is a formula: exact, noise-free and fast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from made_trials import made_trial

from batchtune.results import BatchShape, Outcome, Trial

Peak = Callable[[BatchShape], float]


def quadratic_peak(
    constant: float = 1e9, linear: float = 2e6, quadratic: float = 5e3
) -> Peak:
    return lambda shape: (
        constant + shape.batch_size * shape.length * (linear + quadratic * shape.length)
    )


@dataclass
class MadeDevice:
    """Runs trials by formula; `faults` overrides the outcome of the n-th trial of a shape."""

    peak: Peak
    limit_bytes: int
    tells_peak: bool = True
    faults: dict[tuple[int, float], list[Outcome]] = field(default_factory=dict)

    def measure(self, shape: BatchShape, index: int) -> Trial:
        peak = self.peak(shape)
        outcome: Outcome = "ok" if peak <= self.limit_bytes else "oom"
        if planned := self.faults.get((shape.batch_size, shape.length)):
            outcome = planned.pop(0)
        passed = outcome == "ok"
        knows = passed and self.tells_peak
        return made_trial(
            shape,
            outcome,
            index=index,
            steps=3 if passed else 0,
            step_seconds=1e-3 + 1e-4 * shape.padded_length if passed else None,
            peak_bytes=int(peak) if knows else None,
            rest_bytes=int(self.peak(BatchShape(1, 1e-6))) if knows else None,
            alloc_retries=0,
            error=None if passed else f"made {outcome}",
        )

    def largest(
        self, length: float, cap: int, target_length: float | None = None
    ) -> int:
        """The truth, by trying every batch size."""
        shapes = (BatchShape(size, length, target_length) for size in range(1, cap + 1))
        return max(
            (
                shape.batch_size
                for shape in shapes
                if self.peak(shape) <= self.limit_bytes
            ),
            default=0,
        )
