"""Any iterable of batches, measured as it is: a framework's own loader, a WebLoader, a generator function.

It is swept by those arguments of torch's DataLoader that its function takes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any, ClassVar

from batchtune.errors import LoaderError
from batchtune.loaders.base import BatchFacts, LoaderKind, Machine, OpenLoader, Target
from batchtune.loaders.batches import facts_of, moved
from batchtune.results import Argument, Arguments, LoaderStage
from batchtune.units import format_number

# Defaults of torch's DataLoader; `multiprocessing_context=None` is Python's own default.
DEFAULTS: Arguments = {
    "num_workers": 0,
    "prefetch_factor": None,
    "in_order": True,
    "pin_memory": False,
    "persistent_workers": False,
    "multiprocessing_context": None,
}
_IN_ORDER_SINCE = (2, 6)


class IterableLoader(OpenLoader):
    """An iterable of batches. If it is an iterator, which ends once, the target is called again for each epoch."""

    kind: ClassVar[str] = "iterable"

    def __init__(self, target: Target, arguments: Arguments, made: Any) -> None:
        if not hasattr(made, "__iter__") or isinstance(made, (str, bytes)):
            raise LoaderError(
                f"the target returns an object of type {type(made).__name__}: neither a data set nor an iterable",
                "Return a data set, a dict of DataLoader arguments, a DataLoader, or any iterable of batches.",
            )
        self._target = target
        self._arguments = arguments
        self._made = made
        self._once = isinstance(made, Iterator) and iter(made) is made
        self._used = False
        self._delivered = 0

    def epoch(self) -> Iterator[Any]:
        """As the base class says."""
        if self._once and self._used:
            self._made = call(self._target, self._arguments)
        self._used = True
        self._delivered = 0
        iterator = iter(self._made)  # a variable, so that the traceback of an error keeps it
        for batch in iterator:
            ready = self._on_device(batch)
            del batch
            self._delivered += 1
            yield ready

    def _on_device(self, batch: Any) -> Any:
        """Return the batch on the device, ready; on the CPU it is left as it is."""
        if self._target.device == "cpu":
            return batch
        import torch

        batch = moved(batch, self._target.device, non_blocking=bool(self._arguments.get("pin_memory")))
        torch.cuda.synchronize(self._target.device)
        return batch

    def facts(self, batch: Any) -> BatchFacts:
        """As the base class says."""
        return facts_of(batch)

    def batches(self) -> int | None:
        """As the base class says."""
        try:
            return len(self._made)
        except Exception:  # not known; a data set's own __len__ may raise anything
            return None

    def explain(self, error: BaseException) -> str | None:
        """As the base class says."""
        return f"after {format_number(self._delivered)} batch{'' if self._delivered == 1 else 'es'}"

    def stages(self, seconds: float) -> list[LoaderStage]:
        """As the base class says."""
        from batchtune.loaders.stages import measure_stages

        return measure_stages(self._made, seconds)

    def close(self) -> None:
        """As the base class says."""
        self._made = None


class IterableKind(LoaderKind):
    """Any iterable of batches."""

    name: ClassVar[str] = "iterable"
    GIVEN: ClassVar[tuple[str, ...]] = tuple(DEFAULTS)
    START_AXES: ClassVar[tuple[str, ...]] = ("persistent_workers", "multiprocessing_context")
    WORKERS: ClassVar[str] = "num_workers"
    QUEUE: ClassVar[str] = "prefetch_factor"
    IN_SHARED_MEMORY: ClassVar[bool] = True

    def axes(self, machine: Machine, takes: frozenset[str]) -> dict[str, Sequence[Argument]]:
        """As the base class says."""
        return {name: values for name, values in torch_axes(machine).items() if name in takes}

    def simplified(self, arguments: Arguments) -> Arguments:
        """As the base class says. A single worker keeps the order; without `num_workers`, all settings may differ."""
        if "num_workers" not in arguments:
            return arguments
        if not self.workers(arguments):
            alone = {**DEFAULTS, "pin_memory": arguments.get("pin_memory")}
            return {name: alone.get(name, value) for name, value in arguments.items()}
        if self.workers(arguments) == 1 and "in_order" in arguments:
            return {**arguments, "in_order": True}
        return arguments

    def recognises(self, target: Target) -> bool:
        """As the base class says."""
        return True

    def open(self, target: Target, arguments: Arguments) -> OpenLoader:
        """As the base class says."""
        return IterableLoader(target, arguments, call(target, arguments))


def torch_axes(machine: Machine) -> dict[str, Sequence[Argument]]:
    """Return the arguments of torch's DataLoader that are swept, each with its values, the cheapest first."""
    workers = {0, machine.processors, *(1 << power for power in range(machine.processors.bit_length()))}
    axes: dict[str, Sequence[Argument]] = {"num_workers": sorted(workers), "prefetch_factor": [2, 4]}
    with contextlib.suppress(metadata.PackageNotFoundError, ValueError):  # without importing torch
        if tuple(map(int, metadata.version("torch").split(".")[:2])) >= _IN_ORDER_SINCE:
            axes["in_order"] = [True, False]
    if machine.accelerator:
        axes["pin_memory"] = [False, True]
    axes["persistent_workers"] = [False, True]
    axes["multiprocessing_context"] = ["fork", "spawn", "forkserver"]
    return axes


def call(target: Target, arguments: Arguments) -> Any:
    """Call the target with these arguments; where it needs one that is not set, with the default of torch."""
    defaults = {name: value for name, value in DEFAULTS.items() if name in target.needs}
    return target.call({**defaults, **arguments})
