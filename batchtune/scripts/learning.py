"""Learns from a training script's own examples or batches how to make batches of any shape.

An example is a batch without a batch axis. Examples are the better source: the script's own collate function then
makes masks, padding and offsets, and nothing of that has to be guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from batchtune.scripts.collated import Packing, followed_collated, groups_of
from batchtune.scripts.following import (
    NAME_THEM,
    Leaves,
    followed,
    has_rows,
)
from batchtune.scripts.packed_rows import batches_of, packed_row
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
    numeric,
    rebuilt,
    resized,
    sizes,
    with_values,
)
from batchtune.scripts.whole_batches import layout, learned_from_batches

__all__ = ["Axes", "Learned", "Unclear"]

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Learned:
    """Makes batches of any shape, as the script's DataLoader would deliver them, and measures its real ones.

    `lines` say what was learned of a batch, such as `sig: [B, L] float32`.
    """

    lines: tuple[str, ...]
    packing: Packing | None  # None: its batches are padded
    _terms: Terms
    _relations: Mapping[Place, Relation]  # of a batch
    _template: Any  # the longest example, or the longest row of a batch
    _template_relations: Mapping[Place, Relation]
    _collate: Collate | None

    @classmethod
    def from_examples(
        cls,
        examples: Sequence[Any],
        collate: Collate,
        *,
        length_key: str | None = None,
        target_key: str | None = None,
    ) -> Learned:
        """Learn from single examples, about 200, and the function that makes a batch of a list of them.

        `length_key` and `target_key` name leaves; a key that names none is ignored.

        Raises:
            Unclear: No axis, or more than two, vary; the batch does not show them; or `collate` fails.
        """
        example_leaves = flatten(examples)
        _check_unpacked(example_leaves)
        terms, template_relations = followed(
            example_leaves, {}, "examples", (length_key, target_key)
        )
        groups = groups_of(len(examples))
        leaves = flatten(
            [_collated(collate, [examples[i] for i in group]) for group in groups]
        )
        relations, packing = followed_collated(leaves, groups, terms)
        return cls(
            _lines(leaves, relations),
            packing,
            terms,
            relations,
            examples[_longest(terms)],
            template_relations,
            collate,
        )

    @classmethod
    def from_batches(
        cls,
        batches: Sequence[Any],
        *,
        length_key: str | None = None,
        target_key: str | None = None,
        batch_size_key: str | None = None,
    ) -> Learned:
        """Learn from whole batches, at least 6, of data sets that make them themselves.

        The batch size is the first axis of every leaf, or of the leaf `batch_size_key`.

        Raises:
            Unclear: The batches don't tell the axes apart, or their values.
        """
        leaves = flatten(batches)
        terms, relations = learned_from_batches(
            leaves, (length_key, target_key), batch_size_key
        )
        longest = _longest(terms)
        rows = {
            path: longest_row(group[longest])
            for path, group in leaves.items()
            if has_rows(path, relations)
        }
        return cls(
            _lines(leaves, relations),
            Packing() if "ΣL" in terms else None,
            terms,
            relations,
            rebuilt(batches[longest], rows),
            relations,
            None,
        )

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the size of the L axis in each example, or batch, in order."""
        return tuple(self._terms["L"].astype(int).tolist())

    @property
    def targets(self) -> tuple[int, ...] | None:
        """Return the size of the T axis in each example, or batch; None without such an axis."""
        if "T" not in self._terms:
            return None
        return tuple(self._terms["T"].astype(int).tolist())

    def make(self, axes: Axes) -> Any:
        """Return a batch of this shape; every example of a padded one is as long as the longest.

        `targets`' longest is that of all if none is given.

        Raises:
            Unclear: The script's collate function fails.
        """
        if axes.target_length is None and self.targets is not None:
            axes = replace(axes, target_length=max(self.targets))
        if self._collate is None:
            return self._resized(axes)
        examples = {
            length: self._resized(Axes(1, length, axes.target_length))
            for length in set(axes.row)
        }
        return _collated(self._collate, [examples[length] for length in axes.row])

    def _resized(self, axes: Axes) -> Any:
        """Return the template in this shape."""
        leaves = _leaves(self._template, self._template_relations)
        for (path, key), relation in self._template_relations.items():
            leaves[path] = _changed(leaves[path], key, relation, axes)
        return rebuilt(self._template, leaves)

    def axes_of(self, batch: Any) -> Axes:
        """Return the shape of a batch of the script, exactly or up to the multiple that it is padded to."""
        leaves = _leaves(batch, self._relations)
        found: dict[str, int] = {}
        seen = measured({path: [leaf] for path, leaf in leaves.items()})
        for place, relation in self._relations.items():
            if place in seen:
                largest = relation.term_of(seen[place][0])
                found[relation.term] = min(largest, found.get(relation.term, largest))
        if self.packing is not None and self.packing.total in found:
            return self.packing.axes(leaves, found[self.packing.total])
        axes = {
            relation.term
            for (_, key), relation in self._relations.items()
            if key != "value"
        }
        for total in found.keys() & {"B·L", "ΣL", "B·T", "ΣT"}:
            # The longest length of a batch without an axis of it tells less of it than the total.
            if total[-1] not in axes:
                found[total[-1]] = math.ceil(found[total] / found.get("B", 1))
        if not {"B", "L"} <= found.keys():
            raise Unclear("a batch of the script does not show its size and length")
        return Axes(found["B"], found["L"], found.get("T"))


def _longest(terms: Terms) -> int:
    """Return which tree has the longest length, and a target if one has any."""
    return int(np.argmax(terms["L"] * np.sign(terms.get("T", 1))))


def _leaves(tree: Any, relations: Mapping[Place, Relation]) -> dict[str, Any]:
    """Return the leaves of a tree by path, not taken further apart than those that follow something."""
    leaves = flatten([tree], stops={path for path, _ in relations})
    return {path: leaf for path, (leaf,) in leaves.items()}


def _check_unpacked(leaves: Leaves) -> None:
    """Raise Unclear if the data set has packed its examples: each is a row of sequences already."""
    rows = leaves.get("seq_lengths")  # as TRL writes them
    if rows is None:
        rows = [packed_row(example) for example in batches_of(leaves)]
    counts = [0 if row is None else len(row) for row in rows]
    most_sequences = max(counts)
    if min(counts) > 0 and most_sequences > 1:
        raise Unclear(
            f"the examples of the script's data set are packed already, up to {most_sequences} sequences in one",
            "Let the script pack when it makes batches, from a data set of single sequences: with TRL "
            "packing=False and padding_free=True, otherwise with transformers' DataCollatorWithFlattening.",
        )


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


def _collated(collate: Collate, examples: Sequence[Any]) -> Any:
    """Return a batch of copies: collate functions may change dicts and lists. Raises Unclear if the function fails."""
    try:
        return collate([rebuilt(example, {}) for example in examples])
    except Exception as error:
        raise Unclear(
            f"the script's collate function fails: {type(error).__name__}: {error}",
            NAME_THEM,
        ) from error


def _lines(leaves: Leaves, relations: Mapping[Place, Relation]) -> tuple[str, ...]:
    """Return a line for each leaf of the batches: its shape, its type, and what its values follow."""
    lines = []
    for path, group in leaves.items():
        leaf = group[0]
        kind = str(getattr(leaf, "dtype", type(leaf).__name__)).removeprefix("torch.")
        words = []
        for axis, size in enumerate(sizes(leaf)):
            varies = any(sizes(other)[axis : axis + 1] != (size,) for other in group)
            word = "…" if varies else size
            words.append(str(relations.get((path, axis), word)))
        line = f"{path or 'batch'}: [{', '.join(words)}] {kind}"
        values = [
            f", {key} {relation}"
            for (where, key), relation in relations.items()
            if where == path and isinstance(key, str)
        ]
        lines.append(line + ("".join(values) or _bound(group)))
    return tuple(lines)


def _bound(group: Sequence[Any]) -> str:
    """Return what whole numbers stay below: ` < 1000` for tokens, nothing for anything else."""
    largest = []
    for leaf in group:
        values = numeric(leaf)
        if values is None or "int" not in str(getattr(leaf, "dtype", "")):
            return ""
        largest.append(int(values.max()))
    return f" < {max(largest) + 1}"
