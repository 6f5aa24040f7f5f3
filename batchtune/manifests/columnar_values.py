"""Arrow arrays → values as the other formats hand them on: floats, texts, lists, None where there is nothing.

Files are data from strangers. Arrays must be fully validated before they come here; what a valid array can still do
is to stand for far more values than the file has bytes (one text named by a million rows, a list of a billion
nulls). `Budget` ends that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from batchtune.errors import ManifestError
from batchtune.lengths import FloatArray, IntArray
from batchtune.manifests.values import Unreadable

if TYPE_CHECKING:
    import pyarrow

Values = Sequence[object] | FloatArray

# A step of a path that is no item of a list but their number.
COUNT = -1

ROWS_AT_ONCE = 65_536
CELLS_AT_ONCE = 1_000_000
_TRUSTED_CELLS = 128 * 1024 * 1024
_LARGEST_EXPANSION = 500
_PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}


class Budget:
    """Ends a bomb: a small file that stands for billions of values.

    A cell is a row, an item of a list, or a byte of text.

    Args:
        path: For messages.
        size: The file's bytes.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._limit = max(_TRUSTED_CELLS, _LARGEST_EXPANSION * size)
        self._spent = 0

    def check(self, cells: int) -> None:
        """Raises ManifestError where so many are too many for the file."""
        if cells > self._limit:
            raise ManifestError(
                f"{self._path} stands for {cells:,} values and more, over {_LARGEST_EXPANSION} times its bytes: "
                "it is damaged, or made to do harm",
                "Write it anew without compression and dictionaries if you trust it.",
            )

    def spend(self, cells: int) -> None:
        """Counts cells that are handed on. Raises ManifestError where they are too many for the file."""
        self._spent += cells
        self.check(self._spent)


def plain(array: pyarrow.Array) -> pyarrow.Array:
    """The array itself under an extension type, and what runs of equal values stand for."""
    import pyarrow
    import pyarrow.compute

    while isinstance(array.type, pyarrow.BaseExtensionType):
        array = array.storage
    if pyarrow.types.is_run_end_encoded(array.type):
        return plain(pyarrow.compute.run_end_decode(array))
    return array


def is_list(kind: pyarrow.DataType) -> bool:
    """Whether values of a type have items; a map counts as a list of its pairs."""
    from pyarrow import types

    return bool(
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
        or types.is_list_view(kind)
        or types.is_large_list_view(kind)
        or types.is_map(kind)
    )


def is_text(kind: pyarrow.DataType) -> bool:
    """Whether values of a type are text."""
    from pyarrow import types

    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def is_binary(kind: pyarrow.DataType) -> bool:
    """Whether values of a type are bytes that nothing says to be text."""
    from pyarrow import types

    return bool(
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_fixed_size_binary(kind)
        or types.is_binary_view(kind)
    )


def is_span(kind: pyarrow.DataType) -> bool:
    """Whether values of a type are spans of time; a time of day is one since midnight."""
    from pyarrow import types

    return bool(types.is_duration(kind) or types.is_time(kind))


def is_number(kind: pyarrow.DataType) -> bool:
    """Whether values of a type are numbers; spans of time are, in seconds."""
    from pyarrow import types

    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind) or is_span(kind))


def walked(array: pyarrow.Array, steps: Sequence[str | int], budget: Budget) -> pyarrow.Array:
    """What stands at a path below every value: as `paths.walk`, but for all of them at once.

    Args:
        array: Any.
        steps: Names of fields, and numbers of items. A name below a list gives the list of what its items have,
            `COUNT` the number of its items.
        budget: What the file may stand for.
    """
    import pyarrow.compute

    array = plain(array)
    if not steps:
        return array
    step, rest = steps[0], steps[1:]
    if step == COUNT:
        return _counts(array)
    if not is_list(array.type):
        return walked(pyarrow.compute.struct_field(array, [array.type.get_field_index(step)]), rest, budget)
    counts, items = _items(array, budget)
    if isinstance(step, int):
        return _picked(counts, walked(items, rest, budget), step)
    return pyarrow.LargeListArray.from_arrays(_offsets(counts), walked(items, steps, budget))


def cut(arrays: Sequence[pyarrow.Array], budget: Budget) -> Iterator[slice]:
    """The rows of some arrays of equal length, in parts that don't become too much to hold at once."""
    rows = len(arrays[0])
    weights = [found for array in arrays if (found := _weights(array, budget)) is not None]
    if not weights:
        if rows:
            yield slice(0, rows)
        return
    ends = np.cumsum(np.sum(weights, axis=0))
    budget.spend(int(ends[-1]) if rows else 0)
    start = 0
    while start < rows:
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + CELLS_AT_ONCE, side="right")))
        yield slice(start, stop)
        start = stop


def handed_on(array: pyarrow.Array) -> Values:
    """The values: an array of floats where there are only numbers, else a list.

    Args:
        array: Small enough for Python objects, see `cut`.

    Returns:
        Shape (len(array),). Numbers are floats, spans of time seconds; what can't be a length is Unreadable.
    """
    from pyarrow import types

    array = plain(array)
    kind = array.type
    if is_number(kind):
        return _floats(array)
    if is_text(kind) or types.is_boolean(kind) or types.is_null(kind):
        return cast(list[object], array.to_pylist())
    if types.is_dictionary(kind):
        return _looked_up(array)
    if is_list(kind):
        return _lists(array)
    return _unreadable(array)


def as_listed(values: Values) -> list[object]:
    """The values as a list."""
    return values.tolist() if isinstance(values, np.ndarray) else list(values)


def _floats(array: pyarrow.Array) -> Values:
    import pyarrow
    import pyarrow.compute
    from pyarrow import types

    kind = array.type
    if types.is_decimal(kind):
        # Not straight to a float: that is off by one in the last digit, for 3.51 already.
        array = array.cast(pyarrow.string()).cast(pyarrow.float64())
    elif is_span(kind):
        ticks = array.cast(pyarrow.int64() if kind.bit_width == 64 else pyarrow.int32())
        array = pyarrow.compute.divide(ticks.cast(pyarrow.float64(), safe=False), _PER_SECOND[kind.unit])
    else:
        array = array.cast(pyarrow.float64(), safe=False)
    if array.null_count:
        return cast(list[object], array.to_pylist())
    return cast(FloatArray, array.to_numpy(zero_copy_only=False))


def _looked_up(array: pyarrow.DictionaryArray) -> list[object]:
    # Through the distinct values, each made once: a long text may stand in a million rows.
    distinct = array.indices.dictionary_encode()
    words = as_listed(handed_on(array.dictionary.take(distinct.dictionary)))
    return [None if index is None else words[index] for index in distinct.indices.to_pylist()]


def _lists(array: pyarrow.Array) -> list[object]:
    counts = _counts(array).to_pylist()
    items = as_listed(handed_on(_flat(array)))
    found: list[object] = []
    start = 0
    for count in counts:
        found.append(None if count is None else items[start : start + count])
        start += count or 0
    return found


def _unreadable(array: pyarrow.Array) -> list[object]:
    from pyarrow import types

    kind = array.type
    if is_binary(kind):
        value = Unreadable("binary data")
    elif types.is_temporal(kind):
        value = Unreadable("a date or time", str(kind))
    else:
        value = Unreadable("of a type that is no length", str(kind)[:80])
    return [value if valid else None for valid in array.is_valid().to_pylist()]


def _counts(array: pyarrow.Array) -> pyarrow.Array:
    """The number of items of every list, null where there is none."""
    import pyarrow
    import pyarrow.compute

    if pyarrow.types.is_map(array.type):
        array = _pairs(array)
    return pyarrow.compute.list_value_length(array)


def _flat(array: pyarrow.Array) -> pyarrow.Array:
    """The items of all lists, those of null lists left out."""
    import pyarrow

    if pyarrow.types.is_map(array.type):
        array = _pairs(array)
    return array.flatten()


def _pairs(array: pyarrow.MapArray) -> pyarrow.ListArray:
    # Not by a cast: that ends the process where a map is a slice and has lists below (seen in pyarrow 26).
    import pyarrow

    pairs = pyarrow.StructArray.from_arrays([array.keys, array.items], ["key", "value"])
    offsets = pyarrow.array(array.offsets.to_numpy())
    return pyarrow.ListArray.from_arrays(offsets, pairs, mask=array.is_null())


def _items(array: pyarrow.Array, budget: Budget) -> tuple[IntArray, pyarrow.Array]:
    """How many items every list has, -1 where there is none, and the items of all."""
    counts = _counts(array).fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    budget.check(int(counts[counts > 0].sum(dtype=np.float64)))
    return counts, _flat(array)


def _offsets(counts: IntArray) -> pyarrow.Array:
    import pyarrow

    ends = np.concatenate([[0], np.cumsum(np.maximum(counts, 0))])
    return pyarrow.array(ends, mask=np.append(counts < 0, False))


def _picked(counts: IntArray, items: pyarrow.Array, index: int) -> pyarrow.Array:
    """Of every list the item with a number, null where it has none."""
    import pyarrow

    if pyarrow.types.is_string_view(items.type):  # nothing can be taken from these
        items = pyarrow.array(items.to_pylist(), pyarrow.large_string())
    starts = np.cumsum(np.maximum(counts, 0)) - np.maximum(counts, 0)
    return items.take(pyarrow.array(starts + index, mask=counts <= index))


def _weights(array: pyarrow.Array, budget: Budget) -> IntArray | None:
    """How many cells each value is; None where all are one."""
    import pyarrow.compute
    from pyarrow import types

    array = plain(array)
    if types.is_string_view(array.type):
        return _view_sizes(array)
    if is_text(array.type):
        sizes = pyarrow.compute.binary_length(array).fill_null(0)
        return cast(IntArray, sizes.to_numpy(zero_copy_only=False).astype(np.int64) + 1)
    if not is_list(array.type):
        return None
    counts, items = _items(array, budget)
    counts = np.maximum(counts, 0)
    below = _weights(items, budget)
    if below is None:
        return counts + 1
    ends = np.concatenate([[0], np.cumsum(below)])[np.cumsum(counts)]
    return cast(IntArray, np.diff(ends, prepend=0) + 1)


def _view_sizes(array: Any) -> IntArray:
    # A view is 16 bytes, of which the first four are the text's size; Arrow itself has no function for it.
    end = array.offset + len(array)
    views = np.frombuffer(array.buffers()[1], dtype="<i4", count=4 * end).reshape(end, 4)
    sizes = views[array.offset :, 0].astype(np.int64)
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    return cast(IntArray, np.where(valid, sizes, 0) + 1)
