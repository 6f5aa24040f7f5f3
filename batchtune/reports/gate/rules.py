"""The rules of the CI gate: their grammar, and the fields that they can name.

`FIELD OP VALUE`, or `FIELD worse SHARE%` against a baseline. A rule states what fails.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Literal, NoReturn, cast

import msgspec

from batchtune.errors import UsageError
from batchtune.results import Drift, LowerBound, Record, Row, Verification

Operator = Literal[">", ">=", "<", "<=", "==", "!=", "worse"]

# Rule field → field of `results.Drift`.
DRIFT_FIELDS = {"drift": "distance", "stale": "stale", "beyond": "beyond", "changed": "changed"}

_MAX_LENGTH = 200
_EXAMPLE = (
    "A rule says what fails, as FIELD OP VALUE: --fail-if 'padding_ratio > 8%', --fail-if 'verify.holds == false', "
    "or --fail-if 'batches worse 2%' with --baseline."
)
_FIELD = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", re.ASCII)
_OPERATOR = re.compile(r">=|<=|==|!=|>|<|worse(?![\w.])", re.ASCII)
_MISTAKEN = re.compile(r"=>|=<|<>|[=!≥≤≠]|(?:is|better|gt|lt|ge|le|eq|ne)(?![\w.])")
_MEANT = {"=>": ">=", "≥": ">=", "=<": "<=", "≤": "<=", "=": "==", "is": "==", "<>": "!=", "!": "!=", "≠": "!="}
# At most three digits of exponent: as exact fractions, more would take for ever.
_NUMBER = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?)\s*(%?)", re.ASCII)
_FLAG = re.compile(r"(?:true|false)(?!\w)", re.IGNORECASE | re.ASCII)
_NO_NUMBER = re.compile(r"[+-]?(?:nan|inf|infinity)(?!\w)", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule: it fails where the comparison is true.

    Attributes:
        text: As given, white space made even.
        field: What is compared; not yet known to exist.
        operator: How; `worse` is against a baseline.
        limit: A number, exact as written, 8% as 2/25; or true or false.
        percent: Whether the limit was written in per cent.
        written: The limit as written.
    """

    text: str
    field: str
    operator: Operator
    limit: Fraction | bool
    percent: bool
    written: str

    @property
    def needs_drift(self) -> bool:
        """Whether it is about other lengths."""
        return self.field in DRIFT_FIELDS

    @property
    def needs_baseline(self) -> bool:
        """Whether it is about another run."""
        return self.operator == "worse"


def parse_rules(texts: Iterable[str]) -> tuple[Rule, ...]:
    """Read rules; one that is given twice counts once.

    Raises:
        UsageError: One is none; the message shows it and points at the place.
    """
    return tuple(dict.fromkeys(map(parse_rule, texts)))


def parse_rule(text: str) -> Rule:
    """Read one rule.

    Raises:
        UsageError: It is none; the message shows it and points at the place.
    """
    if len(text) > _MAX_LENGTH:
        raise UsageError(f"a rule of {len(text):,} characters is too long: {text[:40]!r}...", _EXAMPLE)
    text = " ".join(text.split())
    if not text:
        raise UsageError("--fail-if: a rule is empty", _EXAMPLE)
    field = _FIELD.match(text)
    if field is None:
        _refuse(text, 0, "a field is expected here")
    start = _after(text, field.end())
    operator = _OPERATOR.match(text, start)
    if operator is None:
        _refuse_operator(text, start)
    limit, percent, end = _limit(text, _after(text, operator.end()))
    if end < len(text):
        _refuse(text, end, "nothing more is expected here; each rule has its own --fail-if")
    rule = Rule(
        text=text,
        field=field[0],
        operator=cast(Operator, operator[0]),
        limit=limit,
        percent=percent,
        written=text[_after(text, operator.end()) : end].strip(),
    )
    _check(rule, _after(text, operator.end()), start)
    return rule


def _limit(text: str, start: int) -> tuple[Fraction | bool, bool, int]:
    """Return the limit, whether it is in per cent, and where what follows it begins."""
    flag = _FLAG.match(text, start)
    if flag is not None:
        return flag[0].lower() == "true", False, _after(text, flag.end())
    if _NO_NUMBER.match(text, start):
        _refuse(text, start, "not a limit: a finite number is needed")
    number = _NUMBER.match(text, start)
    if number is None:
        _refuse(text, start, "a number, such as 0.08 or 8%, or true or false is expected here")
    if not math.isfinite(float(number[1])):
        _refuse(text, start, "this number is too large")
    share = Fraction(number[1])
    return (share / 100 if number[2] else share), bool(number[2]), _after(text, number.end())


def _check(rule: Rule, limit_at: int, operator_at: int) -> None:
    if rule.operator == "worse":
        if isinstance(rule.limit, bool) or not rule.percent:
            _refuse(rule.text, limit_at, "how much worse is allowed must be in per cent, such as 2%")
        if rule.limit < 0:
            _refuse(rule.text, limit_at, "how much worse is allowed can't be negative")
        if "." in rule.field or rule.needs_drift:
            _refuse(rule.text, 0, "only a field of the recommended row can be worse than in another run")
    elif isinstance(rule.limit, bool) and rule.operator not in ("==", "!="):
        _refuse(rule.text, operator_at, "true and false can only be compared by == and !=")


def _refuse_operator(text: str, start: int) -> NoReturn:
    mistaken = _MISTAKEN.match(text, start)
    meant = _MEANT.get(mistaken[0]) if mistaken is not None else None
    also = f"; did you mean {meant}?" if meant else ""
    _refuse(text, start, f"a comparison is expected here: >, >=, <, <=, ==, != or worse{also}")


def _refuse(text: str, at: int, what: str) -> NoReturn:
    raise UsageError(f"--fail-if: {what}\n  {text}\n  {' ' * at}^", _EXAMPLE)


def _after(text: str, at: int) -> int:
    """Return where the next word begins: there is one space at most."""
    return at + 1 if text[at : at + 1] == " " else at


Source = Literal["row", "sweep", "current", "verify", "bound", "drift"]
Kind = Literal["number", "count", "flag"]
_KINDS: dict[type[msgspec.inspect.Type], Kind] = {
    msgspec.inspect.BoolType: "flag",
    msgspec.inspect.IntType: "count",
    msgspec.inspect.FloatType: "number",
}

_ROOTS: tuple[tuple[str, Source, type[Record]], ...] = (
    ("", "row", Row),
    ("current.", "current", Row),
    ("verify.", "verify", Verification),
    ("bound.", "bound", LowerBound),
)

HIGHER_IS_BETTER = frozenset({"fill", "mean_batch_size"})
LOWER_IS_BETTER = frozenset(
    {
        "batches",
        "steps",
        "padded_length",
        "padding_ratio",
        "estimated_epoch_seconds",
        "estimated_epoch_error_seconds",
        "effective_buckets",  # fewer: more examples can meet
        "used_buckets",
        "batch_size_variation",
        "repeated_examples",
        "unproven",
    }
)
# Between 0 and 1: a limit outside would be a rule that always or never fails.
SHARES = frozenset({"padding_ratio", "current.padding_ratio", "drift"})
# What may be written in per cent.
RATIOS = SHARES | {
    *("fill", "current.fill", "batch_size_variation", "current.batch_size_variation", "stale"),
    *("verify.time_ratio", "verify.time_ratio_spread"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A number, a count or a flag that a rule can name.

    Attributes:
        name: In a rule.
        source: The record it is of.
        path: Its attributes, from that record on.
        kind: What it holds.
    """

    name: str
    source: Source
    path: tuple[str, ...]
    kind: Kind


@cache
def all_fields() -> dict[str, Field]:
    """Name → field, of everything that rules can name."""
    found: dict[str, Field] = {}
    for prefix, source, record in _ROOTS:
        for path, kind in _leaves(record):
            name = prefix + ".".join(path)
            found[name] = Field(name=name, source=source, path=path, kind=kind)
    found["max_batch_length"] = Field(
        name="max_batch_length", source="sweep", path=("max_batch_length",), kind="number"
    )
    kinds = dict(_leaves(Drift))
    for name, attribute in DRIFT_FIELDS.items():
        found[name] = Field(name=name, source="drift", path=(attribute,), kind=kinds[(attribute,)])
    return found


def nearest(name: str) -> str | None:
    """Return the field that was probably meant; None where none is near."""
    near = difflib.get_close_matches(name, all_fields(), n=1)
    return near[0] if near else None


def _leaves(record: type[msgspec.Struct]) -> Iterator[tuple[tuple[str, ...], Kind]]:
    """Yield the numbers and flags of a record and of the records in it, in their order."""
    described = msgspec.inspect.type_info(record)
    assert isinstance(described, msgspec.inspect.StructType)
    for field in described.fields:
        union = field.type.types if isinstance(field.type, msgspec.inspect.UnionType) else (field.type,)
        kinds = [one for one in union if not isinstance(one, msgspec.inspect.NoneType)]
        if len(kinds) == 1 and type(kinds[0]) in _KINDS:
            yield (field.name,), _KINDS[type(kinds[0])]
        elif isinstance(kinds[0], msgspec.inspect.StructType) and field.name != "meta":
            for path, inner in _leaves(kinds[0].cls):
                yield (field.name, *path), inner
