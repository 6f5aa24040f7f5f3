"""The rules' grammar: `FIELD OP VALUE`, or `FIELD worse SHARE%` against a baseline. A rule states what fails."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NoReturn, cast

from batchtune.errors import UsageError

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
    """Reads rules; one that is given twice counts once.

    Raises:
        UsageError: One is none; the message shows it and points at the place.
    """
    return tuple(dict.fromkeys(map(parse_rule, texts)))


def parse_rule(text: str) -> Rule:
    """Reads one rule.

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
    """The limit, whether it is in per cent, and where what follows it begins."""
    flag = _FLAG.match(text, start)
    if flag is not None:
        return flag[0].lower() == "true", False, _after(text, flag.end())
    if _NO_NUMBER.match(text, start):
        _refuse(text, start, "this is no limit: a finite number is needed")
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
    """Where the next word begins: there is one space at most."""
    return at + 1 if text[at : at + 1] == " " else at
