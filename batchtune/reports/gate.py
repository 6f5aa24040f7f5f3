"""The CI gate: rules that a run is held to, their verdicts, and these as JUnit XML. Nothing here reads or prints.

A rule states what fails: `FIELD OP VALUE`, or `FIELD worse SHARE%` against a baseline. Numbers are compared exactly,
as the decimals that the result files write and the user wrote: 0.08 is not above 8%.
"""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from batchtune.errors import UsageError, shortened, without_commands
from batchtune.reports.rule_fields import (
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
# In a rule one space at most separates two words. At most three digits of exponent: as exact fractions, more would take
# for ever.
_RULE = re.compile(
    r"(?P<field>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*) ?"
    r"(?P<operator>>=|<=|==|!=|>|<|worse(?![\w.])) ?"
    r"(?P<limit>(?P<flag>(?i:true|false))"
    r"|(?P<number>[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?) ?(?P<percent>%?))",
    re.ASCII,
)
_COMPARE = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}
# Outcome → its element of JUnit.
_CASES = {"fails": "failure", "error": "error"}
# Characters that XML 1.0 can't hold even escaped (https://www.w3.org/TR/xml/#charsets), and all control characters.
_FORBIDDEN = re.compile(
    "[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule: it fails where the comparison is true. The field may not exist.

    Attributes:
        text: As given, white space made even.
        limit: A number, exact as written, 8% as 2/25; or true or false.
        written: The limit as written.
    """

    text: str
    field: str
    operator: str
    limit: Fraction | bool
    written: str


def parse_rules(texts: Iterable[str]) -> tuple[Rule, ...]:
    """Read rules; one that is given twice counts once.

    Raises:
        UsageError: Not a rule; the message shows it.
    """
    return tuple(dict.fromkeys(map(_parse_rule, texts)))


def _parse_rule(given: str) -> Rule:
    text = " ".join(given.split())
    match = _RULE.fullmatch(text) if len(text) <= _MAX_LENGTH else None
    if match is None or not math.isfinite(float(match["number"] or 0)):
        raise UsageError(f"--fail-if: {shortened(text)} is not a rule", _EXAMPLE)
    limit: Fraction | bool
    if match["flag"]:
        limit = match["flag"].lower() == "true"
        if match["operator"] not in ("==", "!="):
            raise UsageError(
                f"--fail-if: {text}: true and false can only be compared by == and !=",
                _EXAMPLE,
            )
    else:
        limit = Fraction(match["number"])
        if match["percent"]:
            limit /= 100
    if match["operator"] == "worse" and (not match["percent"] or limit < 0):
        raise UsageError(
            f"--fail-if: {text}: how much worse is allowed must be in per cent, such as 2%",
            _EXAMPLE,
        )
    return Rule(
        text=text,
        field=match["field"],
        operator=match["operator"],
        limit=limit,
        written=match["limit"].strip(),
    )


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
    if "fails" in outcomes:
        return 3
    return 0


def _judge(rule: Rule, inputs: RuleInputs) -> Verdict:
    other = None
    try:
        field = _field(rule)
        value = value_in(field.record(inputs), field)
        if rule.operator == "worse":
            row, differs = compared_with(inputs, field)
            other = value_in(row, field, " in the baseline")
            more = _exact(value) - _exact(other)
            if field.better == "more":
                more = -more
            fails = more > _exact(rule.limit) * abs(_exact(other))
            answer = "worse" if fails else "not worse"
            found = f"{value}, and {other} in the baseline{differs}: {answer} by more than {rule.written}"
        else:
            fails = bool(_COMPARE[rule.operator](_exact(value), _exact(rule.limit)))
            answer = "which is" if fails else "not"
            found = f"{str(value).lower()}, {answer} {rule.operator} {rule.written}"
    except NotKnownError as error:
        return _verdict(rule, "error", str(error))
    return _verdict(
        rule,
        "fails" if fails else "holds",
        f"{rule.field} is {found}",
        value,
        other,
    )


def _verdict(
    rule: Rule,
    outcome: Answer,
    message: str,
    value: Value | None = None,
    other: Value | None = None,
) -> Verdict:
    limit = rule.limit if isinstance(rule.limit, bool) else float(rule.limit)
    return Verdict(
        rule=rule.text,
        outcome=outcome,
        value=value,
        limit=limit,
        baseline=other,
        message=message,
    )


def _exact(value: Value | Fraction) -> Fraction:
    """Return a number as the decimal that files and people write for it; true as 1."""
    return Fraction(repr(value)) if isinstance(value, float) else Fraction(value)


def _field(rule: Rule) -> Field:
    """Return the field that the rule names, which has to fit its limit. Raises NotKnownError."""
    field = all_fields().get(rule.field)
    if field is None:
        (near,) = difflib.get_close_matches(
            rule.field,
            all_fields(),
            n=1,
            cutoff=0.0,
        )
        raise NotKnownError(
            f"{rule.field} is not a number that a rule can name; did you mean {near}?"
        )
    if field.is_flag != isinstance(rule.limit, bool):
        raise NotKnownError(
            f"{rule.field} can't be compared with {rule.written}: one of them is true or false"
        )
    if rule.operator == "worse":
        if not field.kind or not field.better:
            raise NotKnownError(
                f"{rule.field} can't be worse: only a figure of a recommended row can"
            )
    elif rule.written.endswith("%") and not field.is_ratio:
        raise NotKnownError(
            f"{rule.field} is not a ratio, and can't be compared with {rule.written}"
        )
    elif field.is_share and not 0 <= rule.limit <= 1:
        raise NotKnownError(
            f"{rule.field} is from 0 to 1, and {rule.written} is not: write 8% or 0.08"
        )
    return field


def render_junit(verdicts: Sequence[Verdict], name: str) -> str:
    """Return one test suite, one test case a rule: a failure where it fails, an error where it can't be judged.

    `time` is 0 throughout: rules take none, and the same verdicts give the same bytes. Their rules differ.
    """
    outcomes = Counter(verdict.outcome for verdict in verdicts)
    shared = {
        "name": clean_xml(f"batchtune report: {name}"),
        "tests": str(len(verdicts)),
        "failures": str(outcomes["fails"]),
        "errors": str(outcomes["error"]),
        "skipped": "0",
        "time": "0",
    }
    root = Element("testsuites", shared)
    suite = SubElement(root, "testsuite", shared)
    for verdict in verdicts:
        title = clean_xml(f"fails if {verdict.rule}")
        message = clean_xml(verdict.message)
        case = SubElement(
            suite,
            "testcase",
            {"classname": "batchtune.report", "name": title, "time": "0"},
        )
        if verdict.outcome == "holds":
            SubElement(case, "system-out").text = message
            continue
        about = {"message": message, "type": f"batchtune.{verdict.outcome}"}
        SubElement(case, _CASES[verdict.outcome], about).text = f"{title}\n{message}"
    indent(root)
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        + tostring(root, encoding="unicode")
        + "\n"
    )


def clean_xml(text: str) -> str:
    """Return text without what XML can't hold, which becomes U+FFFD, or what GitHub would take for a command."""
    return _FORBIDDEN.sub("\ufffd", without_commands(text))
