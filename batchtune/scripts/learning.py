"""Learns from a training script's own batches how to make batches of any shape, where its data set makes them itself.

A batch that can be drawn from single examples is not learned: see `drawing`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from batchtune.scripts.following import Leaves, Relations, has_rows
from batchtune.scripts.packed_rows import packed_row
from batchtune.scripts.relations import (
    Axes,
    Place,
    Relation,
    Terms,
    Unclear,
)
from batchtune.scripts.trees import (
    flatten,
    longest_row,
    measured,
    rebuilt,
    resized,
    sizes,
    with_values,
)
from batchtune.scripts.whole_batches import layout, learned_from_batches

__all__ = ["Axes", "Learned", "Template", "Unclear", "longest_of", "shown"]


@dataclass(frozen=True)
class Template:
    """An example, or a batch of one row, that can be had in any size."""

    tree: Any
    relations: Mapping[Place, Relation]

    def sized(self, axes: Axes) -> Any:
        """Return the tree in this shape."""
        leaves = _leaves(self.tree, self.relations)
        for (path, key), relation in self.relations.items():
            leaves[path] = _changed(leaves[path], key, relation, axes)
        return rebuilt(self.tree, leaves)


@dataclass(frozen=True)
class Learned:
    """Makes batches of any shape, as the script's data set would, and measures its real ones.

    `lines` say what was learned of a batch, such as `sig: [B, L] float32`.
    """

    lines: tuple[str, ...]
    packed: bool
    indices: None  # they are not those of examples
    _terms: Terms
    _template: Template

    @classmethod
    def from_batches(
        cls,
        batches: Sequence[Any],
        *,
        length_key: str | None = None,
        target_key: str | None = None,
        batch_size_key: str | None = None,
    ) -> Learned:
        """Learn from whole batches, at least 6.

        The batch size is the first axis of every leaf, or of the leaf `batch_size_key`.

        Raises:
            Unclear: The batches don't tell the axes apart, or their values.
        """
        leaves = flatten(batches)
        terms, relations = learned_from_batches(
            leaves, (length_key, target_key), batch_size_key
        )
        longest = longest_of(terms)
        rows = {
            path: longest_row(group[longest])
            for path, group in leaves.items()
            if has_rows(path, relations)
        }
        template = Template(rebuilt(batches[longest], rows), relations)
        return cls(shown(leaves, relations), "ΣL" in terms, None, terms, template)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the size of the L axis in each batch, in order."""
        return tuple(self._terms["L"].astype(int).tolist())

    @property
    def targets(self) -> tuple[int, ...] | None:
        """Return the size of the T axis in each batch; None without such an axis."""
        if "T" not in self._terms:
            return None
        return tuple(self._terms["T"].astype(int).tolist())

    def twins(self, _: Any, batches: list[Any]) -> Iterator[tuple[Axes, Any, Any]]:
        """Yield the shapes of the script's own batches, each with the batch and one that is made in its shape."""
        for batch in batches:
            axes = self.axes_of(batch)
            yield axes, batch, self.make(axes)

    def make(self, axes: Axes) -> Any:
        """Return a batch of this shape; `targets`' longest is that of all if none is given."""
        if axes.target_length is None and self.targets is not None:
            axes = replace(axes, target_length=max(self.targets))
        return self._template.sized(axes)

    def axes_of(self, batch: Any) -> Axes:
        """Return the shape of a batch of the script, exactly or up to the multiple that it is padded to."""
        relations = self._template.relations
        leaves = _leaves(batch, relations)
        if self.packed:
            row = packed_row(leaves)
            if row is not None:
                return Axes.packed(row.tolist())
        found: dict[str, int] = {}
        seen = measured({path: [leaf] for path, leaf in leaves.items()})
        # Sizes before values: what a value follows may be an accident.
        for is_value in (False, True):
            known = set(found) if is_value else set()
            for place, relation in relations.items():
                if (place[1] == "value") != is_value or relation.term in known:
                    continue
                if place in seen:
                    largest = relation.term_of(seen[place][0])
                    found[relation.term] = min(
                        largest, found.get(relation.term, largest)
                    )
        axes = {
            relation.term for (_, key), relation in relations.items() if key != "value"
        }
        for total in found.keys() & {"B·L", "ΣL", "B·T", "ΣT"}:
            # The longest length of a batch without an axis of it tells less of it than the total.
            if total[-1] not in axes:
                found[total[-1]] = math.ceil(found[total] / found.get("B", 1))
        if not {"B", "L"} <= found.keys():
            raise Unclear("a batch of the script does not show its size and length")
        return Axes(found["B"], found["L"], found.get("T"))


def longest_of(terms: Terms) -> int:
    """Return which tree has the longest length, and a target if one has any."""
    return int(np.argmax(terms["L"] * np.sign(terms.get("T", 1))))


def _leaves(tree: Any, relations: Mapping[Place, Relation]) -> dict[str, Any]:
    """Return the leaves of a tree by path, not taken further apart than those that follow something."""
    leaves = flatten([tree], stops={path for path, _ in relations})
    return {path: leaf for path, (leaf,) in leaves.items()}


def _changed(leaf: Any, key: int | str, relation: Relation, axes: Axes) -> Any:
    """Return a leaf with another size or other values."""
    wanted = relation.at(axes)
    size = max(1, round(wanted))
    if isinstance(key, int):
        return resized(leaf, key, size)
    if key == "inner":
        return type(leaf)(resized(item, 0, size) for item in leaf)
    if key == "value":
        return with_values(leaf, wanted)
    return with_values(leaf, layout(key, axes.row))


def shown(leaves: Leaves, relations: Relations) -> tuple[str, ...]:
    """Return a line for each leaf of some batches: its shape, its type, and what its values follow."""
    lines = []
    for path, group in leaves.items():
        leaf = group[0]
        kind = str(getattr(leaf, "dtype", type(leaf).__name__)).removeprefix("torch.")
        words = []
        for axis, size in enumerate(sizes(leaf)):
            varies = any(sizes(other)[axis : axis + 1] != (size,) for other in group)
            word = "…" if varies else size
            words.append(str(relations.get((path, axis), word)))
        values = [
            f", {key} {relation}"
            for (where, key), relation in relations.items()
            if where == path and isinstance(key, str)
        ]
        lines.append(f"{path or 'batch'}: [{', '.join(words)}] {kind}{''.join(values)}")
    return tuple(lines)
