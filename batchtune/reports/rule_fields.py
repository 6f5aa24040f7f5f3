"""The numbers and flags that rules can name, and where each is found in a run's results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, TypeVar

import msgspec

from batchtune.reports.run import KINDS, RunResults
from batchtune.reports.verification import mismatch
from batchtune.results import Drift, LoaderRow, LowerBound, Record, Row, Shards, StreamRow, Verification

T = TypeVar("T")
Value = float | int | bool

# Fields of `results.Drift` that rules can name.
DRIFT_FIELDS = ("stale", "beyond", "changed")
# Fields of a whole sweep of a stream.
_OF_STREAM = ("batches_per_rank", "max_batch_length", "simulated_examples")
# Fields of a recommended row in which a baseline may be better.
HIGHER_IS_BETTER = {
    *("fill", "mean_batch_size", "randomness", "mate_distance", "mixing"),
    *("examples_per_second", "batches_per_second", "length_per_second"),
}
LOWER_IS_BETTER = {
    *("batches", "steps", "padded_length", "padding_ratio", "batch_size_variation", "unproven", "used_buckets"),
    *("estimated_epoch_seconds", "estimated_epoch_error_seconds", "batches_deviation", "epoch_seconds_deviation"),
    # More examples can meet.
    *("effective_buckets", "mates_again", "length_correlation", "repeated_examples"),
    *("dropped_examples", "under_half", "wait_median", "wait_p99", "worker_imbalance", "rank_imbalance"),
    *("buffer_size", "buffer_length", "buffer_bytes"),
    *("workers", "first_batch_seconds", "wait_p50_seconds", "wait_p99_seconds", "processors", "gpu_idle"),
    *("memory_bytes", "worker_bytes", "shared_bytes", "growth_bytes_per_batch"),
    "examples_per_second_spread",
}
# Between 0 and 1: a limit outside would be a rule that always or never fails.
SHARES = {
    *("padding_ratio", "mates_again", "randomness", "under_half", "max_padding_ratio"),
    "gpu_idle",
}
# These may be written in per cent.
RATIOS = SHARES | {
    *("fill", "batch_size_variation", "length_correlation", "mixing", "worker_imbalance", "rank_imbalance", "stale"),
    *("time_ratio", "time_ratio_error", "examples_per_second_spread"),
}
# Fields of a row that a bucket table has none of.
_OF_POOLS = {"pool_size", "batch_overhead", "simulated_epochs", "batches_deviation", "epoch_seconds_deviation"}
# Why a field may be null, by the kind of result.
_WHY_UNKNOWN = {
    "sweep": {
        "unproven": "only a sweep of batches that were probed knows it",
        "batch_overhead": "these pools are cut into batches of as many examples as fit",
        "epoch_seconds_deviation": "no step times are known",
        "length_correlation": "all lengths, or no two examples of any batch, are alike",
    },
    "stream": {
        "unproven": "only a sweep of batches that were probed knows it",
        "length_correlation": "all lengths, or no two examples of any batch, are alike",
        **dict.fromkeys(("target_batch_numel", "max_batch_numel"), "only SpeechBrain's own algorithm has it"),
        **dict.fromkeys(("max_padding_ratio", "max_batch_size"), "this way to batch has no such limit"),
        **dict.fromkeys(("shards", "maxcount", "maxsize_bytes"), "the shards do as they are"),
    },
    "loader": {
        "length_per_second": "the lengths of the batches are not known",
        "gpu_idle": "no step times are known, or the tuning ended before the loader was run with a step",
        "estimated_epoch_seconds": "its epoch has no known end",
        "reproducible": "run `batchtune tune-loader` with --check-reproducible",
    },
}

_MISMATCHES = {
    "lengths": "has other lengths than the sweep: run `batchtune verify`",
    "stream": "is not of the recommended stream: run `batchtune verify --stream`",
    "table": "has another table than the recommended one: run `batchtune verify`",
    "pools": "is not of the recommended pools: run `batchtune verify`",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleInputs:
    """The results that rules are judged by; `missing` says why the baseline, or the drift, can't be read."""

    results: RunResults
    baseline: RunResults | None = None
    missing: Mapping[str, str] = field(default_factory=dict)

    def of_kind(self, name: str) -> Any:
        """Return the run's result of a kind in `KINDS`. Raises NotKnownError without one."""
        kind, instead = KINDS[name], ""
        if name == "sweep" and self.results.stream is not None:
            instead = "; fields of the stream begin with stream., such as stream.batches"
        why = f"the run has no {kind.file}: run `batchtune {kind.command}`{instead}"
        return _known(getattr(self.results, name), why)

    def recommended(self, name: str) -> Any:
        """Return the recommended row of a kind of result. Raises NotKnownError without one."""
        result = self.of_kind(name)
        why = f"{KINDS[name].words} recommends no row: {result.reason or 'it does not say why'}"
        return _known(result.recommended_row, why)


class NotKnownError(Exception):
    """A value is unknown; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A number or a flag that a rule can name.

    Attributes:
        kind: Of the result that it is found in, as in `KINDS`; empty for others.
        record, path: Where it is found: the attributes `path` of the record.
        of_row: Whether it is of a recommended row, so that it may be worse than a baseline's.
    """

    name: str
    kind: str
    record: Callable[[RuleInputs], Any]
    path: tuple[str, ...]
    is_flag: bool = False
    of_row: bool = False

    @property
    def leaf(self) -> str:
        """The last word of its name."""
        return self.name.rpartition(".")[2]

    @property
    def is_comparable(self) -> bool:
        """Whether a rule may compare it with a baseline; a loader's batches are as many as were measured."""
        return self.of_row and self.leaf in HIGHER_IS_BETTER | LOWER_IS_BETTER and self.name != "loader.batches"


@cache
def all_fields() -> dict[str, Field]:
    """Name → field, of everything that rules can name."""
    of_sweep, of_stream, of_loader = (partial(RuleInputs.of_kind, name=name) for name in ("sweep", "stream", "loader"))
    of_probe = partial(RuleInputs.of_kind, name="probe")
    fields = [
        *_of_rows("", "sweep", Row),
        *_of_rows("stream.", "stream", StreamRow),
        *(Field(name=f"stream.{name}", kind="stream", record=of_stream, path=(name,)) for name in _OF_STREAM),
        *_fields("shards.", "stream", Shards, lambda inputs: of_stream(inputs).shards),
        *_fields("verify.", "", Verification, _verification),
        *_fields("bound.", "sweep", LowerBound, lambda inputs: of_sweep(inputs).lower_bound),
        Field(name="probe.unfinished", kind="probe", record=of_probe, path=("unfinished",), is_flag=True),
        Field(name="max_batch_length", kind="sweep", record=of_sweep, path=("max_batch_length",)),
        Field(name="gpu_idle", kind="loader", record=_held_against_step, path=("gpu_idle",), of_row=True),
        *_fields("loader.", "loader", LoaderRow, partial(RuleInputs.recommended, name="loader"), of_row=True),
        Field(name="loader.reproducible", kind="loader", record=of_loader, path=("reproducible",), is_flag=True),
    ]
    fields += [field for field in _fields("", "", Drift, _drift) if field.name in DRIFT_FIELDS]
    return {one.name: one for one in fields}


def _of_rows(prefix: str, kind: str, row: type[Record]) -> Iterator[Field]:
    """Yield the fields of a sweep's recommended row, then those of the user's own."""
    own = f"{prefix}current."
    for place, find in ((prefix, partial(RuleInputs.recommended, name=kind)), (own, partial(_current, kind=kind))):
        yield from _fields(place, kind, row, find, of_row=place == prefix)
        yield Field(name=f"{place}randomness", kind=kind, record=find, path=("randomness",), of_row=place == prefix)
    compared = partial(_compared_with_current, kind=kind)
    yield Field(name=f"{own}fits", kind=kind, record=compared, path=("current_fits",), is_flag=True)


def _fields(
    prefix: str, kind: str, record: type[msgspec.Struct], find: Callable[[RuleInputs], Any], *, of_row: bool = False
) -> Iterator[Field]:
    """Yield the numbers and flags of a record and of the records in it, in their order."""
    described = msgspec.inspect.type_info(record)
    assert isinstance(described, msgspec.inspect.StructType)
    for part in described.fields:
        union = part.type.types if isinstance(part.type, msgspec.inspect.UnionType) else (part.type,)
        kinds = [one for one in union if not isinstance(one, msgspec.inspect.NoneType)]
        is_flag = isinstance(kinds[0], msgspec.inspect.BoolType)
        number = (msgspec.inspect.IntType, msgspec.inspect.FloatType)
        if len(kinds) == 1 and (is_flag or isinstance(kinds[0], number)):
            name, path = prefix + part.name, (part.name,)
            yield Field(name=name, kind=kind, record=find, path=path, is_flag=is_flag, of_row=of_row)
        elif isinstance(kinds[0], msgspec.inspect.StructType) and part.name != "meta":
            for inner in _fields(f"{prefix}{part.name}.", kind, kinds[0].cls, find):
                yield replace(inner, path=(part.name, *inner.path))


def _known(found: T | None, why: str) -> T:
    if found is None:
        raise NotKnownError(why)
    return found


def value_in(record: Any, field: Field, where: str = "") -> Value:
    """Return the value of a field. Raises NotKnownError if it is null."""
    value = record
    for name in field.path:
        value = None if value is None else getattr(value, name)
    why = _WHY_UNKNOWN.get(field.kind, {}).get(field.path[-1], "")
    if isinstance(record, Row) and field.path[-1] in _OF_POOLS and record.pool_size is None:
        why = "only pools have it, and this is a bucket table"
    known: Value = _known(value, f"{field.name} is not known{where} (null){f': {why}' if why else ''}")
    return known


def _held_against_step(inputs: RuleInputs) -> Any:
    """Return the recommended row of a loader; raise NotKnownError where no step is known that could wait for it."""
    _known(inputs.of_kind("loader").demand, "no step times are known: give --step-ms, or probe first")
    return inputs.recommended("loader")


def _current(inputs: RuleInputs, kind: str) -> Any:
    how = f"run `batchtune {KINDS[kind].command}` with --current"
    return _known(inputs.of_kind(kind).current, f"{KINDS[kind].words} knows no current config: {how}")


def _compared_with_current(inputs: RuleInputs, kind: str) -> Any:
    """Return the result whose rows are compared with a current config. Raises NotKnownError without one."""
    _current(inputs, kind)
    return inputs.of_kind(kind)


def _drift(inputs: RuleInputs) -> Drift:
    return _known(inputs.results.drift, inputs.missing.get("drift", "no other lengths are given: use --manifest"))


def compared_with(inputs: RuleInputs, field: Field) -> tuple[Any, bool]:
    """Return the baseline's recommended row, and whether it is of the same lengths. Raises NotKnownError."""
    kind, ours, theirs = KINDS[field.kind], inputs.of_kind(field.kind), None
    why = "no other run to compare with is given: use --baseline"
    if inputs.baseline is not None:
        theirs = getattr(inputs.baseline, field.kind)
        why = f"the baseline has no {kind.file}: run `batchtune {kind.command}` there"
    if theirs is None:
        raise NotKnownError(inputs.missing.get("baseline", why))
    row = _known(theirs.recommended_row, "the baseline recommends no row")
    if ours.lengths is None or theirs.lengths is None:
        return row, True
    units = ours.lengths.unit, theirs.lengths.unit
    if None not in units and units[0] != units[1]:
        raise NotKnownError(f"the baseline's lengths count {units[1]}, this run's count {units[0]}")
    return row, ours.lengths.fingerprint == theirs.lengths.fingerprint


def _verification(inputs: RuleInputs) -> Verification:
    """Return the verification, if it is about the batches that are recommended now."""
    found = _known(inputs.results.verification, "the run has no verify.json: run `batchtune verify`")
    if not found.of_stream and inputs.results.sweep is not None:
        inputs.recommended("sweep")
    if (differs := mismatch(inputs.results)) is not None:
        raise NotKnownError(f"verify.json {_MISMATCHES[differs]} again")
    return found
