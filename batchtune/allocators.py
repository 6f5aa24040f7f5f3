"""torch's allocators of CUDA memory: what an environment asks for, what a process has, and how to ask for one.

`native` takes memory in segments of fixed size, `expandable` in segments that grow; any other is the name of torch's
backend, such as `cudaMallocAsync`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from batchtune.errors import UsageError

Choice = Literal["auto", "expandable", "native"]
Environment: TypeAlias = Mapping[str, str]
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
_CHOOSING = re.compile(r"\b(backend|expandable_segments)\s*:\s*(\w+)\s*,?")
_BY_SEGMENTS = {"True": EXPANDABLE, "False": NATIVE}
_SEGMENTS = {
    EXPANDABLE: "expandable_segments:True",
    NATIVE: "expandable_segments:False",
}
_WORDS = {
    EXPANDABLE: "with expandable segments",
    NATIVE: "without expandable segments",
}


def settings_in(environment: Environment) -> str:
    """Return the allocator's settings that torch reads in an environment; empty without any."""
    return next(filter(None, map(environment.get, VARIABLES)), "")


def asked_for(settings: str) -> str | None:
    """Return the allocator that such settings ask for; None if they leave it to torch."""
    chosen = dict(_CHOOSING.findall(settings))
    backend = chosen.get("backend", NATIVE)
    if backend != NATIVE:
        return str(backend)
    return _BY_SEGMENTS.get(chosen.get("expandable_segments", ""))


def other_settings(settings: str) -> str:
    """Return such settings without those that choose the allocator."""
    return _CHOOSING.sub("", settings).strip(" ,")


def variables_for(allocator: str, environment: Environment) -> dict[str, str]:
    """Return the variables with which a process gets an allocator, next to the other settings of its environment.

    Two variables with the same value: torch before 2.10 reads the old one, and 2.9 warns of it without the new one.
    """
    own = _SEGMENTS.get(allocator, f"backend:{allocator}")
    others = other_settings(settings_in(environment))
    value = ",".join(filter(None, [own, others]))
    return {_OLD: value, _NEW: value}


def setting_for(allocator: str, torch_version: str, environment: Environment) -> str:
    """Return the one setting, `NAME=VALUE`, that a person has to make in that environment."""
    name = _NEW
    version = tuple(map(int, re.findall(r"\d+", torch_version)[:2]))
    if version < _FIRST_WITH_NEW or any(map(environment.get, VARIABLES[:-1])):
        name = _OLD
    return f"{name}={variables_for(allocator, environment)[name]}"


def worker_variables(choice: Choice, environment: Environment) -> dict[str, str]:
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
        raise UsageError(
            f"--allocator {choice} contradicts your environment, which asks for {settings}",
            f"Unset {_NEW} and {_OLD}, in training too, or leave out --allocator, which then takes {users}.",
        )
    return {}


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
    return _WORDS.get(str(allocator), f"with the allocator {allocator}")
