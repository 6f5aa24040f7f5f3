"""Describes any batch: tensors and arrays in dicts, lists, tuples, records and objects."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from batchtune.loaders.base import BatchFacts

# Deeper than any batch; an object may well refer to itself.
_DEEPEST = 8
_PLAIN = (str, bytes, bytearray, bool, int, float, complex, type(None))
_NAMED_IN_WORDS = 3


def leaves(batch: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and arrays of a batch, and its plain values, each with its name: `wav.data`, `0`, `meta.id`.

    A list of plain values is one leaf. Private attributes of objects are left out.
    """
    return _leaves("", batch, _DEEPEST)


def facts_of(batch: Any, examples: int | None = None) -> BatchFacts:
    """Describe a batch by the shapes of its tensors. `examples`: how many it should hold; None: not known.

    - Examples: the size that most of its tensors and lists begin with, vectors first; a list of dicts, or of tensors of
      different lengths, holds one example in each.
    - Length: the longest side of its largest tensor, examples apart.
    - Total length: by a vector of true lengths, if it has one: whole numbers whose largest is the length, or
      SpeechBrain's relative lengths, named `...len...`.
    """
    found = list(leaves(batch))
    tensors = [(name, value) for name, value in found if is_tensor(value)]
    size_bytes = sum(bytes_of(value) for _, value in tensors)
    if lengths := _ragged(batch):
        return BatchFacts(examples=len(lengths), length=max(lengths), total_length=sum(lengths), size_bytes=size_bytes)
    examples = _examples(batch, found, examples)
    length = _length(tensors, examples)
    total = None if length is None or examples is None else _true_total(tensors, examples, length)
    if total is None and length is not None and examples is not None:
        total = length * examples
    return BatchFacts(examples=examples, length=length, total_length=total, size_bytes=size_bytes)


def words_of(batch: Any) -> str:
    """Say what a batch is by its largest tensors: `32 × 1600 (wav), 32 (lengths)`."""
    tensors = [(name, value) for name, value in leaves(batch) if is_tensor(value)]
    if not tensors:
        return f"a {type(batch).__name__} without tensors"
    largest = sorted(tensors, key=lambda named: -bytes_of(named[1]))
    words = [
        " × ".join(map(str, value.shape or ["a number"])) + (f" ({name})" if name else "")
        for name, value in largest[:_NAMED_IN_WORDS]
    ]
    if len(tensors) > _NAMED_IN_WORDS:
        words.append(f"and {len(tensors) - _NAMED_IN_WORDS} more")
    return ", ".join(words)


def digests_of(batch: Any) -> dict[str, str]:
    """Return a hash of each leaf of a batch: of a tensor's type, shape and bits, or of the plain values."""
    return {name: _digest(value) for name, value in leaves(batch)}


def moved(batch: Any, device: str, *, non_blocking: bool) -> Any:
    """Return a batch with its tensors on a torch device: by its own `to` if it has one, else nest by nest."""
    if callable(getattr(batch, "to", None)):
        return batch.to(device, non_blocking=non_blocking)
    if isinstance(batch, Mapping):
        items = {key: moved(value, device, non_blocking=non_blocking) for key, value in batch.items()}
        return items if type(batch) is dict else _rebuilt(batch, items)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(value, device, non_blocking=non_blocking) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)([moved(value, device, non_blocking=non_blocking) for value in batch])
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [field.name for field in dataclasses.fields(batch) if field.init]
        values = {name: moved(getattr(batch, name), device, non_blocking=non_blocking) for name in names}
        return dataclasses.replace(batch, **values)
    return batch


def is_tensor(value: Any) -> bool:
    """Return whether a leaf is a tensor or an array, of whatever library."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def bytes_of(tensor: Any) -> int:
    """Return the bytes of a tensor or an array."""
    if callable(getattr(tensor, "numel", None)):
        return int(tensor.numel() * tensor.element_size())
    return int(getattr(tensor, "nbytes", 0))


def _leaves(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if is_tensor(value) or isinstance(value, _PLAIN):
        yield name, value
    elif depth:
        if isinstance(value, (list, tuple)) and all(isinstance(one, _PLAIN) for one in value):
            yield name, list(value)
            return
        for key, inner in _members(value):
            yield from _leaves(f"{name}.{key}" if name else str(key), inner, depth - 1)


def _members(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    elif isinstance(value, (list, tuple)):
        yield from enumerate(value)
    elif dataclasses.is_dataclass(value):
        yield from ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    elif not isinstance(value, type) and not callable(value):
        yield from ((key, inner) for key, inner in getattr(value, "__dict__", {}).items() if not key.startswith("_"))


def _rebuilt(batch: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a mapping of the same class, or where that can't be made from its items alone, a dict."""
    try:
        return type(batch)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def _ragged(batch: Any) -> list[int]:
    """Return the lengths of the examples if the batch is a list of tensors of different lengths; else nothing."""
    if not (isinstance(batch, list) and len(batch) > 1 and all(is_tensor(one) and len(one.shape) for one in batch)):
        return []
    shapes = [tuple(one.shape) for one in batch]
    alike = len({shape[1:] for shape in shapes}) == 1 and len({str(one.dtype) for one in batch}) == 1
    return [int(shape[0]) for shape in shapes] if alike and len({shape[0] for shape in shapes}) > 1 else []


def _examples(batch: Any, found: list[tuple[str, Any]], expected: int | None) -> int | None:
    if isinstance(batch, list) and batch and all(map(_is_example, batch)):
        return len(batch)
    sizes: Counter[int] = Counter()
    for _, value in found:
        if isinstance(value, list):
            sizes[len(value)] += 2
        elif is_tensor(value) and len(value.shape):
            sizes[int(value.shape[0])] += 2 if len(value.shape) == 1 else 1
    if expected is not None and (not sizes or expected in sizes or max(sizes) > expected):
        return expected  # else `collate_fn` has left examples out
    return sizes.most_common(1)[0][0] if sizes else None


def _is_example(value: Any) -> bool:
    """Return whether an entry of a list is an example, not a column: torch makes a list of columns from tuples."""
    return isinstance(value, Mapping) or (isinstance(value, tuple) and any(map(is_tensor, value)))


def _length(tensors: list[tuple[str, Any]], examples: int | None) -> float | None:
    large = [value for _, value in tensors if len(value.shape) > 1]
    if not large:
        return None
    sides = [int(side) for side in max(large, key=bytes_of).shape]
    if examples in sides:
        sides.remove(examples)
    return float(max(sides))


def _true_total(tensors: list[tuple[str, Any]], examples: int, length: float) -> float | None:
    for name, value in tensors:
        if tuple(value.shape) != (examples,) or not examples:
            continue
        largest = float(value.max())
        if "float" not in str(value.dtype):
            if largest == length and float(value.min()) >= 0:
                return float(value.sum())
        elif "len" in name.lower() and largest == 1 and float(value.min()) >= 0:
            return float(value.sum()) * length
    return None


def _digest(value: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    if not is_tensor(value):
        digest.update(repr(value).encode("utf-8", "backslashreplace"))
        return digest.hexdigest()
    digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
    if callable(getattr(value, "detach", None)):
        import torch

        value = value.detach().cpu()
        if value.layout is not torch.strided:
            value = value.to_dense()
        value = value.contiguous().reshape(-1).view(torch.uint8).numpy()
    elif value.dtype == object:  # an array of Python objects
        value = repr(value.tolist()).encode("utf-8", "backslashreplace")
    else:
        value = value.tobytes()
    digest.update(value)
    return digest.hexdigest()
