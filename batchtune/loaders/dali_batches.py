"""Describes batches that hold DALI's own, whose examples have each its own shape, beside tensors and arrays."""

from __future__ import annotations

import hashlib
import math
import re
from typing import Any

from batchtune.loaders.base import BatchFacts
from batchtune.loaders.batches import bytes_of, is_tensor, leaves

# Of a DALI layout: the axis along which time goes on, or frames of a video.
_TIME = ("t", "T", "F")
# DALI's types are i64 or u8, torch's torch.int64, numpy's int64.
_WHOLE = re.compile(r"^(torch\.)?u?(i|u|int)\d+$")


class DaliBatch:
    """A batch as the user's function yields it: DALI batches and tensors, torch tensors, arrays, and nests of them."""

    def __init__(self, ndd: Any, batch: Any) -> None:
        self._ndd, self.batch = ndd, batch
        self._leaves = list(leaves(batch))

    def finish(self) -> None:
        """Wait for the operators that make it; a stream of a GPU may still be busy."""
        for _, value in self._leaves:
            if isinstance(value, (self._ndd.Batch, self._ndd.Tensor)):
                value.evaluate()

    @property
    def examples(self) -> int | None:
        """How many examples it holds: those of its largest part."""
        if (main := self._main()) is None:
            return None
        shape = main[1].shape
        return len(shape) if self._is_ragged(main[1]) else int(shape[0])

    def facts(self, surplus: int) -> BatchFacts:
        """Describe it; its last `surplus` examples don't count, though the longest length is that of all.

        Lengths are those of its largest part. In a DALI batch: along the axis whose extent differs between examples,
        or else time by its layout, or else the longest. In a tensor: as in `_dense_lengths`.
        """
        size_bytes = sum(map(self._bytes, (value for _, value in self._leaves)))
        examples = self.examples
        if examples is None:
            return BatchFacts(examples=None, length=None, total_length=None, size_bytes=size_bytes)
        main = self._main()
        assert main is not None
        lengths = _ragged_lengths(main[1]) if self._is_ragged(main[1]) else self._dense_lengths(main[1], examples)
        kept = max(0, examples - surplus)
        return BatchFacts(
            examples=kept,
            length=float(max(lengths)) if lengths else None,
            total_length=float(sum(lengths[:kept])) if lengths else None,
            size_bytes=size_bytes,
        )

    def words(self) -> str:
        """Say what it is: `8 × 80 × 23 to 151 (mel), 8 (lengths)`."""
        parts = [value for value in self._leaves if is_tensor(value[1])]
        if not parts:
            return f"a {type(self.batch).__name__} without tensors"
        parts.sort(key=lambda named: -self._bytes(named[1]))
        words = [self._shape_words(value) + (f" ({name})" if name else "") for name, value in parts[:3]]
        return ", ".join(words + ([f"and {len(parts) - 3} more"] if len(parts) > 3 else []))

    def digests(self) -> dict[str, str]:
        """Return a hash of each part, by its name: of the type, and of each example's shape and bits."""
        return {name: self._digest(value) for name, value in self._leaves}

    def _main(self) -> tuple[str, Any] | None:
        """Return the largest part that may hold several examples."""
        parts = [named for named in self._leaves if is_tensor(named[1]) and len(named[1].shape)]
        return max(parts, key=lambda named: self._bytes(named[1]), default=None)

    def _is_ragged(self, value: Any) -> bool:
        return isinstance(value, self._ndd.Batch)

    def _bytes(self, value: Any) -> int:
        if self._is_ragged(value):
            return sum(map(math.prod, value.shape)) * int(value.dtype.bytes)
        return bytes_of(value)

    def _dense_lengths(self, tensor: Any, examples: int) -> list[float]:
        """Return the lengths of a tensor's examples: true ones, if another part holds a whole number for each.

        The largest of them is then the extent of one of the tensor's sides. Otherwise all are the longest side.
        """
        sides = [int(side) for side in tensor.shape[1:]]
        if not sides or not examples:
            return []
        for _, value in self._leaves:
            numbers = self._whole_numbers(value, examples)
            if numbers and max(numbers) in sides and min(numbers) >= 0:
                return numbers
        return [float(max(sides))] * examples

    def _whole_numbers(self, value: Any, examples: int) -> list[float]:
        """Return the numbers of a part that holds one whole number for each example; else nothing."""
        if not is_tensor(value) or not _WHOLE.search(str(value.dtype)):
            return []
        if self._is_ragged(value):
            shapes = [math.prod(shape) for shape in value.shape]
            return [float(one.item()) for one in value.cpu().tensors] if shapes == [1] * examples else []
        if tuple(value.shape) != (examples,):
            return []
        numbers = value if hasattr(value, "tolist") else self._array(value)
        return [float(number) for number in numbers.tolist()]

    def _shape_words(self, value: Any) -> str:
        if not self._is_ragged(value):
            return " × ".join(map(str, value.shape)) or "a number"
        sides = [(min(extents), max(extents)) for extents in zip(*value.shape, strict=True)]
        return " × ".join(
            [str(len(value.shape)), *(str(low) if low == high else f"{low} to {high}" for low, high in sides)]
        )

    def _digest(self, value: Any) -> str:
        digest = hashlib.blake2b(digest_size=16)
        if not is_tensor(value):
            digest.update(repr(value).encode("utf-8", "backslashreplace"))
            return digest.hexdigest()
        digest.update(str(value.dtype).encode())
        for one in value.cpu().evaluate().tensors if self._is_ragged(value) else [value]:
            digest.update(str(tuple(one.shape)).encode())
            digest.update(self._array(one).tobytes())
        return digest.hexdigest()

    def _array(self, value: Any) -> Any:
        """Return the bits of a tensor as an array."""
        import numpy

        if isinstance(value, self._ndd.Tensor):
            return numpy.asarray(value.cpu().evaluate())
        if callable(getattr(value, "detach", None)):
            import torch

            return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return numpy.asarray(value)


def _ragged_lengths(batch: Any) -> list[float]:
    """Return the length of each example of a DALI batch."""
    shapes = batch.shape
    if not shapes or not shapes[0]:
        return []
    extents = list(zip(*shapes, strict=True))
    layout = batch.layout or ""
    vary = [axis for axis, values in enumerate(extents) if min(values) != max(values)]
    by_time = [layout.index(letter) for letter in _TIME if letter in layout]
    axis = max(vary or by_time[:1] or range(len(extents)), key=lambda axis: max(extents[axis]))
    return [float(extent) for extent in extents[axis]]
