"""The columns of Arrow tables by name, and their values as the other formats hand them on. For the reader process.

Files are data from strangers. Arrays must be fully validated before they come here; what a valid array can still do
is to stand for far more values than the file has bytes (one text named by a million rows, a list of a billion
nulls). `Budget` ends that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow  # noqa: TID253  # imported in the reader process alone
import pyarrow.compute  # noqa: TID253
from pyarrow import types  # noqa: TID253

from batchtune.errors import ManifestError
from batchtune.lengths import FloatArray, IntArray
from batchtune.manifests.columns import id_name
from batchtune.manifests.values import Unreadable

Values = Sequence[object] | FloatArray

# A column of lists has another beside it, of their numbers of items: input_ids.count.
_COUNTED = "count"
# Steps of a path: the number of a list's items, and (of a column's own path) all items of a list.
COUNT = -1
_ITEMS = 0
_LONGEST_INDEX = 9

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
    while isinstance(array.type, pyarrow.BaseExtensionType):
        array = array.storage
    if pyarrow.types.is_run_end_encoded(array.type):
        return plain(pyarrow.compute.run_end_decode(array))
    return array


def is_list(kind: pyarrow.DataType) -> bool:
    """Whether values of a type have items; a map counts as a list of its pairs."""
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
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def is_binary(kind: pyarrow.DataType) -> bool:
    """Whether values of a type are bytes that nothing says to be text."""
    return bool(
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_fixed_size_binary(kind)
        or types.is_binary_view(kind)
    )


def is_span(kind: pyarrow.DataType) -> bool:
    """Whether values of a type are spans of time; a time of day is one since midnight."""
    return bool(types.is_duration(kind) or types.is_time(kind))


def is_number(kind: pyarrow.DataType) -> bool:
    """Whether values of a type are numbers; spans of time are, in seconds."""
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind) or is_span(kind))


def walked(array: pyarrow.Array, steps: Sequence[str | int], budget: Budget) -> pyarrow.Array:
    """What stands at a path below every value: as `paths.walk`, but for all of them at once.

    Args:
        array: Any.
        steps: Names of fields, and numbers of items. A name below a list gives the list of what its items have,
            `COUNT` the number of its items.
        budget: What the file may stand for.
    """
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


def cells(array: pyarrow.Array, budget: Budget) -> int:
    """How many values an array stands for: its items, those of lists and of the lists in them included."""
    array = plain(array)
    if not is_list(array.type):
        return len(array)
    items = _items(array, budget)[1]
    return len(array) + cells(items, budget)


def handed_on(array: pyarrow.Array) -> Values:
    """The values: an array of floats where there are only numbers, else a list.

    Args:
        array: Small enough for Python objects, see `cut`.

    Returns:
        Shape (len(array),). Numbers are floats, spans of time seconds; what can't be a length is Unreadable.
    """
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
    kind = array.type
    if is_binary(kind):
        value = Unreadable("binary data")
    elif types.is_temporal(kind):
        value = Unreadable("a date or time", str(kind))
    else:
        value = Unreadable("of a type that is no length", str(kind)[:80])
    return [value if valid else None for valid in array.is_valid().to_pylist()]


def _counts(array: pyarrow.Array) -> pyarrow.Array:
    """The number of items of every list, null for a null list."""
    if pyarrow.types.is_map(array.type):
        array = _pairs(array)
    return pyarrow.compute.list_value_length(array)


def _flat(array: pyarrow.Array) -> pyarrow.Array:
    """The items of all lists, those of null lists left out."""
    if pyarrow.types.is_map(array.type):
        array = _pairs(array)
    return array.flatten()


def _pairs(array: pyarrow.MapArray) -> pyarrow.ListArray:
    # Not by a cast: that ends the process where a map is a slice and has lists below (seen in pyarrow 26).
    pairs = pyarrow.StructArray.from_arrays([array.keys, array.items], ["key", "value"])
    offsets = pyarrow.array(array.offsets.to_numpy())
    return pyarrow.ListArray.from_arrays(offsets, pairs, mask=array.is_null())


def _items(array: pyarrow.Array, budget: Budget) -> tuple[IntArray, pyarrow.Array]:
    """How many items every list has, -1 for a null list, and the items of all."""
    counts = _counts(array).fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    budget.check(int(counts[counts > 0].sum(dtype=np.float64)))
    return counts, _flat(array)


def _offsets(counts: IntArray) -> pyarrow.Array:
    ends = np.concatenate([[0], np.cumsum(np.maximum(counts, 0))])
    return pyarrow.array(ends, mask=np.append(counts < 0, False))


def _picked(counts: IntArray, items: pyarrow.Array, index: int) -> pyarrow.Array:
    """Of every list the item with a number, null where it has none."""
    if pyarrow.types.is_string_view(items.type):  # nothing can be taken from these
        items = pyarrow.array(items.to_pylist(), pyarrow.large_string())
    starts = np.cumsum(np.maximum(counts, 0)) - np.maximum(counts, 0)
    return items.take(pyarrow.array(starts + index, mask=counts <= index))


@dataclass(frozen=True, slots=True)
class Leaf:
    """A column, or a field that lies in one.

    Attributes:
        path: Names of fields, the first that of the column, and `_ITEMS` if the way goes through a list.
        type: Of the values there; a list's, of its items.
        unclear: Whether a name on the way stands for several fields.
        mapped: Whether the way goes through a map.
        index: Its number among the leaves of the schema, in order.
    """

    path: tuple[str | int, ...]
    type: pyarrow.DataType
    unclear: bool = False
    mapped: bool = False
    index: int = 0

    def under(self, step: str | int, *, unclear: bool = False, mapped: bool = False) -> Leaf:
        """The same, seen from one step higher."""
        return Leaf((step, *self.path), self.type, self.unclear or unclear, self.mapped or mapped)


@dataclass(frozen=True, slots=True)
class Key:
    """A column that is read.

    Attributes:
        name: As it was asked for.
        leaf: What must be read for it.
        steps: From the row to the value: names of fields, numbers of items, and `COUNT` at the end.
    """

    name: str
    leaf: Leaf
    steps: tuple[str | int, ...]

    @property
    def counted(self) -> bool:
        """Whether the lengths of the lists there are wanted, not the lists."""
        return self.steps[-1] == COUNT

    @property
    def listed(self) -> bool:
        """Whether the way goes through a list."""
        return _ITEMS in self.leaf.path

    def values(self, batch: pyarrow.RecordBatch, budget: Budget) -> pyarrow.Array:
        """The values in the rows of a batch, still as an array."""
        return walked(batch.column(batch.schema.get_field_index(self.steps[0])), self.steps[1:], budget)


def leaves(schema: pyarrow.Schema) -> list[Leaf]:
    """The columns of a schema; if they have fields, these in their place, however deep."""
    found: list[Leaf] = []
    for field in schema:
        unclear = schema.get_field_index(field.name) < 0
        found += [below.under(field.name, unclear=unclear) for below in _below(field.type)]
    return [replace(leaf, index=index) for index, leaf in enumerate(found)]


def _below(kind: pyarrow.DataType) -> Iterator[Leaf]:
    """The ways from a value of a type to its leaves."""
    while isinstance(kind, pyarrow.BaseExtensionType) or types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        kind = kind.storage_type if isinstance(kind, pyarrow.BaseExtensionType) else kind.value_type
    if types.is_struct(kind):
        for field in kind:
            unclear = kind.get_field_index(field.name) < 0
            yield from (below.under(field.name, unclear=unclear) for below in _below(field.type))
    elif types.is_map(kind):
        for name, child in (("key", kind.key_type), ("value", kind.item_type)):
            yield from (below.under(name).under(_ITEMS, mapped=True) for below in _below(child))
    elif is_list(kind):
        yield from (below.under(_ITEMS) for below in _below(kind.value_type))
    else:
        yield Leaf((), kind)


def listed_keys(schema: pyarrow.Schema) -> list[Key]:
    """The columns as a user sees them: all leaves, and before the first leaf of every list its length."""
    named = [(".".join(step for step in leaf.path if isinstance(step, str)), leaf) for leaf in leaves(schema)]
    names = {name for name, _ in named}
    keys: dict[str, Key] = {}
    for full_name, leaf in named:
        steps: list[str] = []
        for step in leaf.path:
            if isinstance(step, str):
                steps.append(step)
                continue
            name = ".".join((*steps, _COUNTED))
            if name not in names:
                keys.setdefault(name, Key(name, leaf, (*steps, COUNT)))
        keys.setdefault(full_name, Key(full_name, leaf, tuple(steps)))
    return list(keys.values())


def id_key(schema: pyarrow.Schema) -> Key | None:
    """The column that names a row, or None."""
    keys = {
        key.name: key
        for key in listed_keys(schema)
        if not key.listed and not key.leaf.unclear and (is_text(key.leaf.type) or types.is_integer(key.leaf.type))
    }
    found = id_name(keys)
    return None if found is None else keys[found]


def key_in(leaf: Leaf, name: str) -> Key | None:
    """The key of a name if it leads to a leaf, else None."""
    steps: list[str | int] = []
    rest = name
    for position, step in enumerate(leaf.path):
        part, _, after = rest.partition(".")
        if isinstance(step, str):
            if rest != step and not rest.startswith(f"{step}."):
                return None
            steps.append(step)
            rest = rest[len(step) + 1 :]
        elif rest == _COUNTED and _COUNTED not in leaf.path[position + 1 : position + 2]:
            return Key(name, leaf, (*steps, COUNT))
        elif part.isdecimal() and len(part) <= _LONGEST_INDEX:
            steps.append(int(part))
            rest = after
    return Key(name, leaf, tuple(steps)) if not rest else None
