"""Learns from a training script's own batches how to make batches of any shape, where none can be drawn.

That is where its data set makes them itself, or its examples are in another order than the manifest: see `drawing`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from batchtune.errors import WorkloadError
from batchtune.probe.requests import ScriptRequest
from batchtune.results import BatchShape
from batchtune.scripts.drawing import NO_TARGETS, collated
from batchtune.scripts.following import Leaves, Relations, has_rows
from batchtune.scripts.packed_rows import packed_row
from batchtune.scripts.per_unit import Scale, scale_of
from batchtune.scripts.relations import (
    MANY,
    AxisShape,
    LeafAxis,
    Relation,
    Terms,
    Unclear,
)
from batchtune.scripts.trees import (
    flatten,
    joined,
    longest_row,
    measured,
    numeric,
    padding_of_rows,
    rebuilt,
    resized,
    sizes,
    stretched,
    taken,
    with_values,
)
from batchtune.scripts.whole_batches import layout, learned_from_batches

__all__ = ["AxisShape", "Learned", "Unclear"]


# A row that shows how rows are padded is padding by this part at least.
_PADDING = 0.1


@dataclass(frozen=True)
class PaddedRow:
    """A padded row of a batch of the script: its leaves, each as a batch of one, and the part that is no padding."""

    leaves: dict[str, Any]
    filled: float


@dataclass
class Learned:
    """Makes batches of any shape, as the script's data set would, and measures its real ones.

    Their last row is padded, if padding was seen, since many models make a mask only where there is padding.
    `lines` say what was learned of a batch, such as `sig: [B, L] float32`.
    """

    lines: tuple[str, ...]
    packed: bool
    _terms: Terms
    _relations: Relations
    _template: Any  # the longest row of a batch
    _padded: PaddedRow | None
    scale: Scale = Scale(1.0)  # noqa: RUF009  # it is frozen
    target_scale: Scale | None = None
    longest_target: int = 0

    @classmethod
    def from_examples(
        cls,
        examples: Sequence[Any],
        collate: Callable[[list[Any]], Any],
        **keys: str | None,
    ) -> Learned:
        """Learn from batches of one, two or three examples; keys and errors are those of `from_batches`."""
        random = np.random.default_rng(0)
        batches = []
        for number in range(MANY):
            group = random.integers(0, len(examples), 1 + number % 3)
            batches.append(collated(collate, [examples[index] for index in group]))
        return cls.from_batches(batches, **keys)

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
        longest = int(np.argmax(terms["L"] * np.sign(terms.get("T", 1))))
        rows = {
            path: longest_row(group[longest])
            for path, group in leaves.items()
            if has_rows(path, relations)
        }
        template = rebuilt(batches[longest], rows)
        packed = "ΣL" in terms
        padded = None if packed else _padded_row(leaves, relations)
        lines = _shown(leaves, relations)
        return cls(lines, packed, terms, relations, template, padded)

    @property
    def lengths(self) -> list[int]:
        """Return the size of the L axis in each batch, in order."""
        return self._sizes("L")

    @property
    def targets(self) -> list[int]:
        """Return the size of the T axis in each batch; none without such an axis."""
        return self._sizes("T")

    def _sizes(self, term: str) -> list[int]:
        return [int(size) for size in self._terms.get(term, ())]

    def fit(
        self,
        script: ScriptRequest,
        options: Mapping[str, Any],
        largest: Callable[[int], int] = int,
    ) -> None:
        """Find how the sizes follow the manifest of a script; `largest` is the largest of all ranks.

        Raises:
            WorkloadError: The manifest has targets, but the batches have no second length.
            Unclear: No common ratio, or more than one, makes the manifest's lengths those that were seen.
        """
        # Without target lengths in the manifest: as long as any that was seen.
        self.longest_target = largest(max(self.targets, default=0))
        self.scale = scale_of(
            self.lengths,
            np.asarray(script.lengths),
            options.get("per_unit"),
            what="length",
        )
        if script.targets is None:
            return
        if not self.targets:
            raise WorkloadError(*NO_TARGETS)
        self.target_scale = scale_of(
            self.targets,
            np.asarray(script.targets),
            options.get("target_per_unit"),
            what="target",
        )

    def twins(self, batches: list[Any]) -> Iterator[tuple[BatchShape, Any, Any]]:
        """Yield the shapes of the script's own batches, each with the batch and one that is made in its shape."""
        for batch in batches:
            axes = self.axes_of(batch)
            per_unit = self.scale.per_unit
            target: float | None = axes.target_length
            if target is not None and self.target_scale is not None:
                target /= self.target_scale.per_unit
            shape = BatchShape(axes.batch_size, axes.length / per_unit, target)
            if axes.sequences is not None:
                row = [max(1, round(size / per_unit)) for size in axes.sequences]
                shape = BatchShape.packed(row)
            yield shape, batch, self._with_padding(self.sized(axes), axes)

    def make(self, shape: BatchShape) -> Any:
        """Return a batch of this shape, in the manifest's units."""
        size = self.scale.size
        if shape.sequences is not None:
            return self.sized(AxisShape.packed(map(size, shape.sequences)))
        target = self.longest_target or None
        if shape.target_length is not None and self.target_scale is not None:
            target = self.target_scale.size(shape.target_length)
        axes = AxisShape(shape.batch_size, size(shape.length), target)
        return self._with_padding(self.sized(axes), axes)

    def sized(self, axes: AxisShape) -> Any:
        """Return a batch with axes of these sizes."""
        leaves = _leaves(self._template, self._relations)
        for (path, key), relation in self._relations.items():
            leaves[path] = _changed(leaves[path], key, relation, axes)
        return rebuilt(self._template, leaves)

    def _with_padding(self, batch: Any, axes: AxisShape) -> Any:
        """Return a made batch with a padded row instead of its last one; as it is if it has one or two."""
        if self._padded is None or axes.batch_size <= 2:
            return batch
        leaves = _leaves(batch, self._relations)
        for path, row in self._padded.leaves.items():
            for (of, key), relation in self._relations.items():
                if of == path and key != 0:
                    row = _stretched(row, key, relation, axes, self._padded.filled)
            leaves[path] = joined(leaves[path][:-1], row)
        return rebuilt(batch, leaves)

    def axes_of(self, batch: Any) -> AxisShape:
        """Return the shape of a batch of the script, exactly or up to the multiple that it is padded to."""
        leaves = _leaves(batch, self._relations)
        row = packed_row(leaves)
        if self.packed and row is not None:
            return AxisShape.packed(row.tolist())
        seen = measured({path: [leaf] for path, leaf in leaves.items()})
        found: dict[str, int] = {}

        def doubt(item: tuple[LeafAxis, Relation]) -> tuple[bool, bool]:
            (_, key), relation = item
            return key == "value", relation != Relation(relation.term)

        # What a value follows may be an accident.
        for place, relation in sorted(self._relations.items(), key=doubt):
            if place in seen:
                found.setdefault(relation.term, relation.term_of(seen[place][0]))
        if not {"B", "L"} <= found.keys():
            raise Unclear("a batch of the script does not show its size and length")
        return AxisShape(found["B"], found["L"], found.get("T"))


def _padded_row(leaves: Leaves, relations: Relations) -> PaddedRow | None:
    """Return the row of the batches that has least padding, of those with enough; None if there is none."""
    of_rows = [path for path in leaves if has_rows(path, relations)]
    axes = {
        path: key
        for (path, key), relation in relations.items()
        if path in of_rows and isinstance(key, int) and relation.term == "L"
    }
    found: PaddedRow | None = None
    for batch in range(len(next(iter(leaves.values())))):
        shares = [
            padding_of_rows(leaves[path][batch], axis)
            for path, axis in axes.items()
            if numeric(leaves[path][batch]) is not None
        ]
        if not shares:
            return None
        # Labels may begin alike where the others have no padding, and positions go on where these have some.
        padding = np.sort(shares, axis=0)[(len(shares) - 1) // 2]
        for row in np.flatnonzero(padding >= _PADDING):
            filled = 1 - float(padding[row])
            if found is None or filled > found.filled:
                index = np.array([row])
                rows = {path: taken(leaves[path][batch], 0, index) for path in of_rows}
                found = PaddedRow(rows, filled)
    return found


def _stretched(
    row: Any, key: int | str, relation: Relation, axes: AxisShape, filled: float
) -> Any:
    """Return a padded row's leaf with another size or other values, and the same share of padding."""
    wanted = relation.at(axes)
    size = max(1, round(wanted))
    if isinstance(key, int):
        return stretched(row, key, size)
    if key == "inner":
        return type(row)(stretched(item, 0, max(1, int(size * filled))) for item in row)
    return with_values(
        row, max(wanted * filled, 1) if relation.whole else wanted * filled
    )


def _leaves(tree: Any, relations: Mapping[LeafAxis, Relation]) -> dict[str, Any]:
    """Return the leaves of a tree by path, not taken further apart than those that follow something."""
    leaves = flatten([tree], stops={path for path, _ in relations})
    return {path: leaf for path, (leaf,) in leaves.items()}


def _changed(leaf: Any, key: int | str, relation: Relation, axes: AxisShape) -> Any:
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


def _shown(leaves: Leaves, relations: Relations) -> tuple[str, ...]:
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
