"""A stream whose optimizer steps keep their examples, cut into other micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info  # noqa: TID253  # as in arguments.py

from batchtune.exports.reading import read_any_sampler_yaml
from batchtune.sampler.arguments import OnRanks, check_function, checked_ranks
from batchtune.sampler.same_step import cutter_of, options_of, warn_of_moved


class SameStepStream(OnRanks, IterableDataset[Any]):
    """The micro-batches of a stream whose optimizer steps keep their examples, for `DataLoader(batch_size=None)`.

    The examples of each step are those that come next, as many as it has without batchtune. They are read before its
    first micro-batch is yielded: **a step's examples are held in memory**, not those of one batch.

    Example::

        stream = SameStepStream("batchtune-run/sampler.yaml", examples, length_of=len, collate_fn=pad)
        loader = DataLoader(stream, batch_size=None)  # a step is `accumulate` of its batches, as the file says

    Each rank cuts its own examples of a step: the source has to give it its part. A worker would make steps of its
    own part alone, so that there may be one at most; the source may have more.

    Args:
        path: The `sampler.yaml` of a sampler that keeps the examples of steps.
        examples: An iterable; each pass reads it once.
        length_of: A function of an example that returns its length, in the unit of the file.
        collate_fn: A function of a list of examples that returns the batch; None: the list itself.
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
        length_of: Callable[[Any], float],
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
        for number in count(1):
            step = list(islice(source, size))
            if not (step or left):
                return
            each = -(-(len(step) or size) * self._config.accumulate // size)
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
