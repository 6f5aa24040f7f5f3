"""What a script's DataLoader is, and loaders like it."""

from __future__ import annotations

from collections.abc import Iterator
from operator import length_hint
from typing import Any, NamedTuple

import numpy as np

from batchtune.lengths import FloatArray
from batchtune.units import counted

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


# What torch's and accelerate's samplers that deal to ranks call their number.
RANKS = ("num_replicas", "num_processes")
_ARGUMENTS = (
    "collate_fn",
    "generator",
    "in_order",
    "multiprocessing_context",
    "num_workers",
    "persistent_workers",
    "pin_memory",
    "prefetch_factor",
    "timeout",
    "worker_init_fn",
)
_EXAMINED = 20
# Of examples in another order, fewer than 1 in 1,000 reach it by chance; transcripts, and lengths that an augmentation
# changes by a tenth, do in the same order.
_LEAST_CORRELATION = 0.7
# Among fewer sizes no order can be seen.
_LEAST_DISTINCT = 5


class Unlike(NamedTuple):
    """Why a loader is not the training loader of a run, and lines to change."""

    reason: str
    lines: str = SAMPLER_LINES


def unlike(loader: Any, count: int) -> Unlike | None:
    """Return why a loader is not one of a data set with so many examples; None if it is."""
    from torch.utils.data import IterableDataset

    name = f"the data set {type(loader.dataset).__name__}"
    if isinstance(loader.dataset, IterableDataset):
        return Unlike(f"{name} is a stream (an IterableDataset)", STREAM_LINES)
    if loader.batch_sampler is None:
        return Unlike(f"{name} makes whole batches (batch_size=None)")
    examples = length_hint(loader.dataset)
    if examples == count:
        return None
    return Unlike(
        f"{name} has {counted(examples, 'example')}, but the manifest {count:,}"
    )


def like(loader: Any, **changed: Any) -> Any:
    """Return a DataLoader like another but for its sampler, and what is changed."""
    from torch.utils.data import DataLoader

    options = {
        name: getattr(loader, name) for name in _ARGUMENTS if hasattr(loader, name)
    }
    return DataLoader(loader.dataset, **{**options, **changed})


def own_iterator(loader: Any) -> Iterator[Any]:
    """Return the iterator that a DataLoader has by itself."""
    own: Iterator[Any] = type(loader).__iter__.__wrapped__(loader)
    return own


def samplers_of(loader: Any) -> Iterator[Any]:
    """Yield the samplers of a loader, the outermost first."""
    sampler = loader.batch_sampler
    while sampler is not None:
        yield sampler
        inner = getattr(sampler, "sampler", None)
        sampler = getattr(sampler, "batch_sampler", inner)


def stated(loader: Any, *names: str) -> Any:
    """Return the first attribute of these names that a loader's samplers have; None if none has one."""
    for sampler in samplers_of(loader):
        for name in names:
            if hasattr(sampler, name):
                return getattr(sampler, name)
    return None


def choosing_sampler(loader: Any, count: int) -> str | None:
    """Return the class of a sampler that takes only some examples, or some repeatedly; None if none does."""
    from torch.utils import data

    for sampler in samplers_of(loader):
        chooses = isinstance(
            sampler, (data.SubsetRandomSampler, data.WeightedRandomSampler)
        )
        if isinstance(sampler, data.RandomSampler):
            chooses = sampler.replacement or sampler.num_samples != count
        if chooses:
            return type(sampler).__name__
    return None


def follow_lengths(loader: Any, lengths: FloatArray) -> bool | None:
    """Return whether a data set's examples are in the order of their lengths, shape (examples,); None if unknown.

    Some examples are collated one by one. A worker reads them if the loader has workers, since a data set may open its
    files where it is first read.
    """
    import torch

    from batchtune.scripts.trees import flatten, measured

    indices = np.linspace(0, lengths.size - 1, _EXAMINED).astype(int)
    reading = like(
        loader,
        batch_sampler=[[index] for index in indices.tolist()],
        num_workers=min(1, loader.num_workers),
        persistent_workers=False,
        generator=torch.Generator(),
    )
    places = _places(lengths[indices])
    is_in_order = None
    for sizes in measured(flatten(list(own_iterator(reading)))).values():
        if min(np.unique(sizes).size, np.unique(places).size) >= _LEAST_DISTINCT:
            correlation = np.corrcoef(_places(sizes), places)[0, 1]
            is_in_order = bool(is_in_order or correlation >= _LEAST_CORRELATION)
    return is_in_order


def _places(values: FloatArray) -> Any:
    """Return the place of each value among the distinct ones."""
    return np.unique(values, return_inverse=True)[1]
