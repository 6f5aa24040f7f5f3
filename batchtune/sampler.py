"""The drop-in torch batch sampler that runs a recommendation."""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch.distributed  # noqa: TID253  # this module is torch's: the package imports it only when its class is used
from torch.utils.data import Sampler  # noqa: TID253  # as above

from batchtune.batching import epochs, given
from batchtune.batching.delivery import Pass, loader_of
from batchtune.batching.epochs import ORDERINGS, Drawing, Grouped, Ordering
from batchtune.batching.given import Numbers
from batchtune.batching.layout import Dealing, Layout, batches_per_rank, lay_out
from batchtune.batching.table import BucketTable
from batchtune.exports.sampler import read_sampler_yaml
from batchtune.lengths import FloatArray, Lengths
from batchtune.manifests import ReadOptions, parse_scale
from batchtune.manifests.reading import load_ordered_lengths
from batchtune.results import SamplerConfig

_AT_ONCE = 1 << 18
_MOST_RANKS = 1_000_000
_OF_CONFIG = ("bucket_boundaries", "bucket_batch_sizes", "shuffle", "batch_ordering", "drop_last", "seed")
_READING = {option.name for option in fields(ReadOptions)}


class BucketBatchSampler(Sampler[list[int]]):
    """Batches of examples of similar length, for `torch.utils.data.DataLoader(batch_sampler=...)`.

    An example belongs to the first bucket whose boundary is not below its length, and a batch holds examples of one
    bucket, at most that bucket's batch size. Each epoch shuffles anew, from seed and epoch alone, so all ranks and all
    runs agree on the batches.

    Example::

        sampler = BucketBatchSampler.from_config("batchtune-run/sampler.yaml", "train.csv")  # row i is dataset[i]
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=pad, num_workers=4)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)  # may be left out: each pass over the loader is the next epoch
            for batch in loader:
                ...

    **Ranks.** `rank` and `world_size` come from `torch.distributed` when the sampler is first used, unless they are
    given. Every rank has the same number of batches, and every example is in exactly one batch of one rank: if the
    batches can't be dealt evenly, the largest are split in two until they can. (Only if even batches of one can't, as
    with fewer examples than ranks, some are repeated: see `repeated_examples`.) Nothing else may deal the batches once
    more: give Lightning's Trainer `use_distributed_sampler=False`; on several processes leave the loader out of
    accelerate's `prepare`, or give `rank=0, world_size=1` here; with transformers' Trainer, return the loader from
    `get_train_dataloader` as it is.

    **Resuming.** `state_dict` and `load_state_dict` resume in mid-epoch, batch for batch, with any number of workers:
    the state of a sampler in a plain DataLoader counts the batches that the loader has delivered, not those that its
    workers have fetched ahead. With `torchdata.stateful_dataloader.StatefulDataLoader`, save the loader's own state.
    A loader prepared by accelerate fetches one batch ahead: prepare a StatefulDataLoader, or give the number of batches
    trained on, `state_dict(batches=...)`. It also counts epochs, from 0: after `load_state` call its `set_epoch`.

    Args:
        lengths: Shape (examples,), positive and finite: the length of each example, in the unit of the boundaries.
            Lengths of fewer bits than float64 are compared with the boundaries rounded alike.
        bucket_boundaries: Inclusive upper edges, ascending; the last is at least the longest length.
        bucket_batch_sizes: One for each boundary, at least 1.
        shuffle: Whether to shuffle examples and batches. If not, examples keep their order within their buckets, and
            batches come as a streaming sampler fills them: full ones when their last example is read, then the rest
            bucket by bucket.
        batch_ordering: `ascending` or `descending` sorts an epoch's batches by their longest length.
        drop_last: Whether to leave out batches that are not full, and those at the end that are not enough for all
            ranks. An epoch may then hold none at all; see `dropped_examples`.
        seed: At least 0.
        epoch: The first, at least 0.
        rank: This process, from 0 on; with `world_size`.
        world_size: Number of processes.
        same_bucket: Whether at each step the batches of all ranks are of one bucket, so that none waits for another.
            The rest of a bucket after full batches for all ranks is dealt evenly in smaller ones; if it is fewer
            examples than ranks, others of the bucket are repeated.
        overlong: Whether examples beyond the last boundary are an `error` or batches of a `single` example.

    Raises:
        ValueError: An argument breaks its rule; the message says which entry and what to do.
    """

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
        _check_choices(batch_ordering, overlong, rank, world_size)
        self.seed, self.shuffle, self.drop_last = _whole("seed", seed), bool(shuffle), bool(drop_last)
        self.batch_ordering: Ordering = batch_ordering
        self.same_bucket = bool(same_bucket)
        self._ranks = (rank, world_size)
        values = given.checked_lengths(lengths)
        self._table, buckets = given.bucketed(values, BucketTable.of(bucket_boundaries, bucket_batch_sizes), overlong)
        self._grouped: Grouped = epochs.group(buckets, self._table.num_buckets)
        # A copy, as the caller may change theirs between two epochs.
        self._lengths = None if batch_ordering == "random" else np.array(values)
        self._digest = self._digest_of(values)
        self._layout: Layout | None = None
        self._next = (_whole("epoch", epoch), 0)
        self._running: tuple[int, int] | None = None
        self._pass: Pass | None = None

    @classmethod
    def from_config(
        cls,
        path: str | Path,
        lengths: Any,
        *,
        length_of: Callable[[Any], float] | None = None,
        targets: npt.ArrayLike | None = None,
        **overrides: Any,
    ) -> BucketBatchSampler:
        """Make the sampler that a `sampler.yaml` describes.

        Args:
            path: Of the `sampler.yaml`.
            lengths: The length of each example, in the unit of the file: an array; or the path of a manifest, whose
                row i is example i; or a data set, with `length_of`.
            length_of: An example of the data set → its length.
            targets: Shape (examples,): the target lengths, where the table was tuned with some. They only serve to
                tell whether these are the data that it was tuned on.
            **overrides: Arguments of the class that go before those of the file; for a manifest also what
                `batchtune.manifests.ReadOptions` holds, such as `length_key="duration"`, `length_scale="1/16000"`.

        Warns:
            UserWarning: The table was tuned on other lengths.

        Raises:
            ResultError: The file is missing or damaged.
            ManifestError, UsageError: The manifest can't be read as asked.
            ValueError: The lengths do not go with the file.
        """
        config = read_sampler_yaml(Path(path))
        reading = {name: overrides.pop(name) for name in sorted(_READING & overrides.keys())}
        if isinstance(lengths, (str, Path)):
            lengths, targets = _of_manifest(lengths, reading, config, str(path))
        elif reading:
            raise TypeError(f"{', '.join(reading)}: these are for the path of a manifest")
        elif length_of is not None:
            lengths = np.fromiter((length_of(lengths[index]) for index in range(len(lengths))), np.float64)
        options = {name: getattr(config, name) for name in _OF_CONFIG}
        evidence = config.evidence
        try:
            made = cls(lengths, **{**options, **overrides})
        except given.OverlongError as error:
            if evidence.max_length is None:
                raise
            raise given.OverlongError(
                error.problem,
                f"{path} was tuned with --max-length {evidence.max_length:.15g}: leave what is longer out of the data "
                'set and of the lengths, tune anew without it, or say overlong="single" for batches of one, whose '
                "memory nothing has measured",
            ) from None
        if Lengths.of(lengths, targets).fingerprint != evidence.fingerprint:
            known = "" if targets is not None else " (or together with target lengths, which `targets` can give)"
            limits = f", with {evidence.filters}" if evidence.filters else ""
            warnings.warn(
                f"the bucket table of {path} was tuned on other lengths than these{known}{limits}: "
                "it works, but batches may be smaller or padding larger than need be. Tune anew with `batchtune tune`.",
                stacklevel=2,
            )
        return made

    @property
    def rank(self) -> int:
        """This process, from 0."""
        return self._place()[0]

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self._place()[1]

    @property
    def epoch(self) -> int:
        """The epoch that is running, or the next where none is."""
        return self._cursor[0]

    @property
    def repeated_examples(self) -> int:
        """How many examples an epoch has twice, over all ranks; 0 unless too few are there to be dealt."""
        return self._laid_out().repeated_examples

    @property
    def dropped_examples(self) -> int:
        """How many examples this epoch leaves out, over all ranks; 0 without `drop_last`."""
        if not self.drop_last:
            return 0
        drawing = Drawing(shuffle=self.shuffle, seed=self.seed, epoch=self.epoch)
        layout = self._laid_out()
        return epochs.dropped_examples(layout, epochs.drawn(layout, self._grouped.order, drawing))

    @property
    def sampler(self) -> _SetsEpoch:
        """Where Lightning, accelerate and (as `batch_sampler`) transformers' Trainer look for `set_epoch`."""
        return _SetsEpoch(self)

    batch_sampler = sampler

    def __len__(self) -> int:
        """Number of batches that this rank has in an epoch."""
        return batches_per_rank(self._grouped.counts, self._table.batch_sizes, self._dealing())

    def __iter__(self) -> Iterator[list[int]]:
        self._running = self._pass = None
        return self._batches(loader_of(sys._getframe(1)))

    def _batches(self, loader: Mapping[str, Any] | None) -> Iterator[list[int]]:
        # All of this runs with the first batch: a DataLoader with workers makes an iterator that it never uses.
        epoch, first = self._next
        self._next, self._running = (epoch + 1, 0), (epoch, first)
        now = self._pass = Pass(epoch, first, loader, first)
        batches = epochs.assemble(
            self._grouped,
            self._laid_out(),
            Drawing(shuffle=self.shuffle, ordering=self.batch_ordering, seed=self.seed, epoch=epoch),
            rank=self.rank,
            lengths=self._lengths,
        )
        for done, batch in enumerate(batches.lists(first), first + 1):
            self._pass, self._running, now.handed_out = now, (epoch, done), done
            yield batch
        self._running = None

    def set_epoch(self, epoch: int) -> None:
        """Make this epoch the next; if it is the one that `load_state_dict` resumes, it goes on from there.

        Unless this is called, an iteration that has given its first batch is followed by the next epoch.
        """
        wanted = _whole("epoch", epoch)
        if wanted != self._next[0] or self._running is not None:
            self._next = (wanted, 0)
        self._running = self._pass = None

    def state_dict(self, *, batches: int | None = None) -> dict[str, Any]:
        """Return what `load_state_dict` needs to go on after the delivered batches; the same on every rank.

        Args:
            batches: How many batches of the last pass were trained on, if something between the sampler and the
                training fetches ahead; None for all that a plain DataLoader has delivered.

        Raises:
            ValueError: So many were not handed out.

        Warns:
            UserWarning: The DataLoader has workers, and this torch does not tell how many batches it has delivered.
        """
        epoch, position = self._cursor
        if batches is not None:
            epoch, position = self._after(_whole("batches", batches))
        elif self._pass is not None and self._pass.runs_ahead_unseen:
            warnings.warn(
                "the DataLoader's workers are ahead of the training, so this state would leave out batches: say how "
                "many were trained on with state_dict(batches=...), or use torchdata's StatefulDataLoader.",
                stacklevel=2,
            )
        return {
            "epoch": epoch,
            "position": position,
            "seed": self.seed,
            "world_size": self.world_size,
            "digest": self._digest,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next iteration go on where the state was taken.

        Raises:
            ValueError: The state is of another sampler: other lengths, another table, seed or number of ranks.
        """
        if not isinstance(state_dict, Mapping):
            raise ValueError(f"no state of a BucketBatchSampler: {type(state_dict).__name__} instead of a dict")
        if missing := {"epoch", "position", "seed", "world_size", "digest"} - state_dict.keys():
            raise ValueError(f"no state of a BucketBatchSampler: {', '.join(sorted(missing))} missing")
        for name, ours in (("seed", self.seed), ("world_size", self.world_size), ("digest", self._digest)):
            if state_dict[name] != ours:
                differs = f"has {name} {state_dict[name]}, this sampler {ours}"
                if name == "digest":
                    differs = "is of a sampler with other lengths, boundaries, batch sizes or options"
                raise ValueError(
                    f"the state {differs}: its batches are others. Make the sampler as it was, or begin the epoch anew "
                    "with set_epoch."
                )
        epoch, position = _whole("epoch", state_dict["epoch"]), _whole("position", state_dict["position"])
        if position > len(self):
            raise ValueError(f"the state is at batch {position}, but an epoch has {len(self)}")
        self._next, self._running, self._pass = (epoch, position), None, None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the view of a running loader, which can't be copied to another process."""
        return {**self.__dict__, "_pass": None}

    @property
    def _cursor(self) -> tuple[int, int]:
        if self._pass is not None and (delivered := self._pass.delivered) is not None:
            return self._after(delivered)
        return self._next if self._running is None else self._running

    def _after(self, batches: int) -> tuple[int, int]:
        """Return epoch and position after so many batches of the last pass; raise ValueError if it gave fewer."""
        now = self._pass
        handed_out = 0 if now is None else now.handed_out - now.first
        if batches > handed_out:
            raise ValueError(f"batches is {batches}, but the sampler has handed out {handed_out} in this pass")
        # Lightning says the epoch again when its loader has begun it: then what is next is not said yet.
        if now is None or (self._running is None and batches == handed_out and self._next[0] != now.epoch):
            return self._next
        return now.epoch, now.first + batches

    def _place(self) -> tuple[int, int]:
        rank, world_size = self._ranks
        if rank is not None and world_size is not None:
            return rank, world_size
        # Asked anew each time: a sampler may be made before the process group is.
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1

    def _dealing(self) -> Dealing:
        return Dealing(world_size=self.world_size, same_bucket=self.same_bucket, drop_last=self.drop_last)

    def _laid_out(self) -> Layout:
        dealing = self._dealing()
        if self._layout is None or self._layout.dealing != dealing:
            self._layout = lay_out(self._grouped.counts, self._table.batch_sizes, dealing)
        return self._layout

    def _digest_of(self, values: Numbers) -> str:
        table = [self._table.boundaries.tolist(), self._table.batch_sizes.tolist()]
        options = [self.shuffle, self.batch_ordering, self.drop_last, self.same_bucket]
        digest = hashlib.blake2b(json.dumps([table, options]).encode(), digest_size=16)
        for start in range(0, values.size, _AT_ONCE):
            digest.update(np.ascontiguousarray(values[start : start + _AT_ONCE], dtype="<f8").data)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _SetsEpoch:
    """Hands `set_epoch` on: frameworks look for it one sampler further in than where it is."""

    owner: BucketBatchSampler

    def set_epoch(self, epoch: int) -> None:
        """Make this epoch the sampler's next."""
        self.owner.set_epoch(epoch)


def _of_manifest(
    manifest: str | Path, reading: dict[str, Any], config: SamplerConfig, path: str
) -> tuple[FloatArray, FloatArray | None]:
    """Read lengths and targets of a manifest, in its order and in the unit of the config."""
    if (scale := reading.get("length_scale")) is not None and not isinstance(scale, Fraction):
        reading["length_scale"] = parse_scale(str(scale))
    found = load_ordered_lengths(manifest, ReadOptions(**reading))
    if None not in (found.unit, config.unit) and found.unit != config.unit:
        raise ValueError(
            f"{manifest} counts lengths in {found.unit}, {path} in {config.unit}: say the length_scale (and the unit) "
            "that it was tuned with"
        )
    return found.values, found.targets


def _check_choices(ordering: str, overlong: str, rank: int | None, world_size: int | None) -> None:
    if ordering not in ORDERINGS:
        raise ValueError(f"batch_ordering must be one of {', '.join(ORDERINGS)}, got {ordering!r}")
    if overlong not in ("error", "single"):
        raise ValueError(f"overlong must be error or single, got {overlong!r}")
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank and world_size go together, got rank {rank} and world_size {world_size}: give both")
    if rank is not None and world_size is not None:
        if _whole("world_size", world_size) > _MOST_RANKS:
            raise ValueError(f"world_size must be at most {_MOST_RANKS:,}, got {world_size:,}")
        if not _whole("rank", rank) < world_size:
            raise ValueError(f"rank must be at least 0 and below world_size, got rank {rank} of {world_size}")


def _whole(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
        raise ValueError(f"{name} must be a whole number, at least 0, got {value!r}")
    return int(value)
