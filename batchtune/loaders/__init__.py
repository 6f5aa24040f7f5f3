"""Measures data loaders, each setting in a fresh process. Each kind is one module, with its line here."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchtune.loaders.base import LoaderKind

# In the order in which a target is offered to them.
_KINDS = {
    "dali": "batchtune.loaders.dali:DaliKind",
    "torch": "batchtune.loaders.dataloader:TorchKind",
    "iterable": "batchtune.loaders.iterable:IterableKind",
}
KINDS = tuple(_KINDS)


def kind_of(name: str) -> LoaderKind:
    """Return a kind of loader by its name; imports its module, but not its library."""
    module, _, member = _KINDS[name].partition(":")
    found: LoaderKind = getattr(importlib.import_module(module), member)()
    return found
