"""Which columns are read, and how their values become lengths: by the user's options, and by the sources."""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from batchtune.errors import ManifestError, ResultError, UsageError, shortened
from batchtune.lengths import UNITS, Unit
from batchtune.manifests.base import (
    KNOWN_UNITS,
    PEEKED_ROWS,
    Column,
    Format,
    choose_column,
    find_column,
    last_part,
    normalised,
    summarise,
)
from batchtune.manifests.formats import FORMATS
from batchtune.manifests.source import Source
from batchtune.manifests.values import COUNTINGS, REDUCTIONS, Counting, Reduction, counter, number
from batchtune.results import ReadingRecord

# The exponent is bounded: Fraction("1e999999999") would compute for hours.
_NUMBER = r"\+?(?:\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})(?:[eE][+-]?\d{1,3})?"
_SCALE = re.compile(rf"\s*({_NUMBER})\s*(?:/\s*({_NUMBER})\s*)?", re.ASCII)
# Only one option of each pair can be given. Options for the values of a column go with that column.
_EXCLUSIVE = (
    ("measure", "tokenizer", "A tokenizer counts tokens."),
    ("target_file", "target_key", "A target has one length."),
)
_OF_THE_COLUMN = ("unit", "length_scale", "measure", "tokenizer", "reduce")
# Lists whose items are tokens.
_TOKENS = ("input_ids", "token_ids", "tokens", "labels")
# Target files of fairseq: letters or words, separated by spaces.
_SYMBOLS = (".ltr", ".wrd", ".ltr.gz", ".wrd.gz")
_SHAPE = re.compile(r"\d+(?:,\d+)+", re.ASCII)
_CONVERSIONS: dict[tuple[Unit, Unit], Fraction] = {("ms", "s"): Fraction(1, 1000), ("s", "ms"): Fraction(1000)}
_SAMPLE_RATES = range(4000, 192_001)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How a manifest is read; None for every option that the user does not give.

    Attributes:
        format: A name in `batchtune.manifests.FORMATS`; None to detect it from the content.
        length_key: The column (or JSON key) of the lengths; None to find it among the known names.
        unit: Unit of the lengths after `length_scale`; None to take it from the format or column.
        length_scale: Exact factor for each length, but for no target length.
        min_length, max_length: Inclusive, after scaling.
        skip_invalid: Leave invalid rows, and the rest of a damaged source if there are several, out and count them.
        measure: How the length of a text is counted; None for characters.
        tokenizer: A `tokenizer.json` whose tokens are counted instead.
        reduce: How a list becomes one length; None where lists are invalid.
        target_file: Files that hold the target lengths, named as manifests are.
    """

    format: str | None = None
    length_key: str | None = None
    target_key: str | None = None
    unit: Unit | None = None
    length_scale: Fraction | None = None
    min_length: float | None = None
    max_length: float | None = None
    skip_invalid: bool = False
    measure: Counting | None = None
    tokenizer: Path | None = None
    reduce: Reduction | None = None
    target_file: str | None = None

    def __post_init__(self) -> None:
        if self.length_scale is not None and self.length_scale <= 0:
            raise ValueError(f"length_scale must be positive, got {self.length_scale}")
        check_choice("--unit", self.unit, UNITS)
        check_choice("--measure", self.measure, COUNTINGS)
        check_choice("--reduce", self.reduce, REDUCTIONS)
        for name, other, hint in _EXCLUSIVE:
            if getattr(self, name) is not None and getattr(self, other) is not None:
                names = f"--{name} and --{other}".replace("_", "-")
                raise UsageError(f"{names} exclude each other", hint)
        shortest, longest = self.min_length or 0.0, math.inf if self.max_length is None else self.max_length
        if not shortest <= longest:
            message = f"no example has a length from --min-length {shortest:.15g} to --max-length {longest:.15g}"
            raise UsageError(message, "Exchange them, or leave one out.")

    def record(self) -> ReadingRecord:
        """Return them as result files hold them."""
        said: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        texts = {name: str(one) for name, one in said.items() if isinstance(one, (Path, Fraction))}
        return ReadingRecord(**said | texts)

    def completed(self, record: ReadingRecord) -> ReadOptions:
        """Return these options, completed by those of a result file that fit them. Raises ResultError."""
        said: dict[str, Any] = {field.name: getattr(record, field.name) for field in fields(self)}
        try:
            said["length_scale"] = None if record.length_scale is None else parse_scale(record.length_scale)
            said["tokenizer"] = None if record.tokenizer is None else Path(record.tokenizer)
            theirs = ReadOptions(**said)
        except UsageError as error:
            message = f"how the run's manifest was read is damaged: {error.message}"
            raise ResultError(message, "Create it again with the command that wrote it.") from error
        given = {name for name in said if (value := getattr(self, name)) is not None and value is not False}
        barred = {name for one, other, _ in _EXCLUSIVE if given & {one, other} for name in (one, other)}
        if "length_key" in given and self.length_key != theirs.length_key:
            barred |= set(_OF_THE_COLUMN)
        return replace(self, **{name: value for name, value in said.items() if name not in given | barred})


def check_choice(name: str, choice: str | None, known: Iterable[str]) -> None:
    """Raise UsageError if a choice is unknown; the hint names all, and the nearest."""
    if choice is not None and choice not in known:
        near = difflib.get_close_matches(choice, known, n=1)
        meant = f"Did you mean {near[0]!r}? " if near else ""
        raise UsageError(f"unknown {name} {shortened(choice)}", f"{meant}Known: {', '.join(known)}.")


def parse_scale(text: str) -> Fraction:
    """Read a length scale such as `0.001` or `1/16000`, exactly. Raises UsageError if it is not above 0, or absurd."""
    match = _SCALE.fullmatch(text)
    try:
        scale = Fraction(match[1]) / Fraction(match[2] or 1) if match is not None else Fraction(0)
        if float(scale.numerator) > 0 and float(scale.denominator) > 0:
            return scale
    except (OverflowError, ZeroDivisionError):
        pass
    hint = "Write a number above 0 or a fraction, such as 0.001 or 1/16000."
    raise UsageError(f"{shortened(text)} is not a length scale", hint)


@dataclass(frozen=True, slots=True)
class Plan:
    """How sources are read: the user's options, and the decisions that the first source makes for all.

    Attributes:
        format: Name of the first source's format.
        length: The column of the lengths; None if the format of the first source has only one.
        target: The column, or the file, of the target lengths, or None.
        measures: The units in which texts of the lengths and of the target lengths are counted; None for numbers.
        unit, factor: Of the lengths after scaling; the scale, of this source.
        label: All sources, for messages.
        alone: Whether there is no other source.
    """

    options: ReadOptions
    format: str
    length: str | None
    target: str | None
    measures: tuple[Unit | None, Unit | None]
    unit: Unit | None
    notes: tuple[str, ...]
    label: str = ""
    with_ids: bool = False
    alone: bool = True
    factor: Fraction = Fraction(1)


def plan_of(reader: Format, options: ReadOptions, first: Plan | None = None) -> Plan:
    """Decide how a source is read, by the options, its columns and the plan of the `first` source.

    Raises as `load_lengths` does, and ManifestError if its columns or its unit are not the first's.
    """
    path, given, found_target = reader.source.path, options, None
    if first is None and options.length_key is None and options.target_key is None and options.target_file is None:
        found_target = reader.default_target()
        options = replace(options, target_key=found_target)
    columns: Sequence[Column] = ()
    if first is not None and first.length and reader.name == first.format and reader.optional_columns:
        length = Column(first.length, None, numeric=False)
        target = Column(first.target, None, numeric=False) if first.target else None
    else:
        columns = reader.columns()
        if not columns:
            raise ManifestError(f"{path} holds no examples", "Check that it was written to its end.")
        if first is not None and first.length is not None and reader.named_columns:
            if options.length_key is None and first.length not in {column.name for column in columns}:
                raise _other_columns(path, first.length)
            options = replace(options, length_key=first.length, target_key=first.target)
        length, target = _chosen(reader, columns, options)
        if target is None and first is not None and first.target is not None:
            raise _other_columns(path, first.target)
    named = options.length_key is not None or length.name == reader.default_column(columns)
    measures = _measures(length, target, options, named) if first is None else first.measures
    name, last = normalised(length.name), normalised(last_part(length.name))
    if measures[0] is None and _is_counted(length, options):
        before: Unit | None = "tokens" if last in _TOKENS else None
    else:
        before = measures[0] or reader.unit_in(length.name) or reader.units.get(name)
        before = before or KNOWN_UNITS.get(name) or KNOWN_UNITS.get(last)
    unit, factor, scaling_note = scaling_for(path, before, options.unit, options.length_scale)
    if first is not None:
        if unit != first.unit:
            ours, theirs = unit or "an unknown unit", first.unit or "an unknown unit"
            hint = "What is read together must count the same; read them one by one, or convert one of them."
            raise ManifestError(f"{path} has its lengths in {ours}, the sources before it in {theirs}", hint)
        return replace(first, length=length.name, target=target.name if target else None, factor=factor)
    notes = []
    if measures[0] is not None:
        notes.append(_counting_note(length, measures[0], options))
    elif options.length_key is None and reader.named_columns:
        notes.append(f"Lengths are taken from column {shortened(length.name)}{f', in {before}' if before else ''}.")
    notes += [scaling_note] if scaling_note else []
    if options.reduce is not None and not any(isinstance(one.example, list) for one in (length, target) if one):
        notes.append(f"--reduce {options.reduce} has nothing to do: the first values are not lists.")
    if found_target is not None:
        notes.append(f"Target lengths are taken from column {shortened(found_target)}.")
    if measures[1] is not None and target is not None:
        notes.append(_counting_note(target, measures[1], options))
    column = length.name if reader.named_columns or reader.optional_columns or options.length_key else None
    return Plan(given, reader.name, column, target.name if target else None, measures, unit, tuple(notes))


def _other_columns(path: Path, column: str) -> ManifestError:
    message = f"{path} has no column {shortened(column)}, but the first source has its lengths or targets there"
    return ManifestError(message, "What is read together must have the same columns; read them one by one.")


def reader_of(source: Source, name: str | None) -> Format:
    """Return a reader of the named format, or of the one that a source's first bytes fit. Raises ManifestError."""
    if source.reader is None:
        source.reader = _format_of(source, name)(source)
    found: Format = source.reader
    return found


def _format_of(source: Source, name: str | None) -> type[Format]:
    if source.names is None and source.head.blank and source.head.complete:
        raise ManifestError(f"{source.path} is empty", "Check that it was written to its end.")
    if name is not None:
        if FORMATS[name].of_folder != (source.names is not None):
            raise ManifestError(f"{source.path} is not of the format {name}", "Leave --format out, or name another.")
        return FORMATS[name]
    for member in FORMATS.values():
        if member.fits(source.head):
            return member
    known = "; ".join(f"{member.name} ({member.description})" for member in FORMATS.values())
    message = f"{source.path} fits no known manifest format: {source.head.describe()}"
    raise ManifestError(message, f"The formats known: {known}. Name one with --format.")


def _chosen(reader: Format, columns: Sequence[Column], options: ReadOptions) -> tuple[Column, Column | None]:
    """Return the columns of the lengths and of the target lengths, None without."""
    path, target = reader.source.path, None
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


def _measures(
    length: Column, target: Column | None, options: ReadOptions, named: bool
) -> tuple[Unit | None, Unit | None]:
    """Return the units in which length and target are counted, if they are texts in a column that somebody named."""
    unit: Unit = "tokens" if options.tokenizer else options.measure or "characters"
    texts = [column is not None and column.text and not _is_counted(column, options) for column in (length, target)]
    texts[0] = texts[0] and named
    asked = "--tokenizer" if options.tokenizer else "--measure" if options.measure else None
    if asked is not None and not any(texts):
        if options.length_key is None and options.target_file is None:
            hint = "Name the column of the texts with --length-key or --target-key."
            raise UsageError(f"{asked} counts texts, and {shortened(length.name)} holds none", hint)
        texts[0] = options.target_file is None
    if any(texts):
        counter(unit, options.tokenizer)  # it can be loaded
    return unit if texts[0] else None, unit if texts[1] else None


def _is_counted(column: Column, options: ReadOptions) -> bool:
    """Return whether the length is the number of a list's items, whatever they are."""
    return options.reduce == "count" and isinstance(column.example, list)


def _counting_note(column: Column, counted: Unit, options: ReadOptions) -> str:
    said = options.measure is not None or options.tokenizer is not None
    otherwise = "" if said else " --measure words or bytes, or --tokenizer FILE, count otherwise."
    return f"Column {shortened(column.name)} holds text: its {counted} are counted.{otherwise}"


def scaling_for(
    path: Path, source: Unit | None, unit: Unit | None, scale: Fraction | None
) -> tuple[Unit | None, Fraction, str | None]:
    """Decide the final unit of the lengths, their factor, and a note for the user, by the unit of the source.

    The user's unit wins; s and ms are converted into each other; a scale without a unit gives one only if there is no
    doubt. Raises ManifestError if the user wants another unit and gives no scale.
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
    hint = f"Say how many {unit} one of the {source} is with --length-scale ({example}), or leave --unit out."
    raise ManifestError(f"{path} has its lengths in {source}, and --unit asks for {unit}", hint)


def keyed_targets(source: Source) -> dict[str, object]:
    """Read id → target from Kaldi's and ESPnet's files: `utt value`, `utt 52,31` or `utt words …`.

    If most values are numbers, or shapes (of which the first dimension counts), the others alone stay text. Else all
    are texts, so that a transcript `7` among others has one character like the letter `A`.
    """
    texts: dict[str, str] = {}
    for line_number, line in source.lines():
        if not line.strip():
            continue
        name, *rest = line.split(maxsplit=1)
        if name in texts:
            message = f"{source.path}, line {line_number}: the id {shortened(name)} is there a second time"
            raise ManifestError(message, "Each id has one target: remove or rename one of the lines.")
        texts[name] = "".join(rest).rstrip()
    sizes = {name: number(text.partition(",")[0] if _SHAPE.fullmatch(text) else text) for name, text in texts.items()}
    numeric = 2 * sum(size is not None for size in sizes.values()) > len(sizes)
    return {name: text if sizes[name] is None or not numeric else sizes[name] for name, text in texts.items()}


def measure_of(target_file: Source, reader: Format, options: ReadOptions) -> Unit | None:
    """Decide how the targets of a file are counted; None if they are numbers."""
    first: Iterable[object] = (text for _, text in target_file.lines())
    if reader.joined_by_id:
        first = keyed_targets(target_file).values()
    columns = summarise({"target": value} for value in itertools.islice(first, PEEKED_ROWS))
    if not columns or not columns[0].text:
        return None
    symbols = target_file.path.name.endswith(_SYMBOLS)
    return "tokens" if options.tokenizer else options.measure or ("words" if symbols else "characters")
