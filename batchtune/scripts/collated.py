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

    def sizes(self, lengths: Numbers) -> Numbers:
        """Return the size of each example's sequence."""
        return np.array([self.sequence.at(Axes(1, int(length))) for length in lengths])

    def axes(self, batch: Mapping[str, Any], total: int) -> Axes:
        """Return the shape of a batch; if it shows no sequences, it is a single one to the model as well."""
        sizes = [total]
        row = packed_row(batch)
        if row is not None and self.shows_row:
            sizes = row.tolist()
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
        longest = np.array([values[group].max() for group in groups])
        batch_terms[term] = longest
        batch_terms[f"B·{term}"] = counts * longest
        batch_terms[f"Σ{term}"] = _sums(values, groups)
    packings = _packings(leaves, groups, terms["L"])
    for packing in packings:
        batch_terms[packing.total] = _sums(packing.sizes(terms["L"]), groups)
    # Their number is not always one more than that of examples: padding may be a sequence of its own.
    batches = list(batches_of(leaves))
    offsets: Leaves = {}
    others: Leaves = {}
    for path, group in leaves.items():
        if all(is_offsets(path, batch) for batch in batches):
            offsets[path] = group
        else:
            others[path] = group
    _, relations = followed(others, batch_terms, "collated batches", any_value=True)
    for place, seen in measured(offsets).items():
        relation = first_fit(batch_terms, seen)
        if relation is not None:
            relations[place] = relation
    axes = {relation.term for (_, key), relation in relations.items() if key != "value"}
    if "T" not in terms and not axes & {"L", "B·L"}:
        for packing in packings:
            if packing.total in axes:
                sizes = packing.sizes(terms["L"])
                rows = [sizes[group] for group in groups]
                shows_row = all(map(_begins_with, map(packed_row, batches), rows))
                return relations, replace(packing, shows_row=shows_row)
    return relations, None


def _packings(
    leaves: Leaves, groups: Sequence[IntArray], lengths: Numbers
) -> list[Packing]:
    """Return how sequences may follow their examples, by the sizes of batches of one example."""
    single = [number for number, group in enumerate(groups) if group.size == 1]
    base = lengths[[groups[number][0] for number in single]]
    alone = {path: [group[i] for i in single] for path, group in leaves.items()}
    packings = {"ΣL": Packing()}
    for (_, key), seen in measured(alone).items():
        relation = fitted("L", base, seen)
        if key != "value" and relation is not None and str(relation) != "L":
            total = f"Σ({relation})"
            packings[total] = Packing(total, relation)
    return list(packings.values())


def _sums(values: Numbers, groups: Sequence[IntArray]) -> Numbers:
    return np.array([values[group].sum() for group in groups])


def _begins_with(row: IntArray | None, sizes: Numbers) -> bool:
    """Return whether a row shows these sequences; padding may follow them, or be part of the last one."""
    if row is None or row.sum() < sizes.sum():
        return False
    return np.array_equal(row[: sizes.size - 1], sizes[:-1])
