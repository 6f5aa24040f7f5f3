"""Which columns are read, and how their values become lengths: by the user's options, and by the first source."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import numpy as np

from batchtune.errors import ManifestError, UsageError, listed, shortened
from batchtune.lengths import Unit
from batchtune.manifests.formats import (
    COUNT,
    INPUTS,
    KNOWN_UNITS,
    PEEKED_ROWS,
    Column,
    Format,
    last_part,
    normalised,
    walk,
)
from batchtune.manifests.inputs import FORMATS, ReadOptions
from batchtune.manifests.source import Source
from batchtune.manifests.texts import counter, template_of
from batchtune.results import Reduction

# Target files of fairseq: letters or words, separated by spaces.
_SYMBOLS = (".ltr", ".wrd", ".ltr.gz", ".wrd.gz")
_CHATS = ("messages", "conversations", "conversation")
_TOOLS = "tools"
# Columns of texts or chats, together an example: of preferences (a pair is padded to the longer answer, and in chats
# each answer begins with the prompt), of prompts with answers, of Alpaca.
_COMBINED = (
    "prompt+max(chosen,rejected)",
    "max(chosen,rejected)",
    "prompt+completion",
    "prompt+response",
    "instruction+input+output",
    "instruction+output",
)
_CONVERSIONS: dict[tuple[Unit, Unit], Fraction] = {
    ("ms", "s"): Fraction(1, 1000),
    ("s", "ms"): Fraction(1000),
}
_SAMPLE_RATES = range(4000, 192_001)


@dataclass(frozen=True, slots=True)
class Measure:
    """A column that is read, and how its values become numbers.

    Attributes:
        column: Its name, or the path of the target file.
        texts: The unit that texts are counted in; None if the values are numbers.
        lists: How a list becomes one number; None if a list is invalid.
        chats: The columns whose lists of messages, one after the other, are a chat, from this one on; none of them
            if the values are anything else.
        tools: The column of the tools that the chat's model is given, if there is one.
    """

    column: str
    texts: Unit | None = None
    lists: Reduction | None = None
    chats: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How all sources are read: the user's options, and the decisions that the first source makes for all.

    Attributes:
        format: Name of the format.
        key: Names the columns of the lengths, for messages.
        lengths: The columns of the length.
        weights: Those of the columns in sums, shape (sums, columns); the largest sum is the length.
        target: The column, or the file, of the target lengths; None without any.
        stored_unit: Of the columns of the length, None if unknown.
        unit, factor: Of the lengths after scaling; the scale.
        notes: For the user.
        label: All sources, for messages.
        with_ids: Whether the ids of the examples are wanted.
        in_order: Whether the order of the examples is wanted.
        alone: Whether it is the only source.
        as_histogram: Whether equal examples are only counted.
    """

    options: ReadOptions
    format: str
    key: str
    lengths: tuple[Measure, ...]
    weights: list[list[int]]
    target: Measure | None
    stored_unit: Unit | None
    unit: Unit | None
    factor: Fraction
    notes: tuple[str, ...]
    label: str = ""
    with_ids: bool = False
    in_order: bool = False
    alone: bool = True
    as_histogram: bool = False

    @property
    def columns(self) -> list[str]:
        """The columns that are read: those of the length, then that of the target lengths if it is not a file."""
        measures = list(self.lengths)
        if self.target is not None and self.options.target_file is None:
            measures.append(self.target)
        names = []
        for measure in measures:
            names += [measure.column, *measure.chats, *measure.tools]
        return list(dict.fromkeys(names))


def reader_of(source: Source, name: str | None) -> Format:
    """Return a reader of the named format, or of the one that a source's first bytes fit. Raises ManifestError."""
    if source.blank:
        raise ManifestError(
            f"{source.path} is empty", "Check that it was written to its end."
        )
    if name is not None:
        if FORMATS[name].of_folder != (source.names is not None):
            raise ManifestError(
                f"{source.path} is not of the format {name}",
                "Leave --format out, or name another.",
            )
        return FORMATS[name](source)
    for member in FORMATS.values():
        if member.fits(source.head):
            return member(source)
    seen = shortened(source.head.data.partition(b"\n")[0].decode(errors="replace"))
    before, nul, _ = source.head.data.partition(b"\0")
    if nul:
        line = before.count(b"\n") + 1
        seen += f"; line {line} holds a NUL byte, which no text may"
    known = [f"  {member.name}: {member.description}" for member in FORMATS.values()]
    raise ManifestError(
        f"{source.path} fits no known manifest format: it begins with {seen}",
        "\n".join(["Name its format with --format:", *known]),
    )


def plan_of(reader: Format, options: ReadOptions) -> Plan:
    """Decide how a source, and with it all others, is read. Raises as `load_lengths` does."""
    path = reader.source.path
    columns = reader.columns()
    if not columns:
        raise ManifestError(
            f"{path} holds no examples", "Check that it was written to its end."
        )
    target_key = options.target_key
    if (
        target_key is None
        and options.length_key is None
        and options.target_file is None
    ):
        target_key = reader.default_target()
    target = None
    if target_key is not None:
        target = _named(path, columns, target_key, "--target-key")
    key = options.length_key or reader.default_column(columns)
    is_named = key is not None
    if key is None:
        key = _chosen(path, [column for column in columns if column != target], options)
        is_named = key in _COMBINED
    measures, weights = _lengths(path, columns, key, options, counts_texts=is_named)
    names = {name for measure in measures for name in (measure.column, *measure.chats)}
    if target is not None and target.name in names:
        raise UsageError(
            f"--length-key and --target-key both name {shortened(target_key)}",
            "Name another column for the target length.",
        )

    target_measure = None
    if target is not None:
        target_measure = _measure(target, options, counts_texts=True)
    counting = [
        measure
        for measure in [*measures, target_measure]
        if measure is not None and measure.texts is not None
    ]
    if options.counts_texts and options.target_file is None and not counting:
        raise UsageError(
            f"{shortened(measures[0].column)} holds no texts, which --measure and --tokenizer count",
            "Name the column of the texts with --length-key or --target-key.",
        )
    if options.tokenizer is not None:
        counter("tokens", options.tokenizer)  # it can be loaded
    stored_unit = unit_of(reader, measures)
    unit, factor = _scaling(path, stored_unit, options.unit, options.factor)

    notes = []
    if (
        reader.names_columns
        and options.length_key is None
        and measures[0].texts is None
    ):
        in_unit = ""
        if stored_unit is not None:
            in_unit = f", in {stored_unit}"
        notes.append(f"Lengths are taken from column {shortened(key)}{in_unit}.")
    elif key in _COMBINED and options.length_key is None:
        notes.append(f"Lengths are {key}.")
    if target is not None and options.target_key is None:
        notes.append(f"Target lengths are taken from column {shortened(target.name)}.")
    notes += [_counting_note(measure, options) for measure in counting]
    if any(measure.chats for measure in measures) and any(map(_holds_images, columns)):
        notes.append(
            "Warning: the chats hold images, audio or video, whose tokens are not counted: the lengths are too short."
        )
    if unit is None:
        notes.append(
            "The unit of the lengths is unknown: name it with --unit, so that results and configs show it."
        )
    elif stored_unit not in (None, unit) and options.length_scale is None:
        notes.append(f"Lengths are converted from {stored_unit} to {unit}.")
    return Plan(
        options=options,
        format=reader.name,
        key=key,
        lengths=tuple(measures),
        weights=weights,
        target=target_measure,
        stored_unit=stored_unit,
        unit=unit,
        factor=factor,
        notes=tuple(notes),
    )


def unit_of(reader: Format, measures: Sequence[Measure]) -> Unit | None:
    """Return the unit of columns whose sum is the length, None if unknown. Raises UsageError if they have several."""
    names_by_unit: dict[Unit, str] = {}
    for measure in measures:
        unit = measure.texts or reader.unit_in(measure.column)
        if unit is not None:
            names_by_unit.setdefault(unit, measure.column)
    if len(names_by_unit) > 1:
        each = " and ".join(
            f"{shortened(name)} in {unit}" for unit, name in names_by_unit.items()
        )
        raise UsageError(f"--length-key adds {each}", "Add columns of one unit only.")
    return next(iter(names_by_unit), None)


def _lengths(
    path: Path | str,
    columns: Sequence[Column],
    key: str,
    options: ReadOptions,
    *,
    counts_texts: bool,
) -> tuple[list[Measure], list[list[int]]]:
    """Return the columns of the length and their weights, as `Plan` has them; several chats are joined to one."""
    sums = _sums(columns, key)
    measures: dict[str, Measure] = {}
    for name in itertools.chain(*sums):
        column = _named(path, columns, name.removeprefix("-"), "--length-key")
        measure = _measure(column, options, counts_texts=counts_texts)
        measures[name.removeprefix("-")] = measure
    if not all(measure.chats for measure in measures.values()):
        weights = [
            [names.count(name) - names.count(f"-{name}") for name in measures]
            for names in sums
        ]
        return list(measures.values()), weights
    tools = []
    if template_of(options.tokenizer) is not None:
        tools = [column.name for column in columns if column.name == _TOOLS]
    joined = []
    for names in sums:
        chats = [measures[name].column for name in names]
        measure = replace(measures[names[0]], chats=tuple(chats), tools=tuple(tools))
        joined.append(measure)
    return joined, np.eye(len(sums), dtype=int).tolist()


def _sums(columns: Sequence[Column], key: str) -> list[list[str]]:
    """Return the sums whose maximum is the length, as names, with a minus before those that are subtracted.

    The key is the name of a column, or several with a plus between them; each may be `max(a,b)` or `a-b`.
    """
    names = {column.name for column in columns}
    sums: list[list[str]] = [[]]
    for part in [key] if key in names else key.split("+"):
        part = part.strip()
        first, *others = part.split("-")
        choices = [[part]]
        if part.startswith("max("):
            choices = [[name.strip()] for name in part[4:].rstrip(")").split(",")]
        elif part not in names and {first, *others} <= names:
            choices = [[first, *(f"-{name}" for name in others)]]
        sums = [[*begun, *choice] for begun in sums for choice in choices]
    return sums


def _holds_images(column: Column) -> bool:
    """Return whether messages of chats have parts other than texts."""
    for chat in column.values:
        for types in walk(chat, ("content", "type")) or ():  # type: ignore[attr-defined]
            if isinstance(types, list) and set(types) - {"text", None}:
                return True
    return False


def _named(
    path: Path | str, columns: Sequence[Column], key: str, option: str
) -> Column:
    """Return the column that the user named, or what is below one."""
    for column in columns:
        if column.name == key:
            return column
    dotted = key.replace("[", ".").replace("]", "")
    for column in columns:  # an item of a list, such as prompt[0].content, or a field that the first rows don't have
        if dotted.startswith(f"{column.name}."):
            way = tuple(dotted.removeprefix(f"{column.name}.").split("."))
            values = [walk(value, way) for value in column.values]
            return Column(dotted, [value for value in values if value is not None])
    raise ManifestError(
        f"{path} has no column {shortened(key)} ({option}). Its columns: {_listed(columns)}",
        f"Name one of them with {option} NAME.",
    )


def _chosen(path: Path | str, columns: Sequence[Column], options: ReadOptions) -> str:
    """Return the name of the one column that holds lengths, or whose values have one; or a key of several.

    Columns with a known name come first, then tokens, chats, names without a unit, nested columns with a known name,
    and audio; chats before all others if the user wants texts to be counted. Raises ManifestError for none or several.
    """
    audio = [
        column
        for column in columns
        if column.is_binary and "audio" in column.name.lower()
    ]
    columns = [column for column in columns if not column.is_binary]
    named = [column for column in columns if normalised(column.name) in KNOWN_UNITS]
    known = [column for column in named if column.known_unit is not None]
    tokens = [
        column
        for column in columns
        if column.holds_tokens and normalised(column.name) in INPUTS
    ]
    chats = [column for column in columns if column.chat and column.name in _CHATS]
    nested = [
        column
        for column in columns
        if normalised(last_part(column.name)) in KNOWN_UNITS
    ]
    ranked = [known, tokens, chats, named, nested, audio]
    if options.counts_texts:
        ranked.insert(0, chats)
    for candidates in ranked:
        numeric = [column for column in candidates if column.numeric] or candidates
        if len(numeric) == 1:
            return numeric[0].name
        if numeric:
            examples = ", ".join(
                f"{shortened(column.name)} (such as {shortened(column.example, 40)})"
                for column in numeric[:20]
            )
            raise ManifestError(
                f"{path} has {len(numeric)} columns that may hold the lengths: {examples}",
                f"Choose with --length-key NAME, such as {shortened(numeric[0].name)}, or add some: --length-key a+b.",
            )
    kinds = {
        column.name: column.chat for column in columns if column.text or column.chat
    }
    for key in _COMBINED:
        names = re.findall(r"\w+", key.replace("max", ""))
        if set(names) <= kinds.keys() and len({kinds[name] for name in names}) == 1:
            return key
    raise ManifestError(
        f"{path} has no column that is known to hold lengths. Its columns: {_listed(columns)}",
        "Name the column that holds the lengths with --length-key NAME; a table needs a first line of names. If they "
        "are the difference of two: --length-key end-start.",
    )


def _listed(columns: Sequence[Column]) -> str:
    return listed([column.name for column in columns])


def _measure(column: Column, options: ReadOptions, *, counts_texts: bool) -> Measure:
    """Return how the values of a column become numbers; texts count only in a column that somebody named."""
    unit = options.text_unit("characters")
    if column.chat:
        return Measure(column.name, texts=unit, chats=(column.name,))
    lists = options.reduce
    if lists is None and column.holds_tokens:
        lists = "count"
    if lists == "count" and isinstance(column.example, list):
        return Measure(f"{column.name}.{COUNT}", lists=lists)
    is_text = column.text or (options.counts_texts and isinstance(column.example, str))
    if is_text and counts_texts:
        return Measure(column.name, texts=unit, lists=lists)
    return Measure(column.name, lists=lists)


def _counting_note(measure: Measure, options: ReadOptions) -> str:
    """Say what is counted in a column of texts or chats."""
    name = shortened(measure.column)
    if not measure.chats:
        otherwise = ""
        if not options.counts_texts:
            otherwise = (
                " --measure words or bytes, or --tokenizer FILE, count otherwise."
            )
        return f"Column {name} holds text: its {measure.texts} are counted.{otherwise}"
    template = template_of(options.tokenizer)
    how = "their contents are counted, without a chat template (--tokenizer FOLDER names one)"
    if template is not None:
        how = f"each are counted as the chat template in {template.path} renders it, in jinja2's sandbox"
    return f"Column {name} holds chats: the {measure.texts} of {how}."


def _scaling(
    path: Path | str, source: Unit | None, unit: Unit | None, scale: Fraction | None
) -> tuple[Unit | None, Fraction]:
    """Decide the final unit of the lengths and their factor, by the unit of the source.

    The user's unit wins; s and ms are converted into each other; a scale without a unit gives one only if there is no
    doubt. Raises ManifestError if the user wants another unit and gives no scale.
    """
    if scale is not None:
        return unit or _unit_after(source, scale), scale
    if unit is None or source is None or unit == source:
        return unit or source, Fraction(1)
    if (source, unit) in _CONVERSIONS:
        return unit, _CONVERSIONS[source, unit]
    raise ManifestError(
        f"{path} has its lengths in {source}, and --unit asks for {unit}",
        f"Say how many {unit} one of the {source} is with --length-scale X (1/16000 for 16 kHz audio).",
    )


def _unit_after(source: Unit | None, scale: Fraction) -> Unit | None:
    """Return the unit of lengths after scaling, if there is no doubt."""
    if scale == 1:
        return source
    if (
        source == "samples"
        and scale.numerator == 1
        and scale.denominator in _SAMPLE_RATES
    ):
        return "s"
    for (before, after), factor in _CONVERSIONS.items():
        if (before, factor) == (source, scale):
            return after
    return None


def with_target_file(plan: Plan, path: Path | str, targets: Iterable[object]) -> Plan:
    """Return the plan with the target lengths of a file, measured by what its first values are."""
    column = Column("target", list(itertools.islice(targets, PEEKED_ROWS)))
    measure = Measure(str(path), lists=plan.options.reduce)
    if column.text:
        default: Unit = "characters"
        if str(path).endswith(_SYMBOLS):
            default = "words"
        measure = replace(measure, texts=plan.options.text_unit(default))
    note = f"Target lengths are the {measure.texts or 'numbers'} in {path}."
    return replace(plan, target=measure, notes=(*plan.notes, note))
