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
DEVICE_FORMS = "auto, cpu, cuda or cuda:N"
"""The forms of a `--device` value."""


def is_device(name: str) -> bool:
    """Return whether `--device` takes this, on some machine."""
    return re.fullmatch(r"auto|cpu|cuda(:\d+)?", name) is not None


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
