"""What a script's DataLoader is of, and in which order its examples are."""

from __future__ import annotations

import contextlib
import operator
import random
import statistics
import time
from array import array
from collections.abc import Iterator
from operator import length_hint
from pathlib import Path
from typing import Any

import numpy as np

from batchtune.lengths import FloatArray

SAMPLER_LINES = """\
Change three lines of the script instead:
  from batchtune import sampler_from_config
  sampler = sampler_from_config("{run}/sampler.yaml", lengths)  # lengths[i] is that of dataset[i]
  loader = DataLoader(dataset, batch_sampler=sampler)  # and your other arguments"""
STREAM_LINES = """\
Change three lines of the script instead:
  from batchtune import BucketedStream
  stream = BucketedStream.from_config("{run}/stream.yaml", examples, length_of=..., collate_fn=...)
  loader = DataLoader(stream, batch_size=None)  # and your other arguments"""
SAME_STEP_SAMPLER_LINES = """\
Change three lines of the script instead:
  from batchtune import SameStepBatchSampler
  sampler = SameStepBatchSampler.from_config("{run}/sampler.yaml", your_batch_sampler, lengths)
  loader = DataLoader(dataset, batch_sampler=sampler)  # lengths[i] is that of dataset[i]"""
SAME_STEP_LINES = """\
Change three lines of the script instead:
  from batchtune import SameStepStream
  stream = SameStepStream("{run}/sampler.yaml", examples, length_of=..., collate_fn=...)
  loader = DataLoader(stream, batch_size=None)  # with one worker at most, and your other arguments"""

_EXAMINED = 20
# Of examples in another order, fewer than 1 in 1,000 reach it by chance; transcripts, and lengths that an augmentation
# changes by a tenth, do in the same order.
_LEAST_CORRELATION = 0.7
# Among fewer sizes no order can be seen.
_LEAST_DISTINCT = 5
# Two epochs of a million examples, batched by a sampler in Python, take about 2 seconds.
_COUNTING_SECONDS = 10.0


def unlike(
    loader: Any, count: int, lines_of_streams: str = STREAM_LINES
) -> tuple[str, str] | None:
    """Return why a loader is not one of so many examples, and lines to change in the script; None if it is."""
    from torch.utils.data import IterableDataset

    name = f"the data set {type(loader.dataset).__name__}"
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        return f"{name} is a stream, or makes whole batches", lines_of_streams
    examples = length_hint(loader.dataset)
    if examples == count:
        return None
    reason = f"{name} has {examples:,} examples, but the manifest {count:,} (if the data are others now, tune again)"
    return reason, SAMPLER_LINES


def stated(sampler: Any, *names: str) -> Any:
    """Return the first attribute of these names that a sampler has, or one within it; None if none has one."""
    while sampler is not None:
        for name in names:
            if hasattr(sampler, name):
                return getattr(sampler, name)
        inner = getattr(sampler, "sampler", None)
        sampler = getattr(sampler, "batch_sampler", inner)
    return None


def random_batch_size(loader: Any) -> int | None:
    """Return the batch size of a loader whose batches are drawn at random, all of one size; None for another.

    The order of a stream is not known, and taken for random.
    """
    from torch.utils.data import (
        BatchSampler,
        DistributedSampler,
        IterableDataset,
        RandomSampler,
    )

    if isinstance(loader.dataset, IterableDataset):
        return None if loader.batch_size is None else int(loader.batch_size)

    batches = loader.batch_sampler
    # Accelerate's, of each rank, is around the script's.
    while isinstance(getattr(batches, "batch_sampler", None), BatchSampler):
        if getattr(batches, "split_batches", False):
            return None
        batches = batches.batch_sampler
    if type(batches) is not BatchSampler:
        return None
    sampler: Any = batches.sampler
    # What inherits from the other, as Lightning's does, may be around any order.
    is_dealt = type(sampler) is DistributedSampler and sampler.shuffle
    if not is_dealt and not isinstance(sampler, RandomSampler):
        return None
    return int(batches.batch_size)


@contextlib.contextmanager
def restored_randomness() -> Iterator[None]:
    """Let the script draw the same random numbers as if nothing was read here."""
    import torch

    own = random.getstate()
    numpys = np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(own)
        np.random.set_state(numpys)


def write_own_batches(loader: Any, path: Path | None) -> None:
    """Write which examples the batches of two epochs hold, as `epochs.recorded` reads it; without a path nothing.

    Nor if that takes long, or what the loader's batch sampler yields are no indices. No example is read.
    """
    from torch.utils.data import BatchSampler

    until = time.monotonic() + _COUNTING_SECONDS
    epochs = []
    # A sampler is the user's code, and may not end.
    with contextlib.suppress(Exception):
        for epoch in range(2):
            set_epoch = stated(loader.batch_sampler, "set_epoch")
            if set_epoch is not None:
                set_epoch(epoch)
            examples = array("q")
            batches = array("q")
            for number, batch in enumerate(loader.batch_sampler):
                examples.extend(map(operator.index, batch))
                batches.extend([number] * len(batch))
                if time.monotonic() > until:
                    return
            epochs.append(np.array([batches, examples]))
        if path is not None:
            drawing = loader.batch_sampler
            # Torch's own does not say in which order.
            if type(drawing) is BatchSampler:
                drawing = drawing.sampler
            name = type(drawing).__name__
            np.savez(path, sampler=name, first=epochs[0], second=epochs[1])


def pads(pair: Any) -> bool:
    """Return whether a batch of two examples has a row for each of them."""
    from batchtune.scripts.trees import flatten, sizes

    leaves = [leaf for (leaf,) in flatten([pair]).values()]
    return any(len(sizes(leaf)) > 1 and sizes(leaf)[0] == 2 for leaf in leaves)


def unsafe(
    loader: Any, lengths: FloatArray, *, draws: bool = True, packed: bool = False
) -> str | None:
    """Return why a loader's examples, of these lengths, should not be given in other batches; None if they can be.

    These `draws` each example once, or they hold what the loader's own sampler draws; they may be `packed`.

    Some examples, from the shortest to the longest, are collated one by one: some size of theirs must grow as well, or
    none may differ. Values that grow with the row, as an index or a time does, don't count: if the manifest is sorted,
    they grow with any lengths. A worker reads them if the loader has workers, since a data set may open its files
    where it is first read.
    """
    import torch

    from batchtune.scripts.trees import flatten, measured

    chooses = stated(loader.batch_sampler, "indices", "weights") is not None
    if draws and chooses:
        return "its sampler chooses among the examples, but recommended batches have each of them once an epoch"
    places = np.linspace(0, lengths.size - 1, _EXAMINED).astype(int)
    ascending = np.argsort(lengths)[places].tolist()
    indices = [[index] for index in ascending]
    if packed:
        indices.append([ascending[0], ascending[-1]])
    examples = torch.utils.data.DataLoader(
        loader.dataset,
        batch_sampler=indices,
        collate_fn=loader.collate_fn,
        num_workers=min(1, loader.num_workers),
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
    )
    with torch.no_grad():  # a loader that is iterated over like this does not train
        batches = list(examples)
    if packed and pads(batches.pop()):
        return "it pads its batches, but those of the run are packed: they were measured without padding"
    sizes_by_leaf = measured(flatten(batches))
    correlations = []
    for (_, measure), sizes in sizes_by_leaf.items():
        distinct, ranks = np.unique(sizes, return_inverse=True)
        if distinct.size < _LEAST_DISTINCT:
            continue
        # NumPy's would set up BLAS, which holds 32 MiB of the script's memory from then on.
        by_row = statistics.correlation(ranks.tolist(), ascending)
        if measure != "value" or abs(by_row) < _LEAST_CORRELATION:
            correlations.append(statistics.correlation(ranks.tolist(), places.tolist()))
    if max(correlations, default=1) >= _LEAST_CORRELATION:
        return None
    return (
        "the sizes of its examples don't follow the lengths, so the rows of the manifest and the examples of the data "
        "set are in different orders"
    )
