"""Lengths as Python holds them: arrays, tables of pandas or Hugging Face's datasets, and paths of manifests."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy.typing as npt

from batchtune.errors import ManifestError, UsageError
from batchtune.lengths import Lengths
from batchtune.manifests.base import INPUTS, KNOWN_UNITS, normalised
from batchtune.manifests.inputs import ReadOptions
from batchtune.manifests.reading import load_lengths


def lengths_of(
    data: Any, options: ReadOptions, targets: npt.ArrayLike | None = None
) -> Lengths:
    """Read the lengths of a data set, whatever holds them.

    Args:
        data: An array, list, tensor or pandas Series, shape (examples,); a pandas DataFrame or a Hugging Face dataset,
            which is read as a manifest with these columns; the path of a manifest; or Lengths.
        options: The user's; for an array only the unit.
        targets: Shape (examples,): the target lengths that belong to an array.

    Raises:
        UsageError: The arguments contradict each other, or these are no lengths.
        ManifestError: The table or the manifest can't be read as requested.
    """
    is_table = hasattr(data, "columns") or hasattr(data, "column_names")
    is_array = not is_table and not isinstance(data, (str, Path, Lengths))
    options_of_array = ReadOptions(unit=options.unit)
    if (is_array and options != options_of_array) or not (is_array or targets is None):
        raise UsageError(
            "an array of lengths takes targets and unit, a table or manifest the options for reading",
            "Leave out what is not for it.",
        )
    if isinstance(data, Lengths):
        return data
    if is_table:
        return _in_table(data, options)
    if not is_array:
        return load_lengths(data, options)
    try:
        return Lengths.of(data, targets, unit=options.unit)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"these are not lengths: {error}",
            "Give a number for each example, or a table with length_key=...",
        ) from error


def _in_table(table: Any, options: ReadOptions) -> Lengths:
    """Read a table as the Parquet file that it would be; only columns that can be meant, as others may be large."""
    import pyarrow
    from pyarrow import parquet

    columns = getattr(table, "column_names", None) or table.columns
    if isinstance(columns, dict):
        raise UsageError(
            f"a {type(table).__name__} holds several data sets: {', '.join(columns)}",
            "Give one of them.",
        )
    keys = f"{options.length_key}+{options.target_key}".split("+")
    wanted = [
        name
        for name in columns
        if name in [*keys, *INPUTS] or normalised(str(name)) in KNOWN_UNITS
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{type(table).__name__}.parquet"
        try:
            if hasattr(table, "with_format"):
                found = table.with_format("arrow", wanted or None)[:]
            else:
                found = pyarrow.Table.from_pandas(
                    table[wanted or columns], preserve_index=False
                )
            parquet.write_table(found, path)
        except (pyarrow.ArrowException, ValueError) as error:
            raise ManifestError(
                f"the {type(table).__name__} can't be read: {error}",
                "Name the column of the lengths with length_key=...",
            ) from error
        return load_lengths(path, options)
