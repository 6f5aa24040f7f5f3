"""Finds what the sizes and values in a training script's examples or batches follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from batchtune.manifests.base import INPUTS
from batchtune.scripts.relations import (
    LeafAxis,
    Relation,
    Seen,
    Terms,
    Unclear,
    first_fit,
    fitted,
)
from batchtune.scripts.trees import measured, sizes

Leaves = dict[str, list[Any]]
Relations = dict[LeafAxis, Relation]

NAME_THEM = (
    "Name the leaf that has the length with --length-key, and the target's with "
    "--target-key, or write the training step as a workload: --workload FILE.py:NAME."
)


# The names of the leaves that have the length and the target, from the user; a name of no leaf is ignored.
LengthKeys = tuple[str | None, str | None]


def followed_sizes(
    leaves: Leaves, terms: Terms, noun: str, keys: LengthKeys | None = None
) -> tuple[Terms, Relations]:
    """Return all terms, and how every size that varies follows them.

    With `keys`, sizes that follow no term become terms: first the length L, then, if another is left, the target T.

    Raises:
        Unclear: A size follows no term, or none follows a length.
    """
    seen = measured(leaves)
    relations: Relations = {}
    left: Seen = {}
    for place, values in seen.items():
        if place[1] == "value":
            continue
        relation = first_fit(terms, values)
        if relation is not None:
            relations[place] = relation
        elif np.ptp(values) > 0 and not _is_text(leaves[place[0]][0]):
            left[place] = values
    if keys is not None:
        _check_named(keys[0], seen, relations, noun)
        terms = dict(terms)
        _found(terms, "L", relations, left, keys)
        _found(terms, "T", relations, left, keys[::-1])
    if left:
        raise Unclear(
            f"in the script's {noun}, {ranges(left)} follows neither the batch size nor another length",
            NAME_THEM,
        )
    if "T" in terms and fitted("T", terms["T"], terms["L"]) is not None:
        raise Unclear(
            f"the length that was named follows a finer size of the script's {noun}",
            "Name the finer one with --length-key.",
        )
    if not any("L" in relation.term for relation in relations.values()):
        raise Unclear(
            f"no size of the script's {noun} follows a length: there may be nothing to tune",
            NAME_THEM,
        )
    return terms, relations


def followed(
    leaves: Leaves, terms: Terms, noun: str, keys: LengthKeys | None = None
) -> tuple[Terms, Relations]:
    """Return what `followed_sizes` does, and how numbers follow the terms that stand alone, or one for each row.

    Raises:
        Unclear: As `followed_sizes` does; or it can't be told how one follows a term.
    """
    terms, relations = followed_sizes(leaves, terms, noun, keys)
    for place, values in measured(leaves).items():
        shape = sizes(leaves[place[0]][0])
        is_row = len(shape) == 1 and has_rows(place[0], relations)
        if place[1] == "value" and (shape in ((), (1,)) or is_row):
            relation = first_fit(terms, values)
            # Few numbers that hardly grow, such as the largest of some tokens, fit 1/475·L+7 by accident.
            if relation is not None and (relation.ratio >= 1 or relation.offset <= 2):
                relations[place] = relation
    for place, relation in relations.items():
        if not relation.sure:
            raise Unclear(
                f"the script's {noun} don't tell whether {place[0]} follows {relation}",
                NAME_THEM,
            )
    return terms, relations


def _check_named(key: str | None, seen: Seen, relations: Relations, noun: str) -> None:
    """Raise Unclear if the leaf that should have the length has the same sizes in all."""
    named = {
        place: values
        for place, values in seen.items()
        if place[1] != "value" and _names(key, place[0]) and values.max() > 1
    }
    named = {place: named[place] for place in named.keys() - relations.keys()}
    if named and not any(map(np.ptp, named.values())):
        raise Unclear(
            f"--length-key {key} names a part of the script's {noun} that is always as long: {ranges(named)}",
            "Name another, or leave it out.",
        )


def _found(
    terms: Terms,
    term: str,
    relations: Relations,
    left: Seen,
    keys: LengthKeys,
) -> None:
    """Make the size that the first key names, or the longest, a term, and take what follows it from those left."""

    def rank(place: LeafAxis) -> tuple[int, bool, float]:
        path = place[0]
        is_input = path.rpartition(".")[2] in INPUTS
        named = _names(keys[0], path) - _names(keys[1], path)
        return named, is_input, left[place].mean()

    # Without a batch axis it may be a total over the batch, such as the nodes of graphs.
    single = [
        place for place in left if "B" not in terms or has_rows(place[0], relations)
    ]
    if not single:
        return
    terms[term] = left[max(single, key=rank)]
    for place, values in list(left.items()):
        relation = fitted(term, terms[term], values)
        if relation is not None:
            relations[place] = relation
            del left[place]


def _names(key: str | None, path: str) -> bool:
    return key is not None and f"{path}.".startswith(f"{key}.")


def _is_text(leaf: Any) -> bool:
    """Return whether a leaf is a list of texts: the words of a transcript are no length that a model sees."""
    return isinstance(leaf, (list, tuple)) and any(isinstance(x, str) for x in leaf)


def has_rows(path: str, relations: Mapping[LeafAxis, Relation]) -> bool:
    """Return whether the first axis of a leaf is the batch size."""
    return relations.get((path, 0)) == Relation("B")


def ranges(seen: Seen) -> str:
    """Describe sizes for a message: `sig axis 0 from 8,000 to 48,000`."""
    return "; ".join(
        f"{path} axis {key} from {values.min():,.0f} to {values.max():,.0f}"
        for (path, key), values in seen.items()
        if key != "value"
    )
