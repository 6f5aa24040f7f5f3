"""The CI gate: rules that a run is held to, and their verdicts. Pure functions: nothing here reads or prints.

A rule states what fails: `FIELD OP VALUE`, or `FIELD worse SHARE%` against a baseline. Numbers are compared exactly,
as the decimals that the result files write and the user wrote: 0.08 is not above 8%.
"""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import Any, NoReturn, TypeVar

import msgspec

from batchtune.errors import UsageError
from batchtune.results import Answer, Drift, LowerBound, Record, Row, Sweep, Verdict, Verification

T = TypeVar("T")
Value = float | int | bool

# Rule field → field of `results.Drift`.
DRIFT_FIELDS = {"drift": "distance", "stale": "stale", "beyond": "beyond", "changed": "changed"}
HIGHER_IS_BETTER = frozenset({"fill", "mean_batch_size", "randomness"})
LOWER_IS_BETTER = frozenset(
    {
        *("batches", "steps", "padded_length", "padding_ratio", "used_buckets", "batch_size_variation"),
        *("estimated_epoch_seconds", "estimated_epoch_error_seconds", "repeated_examples", "unproven"),
        *("batches_deviation", "epoch_seconds_deviation"),
        # More examples can meet.
        *("effective_buckets", "mates_again", "length_correlation"),
    }
)
# Between 0 and 1: a limit outside would be a rule that always or never fails.
SHARES = frozenset(
    {
        *("padding_ratio", "current.padding_ratio", "drift"),
        *("mates_again", "current.mates_again", "randomness", "current.randomness"),
    }
)
# These may be written in per cent.
RATIOS = SHARES | {
    *("fill", "current.fill", "batch_size_variation", "current.batch_size_variation", "stale"),
    *("verify.time_ratio", "verify.time_ratio_spread", "length_correlation", "current.length_correlation"),
}
# Fields of a row that a bucket table has none of.
_OF_POOLS = frozenset(
    {"pool_size", "batch_overhead", "simulated_epochs", "batches_deviation", "epoch_seconds_deviation"}
)
# Why other fields of a row may be null.
_WHY_UNKNOWN = {
    "unproven": "only a sweep of batches that were probed knows it",
    "batch_overhead": "these pools are cut into batches of as many examples as fit",
    "epoch_seconds_deviation": "no step times are known",
    "length_correlation": "all lengths, or no two examples of any batch, are alike; or an older batchtune swept",
    **dict.fromkeys(("mates_again", "randomness"), "an older batchtune swept; run `batchtune sweep-buckets` again"),
}

_EXAMPLE = (
    "A rule says what fails, as FIELD OP VALUE: --fail-if 'padding_ratio > 8%', --fail-if 'verify.holds == false', "
    "or --fail-if 'batches worse 2%' with --baseline."
)
_MAX_LENGTH = 200
# In a rule one space at most separates two words.
_FIELD = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*) ?", re.ASCII)
_OPERATOR = re.compile(r"(>=|<=|==|!=|>|<|worse(?![\w.])) ?", re.ASCII)
_MISTAKEN = re.compile(r"=>|=<|<>|[=!≥≤≠]|is(?![\w.])")
_MEANT = {"=>": ">=", "≥": ">=", "=<": "<=", "≤": "<=", "=": "==", "is": "==", "<>": "!=", "!": "!=", "≠": "!="}
# At most three digits of exponent: as exact fractions, more would take for ever.
_NUMBER = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?) ?(%?) ?", re.ASCII)
_FLAG = re.compile(r"(true|false)(?!\w) ?", re.IGNORECASE | re.ASCII)
_COMPARE = {
    **{">": operator.gt, ">=": operator.ge, "<": operator.lt},
    **{"<=": operator.le, "==": operator.eq, "!=": operator.ne},
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
        return "baseline" if self.operator == "worse" else "drift" if self.field in DRIFT_FIELDS else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleInputs:
    """The records that rules are judged by; `missing` says why `baseline`, another run's, or `drift` can't be read."""

    sweep: Sweep | None
    verification: Verification | None = None
    baseline: Sweep | None = None
    drift: Drift | None = None
    missing: Mapping[str, str] = field(default_factory=dict)


class NotKnownError(Exception):
    """A value is unknown; the message says why and what to do."""


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
    return 1 if "error" in outcomes else 3 if "fails" in outcomes else 0


def _parse_rule(text: str) -> Rule:
    if len(text) > _MAX_LENGTH:
        raise UsageError(f"a rule of {len(text):,} characters is too long: {text[:40]!r}...", _EXAMPLE)
    text = " ".join(text.split())
    if not text:
        raise UsageError("--fail-if: a rule is empty", _EXAMPLE)
    field = _FIELD.match(text) or _refuse(text, 0, "a field is expected here")
    compared = _OPERATOR.match(text, field.end())
    if compared is None:
        mistaken = _MISTAKEN.match(text, field.end())
        also = f"; did you mean {_MEANT[mistaken[0]]}?" if mistaken else ""
        _refuse(text, field.end(), f"a comparison is expected here: >, >=, <, <=, ==, != or worse{also}")
    at, percent = compared.end(), False
    limit: Fraction | bool
    if found := _FLAG.match(text, at):
        limit = found[1].lower() == "true"
    else:
        expected = "a number, such as 0.08 or 8%, or true or false is expected here"
        found = _NUMBER.match(text, at) or _refuse(text, at, expected)
        if not math.isfinite(float(found[1])):
            _refuse(text, at, "this number is too large")
        percent = bool(found[2])
        limit = Fraction(found[1]) / (100 if percent else 1)
    if found.end() < len(text):
        _refuse(text, found.end(), "nothing more is expected here; each rule has its own --fail-if")
    if compared[1] == "worse":
        if not percent:
            _refuse(text, at, "how much worse is allowed must be in per cent, such as 2%")
        if limit < 0:
            _refuse(text, at, "how much worse is allowed can't be negative")
        if "." in field[1] or field[1] in DRIFT_FIELDS:
            _refuse(text, 0, "only a field of the recommended row can be worse than in another run")
    elif isinstance(limit, bool) and compared[1] not in ("==", "!="):
        _refuse(text, field.end(), "true and false can only be compared by == and !=")
    written = found[0].strip()
    return Rule(text=text, field=field[1], operator=compared[1], limit=limit, percent=percent, written=written)


def _refuse(text: str, at: int, what: str) -> NoReturn:
    raise UsageError(f"--fail-if: {what}\n  {text}\n  {' ' * at}^", _EXAMPLE)


def _judge(rule: Rule, inputs: RuleInputs) -> Verdict:
    try:
        field = _field(rule)
        value, other = _value_in(field.record(inputs), field), None
        if rule.operator != "worse":
            ours, limit = _exact(value), _exact(rule.limit)
            fails = bool(_COMPARE[rule.operator](ours, limit))
            shown = f"{_distinct(ours * 100, limit * 100)}%" if rule.percent else _distinct(ours, limit)
            if isinstance(value, int) and not rule.percent:
                shown = str(value).lower()
            found = f"{shown}, {'which is' if fails else 'not'} {rule.operator} {rule.written}"
        else:
            other = _value_in(_baseline(inputs), field, " in the baseline")
            fails, how = _how_much_worse(rule, value, other, inputs)
            found = f"{_digits(value)}, {how}"
    except NotKnownError as error:
        return _verdict(rule, "error", str(error))
    return _verdict(rule, "fails" if fails else "holds", f"{rule.field} is {found}", value, other)


def _verdict(
    rule: Rule, outcome: Answer, message: str, value: Value | None = None, other: Value | None = None
) -> Verdict:
    limit = rule.limit if isinstance(rule.limit, bool) else float(rule.limit)
    return Verdict(rule=rule.text, outcome=outcome, value=value, limit=limit, baseline=other, message=message)


def _how_much_worse(rule: Rule, value: Value, other: Value, inputs: RuleInputs) -> tuple[bool, str]:
    """Compare with a baseline; return whether the rule fails, and in words how much worse the value is."""
    assert inputs.sweep is not None and inputs.baseline is not None
    same = inputs.sweep.lengths.fingerprint == inputs.baseline.lengths.fingerprint
    in_baseline = f"{_digits(other)} in the baseline{'' if same else ' (which has other lengths)'}"
    ours, theirs, allowed = _exact(value), _exact(other), _exact(rule.limit)
    more = theirs - ours if rule.field in HIGHER_IS_BETTER else ours - theirs
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


@dataclass(frozen=True, slots=True)
class Field:
    """A number or a flag that a rule can name: the attributes `path` of what `record` finds."""

    name: str
    record: Callable[[RuleInputs], Record]
    path: tuple[str, ...]
    is_flag: bool


@cache
def all_fields() -> dict[str, Field]:
    """Name → field, of everything that rules can name."""
    fields = [
        *_fields("", Row, _recommended),
        *_fields("current.", Row, _current),
        Field("randomness", _recommended, ("randomness",), False),
        Field("current.randomness", _current, ("randomness",), False),
        *_fields("verify.", Verification, _verification),
        *_fields("bound.", LowerBound, lambda inputs: _sweep(inputs).lower_bound),
        Field("max_batch_length", _sweep, ("max_batch_length",), False),
    ]
    flags = {one.name: one.is_flag for one in _fields("", Drift, _drift)}
    fields += [Field(name, _drift, (attribute,), flags[attribute]) for name, attribute in DRIFT_FIELDS.items()]
    return {one.name: one for one in fields}


def _fields(prefix: str, record: type[msgspec.Struct], find: Callable[[RuleInputs], Record]) -> Iterator[Field]:
    """Yield the numbers and flags of a record and of the records in it, in their order."""
    described = msgspec.inspect.type_info(record)
    assert isinstance(described, msgspec.inspect.StructType)
    for part in described.fields:
        union = part.type.types if isinstance(part.type, msgspec.inspect.UnionType) else (part.type,)
        kinds = [one for one in union if not isinstance(one, msgspec.inspect.NoneType)]
        number = (msgspec.inspect.BoolType, msgspec.inspect.IntType, msgspec.inspect.FloatType)
        if len(kinds) == 1 and isinstance(kinds[0], number):
            yield Field(prefix + part.name, find, (part.name,), isinstance(kinds[0], msgspec.inspect.BoolType))
        elif isinstance(kinds[0], msgspec.inspect.StructType) and part.name != "meta":
            for inner in _fields(f"{prefix}{part.name}.", kinds[0].cls, find):
                yield Field(inner.name, find, (part.name, *inner.path), inner.is_flag)


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
    if rule.operator == "worse":
        if rule.field not in LOWER_IS_BETTER | HIGHER_IS_BETTER:
            named = ", ".join(sorted(LOWER_IS_BETTER | HIGHER_IS_BETTER))
            raise NotKnownError(f"{rule.field} can't be worse; {named} can")
    elif rule.percent and rule.field not in RATIOS:
        raise NotKnownError(f"{rule.field} is not a ratio, and can't be compared with {rule.written}")
    elif rule.field in SHARES and not 0 <= rule.limit <= 1:
        raise NotKnownError(f"{rule.field} is from 0 to 1, and {rule.written} is not: write 8% or 0.08")
    return field


def _known(found: T | None, why: str) -> T:
    if found is None:
        raise NotKnownError(why)
    return found


def _value_in(record: Record, field: Field, where: str = "") -> Value:
    value: Any = record
    for name in field.path:
        value = None if value is None else getattr(value, name)
    why = ""
    if isinstance(record, Row):
        name = field.path[-1]
        in_table = name in _OF_POOLS and record.pool_size is None
        why = "only pools have it, and this is a bucket table" if in_table else _WHY_UNKNOWN.get(name, "")
    known: Value = _known(value, f"{field.name} is not known{where} (null){f': {why}' if why else ''}")
    return known


def _sweep(inputs: RuleInputs) -> Sweep:
    return _known(inputs.sweep, "the run has no sweep.json: run `batchtune sweep-buckets`")


def _recommended(inputs: RuleInputs) -> Row:
    sweep = _sweep(inputs)
    return _known(sweep.recommended_row, f"the sweep recommends no row: {sweep.reason or 'it does not say why'}")


def _current(inputs: RuleInputs) -> Row:
    why = "the sweep knows no current config: run `batchtune sweep-buckets` with --current"
    return _known(_sweep(inputs).current, why)


def _drift(inputs: RuleInputs) -> Drift:
    return _known(inputs.drift, inputs.missing.get("drift", "no other lengths are given: use --manifest"))


def _baseline(inputs: RuleInputs) -> Row:
    """Return the other run's recommended row."""
    ours, why = _sweep(inputs), "no other run to compare with is given: use --baseline"
    other = _known(inputs.baseline, inputs.missing.get("baseline", why))
    units = ours.lengths.unit, other.lengths.unit
    if None not in units and units[0] != units[1]:
        raise NotKnownError(f"the baseline's lengths count {units[1]}, this run's count {units[0]}")
    return _known(other.recommended_row, "the baseline recommends no row")


def _verification(inputs: RuleInputs) -> Verification:
    """Return the verification, if it is about the table that is recommended now."""
    found = _known(inputs.verification, "the run has no verify.json: run `batchtune verify`")
    if inputs.sweep is not None:
        row = _recommended(inputs)
        if found.lengths.fingerprint != inputs.sweep.lengths.fingerprint:
            raise NotKnownError("verify.json has other lengths than sweep.json: run `batchtune verify` again")
        if (found.bucket_boundaries, found.bucket_batch_sizes) != (row.boundaries, row.batch_sizes):
            raise NotKnownError("verify.json has another table than the recommended one: run `batchtune verify` again")
        if (found.pool_size, found.batch_overhead) != (row.pool_size, row.batch_overhead):
            raise NotKnownError("verify.json is not of the recommended pools: run `batchtune verify` again")
    return found
