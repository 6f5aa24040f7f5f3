"""A manifest → its lengths: the one way through, whatever the format."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from batchtune.errors import ManifestError, UsageError
from batchtune.lengths import Lengths, Unit
from batchtune.manifests.collecting import Collector, Keys
from batchtune.manifests.columns import KNOWN_UNITS, choose_column, find_column, normalised
from batchtune.manifests.formats import FORMATS
from batchtune.manifests.options import ReadOptions
from batchtune.manifests.rows import Column, Format
from batchtune.manifests.scaling import scaling_for
from batchtune.manifests.source import Source

_DEFAULTS = ReadOptions()


def load_lengths(source: Path, options: ReadOptions = _DEFAULTS) -> Lengths:
    """Reads the lengths of a data set.

    The file is read block by block (a JSON object of objects: whole), and of its rows only numbers are kept.

    Args:
        source: A manifest in one of `FORMATS`, plain or compressed by gzip.
        options: What the user says about it.

    Returns:
        The lengths, with the unit, what was left out, and notes for the user.

    Raises:
        ManifestError: It can't be read as asked; the message says what is wrong and where.
        UsageError: The options name no known format, or one column twice.
    """
    file = Source(source)
    if file.head.blank and file.head.complete:
        raise ManifestError(f"{source} is empty", "Check that it was written to its end.")
    reader = _format(file, options.format)
    columns = reader.columns(file)
    if not columns:
        raise ManifestError(f"{source} holds no examples", "Check that it was written to its end.")
    keys = _keys(source, columns, options)
    unit = _unit(reader, keys.length)
    scaling = scaling_for(source, unit, options.unit, options.length_scale)
    notes = scaling.notes
    if options.length_key is None and reader.named_columns:
        notes = (f"Lengths are taken from column {keys.length!r}{f', in {unit}' if unit else ''}.", *notes)
    collector = Collector(source, keys, scaling, options)
    for rows in reader.rows(file, keys.length, keys.target):
        collector.add(rows)
    return collector.finish(notes)


def _format(file: Source, name: str | None) -> Format:
    if name is None:
        found = next((member for member in FORMATS.values() if member.fits(file.head)), None)
        if found is not None:
            return found
        known = "; ".join(f"{member.name} ({member.description})" for member in FORMATS.values())
        raise ManifestError(
            f"{file.path} fits no known manifest format: {file.head.describe()}",
            f"The formats known: {known}. Name one with --format.",
        )
    if name not in FORMATS:
        near = difflib.get_close_matches(name, FORMATS, n=1)
        meant = f"Did you mean {near[0]!r}? " if near else ""
        raise UsageError(f"{name!r} is no manifest format", f"{meant}The formats: {', '.join(FORMATS)}.")
    return FORMATS[name]


def _keys(path: Path, columns: Sequence[Column], options: ReadOptions) -> Keys:
    target = None
    if options.target_key is not None:
        target = find_column(path, columns, options.target_key, "--target-key").name
    if options.length_key is None:
        return Keys(choose_column(path, columns, target).name, target)
    length = find_column(path, columns, options.length_key, "--length-key").name
    if length == target:
        raise UsageError(
            f"--length-key and --target-key both name {length!r}",
            "A target length is another than the length.",
        )
    return Keys(length, target)


def _unit(reader: Format, column: str) -> Unit | None:
    name = normalised(column)
    return reader.units.get(name) or KNOWN_UNITS.get(name)
