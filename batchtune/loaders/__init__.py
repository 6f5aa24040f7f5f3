"""Measures data loaders, each setting in a fresh process. Each kind is one module, with its line here."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from batchtune.errors import ResultError, shortened
from batchtune.results import LoaderTuning, read_result

if TYPE_CHECKING:
    from batchtune.loaders.base import LoaderKind

# In the order in which a target is offered to them.
_KINDS = {
    "dali": "batchtune.loaders.dali:DaliKind",
    "torch": "batchtune.loaders.dataloader:TorchKind",
    "iterable": "batchtune.loaders.dataloader:IterableKind",
}
KINDS = tuple(_KINDS)


def kind_of(name: str) -> LoaderKind:
    """Return a kind of loader by its name; imports its module, but not its library."""
    module, _, member = _KINDS[name].partition(":")
    kind: LoaderKind = getattr(importlib.import_module(module), member)()
    return kind


def read_tuning(path: Path) -> LoaderTuning:
    """Read `loader.json`, and check its arguments by the kind of the loader.

    Raises:
        ResultError: As `read_result`; or the kind is unknown, or an argument can't have its value.
    """
    tuning = read_result(path, LoaderTuning)
    for problem in _problems(tuning):
        raise ResultError(
            f"{path} is edited or damaged: {problem}",
            "Run `batchtune tune-loader` again.",
        )
    return tuning


def _problems(tuning: LoaderTuning) -> Iterator[str]:
    if tuning.kind not in KINDS:
        yield f"kind is {shortened(tuning.kind)}, but must be {', '.join(KINDS)}"
        return
    types = kind_of(tuning.kind).ARGUMENTS
    for index, row in enumerate(tuning.rows):
        for name, value in row.arguments.items():
            if name not in types:
                continue
            try:
                msgspec.convert(value, types[name])
            except msgspec.ValidationError as error:
                yield f"rows, entry {index}: arguments: {name}: {error}"
