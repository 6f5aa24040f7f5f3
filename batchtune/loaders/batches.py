"""Describes any batch: tensors and arrays in dicts, lists, tuples, records and objects; DALI's batches among them.

A batch of DALI's has a list of shapes, one for each example.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from batchtune.loaders.base import BatchFacts

# Deeper than any batch; an object may refer to itself.
_MAX_DEPTH = 8
_PLAIN = (str, bytes, bytearray, bool, int, float, complex, type(None))
_NAMED_IN_WORDS = 3
# In a DALI layout: the axis of time, or of the frames of a video.
_TIME = ("t", "T", "F")
# DALI's types are i64 or u8, torch's torch.int64, numpy's int64.
_WHOLE = re.compile(r"^(torch\.)?u?(i|u|int)\d+$")


def leaves(batch: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and arrays of a batch, and its plain values, each with its name: `wav.data`, `0`, `meta.id`.

    A list of plain values is one leaf. Private attributes of objects are left out.
    """
    return _leaves("", batch, _MAX_DEPTH)


def facts_of(batch: Any, examples: int | None = None, *, surplus: int = 0) -> BatchFacts:
    """Describe a batch by the shapes of its tensors.

    - Examples: the expected number `examples`, if the shapes allow it; else the size that most of its tensors and lists
      begin with, vectors first. A list of dicts, or of tensors of different lengths, holds one example in each. The
      last `surplus` do not count.
    - Length: of the longest example in its largest tensor, the `surplus` included: its longest side, or the side that
      the true lengths reach. In a DALI batch: along the axis whose extent differs between examples, or the axis of
      time, or the longest.
    - Total length: of the true lengths, if it has any: a whole number for each example, the largest of them a side, or
      SpeechBrain's relative lengths, named `...len...`.
    """
    named = list(leaves(batch))
    tensors = [(name, value) for name, value in named if is_tensor(value)]
    lengths = _lengths_of_list(batch)
    if lengths:
        examples = len(lengths)
    else:
        examples = _examples(batch, [value for _, value in named], examples)
        lengths = _lengths(tensors, examples)
    facts = BatchFacts(
        examples=None,
        length=max(lengths, default=None),
        total_length=None,
        size_bytes=sum(bytes_of(value) for _, value in tensors),
    )
    if examples is None:
        return facts
    kept = max(0, examples - surplus)
    facts = dataclasses.replace(facts, examples=kept)
    if lengths:
        facts = dataclasses.replace(facts, total_length=sum(lengths[:kept]))
    return facts


def examples_in_largest(batch: Any) -> int | None:
    """Return how many examples the largest tensor of a batch holds, if they are its first side; None without one."""
    tensors = [value for _, value in leaves(batch) if is_tensor(value) and len(value.shape)]
    if not tensors:
        return None
    return _first_side(max(tensors, key=bytes_of))


def words_of(batch: Any) -> str:
    """Say what a batch is by its largest tensors: `32 × 1600 (wav), 32 (lengths)`, `8 × 80 × 23 to 151`."""
    tensors = [(name, value) for name, value in leaves(batch) if is_tensor(value)]
    if not tensors:
        return f"a {type(batch).__name__} without tensors"
    largest = sorted(tensors, key=lambda named: -bytes_of(named[1]))
    words = []
    for name, value in largest[:_NAMED_IN_WORDS]:
        shape = _shape_words(value)
        words.append(f"{shape} ({name})" if name else shape)
    if len(tensors) > _NAMED_IN_WORDS:
        words.append(f"and {len(tensors) - _NAMED_IN_WORDS} more")
    return ", ".join(words)


def digests_of(batch: Any) -> dict[str, str]:
    """Return a hash of each leaf of a batch, by its name: of a tensor's type, shape and bits, or of plain values."""
    return {name: _digest(value) for name, value in leaves(batch)}


def moved(batch: Any, device: str, *, non_blocking: bool) -> Any:
    """Return a batch with its tensors on a torch device: by its own `to` if it has one, else nest by nest."""
    if callable(getattr(batch, "to", None)):
        return batch.to(device, non_blocking=non_blocking)
    if isinstance(batch, Mapping):
        items = {key: moved(value, device, non_blocking=non_blocking) for key, value in batch.items()}
        if type(batch) is dict:
            return items
        return _rebuilt(batch, items)
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
    if _is_ragged(tensor):
        return sum(map(math.prod, tensor.shape)) * int(tensor.dtype.bytes)
    if callable(getattr(tensor, "numel", None)):
        return int(tensor.numel() * tensor.element_size())
    return int(getattr(tensor, "nbytes", 0))


def _leaves(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if is_tensor(value) or isinstance(value, _PLAIN):
        yield name, value
    elif depth:
        if isinstance(value, (list, tuple)) and all(isinstance(item, _PLAIN) for item in value):
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


def _is_ragged(tensor: Any) -> bool:
    return isinstance(tensor.shape, list)


def _first_side(tensor: Any) -> int:
    if _is_ragged(tensor):
        return len(tensor.shape)
    return int(tensor.shape[0])


def _shape_words(tensor: Any) -> str:
    if not _is_ragged(tensor):
        return " × ".join(map(str, tensor.shape or ["a number"]))
    words = [str(len(tensor.shape))]
    for extents in zip(*tensor.shape, strict=True):
        shortest = min(extents)
        longest = max(extents)
        words.append(str(shortest) if shortest == longest else f"{shortest} to {longest}")
    return " × ".join(words)


def _lengths_of_list(batch: Any) -> list[float]:
    """Return the lengths of the examples if the batch is a list of tensors of different lengths; else nothing."""
    if not isinstance(batch, list) or not all(is_tensor(item) and len(item.shape) for item in batch):
        return []
    other_sides = {(tuple(tensor.shape[1:]), str(tensor.dtype)) for tensor in batch}
    lengths = [float(tensor.shape[0]) for tensor in batch]
    if len(other_sides) != 1 or len(set(lengths)) < 2:
        return []
    return lengths


def _examples(batch: Any, values: list[Any], expected: int | None) -> int | None:
    """Return how many examples a batch has, by the sizes of its lists and tensors; None if that is not known."""
    if isinstance(batch, list) and batch and all(map(_is_example, batch)):
        return len(batch)
    sizes: Counter[int] = Counter()
    for value in values:
        if isinstance(value, list):
            sizes[len(value)] += 2
        elif is_tensor(value) and len(value.shape):
            sizes[_first_side(value)] += 2 if len(value.shape) == 1 else 1
    if expected is not None and (not sizes or expected in sizes or max(sizes) > expected):
        return expected  # else `collate_fn` has left examples out
    if not sizes:
        return None
    return sizes.most_common(1)[0][0]


def _is_example(value: Any) -> bool:
    """Return whether an entry of a list is an example, not a column: torch makes a list of columns from tuples."""
    return isinstance(value, Mapping) or (isinstance(value, tuple) and any(map(is_tensor, value)))


def _lengths(tensors: list[tuple[str, Any]], examples: int | None) -> list[float]:
    """Return the length of each example; of one, if it is not known how many there are; nothing without a length."""
    parts = [value for _, value in tensors if len(value.shape) > 1 or _is_ragged(value)]
    if not parts:
        return []
    largest = max(parts, key=bytes_of)
    if _is_ragged(largest):
        return _ragged_lengths(largest)
    sides = [int(side) for side in largest.shape]
    if examples in sides:
        sides.remove(examples)
    longest = float(max(sides))
    if not examples:
        return [longest] if examples is None else []
    for name, value in tensors:
        numbers = _numbers(value, examples)
        if not numbers or min(numbers) < 0:
            continue
        is_whole = _WHOLE.search(str(value.dtype)) is not None
        if is_whole and max(numbers) in sides:
            return numbers
        if not is_whole and "len" in name.lower() and max(numbers) == 1:
            return [longest * number for number in numbers]
    return [longest] * examples


def _ragged_lengths(batch: Any) -> list[float]:
    """Return the length of each example of a DALI batch."""
    extents = list(zip(*batch.shape, strict=True))
    if not extents:
        return []
    layout = batch.layout or ""
    vary = [axis for axis, values in enumerate(extents) if min(values) != max(values)]
    by_time = [layout.index(letter) for letter in _TIME if letter in layout]
    axis = max(vary or by_time[:1] or range(len(extents)), key=lambda axis: max(extents[axis]))
    return [float(extent) for extent in extents[axis]]


def _numbers(tensor: Any, examples: int) -> list[float]:
    """Return the numbers of a tensor that holds one for each example; else nothing."""
    if _is_ragged(tensor):
        if [math.prod(shape) for shape in tensor.shape] != [1] * examples:
            return []
        return [float(number.item()) for number in tensor.cpu().tensors]
    if tuple(tensor.shape) != (examples,):
        return []
    return [float(number) for number in _array(tensor).tolist()]


def _array(tensor: Any) -> Any:
    import numpy as np

    if callable(getattr(tensor, "evaluate", None)):
        return np.asarray(tensor.cpu().evaluate())
    if callable(getattr(tensor, "detach", None)):
        return tensor.detach().cpu()
    return np.asarray(tensor)


def _digest(value: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    if not is_tensor(value):
        digest.update(repr(value).encode("utf-8", "backslashreplace"))
        return digest.hexdigest()
    digest.update(str(value.dtype).encode())
    tensors = value.cpu().evaluate().tensors if _is_ragged(value) else [value]
    for tensor in tensors:
        digest.update(f" {tuple(tensor.shape)}".encode())
        digest.update(_bits(_array(tensor)))
    return digest.hexdigest()


def _bits(array: Any) -> Any:
    """Return the bytes of an array, or of a torch tensor on the CPU."""
    if not callable(getattr(array, "detach", None)):
        if array.dtype == object:
            return repr(array.tolist()).encode("utf-8", "backslashreplace")
        return array.tobytes()
    import torch

    if array.layout is not torch.strided:
        array = array.to_dense()
    return array.contiguous().reshape(-1).view(torch.uint8).numpy()
