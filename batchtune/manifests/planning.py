"""Which columns are read, and how their values become lengths: by the user's options, and by the sources."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from batchtune.errors import ManifestError, UsageError, shortened
from batchtune.lengths import Unit
from batchtune.manifests.base import (
    INPUTS,
    KNOWN_UNITS,
    PEEKED_ROWS,
    Column,
    Format,
    chats_among,
    choose_column,
    find_column,
    normalised,
    summarise,
)
from batchtune.manifests.chats import template_of
from batchtune.manifests.formats import FORMATS
from batchtune.manifests.options import ReadOptions
from batchtune.manifests.source import Source
from batchtune.manifests.values import (
    Measure,
    counter,
    number,
    tokenizer_file,
)

# Target files of fairseq: letters or words, separated by spaces.
_SYMBOLS = (".ltr", ".wrd", ".ltr.gz", ".wrd.gz")
_SHAPE = re.compile(r"\d+(?:,\d+)+", re.ASCII)
_CONVERSIONS: dict[tuple[Unit, Unit], Fraction] = {("ms", "s"): Fraction(1, 1000), ("s", "ms"): Fraction(1000)}
_SAMPLE_RATES = range(4000, 192_001)


@dataclass(frozen=True, slots=True)
class Plan:
    """How sources are read: the user's options, and the decisions that the first source makes for all.

    Attributes:
        format: Name of the first source's format.
        length: The column of the lengths, as named; None if the format of the first source has only one.
        columns: The columns that are read: those whose sum is the length, then that of the target lengths.
        target: The column, or the file, of the target lengths, or None.
        measures: How values become numbers: one for each of these columns, or the target file last.
        unit, factor: Of the lengths after scaling; the scale, of this source.
        label: All sources, for messages.
        alone: Whether there is no other source.
    """

    options: ReadOptions
    format: str
    length: str | None
    columns: tuple[str, ...]
    target: str | None
    measures: tuple[Measure, ...]
    unit: Unit | None
    notes: tuple[str, ...]
    label: str = ""
    with_ids: bool = False
    alone: bool = True
    factor: Fraction = Fraction(1)


def first_plan(reader: Format, options: ReadOptions) -> Plan:
    """Decide how the first source, and with it all others, is read. Raises as `load_lengths` does."""
    path = reader.source.path
    keys = options
    default_target = None
    if options.length_key is None and options.target_key is None and options.target_file is None:
        default_target = reader.default_target()
        keys = replace(options, target_key=default_target)
    columns = _columns_of(reader)
    lengths, target = _chosen(reader, columns, keys)
    key = options.length_key or lengths[0].name
    is_named = options.length_key is not None or key == reader.default_column(columns)
    measures = _measures(lengths, target, options, named=is_named)
    source_unit = _common_unit(reader, lengths, measures, columns)
    unit, factor, scaling_note = scaling_for(path, source_unit, options.unit, options.length_scale)
    notes = []
    if measures[0].texts is None and options.length_key is None and reader.named_columns:
        in_unit = f", in {source_unit}" if source_unit else ""
        notes.append(f"Lengths are taken from column {shortened(key)}{in_unit}.")
    notes += _counting_notes(lengths, measures, options)
    if scaling_note is not None:
        notes.append(scaling_note)
    examples = [column.example for column in lengths]
    if target is not None:
        examples.append(target.example)
    if options.reduce is not None and not any(isinstance(example, list) for example in examples):
        notes.append(f"--reduce {options.reduce} has no effect: the first values are not lists.")
    if default_target is not None:
        notes.append(f"Target lengths are taken from column {shortened(default_target)}.")
    if target is not None:
        notes += _counting_notes([target], measures[-1:], options)
    length = None
    if reader.named_columns or reader.optional_columns or options.length_key:
        length = key
    plan = Plan(options, reader.name, length, (), None, measures, unit, tuple(notes))
    return _with_columns(plan, lengths, target, factor)


def plan_for(reader: Format, first: Plan) -> Plan:
    """Return the plan of the first source, with the columns and the scale of another.

    Raises ManifestError if its columns or its unit are not the first's.
    """
    path = reader.source.path
    options = first.options
    columns: Sequence[Column] = ()
    if first.length and reader.name == first.format and reader.optional_columns:
        lengths = [Column(name, None, numeric=False) for name in first.columns]
        target = lengths.pop() if first.target in first.columns else None
    else:
        columns = _columns_of(reader)
        if first.length is not None and reader.named_columns:
            names = {column.name for column in columns}
            absent = [name for name in first.columns if name not in names]
            if options.length_key is None and absent:
                raise _other_columns(path, absent[0])
            options = replace(options, length_key=first.length, target_key=first.target)
        lengths, target = _chosen(reader, columns, options)
        if target is None and first.target is not None:
            raise _other_columns(path, first.target)
    source_unit = _common_unit(reader, lengths, first.measures, columns)
    unit, factor, _ = scaling_for(path, source_unit, options.unit, options.length_scale)
    if unit != first.unit:
        seen = f"{unit or 'an unknown unit'}, the sources before it in {first.unit or 'an unknown unit'}"
        hint = "What is read together must count the same; read them one by one, or convert one of them."
        raise ManifestError(f"{path} has its lengths in {seen}", hint)
    return replace(_with_columns(first, lengths, target, factor), length=options.length_key or lengths[0].name)


def _columns_of(reader: Format) -> list[Column]:
    columns = list(reader.columns())
    if not columns:
        raise ManifestError(f"{reader.source.path} holds no examples", "Check that it was written to its end.")
    return columns + chats_among(columns)


def _with_columns(plan: Plan, lengths: Sequence[Column], target: Column | None, factor: Fraction) -> Plan:
    names = [column.name for column in lengths]
    if target is not None:
        names.append(target.name)
    return replace(plan, columns=tuple(names), target=target.name if target else None, factor=factor)


def _common_unit(
    reader: Format, lengths: Sequence[Column], measures: Sequence[Measure], columns: Sequence[Column]
) -> Unit | None:
    """Return the unit of columns whose sum is the length, None if unknown. Raises UsageError if they have several."""
    units: dict[Unit, str] = {}
    for column, measure in zip(lengths, measures, strict=False):
        if (unit := _unit_of(reader, column, measure)) is not None:
            units.setdefault(unit, column.name)
    if len(units) > 1:
        each = " and ".join(f"{shortened(name)} in {unit}" for unit, name in units.items())
        raise UsageError(f"--length-key adds {each}", "Add columns of one unit only.")
    if not units and any(column.holds_tokens and column.name in INPUTS for column in columns):
        names = {normalised(column.name) for column in lengths}
        return "tokens" if names <= KNOWN_UNITS.keys() else None  # the `length` of a tokenized data set
    return next(iter(units), None)


def _unit_of(reader: Format, column: Column, measure: Measure) -> Unit | None:
    if measure.texts is not None:
        return measure.texts
    if measure.lists == "count" and isinstance(column.example, list):
        return "tokens" if column.holds_tokens else None
    return reader.unit_in(column.name)


def _other_columns(path: Path, column: str) -> ManifestError:
    message = f"{path} has no column {shortened(column)}, but the first source has its lengths or targets there"
    return ManifestError(message, "What is read together must have the same columns; read them one by one.")


def reader_of(source: Source, name: str | None) -> Format:
    """Return a reader of the named format, or of the one that a source's first bytes fit. Raises ManifestError."""
    if source.reader is None:
        source.reader = _format_of(source, name)(source)
    reader: Format = source.reader
    return reader


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


def _chosen(reader: Format, columns: Sequence[Column], options: ReadOptions) -> tuple[list[Column], Column | None]:
    """Return the columns whose sum is the length, and that of the target lengths, None without."""
    path = reader.source.path
    target = None
    if options.target_key is not None:
        target = _counted(find_column(path, columns, options.target_key, "--target-key"), columns)
    key = options.length_key
    if key is None:
        key = reader.default_column(columns)
        taken = target.name if target else None
        if key is None or taken == key:
            counts_texts = options.tokenizer is not None or options.measure is not None
            chosen = choose_column(path, columns, taken, counts_texts=counts_texts and target is None)
            return [_counted(chosen, columns)], target
    parts = [key]
    if key not in {column.name for column in columns}:
        parts = [part.strip() for part in key.split("+")]
    lengths = [_counted(find_column(path, columns, part, "--length-key"), columns) for part in parts]
    if target is not None and target.name in {length.name for length in lengths}:
        hint = "A target length is another than the length."
        raise UsageError(f"--length-key and --target-key both name {shortened(target.name)}", hint)
    return lengths, target


def _counted(column: Column, columns: Sequence[Column]) -> Column:
    """Return the column of the number of tokens in a list of them if the file has that (Parquet), else the column."""
    counts = (other for other in columns if other.name == f"{column.name}.count" and column.holds_tokens)
    return next(counts, column)


def _measures(
    lengths: Sequence[Column], target: Column | None, options: ReadOptions, *, named: bool
) -> tuple[Measure, ...]:
    """Return how the values of each column become numbers; texts count only in a column that somebody named."""
    unit = _text_unit(options)
    measures = [_measure(column, unit, options, counts_texts=named) for column in lengths]
    if target is not None:
        measures.append(_measure(target, unit, options, counts_texts=True))
    counts_texts = options.tokenizer is not None or options.measure is not None
    if counts_texts and options.target_file is None and all(measure.texts is None for measure in measures):
        if options.length_key is None:
            option = "--tokenizer" if options.tokenizer else "--measure"
            hint = "Name the column of the texts with --length-key or --target-key."
            raise UsageError(f"{option} counts texts, and {shortened(lengths[0].name)} holds none", hint)
        measures[0] = replace(measures[0], texts=unit)
    if any(measure.texts is not None for measure in measures):
        counter(unit, options.tokenizer)  # it can be loaded
    return tuple(measures)


def _measure(column: Column, unit: Unit, options: ReadOptions, *, counts_texts: bool) -> Measure:
    if column.chat:
        return Measure(texts=unit, chats=True)
    lists = options.reduce
    if lists is None and column.holds_tokens:
        lists = "count"
    is_counted = lists == "count" and isinstance(column.example, list)
    if column.text and counts_texts and not is_counted:
        return Measure(texts=unit, lists=lists)
    return Measure(lists=lists)


def _counting_notes(columns: Sequence[Column], measures: Sequence[Measure], options: ReadOptions) -> Iterator[str]:
    """Say what is counted in columns of texts or chats."""
    for column, measure in zip(columns, measures, strict=False):
        said = options.measure is not None or options.tokenizer is not None
        if measure.chats:
            yield _chat_note(column, measure, options)
        elif measure.texts is not None:
            otherwise = "" if said else " --measure words or bytes, or --tokenizer FILE, count otherwise."
            yield f"Column {shortened(column.name)} holds text: its {measure.texts} are counted.{otherwise}"


def _chat_note(column: Column, measure: Measure, options: ReadOptions) -> str:
    holds = f"Column {shortened(column.name)} holds chats: the {measure.texts} of"
    if options.tokenizer is None:
        return f"{holds} their contents are counted, without a chat template. --tokenizer FOLDER counts tokens with it."
    if (template := template_of(tokenizer_file(options.tokenizer))) is None:
        return f"{holds} their contents are counted, as {options.tokenizer} has no chat template."
    return f"{holds} each are counted as the chat template in {template.path} renders it, in jinja2's sandbox."


def scaling_for(
    path: Path, source: Unit | None, unit: Unit | None, scale: Fraction | None
) -> tuple[Unit | None, Fraction, str | None]:
    """Decide the final unit of the lengths, their factor, and a note for the user, by the unit of the source.

    The user's unit wins; s and ms are converted into each other; a scale without a unit gives one only if there is no
    doubt. Raises ManifestError if the user wants another unit and gives no scale.
    """
    if scale is not None:
        unit = unit or _unit_after(source, scale)
        if unit is not None:
            return unit, scale, None
        before = source or "the file's values"
        return None, scale, f"The unit of the scaled lengths ({before} * {scale}) is unknown: name it with --unit."
    if unit is None and source is None:
        note = "The unit of the lengths is unknown: name it with --unit, so that results and configs show it."
        return None, Fraction(1), note
    if unit is None or source is None or unit == source:
        return unit or source, Fraction(1), None
    if (source, unit) in _CONVERSIONS:
        return unit, _CONVERSIONS[source, unit], f"Lengths are converted from {source} to {unit}."
    example = "a number or a fraction"
    if (source, unit) == ("samples", "s"):
        example = "1/16000 for 16 kHz audio"
    hint = f"Say how many {unit} one of the {source} is with --length-scale ({example}), or leave --unit out."
    raise ManifestError(f"{path} has its lengths in {source}, and --unit asks for {unit}", hint)


def _unit_after(source: Unit | None, scale: Fraction) -> Unit | None:
    """Return the unit of lengths after scaling, if there is no doubt."""
    if scale == 1:
        return source
    if source == "samples" and scale.numerator == 1 and scale.denominator in _SAMPLE_RATES:
        return "s"
    for (before, after), factor in _CONVERSIONS.items():
        if (before, factor) == (source, scale):
            return after
    return None


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
            message = f"{source.path}, line {line_number}: duplicate id {shortened(name)}"
            raise ManifestError(message, "Each id has one target: remove or rename one of the lines.")
        texts[name] = "".join(rest).rstrip()
    sizes: dict[str, float | None] = {}
    for name, text in texts.items():
        first, _, _ = text.partition(",")
        sizes[name] = number(first if _SHAPE.fullmatch(text) else text)
    numeric = sum(size is not None for size in sizes.values())
    if 2 * numeric <= len(sizes):
        return dict(texts)
    return {name: texts[name] if size is None else size for name, size in sizes.items()}


def measure_of(target_file: Source, reader: Format, options: ReadOptions) -> Measure:
    """Decide how the targets of a file become numbers."""
    targets: Iterable[object] = (text for _, text in target_file.lines())
    if reader.joined_by_id:
        targets = keyed_targets(target_file).values()
    columns = summarise({"target": value} for value in itertools.islice(targets, PEEKED_ROWS))
    if not columns or not columns[0].text:
        return Measure(lists=options.reduce)
    default: Unit = "words" if target_file.path.name.endswith(_SYMBOLS) else "characters"
    return Measure(texts=_text_unit(options, default), lists=options.reduce)


def _text_unit(options: ReadOptions, default: Unit = "characters") -> Unit:
    """Return the unit in which texts are counted."""
    if options.tokenizer is not None:
        return "tokens"
    return options.measure or default
