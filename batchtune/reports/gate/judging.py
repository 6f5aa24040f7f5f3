"""Rules → verdicts. Pure functions over the records; nothing here reads, writes or prints.

Numbers are compared exactly, as the decimals that the result files write and the user wrote: 0.08 is not above 8%.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from batchtune.reports.gate.rules import (
    HIGHER_IS_BETTER,
    LOWER_IS_BETTER,
    RATIOS,
    SHARES,
    Field,
    Rule,
    all_fields,
    nearest,
)
from batchtune.results import Drift, Record, Row, Sweep, Verdict, Verification

Value = float | int | bool


_COMPARE = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}
_DIGITS = (4, 6, 9, 12, 15, 17)


class NotKnownError(Exception):
    """A value is unknown; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleInputs:
    """What rules are judged by; None: it does not exist.

    Attributes:
        sweep: Of the run.
        verification: Of the run.
        baseline: The sweep of another run.
        drift: Of other lengths.
        missing: `baseline` or `drift` → why it is not there, where it was asked for.
    """

    sweep: Sweep | None
    verification: Verification | None = None
    baseline: Sweep | None = None
    drift: Drift | None = None
    missing: Mapping[str, str] = field(default_factory=dict)


def judge(rules: Iterable[Rule], inputs: RuleInputs) -> tuple[Verdict, ...]:
    """Return all verdicts, in the order of the rules."""
    return tuple(_judge(rule, inputs) for rule in rules)


def not_judged(rules: Iterable[Rule], why: str) -> tuple[Verdict, ...]:
    """Return the verdicts where the run itself can't be read: an error for each rule."""
    return tuple(_error(rule, why) for rule in rules)


def exit_code(verdicts: Sequence[Verdict]) -> int:
    """Return 1 where a rule can't be judged, else 3 where one fails; 0 where all hold."""
    outcomes = {verdict.outcome for verdict in verdicts}
    return 1 if "error" in outcomes else 3 if "fails" in outcomes else 0


def _judge(rule: Rule, inputs: RuleInputs) -> Verdict:
    try:
        field = _field(rule)
        value = value_of(field, inputs)
        if rule.operator != "worse":
            fails = bool(_COMPARE[rule.operator](exact(value), exact(rule.limit)))
            is_so = f"{'which is' if fails else 'not'} {rule.operator} {rule.written}"
            return _verdict(rule, fails, value, f"{rule.field} is {shown(value, rule)}, {is_so}")
        other = baseline_value_of(field, inputs)
    except NotKnownError as error:
        return _error(rule, str(error))
    same = inputs.sweep and inputs.baseline and inputs.sweep.lengths.fingerprint == inputs.baseline.lengths.fingerprint
    in_baseline = f"{_digits(other)} in the baseline{'' if same else ' (which has other lengths)'}"
    fails, how = _how_much_worse(rule, value, other, in_baseline)
    return _verdict(rule, fails, value, f"{rule.field} is {_digits(value)}, {how}", other)


def _verdict(rule: Rule, fails: bool, value: Value, message: str, baseline: Value | None = None) -> Verdict:
    return Verdict(
        rule=rule.text,
        outcome="fails" if fails else "holds",
        value=value,
        limit=_as_number(rule.limit),
        baseline=baseline,
        message=message,
    )


def _error(rule: Rule, why: str) -> Verdict:
    return Verdict(rule=rule.text, outcome="error", value=None, limit=_as_number(rule.limit), message=why)


def _how_much_worse(rule: Rule, value: Value, other: Value, in_baseline: str) -> tuple[bool, str]:
    """Compare with a baseline; return whether the rule fails, and in words how much worse the value is."""
    ours, theirs, allowed = exact(value), exact(other), exact(rule.limit)
    more = theirs - ours if rule.field in HIGHER_IS_BETTER else ours - theirs
    fails = more > allowed * theirs
    if more <= 0:
        return fails, f"no worse than {in_baseline}"
    if theirs == 0:
        return fails, f"worse than {in_baseline}"
    share = _distinct(more / theirs * 100, allowed * 100)
    return fails, f"{share}% worse than {in_baseline}, {'above' if fails else 'within'} {rule.written}"


def _field(rule: Rule) -> Field:
    """Return the field that the rule names, which has to fit its limit. Raises NotKnownError."""
    field = all_fields().get(rule.field)
    if field is None:
        meant = nearest(rule.field)
        also = f"did you mean {meant}?" if meant else f"some that are: {', '.join(list(all_fields())[:8])}, ..."
        raise NotKnownError(f"{rule.field} is not a number that a rule can name; {also}")
    if (field.kind == "flag") != isinstance(rule.limit, bool):
        wanted = "true or false" if field.kind == "flag" else "a number"
        raise NotKnownError(f"{rule.field} is {wanted}, and can't be compared with {rule.written}")
    if rule.operator == "worse":
        if rule.field not in LOWER_IS_BETTER | HIGHER_IS_BETTER:
            named = ", ".join(sorted(LOWER_IS_BETTER | HIGHER_IS_BETTER))
            raise NotKnownError(f"{rule.field} can't be worse; {named} can")
    elif rule.percent and rule.field not in RATIOS:
        raise NotKnownError(f"{rule.field} is not a ratio, and can't be compared with {rule.written}")
    elif rule.field in SHARES and not 0 <= rule.limit <= 1:
        raise NotKnownError(f"{rule.field} is from 0 to 1, and {rule.written} is not: write 8% or 0.08")
    return field


def exact(value: Value | Fraction) -> Fraction:
    """Return a number as the decimal that files and people write for it; true as 1."""
    return Fraction(repr(value)) if isinstance(value, float) else Fraction(value)


def shown(value: Value, rule: Rule) -> str:
    """Return the value with enough digits to differ from the limit; in per cent where the rule is."""
    if isinstance(value, bool):
        return str(value).lower()
    if rule.percent:
        return f"{_distinct(exact(value) * 100, exact(rule.limit) * 100)}%"
    return str(value) if isinstance(value, int) else _distinct(exact(value), exact(rule.limit))


def _digits(value: Value) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def _distinct(value: Fraction, limit: Fraction) -> str:
    """Return a number with the fewest digits that keep it on its side of the limit."""
    for digits in _DIGITS:
        text = f"{float(value):.{digits}g}"
        if _side(Fraction(text), limit) == _side(value, limit):
            return text
    return repr(float(value))


def _side(value: Fraction, limit: Fraction) -> int:
    return (value > limit) - (value < limit)


def _as_number(limit: Fraction | bool) -> float | bool:
    return limit if isinstance(limit, bool) else float(limit)


def value_of(field: Field, inputs: RuleInputs) -> Value:
    """Return the field's value.

    Raises:
        NotKnownError: It is unknown.
    """
    if field.source == "drift":
        if inputs.drift is None:
            raise NotKnownError(inputs.missing.get("drift", "no other lengths are given: use --manifest"))
        return _value_in(inputs.drift, field, "")
    if field.source == "verify":
        return _value_in(_verification(inputs), field, "")
    sweep = _sweep(inputs)
    if field.source == "sweep":
        return _value_in(sweep, field, "")
    if field.source == "bound":
        return _value_in(sweep.lower_bound, field, "")
    if field.source == "current":
        if sweep.current is None:
            raise NotKnownError("the sweep knows no current config: run `batchtune sweep-buckets` with --current")
        return _value_in(sweep.current, field, "")
    return _value_in(_recommended(sweep), field, "")


def baseline_value_of(field: Field, inputs: RuleInputs) -> Value:
    """Return the field's value in the other run's recommended row.

    Raises:
        NotKnownError: It is unknown, or the other run's lengths are of another unit.
    """
    ours, other = _sweep(inputs), inputs.baseline
    if other is None:
        raise NotKnownError(inputs.missing.get("baseline", "no other run to compare with is given: use --baseline"))
    units = ours.lengths.unit, other.lengths.unit
    if None not in units and units[0] != units[1]:
        raise NotKnownError(f"the baseline's lengths count {units[1]}, this run's count {units[0]}")
    if other.recommended_row is None:
        raise NotKnownError("the baseline recommends no row")
    return _value_in(other.recommended_row, field, " in the baseline")


def _value_in(record: Record, field: Field, where: str) -> Value:
    value: Any = record
    for name in field.path:
        value = None if value is None else getattr(value, name)
    if value is None:
        remedy = ": only a sweep of batches that were probed knows it" if field.path == ("unproven",) else ""
        raise NotKnownError(f"{field.name} is not known{where} (null){remedy}")
    known: Value = value
    return known


def _sweep(inputs: RuleInputs) -> Sweep:
    if inputs.sweep is None:
        raise NotKnownError("the run has no sweep.json: run `batchtune sweep-buckets`")
    return inputs.sweep


def _recommended(sweep: Sweep) -> Row:
    if sweep.recommended_row is None:
        raise NotKnownError(f"the sweep recommends no row: {sweep.reason or 'it does not say why'}")
    return sweep.recommended_row


def _verification(inputs: RuleInputs) -> Verification:
    """Return the verification, if it is about the table that is recommended now."""
    found, sweep = inputs.verification, inputs.sweep
    if found is None:
        raise NotKnownError("the run has no verify.json: run `batchtune verify`")
    if sweep is None:
        return found
    row = _recommended(sweep)
    if found.lengths.fingerprint != sweep.lengths.fingerprint:
        raise NotKnownError("verify.json has other lengths than sweep.json: run `batchtune verify` again")
    if (found.bucket_boundaries, found.bucket_batch_sizes) != (row.boundaries, row.batch_sizes):
        raise NotKnownError("verify.json has another table than the recommended one: run `batchtune verify` again")
    return found
