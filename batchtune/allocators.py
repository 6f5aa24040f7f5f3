"""torch's allocators of CUDA memory: what the environment asks for, what a process has, and how to ask for one.

`native` takes memory in segments of fixed size, `expandable` in segments that grow; any other is the name of torch's
backend, such as `cudaMallocAsync`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from batchtune.errors import UsageError

Choice = Literal["auto", "expandable", "native"]
NATIVE = "native"
EXPANDABLE = "expandable"
# In the order in which torch reads them from 2.10 on; the first that is set counts.
VARIABLES = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
)
_OLD, _, _NEW = VARIABLES
# torch 2.9 still looks for expandable segments in the old variable alone.
_FIRST_WITH_NEW = (2, 10)
_SEGMENTS = re.compile(r"\bexpandable_segments\s*:\s*(\w+)\s*,?")
_BACKEND = re.compile(r"\bbackend\s*:\s*(\w+)\s*,?")


def settings_in(environment: Mapping[str, str]) -> str:
    """Return the allocator's settings that torch reads in an environment; empty without any."""
    for name in VARIABLES:
        if environment.get(name):
            return environment[name]
    return ""


def asked_for(settings: str) -> str | None:
    """Return the allocator that such settings ask for; None if they leave it to torch."""
    backends = _BACKEND.findall(settings)
    if backends and backends[-1] != NATIVE:
        return str(backends[-1])
    segments = _SEGMENTS.findall(settings)
    if not segments:
        return None
    return EXPANDABLE if segments[-1] == "True" else NATIVE


def other_settings(settings: str) -> str:
    """Return such settings without those that choose the allocator."""
    return _BACKEND.sub("", _SEGMENTS.sub("", settings)).strip(" ,")


def variables_for(allocator: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which a process gets an allocator, next to the other settings of its environment.

    Two variables with the same value: torch before 2.10 reads the old one, and 2.9 warns of it without the new one.
    """
    value = _value_for(allocator, other_settings(settings_in(environment)))
    return {_OLD: value, _NEW: value}


def _value_for(allocator: str, others: str) -> str:
    own = f"backend:{allocator}"
    if allocator in (NATIVE, EXPANDABLE):
        own = f"expandable_segments:{allocator == EXPANDABLE}"
    return f"{own},{others}" if others else own


def worker_variables(choice: Choice, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a process that measures, for a value of --allocator.

    `auto` leaves the choice to the user's own variable, and takes expandable segments if that leaves it open.
    Raises UsageError if the variable contradicts another choice.
    """
    settings = settings_in(environment)
    users = asked_for(settings)
    if users is None:
        allocator = EXPANDABLE if choice == "auto" else choice
        return variables_for(allocator, environment)
    if choice not in ("auto", users):
        name = next(name for name in VARIABLES if environment.get(name))
        raise UsageError(
            f"--allocator {choice} contradicts {name}={settings}",
            f"Unset the variable, here and in training, or leave out --allocator, which then takes {users}.",
        )
    return {}


def automatic(settings: str, works: bool) -> str:
    """Return the allocator that `auto` leads to, by the user's settings and whether expandable segments work."""
    allocator = asked_for(settings) or EXPANDABLE
    return NATIVE if allocator == EXPANDABLE and not works else allocator


def setting_for(allocator: str | None, torch_version: str, others: str = "") -> str:
    """Return the setting with which training gets an allocator, `NAME=VALUE`; empty for torch's default.

    `others` are the user's own settings for the allocator, which the variable has to hold, too.
    """
    if allocator in (None, NATIVE):
        return ""
    return f"{_variable_of(torch_version)}={_value_for(str(allocator), others)}"


def needed_setting(
    allocator: str, torch_version: str, environment: Mapping[str, str]
) -> str:
    """Return the setting, `NAME=VALUE`, with which a process of that environment gets an allocator."""
    names = [name for name in VARIABLES if environment.get(name)]
    name = (names or [_variable_of(torch_version)])[0]
    return f"{name}={variables_for(allocator, environment)[_NEW]}"


def _variable_of(torch_version: str) -> str:
    """Return the variable that a version of torch reads without a warning, or else the one that it reads."""
    version = tuple(map(int, re.findall(r"\d+", torch_version)[:2]))
    return _OLD if version < _FIRST_WITH_NEW else _NEW


def in_force(cuda: Any) -> str | None:
    """Return the allocator that this process has, by `torch.cuda`; None before it has allocated anything.

    By its segments, not by its settings: torch may ignore these.
    """
    backend = str(cuda.get_allocator_backend())
    if backend != NATIVE:
        return backend
    segments = cuda.memory_snapshot()
    if not segments:
        return None
    if any(segment["is_expandable"] for segment in segments):
        return EXPANDABLE
    return NATIVE


def in_words(allocator: str | None) -> str:
    """Return `with expandable segments`, `without expandable segments`, or `with the allocator cudaMallocAsync`."""
    if allocator == NATIVE:
        return "without expandable segments"
    if allocator == EXPANDABLE:
        return "with expandable segments"
    return f"with the allocator {allocator}"
