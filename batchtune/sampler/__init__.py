"""The drop-in torch samplers that run a recommendation, and the stream that makes batches as it is read.

Training imports only the sampler that it uses, such as `batchtune.BucketBatchSampler`. This module
has what their arguments share: ranks, checks, and those in `stream.yaml`.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import FrameType
from typing import Any, TypeAlias

import numpy as np
import torch.distributed  # noqa: TID253  # this module is torch's: the package imports it only when its class is used
from torch.utils.data import Dataset, Sampler  # noqa: TID253  # as above

from batchtune.allocators import in_force, in_words, setting_for
from batchtune.errors import shortened
from batchtune.lengths import is_number, whole
from batchtune.records import StreamConfig

LengthOf: TypeAlias = Callable[[Any], float]
"""A function that takes an example and returns its length."""

_MOST_RANKS = 1_000_000
# Far more than any training; each is held in memory.
MOST_ACCUMULATED = 100_000
LARGEST_SEED = 2**128  # twice the bits of any that torch or NumPy draw

# What is shorter is of length 0.
SHORTEST_LENGTH = math.ulp(0.0)
_OF_STREAM = (
    "algorithm",
    "bucket_boundaries",
    "bucket_batch_sizes",
    "buffer_size",
    "max_padding_ratio",
    "shuffle",
    "drop_last",
    "batches_per_epoch",
    "seed",
)


class OnRanks:
    """One of several processes: `_ranks` if given, else those of `torch.distributed`.

    They are looked up again each time, as a sampler may be made before the process group is.
    """

    _ranks: tuple[int, int] | None
    # That the batches were measured with; None: not known, or compared with that of this process.
    _allocator: str | None = None

    def _compare_allocator(self) -> None:
        """Warn, once, if this process takes CUDA memory with another allocator than batches were measured with."""
        cuda: Any = torch.cuda
        if self._allocator is None or not cuda.is_initialized():
            return
        now = in_force(cuda)
        if now is None:
            return
        measured = self._allocator
        self._allocator = None
        if now != measured:
            setting = setting_for(measured, torch.__version__, os.environ)
            warnings.warn(
                f"measured {in_words(measured)}, but this process runs {in_words(now)}: batches that fit there may not "
                f"fit here. Set {setting} before Python starts, or probe with the allocator that training has",
                stacklevel=3,
            )

    def _refuse_second_dealing(self) -> None:
        """Raise RuntimeError if what takes the batches, somewhere up the call stack, deals them to ranks once more."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and self.world_size > 1:
            taker = frame.f_locals.get("self")
            ranks = _ranks_dealt_to(taker)
            if ranks > 1:
                name = f"{type(taker).__module__.partition('.')[0]}'s {type(taker).__name__}"
                raise RuntimeError(
                    f"{name} deals the batches to {ranks} ranks, but the {type(self).__name__} under it has already "
                    f"dealt them to {self.world_size}: part of the examples would never be seen. Leave the loader out "
                    f"of accelerate's `prepare` (Lightning: use_distributed_sampler=False), or make the "
                    f"{type(self).__name__} with rank=0, world_size=1"
                )
            frame = frame.f_back

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


def _ranks_dealt_to(taker: object) -> int:
    """Return the number of ranks that a sampler, data set or loader deals to; 0 if it deals to none."""
    if (
        type(taker).__name__ == "DataLoaderDispatcher"
    ):  # accelerate's, which reads on rank 0 alone
        taker = getattr(taker, "state", None)
    elif not isinstance(taker, (Sampler, Dataset)):
        return 0
    ranks: int = getattr(taker, "num_processes", getattr(taker, "num_replicas", 0))
    return ranks


def checked_ranks(rank: int | None, world_size: int | None) -> tuple[int, int] | None:
    """Return rank and world_size, None if neither is given; raise ValueError if they are wrong."""
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        raise ValueError("rank and world_size go together: give both")
    processes = whole("world_size", world_size, 1, highest=_MOST_RANKS)
    return whole("rank", rank, highest=processes - 1), processes


def flag(name: str, value: bool) -> bool:
    """Return the value as a bool; raise ValueError unless it is True or False, or 1 or 0."""
    if not isinstance(value, (int, np.integer, np.bool_)) or value not in (0, 1):
        raise ValueError(f"{name} must be True or False, got {shortened(value)}")
    return bool(value)


def cost(name: str, value: float) -> float:
    """Return the value as a float; raise ValueError unless it is finite and at least 0."""
    if not is_number(value) or not 0 <= value < 1e300:
        raise ValueError(
            f"{name} must be finite and at least 0, got {shortened(value)}"
        )
    return float(value)


def check_function(name: str, value: object) -> None:
    """Raise ValueError unless the value can be called."""
    if not callable(value):
        raise ValueError(f"{name} must be a function, got {shortened(value)}")


def as_number(value: Any, example: int, function: str = "length_of") -> float:
    """Return what a function returned for an example as a float; raise ValueError if it is text or no number."""
    if isinstance(value, float):
        return value
    number = _as_float(value)
    if number is None:
        raise ValueError(
            f"{function} must return a number, but for example {example} it returned {shortened(value)}"
        )
    return number


def _as_float(value: Any) -> float | None:
    """Return a value as a float; None for text, which float() would read, and for anything but a number."""
    if isinstance(value, (str, bytes, bytearray)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last is torch's
        return None


def check_state(
    what: str,
    state: Mapping[str, Any],
    position: Iterable[str],
    ours: Mapping[str, Any],
    covered: str,
) -> None:
    """Raise ValueError if a state lacks a field, or is of another sampler or stream.

    `position` are the fields that say where it was taken; `covered` says what the digest in `ours` is of.
    """
    names = {*position, *ours}
    if not isinstance(state, Mapping) or names - state.keys():
        raise ValueError(f"not a state of a {what}: it has {', '.join(sorted(names))}")
    for name, value in ours.items():
        given = state[name]
        # A tensor may compare to several values.
        if not isinstance(given, (int, str, np.integer)) or given != value:
            raise ValueError(
                f"the state is of another {what}: its {name} is {shortened(given)}, not {shortened(value)} (a digest "
                f"is of {covered}). Make the {what} as it was, or start the epoch again with set_epoch."
            )


def truncated(length_of: Callable[[Any], Any], longest: float, example: Any) -> Any:
    """Return the length of an example as training truncates it."""
    length = length_of(example)
    number = _as_float(length)
    if number is None:
        return length  # refused by the caller, who knows which example it is
    return min(number, longest)


def stream_options(config: StreamConfig, length_of: LengthOf) -> dict[str, Any]:
    """Return the arguments that a `stream.yaml` gives."""
    evidence = config.evidence
    options = {name: getattr(config, name) for name in _OF_STREAM}
    options["length_of"] = length_of
    if evidence.truncate is not None:
        options["length_of"] = partial(truncated, length_of, evidence.truncate)
    options["min_length"] = evidence.min_length or SHORTEST_LENGTH
    options["overlong"] = "drop"
    return options
