"""Rules and evidence → verdicts.

Numbers are compared exactly, as the decimals that the result files write and the user wrote: 0.08 is not above 8%.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from fractions import Fraction

from batchtune.reports.gate.evidence import Evidence, NotKnownError, Value, baseline_value_of, value_of
from batchtune.reports.gate.fields import (
    HIGHER_IS_BETTER,
    LOWER_IS_BETTER,
    RATIOS,
    SHARES,
    Field,
    all_fields,
    nearest,
)
from batchtune.reports.gate.grammar import Rule
from batchtune.reports.gate.verdict import Answer, Verdict

_COMPARE = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}
_DIGITS = (4, 6, 9, 12, 15, 17)


def judge(rules: Iterable[Rule], evidence: Evidence) -> tuple[Verdict, ...]:
    """All verdicts, in the order of the rules."""
    return tuple(_judge(rule, evidence) for rule in rules)


def not_judged(rules: Iterable[Rule], why: str) -> tuple[Verdict, ...]:
    """The verdicts where the run itself can't be read: none can be told."""
    return tuple(_error(rule, why) for rule in rules)


def exit_code(verdicts: Sequence[Verdict]) -> int:
    """1 where a rule can't be told, which goes before 3, where one fails; 0 where all hold."""
    outcomes = {verdict.outcome for verdict in verdicts}
    return 1 if "error" in outcomes else 3 if "fails" in outcomes else 0


def _judge(rule: Rule, evidence: Evidence) -> Verdict:
    try:
        field = _field(rule)
        return _against_baseline(rule, field, evidence) if rule.operator == "worse" else _plain(rule, field, evidence)
    except NotKnownError as error:
        return _error(rule, str(error))


def _error(rule: Rule, why: str) -> Verdict:
    return Verdict(rule=rule.text, outcome="error", value=None, limit=_as_number(rule.limit), message=why)


def _field(rule: Rule) -> Field:
    """The field that the rule names, which has to fit its limit. Raises NotKnownError."""
    field = all_fields().get(rule.field)
    if field is None:
        meant = nearest(rule.field)
        also = f"did you mean {meant}?" if meant else f"some that are: {', '.join(list(all_fields())[:8])}, ..."
        raise NotKnownError(f"{rule.field} is no number that a rule can name; {also}")
    if (field.kind == "flag") != isinstance(rule.limit, bool):
        wanted = "true or false" if field.kind == "flag" else "a number"
        raise NotKnownError(f"{rule.field} is {wanted}, and can't be compared with {rule.written}")
    if rule.operator == "worse":
        if rule.field not in LOWER_IS_BETTER | HIGHER_IS_BETTER:
            named = ", ".join(sorted(LOWER_IS_BETTER | HIGHER_IS_BETTER))
            raise NotKnownError(f"{rule.field} can't be worse: neither more nor less of it is; {named} can")
    elif rule.percent and rule.field not in RATIOS:
        raise NotKnownError(f"{rule.field} is no ratio, and can't be compared with {rule.written}")
    elif rule.field in SHARES and not 0 <= rule.limit <= 1:
        raise NotKnownError(f"{rule.field} is from 0 to 1, and {rule.written} is not: write 8% or 0.08")
    return field


def _plain(rule: Rule, field: Field, evidence: Evidence) -> Verdict:
    value = value_of(field, evidence)
    fails = bool(_COMPARE[rule.operator](exact(value), exact(rule.limit)))
    return Verdict(
        rule=rule.text,
        outcome=_outcome(fails),
        value=value,
        limit=_as_number(rule.limit),
        message=f"{rule.field} is {shown(value, rule)}, {'which is' if fails else 'not'} {rule.operator} "
        f"{rule.written}",
    )


def _against_baseline(rule: Rule, field: Field, evidence: Evidence) -> Verdict:
    value = value_of(field, evidence)
    other = baseline_value_of(field, evidence)
    ours, theirs, allowed = exact(value), exact(other), exact(rule.limit)
    more = theirs - ours if rule.field in HIGHER_IS_BETTER else ours - theirs
    fails = more > allowed * theirs
    in_baseline = f"{_digits(other)} in the baseline{_of_other_lengths(evidence)}"
    if more <= 0:
        how = f"no worse than {in_baseline}"
    elif theirs == 0:
        how = f"worse than {in_baseline}"
    else:
        share = _distinct(more / theirs * 100, allowed * 100)
        how = f"{share}% worse than {in_baseline}, {'above' if fails else 'within'} {rule.written}"
    return Verdict(
        rule=rule.text,
        outcome=_outcome(fails),
        value=value,
        limit=_as_number(rule.limit),
        baseline=other,
        message=f"{rule.field} is {_digits(value)}, {how}",
    )


def _of_other_lengths(evidence: Evidence) -> str:
    """What explains a difference that the table does not."""
    ours, theirs = evidence.sweep, evidence.baseline
    same = ours is None or theirs is None or ours.lengths.fingerprint == theirs.lengths.fingerprint
    return "" if same else " (of other lengths)"


def exact(value: Value | Fraction) -> Fraction:
    """A number as the decimal that files and people write for it; true as 1."""
    return Fraction(repr(value)) if isinstance(value, float) else Fraction(value)


def shown(value: Value, rule: Rule) -> str:
    """The value, as short as lets it be told from the limit; in per cent where the rule is."""
    if isinstance(value, bool):
        return str(value).lower()
    if rule.percent:
        return f"{_distinct(exact(value) * 100, exact(rule.limit) * 100)}%"
    return str(value) if isinstance(value, int) else _distinct(exact(value), exact(rule.limit))


def _digits(value: Value) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def _distinct(value: Fraction, limit: Fraction) -> str:
    """A number with as few digits as keep it on its side of the limit."""
    for digits in _DIGITS:
        text = f"{float(value):.{digits}g}"
        if _side(Fraction(text), limit) == _side(value, limit):
            return text
    return repr(float(value))


def _side(value: Fraction, limit: Fraction) -> int:
    return (value > limit) - (value < limit)


def _outcome(fails: bool) -> Answer:
    return "fails" if fails else "holds"


def _as_number(limit: Fraction | bool) -> float | bool:
    return limit if isinstance(limit, bool) else float(limit)
