"""Finds how the sizes of a collate function's batches follow the lengths of their examples, padded or packed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from batchtune.lengths import IntArray
from batchtune.scripts.following import Leaves, Relations, followed_sizes
from batchtune.scripts.packed_rows import batches_of, is_offsets
from batchtune.scripts.relations import (
    MANY,
    Axes,
    Numbers,
    Terms,
    first_fit,
    fitted,
)
from batchtune.scripts.trees import measured


def groups_of(count: int) -> list[IntArray]:
    """Return which of so many examples make each batch to learn from: one, two or three of any length."""
    random = np.random.default_rng(0)
    return [random.integers(0, count, 1 + number % 3) for number in range(MANY)]


def followed_collated(
    leaves: Leaves, groups: Sequence[IntArray], terms: Terms
) -> tuple[Relations, bool]:
    """Return how the sizes of collated batches follow the terms of their examples, and whether they are packed.

    Raises Unclear as `followed_sizes` does.
    """
    counts = np.array([group.size for group in groups], float)
    batch_terms = {"B": counts}
    for term, values in terms.items():
        longest = np.array([values[group].max() for group in groups])
        batch_terms[term] = longest
        batch_terms[f"B·{term}"] = counts * longest
        batch_terms[f"Σ{term}"] = _sums(values, groups)
    totals = {"ΣL": batch_terms["ΣL"], **_totals(leaves, groups, terms["L"])}
    batch_terms |= totals
    # Their number is not always one more than that of examples: padding may be a sequence of its own.
    batches = list(batches_of(leaves))
    offsets: Leaves = {}
    others: Leaves = {}
    for path, group in leaves.items():
        if all(is_offsets(path, batch) for batch in batches):
            offsets[path] = group
        else:
            others[path] = group
    _, relations = followed_sizes(others, batch_terms, "collated batches")
    for place, seen in measured(offsets).items():
        relation = first_fit(batch_terms, seen)
        if relation is not None and place[1] != "value":
            relations[place] = relation
    axes = {relation.term for relation in relations.values()}
    has_totals = bool(axes & totals.keys())
    return relations, has_totals and "T" not in terms and not axes & {"L", "B·L"}


def _totals(leaves: Leaves, groups: Sequence[IntArray], lengths: Numbers) -> Terms:
    """Return the totals of sequences that are longer or shorter than their examples: `Σ(L-1)`.

    The sizes of batches of one example tell how long a sequence is.
    """
    single = [number for number, group in enumerate(groups) if group.size == 1]
    base = lengths[[groups[number][0] for number in single]]
    alone = {path: [group[i] for i in single] for path, group in leaves.items()}
    totals: Terms = {}
    for (_, key), seen in measured(alone).items():
        relation = fitted("L", base, seen)
        if key != "value" and relation is not None and str(relation) != "L":
            sequences = [relation.at(Axes(1, length)) for length in lengths.tolist()]
            totals[f"Σ({relation})"] = _sums(np.array(sequences), groups)
    return totals


def _sums(values: Numbers, groups: Sequence[IntArray]) -> Numbers:
    return np.array([values[group].sum() for group in groups])
