"""The numbers and flags that rules can name, and where each is found in a run's results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeVar

from msgspec import Struct, inspect

from batchtune.reports import KINDS, RunResults
from batchtune.reports.measured import mismatch
from batchtune.results import (
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
    Verification,
)

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


def _packing(inputs: RuleInputs) -> Sweep:
    """Return the sweep. Raises NotKnownError if it compares no packers."""
    _packed(inputs)
    sweep: Sweep = inputs.of_kind("sweep")
    return sweep


def _packed(inputs: RuleInputs) -> PackedRow:
    """Return the recommended packer. Raises NotKnownError without one."""
    why = "packers were not compared: run `batchtune sweep-buckets` with --max-tokens, or probe a workload that packs"
    packing: PackingSweep | None = inputs.of_kind("sweep").packed
    return _known(packing, why).row


def _drift(inputs: RuleInputs) -> Drift:
    return _known(inputs.results.drift, "no other lengths are given: use --manifest")


def _training(inputs: RuleInputs) -> Training:
    why = "the run has no training.jsonl: run `batchtune record`"
    return _known(inputs.results.training, why)


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
