"""The user's options for reading a manifest."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from batchtune.errors import ResultError, UsageError, did_you_mean, shortened
from batchtune.lengths import UNITS, Unit
from batchtune.manifests.values import COUNTINGS, LARGEST, REDUCTIONS, SMALLEST, Counting, Reduction
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How a manifest is read; None for every option that the user does not give.

    Attributes:
        format: A name in `batchtune.manifests.FORMATS`; None to detect it from the content.
        length_key: The column (or JSON key) of the lengths, or several (`a+b`) whose sum is the length; None to find
            it among the known names.
        unit: Unit of the lengths after `length_scale`; None to take it from the format or column.
        length_scale: Exact factor for each length, but for no target length.
        min_length, max_length: Inclusive, after scaling.
        truncate: Where the training cuts longer examples off, after scaling: they count as this long.
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
    truncate: float | None = None
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
        for name in ("min_length", "max_length", "truncate"):
            number = getattr(self, name)
            if number is not None and math.isnan(number):
                raise UsageError(f"--{name.replace('_', '-')} must be a number, got nan")
        shortest = self.min_length or 0.0
        longest = math.inf if self.max_length is None else self.max_length
        if not shortest <= longest:
            message = f"no example has a length from --min-length {shortest:.15g} to --max-length {longest:.15g}"
            raise UsageError(message, "Exchange them, or leave one out.")
        if self.truncate is not None and not max(shortest, SMALLEST) <= self.truncate <= LARGEST:
            message = f"--truncate {self.truncate:.15g} leaves no length above {shortest:.15g}"
            raise UsageError(message, "Give the length at which your training cuts examples off.")

    def record(self) -> ReadingRecord:
        """Return them as result files hold them."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        texts = {name: str(value) for name, value in values.items() if isinstance(value, (Path, Fraction))}
        return ReadingRecord(**values | texts)

    def completed(self, record: ReadingRecord) -> ReadOptions:
        """Return these options, completed by those of a result file that fit them. Raises ResultError."""
        recorded: dict[str, Any] = {field.name: getattr(record, field.name) for field in fields(self)}
        try:
            if record.length_scale is not None:
                recorded["length_scale"] = parse_scale(record.length_scale)
            if record.tokenizer is not None:
                recorded["tokenizer"] = Path(record.tokenizer)
            ReadOptions(**recorded)
        except UsageError as error:
            message = f"how the run's manifest was read is damaged: {error.message}"
            raise ResultError(message, "Create it again with the command that wrote it.") from error
        # 0.0 is given, though it equals False.
        given = {name for name in recorded if getattr(self, name) is not None and getattr(self, name) is not False}
        barred = set(given)
        for name, other, _ in _EXCLUSIVE:
            if name in given or other in given:
                barred |= {name, other}
        if "length_key" in given and self.length_key != record.length_key:
            barred |= set(_OF_THE_COLUMN)
        return replace(self, **{name: value for name, value in recorded.items() if name not in barred})


def check_choice(name: str, choice: str | None, known: Iterable[str]) -> None:
    """Raise UsageError if a choice is unknown; the hint names all, and the nearest."""
    if choice is not None and choice not in known:
        hint = f"{did_you_mean(choice, known)}Known: {', '.join(known)}."
        raise UsageError(f"unknown {name} {shortened(choice)}", hint)


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
