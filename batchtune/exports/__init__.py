"""A recommendation → one framework's config, one module per framework.

To add one: a module with an `Export`, and its name in `_MODULES`.
"""

from __future__ import annotations

from importlib import import_module
from typing import cast

from batchtune.errors import UsageError, shortened
from batchtune.exports.base import Export, Tuned

__all__ = ["FRAMEWORKS", "Export", "Tuned", "export_of"]

# Name of --to → the module that holds its `EXPORT`, imported when it is asked for.
_MODULES: dict[str, str] = {
    "speechbrain": "speechbrain",
    "nemo": "nemo",
    "lhotse": "lhotse",
    "espnet": "espnet",
    "fairseq": "fairseq",
    "transformers": "transformers",
    "accelerate": "accelerate",
    "lightning": "lightning",
    "pytorch": "pytorch",
}
FRAMEWORKS: tuple[str, ...] = tuple(_MODULES)


def export_of(name: str) -> Export:
    """The export for a framework.

    Raises:
        UsageError: There is none of that name.
    """
    if name not in _MODULES:
        known = f"Known ones: {', '.join(FRAMEWORKS)}."
        raise UsageError(f"{shortened(name)} is no framework that batchtune exports to", known)
    return cast(Export, import_module(f"batchtune.exports.{_MODULES[name]}").EXPORT)
