"""Learns the axes of whole batches, where the data set makes them itself and no single example can be had."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from batchtune.scripts.following import (
    Leaves,
    LengthKeys,
    Relations,
    followed,
    has_rows,
    ranges,
)
from batchtune.scripts.packed_rows import batches_of, packed_row
from batchtune.scripts.relations import FloatArray, Relation, Seen, Terms, Unclear
from batchtune.scripts.trees import measured, numeric, sizes

_FEWEST = 6
# Of the strides with which models and data sets shorten a sequence.
_LONGEST_STRIDE = 16


def learned_from_batches(
    leaves: Leaves, keys: LengthKeys, batch_size_key: str | None
) -> tuple[Terms, Relations]:
    """Return the axes of each batch, and how the leaves follow them.

    Raises:
        Unclear: The batches don't tell the axes apart, or which values follow them.
    """
    for path, group in leaves.items():
        if len(group) < _FEWEST:
            raise Unclear(
                f"{len(group)} whole batches of the script tell too little",
                f"Learning from whole batches needs at least {_FEWEST}.",
            )
        if len({len(sizes(leaf)) for leaf in group}) > 1:
            raise Unclear(
                f"{path} is not in every batch of the script, or not of one kind"
            )
    rows = [packed_row(batch) for batch in batches_of(leaves)]
    lengths = [row for row in rows if row is not None]
    if len(lengths) == len(rows) and any(row.size > 1 for row in lengths):
        return _packed(leaves, lengths)
    seen = measured(leaves)
    sizes_of_batches = {"B": _batch_sizes(seen, batch_size_key)}
    terms, relations = followed(leaves, sizes_of_batches, "batches", keys)
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


def _packed(leaves: Leaves, lengths: Sequence[Any]) -> tuple[Terms, Relations]:
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
        values is not None and np.array_equal(values.ravel(), layout(kind, each))
        for values, each in zip(arrays, lengths, strict=True)
    )


def layout(kind: str, lengths: Any) -> npt.NDArray[np.int64]:
    """Return offsets of packed examples, or for each entry its position in its example, or the example's number."""
    if kind == "offsets":
        return np.append(0, np.cumsum(lengths))
    if kind == "numbers":
        return np.repeat(np.arange(len(lengths)), lengths)
    return np.concatenate([np.arange(length) for length in lengths])
