"""The drop-in torch data set that makes batches of a stream, and one worker's part of it."""

from __future__ import annotations

import hashlib
import json
import math
import sys
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy.typing as npt
import torch  # noqa: TID253  # as in __init__.py
from torch.utils.data import IterableDataset, get_worker_info  # noqa: TID253  # as in __init__.py

from batchtune.configs import read_stream_yaml
from batchtune.epochs.table import BucketTable, OverlongError
from batchtune.errors import shortened
from batchtune.lengths import is_number, whole
from batchtune.records import STREAM_ALGORITHMS, StreamAlgorithm
from batchtune.sampler import (
    LARGEST_SEED,
    LengthOf,
    OnRanks,
    as_number,
    check_function,
    check_state,
    checked_ranks,
    flag,
    stream_options,
)
from batchtune.streams import Reader, StreamBatching, batched, stream_random

if TYPE_CHECKING:
    from typing_extensions import Self

StreamSource: TypeAlias = Iterable[Any] | Callable[[int], Iterable[Any]]
"""The examples of a stream, or a function of the epoch that returns them."""

_END = object()
# This many ranks and workers of one machine have an epoch of their own.
_RANKS, _WORKERS = 16, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleLimits:
    """How examples are measured, and which are held; the arguments are those of `BucketedStream`."""

    length_of: LengthOf
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
        """Read examples until this many are held, and return their lengths."""
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

    Workers share the memory in which a Hugging Face data set keeps its epoch, and its set_epoch
    adds to that: two workers at once would add twice. So a source with tensors is copied, with its
    tensors.
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


class BucketedStream(OnRanks, IterableDataset[Any]):
    """Batches of similar length made of a stream: an iterable data set, or a stage of a WebDataset pipeline.

    A buffer holds examples, and batches are made from it: from one bucket each (`bucket`), or from neighbours around a
    random example (`pivot`, as in SpeechBrain's `dynamic_bucketed_batch`). A batch whose longest example is u never
    holds more than the batch size of u's bucket. Each example is in one batch. A bucket may leave before it is full:
    because the buffer is full, the stream has ended, or 16 buffers were read meanwhile. Then examples of the next
    shorter buckets fill it.

    Examples::

        # In a DataLoader, which makes no batches itself; with collate_fn, a batch is what that returns, else a list:
        stream = BucketedStream(examples, length_of=len, bucket_boundaries=[100, 300], bucket_batch_sizes=[30, 10])
        loader = DataLoader(stream, batch_size=None, num_workers=4)

        # As a stage of a WebDataset pipeline, with the settings that were tuned:
        stage = BucketedStream.from_config("stream.yaml", length_of=lambda example: example["wav"].shape[-1] / 16000)
        shards = wds.WebDataset(urls, shardshuffle=100, detshuffle=True, nodesplitter=wds.split_by_node)
        loader = DataLoader(shards.decode().compose(stage), batch_size=None, num_workers=4, persistent_workers=True)

    **Workers and ranks.** Each worker of each rank makes batches of its own part of the source, with its own seed. The
    source must split itself, as WebDataset and Hugging Face do. A source that does not, such as a list or a file, gives
    every example to every worker, unless `split=True`: then each worker takes every n-th.

    **Epochs.** Each pass is the next epoch, or the one that `set_epoch` says, also in persistent workers. A source with
    a `set_epoch` is given the epoch too; a source may also be a function of the epoch.

    **Equally many batches.** The parts of a stream differ, and if one rank runs out first, the others wait for ever.
    With `batches_per_epoch` each rank has that many batches, dealt to its workers. If a source ends early, the buffer
    is emptied and the source read again. Examples that are still in the source or the buffer when the epoch ends are
    not used in it: shuffle or resample the shards each epoch, so that they are not always the same, and let an epoch of
    an endless source read many buffers. A stage can't read its examples again: use the pipeline's `with_epoch`, or make
    the pipeline the source.

    **Resuming.** `state_dict` and `load_state_dict` resume mid-epoch, batch for batch: the source is read again, and
    the batches that were handed out before are made again and skipped. So the source must give the same examples in the
    same order in the same epoch; if their lengths differ, that is an error. (With WebDataset, make the pipeline in a
    function of the epoch, with seeds for its shuffles.) In a plain loop, save the state of the stream. With workers,
    save that of a `torchdata.stateful_dataloader.StatefulDataLoader`: a plain DataLoader does not report how many of
    its workers' batches it has delivered.

    Args:
        source: An iterable of examples, or a function of the epoch that returns one. None: the stream is a stage, to be
            called with the examples.
        length_of: A function that takes an example and returns its length, in the unit of the boundaries: positive,
            finite.
        bucket_boundaries: Inclusive upper edges, ascending; the last is at least the longest length.
        bucket_batch_sizes: The most examples of a batch, for the first boundary that reaches its longest length.
        algorithm: `bucket` or `pivot`.
        buffer_size: The most examples that are held, in each worker.
        buffer_bytes: The most memory of the held examples, by `bytes_of`: when one example exceeds it, a batch leaves.
            None: any.
        bytes_of: A function that takes an example and returns its size in memory.
        max_padding_ratio: For `pivot`: the largest fraction of a batch that may be padding; None:
            any.
        shuffle: Whether chance decides which examples of the buffer go together. If not, the examples of a bucket leave
            in the order of the stream; pivots are chosen in that order, too.
        drop_last: Whether to leave out the examples at the end of the stream that fill no batch.
        seed, epoch: At least 0; the epoch is the first.
        rank, world_size: This process, from 0 on, and the number of processes; by default those of `torch.distributed`.
        batches_per_epoch: Of this rank; None: as many as the source gives.
        collate_fn: A function that takes a list of examples and returns the batch; None: the list itself.
        overlong: Whether examples beyond the last boundary are an `error`, batches of a `single` example, or to `drop`:
            `dropped_examples` counts them, and a warning at the end of the pass says how many they were.
        min_length: Shorter examples are dropped, too, those of length 0 among them; None: a length of 0 is an error.
        split: Whether each worker of each rank takes every n-th example, because the source does not split itself.

    Raises:
        ValueError: An argument breaks its rule; the message says which and what to do. While the stream is read: a
            length breaks its rule, or the source gives nothing or can't be read again.
    """

    def __init__(
        self,
        source: StreamSource | None = None,
        *,
        length_of: LengthOf,
        bucket_boundaries: npt.ArrayLike,
        bucket_batch_sizes: npt.ArrayLike,
        algorithm: StreamAlgorithm = "bucket",
        buffer_size: int = 1024,
        buffer_bytes: int | None = None,
        bytes_of: Callable[[Any], int] | None = None,
        max_padding_ratio: float | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        epoch: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        batches_per_epoch: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        overlong: Literal["error", "single", "drop"] = "error",
        min_length: float | None = None,
        split: bool = False,
    ) -> None:
        readable = isinstance(source, Iterable) or callable(source)
        if source is not None and not readable:
            raise ValueError(
                f"source must be an iterable of examples or a function of the epoch, got {shortened(source)}"
            )
        if algorithm not in STREAM_ALGORITHMS:
            raise ValueError(
                f"algorithm must be one of {', '.join(STREAM_ALGORITHMS)}, got {shortened(algorithm)}"
            )
        if max_padding_ratio is not None:
            in_range = is_number(max_padding_ratio) and 0 <= max_padding_ratio <= 1
            if algorithm != "pivot" or not in_range:
                raise ValueError(
                    f'max_padding_ratio is for algorithm="pivot", from 0 to 1, got {shortened(max_padding_ratio)}'
                )
            max_padding_ratio = float(max_padding_ratio)
        if collate_fn is not None:
            check_function("collate_fn", collate_fn)
        buffer_size = whole("buffer_size", buffer_size, 1)
        if buffer_bytes is not None:
            buffer_bytes = whole("buffer_bytes", buffer_bytes, 1)
        if batches_per_epoch is not None:
            batches_per_epoch = whole("batches_per_epoch", batches_per_epoch, 1)
        table = BucketTable.of(bucket_boundaries, bucket_batch_sizes)
        self._limits = ExampleLimits(
            length_of=length_of,
            last_boundary=float(table.boundaries[-1]),
            overlong=overlong,
            min_length=min_length,
            buffer_bytes=buffer_bytes,
            bytes_of=bytes_of,
        )
        held_table = table
        if overlong == "single":
            held_table = table.extended_to(sys.float_info.max)
        self._batching = StreamBatching(
            algorithm=algorithm,
            table=held_table,
            buffer_size=buffer_size,
            max_padding_ratio=max_padding_ratio,
            shuffle=flag("shuffle", shuffle),
            drop_last=flag("drop_last", drop_last),
        )
        self.source = source
        self.split = flag("split", split)
        self._collate = collate_fn
        self.seed = whole("seed", seed, highest=LARGEST_SEED)
        self.dropped_examples = 0
        self.batches_per_epoch = batches_per_epoch
        self._ranks = checked_ranks(rank, world_size)
        options = [
            *(algorithm, buffer_size, buffer_bytes, max_padding_ratio),
            *(self._batching.shuffle, self._batching.drop_last, overlong),
            *(table.boundaries.tolist(), table.batch_sizes.tolist(), self.seed),
            *(batches_per_epoch, self.split, float(min_length or 0.0)),
        ]
        digest = hashlib.blake2b(json.dumps(options).encode(), digest_size=8)
        self._digest = digest.hexdigest()
        self._epochs = NextEpochs(whole("epoch", epoch))
        self._resumed: Position | None = None
        self._position: Position | None = None

    @classmethod
    def from_config(
        cls,
        path: str | Path,
        source: StreamSource | None = None,
        *,
        length_of: LengthOf,
        **options: Any,
    ) -> Self:
        """Make the stream that a `stream.yaml` describes.

        Lengths are in the unit of the file; if the data were tuned with --truncate, longer ones count as truncated.
        Examples that it was not tuned with are dropped, and a warning at the end of a pass counts them: those of length
        0, those shorter than --min-length, and those beyond the last boundary. `min_length=None, overlong="error"`
        raises errors instead.

        Arguments of the class take precedence over the file. Without a source, its `batches_per_epoch` is not used: a
        stage can't read its examples again, so a nominal epoch is the pipeline's `with_epoch`. In a process that uses
        CUDA, the first batch warns of another allocator than was measured.

        Raises ResultError if the file is missing or damaged, ValueError if an option breaks its rule.
        """
        config = read_stream_yaml(Path(path))
        configured = stream_options(config, length_of)
        if source is None:
            configured.pop("batches_per_epoch", None)
        stream = cls(source, **{**configured, **options})
        stream._allocator = config.evidence.allocator
        return stream

    @property
    def epoch(self) -> int:
        """The running epoch, or else the next."""
        position = self._cursor
        return position.epoch + position.finished

    def __len__(self) -> int:
        """Return batches_per_epoch; raise TypeError without it, as nobody knows how many batches a stream gives."""
        if self.batches_per_epoch is None:
            raise TypeError("a BucketedStream has a length only with batches_per_epoch")
        return self.batches_per_epoch

    def __iter__(self) -> Iterator[Any]:
        if self.source is None:
            raise TypeError(
                "this BucketedStream has no source: give it one, or call it with examples, as .compose(stream) does"
            )
        return self(self.source)

    def __call__(self, examples: StreamSource) -> Iterator[Any]:
        """Return the batches of one pass over the examples, as a stage of a pipeline does."""
        # In a worker whose part of the epoch is over.
        if self._resumed is not None and self._resumed.finished:
            self._resumed = None
            return iter(())
        self._position = self._resumed or Position(self._epochs.of(self.rank))
        return self._batches(examples)

    def _batches(self, source: StreamSource) -> Iterator[Any]:
        # All of this runs with the first batch: loaders make iterators that they never use.
        self._refuse_second_dealing()
        self._compare_allocator()
        resumed = self._resumed
        self._resumed = None
        epoch = self._epochs.of(self.rank) if resumed is None else resumed.epoch
        self._epochs.set(self.rank, epoch + 1)
        place = WorkerPlace.of_this_worker(*self._process)
        if resumed is not None and resumed.place != place:
            raise ValueError(
                "the state was loaded into the stream in the process itself, but workers of a DataLoader read it: load "
                "the state of torchdata's StatefulDataLoader into that loader"
            )
        held = Held(self._limits)
        position = self._position = Position(epoch, held=held)
        batches = self._passes(source, epoch, held, place)
        share = place.share(self.batches_per_epoch)
        for number, places in enumerate(islice(batches, share), 1):
            batch = held.taken(places)
            if resumed is None or number > resumed.batches:
                # Loops over a known number of batches never ask for one more.
                position.batches = number
                position.finished = number == share
                yield batch if self._collate is None else self._collate(batch)
            elif number == resumed.batches:
                resumed.check(held.read_digest)
                position.batches = number
        if resumed is not None and resumed.batches > position.batches:
            resumed.check("")
        position.end()
        self.dropped_examples += held.dropped
        if held.dropped:
            warnings.warn(
                f"{held.dropped:,} of {held.seen:,} examples were dropped, because they are of length 0, shorter than "
                f"min_length, or beyond the last of bucket_boundaries, {self._limits.last_boundary} "
                f"(rank {place.rank}, worker {place.worker}, epoch {epoch})",
                stacklevel=2,
            )

    def _passes(
        self, source: StreamSource, epoch: int, held: Held, place: WorkerPlace
    ) -> Iterator[list[int]]:
        """Yield the batches of one pass over a worker's part of the source; for a nominal epoch, of pass after pass.

        Each pass empties the buffer. If it went on into the next one it would be full when a nominal epoch ends: of
        examples that leave late because of their lengths, and so never in any epoch. Raises ValueError if the source
        gives nothing or can't be read again.
        """
        readers = place.readers
        if readers > 1 and not self.split and isinstance(source, Sequence):
            warnings.warn(
                f"each of {readers} workers of all ranks reads all of the source: let each take its part, with "
                "split=True",
                stacklevel=3,
            )
        source = at_epoch(source, epoch)
        random = stream_random(self.seed, epoch, place.rank, place.worker)
        while True:
            reading = iter(source if isinstance(source, Iterable) else source(epoch))
            seen = held.seen
            made = held.batches
            examples = reading
            if self.split:
                examples = islice(reading, place.reader, None, readers)
            held.begin(examples)
            yield from batched(held, self._batching, random)
            # A stage may be called with an empty source.
            may_be_empty = self.split or self.source is None
            if held.seen == seen and reading is source and not may_be_empty:
                raise ValueError(
                    "the source is an iterator and has nothing left: give an iterable for further passes"
                )
            if self.batches_per_epoch is None:
                return
            if held.batches == made or reading is source:
                raise ValueError(
                    f"the source gives too few batches ({place}) and can't be read again for more, but "
                    f"batches_per_epoch is {self.batches_per_epoch}: use fewer workers or more shards, or a "
                    "source that is not an iterator"
                )

    def set_epoch(self, epoch: int) -> None:
        """Make this epoch the next, in workers too; if `load_state_dict` resumes this epoch, continue there.

        Without this call, the next epoch follows each pass that has given a batch.
        """
        wanted = whole("epoch", epoch)
        if self._resumed is None or self._resumed.epoch != wanted:
            self._resumed = self._position = None
        self._epochs.set_all(wanted)

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which `load_state_dict` continues after the batches handed out; for this worker alone.

        Warns if workers of a plain DataLoader have read the stream, as they do not report where they are.
        """
        position = self._cursor
        by_workers = position.batches == 0 and self._epochs.differ(self.rank)
        if by_workers and get_worker_info() is None:
            warnings.warn(
                "the DataLoader's workers do not say which batches it has delivered, so this is the state at the "
                "start of the next epoch: save the state of torchdata's StatefulDataLoader instead",
                stacklevel=2,
            )
        return {**position.state(), **self._identity}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next pass continue where the state was taken.

        Raises ValueError if the state is of another stream: other options, seed, rank, worker or number of them.
        """
        check_state(
            "stream", state_dict, Position(0).state(), self._identity, "all options"
        )
        position = Position.of_state(
            state_dict, WorkerPlace.of_this_worker(*self._process)
        )
        self._epochs.set(self.rank, position.epoch + position.finished)
        self._position = position
        # Only a loader with workers goes on where some have ended and others have not.
        is_over = position.finished and get_worker_info() is None
        self._resumed = None if is_over else position

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the running pass, and keep the rank: a spawned worker knows of no process group."""
        ranks = self._ranks if self.world_size == 1 else self._process
        return {**self.__dict__, "_ranks": ranks, "_position": None}

    @property
    def _identity(self) -> dict[str, Any]:
        return {
            "options": self._digest,
            **WorkerPlace.of_this_worker(*self._process)._asdict(),
        }

    @property
    def _cursor(self) -> Position:
        position = self._position or self._resumed
        following = self._epochs.of(self.rank)
        if position is None:
            return Position(following)
        # In the process itself, workers may have read on since its own pass.
        passed = position.finished or following > position.epoch + 1
        if passed and get_worker_info() is None:
            return Position(following)
        return position
