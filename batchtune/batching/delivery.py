"""Counts the batches that a DataLoader, whose workers fetch ahead, has delivered in a pass over a sampler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any


@dataclass(slots=True)
class Pass:
    """One iteration over the sampler.

    Attributes:
        epoch: The epoch that it runs.
        first: How many of its batches it skips, because an earlier pass delivered them.
        loader: The attributes of the plain DataLoader's iterator that takes the batches; None for any other taker.
        handed_out: How many batches of the epoch were handed out, skipped ones included.
    """

    epoch: int
    first: int
    loader: Mapping[str, Any] | None
    handed_out: int

    @property
    def delivered(self) -> int | None:
        """How many batches of this pass the loader has delivered; None where that can't be told."""
        count = None if self.loader is None else self.loader.get("_num_yielded")
        return count if isinstance(count, int) else None

    @property
    def runs_ahead_unseen(self) -> bool:
        """Whether a loader with workers takes the batches, and does not tell how many it has delivered."""
        return self.loader is not None and self.delivered is None and self.loader.get("_num_workers", 1) != 0


def loader_of(frame: FrameType) -> Mapping[str, Any] | None:
    """Return the attributes of the plain DataLoader's iterator that runs in a frame; None where none does.

    Those of a class derived from it, as torchdata's, save the sampler's state with each batch themselves. The
    attributes outlive the iterator: `_num_yielded` counts what it has delivered until it was given up.
    """
    caller = frame.f_locals.get("self")
    return vars(caller) if type(caller).__module__ == "torch.utils.data.dataloader" else None
