"""One worker of a stream: how it reads its source, which examples it holds, and where it is in an epoch."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch  # noqa: TID253  # as in arguments.py
from torch.utils.data import get_worker_info  # noqa: TID253  # as in arguments.py

from batchtune.arguments import is_number, whole
from batchtune.epochs.table import OverlongError
from batchtune.errors import shortened
from batchtune.sampler.arguments import (
    as_number,
    check_function,
    flag,
)
from batchtune.streams.bucketed import Reader

StreamSource: TypeAlias = Iterable[Any] | Callable[[int], Iterable[Any]]
"""The examples of a stream, or a function of the epoch that returns them."""

_END = object()
# This many ranks and workers of one machine have an epoch of their own.
_RANKS, _WORKERS = 16, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleLimits:
    """How examples are measured, and which are held; the arguments are those of `BucketedStream`."""

    length_of: Callable[[Any], float]
    last_boundary: float
    overlong: Literal["error", "single", "drop"]
    min_length: float | None
    buffer_bytes: int | None
    bytes_of: Callable[[Any], int] | None

    def __post_init__(self) -> None:
        check_function("length_of", self.length_of)
        if self.overlong not in ("error", "single", "drop"):
            raise ValueError(
                f"overlong must be error, single or drop, got {shortened(self.overlong)}"
            )
        if self.min_length is not None:
            longest = self.last_boundary
            if not is_number(self.min_length) or not 0 < self.min_length <= longest:
                raise ValueError(
                    f"min_length must be above 0 and at most the last of bucket_boundaries, {longest}, got "
                    f"{shortened(self.min_length)}"
                )
        if (self.buffer_bytes is None) != (self.bytes_of is None):
            raise ValueError("buffer_bytes and bytes_of go together: give both")
        if self.bytes_of is not None:
            check_function("bytes_of", self.bytes_of)


class Held(Reader):
    """The examples that were read and are in no batch yet."""

    def __init__(self, limits: ExampleLimits) -> None:
        self.seen = 0  # examples that the source has given
        self.dropped = 0  # of these, how many were left out
        self.batches = 0  # that have left
        self._examples: Iterator[Any] = iter(())
        self._limits = limits
        self._held: dict[int, Any] = {}
        self._bytes: dict[int, float] = {}
        self._total_bytes = 0.0
        self._digest = hashlib.blake2b(digest_size=8)

    def begin(self, examples: Iterator[Any]) -> None:
        """Begin a pass over the source."""
        self._examples = examples
        self.ended = False

    @property
    def read_digest(self) -> str:
        """A digest of the lengths that were read, in their order."""
        return self._digest.hexdigest()

    def read(self, room: int) -> list[float]:
        """Read examples until so many are held, and return their lengths."""
        lengths: list[float] = []
        length_of = self._limits.length_of
        buffer_bytes = self._limits.buffer_bytes
        while len(lengths) < room and (
            buffer_bytes is None or self._total_bytes <= buffer_bytes
        ):
            example = next(self._examples, _END)
            if example is _END:
                self.ended = True
                break
            length = as_number(length_of(example), self.seen)
            if self._is_kept(length):
                lengths.append(length)
                self._hold(example)
            else:
                self.dropped += 1
            self.seen += 1
        self._digest.update(array("d", lengths))
        return lengths

    def _is_kept(self, length: float) -> bool:
        """Return whether an example is not dropped; raise ValueError for a length that is not allowed."""
        limits = self._limits
        last = limits.last_boundary
        if 0 <= length < (limits.min_length or 0.0):
            return False
        if not 0 < length < math.inf:
            raise ValueError(
                f"lengths must be positive and finite, but example {self.seen} of the stream has {length}: leave "
                "it out of the source, or fix length_of"
            )
        if length > last and limits.overlong == "error":
            raise OverlongError(
                f"example {self.seen} of the stream has the length {length}, beyond the last of bucket_boundaries, "
                f'{last}: leave it out of the source, add a boundary, or say overlong="single" for batches of one '
                'or overlong="drop"'
            )
        return length <= last or limits.overlong == "single"

    def _hold(self, example: Any) -> None:
        """Hold an example, with its size in memory if that is limited."""
        if self._limits.bytes_of is not None:
            size = as_number(self._limits.bytes_of(example), self.seen, "bytes_of")
            if not 0 <= size < math.inf:
                raise ValueError(
                    f"bytes_of must return a finite number of at least 0, but for example {self.seen} it returned "
                    f"{size}"
                )
            self._bytes[self.count] = size
            self._total_bytes += size
        self._held[self.count] = example
        self.count += 1

    def taken(self, places: list[int]) -> list[Any]:
        """Return the examples at these places, which leave as a batch."""
        self.batches += 1
        if self._bytes:
            self._total_bytes -= sum(map(self._bytes.pop, places))
        return list(map(self._held.pop, places))


class WorkerPlace(NamedTuple):
    """A worker of a rank; in a process without workers both `worker` and `workers` are 0."""

    rank: int
    world_size: int
    worker: int = 0
    workers: int = 0

    @classmethod
    def of_this_worker(cls, rank: int, world_size: int) -> WorkerPlace:
        """Return the place of the worker that this runs in."""
        info = get_worker_info()
        if info is None:
            return cls(rank, world_size)
        return cls(rank, world_size, info.id, info.num_workers)

    @property
    def readers(self) -> int:
        """Number of workers of all ranks."""
        return self.world_size * max(1, self.workers)

    @property
    def reader(self) -> int:
        """This worker, counted over all ranks from 0."""
        return self.rank * max(1, self.workers) + self.worker

    def share(self, batches: int | None) -> int | None:
        """Return how many of the rank's batches are this worker's; None if their number is not known."""
        if batches is None:
            return None
        each, left = divmod(batches, max(1, self.workers))
        return each + (self.worker < left)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}, worker {self.worker} of {self.workers}"


@dataclass(slots=True)
class Position:
    """A place in an epoch: after a number of batches of one worker, or at its end."""

    epoch: int
    batches: int = 0
    read: str = ""  # the digest of the lengths that were read until then; while a pass runs, `held` has it
    finished: bool = False
    place: WorkerPlace | None = None  # of the worker that resumes there
    held: Held | None = None

    @classmethod
    def of_state(cls, state: Mapping[str, Any], place: WorkerPlace) -> Position:
        """Return the place that a state describes; raise ValueError if one of its values is of the wrong kind."""
        read = state["read"]
        if not isinstance(read, str):
            raise ValueError(f"not a state of a stream: its read is {shortened(read)}")
        epoch = whole("epoch", state["epoch"])
        batches = whole("batches", state["batches"])
        return cls(epoch, batches, read, flag("finished", state["finished"]), place)

    def state(self) -> dict[str, Any]:
        """Return what `of_state` reads."""
        return {
            "epoch": self.epoch,
            "batches": self.batches,
            "finished": self.finished,
            "read": self.read_digest,
        }

    @property
    def read_digest(self) -> str:
        """The digest of the lengths that were read until now."""
        return self.read if self.held is None else self.held.read_digest

    def end(self) -> None:
        """Mark the end of the epoch."""
        self.read = self.read_digest
        self.held = None
        self.finished = True

    def check(self, read: str) -> None:
        """Raise ValueError if other lengths were read than those this place was reached with."""
        if read != self.read:
            raise ValueError(
                f"the source does not give the examples again that it gave before: up to batch {self.batches} of epoch "
                f"{self.epoch} their lengths differ, so the state can't be resumed. Give it the same files, order and "
                "seeds, or start the epoch again with set_epoch."
            )


class NextEpochs:
    """The epoch that each worker begins next, in shared memory: the only change that persistent workers see.

    A process without workers speaks for all of its rank's. Forked ranks may share the memory too.
    """

    def __init__(self, epoch: int) -> None:
        self._epochs = _shared(torch.full((_RANKS, _WORKERS), epoch))

    def of(self, rank: int) -> int:
        """Return the epoch that is next for this worker of a rank."""
        return int(self._of_worker(rank).max())

    def set(self, rank: int, epoch: int) -> None:
        """Make this epoch the next for this worker of a rank."""
        self._of_worker(rank)[:] = epoch

    def set_all(self, epoch: int) -> None:
        """Make this epoch the next for all."""
        self._epochs[:] = epoch

    def differ(self, rank: int) -> bool:
        """Return whether some workers of a rank have begun an epoch that others have not: no rank has 256 workers."""
        epochs = self._of_worker(rank)
        return bool((epochs != epochs[-1]).any())

    def _of_worker(self, rank: int) -> torch.Tensor:
        """Return the entry of this worker, shape (1,), or without workers those of all the rank's."""
        info = get_worker_info()
        of_rank = self._epochs[rank % _RANKS]
        if info is None:
            return of_rank
        worker = info.id % _WORKERS
        return of_rank[worker : worker + 1]

    def __setstate__(self, state: dict[str, torch.Tensor]) -> None:
        self._epochs = _shared(state["_epochs"])  # a copy is not shared


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    tensor.share_memory_()  # type: ignore[no-untyped-call]  # not typed in torch
    return tensor


def at_epoch(source: Any, epoch: int) -> Any:
    """Return the source of a stream with its epoch set, if it has one.

    Workers share the memory in which a Hugging Face data set keeps its epoch, and its set_epoch adds to that: two at
    once would add twice. So a source with tensors is copied, and so are they.
    """
    if not callable(getattr(source, "set_epoch", None)):
        return source
    values = getattr(source, "__dict__", {}).items()
    tensors = {name: value for name, value in values if isinstance(value, torch.Tensor)}
    if tensors:
        source = copy(source)
        for name, value in tensors.items():
            setattr(source, name, value.clone())
    source.set_epoch(epoch)
    return source
