"""The arguments of torch's DataLoader that are swept, and which settings of them are the same."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from importlib import metadata

from batchtune.loaders.base import Machine
from batchtune.results import Argument, Arguments

WORKERS_AXIS = "num_workers"
START_AXES = ("persistent_workers", "multiprocessing_context")
# Those of torch; `multiprocessing_context=None` is Python's own default.
DEFAULTS: Arguments = {
    "num_workers": 0,
    "prefetch_factor": None,
    "in_order": True,
    "pin_memory": False,
    "persistent_workers": False,
    "multiprocessing_context": None,
}
# What an argument must be without workers.
_WITHOUT_WORKERS: Arguments = {name: value for name, value in DEFAULTS.items() if name != "pin_memory"}
# If `prefetch_factor` is None and there are workers.
_PREFETCHED = 2
_IN_ORDER_SINCE = (2, 6)


def axes(machine: Machine) -> dict[str, Sequence[Argument]]:
    """Return the arguments and their values, the cheapest first."""
    workers = {0, machine.processors, *(1 << power for power in range(machine.processors.bit_length()))}
    found: dict[str, Sequence[Argument]] = {"num_workers": sorted(workers), "prefetch_factor": [2, 4]}
    if _torch_version() >= _IN_ORDER_SINCE:
        found["in_order"] = [True, False]
    if machine.accelerator:
        found["pin_memory"] = [False, True]
    return found | {"persistent_workers": [False, True], "multiprocessing_context": ["fork", "spawn", "forkserver"]}


def distinct(settings: Sequence[Arguments]) -> list[Arguments]:
    """Return the settings without those that are the same, each by its one name.

    Without workers nothing is prefetched, and a single worker keeps the order. Where `num_workers` is not among the
    arguments, all may differ.
    """
    named = [_by_one_name(one) if "num_workers" in one else one for one in settings]
    return [one for number, one in enumerate(named) if one not in named[:number]]


def workers(arguments: Arguments) -> int:
    """Return how many worker processes a DataLoader with these arguments has."""
    number = arguments.get("num_workers")
    return number if isinstance(number, int) else 0


def batches_in_flight(arguments: Arguments) -> int:
    """Return how many batches its workers may have made before they are taken."""
    factor = arguments.get("prefetch_factor")
    return workers(arguments) * (factor if isinstance(factor, int) else _PREFETCHED)


def _by_one_name(arguments: Arguments) -> Arguments:
    if workers(arguments) == 0:
        return {name: _WITHOUT_WORKERS.get(name, value) for name, value in arguments.items()} | {"num_workers": 0}
    if workers(arguments) == 1 and "in_order" in arguments:
        return {**arguments, "in_order": True}
    return arguments


def _torch_version() -> tuple[int, ...]:
    """Return the version of torch without importing it; that of none is ()."""
    with contextlib.suppress(metadata.PackageNotFoundError, ValueError):
        return tuple(map(int, metadata.version("torch").split(".")[:2]))
    return ()
