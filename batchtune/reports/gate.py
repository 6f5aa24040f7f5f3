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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from msgspec import Struct, inspect

from batchtune.errors import UsageError, shortened, without_commands
from batchtune.reports import KINDS, RunResults
from batchtune.reports.measured import mismatch
from batchtune.results import (
    Answer,
    Drift,
    LoaderRow,
    LowerBound,
    PackedRow,
    PackingSweep,
    Probe,
    Record,
    Row,
    Shards,
    StreamRow,
    StreamSweep,
    Sweep,
    Training,
    Verdict,
    Verification,
)

# The numbers and flags that rules can name, and where each is found in a run's results.

T = TypeVar("T")
Value = float | int | bool

# What rules can name of a drift, and of a sweep apart from its rows.
_OF_WHOLE_RESULTS = {
    "stale",
    "beyond",
    "changed",
    "gradient_difference",
    "max_batch_length",
    "stream.batches_per_rank",
    "stream.max_batch_length",
    "stream.simulated_examples",
}
_NUMBERS = (inspect.BoolType, inspect.FloatType, inspect.IntType)
# Fields of a row that a bucket table has none of.
_OF_POOLS = {
    "pool_size",
    "batch_overhead",
    "simulated_epochs",
    "batches_deviation",
    "epoch_seconds_deviation",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleInputs:
    """The results that rules are judged by."""

    results: RunResults
    baseline: RunResults | None = None

    def of_kind(self, name: str) -> Any:
        """Return the run's result of a kind in `KINDS`. Raises NotKnownError without one."""
        kind = KINDS[name]
        instead = ""
        if name == "sweep" and self.results.stream is not None:
            instead = (
                "; fields of the stream begin with stream., such as stream.batches"
            )
        why = f"the run has no {kind.file}: run `batchtune {kind.command}`{instead}"
        return _known(getattr(self.results, name), why)

    def recommended(self, name: str) -> Any:
        """Return the recommended row of a kind of result. Raises NotKnownError without one."""
        result = self.of_kind(name)
        if name == "sweep" and result.packed is not None:
            raise NotKnownError(
                "the training packs, and this is a figure of padded batches: figures of packed ones begin with "
                "packed., such as packed.unproven"
            )
        why = f"{KINDS[name].words} recommends no row: {result.reason or 'it does not say why'}"
        return _known(result.recommended_row, why)


class NotKnownError(Exception):
    """A value is unknown; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A number or a flag that a rule can name, as its record declares it.

    Attributes:
        kind: The kind of result, as in `KINDS`, whose recommended row it is of, so that it may be worse than a
            baseline's; empty for all others.
        record, path: Where it is found: the attributes `path` of the record.
        better: Which value is better, `less` or `more`; empty: neither.
        is_share: Whether it is between 0 and 1: a limit outside would be a rule that always or never fails.
        is_ratio: Whether its limit may be in per cent.
        unknown: Why it may be null.
    """

    name: str
    kind: str = ""
    record: Callable[[RuleInputs], Any]
    path: tuple[str, ...]
    is_flag: bool = False
    better: str = ""
    is_share: bool = False
    is_ratio: bool = False
    unknown: str = ""


@cache
def all_fields() -> dict[str, Field]:
    """Name → field, of everything that rules can name."""
    results = {name: partial(RuleInputs.of_kind, name=name) for name in KINDS}
    fields = [
        *_of_rows("", "sweep", Row),
        *_of_rows("stream.", "stream", StreamRow),
        *_fields(
            "loader.",
            LoaderRow,
            partial(RuleInputs.recommended, name="loader"),
            kind="loader",
        ),
        *_fields(
            "bound.", LowerBound, lambda inputs: inputs.of_kind("sweep").lower_bound
        ),
        *_fields("packed.", PackedRow, _packed, kind="sweep"),
        *_fields("verify.", Verification, _verification),
        *_fields("probe.", Probe, results["probe"]),
        *_fields("training.", Training, _training),
    ]
    shards = _fields("shards.", Shards, lambda inputs: inputs.of_kind("stream").shards)
    fields += [replace(field, unknown="the shards do as they are") for field in shards]
    whole = [
        *_fields("", Drift, _drift),
        *_fields("", Sweep, results["sweep"]),
        *_fields("stream.", StreamSweep, results["stream"]),
    ]
    fields += [field for field in whole if field.name in _OF_WHOLE_RESULTS]
    reproducible = Field(
        name="loader.reproducible",
        record=results["loader"],
        path=("reproducible",),
        is_flag=True,
        unknown="run `batchtune tune-loader` with --check-reproducible",
    )
    named = {field.name: field for field in [*fields, reproducible]}
    # A table that did not run in shuffled training has no proven size, whatever its row says of each.
    named["unproven"] = replace(named["unproven"], record=_recommending)
    of_packed = named["packed.unproven"]
    named["packed.unproven"] = replace(of_packed, record=_packing, path=("unproven",))
    named["gpu_idle"] = replace(
        named["loader.gpu_idle"], name="gpu_idle", record=_held_against_step
    )
    return named


def _of_rows(prefix: str, kind: str, row: type[Record]) -> Iterator[Field]:
    """Yield the fields of a sweep's recommended row, then those of the user's own."""
    of_current = partial(_current, kind=kind)
    for named, find, recommended_kind in (
        (prefix, partial(RuleInputs.recommended, name=kind), kind),
        (f"{prefix}current.", lambda inputs: of_current(inputs).current, ""),
    ):
        yield from _fields(named, row, find, kind=recommended_kind)
        # No file holds it: it follows from `mates_again`.
        yield Field(
            name=f"{named}randomness",
            kind=recommended_kind,
            record=find,
            path=("randomness",),
            better="more",
            is_share=True,
            is_ratio=True,
        )
    yield Field(
        name=f"{prefix}current.fits",
        record=of_current,
        path=("current_fits",),
        is_flag=True,
    )


def _fields(
    prefix: str,
    record: type[Struct],
    find: Callable[[RuleInputs], Any],
    *,
    kind: str = "",
) -> Iterator[Field]:
    """Yield the numbers and flags of a record and of the records in it, in their order."""
    described = inspect.type_info(record)
    assert isinstance(described, inspect.StructType)
    for part in described.fields:
        declared: dict[str, Any] = {}
        types = [part.type]
        if isinstance(part.type, inspect.UnionType):
            types = [
                member
                for member in part.type.types
                if not isinstance(member, inspect.NoneType)
            ]
        part_type = types[0]
        if isinstance(part_type, inspect.Metadata):
            declared = part_type.extra or {}
            part_type = part_type.type
        if isinstance(part_type, inspect.StructType) and part.name != "meta":
            for inner in _fields(f"{prefix}{part.name}.", part_type.cls, find):
                yield replace(inner, path=(part.name, *inner.path))
        elif len(types) == 1 and isinstance(part_type, _NUMBERS):
            is_share = isinstance(part_type, inspect.FloatType) and (
                part_type.ge,
                part_type.le,
            ) == (0, 1)
            yield Field(
                name=prefix + part.name,
                kind=kind,
                record=find,
                path=(part.name,),
                is_flag=isinstance(part_type, inspect.BoolType),
                better=declared.get("better", ""),
                is_share=is_share,
                is_ratio=is_share or "percent" in declared,
            )


def _known(value: T | None, why: str) -> T:
    if value is None:
        raise NotKnownError(why)
    return value


def value_in(record: Any, field: Field, where: str = "") -> Value:
    """Return the value of a field. Raises NotKnownError if it is null."""
    value = record
    for name in field.path:
        value = None if value is None else getattr(value, name)
    why = field.unknown
    if (
        isinstance(record, Row)
        and field.path[-1] in _OF_POOLS
        and not record.uses_pools
    ):
        why = "only pools have it, and this is a bucket table"
    known: Value = _known(
        value, f"{field.name} is not known{where} (null){f': {why}' if why else ''}"
    )
    return known


def _held_against_step(inputs: RuleInputs) -> Any:
    """Return the recommended row of a loader; raise NotKnownError where no step is known that could wait for it."""
    _known(
        inputs.of_kind("loader").demand,
        "no step times are known: give --step-ms, or probe first",
    )
    return inputs.recommended("loader")


def _current(inputs: RuleInputs, kind: str) -> Any:
    """Return the result whose rows are compared with a current config. Raises NotKnownError without one."""
    result = inputs.of_kind(kind)
    how = f"run `batchtune {KINDS[kind].command}` with --current"
    _known(result.current, f"{KINDS[kind].words} knows no current config: {how}")
    return result


def _recommending(inputs: RuleInputs) -> Any:
    """Return the sweep. Raises NotKnownError if it recommends no row."""
    inputs.recommended("sweep")
    return inputs.of_kind("sweep")


def _packing(inputs: RuleInputs) -> Any:
    """Return the sweep. Raises NotKnownError if it compares no packers."""
    _packed(inputs)
    return inputs.of_kind("sweep")


def _packed(inputs: RuleInputs) -> PackedRow:
    """Return the recommended packer. Raises NotKnownError without one."""
    why = "packers were not compared: run `batchtune sweep-buckets` with --max-tokens, or probe a workload that packs"
    packing: PackingSweep | None = inputs.of_kind("sweep").packed
    return _known(packing, why).row


def _drift(inputs: RuleInputs) -> Drift:
    return _known(inputs.results.drift, "no other lengths are given: use --manifest")


def _training(inputs: RuleInputs) -> Training:
    why = "the run has no recorded steps: run `batchtune record`"
    training = _known(inputs.results.training, why)
    _known(training.steps + training.ooms or None, why)
    return training


def compared_with(inputs: RuleInputs, field: Field) -> tuple[Any, str]:
    """Return the baseline's recommended row, and whether it is of other lengths, in words. Raises NotKnownError."""
    baseline = _known(
        inputs.baseline, "no other run to compare with is given: use --baseline"
    )
    kind = KINDS[field.kind]
    why = f"the baseline has no {kind.file}: run `batchtune {kind.command}` there"
    compared = _known(getattr(baseline, field.kind), why)
    try:
        row = field.record(RuleInputs(results=baseline))
    except NotKnownError as error:
        raise NotKnownError(f"the baseline: {error}") from error
    lengths = inputs.of_kind(field.kind).lengths
    other = compared.lengths
    if lengths is None or other is None:
        return row, ""
    if len({lengths.unit, other.unit} - {None}) > 1:
        raise NotKnownError(
            f"the baseline's lengths are in {other.unit}, this run's in {lengths.unit}"
        )
    if lengths.fingerprint != other.fingerprint:
        return row, " (of other lengths)"
    return row, ""


def _verification(inputs: RuleInputs) -> Verification:
    """Return the verification, if it is about the batches that are recommended now."""
    verification = _known(
        inputs.results.verification,
        "the run has no verify.json: run `batchtune verify`",
    )
    if not verification.of_stream and inputs.results.sweep is not None:
        inputs.recommended("sweep")
    difference = mismatch(inputs.results)
    if difference is not None:
        raise NotKnownError(difference)
    return verification


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


class Rule(NamedTuple):
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
            shown = str(value).lower()
            if rule.written.endswith("%"):
                shown = f"{100 * value:.4g}% ({shown})"
            found = f"{shown}, {answer} {rule.operator} {rule.written}"
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

    `time` is 0 throughout: rules take none, and the same verdicts give the same bytes. No two
    verdicts are on the same rule.
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
