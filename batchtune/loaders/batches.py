"""Describes any batch: tensors and arrays in dicts, lists, tuples and objects; DALI's batches among them.

A batch of DALI's has a list of shapes, one for each example.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from batchtune.loaders.protocol import BatchFacts

# Deeper than any batch; an object may refer to itself.
_MAX_DEPTH = 8
_PLAIN = (str, bytes, bytearray, bool, int, float, complex, type(None))


def leaves(
    batch: Any, name: str = "", depth: int = _MAX_DEPTH
) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and arrays of a batch, and its plain values, each with its name: `wav.data`, `0`, `meta.id`.

    A list of plain values is one leaf. Private attributes of objects are left out.
    """
    if _is_tensor(batch) or isinstance(batch, _PLAIN):
        yield name, batch
    elif isinstance(batch, (list, tuple)) and all(
        isinstance(item, _PLAIN) for item in batch
    ):
        yield name, list(batch)
    elif depth:
        for key, inner in _members(batch):
            yield from leaves(inner, f"{name}.{key}" if name else str(key), depth - 1)


def facts_of(batch: Any, limit: int | None = None) -> BatchFacts:
    """Describe a batch by the shapes of its tensors; it holds no more examples than `limit`.

    The number of examples is the size that most of its tensors and lists begin with. The length of each is the longest
    side of the largest tensor that is not this number; in a DALI batch each example has its own.
    """
    values = [value for _, value in leaves(batch)]
    tensors = [value for value in values if _is_tensor(value)]
    examples = _examples(batch, values)
    if limit is not None:
        examples = limit if examples is None else min(limit, examples)
    total_length = None
    if tensors and examples is not None:
        lengths = _lengths(max(tensors, key=_bytes_of), examples)
        total_length = sum(lengths[:examples]) or None
    return BatchFacts(
        examples=examples,
        total_length=total_length,
        size_bytes=sum(map(_bytes_of, tensors)),
    )


def words_of(batch: Any) -> str:
    """Say what a batch is by its largest tensor: `32 × 1600 (wav)`; in a DALI batch, up to which shape its examples."""
    tensors = [(name, value) for name, value in leaves(batch) if _is_tensor(value)]
    if not tensors:
        return f"a {type(batch).__name__} without tensors"
    name, largest = max(tensors, key=lambda named: _bytes_of(named[1]))
    sides = list(largest.shape)
    if _is_ragged(largest):
        sides = [len(largest.shape), *map(max, zip(*largest.shape, strict=True))]
    shape = " × ".join(map(str, sides)) or "a number"
    return f"{shape} ({name})" if name else shape


def digests_of(batch: Any) -> dict[str, str]:
    """Return a hash of each leaf of a batch, by its name: of a tensor's type, shape and bits, or of plain values."""
    return {name: _digest(value) for name, value in leaves(batch)}


def moved(batch: Any, device: str, *, non_blocking: bool) -> Any:
    """Return a batch with all that has a method `to` on a torch device: the batch itself, or what is nested in it."""
    from torch.utils._pytree import tree_map

    def move(leaf: Any) -> Any:
        if callable(getattr(leaf, "to", None)):
            return leaf.to(device, non_blocking=non_blocking)
        return leaf

    return tree_map(move, batch)


def _is_tensor(value: Any) -> bool:
    """Return whether a leaf is a tensor or an array, of whatever library."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _is_ragged(tensor: Any) -> bool:
    return isinstance(tensor.shape, list)


def _bytes_of(tensor: Any) -> int:
    if _is_ragged(tensor):
        return sum(map(math.prod, tensor.shape)) * int(tensor.dtype.bytes)
    return int(getattr(tensor, "nbytes", 0))


def _members(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the parts of a mapping, a record, a list or any other object, each with its name."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    if callable(value):  # a class, for example
        return ()
    return [
        (key, inner)
        for key, inner in getattr(value, "__dict__", {}).items()
        if not key.startswith("_")
    ]


def _examples(batch: Any, values: list[Any]) -> int | None:
    """Return how many examples a batch has: the entries of a list of dicts, or the most frequent first side."""
    if (
        isinstance(batch, list)
        and batch
        and all(isinstance(item, Mapping) for item in batch)
    ):
        return len(batch)
    sizes: Counter[int] = Counter()
    for value in values:
        if isinstance(value, list):
            sizes[len(value)] += 1
        elif _is_tensor(value) and len(value.shape):
            sizes[len(value.shape) if _is_ragged(value) else int(value.shape[0])] += 1
    return max(sizes, key=lambda size: (sizes[size], -size), default=None)


def _lengths(tensor: Any, examples: int) -> list[float]:
    """Return the length of each example of a tensor; nothing without a length."""
    if _is_ragged(tensor):
        axes = zip(*tensor.shape, strict=True)
        return list(
            max(
                axes,
                key=lambda extents: (max(extents) - min(extents), max(extents)),
                default=[],
            )
        )
    sides = [int(side) for side in tensor.shape]
    if examples in sides:
        sides.remove(examples)
    return [max(sides, default=0)] * examples


def _digest(value: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    if not _is_tensor(value):
        digest.update(repr(value).encode("utf-8", "backslashreplace"))
        return digest.hexdigest()
    digest.update(str(value.dtype).encode())
    tensors = value.cpu().evaluate().tensors if _is_ragged(value) else [value]
    for tensor in tensors:
        digest.update(f" {tuple(tensor.shape)}".encode())
        digest.update(_bits(tensor))
    return digest.hexdigest()


def _bits(tensor: Any) -> bytes:
    """Return the bytes of a torch or DALI tensor, or of an array."""
    import numpy as np

    if callable(getattr(tensor, "evaluate", None)):  # DALI's
        tensor = tensor.cpu().evaluate()
    if callable(getattr(tensor, "detach", None)):
        import torch

        tensor = tensor.detach().cpu()
        if tensor.layout is not torch.strided:
            tensor = tensor.to_dense()
        tensor = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    array = np.asarray(tensor)
    if array.dtype == object:
        return repr(array.tolist()).encode("utf-8", "backslashreplace")
    return array.tobytes()
