"""The fields that rules can name, as the records declare them."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Literal, Union, get_args, get_origin

import msgspec

from batchtune.reports.gate.grammar import DRIFT_FIELDS
from batchtune.results import Drift, LowerBound, Record, Row, Verification

Source = Literal["row", "sweep", "current", "verify", "bound", "drift"]
Kind = Literal["number", "count", "flag"]

_ROOTS: tuple[tuple[str, Source, type[Record]], ...] = (
    ("", "row", Row),
    ("current.", "current", Row),
    ("verify.", "verify", Verification),
    ("bound.", "bound", LowerBound),
)

HIGHER_IS_BETTER = frozenset({"fill", "mean_batch_size"})
LOWER_IS_BETTER = frozenset(
    {
        "batches",
        "steps",
        "padded_length",
        "padding_ratio",
        "estimated_epoch_seconds",
        "estimated_epoch_error_seconds",
        "effective_buckets",  # fewer: more examples can meet
        "used_buckets",
        "batch_size_variation",
        "repeated_examples",
        "unproven",
    }
)
# Between 0 and 1: a limit outside would be a rule that always or never fails.
SHARES = frozenset({"padding_ratio", "current.padding_ratio", "drift"})
# What may be written in per cent.
RATIOS = SHARES | {
    *("fill", "current.fill", "batch_size_variation", "current.batch_size_variation", "stale"),
    *("verify.time_ratio", "verify.time_ratio_spread"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A number, a count or a flag that a rule can name.

    Attributes:
        name: In a rule.
        source: The record it is of.
        path: Its attributes, from that record on.
        kind: What it holds.
    """

    name: str
    source: Source
    path: tuple[str, ...]
    kind: Kind


@cache
def all_fields() -> dict[str, Field]:
    """Name → field, of everything that rules can name."""
    found: dict[str, Field] = {}
    for prefix, source, record in _ROOTS:
        for path, kind in _leaves(record):
            name = prefix + ".".join(path)
            found[name] = Field(name=name, source=source, path=path, kind=kind)
    found["max_batch_length"] = Field(
        name="max_batch_length", source="sweep", path=("max_batch_length",), kind="number"
    )
    kinds = dict(_leaves(Drift))
    for name, attribute in DRIFT_FIELDS.items():
        found[name] = Field(name=name, source="drift", path=(attribute,), kind=kinds[(attribute,)])
    return found


def nearest(name: str) -> str | None:
    """The field that was probably meant; None where none is near."""
    near = difflib.get_close_matches(name, all_fields(), n=1)
    return near[0] if near else None


def _leaves(record: type[Record]) -> Iterator[tuple[tuple[str, ...], Kind]]:
    """The numbers and flags of a record and of the records in it, in their order."""
    for field in msgspec.structs.fields(record):
        kind = _bare(field.type)
        if kind is bool:
            yield (field.name,), "flag"
        elif kind is int:
            yield (field.name,), "count"
        elif kind is float:
            yield (field.name,), "number"
        elif isinstance(kind, type) and issubclass(kind, Record) and field.name != "meta":
            for path, inner in _leaves(kind):
                yield (field.name, *path), inner


def _bare(annotation: object) -> object:
    """Return a field's type without None and without its range."""
    if get_origin(annotation) in (Union, types.UnionType):
        others = [one for one in get_args(annotation) if one is not type(None)]
        annotation = others[0] if len(others) == 1 else annotation
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
