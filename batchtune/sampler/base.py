"""Batch samplers: their base class, with epochs, ranks and resuming mid-epoch; and those of buckets and pools."""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler  # noqa: TID253  # as in __init__.py

from batchtune.configs import read_any_sampler_yaml
from batchtune.epochs import (
    ORDERINGS,
    RankSplit,
    ShuffleKey,
    drawn,
    dropped_examples,
)
from batchtune.epochs.batchers import Batcher, Batching
from batchtune.epochs.table import BucketTable, checked_lengths, holding_all
from batchtune.errors import shortened
from batchtune.lengths import AnyArray, Lengths, whole
from batchtune.records import Ordering, PackedConfig, ReadingRecord, SamplerConfig
from batchtune.sampler import (
    LARGEST_SEED,
    LengthOf,
    OnRanks,
    as_number,
    check_state,
    checked_ranks,
    cost,
    flag,
)

if TYPE_CHECKING:
    from typing_extensions import Self

_OF_ALL = (
    "bucket_boundaries",
    "bucket_batch_sizes",
    "shuffle",
    "batch_ordering",
    "drop_last",
    "seed",
)
_READING = set(ReadingRecord.__struct_fields__)


class EpochBatchSampler(OnRanks, Sampler[list[int]]):
    """A batch sampler that deals each epoch's batches to ranks, and resumes mid-epoch.

    Subclasses make its batcher, and give the options that decide on the batches, next to the lengths, for the digest of
    its state.
    """

    # What the digest is of, and what makes smaller batches, for messages.
    COVERED = "lengths and options"
    SIZES = "max_tokens"
    # The `sampler` of the sampler.yaml files that it runs; None: any.
    KIND: ClassVar[str | None] = None
    # The fields of these files that are its arguments.
    OPTIONS: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        values: AnyArray,
        batcher: Batcher,
        options: list[Any],
        *,
        shuffle: bool,
        drop_last: bool,
        seed: int,
        epoch: int,
        rank: int | None,
        world_size: int | None,
        batch_ordering: Ordering = "random",
        same_bucket: bool = False,
        accumulate: int = 1,
    ) -> None:
        self.seed = whole("seed", seed, highest=LARGEST_SEED)
        self.batch_ordering = batch_ordering
        self.shuffle = flag("shuffle", shuffle)
        self.drop_last = flag("drop_last", drop_last)
        self.same_bucket = flag("same_bucket", same_bucket)
        self.accumulate = accumulate
        self._ranks = checked_ranks(rank, world_size)
        self._batcher = batcher
        # A copy, as the caller may change theirs between two epochs.
        self._lengths = None if batch_ordering == "random" else np.array(values)
        identity = [*options, self.shuffle, self.batch_ordering, self.drop_last]
        digest = hashlib.blake2b(json.dumps(identity).encode(), digest_size=16)
        digest.update(np.ascontiguousarray(values, dtype="<f8").data)
        self._digest = digest.hexdigest()
        # The epoch and batch that the next pass begins with, and the last pass that gave a batch.
        self._next = (whole("epoch", epoch), 0)
        self._pass: _Pass | None = None

    @classmethod
    def from_config(
        cls,
        path: str | Path,
        lengths: Any,
        *,
        length_of: LengthOf | None = None,
        targets: npt.ArrayLike | None = None,
        **overrides: Any,
    ) -> Self:
        """Make the sampler that a `sampler.yaml` describes.

        `batchtune.sampler_from_config` takes files for buckets, for pools and for packing, so that a loader can stay as
        it is when another sweep recommends the other kind. The classes refuse each other's files.

        Example::

            sampler = sampler_from_config("batchtune-run/sampler.yaml", dataset, length_of=lambda example: len(example))

        Args:
            path: Path of the file.
            lengths: The length of each example, in the unit of the file: an array; or the path of a manifest, whose
                row i is example i; or a data set, with `length_of`. If the data were tuned with --truncate, longer
                ones count as truncated.
            length_of: A function that takes an example of that data set and returns its length.
            targets: Shape (examples,): the target lengths, if the data were tuned with some. They only serve to
                recognise the data.
            **overrides: Arguments of the class, which take precedence over the file; for a manifest also the fields of
                `batchtune.manifests.ReadOptions`, such as `length_key="duration"` or `length_scale="1/16000"`.

        Warns:
            UserWarning: The file was tuned on other lengths; or, at the first batch, this process takes CUDA memory
                with another allocator than was measured.

        Raises:
            ResultError: The file is missing or damaged.
            ManifestError, UsageError: The manifest can't be read as asked.
            ValueError: The lengths do not match the file, an option breaks its rule, or the file describes a sampler
                of another class.
        """
        config = read_any_sampler_yaml(Path(path))
        if cls.KIND is not None and config.sampler != cls.KIND:
            raise ValueError(
                f"{path} describes a sampler of the kind {config.sampler!r}, but {cls.__name__} is of the kind "
                f"{cls.KIND!r}: use batchtune.sampler_from_config, which makes the one that the file describes"
            )
        if config.keeps_examples:
            raise ValueError(
                f"{path} keeps the examples of each optimizer step, so it needs your own batch sampler: "
                "batchtune.SameStepBatchSampler.from_config(path, batch_sampler, lengths)"
            )
        # The class itself comes last, lest a subclass of the same kind takes its place.
        classes: dict[str | None, type[Any]] = {
            made.KIND: made for made in (*_subclasses(cls), cls)
        }
        lengths, targets = tuned_lengths(
            Path(path), config, lengths, length_of, targets, overrides
        )
        options = {
            name: getattr(config, name) for name in classes[config.sampler].OPTIONS
        }
        sampler: Self = classes[config.sampler](lengths, **{**options, **overrides})
        sampler._allocator = config.evidence.allocator
        warn_of_other_lengths(Path(path), config, lengths, targets)
        return sampler

    @property
    def epoch(self) -> int:
        """The epoch that is running, else the next."""
        return self._cursor[0]

    @property
    def repeated_examples(self) -> int:
        """How many examples this epoch repeats, over all ranks; 0 unless there are too few to deal evenly."""
        return self._batcher.cut(*self._plan(self.epoch)).layout.repeated_examples

    @property
    def dropped_examples(self) -> int:
        """How many examples this epoch leaves out, over all ranks; 0 without `drop_last`."""
        drawing, dealing = self._plan(self.epoch)
        cut = self._batcher.cut(drawing, dealing)
        return dropped_examples(cut.layout, drawn(cut, drawing, self._lengths))

    @property
    def sampler(self) -> SimpleNamespace:
        """Where Lightning, accelerate and (as `batch_sampler`) transformers' Trainer look for `set_epoch`."""
        return SimpleNamespace(set_epoch=self.set_epoch)

    batch_sampler = sampler

    def __len__(self) -> int:
        """Return the number of batches that this rank has, the same in every epoch and on every rank."""
        return self._batcher.batches_per_rank(*self._plan(self.epoch))

    def __iter__(self) -> Iterator[list[int]]:
        self._pass = None
        return self._batches(_loader_of(sys._getframe(1)))

    def _batches(self, loader: Mapping[str, Any] | None) -> Iterator[list[int]]:
        # All of this runs with the first batch: a DataLoader with workers makes an iterator that it never uses.
        self._refuse_second_dealing()
        self._compare_allocator()
        epoch, first = self._next
        self._next = (epoch + 1, 0)
        now = self._pass = _Pass(epoch, first, first, loader)
        drawing, dealing = self._plan(epoch)
        cut = self._batcher.cut(drawing, dealing)
        batches = drawn(cut, drawing, self._lengths)[self.rank :: self.world_size]
        if not batches.size:
            warnings.warn(
                f"drop_last leaves out all {cut.layout.count:,} examples, as they don't fill a batch on each of "
                f"{self.world_size} ranks: set drop_last=False, or lower {self.SIZES}.",
                stacklevel=2,
            )
        for now.handed_out, batch in enumerate(cut.lists(batches[first:]), first + 1):
            self._pass = now
            yield batch
        now.running = False

    def _plan(self, epoch: int) -> tuple[ShuffleKey, RankSplit]:
        drawing = ShuffleKey(
            shuffle=self.shuffle,
            ordering=self.batch_ordering,
            seed=self.seed,
            epoch=epoch,
        )
        return drawing, RankSplit(
            world_size=self.world_size,
            same_bucket=self.same_bucket,
            drop_last=self.drop_last,
            accumulate=self.accumulate,
        )

    def set_epoch(self, epoch: int) -> None:
        """Make this epoch the next; if `load_state_dict` resumes this epoch, continue there.

        Without this call, the next epoch follows each iteration that has given a batch.
        """
        wanted = whole("epoch", epoch)
        if wanted != self._next[0] or (self._pass is not None and self._pass.running):
            self._next = (wanted, 0)
        self._pass = None

    def state_dict(self, *, batches: int | None = None) -> dict[str, Any]:
        """Return the state from which `load_state_dict` continues after the delivered batches; the same on every rank.

        `batches` is how many batches of the last pass were trained on: give it if something between the sampler and the
        training fetches ahead; None: all that a plain DataLoader has delivered. Raises ValueError if fewer were handed
        out.
        """
        epoch, position = self._cursor
        if batches is not None:
            epoch, position = self._after(whole("batches", batches))
        return {"epoch": epoch, "position": position, **self._identity}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next iteration continue where the state was taken.

        Raises ValueError if the state is of another sampler: other lengths, options, seed or number of ranks.
        """
        check_state(
            "sampler",
            state_dict,
            ("epoch", "position"),
            self._identity,
            self.COVERED,
        )
        epoch = whole("epoch", state_dict["epoch"])
        position = whole("position", state_dict["position"])
        batches = self._batcher.batches_per_rank(*self._plan(epoch))
        if position > batches:
            raise ValueError(
                f"the state is at batch {position}, but its epoch has {batches}"
            )
        self._next = (epoch, position)
        self._pass = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the view of a running loader, which can't be copied to another process."""
        return {
            **self.__dict__,
            "_pass": None if self._pass is None else replace(self._pass, loader=None),
        }

    @property
    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "world_size": self.world_size,
            "digest": self._digest,
        }

    @property
    def _cursor(self) -> tuple[int, int]:
        now = self._pass
        if now is not None and now.delivered is not None:
            return self._after(now.delivered)
        if now is not None and now.running:
            return now.epoch, now.handed_out
        return self._next

    def _after(self, batches: int) -> tuple[int, int]:
        """Return epoch and position after this many batches of the last pass; raise ValueError if it gave fewer."""
        now = self._pass
        handed_out = 0 if now is None else now.handed_out - now.first
        if batches > handed_out:
            raise ValueError(
                f"batches is {batches}, but the sampler has handed out {handed_out} in this pass"
            )
        # Lightning sets the epoch again after its loader has begun it: until the next pass, what follows is not set.
        if now is None or (
            not now.running and batches == handed_out and self._next[0] != now.epoch
        ):
            return self._next
        return now.epoch, now.first + batches


class TableBatchSampler(EpochBatchSampler):
    """A batch sampler for buckets or pools."""

    COVERED = "lengths, boundaries, batch sizes and options"
    SIZES = "bucket_batch_sizes"
    OPTIONS: ClassVar[tuple[str, ...]] = _OF_ALL
    pool_size: int | None = None  # as for `PooledBatchSampler`; None in buckets
    batch_overhead: float | None = None

    def __init__(
        self,
        lengths: npt.ArrayLike,
        *,
        bucket_boundaries: npt.ArrayLike,
        bucket_batch_sizes: npt.ArrayLike,
        shuffle: bool = True,
        batch_ordering: Ordering = "random",
        drop_last: bool = False,
        seed: int = 0,
        epoch: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        same_bucket: bool = False,
        overlong: Literal["error", "single"] = "error",
    ) -> None:
        table = BucketTable.of(bucket_boundaries, bucket_batch_sizes)
        if batch_ordering not in ORDERINGS:
            raise ValueError(
                f"batch_ordering must be one of {', '.join(ORDERINGS)}, got {shortened(batch_ordering)}"
            )
        if overlong not in ("error", "single"):
            raise ValueError(
                f"overlong must be error or single, got {shortened(overlong)}"
            )
        same_bucket = flag("same_bucket", same_bucket)
        values = checked_lengths(lengths)
        table = holding_all(values, table, overlong)
        batching = Batching(table, self.pool_size, self.batch_overhead)
        super().__init__(
            values,
            batching.batcher(values),
            [
                table.boundaries.tolist(),
                table.batch_sizes.tolist(),
                same_bucket,
                self.pool_size,
                self.batch_overhead,
            ],
            shuffle=shuffle,
            drop_last=drop_last,
            seed=seed,
            epoch=epoch,
            rank=rank,
            world_size=world_size,
            batch_ordering=batch_ordering,
            same_bucket=same_bucket,
        )


class BucketBatchSampler(TableBatchSampler):
    """Batches of examples of similar length, for `torch.utils.data.DataLoader(batch_sampler=...)`.

    An example belongs to the first bucket whose boundary is not below its length, and a batch holds examples of one
    bucket, at most that bucket's batch size. Each epoch is reshuffled, from seed and epoch alone, so all ranks and all
    runs agree on the batches. All epochs have the same number of batches, `len()`.

    Example::

        sampler = BucketBatchSampler.from_config("batchtune-run/sampler.yaml", "train.csv")  # row i is dataset[i]
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=pad, num_workers=4)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)  # may be left out: each pass over the loader is the next epoch
            for batch in loader:
                ...

    **Ranks.** Every rank has the same number of batches, and every example is in exactly one batch of one rank: if the
    batches can't be dealt evenly, the largest are split in two until they can. (Only if even batches of one can't be
    dealt evenly, as with fewer examples than ranks, some examples repeat: see `repeated_examples`.) Nothing else may
    deal the batches again: give Lightning's Trainer `use_distributed_sampler=False`; on several processes leave the
    loader out of accelerate's `prepare`, or give `rank=0, world_size=1` here; with transformers' Trainer, return the
    loader from `get_train_dataloader` as it is. If something does, the first batch raises RuntimeError.

    **Resuming.** `state_dict` and `load_state_dict` resume mid-epoch, batch for batch, with any
    number of workers: the state of a sampler in a plain DataLoader counts the batches that the
    loader has delivered, not those that its workers have fetched ahead. With
    `torchdata.stateful_dataloader.StatefulDataLoader`, save the loader's own state. A loader that
    accelerate prepared, on one process, fetches one batch ahead: prepare a StatefulDataLoader
    there, or give the number of batches trained on, `state_dict(batches=...)`. The prepared loader
    also counts epochs, from 0: after `load_state` call its `set_epoch`.

    Args:
        lengths: Shape (examples,), positive and finite: the length of each example, in the unit of the boundaries. If
            they have fewer bits than float64, the boundaries are rounded alike before comparing.
        bucket_boundaries: Inclusive upper edges, ascending; the last is at least the longest length.
        bucket_batch_sizes: One for each boundary, at least 1.
        shuffle: Whether to shuffle examples and batches. If not, examples keep their order within their buckets, and
            batches come as a streaming sampler fills them: full ones when their last example is read, then the rest
            bucket by bucket.
        batch_ordering: `ascending` or `descending` sorts an epoch's batches by their longest length.
        drop_last: Whether to leave out batches that are not full, and the last ones if they are too
            few for all ranks; see `dropped_examples`. If that leaves an epoch without a batch, a
            warning says so.
        seed, epoch: At least 0; the epoch is the first.
        rank, world_size: This process, from 0 on, and the number of processes; by default those of `torch.distributed`
            when the sampler is first used.
        same_bucket: Whether all ranks take batches of one bucket at each step, so that none waits for another. After
            full batches for all ranks, the rest of a bucket is dealt evenly in smaller batches; if it has fewer
            examples than there are ranks, others of the bucket repeat.
        overlong: Whether examples beyond the last boundary are an `error` or batches of a `single` example.

    Raises:
        ValueError: An argument breaks its rule; the message says which entry and what to do.
    """

    KIND = "bucket"


class PooledBatchSampler(TableBatchSampler):
    """Batches of neighbours in pools that are sorted by length, for `DataLoader(batch_sampler=...)`.

    Each epoch shuffles the examples, takes them `pool_size` at a time, sorts each pool by length and cuts it, from the
    longest example on, into batches of as many as fit; then it shuffles the batches. Pools pad less than buckets, and
    leave one batch that is not full per pool, instead of one per bucket. In return, examples of similar length in one
    pool are likely to be batch mates: larger pools waste less, smaller ones are more random.

    **Number of batches.** One epoch may need a few more batches than another, but Lightning, transformers' Trainer and
    learning rate schedules ask for `len()` once. So every epoch gets the maximum of the first three: if an epoch has
    fewer, its largest batches are split in two; if it has more, it is reshuffled. With `drop_last` every epoch gets the
    minimum of the three, and leaves out the batches beyond it.

    Everything else is as for `BucketBatchSampler`, including the arguments that are not listed here.

    Args:
        lengths: As for `BucketBatchSampler`.
        pool_size: The most examples of a pool, at least 1. All pools of an epoch are of one size, to within one
            example; a data set that is no larger is one pool.
        batch_overhead: The cost of a batch besides its padded length, in the unit of the lengths: pools are then cut to
            minimise the sum of both, which saves time if a pool makes few batches. None: each batch holds as many
            examples as fit, as it does with `drop_last` and in pools of more than 4,096 examples.
        bucket_boundaries: Lengths up to which a batch size fits, ascending; the last is at least the longest length.
        bucket_batch_sizes: The most examples of a batch, for the first boundary that reaches its longest length.
        shuffle: Whether to shuffle examples and batches. If not, pools are taken in the order of the data set, and
            batches come pool by pool, the longest first.
        drop_last: As for `BucketBatchSampler`, for the last batch of each pool.
        same_bucket: Whether all ranks take neighbouring batches of one pool at each step, so that they have nearly the
            same length and size, and none waits long for another.
    """

    KIND = "pooled"
    OPTIONS = (
        *TableBatchSampler.OPTIONS,
        "pool_size",
        "batch_overhead",
    )

    def __init__(
        self,
        lengths: npt.ArrayLike,
        *,
        pool_size: int,
        batch_overhead: float | None = None,
        **options: Any,
    ) -> None:
        self.pool_size = whole("pool_size", pool_size, 1)
        if batch_overhead is not None:
            self.batch_overhead = cost("batch_overhead", batch_overhead)
        super().__init__(lengths, **options)


def tuned_lengths(
    path: Path,
    config: SamplerConfig | PackedConfig,
    lengths: Any,
    length_of: LengthOf | None,
    targets: npt.ArrayLike | None,
    overrides: dict[str, Any],
) -> tuple[Any, npt.ArrayLike | None]:
    """Return the lengths that a sampler of this config is given, as `EpochBatchSampler.from_config` describes.

    Also return the targets. Removes the options for reading a manifest from `overrides`.
    """
    reading = {
        name: overrides.pop(name) for name in sorted(_READING & overrides.keys())
    }
    if isinstance(lengths, (str, Path)):
        from batchtune.manifests import ReadOptions
        from batchtune.manifests.reading import load_ordered_lengths

        for name in ("length_scale", "tokenizer"):
            if reading.get(name) is not None:
                reading[name] = str(reading[name])
        manifest = load_ordered_lengths(lengths, ReadOptions(**reading))
        unit = manifest.lengths.unit
        if None not in (unit, config.unit) and unit != config.unit:
            raise ValueError(
                f"{lengths} has lengths in {unit}, {path} in {config.unit}: give the length_scale (and the unit) that "
                "it was tuned with"
            )
        lengths = manifest.values
        targets = manifest.targets
    elif reading:
        raise TypeError(f"{', '.join(reading)}: these are for the path of a manifest")
    elif length_of is not None:
        measured = (
            as_number(length_of(lengths[index]), index) for index in range(len(lengths))
        )
        lengths = np.fromiter(measured, np.float64)
    if config.evidence.truncate is not None:
        lengths = np.minimum(checked_lengths(lengths), config.evidence.truncate)
    return lengths, targets


def warn_of_other_lengths(
    path: Path,
    config: SamplerConfig | PackedConfig,
    lengths: Any,
    targets: npt.ArrayLike | None,
) -> None:
    """Warn the caller's caller if the config was tuned on other lengths."""
    if Lengths.of(lengths, targets).fingerprint != config.evidence.fingerprint:
        warnings.warn(
            f"{path} was tuned on other lengths than these (or with target lengths, which `targets` can give): "
            "it works, but batches may be smaller, or padding larger, than necessary. Run `batchtune tune` again.",
            stacklevel=3,
        )


def _subclasses(made: type[Any]) -> Iterator[type[Any]]:
    """Yield all classes that derive from it."""
    for child in made.__subclasses__():
        yield child
        yield from _subclasses(child)


@dataclass(slots=True)
class _Pass:
    """One iteration over the sampler: an epoch without its `first` batches, which an earlier pass delivered.

    `handed_out` counts those too. `loader` holds the attributes of the plain DataLoader's iterator that takes the
    batches; None for any other taker.
    """

    epoch: int
    first: int
    handed_out: int
    loader: Mapping[str, Any] | None
    running: bool = True

    @property
    def delivered(self) -> int | None:
        """How many batches of this pass the loader, whose workers fetch ahead, has delivered; None if unknown."""
        return None if self.loader is None else self.loader["_num_yielded"]


def _loader_of(frame: FrameType) -> Mapping[str, Any] | None:
    """Return the attributes of the plain DataLoader's iterator that runs in a frame; None if none does.

    Derived loaders, such as torchdata's, save the sampler's state with each batch themselves. The attributes outlive
    the iterator: `_num_yielded` counts what it had delivered when it was given up.
    """
    caller = frame.f_locals.get("self")
    return (
        vars(caller)
        if type(caller).__module__ == "torch.utils.data.dataloader"
        else None
    )
