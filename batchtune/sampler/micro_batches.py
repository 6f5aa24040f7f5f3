"""The samplers of micro-batches: packed, or cut from each optimizer step's own examples."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch  # noqa: TID253  # as in __init__.py
from torch.utils.data import IterableDataset, Sampler, get_worker_info  # noqa: TID253  # as in __init__.py

from batchtune.configs import read_any_sampler_yaml
from batchtune.epochs import Indices
from batchtune.epochs.batchers import Cutter, StepCutter, micro_batches
from batchtune.epochs.table import BucketTable, checked_lengths, holding_all
from batchtune.lengths import ceil_div, whole
from batchtune.packing import PackedBatcher, StepPacker, TimeLawGiven, budget_of
from batchtune.records import PackedConfig, SamplerConfig
from batchtune.sampler import (
    MOST_ACCUMULATED,
    LengthOf,
    OnRanks,
    check_function,
    checked_ranks,
    cost,
    flag,
)
from batchtune.sampler.base import (
    EpochBatchSampler,
    tuned_lengths,
    warn_of_other_lengths,
)

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
# The fields of a `sampler.yaml` that are arguments of padded and of packed steps.
_PADDED = ("bucket_boundaries", "bucket_batch_sizes", "equal_counts", "pair_cost")
_PACKED = ("max_tokens", "time_law", "cut_at")


class SameStepBatchSampler(OnRanks, Sampler[list[int]]):
    """Micro-batches for training whose optimizer steps keep their examples, for `DataLoader(batch_sampler=...)`.

    The training's own batch sampler says which examples each step has: those of its next `own_accumulate` batches, on
    all ranks. They are sorted by length and cut into `accumulate` micro-batches for each rank, none larger than what
    fits, with the least padding; or, with `max_tokens`, packed into the same number without padding. So training takes
    the same steps, on the same examples, in less time. The gradient of a step is the same, too, if the loss weighs
    tokens or examples alike in all micro-batches.

    Example::

        own = BatchSampler(RandomSampler(dataset), batch_size=4, drop_last=False)  # as it was, 16 a step
        sampler = SameStepBatchSampler.from_config("batchtune-run/sampler.yaml", own, lengths)
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=pad)

    **Ranks.** Every rank computes the batches of all ranks, which have the same number of micro-batches; those that run
    side by side cost about the same. A `DistributedSampler` (or a subclass), or accelerate's `BatchSamplerShard`, deals
    the batch sampler to ranks. Any other sampler is assumed to draw this rank's examples alone.

    **Loops that learn where steps end.** With `accumulate="fewest"`, each step has the fewest micro-batches that hold
    its examples, and their number varies. `sampler.steps(loader)` yields those of one optimizer step at a time::

        for micro_batches in sampler.steps(loader):
            tokens = sum(int((batch != PAD).sum()) for batch in micro_batches)
            for batch in micro_batches:
                (summed_loss(model, batch) / tokens).backward()
            optimizer.step()
            optimizer.zero_grad()

    **Resuming.** Skip batches as the trainer does without batchtune; your own sampler must draw the same batches as
    before.

    Args:
        batch_sampler: The training's own; its batches may differ in size.
        lengths: Shape (examples,), positive and finite: the length of each example, in the unit of the boundaries.
        bucket_boundaries: Lengths up to which a batch size fits, ascending; the last is at least the longest length.
            With a table micro-batches are padded, with `max_tokens` packed.
        bucket_batch_sizes: The most examples of a batch, for the first boundary that reaches its longest length.
        own_accumulate: How many of the batch sampler's batches make a step, on each rank.
        accumulate: The training's gradient accumulation with this sampler; None: `own_accumulate`. If a step's examples
            don't fit into that number, the shortest of them move to the next step. `fewest`: the fewest that hold them,
            the same number on each rank; then `len()` raises TypeError.
        equal_counts: Whether the micro-batches of a step hold the same number of examples, to within one, for a loss
            that is a mean over the examples of each micro-batch.
        pair_cost: The cost of a pair of positions of an example, as in attention, if a position costs 1: steps are then
            cut for the least cost, not the least padding.
        rank, world_size: This process, from 0 on, and the number of processes; by default those of `torch.distributed`
            when the sampler is first used.
        overlong: Whether examples beyond the last boundary are an `error` or batches of a `single` example.
        max_tokens, time_law, cut_at: As for `batchtune.PackedBatchSampler`.

    Raises:
        OverlongError: A sequence is longer than `max_tokens`.
        ValueError: An argument breaks its rule; the message says which entry and what to do.
    """

    def __init__(
        self,
        batch_sampler: Any,
        lengths: npt.ArrayLike,
        *,
        bucket_boundaries: npt.ArrayLike | None = None,
        bucket_batch_sizes: npt.ArrayLike | None = None,
        own_accumulate: int,
        accumulate: int | Literal["fewest"] | None = None,
        equal_counts: bool = False,
        pair_cost: float | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        overlong: Literal["error", "single"] = "error",
        max_tokens: int | None = None,
        time_law: TimeLawGiven | None = None,
        cut_at: int | None = None,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.own_accumulate = whole(
            "own_accumulate", own_accumulate, 1, highest=MOST_ACCUMULATED
        )
        # None: it varies from step to step.
        self.accumulate: int | None = None
        if accumulate != "fewest":
            self.accumulate = whole(
                "accumulate",
                own_accumulate if accumulate is None else accumulate,
                1,
                highest=MOST_ACCUMULATED,
            )
        # Of the micro-batches that were yielded and not yet trained on, whether each ends its step.
        self._ends: deque[bool] = deque()
        self._ranks = checked_ranks(rank, world_size)
        self._lengths = checked_lengths(lengths)
        self._cutter = cutter_of(
            lengths,
            bucket_boundaries=bucket_boundaries,
            bucket_batch_sizes=bucket_batch_sizes,
            equal_counts=equal_counts,
            pair_cost=pair_cost,
            overlong=overlong,
            max_tokens=max_tokens,
            time_law=time_law,
            cut_at=cut_at,
        )

    @classmethod
    def from_config(
        cls,
        path: str | Path,
        batch_sampler: Any,
        lengths: Any,
        *,
        length_of: LengthOf | None = None,
        targets: npt.ArrayLike | None = None,
        **overrides: Any,
    ) -> Self:
        """Make the sampler of a `sampler.yaml` that keeps the examples of steps, around the training's own.

        `batch_sampler` is as for the class; `lengths`, the other arguments, warnings and errors are as for
        `batchtune.sampler_from_config`. A file of another sampler raises ValueError.
        """
        config = read_any_sampler_yaml(Path(path))
        if not config.keeps_examples:
            raise ValueError(
                f"{path} describes a sampler of the kind {config.sampler!r}, which draws its batches itself: use "
                "batchtune.sampler_from_config"
            )
        lengths, targets = tuned_lengths(
            Path(path), config, lengths, length_of, targets, overrides
        )
        options = {
            "own_accumulate": config.own_accumulate,
            "accumulate": config.accumulate,
            **options_of(config),
        }
        sampler = cls(batch_sampler, lengths, **{**options, **overrides})
        sampler._allocator = config.evidence.allocator
        warn_of_other_lengths(Path(path), config, lengths, targets)
        return sampler

    @property
    def sampler(self) -> Any:
        """The training's own sampler of examples, which trainers tell the epoch."""
        return getattr(self.batch_sampler, "sampler", None)

    def set_epoch(self, epoch: int) -> None:
        """Tell the training's own samplers the epoch, if they take one."""
        for own in (self.batch_sampler, self.sampler):
            if hasattr(own, "set_epoch"):
                own.set_epoch(epoch)

    def __len__(self) -> int:
        """Return the number of micro-batches that this rank has; raises TypeError if the own sampler has no length."""
        return self.batches_for(len(self.batch_sampler))

    def steps(self, loader: Iterable[T]) -> Iterator[list[T]]:
        """Yield this rank's batches of each optimizer step, for one epoch of a loader over this sampler."""
        step = []
        for batch in loader:
            step.append(batch)
            if self._ends.popleft():
                yield step
                step = []

    def batches_for(self, own_batches: int, ranks: int = 1) -> int:
        """Return how many micro-batches replace `own_batches`, on this many ranks together.

        Raises TypeError where their number varies.
        """
        if self.accumulate is None:
            raise TypeError("the number of micro-batches varies from step to step")
        return micro_batches(
            own_batches, self.own_accumulate * ranks, self.accumulate * ranks
        )

    def __iter__(self) -> Iterator[list[int]]:
        self._refuse_second_dealing()
        self._compare_allocator()
        ranks = _of_all_ranks(self.batch_sampler, self.rank, self.world_size)
        cutter = replace(self._cutter, world_size=len(ranks.batches))
        told = 0
        self._ends.clear()
        steps = cutter.epoch(self._steps(ranks.batches))
        for step, (batches, needed) in enumerate(steps, 1):
            told = warn_of_moved(step, needed, told)
            ours = batches[ranks.ours :: len(ranks.batches)]
            for place, batch in enumerate(ours, 1):
                self._ends.append(place == len(ours))
                yield batch.tolist()

    def _steps(
        self, batches: Sequence[Iterator[Sequence[int]]]
    ) -> Iterator[tuple[Indices, int | None]]:
        """Yield the examples of each step on all ranks, and how many micro-batches each rank makes of them.

        None: as few as hold them.
        """
        rows = zip(*batches, strict=True)
        while own := list(itertools.islice(rows, self.own_accumulate)):
            examples = [index for row in own for batch in row for index in batch]
            if max(examples) >= self._lengths.size:
                raise ValueError(
                    f"the batch sampler draws example {max(examples):,}, but there are {self._lengths.size:,} lengths: "
                    "lengths[i] must be that of dataset[i]"
                )
            each = None
            if self.accumulate is not None:
                each = self.batches_for(len(own))
            yield np.array(examples), each


class SameStepStream(OnRanks, IterableDataset[Any]):
    """Micro-batches of a stream whose optimizer steps keep their examples, for `DataLoader(batch_size=None)`.

    Each step takes the next examples, the same number as without batchtune. The stream reads them
    before it yields the step's first micro-batch: **a step's examples are held in memory**, not
    those of one batch.

    Example::

        stream = SameStepStream("batchtune-run/sampler.yaml", examples, length_of=len, collate_fn=pad)
        loader = DataLoader(stream, batch_size=None)  # a step is `accumulate` of its batches, as the file says

    Each rank cuts its own examples of a step: the source must give each rank its part. Each worker
    would make steps of its own part alone, so at most one is allowed; the source may have more.

    Args:
        path: The `sampler.yaml` of a sampler that keeps the examples of steps.
        examples: An iterable; each pass reads it once.
        length_of: A function that takes an example and returns its length, in the unit of the file.
        collate_fn: A function that takes a list of examples and returns the batch; None: the list itself.
        rank, world_size: As for `SameStepBatchSampler`.

    Raises:
        ResultError: The file is missing or damaged.
        ValueError: The file describes another sampler; or, while the stream is read, a length is beyond its limits.
        RuntimeError: Several workers read the stream.
    """

    def __init__(
        self,
        path: str | Path,
        examples: Iterable[Any],
        *,
        length_of: LengthOf,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self._config = read_any_sampler_yaml(Path(path))
        if not self._config.keeps_examples:
            raise ValueError(
                f"{path} describes a sampler of the kind {self._config.sampler!r}, whose batches are of other steps: "
                "use batchtune.BucketedStream"
            )
        self._allocator = self._config.evidence.allocator
        self._ranks = checked_ranks(rank, world_size)
        self._examples = examples
        check_function("length_of", length_of)
        self._length_of = length_of
        self._collate = list if collate_fn is None else collate_fn

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise RuntimeError(
                f"{worker.num_workers} workers would each make steps of their own examples: read a SameStepStream with "
                "num_workers=0 or 1"
            )
        self._compare_allocator()
        assert self._config.pool_size is not None
        size = self._config.pool_size // self.world_size
        assert self._config.accumulate is not None
        source = iter(self._examples)
        left: list[Any] = []
        told = 0
        for number in itertools.count(1):
            step = list(itertools.islice(source, size))
            if not (step or left):
                return
            each = ceil_div((len(step) or size) * self._config.accumulate, size)
            examples = [*left, *step]
            lengths = np.array([self._length_of(example) for example in examples])
            cutter = cutter_of(lengths, **options_of(self._config))
            batches, moved = cutter.cut(np.arange(len(examples)), each)
            if moved.size:
                needed = cutter.fewest(np.arange(len(left), len(examples)))
                told = warn_of_moved(number, needed, told)
            left = [examples[index] for index in moved]
            for batch in batches:
                yield self._collate([examples[index] for index in batch])


def warn_of_moved(step: int, needed: int, told: int) -> int:
    """Warn of a step that needs more micro-batches than the number `told` before; return the larger number."""
    if needed > told:
        warnings.warn(
            f"step {step:,} of the epoch does not fit into its micro-batches, and some examples move to the next "
            f"step: accumulate={needed} is the least that holds them",
            stacklevel=3,
        )
    return max(needed, told)


def options_of(config: SamplerConfig | PackedConfig) -> dict[str, Any]:
    """Return the arguments of `cutter_of` that a config has."""
    names = _PACKED if isinstance(config, PackedConfig) else _PADDED
    return {name: getattr(config, name) for name in names}


def cutter_of(
    lengths: npt.ArrayLike,
    *,
    bucket_boundaries: npt.ArrayLike | None = None,
    bucket_batch_sizes: npt.ArrayLike | None = None,
    equal_counts: bool = False,
    pair_cost: float | None = None,
    overlong: Literal["error", "single"] = "error",
    max_tokens: int | None = None,
    time_law: TimeLawGiven | None = None,
    cut_at: int | None = None,
) -> Cutter:
    """Return what cuts steps of examples with these lengths; arguments and errors are those of the sampler."""
    of_padded = (bucket_boundaries, bucket_batch_sizes, pair_cost)
    if max_tokens is not None:
        if equal_counts or any(value is not None for value in of_padded):
            raise ValueError(
                "bucket_boundaries, bucket_batch_sizes, pair_cost and equal_counts are for padded micro-batches: "
                "leave them out with max_tokens"
            )
        budget = budget_of(max_tokens, time_law=time_law, cut_at=cut_at)
        return StepPacker(budget.checked(lengths), budget)
    if bucket_boundaries is None or bucket_batch_sizes is None:
        raise ValueError(
            "give bucket_boundaries and bucket_batch_sizes for padded micro-batches, or max_tokens for packed ones"
        )
    values = checked_lengths(lengths)
    table = BucketTable.of(bucket_boundaries, bucket_batch_sizes)
    return StepCutter(
        values,
        holding_all(values, table, overlong),
        equal_counts=flag("equal_counts", equal_counts),
        pair_cost=None if pair_cost is None else cost("pair_cost", pair_cost),
    )


class _Ranks(NamedTuple):
    """The own batches of ranks, and which of them are ours."""

    batches: list[Iterator[Sequence[int]]]
    ours: int


def _of_all_ranks(own: Any, rank: int, world_size: int) -> _Ranks:
    """Return the batches that each rank draws, as this one can work them out; else those of this rank alone."""
    if world_size > 1 and hasattr(own, "process_index"):
        shared = itertools.tee(own.batch_sampler, world_size)
        # Of copies: a shard may complete the last batch in place.
        shards = [
            _changed(own, batch_sampler=map(list, batches), process_index=index)
            for index, batches in enumerate(shared)
        ]
        return _Ranks([iter(shard) for shard in shards], rank)
    inner = getattr(own, "sampler", None)
    if world_size > 1 and getattr(inner, "num_replicas", 1) == world_size:
        dealt = [
            _changed(own, sampler=_changed(inner, rank=index))
            for index in range(world_size)
        ]
        return _Ranks(_begun_alike(dealt), rank)
    return _Ranks([iter(own)], 0)


def _changed(made: Any, **attributes: Any) -> Any:
    """Return a copy of an object with other attributes."""
    other = copy.copy(made)
    vars(other).update(attributes)
    return other


def _begun_alike(samplers: Iterable[Any]) -> list[Iterator[Sequence[int]]]:
    """Return their iterators, each begun with the same random numbers: some draw a seed from torch's own."""
    state = torch.get_rng_state()
    begun: list[Iterator[Sequence[int]]] = []
    for sampler in samplers:
        torch.set_rng_state(state)
        batches = iter(sampler)
        begun.append(itertools.chain(list(itertools.islice(batches, 1)), batches))
    return begun


class PackedBatchSampler(EpochBatchSampler):
    """Micro-batches of at most `max_tokens`, packed without padding, for `DataLoader(batch_sampler=...)`.

    Each epoch shuffles the sequences, takes them `pool_size` at a time and packs each pool. All ranks run micro-batches
    of about the same time side by side; these steps are then shuffled. All epochs have the same number of
    micro-batches, `len()`: if one has fewer, its last pool is packed into more.

    Example::

        sampler = PackedBatchSampler(lengths, max_tokens=16_384, accumulate=4)
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=DataCollatorWithFlattening())

    Epochs, ranks and resuming are as for `BucketBatchSampler`, including the arguments that are not listed here.

    Args:
        lengths: Shape (sequences,): whole numbers of tokens, at least 1.
        max_tokens: The most tokens of a micro-batch.
        packer: `even` fills micro-batches to the cap and evens out their time, with at most 0.5% more of them than
            tokens / max_tokens in each pool, unless first-fit-decreasing needs more; `first-fit` and `best-fit` are
            those for descending lengths.
        time_law: The time of a micro-batch, a `batchtune.TimeLaw` or its arguments; by default proportional to the
            FLOPs of a dense 7B model.
        pool_size: The most sequences of a pool, at least 1. All pools are of one size, to within one sequence; each
            leaves one micro-batch that is not full.
        cut_at: Longer sequences count as this long, and the data set or `collate_fn` cuts them; None: a sequence longer
            than `max_tokens` is an error that names it.
        accumulate: The number of micro-batches of each rank in an epoch is a multiple of this.
        drop_last: Whether to leave out the last micro-batches if they are too few for all ranks, instead of packing the
            last pool into more; see `dropped_examples`.

    Raises:
        OverlongError: A sequence is longer than `max_tokens`.
        ValueError: An argument breaks its rule; the message says what to do.
    """

    KIND = "packed"
    OPTIONS = (
        "max_tokens",
        "packer",
        "time_law",
        "pool_size",
        "cut_at",
        "accumulate",
        "shuffle",
        "drop_last",
        "seed",
    )

    def __init__(
        self,
        lengths: npt.ArrayLike,
        *,
        max_tokens: int,
        packer: str = "even",
        time_law: TimeLawGiven | None = None,
        pool_size: int = 8192,
        cut_at: int | None = None,
        accumulate: int = 1,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        epoch: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.budget = budget_of(
            max_tokens, packer=packer, time_law=time_law, cut_at=cut_at
        )
        self.pool_size = whole("pool_size", pool_size, 1)
        tokens = self.budget.checked(lengths)
        accumulate = whole("accumulate", accumulate, 1, highest=MOST_ACCUMULATED)
        super().__init__(
            tokens,
            PackedBatcher(tokens, self.budget, self.pool_size),
            [asdict(self.budget), self.pool_size, accumulate],
            shuffle=shuffle,
            drop_last=drop_last,
            seed=seed,
            epoch=epoch,
            rank=rank,
            world_size=world_size,
            accumulate=accumulate,
        )


sampler_from_config = EpochBatchSampler.from_config
