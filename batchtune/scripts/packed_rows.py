"""Reads the row of a packed batch: the lengths of the sequences that stand in it one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from batchtune.lengths import IntArray
from batchtune.scripts.trees import sizes

# Parts of the names of leaves that have the number of each token's sequence, and its position there.
_NUMBERS = ("seq_id", "sequence_id", "doc_id", "document_id")
_POSITIONS = ("position", "pos_id")


def packed_row(batch: Mapping[str, Any]) -> IntArray | None:
    """Return the lengths of the sequences in a batch, by its offsets, its positions or its numbers of sequences.

    `batch` holds its leaves by path. None if it shows none of these. Padding at the end counts as further sequences, or
    is part of the last one, as it is to the model. Nothing is read from a GPU, which would have to be waited for.
    """
    for path in batch:
        if is_offsets(path, batch):
            lengths = np.diff(_whole_numbers(batch[path]))
            return lengths[lengths > 0]
    for path, leaf in batch.items():
        starts = _starts(path, leaf)
        if starts is not None:
            return np.diff(starts, append=max(sizes(leaf)))
    return None


def hides_row(batch: Mapping[str, Any]) -> bool:
    """Return whether a batch may be packed, and what would show its sequences is on a GPU."""
    for path, leaf in batch.items():
        is_row = "position_ids" in path and sizes(leaf)[:1] == (1,)
        if (is_row or "cu_seq" in path) and not _is_at_hand(leaf):
            return True
    return False


def is_offsets(path: str, batch: Mapping[str, Any]) -> bool:
    """Return whether a leaf has the bounds of sequences, from 0 upwards to the tokens of another leaf."""
    values = _whole_numbers(batch[path])
    if values.size < 2 or values[0] != 0 or (np.diff(values) < 0).any():
        return False
    long_axes = [[size for size in sizes(leaf) if size > 1] for leaf in batch.values()]
    return any(axes[:1] == [values[-1]] for axes in long_axes)


def _starts(path: str, leaf: Any) -> IntArray | None:
    """Return where sequences begin by a leaf that has the position of each token in its sequence, or its number."""
    name = path.rpartition(".")[2]
    values = _whole_numbers(leaf)
    is_number = any(word in name for word in _NUMBERS)
    is_position = len(sizes(leaf)) == 2 or any(word in name for word in _POSITIONS)
    if not (values.size and (is_number or is_position)):
        return None
    steps = np.diff(values)
    starts = np.append(0, np.flatnonzero(steps != (not is_number)) + 1)
    begin = values[0] + is_number * np.arange(starts.size)
    if starts.size == values.size or (values[starts] != begin).any():
        return None
    return starts


def _whole_numbers(leaf: Any) -> IntArray:
    """Return the integers of a leaf with a single row; none of any other, nor of one on a GPU."""
    shape = sizes(leaf)
    is_one_row = shape != () and shape[:-1] in ((), (1,))
    is_whole = "int" in str(getattr(leaf, "dtype", "int"))
    if isinstance(leaf, (list, tuple)):
        is_whole = all(type(item) is int for item in leaf)
    if not (is_one_row and is_whole and _is_at_hand(leaf)):
        return np.empty(0, np.int64)
    return np.asarray(leaf).ravel().astype(np.int64)


def _is_at_hand(leaf: Any) -> bool:
    return str(getattr(leaf, "device", "cpu")) == "cpu"


def batches_of(leaves: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yield the leaves of each batch by path."""
    for group in zip(*leaves.values(), strict=True):
        yield dict(zip(leaves, group, strict=True))
