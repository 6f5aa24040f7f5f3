"""The kinds of devices that can be probed: one module each, registered here. Importing this imports none of them."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchtune.probe.devices.base import DeviceBackend

# The `--device` name and its class, imported when needed. `auto` takes the first that is available.
_KINDS = {
    "cuda": "batchtune.probe.devices.cuda:CudaBackend",
    "cpu": "batchtune.probe.devices.cpu:CpuBackend",
}
_NUMBERED = ["cuda"]  # a machine may have several
_FORMS = sorted([*_KINDS, *(f"{kind}:N" for kind in _NUMBERED)])

DEVICE_FORMS = f"auto, {', '.join(_FORMS[:-1])} or {_FORMS[-1]}"
"""`auto, cpu, cuda or cuda:N`."""


def is_device(name: str) -> bool:
    """Return whether `--device` takes this, on some machine."""
    kind, colon, number = name.partition(":")
    if colon:
        return kind in _NUMBERED and re.fullmatch(r"\d+", number) is not None
    return kind == "auto" or kind in _KINDS


def device_names() -> list[str]:
    """Return the completions of `--device`; finding out which devices exist would take too long."""
    names = ["auto", *sorted(_KINDS)]
    for kind in _NUMBERED:
        names += [f"{kind}:{number}" for number in range(4)]
    return names


def backends() -> Iterator[DeviceBackend]:
    """Yield all backends, in the order in which `auto` prefers them."""
    return map(_backend, _KINDS)


def backend_for(device: str) -> DeviceBackend:
    """Return the backend of a valid `--device` value; `auto` may import torch to find it."""
    if device == "auto":
        return next(backend for backend in backends() if backend.is_available())
    return _backend(device.partition(":")[0])


def describe_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that affect a step's memory or time, if they are set."""
    names = ["PYTORCH_ALLOC_CONF"]
    for backend in backends():
        names += backend.VARIABLES
    return {name: environment[name] for name in names if environment.get(name)}


@cache
def _backend(kind: str) -> DeviceBackend:
    module, _, name = _KINDS[kind].partition(":")
    backend: DeviceBackend = getattr(importlib.import_module(module), name)()
    return backend
