"""The ranks that training runs on."""

from __future__ import annotations

from dataclasses import dataclass

from batchtune.epochs.layout import Dealing
from batchtune.results import RankTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The ranks that training runs on; with `same_bucket` all take batches of one bucket at each step.

    With `accumulate` above 1 they wait for each other only after so many batches.
    """

    world_size: int = 1
    same_bucket: bool = False
    accumulate: int = 1

    def epoch_seconds(self, times: RankTimes) -> float:
        """Return the time of an epoch as these ranks take batches."""
        if self.same_bucket:
            return times.same_bucket_epoch_seconds
        return times.independent_epoch_seconds

    @property
    def dealing(self) -> Dealing:
        """How batches are dealt to them."""
        return Dealing(world_size=self.world_size, same_bucket=self.same_bucket)

    def steps(self, batches: int) -> int:
        """Return the optimizer steps of an epoch with this many batches over all ranks."""
        return -(-batches // (self.world_size * self.accumulate))


ONE_RANK = Ranks()
