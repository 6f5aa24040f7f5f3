"""Runs a training script unchanged: stands between it and its DataLoader, to measure, record or replace its batches.

A command is started with `hook/` first on PYTHONPATH and with the variable `BATCHTUNE_SCRIPT`, a JSON object: its
`mode` says what iterating over a loader gives. The classes of loaders are patched as soon as they are imported.
"""

from __future__ import annotations

import atexit
import functools
import importlib.abc
import importlib.util
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from batchtune.errors import NO_LOADER

VARIABLE = "BATCHTUNE_SCRIPT"
_HOOK = Path(__file__).with_name("hook")
# Each has `wrap(loader, begin, options)`, which returns the iterator that the script gets; `begin` starts the loader's
# own, `options` is the JSON object.
_MODES = {
    "probe": "batchtune.scripts.feeding",
    "record": "batchtune.scripts.recorder",
    "run": "batchtune.scripts.running",
}
_LOADERS = {
    "torch.utils.data.dataloader": "DataLoader",
    "torchdata.stateful_dataloader.stateful_dataloader": "StatefulDataLoader",
}

# Libraries that load batches in another way, by the name of their module.
_OTHER_LOADERS = (
    "nvidia.dali",
    "ffcv",
    "tensorflow",
    "grain",
    "ray.data",
    "torchdata.nodes",
    "petastorm",
)

# A script without a DataLoader is ended after this many optimizer steps.
_MOST_STEPS = 24

_uses_loader = False  # whether a DataLoader was iterated over with gradients

Begin = Callable[[], Iterator[Any]]


def environment(options: Mapping[str, Any]) -> dict[str, str]:
    """Return this process's environment for a command whose loaders are patched; `options` have a `mode`."""
    folders = [str(_HOOK)]
    if os.environ.get("PYTHONPATH"):
        folders.append(os.environ["PYTHONPATH"])
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(folders),
        VARIABLE: json.dumps(options),
    }


def install() -> None:
    """Patch the classes of loaders in this process when they are imported; keep the user's files from a probe."""
    sys.meta_path.insert(0, _Finder())
    options = json.loads(os.environ[VARIABLE])
    if options["mode"] == "probe":
        if "outside" in options:
            from batchtune.scripts.sandbox import stay_inside

            try:
                stay_inside(options)
            except OSError as error:
                sys.exit(
                    f"Error: batchtune can't protect your files from {sys.executable}: {error}"
                )
        atexit.register(_say_what_was_used)


def _say_what_was_used() -> None:
    """Print what a process with torch loaded its batches with; not called once it has used a DataLoader to train."""
    if "torch" not in sys.modules:
        return
    said = "iterated over no torch DataLoader with gradients"
    others = [name for name in _OTHER_LOADERS if name in sys.modules]
    if others:
        said += (
            f"; it imported {' and '.join(others)}, which loads batches in another way"
        )
    say(f"{said}.")


def place_in_group() -> tuple[int, int] | None:
    """Return the rank of this process and how many there are, if it has joined torch's process group."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    return distributed.get_rank(), distributed.get_world_size()


def say(said: str) -> None:
    """Print what a process with torch does."""
    marked = ""
    place = place_in_group()
    if place is not None:
        marked = f"[rank{place[0]}]: "  # as torch marks its traceback
    script = Path(sys.argv[0]).name
    print(f"{marked}batchtune: {script} {said}", file=sys.stderr, flush=True)


def _watch_steps(optimizers: ModuleType) -> None:
    """End a script that is measured and trains without a torch DataLoader, instead of training to its end."""
    if json.loads(os.environ[VARIABLE])["mode"] != "probe":
        return
    steps = itertools.count(1)

    def on_step(*_: Any) -> None:
        if not _uses_loader and next(steps) == _MOST_STEPS:
            say(f"{NO_LOADER} {_MOST_STEPS} optimizer steps")
            os._exit(1)

    optimizers.register_optimizer_step_post_hook(on_step)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules as Python would, and patches them after the import."""

    def find_spec(
        self, fullname: str, path: Any, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _PATCHES:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            _PATCHES[fullname](module)

        setattr(spec.loader, "exec_module", execute_and_patch)  # noqa: B010 - a method, for mypy
        return spec


def _patch(module: ModuleType) -> None:
    """Replace what iterating over a loader of this module gives."""
    loader_class = getattr(module, _LOADERS[module.__name__])
    options = json.loads(os.environ[VARIABLE])
    try:
        mode = importlib.import_module(_MODES[options["mode"]])
    except Exception as error:  # something that it needs is missing in this Python
        print(
            f"Warning: batchtune does not watch loaders here: {error}", file=sys.stderr
        )
        return
    begin = loader_class.__iter__

    @functools.wraps(begin)
    def iterate(loader: Any) -> Iterator[Any]:
        global _uses_loader
        import torch

        # Validation runs without gradients; and a loader may be used within a worker of another.
        is_training = torch.is_grad_enabled()
        if not is_training or torch.utils.data.get_worker_info() is not None:
            own: Iterator[Any] = begin(loader)
            return own
        atexit.unregister(_say_what_was_used)
        _uses_loader = True
        wrapped: Iterator[Any] = mode.wrap(loader, lambda: begin(loader), options)
        return wrapped

    loader_class.__iter__ = iterate
    if hasattr(mode, "length"):
        own_length = loader_class.__len__
        loader_class.__len__ = lambda loader: mode.length(loader, own_length, options)


_PATCHES: dict[str, Callable[[ModuleType], None]] = {
    **dict.fromkeys(_LOADERS, _patch),
    "torch.optim.optimizer": _watch_steps,
}
