"""Learns from a training script's own batches how to make batches of any shape, where none can be drawn.

That is where its data set makes them itself, or its examples are in another order than the manifest: see `drawing`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from batchtune.errors import WorkloadError
from batchtune.lengths import FloatArray, IntArray
from batchtune.probe.requests import ScriptRequest
from batchtune.results import BatchShape
from batchtune.scripts.drawing import (
    NO_TARGETS,
    Leaves,
    LengthKeys,
    Relations,
    collated,
    followed,
    has_rows,
    ranges,
)
from batchtune.scripts.relations import (
    MANY,
    AxisShape,
    LeafAxis,
    Relation,
    Scale,
    Seen,
    Terms,
    Unclear,
    scale_of,
)
from batchtune.scripts.trees import (
    batches_of,
    flatten,
    joined,
    leaves_of,
    longest_row,
    measured,
    numeric,
    packed_row,
    padding_of_rows,
    rebuilt,
    resized,
    sizes,
    stretched,
    taken,
    with_values,
)

# A row that shows how rows are padded is padding by this part at least.
_PADDING = 0.1
# Whole batches to learn from.
_FEWEST = 6
# Of the strides with which models and data sets shorten a sequence.
_LONGEST_STRIDE = 16


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
        terms, relations = _learned_from_batches(
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
        targets = [int(size) for size in self._terms.get("T", ())]
        self.longest_target = largest(max(targets, default=0))
        self.scale = scale_of(
            self._terms["L"].astype(int).tolist(),
            np.asarray(script.lengths),
            options.get("per_unit"),
            what="length",
        )
        if script.targets is None:
            return
        if not targets:
            raise WorkloadError(*NO_TARGETS)
        self.target_scale = scale_of(
            targets,
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
                    row = _changed(
                        row, key, relation, axes, stretched, self._padded.filled
                    )
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


def _leaves(tree: Any, relations: Mapping[LeafAxis, Relation]) -> dict[str, Any]:
    """Return the leaves of a tree by path, not taken further apart than those that follow something."""
    return leaves_of(tree, {path for path, _ in relations})


def _changed(
    leaf: Any,
    key: int | str,
    relation: Relation,
    axes: AxisShape,
    change: Callable[[Any, int, int], Any] = resized,
    filled: float = 1.0,
) -> Any:
    """Return a leaf with another size or other values; that of a padded row has the same share of padding."""
    wanted = relation.at(axes)
    size = max(1, round(wanted))
    if isinstance(key, int):
        return change(leaf, key, size)
    if key == "inner":
        of_item = max(1, int(size * filled))
        return type(leaf)(change(item, 0, of_item) for item in leaf)
    if key != "value":
        return with_values(leaf, _layout(key, axes.row))
    value = wanted * filled
    if filled < 1 and relation.whole:
        value = max(value, 1)
    return with_values(leaf, value)


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


def _learned_from_batches(
    leaves: Leaves, keys: LengthKeys, batch_size_key: str | None
) -> tuple[Terms, Relations]:
    """Return the axes of each batch, and how the leaves follow them.

    Raises:
        Unclear: The batches don't tell the axes apart, or which values follow them.
    """
    for path, group in leaves.items():
        if len(group) < _FEWEST:
            raise Unclear(
                f"{len(group)} whole batches of the script are too few to learn from",
                f"Learning from whole batches needs at least {_FEWEST}.",
            )
        if len({len(sizes(leaf)) for leaf in group}) > 1:
            raise Unclear(
                f"{path} is not in every batch of the script, or not always of the same kind"
            )
    rows = [packed_row(batch) for batch in batches_of(leaves)]
    lengths = [row for row in rows if row is not None]
    if len(lengths) == len(rows) and any(row.size > 1 for row in lengths):
        return _packed_relations(leaves, lengths)
    seen = measured(leaves)
    terms, relations = followed(
        leaves, {"B": _batch_sizes(seen, batch_size_key)}, "batches", keys
    )
    _check_fixed_sizes(seen, terms, relations)
    return terms, relations


def _check_fixed_sizes(seen: Seen, terms: Terms, relations: Relations) -> None:
    """Raise Unclear for a size that is the same in all batches, but would be so too if it followed a length."""
    strides = np.arange(2, _LONGEST_STRIDE + 1)
    for (path, axis), values in seen.items():
        fixed = values[0]
        if np.ptp(values) or fixed == 1 or axis == "value":
            continue
        if not has_rows(path, relations):
            continue
        for term in terms.keys() - {"B"}:
            strided = terms[term] / strides[:, None]
            if (np.abs(strided - fixed) < 1).all(axis=1).any():
                raise Unclear(
                    f"the script's batches don't tell whether {path} axis {axis}, always {fixed:.0f}, follows the "
                    f"length, from {terms[term].min():.0f} to {terms[term].max():.0f}",
                    "Let the data set make batches whose lengths differ more.",
                )


def _batch_sizes(seen: Seen, key: str | None) -> FloatArray:
    """Return the first size of every leaf, or of the one that the key names, in each batch."""
    firsts = {path: values for (path, axis), values in seen.items() if axis == 0}
    if key in firsts:
        firsts = {key: firsts[key]}
    if len({tuple(values) for values in firsts.values()}) != 1:
        raise Unclear(
            f"the first axis of the script's batches is not the same in all leaves: {ranges(seen)}",
            "Name a leaf whose first axis is the batch size: --batch-size-key.",
        )
    counts = next(iter(firsts.values()))
    same = [
        f"{path} ({key})"
        for (path, key), values in seen.items()
        if key != 0 and np.array_equal(values, counts)
    ]
    if np.ptp(counts) == 0 and (same or counts[0] == 1):
        raise Unclear(
            f"every batch has {counts[0]:.0f} rows: what else may follow them is unknown ({', '.join(same)})",
            "Let the data set make batches of different sizes.",
        )
    return counts


def _packed_relations(
    leaves: Leaves, lengths: Sequence[Any]
) -> tuple[Terms, Relations]:
    """Return the terms of batches without padding, and how every size follows them."""
    terms = {
        "B": np.array([len(each) for each in lengths], float),
        "L": np.array([each.max() for each in lengths], float),
        "ΣL": np.array([each.sum() for each in lengths], float),
    }
    others = dict(leaves)
    layouts: Relations = {}
    for path, group in leaves.items():
        arrays = [numeric(leaf) for leaf in group]
        if _are_laid_out(arrays, lengths, "offsets"):
            layouts[path, 0] = Relation("B", offset=1)
            layouts[path, "offsets"] = Relation("L")
            del others[path]
        for kind in ("positions", "numbers"):
            if _are_laid_out(arrays, lengths, kind):
                layouts[path, kind] = Relation("L")
    terms, relations = followed(others, terms, "batches")
    return terms, relations | layouts


def _are_laid_out(arrays: Sequence[Any], lengths: Sequence[Any], kind: str) -> bool:
    """Return whether a leaf has this layout of packed examples in each batch."""
    return all(
        values is not None and np.array_equal(values.ravel(), _layout(kind, each))
        for values, each in zip(arrays, lengths, strict=True)
    )


def _layout(kind: str, lengths: Any) -> IntArray:
    """Return offsets of packed examples, or for each entry its position in its example, or the example's number."""
    if kind == "offsets":
        return np.append(0, np.cumsum(lengths))
    if kind == "numbers":
        return np.repeat(np.arange(len(lengths)), lengths)
    return np.concatenate([np.arange(length) for length in lengths])
