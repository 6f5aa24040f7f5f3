"""Learns the axes of whole batches, where the data set makes them itself and no single example can be had."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from batchtune.scripts.relations import (
    NAME_THEM,
    Numbers,
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
    longest_row,
    measured,
    numeric,
    padding_of,
    sizes,
    sizes_of,
)

Leaves = dict[str, list[Any]]
Relations = dict[Place, Relation]

_FEWEST = 6
_NAME_BATCH_SIZE = "Name a leaf whose first axis is the batch size: --batch-size-key."


def learned_from_batches(
    batches: Sequence[Any],
    length_key: str | None,
    target_key: str | None,
    batch_size_key: str | None,
) -> tuple[Leaves, Relations, Terms]:
    """Return the leaves, cut to one row without padding; how they follow the axes; and the axes in each batch.

    Raises:
        Unclear: The batches don't tell the axes apart, or which values follow them.
    """
    if len(batches) < _FEWEST:
        raise Unclear(
            f"{len(batches)} whole batches of the script tell too little",
            f"Learning from whole batches needs at least {_FEWEST}.",
        )
    leaves = flatten(batches)
    for path, group in leaves.items():
        if len({len(sizes(leaf)) for leaf in group}) > 1:
            raise Unclear(
                f"{path} is not in every batch of the script, or not of one kind"
            )
    seen = measured(leaves)
    offsets = _offsets(leaves, seen)
    if offsets:
        terms, relations = _packed(leaves, seen, offsets)
    else:
        counts = _batch_sizes(leaves, seen, batch_size_key)
        terms, relations = _padded(leaves, seen, counts, length_key, target_key)
        terms["B"] = counts
    relations |= _values(leaves, seen, terms, relations)
    return _longest_rows(leaves, relations), relations, terms


def _batch_sizes(leaves: Leaves, seen: Seen, key: str | None) -> Numbers:
    """Return the batch size of each batch: the first size of most leaves, or of the one that the key names."""
    if key is not None:
        named = [place for place in ((key, 0), (key, "value")) if place in seen]
        if named:
            return seen[named[0]]
    votes = Counter(tuple(values) for (_, axis), values in seen.items() if axis == 0)
    ranked = votes.most_common(2)
    if not ranked or (len(ranked) == 2 and ranked[0][1] == ranked[1][1]):
        raise Unclear(
            f"no axis follows the batch size in most leaves: {sizes_of(leaves)}",
            _NAME_BATCH_SIZE,
        )
    counts = np.array(ranked[0][0])
    if counts.max() == 1:
        raise Unclear(
            f"every batch of the script has one row: {sizes_of(leaves)}",
            _NAME_BATCH_SIZE,
        )
    if np.ptp(counts) == 0:
        _check_equal_batch_sizes(leaves, seen, counts)
    return counts


def _check_equal_batch_sizes(leaves: Leaves, seen: Seen, counts: Numbers) -> None:
    """Raise Unclear if something else always equals a batch size that is always the same."""
    for (path, key), values in seen.items():
        same = np.array_equal(values, counts)
        scalar = key == "value" and not sizes(leaves[path][0])
        first = leaves[path][0]
        constant = key == 0 and all(
            np.array_equal(np.asarray(leaf), np.asarray(first)) for leaf in leaves[path]
        )
        if same and (scalar or constant or key not in (0, "value")):
            raise Unclear(
                f"every batch has {counts[0]:.0f} rows, which {path} ({key}) may follow or not",
                "Let the data set make batches of different sizes.",
            )


def _padded(
    leaves: Leaves,
    seen: Seen,
    counts: Numbers,
    length_key: str | None,
    target_key: str | None,
) -> tuple[Terms, Relations]:
    """Return the lengths of padded batches, and how every size follows them or the batch size."""
    relations: Relations = {}
    varying: Seen = {}
    for place, values in seen.items():
        if place[1] == "value":
            continue
        if np.array_equal(values, counts):
            relations[place] = Relation("B")
        elif np.ptp(values) > 0:
            varying[place] = values
    rows = {path for path, key in relations if key == 0}
    own = {place: values for place, values in varying.items() if place[0] in rows}
    terms, followers = told_apart(own, length_key, target_key, "batches")
    for place in varying:
        # Without a batch axis it may be a total over the batch, such as the nodes of graphs.
        relation = first_fit(terms, varying[place])
        if place not in followers and (relation is None or not relation.sure):
            raise Unclear(
                f"{place[0]} axis {place[1]} follows neither the batch size nor a length: {sizes_of(leaves)}",
                _NAME_BATCH_SIZE,
            )
        if relation is not None:
            followers.setdefault(place, relation)
    return terms, relations | followers


def _offsets(leaves: Leaves, seen: Seen) -> dict[str, list[Any]]:
    """Return the leaves that are offsets, such as `cu_seqlens`: from 0 upwards to the size of another leaf."""
    found = {}
    for path, group in leaves.items():
        arrays = [numeric(leaf) for leaf in group]
        if all(_ascends_from_zero(array) for array in arrays):
            ends = seen[path, "value"]
            others = [
                other
                for (other, key), values in seen.items()
                if key != "value" and np.array_equal(values, ends)
            ]
            if others and np.ptp(ends) > 0:
                found[path] = arrays
    return found


def _ascends_from_zero(values: Any) -> bool:
    if values is None or values.ndim != 1 or len(values) < 2:
        return False
    whole = values.dtype.kind in "iu" and values[0] == 0
    return bool(whole and (np.diff(values) > 0).all())


def _packed(
    leaves: Leaves, seen: Seen, offsets: dict[str, list[Any]]
) -> tuple[Terms, Relations]:
    """Return the terms of batches without padding, and how every size follows them."""
    path = next(iter(offsets))
    terms = {
        "B": seen[path, 0] - 1,
        "L": np.array([np.diff(array).max() for array in offsets[path]], float),
        "B·L": seen[path, "value"],
    }
    relations: Relations = {}
    for place, values in seen.items():
        if place[0] in offsets:
            relations[place[0], 0] = Relation("B", offset=1)
            relations[place[0], "offsets"] = Relation("L")
        elif place[1] != "value" and np.ptp(values) > 0:
            equal = [term for term in terms if np.array_equal(terms[term], values)]
            if len(equal) != 1:
                raise Unclear(
                    f"{place[0]} axis {place[1]} follows neither the offsets {path} nor their number: "
                    f"{sizes_of(leaves)}",
                    NAME_THEM,
                )
            relations[place] = Relation(equal[0])
            if equal == ["B·L"]:
                key = _counting(leaves[place[0]], offsets[path])
                if key is not None:
                    relations[place[0], key] = Relation("L")
    return terms, relations


def _counting(group: Sequence[Any], offsets: Sequence[Any]) -> str | None:
    """Return whether a packed leaf counts the `positions` in each example, or the examples (`segments`)."""
    positions = True
    segments = True
    for leaf, ends in zip(group, offsets, strict=True):
        lengths = np.diff(ends)
        values = numeric(leaf)
        if values is None:
            return None
        segment = np.repeat(np.arange(len(lengths)), lengths)
        positions &= bool((values == np.arange(ends[-1]) - ends[segment]).all())
        segments &= bool((values - values.min() == segment).all())
    if positions:
        return "positions"
    return "segments" if segments else None


def _values(
    leaves: Leaves, seen: Seen, terms: Terms, relations: Relations
) -> Relations:
    """Return which numbers are the batch size, or lengths of the examples, in full or scaled.

    Only plain ratios count: a speaker's number may follow a few lengths by chance.
    """
    found: Relations = {}
    for place, values in seen.items():
        shape = sizes(leaves[place[0]][0])
        rows = len(shape) == 1 and relations.get((place[0], 0)) == Relation("B")
        if place[1] != "value" or (shape and not rows):
            continue
        relation = None
        if not shape and np.array_equal(values, terms["B"]):
            relation = Relation("B")
        for term in ("L", "T"):
            if term in terms and relation is None:
                relation = _length_value(term, terms[term], values)
        if relation is not None and not relation.sure:
            raise Unclear(
                f"{len(values)} batches don't tell whether the values of {place[0]} are {relation}",
                "Let the script make more batches, of more different lengths.",
            )
        if relation is not None:
            found[place] = relation
    return found


def _length_value(term: str, base: Numbers, values: Numbers) -> Relation | None:
    """Return how values are lengths: in full, also where the axis is padded to a multiple, or scaled."""
    multiple = np.gcd.reduce(base.astype(np.int64))
    if np.ptp(base) > 0 and np.array_equal(np.ceil(values / multiple) * multiple, base):
        return Relation(term)
    relation = first_fit({term: base}, values)
    if relation is None or not 0 <= relation.offset <= 1:
        return None
    return relation


def _longest_rows(leaves: Leaves, relations: Relations) -> Leaves:
    """Return the leaves with a batch axis cut to the row that is padded least, without its padding."""
    rows: Leaves = {}
    for path, group in leaves.items():
        axes = [
            key
            for where, key in relations
            if where == path and isinstance(key, int) and key > 0
        ]
        if relations.get((path, 0)) != Relation("B"):
            rows[path] = group
            continue
        axis = min(axes, default=None)
        padding = None if axis is None else padding_of(group, axis)
        rows[path] = [longest_row(leaf, padding) for leaf in group]
    return rows
