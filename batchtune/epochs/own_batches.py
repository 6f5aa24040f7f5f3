"""What an epoch of a script's own batches comes to, by the examples that they hold."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from batchtune.epochs.layout import ON_ONE_RANK, Cut, Layout
from batchtune.epochs.simulation import effective_buckets, mates_in_cuts
from batchtune.lengths import IntArray, Lengths
from batchtune.results import BatchShape, OwnBatches

# Of more batches, this many stand for all.
_MOST_SHAPES = 256
# An epoch whose examples are more or less than those of the data by a larger share is no epoch of it.
_OTHER_EXAMPLES = 0.05


def counted(path: Path, lengths: Lengths, ranks: int) -> OwnBatches | None:
    """Return what the batches in a file of `scripts.script_loaders.write_own_batches` come to.

    Returns None without such a file, or if the batches are no epochs of the manifest's rows.
    """
    if lengths.in_order is None:
        return None
    values, targets = lengths.in_order
    try:
        with np.load(path) as stored:
            sampler = str(stored["sampler"])
            first = _cut(stored["first"], values.size)
            second = _cut(stored["second"], values.size)
    except (OSError, ValueError, zipfile.BadZipFile):
        return None
    # A sampler may leave some out, or repeat some; and each rank has a part.
    share = first.examples.size / values.size
    if abs(share * ranks - 1) > _OTHER_EXAMPLES:
        return None
    sizes = first.layout.batch_sizes
    every = np.arange(sizes.size)
    longest = first.longest(values, every)
    worst = np.full(sizes.size, None)
    if targets is not None:
        worst = first.longest(targets, every)
    places = np.linspace(0, sizes.size - 1, min(sizes.size, _MOST_SHAPES))
    kept = np.argsort(sizes * longest)[places.astype(int)]
    of_each = (values[kept].tolist() for values in (sizes, longest, worst))
    mates = mates_in_cuts([first, second], values)
    # Mates that meet again may do so on another rank: this one has only a part of them in its second epoch.
    again = mates.again / np.isin(first.examples, second.examples).mean()
    return OwnBatches(
        sampler=sampler,
        ranks=ranks,
        batches=round(sizes.size / share),
        padded_length=float((sizes * longest).sum()) / share,
        shapes=list(map(BatchShape, *of_each)),
        mates_again=min(1.0, float(again)),
        effective_buckets=effective_buckets(mates.again, first.layout),
    )


def _cut(epoch: IntArray, count: int) -> Cut:
    """Return the batches of an epoch, shape (2, examples): the number of its batch, and the example."""
    batches, examples = epoch
    sizes = np.bincount(batches)
    none = np.zeros_like(sizes)
    starts = np.cumsum(sizes) - sizes
    return Cut(examples, Layout(starts, sizes, none, none > 0, ON_ONE_RANK, count))
