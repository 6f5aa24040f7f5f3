"""The numbers and flags that rules can name, and where each is found in a run's results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import msgspec

from batchtune.reports.verification import ran_row_of
from batchtune.results import (
    Drift,
    LoaderRow,
    LoaderTuning,
    LowerBound,
    Record,
    Row,
    Shards,
    StreamRow,
    StreamSweep,
    Sweep,
    Verification,
)

T = TypeVar("T")
Value = float | int | bool

# Rule field → field of `results.Drift`.
DRIFT_FIELDS = {"drift": "distance", "stale": "stale", "beyond": "beyond", "changed": "changed"}


def _under(names: set[str], *prefixes: str) -> set[str]:
    return {f"{prefix}{name}" for prefix in prefixes for name in names}


# Of a row of any kind.
_HIGHER = {"fill", "mean_batch_size", "randomness"}
_LOWER = {
    *("batches", "padded_length", "padding_ratio", "batch_size_variation", "unproven"),
    *("estimated_epoch_seconds", "estimated_epoch_error_seconds"),
    # More examples can meet.
    *("effective_buckets", "mates_again", "length_correlation"),
}
_SHARES = {"padding_ratio", "mates_again", "randomness"}
_RATIOS = {"fill", "batch_size_variation", "length_correlation"}
_OF_TABLES, _OF_STREAMS = ("", "current."), ("stream.", "stream.current.")

_HIGHER_OF_LOADERS = {"examples_per_second", "batches_per_second", "length_per_second"}
_IDLE = {"gpu_idle", "gpu_idle_measured"}
_LOWER_OF_LOADERS = {
    *("workers", "first_batch_seconds", "wait_p50_seconds", "wait_p99_seconds", "processors"),
    *("memory_bytes", "worker_bytes", "shared_bytes", "growth_bytes_per_batch", "estimated_epoch_seconds"),
    *("examples_per_second_spread", *_IDLE),
}

HIGHER_IS_BETTER = frozenset(
    _HIGHER | _under(_HIGHER | {"mate_distance", "mixing"}, "stream.") | _under(_HIGHER_OF_LOADERS, "loader.")
)
_LOWER_OF_STREAMS = {
    *("dropped_examples", "under_half", "wait_median", "wait_p99", "worker_imbalance", "rank_imbalance"),
    *("buffer_size", "buffer_length", "buffer_bytes"),
}
LOWER_IS_BETTER = frozenset(
    _LOWER
    | {"steps", "used_buckets", "repeated_examples", "batches_deviation", "epoch_seconds_deviation"}
    | _under(_LOWER | _LOWER_OF_STREAMS, "stream.")
    | _under(_LOWER_OF_LOADERS, "loader.")
    | {"gpu_idle"}
)
# Between 0 and 1: a limit outside would be a rule that always or never fails.
SHARES = frozenset(
    {"drift", "gpu_idle"}
    | _under(_SHARES, *_OF_TABLES)
    | _under(_SHARES | {"under_half", "max_padding_ratio"}, *_OF_STREAMS)
    | _under(_IDLE, "loader.")
)
# These may be written in per cent.
RATIOS = SHARES | {
    *_under(_RATIOS, *_OF_TABLES),
    *_under(_RATIOS | {"mixing", "worker_imbalance", "rank_imbalance"}, *_OF_STREAMS),
    *("stale", "verify.time_ratio", "verify.time_ratio_spread", "loader.examples_per_second_spread"),
}
# Of the whole sweep of a stream.
_OF_STREAM = ("batches_per_rank", "max_batch_length", "simulated_examples")
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
    **dict.fromkeys(("target_batch_numel", "max_batch_numel"), "only SpeechBrain's own algorithm has it"),
    **dict.fromkeys(("max_padding_ratio", "max_batch_size"), "this way to batch has no such limit"),
    **dict.fromkeys(("mates_again", "randomness"), "an older batchtune swept; run `batchtune sweep-buckets` again"),
}
_WHY_UNKNOWN_OF_LOADERS = {
    "length_per_second": "the lengths of the batches are not known",
    "gpu_idle": "no step times are known: give --step-ms, or probe first; or it is not a loader of torch's workers",
    "gpu_idle_measured": "the loader was not run beside a step",
    "idle": "the loader has no queue of workers that is known, and was not run beside a step",
    "estimated_epoch_seconds": "its epoch has no known end",
    "reproducible": "run `batchtune tune-loader` with --check-reproducible",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleInputs:
    """The records that rules are judged by.

    Attributes:
        baseline, baseline_stream, baseline_loader: Another run's.
        missing: Why `baseline` or `drift` can't be read.
    """

    sweep: Sweep | None
    stream: StreamSweep | None = None
    verification: Verification | None = None
    baseline: Sweep | None = None
    baseline_stream: StreamSweep | None = None
    loader: LoaderTuning | None = None
    baseline_loader: LoaderTuning | None = None
    drift: Drift | None = None
    missing: Mapping[str, str] = field(default_factory=dict)


class NotKnownError(Exception):
    """A value is unknown; the message says why and what to do."""


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
        *_of_rows("", Row, _sweep),
        *_of_rows("stream.", StreamRow, _stream),
        *(Field(f"stream.{name}", _stream, (name,), False) for name in _OF_STREAM),
        *_fields("shards.", Shards, lambda inputs: _stream(inputs).shards),
        *_fields("verify.", Verification, _verification),
        *_fields("bound.", LowerBound, lambda inputs: _sweep(inputs).lower_bound),
        Field("max_batch_length", _sweep, ("max_batch_length",), False),
        Field("gpu_idle", _held_against_step, ("idle",), False),
        *_fields("loader.", LoaderRow, lambda inputs: _recommended(_loader(inputs))),
        Field("loader.reproducible", _loader, ("reproducible",), True),
    ]
    flags = {one.name: one.is_flag for one in _fields("", Drift, _drift)}
    fields += [Field(name, _drift, (attribute,), flags[attribute]) for name, attribute in DRIFT_FIELDS.items()]
    return {one.name: one for one in fields}


def _of_rows(prefix: str, kind: type[Record], sweep_in: Callable[[RuleInputs], Sweep | StreamSweep]) -> Iterator[Field]:
    """Yield the fields of a sweep's recommended row, then those of the user's own."""

    def recommended(inputs: RuleInputs) -> Record:
        return _recommended(sweep_in(inputs))

    def current(inputs: RuleInputs) -> Record:
        return _current(sweep_in(inputs))

    for place, find in ((prefix, recommended), (f"{prefix}current.", current)):
        yield from _fields(place, kind, find)
        yield Field(f"{place}randomness", find, ("randomness",), False)


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


def _known(found: T | None, why: str) -> T:
    if found is None:
        raise NotKnownError(why)
    return found


def value_in(record: Record, field: Field, where: str = "") -> Value:
    """Return the value of a field. Raises NotKnownError if it is null."""
    value: Any = record
    for name in field.path:
        value = None if value is None else getattr(value, name)
    why, name = "", field.path[-1]
    if isinstance(record, Row) and name in _OF_POOLS and record.pool_size is None:
        why = "only pools have it, and this is a bucket table"
    elif isinstance(record, (Row, StreamRow)):
        why = _WHY_UNKNOWN.get(name, "")
    elif isinstance(record, (LoaderRow, LoaderTuning)):
        why = _WHY_UNKNOWN_OF_LOADERS.get(name, "")
    elif isinstance(record, Shards) and field.path[0] == "advice":
        why = "the shards do as they are"
    known: Value = _known(value, f"{field.name} is not known{where} (null){f': {why}' if why else ''}")
    return known


def _sweep(inputs: RuleInputs) -> Sweep:
    instead = "" if inputs.stream is None else "; fields of the stream begin with stream., such as stream.batches"
    return _known(inputs.sweep, f"the run has no sweep.json: run `batchtune sweep-buckets`{instead}")


def _stream(inputs: RuleInputs) -> StreamSweep:
    return _known(inputs.stream, "the run has no stream.json: run `batchtune sweep-stream`")


def _loader(inputs: RuleInputs) -> LoaderTuning:
    return _known(inputs.loader, "the run has no loader.json: run `batchtune tune-loader`")


def _held_against_step(inputs: RuleInputs) -> Record:
    """Return the recommended row of a loader; raise NotKnownError where no step is known that could wait for it."""
    loader = _loader(inputs)
    _known(loader.demand, "no step times are known: give --step-ms, or probe first")
    return _recommended(loader)


def _recommended(sweep: Sweep | StreamSweep | LoaderTuning) -> Record:
    why = sweep.reason or "it does not say why"
    return _known(sweep.recommended_row, f"{_named(sweep)[0]} recommends no row: {why}")


def _current(sweep: Sweep | StreamSweep) -> Record:
    named, command = _named(sweep)
    return _known(sweep.current, f"{named} knows no current config: run `batchtune {command}` with --current")


def _named(sweep: Sweep | StreamSweep | LoaderTuning) -> tuple[str, str]:
    if isinstance(sweep, Sweep):
        return "the sweep", "sweep-buckets"
    if isinstance(sweep, StreamSweep):
        return "the sweep of the stream", "sweep-stream"
    return "the tuning of the loader", "tune-loader"


def _drift(inputs: RuleInputs) -> Drift:
    return _known(inputs.drift, inputs.missing.get("drift", "no other lengths are given: use --manifest"))


def compared_with(inputs: RuleInputs, field: Field) -> tuple[Row | StreamRow | LoaderRow, bool]:
    """Return the other run's recommended row, and whether it is of the same lengths. Raises NotKnownError."""
    ours: Sweep | StreamSweep | LoaderTuning
    theirs: Sweep | StreamSweep | LoaderTuning | None
    if field.name.startswith("stream."):
        ours, theirs, file = _stream(inputs), inputs.baseline_stream, "stream.json"
    elif field.name == "gpu_idle" or field.name.startswith("loader."):
        ours, theirs, file = _loader(inputs), inputs.baseline_loader, "loader.json"
    else:
        ours, theirs, file = _sweep(inputs), inputs.baseline, "sweep.json"
    why = "no other run to compare with is given: use --baseline"
    if any((inputs.baseline, inputs.baseline_stream, inputs.baseline_loader)):
        why = f"the baseline has no {file}: run `batchtune {_named(ours)[1]}` there"
    if theirs is None:
        raise NotKnownError(inputs.missing.get("baseline", why))
    if theirs.recommended_row is None:
        raise NotKnownError("the baseline recommends no row")
    if ours.lengths is None or theirs.lengths is None:
        return theirs.recommended_row, True
    units = ours.lengths.unit, theirs.lengths.unit
    if None not in units and units[0] != units[1]:
        raise NotKnownError(f"the baseline's lengths count {units[1]}, this run's count {units[0]}")
    return theirs.recommended_row, ours.lengths.fingerprint == theirs.lengths.fingerprint


def _verification(inputs: RuleInputs) -> Verification:
    """Return the verification, if it is about the batches that are recommended now."""
    found = _known(inputs.verification, "the run has no verify.json: run `batchtune verify`")
    if found.of_stream:
        if inputs.stream is not None and not ran_row_of(inputs.stream, found):
            raise NotKnownError("verify.json is not of the recommended stream: run `batchtune verify --stream` again")
    elif inputs.sweep is not None:
        row = _recommended(inputs.sweep)
        assert isinstance(row, Row)
        if found.lengths.fingerprint != inputs.sweep.lengths.fingerprint:
            raise NotKnownError("verify.json has other lengths than sweep.json: run `batchtune verify` again")
        if (found.bucket_boundaries, found.bucket_batch_sizes) != (row.boundaries, row.batch_sizes):
            raise NotKnownError("verify.json has another table than the recommended one: run `batchtune verify` again")
        if (found.pool_size, found.batch_overhead) != (row.pool_size, row.batch_overhead):
            raise NotKnownError("verify.json is not of the recommended pools: run `batchtune verify` again")
    return found
