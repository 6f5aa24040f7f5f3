"""The format of a source, the columns that are read, and how their values become lengths."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from batchtune.errors import ManifestError, UsageError, shortened
from batchtune.lengths import Unit
from batchtune.manifests.base import Column, Format
from batchtune.manifests.columns import (
    KNOWN_UNITS,
    PEEKED_ROWS,
    choose_column,
    find_column,
    last_part,
    normalised,
    summarise,
)
from batchtune.manifests.formats import FORMATS
from batchtune.manifests.options import ReadOptions
from batchtune.manifests.source import Source
from batchtune.manifests.values import Count, counter, number

# Lists whose items are tokens.
_TOKENS = ("input_ids", "token_ids", "tokens", "labels")
# Target files of fairseq: letters or words, separated by spaces.
_SYMBOLS = (".ltr", ".wrd", ".ltr.gz", ".wrd.gz")
_SHAPE = re.compile(r"\d+(?:,\d+)+", re.ASCII)
_CONVERSIONS: dict[tuple[Unit, Unit], Fraction] = {("ms", "s"): Fraction(1, 1000), ("s", "ms"): Fraction(1000)}
_SAMPLE_RATES = range(4000, 192_001)


@dataclass(frozen=True, slots=True)
class Plan:
    """How sources are read: what the user says, what the first source decides, and how one of them differs from it.

    Attributes:
        format: Name of the first source's format.
        length: The column of the lengths; of the first source None if its format has but one.
        target: The column, or the file, of the target lengths, or None.
        unit: What the lengths count in the end, or None.
        texts: Whether the lengths, and the target lengths, are those of texts.
        notes: For the user.
        label: All sources, for messages.
        with_ids: Whether the ids of the rows are kept.
        alone: Whether there is no other source.
        factor: What the lengths of this source are multiplied by.
        counts: How texts are counted, of lengths and of targets; None for numbers.
    """

    options: ReadOptions
    format: str
    length: str | None
    target: str | None
    unit: Unit | None
    texts: tuple[bool, bool]
    notes: tuple[str, ...]
    label: str = ""
    with_ids: bool = False
    alone: bool = True
    factor: Fraction = Fraction(1)
    counts: tuple[Count | None, Count | None] = (None, None)


def plan_first(source: Source, options: ReadOptions) -> Plan:
    """Decide by the first source and what the user says. Raises as `load_lengths` does."""
    given, told = options, None
    reader = find_format(source, options.format)
    if options.length_key is None and options.target_key is None and options.target_file is None:
        told = reader.default_target(source)
        options = replace(options, target_key=told)
    columns = _columns(source, reader)
    length, target = _chosen(source, reader, columns, options)
    named = options.length_key is not None or length.name == reader.default_column(columns)
    texts = _texts(length, target, options, named=named)
    _, counted, before = _counted(source, reader, length, texts, options)
    unit, _, scaling_note = scaling_for(source.path, before, options.unit, options.length_scale)
    notes = []
    if texts[0]:
        notes.append(_counting_note(length, counted, options))
    elif options.length_key is None and reader.named_columns:
        notes.append(f"Lengths are taken from column {shortened(length.name)}{f', in {before}' if before else ''}.")
    notes += [scaling_note] if scaling_note else []
    if options.reduce is not None and not any(isinstance(one.example, list) for one in (length, target) if one):
        notes.append(f"--reduce {options.reduce} has nothing to do: the first values are not lists.")
    if told is not None:
        notes.append(f"Target lengths are taken from column {shortened(told)}.")
    if texts[1] and target is not None:
        notes.append(_counting_note(target, counted, options))
    column = length.name if reader.named_columns or reader.optional_columns or options.length_key else None
    return Plan(given, reader.name, column, target.name if target else None, unit, texts, tuple(notes))


def plan_of(source: Source, reader: Format, plan: Plan, target_file: Source | None) -> Plan:
    """Decide how one of the sources is read. Raises ManifestError if its columns or its unit are not the first's."""
    options = plan.options
    length, target = Column(plan.length or "", None, False), plan.target
    if plan.length is None or reader.name != plan.format or not reader.optional_columns:
        columns = _columns(source, reader)
        if plan.length is not None and reader.named_columns:
            if options.length_key is None and plan.length not in {column.name for column in columns}:
                raise _other_columns(source, plan.length)
            options = replace(options, length_key=plan.length, target_key=plan.target)
        length, found = _chosen(source, reader, columns, options)
        target = None if found is None else found.name
        if target is None and plan.target is not None:
            raise _other_columns(source, plan.target)
    count, _, before = _counted(source, reader, length, plan.texts, options)
    unit, factor, _ = scaling_for(source.path, before, options.unit, options.length_scale)
    if unit != plan.unit:
        unknown = "an unknown unit"
        raise ManifestError(
            f"{source.path} has its lengths in {unit or unknown}, the sources before it in {plan.unit or unknown}",
            "What is read together must count the same; read them one by one, or convert one of them.",
        )
    counts = count if plan.texts[0] else None, count if plan.texts[1] else None
    if target_file is not None:
        target, counts = str(target_file.path), (counts[0], count_of(target_file, reader, options)[0])
    return replace(plan, length=length.name, target=target, factor=factor, counts=counts)


def _other_columns(source: Source, column: str) -> ManifestError:
    return ManifestError(
        f"{source.path} has no column {shortened(column)}, but the first source has its lengths or targets there",
        "What is read together must have the same columns; read them one by one.",
    )


def check_format(name: str | None) -> None:
    """Raise UsageError if no format has that name."""
    if name is not None and name not in FORMATS:
        near = difflib.get_close_matches(name, FORMATS, n=1)
        meant = f"Did you mean {near[0]!r}? " if near else ""
        raise UsageError(f"{shortened(name)} is no manifest format", f"{meant}The formats: {', '.join(FORMATS)}.")


def find_format(source: Source, name: str | None) -> Format:
    """Return the named format, or the one that a source's first bytes fit. Raises ManifestError if it does not fit."""
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
    if columns := reader.columns(source):
        return columns
    raise ManifestError(f"{source.path} holds no examples", "Check that it was written to its end.")


def _chosen(
    source: Source, reader: Format, columns: Sequence[Column], options: ReadOptions
) -> tuple[Column, Column | None]:
    """The columns of the lengths and of the target lengths, None without."""
    path, target = source.path, None
    if options.target_key is not None:
        target = find_column(path, columns, options.target_key, "--target-key")
    key = options.length_key
    if key is None:
        key = reader.default_column(columns)
        if key is None or (target is not None and target.name == key):
            return choose_column(path, columns, target.name if target else None), target
    length = find_column(path, columns, key, "--length-key")
    if target is not None and length.name == target.name:
        hint = "A target length is another than the length."
        raise UsageError(f"--length-key and --target-key both name {shortened(length.name)}", hint)
    return length, target


def _texts(length: Column, target: Column | None, options: ReadOptions, *, named: bool) -> tuple[bool, bool]:
    """Whether length and target are to be counted in texts: if the user, or the format, named such a column."""
    texts = (
        length.text and named and not _is_counted(length, options),
        target is not None and target.text and not _is_counted(target, options),
    )
    asked = "--tokenizer" if options.tokenizer else "--measure" if options.measure else None
    if asked is None or any(texts):
        return texts
    if options.length_key is None and options.target_file is None:
        hint = "Name the column of the texts with --length-key or --target-key."
        raise UsageError(f"{asked} counts texts, and {shortened(length.name)} holds none", hint)
    return options.target_file is None, False


def _is_counted(column: Column, options: ReadOptions) -> bool:
    """Whether the length is the number of a list's items, whatever they are."""
    return options.reduce == "count" and isinstance(column.example, list)


def _counted(
    source: Source, reader: Format, length: Column, texts: tuple[bool, bool], options: ReadOptions
) -> tuple[Count | None, Unit | None, Unit | None]:
    """How texts are counted, what that counts, both None without any, and what the lengths count before scaling."""
    count, counted = counter(options.measure or "characters", options.tokenizer) if any(texts) else (None, None)
    if texts[0]:
        return count, counted, counted
    name, last = normalised(length.name), normalised(last_part(length.name))
    if _is_counted(length, options):
        return count, counted, "tokens" if last in _TOKENS else None
    said = reader.unit_in(source, length.name) or reader.units.get(name)
    return count, counted, said or KNOWN_UNITS.get(name) or KNOWN_UNITS.get(last)


def _counting_note(column: Column, counted: Unit | None, options: ReadOptions) -> str:
    said = options.measure is not None or options.tokenizer is not None
    otherwise = "" if said else " --measure words or bytes, or --tokenizer FILE, count otherwise."
    return f"Column {shortened(column.name)} holds text: its {counted} are counted.{otherwise}"


def scaling_for(
    path: Path, source: Unit | None, unit: Unit | None, scale: Fraction | None
) -> tuple[Unit | None, Fraction, str | None]:
    """Decide the unit of the lengths in the end, their factor, and what to tell the user about them.

    A unit that the user gives wins; s and ms are converted into each other; a scale without a unit gives one
    only if there is no doubt.

    Raises:
        ManifestError: The file is in one unit (`source`), the user wants another, and no scale says how.
    """
    if scale is not None:
        sampled = source == "samples" and scale.numerator == 1 and scale.denominator in _SAMPLE_RATES
        known = [after for (before, after), factor in _CONVERSIONS.items() if (before, factor) == (source, scale)]
        unit = unit or (source if scale == 1 else "s" if sampled else known[0] if known else None)
        before = f"{source} * {scale}" if source else f"the file's values * {scale}"
        return unit, scale, None if unit else f"Nothing says what the lengths count now ({before}); give --unit."
    if unit is None and source is None:
        note = "Nothing says what the lengths count; give --unit, so that results and configs can say it."
        return None, Fraction(1), note
    if unit is None or source is None or unit == source:
        return unit or source, Fraction(1), None
    if (source, unit) in _CONVERSIONS:
        return unit, _CONVERSIONS[source, unit], f"Lengths are converted from {source} to {unit}."
    example = "1/16000 for 16 kHz audio" if (source, unit) == ("samples", "s") else "a number or a fraction"
    raise ManifestError(
        f"{path} has its lengths in {source}, and --unit asks for {unit}",
        f"Say how many {unit} one of the {source} is with --length-scale ({example}), or leave --unit out.",
    )


def keyed_targets(source: Source) -> dict[str, object]:
    """Read id → target from Kaldi's and ESPnet's files: `utt value`, `utt 52,31` or `utt words …`.

    Where most values are numbers, or shapes (the first dimension counts), they are numbers, and what is neither
    stays text. Else all are texts, so that a transcript `7` among others has one character like the letter `A`.

    Raises:
        ManifestError: An id is there twice, or the file can't be read or is not UTF-8.
    """
    texts: dict[str, str] = {}
    for line_number, line in source.lines():
        if not line.strip():
            continue
        name, *rest = line.split(maxsplit=1)
        if name in texts:
            raise ManifestError(
                f"{source.path}, line {line_number}: the id {shortened(name)} is there a second time",
                "Each id has one target: remove or rename one of the lines.",
            )
        texts[name] = "".join(rest).rstrip()
    sizes = {name: number(text.partition(",")[0] if _SHAPE.fullmatch(text) else text) for name, text in texts.items()}
    numeric = 2 * sum(size is not None for size in sizes.values()) > len(sizes)
    return {name: text if sizes[name] is None or not numeric else sizes[name] for name, text in texts.items()}


def count_of(target_file: Source, reader: Format, options: ReadOptions) -> tuple[Count | None, str]:
    """Decide how the targets of a file are counted, and what that counts; None if they are numbers."""
    first: Iterable[object] = (text for _, text in target_file.lines())
    if reader.joined_by_id:
        first = keyed_targets(target_file).values()
    columns = summarise({"target": value} for value in itertools.islice(first, PEEKED_ROWS))
    if not columns or not columns[0].text:
        return None, "numbers"
    measure = options.measure or ("words" if target_file.path.name.endswith(_SYMBOLS) else "characters")
    return counter(measure, options.tokenizer)
