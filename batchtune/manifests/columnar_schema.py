"""The columns of a columnar file by name: nested ones under dotted names, lists, items of lists, numbers of items."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from batchtune.errors import ManifestError, shortened
from batchtune.manifests.columnar_values import COUNT, Budget, is_list, is_number, is_text, walked
from batchtune.manifests.columns import id_name
from batchtune.manifests.paths import dotted

if TYPE_CHECKING:
    import pyarrow

# A column of lists has another beside it, of their numbers of items: input_ids.count.
COUNTED = "count"

_LONGEST_INDEX = 9


class _Items:
    """Stands in a path for the items of a list."""


_ITEMS = _Items()


@dataclass(frozen=True, slots=True)
class Leaf:
    """A column, or a field that lies in one.

    Attributes:
        name: Dotted.
        path: Names of fields, the first that of the column, and `_ITEMS` where the way goes through a list.
        type: Of the values there; a list's, of its items.
        index: Its number among the leaves of the schema, as they come.
        unclear: Whether a name on the way stands for several fields.
        mapped: Whether the way goes through a map.
    """

    name: str
    path: tuple[str | _Items, ...]
    type: pyarrow.DataType
    index: int
    unclear: bool
    mapped: bool

    @property
    def listed(self) -> bool:
        """Whether the way goes through a list."""
        return _ITEMS in self.path


@dataclass(frozen=True, slots=True)
class _Below:
    path: tuple[str | _Items, ...]
    type: pyarrow.DataType
    unclear: bool = False
    mapped: bool = False

    def under(self, step: str | _Items, *, unclear: bool = False, mapped: bool = False) -> _Below:
        return _Below((step, *self.path), self.type, self.unclear or unclear, self.mapped or mapped)


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
    def numeric(self) -> bool:
        """Whether numbers stand there, or lists of them."""
        return self.counted or is_number(self.leaf.type)

    def values(self, batch: pyarrow.RecordBatch, budget: Budget) -> pyarrow.Array:
        """What stands there in the rows of a batch, still as an array."""
        column = batch.column(batch.schema.get_field_index(self.steps[0]))
        return walked(column, self.steps[1:], budget)


def leaves(schema: pyarrow.Schema) -> list[Leaf]:
    """The columns of a schema, and instead of those that have fields these, however deep."""
    found: list[Leaf] = []
    for field in schema:
        for below in _below(field.type):
            path = (field.name, *below.path)
            name = ".".join(step for step in path if isinstance(step, str))
            unclear = below.unclear or schema.get_field_index(field.name) < 0
            found.append(Leaf(name, path, below.type, len(found), unclear, below.mapped))
    return found


def find_key(path: Path, schema: pyarrow.Schema, name: str) -> Key:
    """What a name means: a column of `Columnar.columns`, or an item of a list (`prompt.0.content`).

    Raises:
        ManifestError: Nothing, or more than one column.
    """
    found = leaves(schema)
    for spelt in (name, dotted(name)):
        keys = [key for leaf in found if (key := _key(leaf, spelt)) is not None]
        columns = [key for key in keys if not key.counted]
        if len(columns) > 1 or any(key.leaf.unclear for key in keys):
            raise ManifestError(
                f"{path} has several columns {shortened(name)}", "Rename them, so that each has its own name."
            )
        if keys:
            return replace((columns or keys)[0], name=name)
    raise ManifestError(f"{path} has no column {shortened(name)}", "Name another column.")


def listed_keys(schema: pyarrow.Schema) -> list[Key]:
    """The columns as a user sees them: all leaves, and before the first leaf of every list its length."""
    found = leaves(schema)
    names = {leaf.name for leaf in found}
    keys: dict[str, Key] = {}
    for leaf in found:
        steps: list[str] = []
        for step in leaf.path:
            if isinstance(step, str):
                steps.append(step)
                continue
            name = ".".join((*steps, COUNTED))
            if name not in names:
                keys.setdefault(name, Key(name, leaf, (*steps, COUNT)))
        keys.setdefault(leaf.name, Key(leaf.name, leaf, tuple(steps)))
    return list(keys.values())


def id_key(schema: pyarrow.Schema) -> Key | None:
    """The column that names a row, or None."""
    from pyarrow import types

    keys = {
        key.name: key
        for key in listed_keys(schema)
        if not key.leaf.listed and not key.leaf.unclear and (is_text(key.leaf.type) or types.is_integer(key.leaf.type))
    }
    found = id_name(keys)
    return None if found is None else keys[found]


def _key(leaf: Leaf, name: str) -> Key | None:
    """What a name means if it leads to a leaf, else None."""
    steps: list[str | int] = []
    rest = name
    for position, step in enumerate(leaf.path):
        part, _, after = rest.partition(".")
        if isinstance(step, str):
            if rest != step and not rest.startswith(f"{step}."):
                return None
            steps.append(step)
            rest = rest[len(step) + 1 :]
        elif rest == COUNTED and COUNTED not in leaf.path[position + 1 : position + 2]:
            return Key(name, leaf, (*steps, COUNT))
        elif part.isdecimal() and len(part) <= _LONGEST_INDEX:
            steps.append(int(part))
            rest = after
    return Key(name, leaf, tuple(steps)) if not rest else None


def _below(kind: pyarrow.DataType) -> Iterator[_Below]:
    """The ways from a value of a type to its leaves."""
    from pyarrow import types

    kind = _plain_type(kind)
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
        yield _Below((), kind)


def _plain_type(kind: pyarrow.DataType) -> pyarrow.DataType:
    """What is under extension types, dictionaries and runs of equal values."""
    import pyarrow
    from pyarrow import types

    while True:
        if isinstance(kind, pyarrow.BaseExtensionType):
            kind = kind.storage_type
        elif types.is_dictionary(kind) or types.is_run_end_encoded(kind):
            kind = kind.value_type
        else:
            return kind
