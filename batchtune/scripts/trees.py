"""Takes a training script's examples and batches apart into leaves, and puts copies together from other leaves.

A path names a leaf: `sig.data`, `0`, or nothing where the tree is a leaf itself.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from batchtune.lengths import AnyArray, IntArray
from batchtune.scripts.relations import Seen

ARRAYS = (torch.Tensor, np.ndarray)
_PLAIN = (Real, str, bytes, type(None))


def children(tree: Any) -> dict[Any, Any] | None:
    """Return what a container holds, by key; None for a leaf: an array, a number, a text, a list of numbers.

    Other objects are containers if a public attribute is an array or a tuple of arrays: an image or a tokenizer is not.
    """
    if isinstance(tree, Mapping):
        return dict(tree)
    if isinstance(tree, tuple):
        return dict(zip(getattr(tree, "_fields", range(len(tree))), tree, strict=True))
    if isinstance(tree, list):
        if all(isinstance(item, _PLAIN) for item in tree):
            return None
        return dict(enumerate(tree))
    attributes = getattr(tree, "__dict__", {})
    public = {name: attributes[name] for name in attributes if name[0] != "_"}
    if isinstance(tree, ARRAYS) or not any(map(_holds_arrays, public.values())):
        return None
    return public


def _holds_arrays(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(isinstance(item, ARRAYS) for item in value)
    return isinstance(value, ARRAYS)


def flatten(
    trees: Sequence[Any], stops: Collection[str] = (), path: str = ""
) -> dict[str, list[Any]]:
    """Return the leaves of similar trees by path: one of each tree, None where a tree has no such key.

    Lists whose number of items differs from tree to tree are leaves, and so is what lies at a path in `stops`.
    """
    inner = [children(tree) for tree in trees]
    contents = [held for held in inner if held is not None]
    keys: dict[Any, Any] = {}
    for held in contents:
        keys.update(held)
    uneven = any(len(held) < len(keys) for held in contents)
    ragged = uneven and isinstance(trees[0], (list, tuple))
    if len(contents) < len(trees) or ragged or path in stops:
        return {path: list(trees)}
    leaves: dict[str, list[Any]] = {}
    for key in keys:
        below = [held.get(key) for held in contents]
        leaves |= flatten(below, stops, _joined(path, key))
    return leaves


def leaves_of(tree: Any, stops: Collection[str] = ()) -> dict[str, Any]:
    """Return the leaves of one tree by path, as `flatten` does."""
    return {path: leaf for path, (leaf,) in flatten([tree], stops).items()}


def _joined(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def rebuilt(tree: Any, leaves: Mapping[str, Any], path: str = "") -> Any:
    """Return a copy of a tree with other leaves at some paths; arrays are shared, containers and lists are not."""
    if path in leaves:
        return leaves[path]
    held = children(tree)
    if held is None:
        return copy.copy(tree) if isinstance(tree, list) else tree
    for key, child in held.items():
        held[key] = rebuilt(child, leaves, _joined(path, key))
    if isinstance(tree, tuple):
        return getattr(tree, "_make", tuple)(held.values())
    if isinstance(tree, list):
        return list(held.values())
    clone = copy.copy(tree)
    if isinstance(tree, Mapping):
        clone.update(held)
    else:
        vars(clone).update(held)  # dataclasses may be frozen
    return clone


def sizes(leaf: Any) -> tuple[int, ...]:
    """Return the shape of an array, the number of items of a list, and nothing for what has no axis."""
    if isinstance(leaf, ARRAYS):
        return tuple(leaf.shape)
    return (len(leaf),) if isinstance(leaf, (list, tuple)) else ()


def numeric(leaf: Any) -> AnyArray | None:
    """Return the values of a leaf of numbers as an array of its shape; None for any other, and for an empty one."""
    if isinstance(leaf, (list, tuple)) and not all(isinstance(x, Real) for x in leaf):
        return None
    if isinstance(leaf, torch.Tensor):
        leaf = leaf.detach().cpu().double()  # NumPy has no bfloat16
    values = np.asarray(leaf)
    return values if values.dtype.kind in "iuf" and values.size else None


def measures(leaf: Any) -> dict[int | str, float]:
    """Return what may follow a length: the size of each axis, the longest item (`inner`), the largest `value`."""
    found: dict[int | str, float] = dict(enumerate(sizes(leaf)))
    values = numeric(leaf)
    if values is not None:
        found["value"] = float(values.max())
    elif isinstance(leaf, (list, tuple)) and any(map(sizes, leaf)):
        found["inner"] = max(sizes(item)[0] for item in leaf if sizes(item))
    return found


def measured(leaves: Mapping[str, Sequence[Any]]) -> Seen:
    """Return the measures of each leaf in all trees, in order; those that a tree lacks are left out.

    So are the values of flags and masks, which are nothing but 0 and 1: they are no lengths.
    """
    found: Seen = {}
    for path, group in leaves.items():
        each = [measures(leaf) for leaf in group]
        for key in each[0]:
            if not all(key in one for one in each):
                continue
            numbers = np.array([one[key] for one in each], float)
            if key != "value" or not np.isin(numbers, (0, 1)).all():
                found[path, key] = numbers
    return found


def taken(leaf: Any, axis: int, index: npt.NDArray[np.int64]) -> Any:
    """Return a copy of the leaf with these entries of an axis."""
    if isinstance(leaf, ARRAYS):
        return leaf[(slice(None),) * axis + (index,)]
    return type(leaf)(leaf[number] for number in index)


def resized(leaf: Any, axis: int, size: int) -> Any:
    """Return a leaf with another size along an axis: cropped, or repeated."""
    return taken(leaf, axis, np.arange(size) % sizes(leaf)[axis])


def stretched(leaf: Any, axis: int, size: int) -> Any:
    """Return a leaf with another size along an axis: each entry as many times as it takes, so that shares stay."""
    count = sizes(leaf)[axis]
    return taken(leaf, axis, np.arange(size) * count // size)


def joined(leaf: Any, other: Any) -> Any:
    """Return the rows of two leaves of the same type as one leaf."""
    if isinstance(leaf, torch.Tensor):
        return torch.cat([leaf, other])
    if isinstance(leaf, np.ndarray):
        return np.concatenate([leaf, other])
    return leaf + other


def with_values(leaf: Any, values: npt.ArrayLike) -> Any:
    """Return other values, broadcast to the leaf's shape, as the type that the leaf has."""
    wanted = np.broadcast_to(values, sizes(leaf))
    if isinstance(leaf, torch.Tensor):
        return torch.tensor(wanted).to(leaf)
    wanted = wanted.astype(np.asarray(leaf).dtype)
    return wanted if isinstance(leaf, np.ndarray) else wanted.tolist()


def padding_of_rows(leaf: Any, axis: int) -> npt.NDArray[np.float64]:
    """Return which share of each row of a batch's leaf is padding along an axis: equal values at one end.

    A row of one value has none: it is a full mask.
    """
    values = np.moveaxis(np.asarray(numeric(leaf)), axis, 1)
    rows = values.reshape(*values.shape[:2], -1)
    is_as_next = (rows[:, 1:] == rows[:, :-1]).all(axis=2)
    at_start = is_as_next.cumprod(axis=1).sum(axis=1)
    at_end = is_as_next[:, ::-1].cumprod(axis=1).sum(axis=1)
    longer = np.maximum(at_start, at_end)
    shares: npt.NDArray[np.float64] = longer / rows.shape[1]
    shares[is_as_next.all(axis=1)] = 0
    return shares


def longest_row(leaf: Any) -> Any:
    """Return the row of a batch's leaf that has least padding, as a batch of one.

    Padding is zeros or -100, on either side. A row of one value has none: it is a full mask, of either meaning.
    """
    values = numeric(leaf)
    if values is None:
        score = np.array([sum(sizes(item)[:1]) for item in leaf])
    elif values.ndim == 1:
        score = values
    else:
        rows = values.reshape(len(values), -1)
        padding = np.isin(rows, (0, -100)).sum(1)
        score = -np.where(np.ptp(rows, axis=1) == 0, 0, padding)
    return taken(leaf, 0, np.array([np.argmax(score)]))


# Reads the row of a packed batch: the lengths of the sequences that stand in it one after the other.

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
