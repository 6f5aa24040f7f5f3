"""Which format a source has, which of its columns are read, and what becomes of their values."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from batchtune.errors import ManifestError, UsageError, shortened
from batchtune.lengths import Unit
from batchtune.manifests.base import Column, Format
from batchtune.manifests.columns import KNOWN_UNITS, choose_column, find_column, last_part, normalised
from batchtune.manifests.formats import FORMATS
from batchtune.manifests.options import ReadOptions
from batchtune.manifests.source import Source
from batchtune.manifests.targets import count_of
from batchtune.manifests.values import Count, Reduction, counter

# Lists whose items are tokens.
_TOKENS = ("input_ids", "token_ids", "tokens", "labels")


@dataclass(frozen=True, slots=True)
class Plan:
    """What the first source decides, so that all sources are read alike.

    Attributes:
        format: Name of its format.
        length: Its column of the lengths, None if the format has but one.
        target: Its column of the target lengths, or None.
        unit: What the lengths count in the end, or None.
        texts: Whether the lengths, and the target lengths, are those of texts.
        notes: For the user.
    """

    format: str
    length: str | None
    target: str | None
    unit: Unit | None
    texts: tuple[bool, bool]
    notes: tuple[str, ...]

    @property
    def keys(self) -> tuple[str | None, str | None]:
        """The columns of length and target, for messages; None if there is nothing to choose."""
        return self.length if FORMATS[self.format].named_columns else None, self.target


@dataclass(frozen=True, slots=True)
class Reading:
    """What is read of a source, and what becomes of it.

    Attributes:
        length: Name of the column of the lengths, for messages.
        target: Of the target lengths, or None.
        scaling: What the lengths are multiplied with.
        count_length: How the lengths' texts are counted; None if they are numbers.
        count_target: Likewise.
        reduction: What becomes of lists.
        with_ids: Whether the ids of the rows are kept.
        unique_ids: Whether two rows with one id are an error.
    """

    length: str
    target: str | None
    scaling: Scaling
    count_length: Count | None = None
    count_target: Count | None = None
    reduction: Reduction | None = None
    with_ids: bool = False
    unique_ids: bool = False


def plan_first(source: Source, options: ReadOptions) -> Plan:
    """Decides by the first source and what the user says.

    Raises:
        ManifestError: It fits no format, holds no examples, or the column can't be told.
        UsageError: The options name no known format, or one column twice.
    """
    reader = find_format(source, options.format)
    told = _told_target(source, reader, options)
    if told is not None:
        options = replace(options, target_key=told)
    columns = _columns(source, reader)
    length, target = _chosen(source, reader, columns, options)
    named = options.length_key is not None or length.name == reader.default_column(columns)
    texts = _texts(length, target, options, named=named)
    counted = counter(options.measure or "characters", options.tokenizer)[1] if any(texts) else None
    found = counted if texts[0] else _unit(source, reader, length, options)
    scaling = scaling_for(source.path, found, options.unit, options.length_scale)
    notes = list(scaling.notes)
    if texts[0]:
        notes.insert(0, _counting_note(length.name, str(counted), options))
    elif options.length_key is None and reader.named_columns:
        notes.insert(0, f"Lengths are taken from column {shortened(length.name)}{f', in {found}' if found else ''}.")
    if options.reduce is not None and not any(isinstance(one.example, list) for one in (length, target) if one):
        notes.append(f"--reduce {options.reduce} has nothing to do: the first values are no lists.")
    if told is not None:
        notes.append(f"Target lengths are taken from column {shortened(told)}.")
    if texts[1] and target is not None:
        notes.append(_counting_note(target.name, str(counted), options))
    optional = reader.optional_columns
    return Plan(
        format=reader.name,
        length=length.name if reader.named_columns or optional or options.length_key else None,
        target=None if target is None else target.name,
        unit=scaling.unit,
        texts=texts,
        notes=tuple(notes),
    )


def reading_of(
    source: Source, reader: Format, plan: Plan, options: ReadOptions, targets: Sequence[Source], *, with_ids: bool
) -> Reading:
    """How one of the sources is read: as the first, by the names of its own columns.

    Raises:
        ManifestError: It has no such column, or its lengths count something else.
    """
    said = options.length_key is not None
    if plan.length is not None and reader.named_columns:
        options = replace(options, length_key=plan.length, target_key=plan.target)
    if plan.length is not None and reader.name == plan.format and reader.optional_columns:
        length = Column(plan.length, None, False)
        target = None if plan.target is None else Column(plan.target, None, False)
    else:
        columns = _columns(source, reader)
        if not said and options.length_key and options.length_key not in {column.name for column in columns}:
            raise ManifestError(
                f"{source.path} has no column {shortened(options.length_key)}, "
                "from which the first source has its lengths",
                "What is read together must have the same columns; read them one by one.",
            )
        length, target = _chosen(source, reader, columns, options)
    count, unit = counter(options.measure or "characters", options.tokenizer) if any(plan.texts) else (None, None)
    found = unit if plan.texts[0] else _unit(source, reader, length, options)
    scaling = scaling_for(source.path, found, options.unit, options.length_scale)
    if scaling.unit != plan.unit:
        raise ManifestError(
            f"{source.path} has its lengths in {scaling.unit or 'an unknown unit'}, the sources before it in "
            f"{plan.unit or 'an unknown unit'}",
            "What is read together must count the same; read them one by one, or convert one of them.",
        )
    return Reading(
        length=length.name,
        target=str(targets[0].path) if targets else None if target is None else target.name,
        scaling=scaling,
        count_length=count if plan.texts[0] else None,
        count_target=count_of(targets, reader, options)[0] if targets else count if plan.texts[1] else None,
        reduction=options.reduce,
        with_ids=with_ids,
        unique_ids=reader.unique_ids,
    )


def check_format(name: str | None) -> None:
    """Raises UsageError if no format has that name."""
    if name is not None and name not in FORMATS:
        near = difflib.get_close_matches(name, FORMATS, n=1)
        meant = f"Did you mean {near[0]!r}? " if near else ""
        raise UsageError(f"{shortened(name)} is no manifest format", f"{meant}The formats: {', '.join(FORMATS)}.")


def find_format(source: Source, name: str | None) -> Format:
    """The format of a source, by its name or the source's first bytes.

    Raises:
        ManifestError: It fits none.
        UsageError: No format has that name.
    """
    check_format(name)
    if source.names is None and source.head.blank and source.head.complete:
        raise ManifestError(f"{source.path} is empty", "Check that it was written to its end.")
    if name is not None:
        if FORMATS[name].of_folder != (source.names is not None):
            raise ManifestError(f"{source.path} is not of the format {name}", "Leave --format out, or name another.")
        return FORMATS[name]
    found = next((member for member in FORMATS.values() if member.fits(source.head)), None)
    if found is not None:
        return found
    known = "; ".join(f"{member.name} ({member.description})" for member in FORMATS.values())
    raise ManifestError(
        f"{source.path} fits no known manifest format: {source.head.describe()}",
        f"The formats known: {known}. Name one with --format.",
    )


def _columns(source: Source, reader: Format) -> Sequence[Column]:
    columns = reader.columns(source)
    if not columns:
        raise ManifestError(f"{source.path} holds no examples", "Check that it was written to its end.")
    return columns


def _told_target(source: Source, reader: Format, options: ReadOptions) -> str | None:
    """The column of the targets where the user has named no column at all, and the file itself tells it."""
    silent = options.length_key is None and options.target_key is None and options.target_file is None
    return reader.default_target(source) if silent else None


def _chosen(
    source: Source, reader: Format, columns: Sequence[Column], options: ReadOptions
) -> tuple[Column, Column | None]:
    path = source.path
    target = None
    if options.target_key is not None:
        target = find_column(path, columns, options.target_key, "--target-key")
    if options.length_key is None:
        default = reader.default_column(columns)
        if default is not None and (target is None or target.name != default):
            return find_column(path, columns, default, "--length-key"), target
        return choose_column(path, columns, target.name if target else None), target
    length = find_column(path, columns, options.length_key, "--length-key")
    if target is not None and length.name == target.name:
        raise UsageError(
            f"--length-key and --target-key both name {shortened(length.name)}",
            "A target length is another than the length.",
        )
    return length, target


def _texts(length: Column, target: Column | None, options: ReadOptions, *, named: bool) -> tuple[bool, bool]:
    """Whether length and target are to be counted in texts: if the user, or the format, named such a column."""
    texts = (
        length.text and named and not _is_counted(length, options),
        target is not None and target.text and not _is_counted(target, options),
    )
    asked = options.measure is not None or options.tokenizer is not None
    if not asked or any(texts):
        return texts
    if options.length_key is None and options.target_file is None:
        raise UsageError(
            f"--{'tokenizer' if options.tokenizer else 'measure'} counts texts, "
            f"and {shortened(length.name)} holds none",
            "Name the column of the texts with --length-key or --target-key.",
        )
    return (options.target_file is None, False)


def _is_counted(column: Column, options: ReadOptions) -> bool:
    """Whether the length is the number of a list's items, whatever they are."""
    return options.reduce == "count" and isinstance(column.example, list)


def _unit(source: Source, reader: Format, length: Column, options: ReadOptions) -> Unit | None:
    column = length.name
    if _is_counted(length, options):
        return "tokens" if normalised(last_part(column)) in _TOKENS else None
    name = normalised(column)
    return (
        reader.unit_in(source, column)
        or reader.units.get(name)
        or KNOWN_UNITS.get(name)
        or KNOWN_UNITS.get(normalised(last_part(column)))
    )


def _counting_note(column: str, counted: str, options: ReadOptions) -> str:
    said = options.measure is not None or options.tokenizer is not None
    otherwise = "" if said else " --measure words or bytes, or --tokenizer FILE, count otherwise."
    return f"Column {shortened(column)} holds text: its {counted} are counted.{otherwise}"


_CONVERSIONS: dict[tuple[Unit, Unit], Fraction] = {
    ("ms", "s"): Fraction(1, 1000),
    ("s", "ms"): Fraction(1000),
}
_SAMPLE_RATES = range(4000, 192_001)


@dataclass(frozen=True, slots=True)
class Scaling:
    """The unit in the end, the factor, and what to tell the user about them."""

    unit: Unit | None
    factor: Fraction
    notes: tuple[str, ...] = ()


def scaling_for(path: Path, source: Unit | None, unit: Unit | None, scale: Fraction | None) -> Scaling:
    """Decides the unit of the lengths.

    A unit that the user gives wins; s and ms are converted into each other; a scale without a unit gives one
    only if there is no doubt.

    Args:
        path: For messages.
        source: What the lengths count in the file, or None if nothing says it.
        unit: What the user says that they count after scaling, or None.
        scale: The user's factor, or None.

    Raises:
        ManifestError: The file is in one unit, the user wants another, and no scale says how.
    """
    if scale is not None:
        return _scaled(source, unit, scale)
    if unit is not None and source is not None and unit != source:
        return _converted(path, source, unit)
    if unit is None and source is None:
        note = "Nothing says what the lengths count; give --unit, so that results and configs can say it."
        return Scaling(None, Fraction(1), (note,))
    return Scaling(unit or source, Fraction(1))


def _scaled(source: Unit | None, unit: Unit | None, scale: Fraction) -> Scaling:
    found = unit or _unit_after(source, scale)
    if found is not None:
        return Scaling(found, scale)
    before = f"{source} * {scale}" if source else f"the file's values * {scale}"
    return Scaling(None, scale, (f"Nothing says what the lengths count now ({before}); give --unit.",))


def _unit_after(source: Unit | None, scale: Fraction) -> Unit | None:
    if scale == 1:
        return source
    if source == "samples" and scale.numerator == 1 and scale.denominator in _SAMPLE_RATES:
        return "s"
    return next(
        (after for (before, after), factor in _CONVERSIONS.items() if before == source and factor == scale),
        None,
    )


def _converted(path: Path, source: Unit, unit: Unit) -> Scaling:
    factor = _CONVERSIONS.get((source, unit))
    if factor is not None:
        return Scaling(unit, factor, (f"Lengths are converted from {source} to {unit}.",))
    example = "1/16000 for 16 kHz audio" if (source, unit) == ("samples", "s") else "a number or a fraction"
    raise ManifestError(
        f"{path} has its lengths in {source}, and --unit asks for {unit}",
        f"Say how many {unit} one of the {source} is with --length-scale ({example}), or leave --unit out.",
    )
