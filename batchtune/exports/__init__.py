"""Turn a recommendation into one framework's config.

To add a framework: a function in `RENDERS` of a module, and a line in `_KNOWN`.
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

# Name of --to → the module that renders it in `RENDERS`, imported when needed; the framework's own name; its file.
_KNOWN = {
    "speechbrain": ("speechbrain", "SpeechBrain", "dynamic_batch_sampler.yaml"),
    "nemo": ("lhotse", "NeMo", "train_ds.yaml"),
    "lhotse": ("lhotse", "Lhotse", "lhotse_sampler.py"),
    "espnet": ("cutting", "ESPnet", "batchtune_espnet.yaml"),
    "fairseq": ("cutting", "fairseq", "batchtune_fairseq.txt"),
    "transformers": ("run_configs", "Transformers", "batchtune_transformers.py"),
    "accelerate": ("run_configs", "Accelerate", "batchtune_accelerate.py"),
    "lightning": ("run_configs", "Lightning", "batchtune_lightning.py"),
    "pytorch": ("run_configs", "PyTorch", "batchtune_pytorch.py"),
    "speechbrain-stream": (
        "speechbrain",
        "SpeechBrain with WebDataset",
        "speechbrain_stream.py",
    ),
    "webdataset": ("run_configs", "WebDataset", "webdataset_stream.py"),
    "hf-streaming": (
        "run_configs",
        "Hugging Face streaming data sets",
        "hf_stream.py",
    ),
    "lhotse-shar": ("lhotse", "Lhotse Shar", "lhotse_shar.py"),
    "nemo-tarred": ("lhotse", "NeMo with tarred data", "tarred_train_ds.yaml"),
    "verl": ("cutting", "verl", "batchtune_verl.txt"),
    "openrlhf": ("cutting", "OpenRLHF", "batchtune_openrlhf.txt"),
    "slime": ("cutting", "slime", "batchtune_slime.txt"),
    "trl": ("cutting", "TRL", "batchtune_trl.py"),
    "axolotl": ("cutting", "axolotl", "batchtune_axolotl.yaml"),
}
FRAMEWORKS: tuple[str, ...] = tuple(_KNOWN)


def export_of(name: str) -> Export:
    """Return the export for a framework; raise UsageError if the name is unknown."""
    from batchtune.exports.base import Export

    if name not in _KNOWN:
        hint = f"{did_you_mean(name.lower(), FRAMEWORKS)}Known frameworks: {', '.join(FRAMEWORKS)}."
        raise UsageError(f"unknown framework {shortened(name)}", hint)
    module, title, file = _KNOWN[name]
    renders = import_module(f"batchtune.exports.{module}").RENDERS
    return Export(name=name, title=title, file=file, render=renders[name])


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
