"""What a user may say about a manifest."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from batchtune.errors import ResultError, UsageError, shortened
from batchtune.lengths import UNITS, Unit
from batchtune.manifests.values import COUNTINGS, REDUCTIONS, Counting, Reduction
from batchtune.results import ReadingRecord

# The exponent is bounded: Fraction("1e999999999") would compute for hours.
_NUMBER = r"\+?(?:\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})(?:[eE][+-]?\d{1,3})?"
_SCALE = re.compile(rf"\s*({_NUMBER})\s*(?:/\s*({_NUMBER})\s*)?", re.ASCII)
# What a result file holds as text.
_AS_TEXT = ("target_file", "length_scale", "tokenizer")
# Of these only one can be given; and what says how a column's values are read goes with that column.
_EXCLUSIVE = {"measure": "tokenizer", "tokenizer": "measure", "target_key": "target_file", "target_file": "target_key"}
_OF_THE_COLUMN = ("unit", "length_scale", "measure", "tokenizer", "reduce")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How a manifest is read; None for what the user does not say.

    Attributes:
        format: A name in `batchtune.manifests.FORMATS`; None to detect it from the content.
        length_key: The column (or JSON key) of the lengths; None to find it among the known names.
        target_key: The column of the target lengths; None without any.
        unit: What the lengths count after `length_scale`; None to take it from the format or column.
        length_scale: What each length, but no target length, is multiplied by, exactly.
        min_length, max_length: The shortest and the longest length that is kept, inclusive, after scaling.
        skip_invalid: Whether invalid rows, and what follows a break in one of several sources, are left out and
            counted, rather than an error.
        measure: What of a text is counted; None for the characters where a column holds text.
        tokenizer: A `tokenizer.json` whose tokens are counted instead.
        reduce: What becomes of a list; None where lists are invalid.
        target_file: Files that hold the target lengths, as manifests are named.
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
        for name, choice, known in (
            ("unit", self.unit, UNITS),
            ("--measure", self.measure, COUNTINGS),
            ("--reduce", self.reduce, REDUCTIONS),
        ):
            if choice is not None and choice not in known:
                raise UsageError(f"unknown {name} {shortened(choice)}", f"Known: {', '.join(known)}.")
        if self.measure is not None and self.tokenizer is not None:
            raise UsageError("--measure and --tokenizer exclude each other", "A tokenizer counts tokens.")
        if self.target_file is not None and self.target_key is not None:
            raise UsageError("--target-file and --target-key exclude each other", "A target has one length.")
        for name, value in (("--min-length", self.min_length), ("--max-length", self.max_length)):
            if value is not None and math.isnan(value):
                raise UsageError(f"{name} must be a number, got nan")
        if self.min_length is not None and self.max_length is not None and self.min_length > self.max_length:
            raise UsageError(
                f"--min-length {self.min_length:.15g} is more than --max-length {self.max_length:.15g}",
                "No example can be in between: exchange them, or leave one out.",
            )

    def record(self) -> ReadingRecord:
        """Return what result files say of them."""
        said: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        return ReadingRecord(**said | {name: str(said[name]) for name in _AS_TEXT if said[name] is not None})

    def completed(self, record: ReadingRecord) -> ReadOptions:
        """Return these options, completed by those of a result file.

        Nothing is taken that excludes a given option, or that says how the values of another column are read.

        Raises:
            ResultError: The file says what has no meaning.
        """
        said: dict[str, Any] = {field.name: getattr(record, field.name) for field in fields(self)}
        try:
            if record.length_scale is not None:
                said["length_scale"] = parse_scale(record.length_scale)
            if record.tokenizer is not None:
                said["tokenizer"] = Path(record.tokenizer)
            theirs = ReadOptions(**said)
        except UsageError as error:
            message = f"how the run's manifest was read is damaged: {error.message}"
            raise ResultError(message, "Make it anew with the command that wrote it.") from error
        given = {name for name in said if (value := getattr(self, name)) is not None and value is not False}
        barred = {_EXCLUSIVE[name] for name in given & _EXCLUSIVE.keys()}
        if "length_key" in given and self.length_key != theirs.length_key:
            barred |= set(_OF_THE_COLUMN)
        return replace(self, **{name: value for name, value in said.items() if name not in given | barred})


def parse_scale(text: str) -> Fraction:
    """Read a length scale: `0.001`, `1/16000` or `16000`, exactly.

    Raises:
        UsageError: Not a number or fraction, not positive, or not to be held in float64.
    """
    match = _SCALE.fullmatch(text)
    try:
        scale = Fraction(match[1]) / Fraction(match[2] or 1) if match is not None else Fraction(0)
        if float(scale.numerator) > 0 and float(scale.denominator) > 0:
            return scale
    except (OverflowError, ZeroDivisionError):
        pass
    raise UsageError(
        f"{shortened(text)} is not a length scale", "Write a number above 0 or a fraction, such as 0.001 or 1/16000."
    )
