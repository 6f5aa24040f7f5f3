"""Where a stream is: its place in an epoch, and the epochs that its ranks and workers begin next."""

from __future__ import annotations

from dataclasses import dataclass

import torch  # noqa: TID253  # this module is torch's: the package imports it only when its class is used
from torch.utils.data import get_worker_info  # noqa: TID253  # as above

from batchtune.sampler.held import Held

# So many ranks and workers of one machine have an epoch of their own.
_RANKS, _WORKERS = 16, 256


@dataclass(slots=True)
class Position:
    """A place in an epoch: after so many batches of one worker, or at its end.

    Attributes:
        read: The digest of the lengths that were read until then; while a pass runs, `held` knows it.
        place: Rank, world size, worker and number of workers of the one that resumes there; None for a running pass.
    """

    epoch: int
    batches: int = 0
    read: str = ""
    finished: bool = False
    place: tuple[int, int, int, int] | None = None
    held: Held | None = None

    @property
    def read_digest(self) -> str:
        """The digest of the lengths that were read until now."""
        return self.read if self.held is None else self.held.read_digest

    def check(self, read: str) -> None:
        """Raise ValueError if other lengths were read than those this place was reached with."""
        if read != self.read:
            raise ValueError(
                f"the source does not give the examples again that it gave before: up to batch {self.batches} of epoch "
                f"{self.epoch} their lengths differ, so the state can't be resumed. Give it the same files, order and "
                "seeds, or begin the epoch anew with set_epoch."
            )


class NextEpochs:
    """The epoch that each worker begins next, in shared memory: workers that persist see no other change.

    A process without workers speaks for all of its rank's. Ranks that are forked may share the memory too.
    """

    def __init__(self, epoch: int) -> None:
        self._epochs = _shared(torch.full((_RANKS, _WORKERS), epoch))

    def of(self, rank: int) -> int:
        """Return the epoch that is next for this worker of a rank."""
        return int(self._own(rank).max())

    def set(self, rank: int, epoch: int) -> None:
        """Make this epoch the next for this worker of a rank."""
        self._own(rank)[:] = epoch

    def set_all(self, epoch: int) -> None:
        """Make this epoch the next for all."""
        self._epochs[:] = epoch

    def differ(self, rank: int) -> bool:
        """Return whether some workers of a rank have begun an epoch that others have not: no rank has 256 workers."""
        own = self._own(rank)
        return bool((own != own[-1]).any())

    def _own(self, rank: int) -> torch.Tensor:
        info = get_worker_info()
        own = slice(None) if info is None else slice(info.id % _WORKERS, info.id % _WORKERS + 1)
        return self._epochs[rank % _RANKS, own]

    def __setstate__(self, state: dict[str, torch.Tensor]) -> None:
        self._epochs = _shared(state["_epochs"])  # a copy is not


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    tensor.share_memory_()  # type: ignore[no-untyped-call]  # torch leaves it so
    return tensor
