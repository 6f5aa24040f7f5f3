"""The CI gate: rules that a run is held to, and their verdicts. Pure functions: nothing here reads or prints.

A rule states what fails: `FIELD OP VALUE`, or `FIELD worse SHARE%` against a baseline. Numbers are compared exactly,
as the decimals that the result files write and the user wrote: 0.08 is not above 8%.
"""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NoReturn

from batchtune.errors import UsageError
from batchtune.reports.rule_fields import (
    DRIFT_FIELDS,
    Field,
    NotKnownError,
    RuleInputs,
    Value,
    all_fields,
    compared_with,
    value_in,
)
from batchtune.results import Answer, Verdict

_EXAMPLE = (
    "A rule says what fails, as FIELD OP VALUE: --fail-if 'padding_ratio > 8%', --fail-if 'verify.holds == false', "
    "or --fail-if 'batches worse 2%' with --baseline."
)
_MAX_LENGTH = 200
# In a rule one space at most separates two words.
_FIELD = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*) ?", re.ASCII)
_OPERATOR = re.compile(r"(>=|<=|==|!=|>|<|worse(?![\w.])) ?", re.ASCII)
# At most three digits of exponent: as exact fractions, more would take for ever.
_NUMBER = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?) ?(%?) ?", re.ASCII)
_FLAG = re.compile(r"(true|false)(?!\w) ?", re.IGNORECASE | re.ASCII)
_COMPARE = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule: it fails where the comparison is true. The field may not exist.

    Attributes:
        text: As given, white space made even.
        limit: A number, exact as written, 8% as 2/25; or true or false.
        percent: Whether it was written in per cent.
        written: The limit as written.
    """

    text: str
    field: str
    operator: str
    limit: Fraction | bool
    percent: bool
    written: str

    @property
    def needs(self) -> str | None:
        """The key of `RuleInputs.missing` that it can't be judged without."""
        if self.operator == "worse":
            return "baseline"
        return "drift" if self.field in DRIFT_FIELDS else None


def parse_rules(texts: Iterable[str]) -> tuple[Rule, ...]:
    """Read rules; one that is given twice counts once.

    Raises:
        UsageError: Not a rule; the message shows it and points at the place.
    """
    return tuple(dict.fromkeys(map(_parse_rule, texts)))


def judge(rules: Iterable[Rule], inputs: RuleInputs) -> tuple[Verdict, ...]:
    """Return all verdicts, in the order of the rules."""
    return tuple(_judge(rule, inputs) for rule in rules)


def not_judged(rules: Iterable[Rule], why: str) -> tuple[Verdict, ...]:
    """Return an error for each rule, where the run itself can't be read."""
    return tuple(_verdict(rule, "error", why) for rule in rules)


def exit_code(verdicts: Sequence[Verdict]) -> int:
    """Return 1 where a rule can't be judged, else 3 where one fails; 0 where all hold."""
    outcomes = {verdict.outcome for verdict in verdicts}
    if "error" in outcomes:
        return 1
    return 3 if "fails" in outcomes else 0


def _parse_rule(text: str) -> Rule:
    if len(text) > _MAX_LENGTH:
        raise UsageError(f"a rule of {len(text):,} characters is too long: {text[:40]!r}...", _EXAMPLE)
    text = " ".join(text.split())
    if not text:
        raise UsageError("--fail-if: a rule is empty", _EXAMPLE)
    field = _FIELD.match(text) or _refuse(text, 0, "a field is expected here")
    compared = _OPERATOR.match(text, field.end())
    if compared is None:
        _refuse(text, field.end(), "a comparison is expected here: >, >=, <, <=, ==, != or worse")
    at = compared.end()
    percent = False
    limit: Fraction | bool
    value = _FLAG.match(text, at)
    if value is not None:
        limit = value[1].lower() == "true"
    else:
        expected = "a number, such as 0.08 or 8%, or true or false is expected here"
        value = _NUMBER.match(text, at) or _refuse(text, at, expected)
        if not math.isfinite(float(value[1])):
            _refuse(text, at, "this number is too large")
        percent = bool(value[2])
        limit = Fraction(value[1]) / (100 if percent else 1)
    if value.end() < len(text):
        _refuse(text, value.end(), "nothing more is expected here; each rule has its own --fail-if")
    if compared[1] == "worse":
        if not percent:
            _refuse(text, at, "how much worse is allowed must be in per cent, such as 2%")
        if limit < 0:
            _refuse(text, at, "how much worse is allowed can't be negative")
        if "." in field[1].removeprefix("stream.").removeprefix("loader.") or field[1] in DRIFT_FIELDS:
            _refuse(text, 0, "only a field of the recommended row can be worse than in another run")
    elif isinstance(limit, bool) and compared[1] not in ("==", "!="):
        _refuse(text, field.end(), "true and false can only be compared by == and !=")
    written = value[0].strip()
    return Rule(text=text, field=field[1], operator=compared[1], limit=limit, percent=percent, written=written)


def _refuse(text: str, at: int, what: str) -> NoReturn:
    raise UsageError(f"--fail-if: {what}\n  {text}\n  {' ' * at}^", _EXAMPLE)


def _judge(rule: Rule, inputs: RuleInputs) -> Verdict:
    try:
        field = _field(rule)
        value = value_in(field.record(inputs), field)
        other = None
        if rule.operator != "worse":
            ours = _exact(value)
            limit = _exact(rule.limit)
            fails = bool(_COMPARE[rule.operator](ours, limit))
            shown = f"{_distinct(ours * 100, limit * 100)}%" if rule.percent else _distinct(ours, limit)
            if isinstance(value, int) and not rule.percent:
                shown = str(value).lower()
            found = f"{shown}, {'which is' if fails else 'not'} {rule.operator} {rule.written}"
        else:
            row, same_lengths = compared_with(inputs, field)
            other = value_in(row, field, " in the baseline")
            fails, how = _how_much_worse(rule, field, value, other, same_lengths=same_lengths)
            found = f"{_digits(value)}, {how}"
    except NotKnownError as error:
        return _verdict(rule, "error", str(error))
    return _verdict(rule, "fails" if fails else "holds", f"{rule.field} is {found}", value, other)


def _verdict(
    rule: Rule, outcome: Answer, message: str, value: Value | None = None, other: Value | None = None
) -> Verdict:
    limit = rule.limit if isinstance(rule.limit, bool) else float(rule.limit)
    return Verdict(rule=rule.text, outcome=outcome, value=value, limit=limit, baseline=other, message=message)


def _how_much_worse(rule: Rule, field: Field, value: Value, other: Value, *, same_lengths: bool) -> tuple[bool, str]:
    """Compare with a baseline; return whether the rule fails, and in words how much worse the value is."""
    in_baseline = f"{_digits(other)} in the baseline{'' if same_lengths else ' (which has other lengths)'}"
    ours = _exact(value)
    theirs = _exact(other)
    allowed = _exact(rule.limit)
    more = theirs - ours if field.better == "more" else ours - theirs
    fails = more > allowed * abs(theirs)
    if more <= 0:
        return fails, f"no worse than {in_baseline}"
    if theirs == 0:
        return fails, f"worse than {in_baseline}"
    share = _distinct(more / abs(theirs) * 100, allowed * 100)
    return fails, f"{share}% worse than {in_baseline}, {'above' if fails else 'within'} {rule.written}"


def _exact(value: Value | Fraction) -> Fraction:
    """Return a number as the decimal that files and people write for it; true as 1."""
    return Fraction(repr(value)) if isinstance(value, float) else Fraction(value)


def _digits(value: Value) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def _distinct(value: Fraction, limit: Fraction) -> str:
    """Return a number with the fewest digits that keep it on its side of the limit."""
    for digits in (4, 6, 9, 12, 15, 17):
        text = f"{float(value):.{digits}g}"
        if (Fraction(text) > limit, Fraction(text) == limit) == (value > limit, value == limit):
            return text
    return repr(float(value))


def _field(rule: Rule) -> Field:
    """Return the field that the rule names, which has to fit its limit. Raises NotKnownError."""
    field = all_fields().get(rule.field)
    if field is None:
        near = difflib.get_close_matches(rule.field, all_fields(), n=1)
        also = f"did you mean {near[0]}?" if near else f"some that are: {', '.join(list(all_fields())[:8])}, ..."
        raise NotKnownError(f"{rule.field} is not a number that a rule can name; {also}")
    if field.is_flag != isinstance(rule.limit, bool):
        wanted = "true or false" if field.is_flag else "a number"
        raise NotKnownError(f"{rule.field} is {wanted}, and can't be compared with {rule.written}")
    if rule.operator == "worse" and not field.is_comparable:
        of = rule.field.rpartition(".")[0]
        comparable = (name for name, one in all_fields().items() if one.is_comparable)
        named = ", ".join(sorted(name for name in comparable if name.rpartition(".")[0] == of))
        raise NotKnownError(f"{rule.field} can't be worse; {named} can")
    if rule.operator == "worse":
        return field
    if rule.percent and not field.is_ratio:
        raise NotKnownError(f"{rule.field} is not a ratio, and can't be compared with {rule.written}")
    if field.is_share and not 0 <= rule.limit <= 1:
        raise NotKnownError(f"{rule.field} is from 0 to 1, and {rule.written} is not: write 8% or 0.08")
    return field
