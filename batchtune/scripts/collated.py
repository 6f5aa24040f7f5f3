"""Learns how the batches of a collate function follow the lengths of their examples, padded or packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from batchtune.lengths import IntArray
from batchtune.scripts.following import Leaves, Relations, followed
from batchtune.scripts.packed_rows import batches_of, is_offsets, packed_row
from batchtune.scripts.relations import (
    MANY,
    Axes,
    Numbers,
    Relation,
    Terms,
    first_fit,
    fitted,
)
from batchtune.scripts.trees import measured


@dataclass(frozen=True)
class Packing:
    """How the sequences of packed batches follow their examples, and whether the batches show where each begins.

    `total` is the term of their sum: `ΣL`, or `Σ(L-1)` where each is one shorter.
    """

    total: str = "ΣL"
    sequence: Relation = Relation("L")  # noqa: RUF009  # it is frozen
    shows_row: bool = True

    def axes(self, batch: Mapping[str, Any], total: int) -> Axes:
        """Return the shape of a batch; if it shows no sequences, it is a single one to the model as well."""
        row = packed_row(batch) if self.shows_row else None
        sizes = [total] if row is None else row.tolist()
        return Axes.packed(map(self.sequence.term_of, sizes))


def groups_of(count: int) -> list[IntArray]:
    """Return which of so many examples make each batch to learn from: one, two or three of any length."""
    random = np.random.default_rng(0)
    return [random.integers(0, count, 1 + number % 3) for number in range(MANY)]


def followed_collated(
    leaves: Leaves, groups: Sequence[IntArray], terms: Terms
) -> tuple[Relations, Packing | None]:
    """Return how the sizes of collated batches follow the terms of their examples, and how they are packed, if so.

    Raises Unclear as `followed` does.
    """
    counts = np.array([group.size for group in groups], float)
    batch_terms = {"B": counts}
    for term, values in terms.items():
        batch_terms[term] = np.array([values[group].max() for group in groups])
    for term, values in terms.items():
        batch_terms[f"B·{term}"] = counts * batch_terms[term]
        batch_terms[f"Σ{term}"] = _sums(values, groups)
    packings = _packings(leaves, groups, terms["L"])
    for packing in packings:
        batch_terms[packing.total] = _sums(_sizes(packing, terms["L"]), groups)
    # Their number is not always one more than that of examples: padding may be a sequence of its own.
    offsets = [path for path in leaves if _are_offsets(path, leaves)]
    others = {path: group for path, group in leaves.items() if path not in offsets}
    _, relations = followed(others, batch_terms, "collated batches", any_value=True)
    bounds = measured({path: leaves[path] for path in offsets})
    for place, seen in bounds.items():
        relation = first_fit(batch_terms, seen)
        if relation is not None:
            relations[place] = relation
    axes = {
        relation.term
        for (_, key), relation in relations.items()
        if isinstance(key, int)
    }
    if "T" in terms or axes & {"L", "B·L"}:
        return relations, None
    packings = [packing for packing in packings if packing.total in axes]
    for packing in packings:
        if _show_rows(leaves, groups, _sizes(packing, terms["L"])):
            return relations, packing
    if not packings:
        return relations, None
    return relations, replace(packings[0], shows_row=False)


def _packings(
    leaves: Leaves, groups: Sequence[IntArray], lengths: Numbers
) -> list[Packing]:
    """Return how sequences may follow their examples, by the sizes of batches of one example."""
    single = [number for number, group in enumerate(groups) if group.size == 1]
    base = np.array([lengths[groups[number][0]] for number in single])
    alone = {
        path: [group[number] for number in single] for path, group in leaves.items()
    }
    packings = {"ΣL": Packing()}
    for (_, key), seen in measured(alone).items():
        relation = fitted("L", base, seen)
        if isinstance(key, int) and relation is not None and str(relation) != "L":
            total = f"Σ({relation})"
            packings[total] = Packing(total, relation)
    return list(packings.values())


def _sums(values: Numbers, groups: Sequence[IntArray]) -> Numbers:
    return np.array([values[group].sum() for group in groups])


def _sizes(packing: Packing, lengths: Numbers) -> Numbers:
    """Return the size of each example's sequence in a packed batch."""
    return np.array([packing.sequence.at(Axes(1, int(length))) for length in lengths])


def _are_offsets(path: str, leaves: Leaves) -> bool:
    return all(is_offsets(path, batch) for batch in batches_of(leaves))


def _show_rows(leaves: Leaves, groups: Sequence[IntArray], sizes: Numbers) -> bool:
    """Return whether each batch shows its sequences; padding may follow, or be part of the last one."""
    for batch, group in zip(batches_of(leaves), groups, strict=True):
        row = packed_row(batch)
        wanted = sizes[group]
        if row is None or row.sum() < wanted.sum():
            return False
        if not np.array_equal(row[: wanted.size - 1], wanted[:-1]):
            return False
    return True
