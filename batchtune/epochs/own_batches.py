"""What an epoch of a training's own batches comes to, by the examples that they hold, or by a recording."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from batchtune.epochs.layout import EpochBatches
from batchtune.epochs.simulation import effective_buckets, mates_in_cuts
from batchtune.lengths import FloatArray, IntArray, Lengths
from batchtune.results import BatchShape, OwnBatches, TrainingStep

PADDED_BEYOND = 1.5
"""Batches can be padded a little beyond the longest example, but no further."""
# Of more batches, this many stand for all.
_MOST_SHAPES = 256
# Batches that hold less than this part of what the examples do, in as many of them, are of others.
_LESS_THAN_EXAMPLES = 0.8
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
    shapes = first.shapes(values, targets)
    sizes = shapes.batch_sizes
    kept = _kept(sizes * shapes.lengths)
    columns = [sizes, shapes.lengths]
    if shapes.targets is not None:
        columns.append(shapes.targets)
    of_each = (column[kept].tolist() for column in columns)
    mates = mates_in_cuts([first, second], values)
    # Mates that meet again may do so on another rank: this one has only a part of them in its second epoch.
    again = mates.again / np.isin(first.examples, second.examples).mean()
    return OwnBatches(
        sampler=sampler,
        ranks=ranks,
        batches=round(sizes.size / share),
        padded_length=shapes.padded_length / share,
        shapes=list(map(BatchShape, *of_each)),
        mates_again=min(1.0, float(again)),
        effective_buckets=effective_buckets(mates.again, first.layout),
    )


def recorded(steps: Sequence[TrainingStep], lengths: Lengths) -> OwnBatches | None:
    """Return what the batches of a recording come to in an epoch.

    None without any, if some are packed, or if they are longer than those of the data or hold less: then their lengths
    count another unit, or are of other data. A recording says how large its batches were, not which examples were in
    them.
    """
    batches = [shape for step in steps if step.oom is None for shape in step.batches]
    if not batches or any(shape.sequences is not None for shape in batches):
        return None
    if max(shape.length for shape in batches) > PADDED_BEYOND * lengths.longest:
        return None
    epochs = sum(shape.batch_size for shape in batches) / lengths.count
    padded_lengths = np.array([shape.padded_length for shape in batches])
    padded_length = float(padded_lengths.sum()) / epochs
    if padded_length < _LESS_THAN_EXAMPLES * lengths.total:
        return None
    shapes = []
    for index in _kept(padded_lengths):
        shape = batches[index]
        # Batches may be padded a little beyond the longest example.
        length = min(max(shape.length, lengths.shortest), lengths.longest)
        target_length = shape.target_length
        if target_length is None:
            target_length = lengths.worst_target(length)
        shapes.append(BatchShape(shape.batch_size, length, target_length))
    return OwnBatches(
        sampler="a recorded training",
        ranks=len({step.rank for step in steps}),
        batches=max(1, round(len(batches) / epochs)),
        padded_length=padded_length,
        shapes=shapes,
    )


def _kept(padded_lengths: FloatArray) -> IntArray:
    """Return which batches stand for all: evenly spaced in the order of their padded lengths."""
    count = padded_lengths.size
    places = np.linspace(0, count - 1, min(count, _MOST_SHAPES))
    kept: IntArray = np.argsort(padded_lengths)[places.astype(int)]
    return kept


def _cut(epoch: IntArray, count: int) -> EpochBatches:
    """Return the batches of an epoch, shape (2, examples): the number of its batch, and the example."""
    batches, examples = epoch
    return EpochBatches.in_row(examples, np.bincount(batches), count)
