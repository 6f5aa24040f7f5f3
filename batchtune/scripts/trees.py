"""Takes a training script's examples and batches apart into leaves, and puts copies together from other leaves.

A path names a leaf: `sig.data`, `0`, or nothing where the tree is a leaf itself.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from batchtune.scripts.relations import Seen

ARRAYS = (torch.Tensor, np.ndarray)
_PLAIN = (Real, str, bytes, type(None))


def children(tree: Any) -> dict[Any, Any] | None:
    """Return what a container holds, by key; None for a leaf: an array, a number, a text, a list of numbers."""
    if isinstance(tree, Mapping):
        return dict(tree)
    if isinstance(tree, tuple):
        return dict(zip(getattr(tree, "_fields", range(len(tree))), tree, strict=True))
    if isinstance(tree, list):
        if all(isinstance(item, _PLAIN) for item in tree):
            return None
        return dict(enumerate(tree))
    if isinstance(tree, (*ARRAYS, type)):
        return None
    if dataclasses.is_dataclass(tree):
        names = [field.name for field in dataclasses.fields(tree)]
        return {name: getattr(tree, name) for name in names}
    attributes = getattr(tree, "__dict__", {})
    if any(map(_holds_arrays, attributes.values())):
        return dict(attributes)
    return None


def _holds_arrays(value: Any) -> bool:
    """Return whether an attribute makes its object a batch: an image or a tokenizer has none of these."""
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
        leaves |= flatten(below, stops, joined(path, key))
    return leaves


def joined(path: str, key: Any) -> str:
    """Return the path of what a container holds at a key."""
    return f"{path}.{key}" if path else str(key)


def rebuilt(tree: Any, leaves: Mapping[str, Any], path: str = "") -> Any:
    """Return a copy of a tree with other leaves at some paths; arrays are shared, containers and lists are not."""
    if path in leaves:
        return leaves[path]
    held = children(tree)
    if held is None:
        return list(tree) if isinstance(tree, list) else tree
    made = {
        key: rebuilt(child, leaves, joined(path, key)) for key, child in held.items()
    }
    if isinstance(tree, tuple):
        return getattr(tree, "_make", tuple)(made.values())
    if isinstance(tree, list):
        return list(made.values())
    clone = copy.copy(tree)
    for key, value in made.items():
        if isinstance(tree, Mapping):
            clone[key] = value
        else:
            object.__setattr__(clone, key, value)  # dataclasses may be frozen
    return clone


def sizes(leaf: Any) -> tuple[int, ...]:
    """Return the shape of an array, the number of items of a list, and nothing for what has no axis."""
    if isinstance(leaf, ARRAYS):
        return tuple(leaf.shape)
    if isinstance(leaf, (list, tuple)):
        return (len(leaf),)
    return ()


def numeric(leaf: Any) -> npt.NDArray[Any] | None:
    """Return the values of a leaf of numbers as an array of its shape; None for any other, and for an empty one."""
    if isinstance(leaf, list) and not all(isinstance(item, Real) for item in leaf):
        return None
    values = _array(leaf)
    return values if values.dtype.kind in "iuf" and values.size else None


def is_text(leaf: Any) -> bool:
    """Return whether a leaf is a list of texts: the words of a transcript are no length that a model sees."""
    return isinstance(leaf, (list, tuple)) and any(isinstance(x, str) for x in leaf)


def _array(leaf: Any) -> npt.NDArray[Any]:
    if isinstance(leaf, torch.Tensor):
        leaf = leaf.detach().cpu()
        if leaf.is_floating_point():
            leaf = leaf.double()  # NumPy has no bfloat16
    return np.asarray(leaf)


def measures(leaf: Any) -> dict[int | str, float]:
    """Return what may follow a length: the size of each axis, the longest item (`inner`), the largest `value`."""
    found: dict[int | str, float] = dict(enumerate(sizes(leaf)))
    if isinstance(leaf, (list, tuple)) and any(map(sizes, leaf)):
        found["inner"] = max(sizes(item)[0] for item in leaf if sizes(item))
    else:
        values = numeric(leaf)
        if values is not None:
            found["value"] = float(values.max())
    return found


def measured(leaves: Mapping[str, Sequence[Any]]) -> Seen:
    """Return the measures of each leaf in all trees, in order; those that a tree lacks are left out."""
    found: Seen = {}
    for path, group in leaves.items():
        each = [measures(leaf) for leaf in group]
        for key in each[0]:
            if all(key in one for one in each):
                found[path, key] = np.array([one[key] for one in each], float)
    return found


def sizes_of(leaves: Mapping[str, Sequence[Any]]) -> str:
    """Describe trees for a message by the sizes of the first: `sig [3, 8000]; tokens [3, 20]`."""
    first = {path: sizes(group[0]) for path, group in leaves.items()}
    return "; ".join(f"{path} {list(size)}" for path, size in first.items() if size)


def taken(leaf: Any, axis: int, index: npt.NDArray[np.int64]) -> Any:
    """Return a copy of the leaf with these entries of an axis."""
    if isinstance(leaf, torch.Tensor):
        return leaf.index_select(axis, torch.from_numpy(index).to(leaf.device))
    if isinstance(leaf, np.ndarray):
        return np.take(leaf, index, axis)
    return type(leaf)(leaf[number] for number in index)


def resized(leaf: Any, axis: int, size: int) -> Any:
    """Return a leaf with another size along an axis: cropped, or repeated; positions go on counting."""
    before = sizes(leaf)[axis]
    made = taken(leaf, axis, np.arange(size) % before)
    values = numeric(leaf)
    if values is None or size <= before or before < 3 or axis != values.ndim - 1:
        return made
    if (np.diff(values) != 1).any():
        return made
    return with_values(made, values[..., :1] + np.arange(size))


def with_values(leaf: Any, values: npt.ArrayLike) -> Any:
    """Return other values, broadcast to the leaf's shape, as the type that the leaf has."""
    wanted = np.broadcast_to(values, sizes(leaf)).copy()
    if isinstance(leaf, torch.Tensor):
        return torch.from_numpy(wanted).to(leaf)
    if isinstance(leaf, np.ndarray):
        return wanted.astype(leaf.dtype)
    if isinstance(leaf, (list, tuple)):
        kind = type(leaf[0])
        return type(leaf)(kind(value) for value in wanted)
    return type(leaf)(wanted.item())


@dataclasses.dataclass(frozen=True)
class Padding:
    """What a leaf's rows are padded with along an axis, and on which side."""

    axis: int
    value: float
    left: bool

    def counts(self, leaf: Any) -> list[int]:
        """Return how much of each row is padding."""
        frames = _frames(leaf, self.axis, self.left)
        return [_trailing(row, self.value) for row in frames]


def padding_of(leaves: Sequence[Any], axis: int) -> Padding | None:
    """Return the padding along an axis: how rows end or begin that do so with one value several times.

    Some rows must have none: labels all begin with a prompt that is left out, and masks of left-padded rows end alike.
    """
    for left in (False, True):
        ends: Counter[float] = Counter()
        for leaf in leaves:
            for row in _frames(leaf, axis, left):
                # A row of one value is a full mask.
                if 2 <= _trailing(row, row[-1]) < len(row):
                    ends[row[-1]] += 1
        if ends:
            padding = Padding(axis, ends.most_common(1)[0][0], left)
            if any(0 in padding.counts(leaf) for leaf in leaves):
                return padding
    return None


def longest_row(leaf: Any, padding: Padding | None) -> Any:
    """Return the row of a batch's leaf that is padded least, without its padding: a batch of one."""
    row = 0
    values = numeric(leaf)
    if padding is not None:
        counts = padding.counts(leaf)
        row = int(np.argmin(counts))
        kept = np.arange(sizes(leaf)[padding.axis] - counts[row])
        if padding.left:
            kept += counts[row]
        if len(kept):
            leaf = taken(leaf, padding.axis, kept)
    elif isinstance(leaf, (list, tuple)) and values is None:
        row = int(np.argmax([sum(sizes(item)[:1]) for item in leaf]))
    elif values is not None and values.ndim == 1:
        row = int(np.argmax(values))
    return taken(leaf, 0, np.array([row]))


def _frames(leaf: Any, axis: int, left: bool) -> npt.NDArray[Any]:
    """Return a number for each row and entry of an axis, summed over all other axes; from the end if `left`."""
    values = np.moveaxis(_array(leaf), axis, 1)
    frames = values.reshape(*values.shape[:2], -1).sum(-1)
    return np.flip(frames, 1) if left else frames


def _trailing(frames: npt.NDArray[Any], value: float) -> int:
    """Return how often a value stands at the end of a row."""
    others = np.flatnonzero(frames != value)
    return len(frames) - 1 - int(others[-1]) if len(others) else len(frames)
