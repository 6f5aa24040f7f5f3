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

from batchtune.scripts.per_unit import units_per_length
from batchtune.scripts.relations import (
    NAME_THEM,
    Axes,
    Place,
    Relation,
    Seen,
    Terms,
    Unclear,
    first_fit,
    told_apart,
)
from batchtune.scripts.trees import (
    flatten,
    is_text,
    measured,
    rebuilt,
    resized,
    sizes,
    sizes_of,
    with_values,
)
from batchtune.scripts.whole_batches import learned_from_batches

__all__ = ["Axes", "Learned", "Unclear", "units_per_length"]

_SHOWN_LENGTHS = 6
_SHOWN_EXAMPLES = 8


@dataclass(frozen=True)
class _Template:
    """A tree, and how its leaves follow the axes."""

    tree: Any
    leaves: Mapping[str, Any]
    relations: Mapping[Place, Relation]

    @classmethod
    def of_longest(
        cls,
        trees: Sequence[Any],
        leaves: Mapping[str, Sequence[Any]],
        relations: Mapping[Place, Relation],
        terms: Terms,
    ) -> _Template:
        """Take the tree with the longest length, and a target if one has any; sizes change before values do."""
        size = np.prod([terms[name] for name in terms if name in "LT"], axis=0)
        longest = int(np.argmax(terms["L"] * (size > 0)))
        ordered = sorted(relations, key=lambda place: isinstance(place[1], str))
        return cls(
            trees[longest],
            {path: group[longest] for path, group in leaves.items()},
            {place: relations[place] for place in ordered},
        )

    def make(self, axes: Axes) -> Any:
        made = dict(self.leaves)
        for (path, key), relation in self.relations.items():
            wanted = relation.at(axes)
            made[path] = _changed(made[path], key, wanted)
        return rebuilt(self.tree, made)


def _changed(leaf: Any, key: int | str, wanted: float) -> Any:
    """Return a leaf with another size or other values."""
    if key == "value":
        return with_values(leaf, wanted)
    size = max(1, round(wanted))
    if key == "inner":
        return type(leaf)(resized(item, 0, size) for item in leaf)
    if isinstance(key, int):
        return resized(leaf, key, size)
    numbers = np.arange(sizes(leaf)[-1])
    if key == "offsets":
        return with_values(leaf, numbers * size)
    if key == "positions":
        return with_values(leaf, numbers % size)
    return with_values(leaf, numbers // size)


@dataclass(frozen=True)
class Learned:
    """Makes batches of any shape, as the script's DataLoader would deliver them, and measures its real ones.

    `lines` say what was learned of a batch, such as `sig: [B, L] float32`.
    """

    lines: tuple[str, ...]
    _terms: Terms
    _template: _Template
    _collate: Callable[[list[Any]], Any] | None
    _relations: Mapping[Place, Relation]  # of a batch

    @classmethod
    def from_examples(
        cls,
        examples: Sequence[Any],
        collate: Callable[[list[Any]], Any],
        *,
        length_key: str | None = None,
        target_key: str | None = None,
    ) -> Learned:
        """Learn from single examples, about 200, and the function that makes a batch of a list of them.

        `length_key` and `target_key` name leaves; a key that names none is ignored.

        Raises:
            Unclear: No axis, or more than two, vary; the batch does not show them; or `collate` fails.
        """
        leaves = flatten(examples)
        seen = measured(leaves)
        varying = {
            place: values
            for place, values in seen.items()
            if place[1] != "value"
            and np.ptp(values) > 0
            and not is_text(leaves[place[0]][0])
        }
        terms, relations = told_apart(varying, length_key, target_key, "examples")
        for place, values in seen.items():
            if place[1] == "value" and not any(sizes(leaves[place[0]][0])):
                relation = first_fit(terms, values)
                if relation is not None and relation.sure:
                    relations[place] = relation
        template = _Template.of_longest(examples, leaves, relations, terms)
        shown = _shown_batches(examples, collate, template, terms)
        batch = _batch_relations(shown)
        found = {relation.term for relation in batch.values()}
        if not found & {"T", "B·T"}:
            terms.pop("T", None)
        made = [batch for _, batch in shown]
        return cls(_lines(made, batch), terms, template, collate, batch)

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

        The batch size is the first axis, of the leaf `batch_size_key` or of most leaves.

        Raises:
            Unclear: The batches don't tell the axes apart, or their values.
        """
        leaves, relations, terms = learned_from_batches(
            batches, length_key, target_key, batch_size_key
        )
        template = _Template.of_longest(batches, leaves, relations, terms)
        small = replace(template, tree=rebuilt(template.tree, template.leaves))
        return cls(_lines(batches, relations), terms, small, None, relations)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the size of the L axis in each example, or batch, in order."""
        return _whole(self._terms["L"])

    @property
    def targets(self) -> tuple[int, ...] | None:
        """Return the size of the T axis in each example, or batch; None without such an axis."""
        return _whole(self._terms["T"]) if "T" in self._terms else None

    def make(self, axes: Axes) -> Any:
        """Return a batch of this shape, every example as long as the longest; `targets`' longest if none is given."""
        if axes.target_length is None and self.targets is not None:
            axes = replace(axes, target_length=max(self.targets))
        if self._collate is None:
            return self._template.make(axes)
        example = self._template.make(axes)
        # Collate functions may change the examples: each has its own dicts and lists, arrays are shared.
        return self._collate([rebuilt(example, {}) for _ in range(axes.batch_size)])

    def axes_of(self, batch: Any) -> Axes:
        """Return the shape of a batch of the script, exactly or up to the multiple that it is padded to."""
        leaves = flatten([batch], stops={path for path, _ in self._relations})
        seen = measured(leaves)
        batch_size = self._term("B", seen, 1)
        return Axes(
            batch_size,
            self._term("L", seen, batch_size),
            None if self.targets is None else self._term("T", seen, batch_size),
        )

    def _term(self, term: str, seen: Seen, batch_size: int) -> int:
        """Return a term by the size that shows it most precisely, or a value or a total if no size does."""
        places = [
            place
            for place, relation in self._relations.items()
            if relation.term in (term, f"B·{term}") and place in seen
        ]
        if not places:
            raise Unclear(f"the batch shows no {term}: it is unlike those before")

        def precision(place: Place) -> tuple[bool, bool, float]:
            relation = self._relations[place]
            return (
                isinstance(place[1], int),
                relation.term == term,
                min(1, relation.ratio),
            )

        best = max(places, key=precision)
        found = self._relations[best].term_of(seen[best][0])
        return (
            found
            if self._relations[best].term == term
            else math.ceil(found / batch_size)
        )


def _whole(sizes_seen: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in sizes_seen)


def _shown_batches(
    examples: Sequence[Any],
    collate: Callable[[list[Any]], Any],
    template: _Template,
    terms: Terms,
) -> list[tuple[Axes, Any]]:
    """Return batches of single real examples, and of made ones whose axes vary independently, with their shapes."""
    targets = terms.get("T")
    shown = []
    try:
        for row in _spread(np.arange(len(examples)), _SHOWN_EXAMPLES):
            target = None if targets is None else int(targets[row])
            axes = Axes(1, int(terms["L"][row]), target)
            shown.append((axes, collate([rebuilt(examples[row], {})])))
        lengths = _spread(np.unique(terms["L"]), _SHOWN_LENGTHS)
        for number, length in enumerate([*lengths, *lengths]):
            target = None
            if targets is not None:
                between = _spread(np.unique(targets), _SHOWN_LENGTHS)
                target = between[(5 * number + 1) % len(between)]
            axes = Axes(2 + number % 2 + number // len(lengths), length, target)
            example = template.make(axes)
            copies = [rebuilt(example, {}) for _ in range(axes.batch_size)]
            shown.append((axes, collate(copies)))
    except Exception as error:
        raise Unclear(
            f"the script's collate function fails on made examples: {type(error).__name__}: {error}",
            NAME_THEM,
        ) from error
    return shown


def _spread(numbers: Any, count: int) -> list[int]:
    """Return some of ascending numbers, from the first to the last."""
    rows = np.unique(np.linspace(0, len(numbers) - 1, count).round().astype(int))
    return [int(numbers[row]) for row in rows]


def _batch_relations(shown: Sequence[tuple[Axes, Any]]) -> dict[Place, Relation]:
    """Return how the sizes and values of collated batches follow their shapes."""
    batches = [batch for _, batch in shown]
    leaves = flatten(batches)
    shapes = [axes.terms() for axes, _ in shown]
    terms = {
        name: np.array([shape[name] for shape in shapes], float) for name in shapes[0]
    }
    relations = {}
    for place, values in measured(leaves).items():
        path, key = place
        relation = first_fit(terms, values)
        if key == "value":
            if relation is not None and relation.sure:
                relations[place] = relation
        elif relation is not None:
            relations[place] = relation
        elif np.ptp(values) > 0:
            raise Unclear(
                f"{path} axis {key} of the script's batches follows neither the batch size nor the lengths: "
                f"from {values.min():g} to {values.max():g} in {len(values)} batches",
                NAME_THEM,
            )
    found = {relation.term for relation in relations.values()}
    if "B" not in found or not found & {"L", "B·L"}:
        raise Unclear(
            f"the script's batches don't show their batch size and length: {sizes_of(leaves)}",
            f"{NAME_THEM} If the collate function makes all examples equally long, there is nothing to tune.",
        )
    return relations


def _lines(
    batches: Sequence[Any], relations: Mapping[Place, Relation]
) -> tuple[str, ...]:
    """Return a line for each leaf of the batches that has axes, or a value that follows one."""
    leaves = flatten(batches)
    seen = measured(leaves)
    lines = []
    for path, group in leaves.items():
        leaf = group[0]
        words = [
            str(relations.get((path, axis), size))
            for axis, size in enumerate(sizes(leaf))
        ]
        values = [
            (key, relations[where, key])
            for where, key in relations
            if where == path and isinstance(key, str)
        ]
        if path.rpartition(".")[2].startswith("_") or not (words or values):
            continue
        kind = str(getattr(leaf, "dtype", type(leaf).__name__)).removeprefix("torch.")
        line = (
            f"{path or 'batch'}: " + (f"[{', '.join(words)}] " if words else "") + kind
        )
        for key, relation in values:
            line += f" = {relation}" if key == "value" else f", {key} {relation}"
        if not values and "int" in kind and (path, "value") in seen:
            line += f" < {seen[path, 'value'].max() + 1:.0f}"
        lines.append(line)
    return tuple(lines)
