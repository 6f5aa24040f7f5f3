"""What the batch samplers and the stream share: their ranks, and checks of arguments and states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch.distributed  # noqa: TID253  # this module is torch's: the package imports it only when its class is used

from batchtune.errors import shortened

_MOST_RANKS = 1_000_000


class OnRanks:
    """One of several processes: `_ranks` if given, else those of `torch.distributed`.

    They are looked up again each time, as a sampler may be made before the process group is.
    """

    _ranks: tuple[int, int] | None

    @property
    def rank(self) -> int:
        """This process, from 0."""
        return self._process[0]

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self._process[1]

    @property
    def _process(self) -> tuple[int, int]:
        if self._ranks is not None:
            return self._ranks
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1


def checked_ranks(rank: int | None, world_size: int | None) -> tuple[int, int] | None:
    """Return rank and world_size, None if neither is given; raise ValueError if they are wrong."""
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        raise ValueError(f"rank and world_size go together, got rank {rank} and world_size {world_size}: give both")
    if whole("world_size", world_size) > _MOST_RANKS:
        raise ValueError(f"world_size must be at most {_MOST_RANKS:,}, got {world_size:,}")
    if whole("rank", rank) >= world_size:
        raise ValueError(f"rank must be below world_size, got rank {rank} of {world_size}")
    return rank, world_size


def whole(name: str, value: int, least: int = 0) -> int:
    """Return the value as an int; raise ValueError unless it is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name} must be a whole number, at least {least}, got {value!r}")
    return int(value)


def flag(name: str, value: bool) -> bool:
    """Return the value as a bool; raise ValueError unless it is True or False, or 1 or 0."""
    if not isinstance(value, (int, np.integer, np.bool_)) or value not in (0, 1):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def as_length(value: Any, example: int) -> float:
    """Return what `length_of` returned for an example as a float; raise ValueError if it is not a number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(
            f"length_of must return a number, but for example {example} it returned {shortened(value)}"
        ) from None


def check_identity(what: str, state: Mapping[str, Any], ours: Mapping[str, Any], others: str) -> None:
    """Raise ValueError if a state is of another sampler or stream; `others` says what a digest covers."""
    for name, value in ours.items():
        if state[name] != value:
            differs = f"has {name} {state[name]}, this {what} {value}"
            if name in ("digest", "options"):
                differs = f"is of a {what} with {others}"
            raise ValueError(
                f"the state {differs}, so its batches differ. Make the {what} as it was, or start the epoch again with "
                "set_epoch."
            )


def truncated(length_of: Callable[[Any], float], longest: float, example: Any) -> float:
    """Return the length of an example as training truncates it."""
    length = length_of(example)
    try:
        return min(float(length), longest)
    except (TypeError, ValueError):
        return length  # refused by the caller, who knows which example it is
