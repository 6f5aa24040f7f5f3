"""Turn a recommendation into one framework's config.

To add a framework: an `Export` in `EXPORTS` of a module, and a line in `_MODULES`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from batchtune.errors import ResultError, UsageError, did_you_mean, shortened
from batchtune.results import LOADER_CONFIG_FILE, SAMPLER_FILE, STREAM_CONFIG_FILE

if TYPE_CHECKING:
    from batchtune.exports.base import Export, Tuned

# Name of --to → the module with it in `EXPORTS`, imported when needed.
_MODULES = {
    "speechbrain": "speechbrain",
    "nemo": "lhotse",
    "lhotse": "lhotse",
    "espnet": "cutting",
    "fairseq": "cutting",
    "transformers": "run_configs",
    "accelerate": "run_configs",
    "lightning": "run_configs",
    "pytorch": "run_configs",
    "speechbrain-stream": "speechbrain",
    "webdataset": "run_configs",
    "hf-streaming": "run_configs",
    "lhotse-shar": "lhotse",
    "nemo-tarred": "lhotse",
    "verl": "packers",
    "openrlhf": "packers",
    "slime": "packers",
    "trl": "packers",
    "axolotl": "packers",
}
FRAMEWORKS: tuple[str, ...] = tuple(_MODULES)


def export_of(name: str) -> Export:
    """Return the export for a framework; raise UsageError if the name is unknown."""
    if name not in _MODULES:
        hint = f"{did_you_mean(name.lower(), FRAMEWORKS)}Known frameworks: {', '.join(FRAMEWORKS)}."
        raise UsageError(f"unknown framework {shortened(name)}", hint)
    exports: tuple[Export, ...] = import_module(
        f"batchtune.exports.{_MODULES[name]}"
    ).EXPORTS
    return next(export for export in exports if export.name == name)


def configs_of(tuned: Tuned) -> dict[str, str]:
    """Return the recommendation as batchtune's own files and for each framework that can express it, by title."""
    from batchtune.exports.run_configs import (
        render_loader_yaml,
        render_sampler_yaml,
        render_stream_yaml,
        sampler_config,
        stream_config,
    )

    renders: dict[str, Callable[[], str]] = {
        SAMPLER_FILE: lambda: render_sampler_yaml(
            sampler_config(tuned.needed_sweep, tuned.probe)
        ),
        STREAM_CONFIG_FILE: lambda: render_stream_yaml(
            stream_config(tuned.needed_stream, tuned.probe)
        ),
    }
    if tuned.loader is not None:
        renders[LOADER_CONFIG_FILE] = partial(render_loader_yaml, tuned.loader)
    for export in map(export_of, FRAMEWORKS):
        renders[export.title] = partial(export.render, tuned)
    configs: dict[str, str] = {}
    for title, render in renders.items():
        with suppress(ResultError):
            configs[title] = render()
    return configs
