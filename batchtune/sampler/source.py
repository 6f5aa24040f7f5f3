"""How a worker reads the source of a stream."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

import torch  # noqa: TID253  # this module is torch's: the package imports it only when its class is used

from batchtune.sampler.held import Held

Source: TypeAlias = Iterable[Any] | Callable[[int], Iterable[Any]]
"""The examples of a stream, or a function of the epoch that returns them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The part of a source that one worker of one rank reads.

    Attributes:
        place: Rank, world size, worker and number of workers.
        split: Whether it takes every n-th example.
        nominal: The batches of a nominal epoch, for which the source is read again where it ends; None: read it once.
        stage: Whether the source is what a pipeline's stage was called with: it may well be empty.
    """

    place: tuple[int, int, int, int]
    split: bool
    nominal: int | None
    stage: bool

    def passes(self, source: Source, epoch: int, held: Held) -> Iterator[Iterator[Any]]:
        """Yield the examples of each pass over the source, which `held` takes; for a nominal epoch without end.

        Raises:
            ValueError: The source does not give what it has to, or can't be read again.
        """
        rank, world_size, worker, workers = self.place
        readers = world_size * (workers or 1)
        if readers > 1 and not self.split and isinstance(source, Sequence):
            warnings.warn(
                f"each of {readers} workers of all ranks reads all of the source: let each take its part, with "
                "split=True",
                stacklevel=3,
            )
        parts, part = (readers, rank * (workers or 1) + worker) if self.split else (1, 0)
        source = at_epoch(source, epoch)
        while True:
            examples = source if isinstance(source, Iterable) else source(epoch)
            reading, seen, made = iter(examples), held.seen, held.batches
            yield islice(reading, part, None, parts)
            given = held.seen - seen
            if given == 0 and reading is source and not (self.split or self.stage):
                raise ValueError("the source is an iterator and has nothing left: give an iterable for further passes")
            if self.nominal is None:
                return
            if given == 0:
                problem = "the source gives no example"
            elif held.seen == held.dropped:
                problem = "all examples are beyond the last boundary"
            elif held.batches == made:
                problem = "the examples fill no batch, and drop_last leaves them out"
            elif reading is source:
                problem = "the examples come from an iterator, which has ended and can't be read again"
            else:
                continue
            raise ValueError(
                f"{problem} (rank {rank} of {world_size}, worker {worker} of {workers}), but batches_per_epoch is "
                f"{self.nominal}: use fewer workers or more shards, or give the stream a source that can be "
                "read again"
            )


def at_epoch(source: Any, epoch: int) -> Any:
    """Return the source of a stream with its epoch set, if it has one.

    Workers share the memory that a data set of Hugging Face keeps its epoch in, and its set_epoch adds to that: two at
    once would add twice. So a source with tensors is copied, and so are they.
    """
    if not callable(getattr(source, "set_epoch", None)):
        return source
    values = getattr(source, "__dict__", {}).items()
    if tensors := {name: value for name, value in values if isinstance(value, torch.Tensor)}:
        source = copy(source)
        for name, value in tensors.items():
            setattr(source, name, value.clone())
    source.set_epoch(epoch)
    return source
