"""What rules are judged by, and why a value may not be known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchtune.reports.gate.fields import Field
from batchtune.results import Drift, LowerBound, Row, Sweep, Verification

Value = float | int | bool


class NotKnownError(Exception):
    """A value can't be told; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What rules are judged by; None for what there is not.

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


def value_of(field: Field, evidence: Evidence) -> Value:
    """The field's value.

    Raises:
        NotKnownError: There is none.
    """
    return _value_in(_record(field, evidence), field, "")


def baseline_value_of(field: Field, evidence: Evidence) -> Value:
    """The field's value in the other run's recommended row.

    Raises:
        NotKnownError: There is none, or the other run's lengths are of another unit.
    """
    ours, other = _sweep(evidence), evidence.baseline
    if other is None:
        raise NotKnownError(evidence.missing.get("baseline", "no other run to compare with is given: use --baseline"))
    units = ours.lengths.unit, other.lengths.unit
    if None not in units and units[0] != units[1]:
        raise NotKnownError(f"the baseline's lengths count {units[1]}, this run's count {units[0]}")
    if other.recommended_row is None:
        raise NotKnownError("the baseline recommends no row")
    return _value_in(other.recommended_row, field, " in the baseline")


def _record(field: Field, evidence: Evidence) -> Row | Sweep | LowerBound | Verification | Drift:
    if field.source == "drift":
        return _drift(evidence)
    if field.source == "verify":
        return _verification(evidence)
    sweep = _sweep(evidence)
    if field.source == "sweep":
        return sweep
    if field.source == "bound":
        return sweep.lower_bound
    if field.source == "current":
        if sweep.current is None:
            raise NotKnownError("the sweep knows no current config: run `batchtune sweep-buckets` with --current")
        return sweep.current
    return _recommended(sweep)


def _value_in(record: Row | Sweep | LowerBound | Verification | Drift, field: Field, where: str) -> Value:
    value: Any = record
    for name in field.path:
        value = None if value is None else getattr(value, name)
    if value is None:
        remedy = ": only a sweep of batches that were probed knows it" if field.path == ("unproven",) else ""
        raise NotKnownError(f"{field.name} is not known{where} (null){remedy}")
    known: Value = value
    return known


def _sweep(evidence: Evidence) -> Sweep:
    if evidence.sweep is None:
        raise NotKnownError("the run has no sweep.json: run `batchtune sweep-buckets`")
    return evidence.sweep


def _recommended(sweep: Sweep) -> Row:
    if sweep.recommended_row is None:
        raise NotKnownError(f"the sweep recommends no row: {sweep.reason or 'it does not say why'}")
    return sweep.recommended_row


def _drift(evidence: Evidence) -> Drift:
    if evidence.drift is None:
        raise NotKnownError(evidence.missing.get("drift", "no other lengths are given: use --manifest"))
    return evidence.drift


def _verification(evidence: Evidence) -> Verification:
    """The verification, where it speaks for the table that is recommended now."""
    found, sweep = evidence.verification, evidence.sweep
    if found is None:
        raise NotKnownError("the run has no verify.json: run `batchtune verify`")
    if sweep is None:
        return found
    row = _recommended(sweep)
    if found.lengths.fingerprint != sweep.lengths.fingerprint:
        raise NotKnownError("verify.json is of other lengths than sweep.json: run `batchtune verify` again")
    if (found.bucket_boundaries, found.bucket_batch_sizes) != (row.boundaries, row.batch_sizes):
        raise NotKnownError("verify.json is of another table than is recommended: run `batchtune verify` again")
    return found
