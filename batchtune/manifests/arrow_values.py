"""The columns of Arrow tables by name, and their values as the other formats hand them on. For the reader process.

Arrays must be fully validated before they come here. Even then a small file can stand for billions of values (one text
named by a million rows, a list of a billion nulls): `Budget` ends that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import pyarrow  # noqa: TID253  # imported in the reader process alone
import pyarrow.compute  # noqa: TID253
from pyarrow import lib, types  # noqa: TID253

from batchtune.errors import ManifestError
from batchtune.lengths import FloatArray
from batchtune.manifests.values import Unreadable, Values

# A map counts as a list of its pairs.
LISTS = frozenset(
    (
        *(lib.Type_LIST, lib.Type_LARGE_LIST, lib.Type_FIXED_SIZE_LIST),
        *(lib.Type_LIST_VIEW, lib.Type_LARGE_LIST_VIEW, lib.Type_MAP),
    )
)
TEXTS = frozenset((lib.Type_STRING, lib.Type_LARGE_STRING, lib.Type_STRING_VIEW))
BYTES = frozenset((lib.Type_BINARY, lib.Type_LARGE_BINARY, lib.Type_FIXED_SIZE_BINARY, lib.Type_BINARY_VIEW))
# Spans of time, in seconds; a time of day is one since midnight.
SPANS = frozenset((lib.Type_DURATION, lib.Type_TIME32, lib.Type_TIME64))
_PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}

# A column of lists comes with another, of their numbers of items: input_ids.count.
_COUNTED = "count"
# Steps of a path: the number of a list's items, and (of a column's own path) all items of a list.
COUNT = -1
_ITEMS = 0

_TRUSTED_CELLS = 128 * 1024 * 1024
_LARGEST_EXPANSION = 500


@dataclass(slots=True)
class Budget:
    """A limit on the cells that a file of `size` bytes stands for: rows, items of lists, bytes of text."""

    label: str
    size: int
    spent: int = 0

    def spend(self, cells: int, *, at_once: int = 0) -> None:
        """Count cells, and look at others that may come at once. Raises ManifestError if they are too many."""
        self.spent += cells
        if (found := max(self.spent, at_once)) > max(_TRUSTED_CELLS, _LARGEST_EXPANSION * self.size):
            seen = f"stands for {found:,} values and more, over {_LARGEST_EXPANSION} times its bytes"
            hint = "Write it again without compression and dictionaries if you trust it."
            raise ManifestError(f"{self.label} {seen}: it is damaged, or made to do harm", hint)


def is_number(kind: pyarrow.DataType) -> bool:
    """Return whether values of a type are numbers; spans of time are, in seconds."""
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind) or kind.id in SPANS)


def plain(array: pyarrow.Array) -> pyarrow.Array:
    """Return the array itself under an extension type, and the values that runs of equal ones stand for."""
    while isinstance(array.type, pyarrow.BaseExtensionType):
        array = array.storage
    if types.is_run_end_encoded(array.type):
        return plain(pyarrow.compute.run_end_decode(array))
    return array


def values_at(array: pyarrow.Array, steps: Sequence[str | int], budget: Budget) -> Values:
    """Return the values, shape (len(array),), at a path below every value of an array.

    Steps of the path are names of fields, and numbers of items. A name below a list gives the list of what its items
    have, `COUNT` the number of its items. Numbers become floats (an array of them if there is nothing else), spans of
    time seconds; a value that can't be a length is Unreadable.
    """
    array = plain(array)
    kind = array.type
    if kind.id in LISTS:
        return _values_of_lists(array, steps, budget)
    if types.is_dictionary(kind):
        # Through the distinct values, each made once: a long text may stand in a million rows.
        distinct = array.indices.dictionary_encode()
        words = as_listed(values_at(array.dictionary.take(distinct.dictionary), steps, budget))
        return [None if index is None else words[index] for index in distinct.indices.to_pylist()]
    if steps:
        return values_at(field_of(array, steps[0]), steps[1:], budget)
    if types.is_struct(kind):
        return _objects(array, budget)
    if is_number(kind):
        return _floats(array)
    if kind.id in TEXTS or types.is_boolean(kind) or types.is_null(kind):
        return cast(list[object], array.to_pylist())
    value = Unreadable("of a type that can't be a length", str(kind)[:80])
    if kind.id in BYTES:
        value = Unreadable("binary data")
    elif types.is_temporal(kind):
        value = Unreadable("a date or time", str(kind))
    return [value if valid else None for valid in array.is_valid().to_pylist()]


def field_of(array: pyarrow.StructArray, name: str | int) -> pyarrow.Array:
    """Return a field of structs, null where the struct is."""
    field = array.field(array.type.get_field_index(name))
    if not array.null_count:
        return field
    # struct_field alone takes time by the number of fields, which may be tens of thousands.
    alone = pyarrow.StructArray.from_arrays([field], names=["field"], mask=array.is_null())
    return pyarrow.compute.struct_field(alone, [0])


def as_listed(values: Values) -> list[object]:
    """Return the values as a list."""
    return values.tolist() if isinstance(values, np.ndarray) else list(values)


def _objects(array: pyarrow.Array, budget: Budget) -> list[object]:
    """Return the values of structs, such as the messages of a chat, as JSON has them; None for a missing one."""
    names = [field.name for field in array.type]
    fields = [
        field.to_pylist() if types.is_integer(field.type) else as_listed(values_at(field, (), budget))
        for field in array.flatten()
    ]
    rows = zip(*fields, strict=True) if fields else [()] * len(array)
    objects = [dict(zip(names, values, strict=True)) for values in rows]
    return [one if valid else None for one, valid in zip(objects, array.is_valid().to_pylist(), strict=True)]


def _values_of_lists(array: pyarrow.Array, steps: Sequence[str | int], budget: Budget) -> Values:
    if types.is_map(array.type):
        # Not by a cast: that ends the process where a map is a slice and has lists below (seen in pyarrow 26).
        pairs = pyarrow.StructArray.from_arrays([array.keys, array.items], ["key", "value"])
        offsets = pyarrow.array(array.offsets.to_numpy())
        array = pyarrow.ListArray.from_arrays(offsets, pairs, mask=array.is_null())
    lengths = pyarrow.compute.list_value_length(array)
    if steps and steps[0] == COUNT:
        return _floats(lengths)
    counts = lengths.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    budget.spend(int(counts[counts > 0].sum(dtype=np.float64)))
    at = steps[0] if steps and isinstance(steps[0], int) else None
    items = as_listed(values_at(array.flatten(), steps if at is None else steps[1:], budget))
    ends = np.cumsum(np.maximum(counts, 0)).tolist()
    found = zip(counts.tolist(), ends, strict=True)
    if at is None:
        return [None if count < 0 else items[end - count : end] for count, end in found]
    return [items[end - count + at] if count > at else None for count, end in found]


def _floats(array: pyarrow.Array) -> Values:
    kind = array.type
    if types.is_decimal(kind):
        # Not straight to a float: that is off by one in the last digit, for 3.51 already.
        array = array.cast(pyarrow.string()).cast(pyarrow.float64())
    elif kind.id in SPANS:
        ticks = array.cast(pyarrow.int64() if kind.bit_width == 64 else pyarrow.int32())
        array = pyarrow.compute.divide(ticks.cast(pyarrow.float64(), safe=False), _PER_SECOND[kind.unit])
    else:
        array = array.cast(pyarrow.float64(), safe=False)
    if array.null_count:
        return cast(list[object], array.to_pylist())
    return cast(FloatArray, array.to_numpy(zero_copy_only=False))


@dataclass(frozen=True, slots=True)
class Key:
    """A column, or a field that lies in one, and how it is read.

    Attributes:
        path: Names of fields, the first that of the column, and `_ITEMS` for each list on the way.
        type: Of the values there; a list's, of its items.
        unclear: Whether a name on the way stands for several fields.
        whole: Whether all of the column must be read: to return it all, or as pyarrow reads no part of a map alone.
        index: Its number among the leaves of the schema.
        name: As the user asks for it.
        steps: From the row to the value, as `values_at` takes them.
    """

    path: tuple[str | int, ...]
    type: pyarrow.DataType
    unclear: bool = False
    whole: bool = False
    index: int = 0
    name: str = ""
    steps: tuple[str | int, ...] = ()

    @property
    def counted(self) -> bool:
        """Whether the lengths of the lists there are wanted, not the lists."""
        return self.steps[-1] == COUNT

    @property
    def listed(self) -> bool:
        """Whether the way goes through a list."""
        return _ITEMS in self.path


def leaves(schema: pyarrow.Schema) -> list[Key]:
    """Return the columns of a schema; if they have fields, these in their place, however deep."""
    return [replace(leaf, index=at) for at, leaf in enumerate(_below(Key((), pyarrow.struct(list(schema)))))]


def _below(leaf: Key) -> Iterator[Key]:
    kind, path = leaf.type, leaf.path
    while isinstance(kind, pyarrow.BaseExtensionType) or types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        kind = kind.storage_type if isinstance(kind, pyarrow.BaseExtensionType) else kind.value_type
    if types.is_struct(kind):
        for field in kind:
            unclear = leaf.unclear or kind.get_field_index(field.name) < 0
            yield from _below(Key((*path, field.name), field.type, unclear, leaf.whole))
    elif types.is_map(kind):
        for name, child in (("key", kind.key_type), ("value", kind.item_type)):
            yield from _below(Key((*path, _ITEMS, name), child, leaf.unclear, whole=True))
    elif kind.id in LISTS:
        yield from _below(replace(leaf, path=(*path, _ITEMS), type=kind.value_type))
    else:
        yield replace(leaf, type=kind)


def listed_keys(schema: pyarrow.Schema) -> list[Key]:
    """Return the columns as a user sees them: all leaves, and before the first leaf of every list its length."""
    named = [(".".join(step for step in leaf.path if isinstance(step, str)), leaf) for leaf in leaves(schema)]
    names = {name for name, _ in named}
    keys: dict[str, Key] = {}
    for full_name, leaf in named:
        steps: list[str] = []
        for step in leaf.path:
            if isinstance(step, str):
                steps.append(step)
            elif (name := ".".join((*steps, _COUNTED))) not in names:
                keys.setdefault(name, replace(leaf, name=name, steps=(*steps, COUNT)))
        keys.setdefault(full_name, replace(leaf, name=full_name, steps=tuple(steps)))
    return list(keys.values())


def key_in(leaf: Key, name: str) -> Key | None:
    """Return the key of a name if it leads to a leaf, else None."""
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
            return replace(leaf, name=name, steps=(*steps, COUNT))
        elif part.isdecimal() and len(part) <= 9:
            steps.append(int(part))
            rest = after
    return replace(leaf, name=name, steps=tuple(steps)) if not rest else None
