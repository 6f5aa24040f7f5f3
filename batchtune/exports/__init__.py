"""A recommendation → one framework's config.

To add one: an `Export` in `EXPORTS` of a module, and a line in `_MODULES`.
"""

from __future__ import annotations

from importlib import import_module

from batchtune.errors import UsageError, shortened
from batchtune.exports.base import Export, Tuned

__all__ = ["FRAMEWORKS", "Export", "Tuned", "export_of"]

# Name of --to → the module that has it in its `EXPORTS`, imported when it is asked for.
_MODULES = {
    "speechbrain": "speechbrain",
    "nemo": "nemo",
    "lhotse": "lhotse",
    "espnet": "espnet",
    "fairseq": "fairseq",
    **dict.fromkeys(("transformers", "accelerate", "lightning", "pytorch"), "trainers"),
    "speechbrain-stream": "speechbrain_stream",
    **dict.fromkeys(("webdataset", "hf-streaming"), "streaming"),
    "lhotse-shar": "lhotse",
    "nemo-tarred": "nemo",
}
FRAMEWORKS: tuple[str, ...] = tuple(_MODULES)


def export_of(name: str) -> Export:
    """Return the export for a framework; raise UsageError if the name is unknown."""
    if name not in _MODULES:
        known = f"Known ones: {', '.join(FRAMEWORKS)}."
        raise UsageError(f"{shortened(name)} is no framework that batchtune exports to", known)
    exports: tuple[Export, ...] = import_module(f"batchtune.exports.{_MODULES[name]}").EXPORTS
    return next(export for export in exports if export.name == name)
