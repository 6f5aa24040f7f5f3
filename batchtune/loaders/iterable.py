"""Any iterable of batches, measured as it is: a framework's own loader, a WebLoader, a generator function."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from batchtune.errors import LoaderError
from batchtune.loaders import torch_arguments
from batchtune.loaders.base import BatchFacts, LoaderKind, Machine, OpenLoader, Target
from batchtune.loaders.batches import facts_of, moved
from batchtune.results import Argument, Arguments, LoaderStage


class IterableLoader(OpenLoader):
    """An iterable of batches. If it is an iterator, which ends once, the target is called anew for each epoch."""

    kind: ClassVar[str | None] = "iterable"

    def __init__(self, target: Target, arguments: Arguments, made: Any) -> None:
        if not hasattr(made, "__iter__") or isinstance(made, (str, bytes)):
            raise LoaderError(
                f"the target returns an object of type {type(made).__name__}: neither a data set nor an iterable",
                "Return a data set, a dict of DataLoader arguments, a DataLoader, or any iterable of batches.",
            )
        self._target, self._arguments = target, arguments
        self._made, self._once = made, iter(made) is made if isinstance(made, Iterator) else False
        self._used = False
        self.delivered = 0

    def epoch(self) -> Iterator[Any]:
        """As the base class says."""
        if self._once and self._used:
            self._made = call(self._target, self._arguments)
        self._used, self.delivered = True, 0
        # An error's traceback keeps it: torch's would wait 5 s for its workers to end, where one has died.
        iterator = iter(self._made)
        for batch in iterator:
            ready = self._to_device(batch)
            del batch
            self.delivered += 1
            yield ready

    def _to_device(self, batch: Any) -> Any:
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
        count = self.delivered
        return f"raised after {count:,} {'batch' if count == 1 else 'batches'}"

    def stages(self, seconds: float) -> list[LoaderStage]:
        """As the base class says."""
        return self._stages_of(self._made, seconds)

    def _stages_of(self, loader: Any, seconds: float) -> list[LoaderStage]:
        from batchtune.loaders.stages import measure_stages

        return measure_stages(loader, {}, seconds, lambda batch: facts_of(batch).examples)

    def close(self) -> None:
        """As the base class says."""
        self._made = None


class IterableKind(LoaderKind):
    """Any iterable of batches. Swept are those arguments of torch's DataLoader that are parameters of the target."""

    name: ClassVar[str] = "iterable"
    START_AXES: ClassVar[tuple[str, ...]] = torch_arguments.START_AXES
    GIVEN: ClassVar[tuple[str, ...]] = tuple(torch_arguments.DEFAULTS)

    def axes(self, machine: Machine, takes: frozenset[str]) -> dict[str, Sequence[Argument]]:
        """As the base class says."""
        return {name: values for name, values in torch_arguments.axes(machine).items() if name in takes}

    def settings(self, axes: Mapping[str, Sequence[Argument]]) -> list[Arguments]:
        """As the base class says."""
        return torch_arguments.distinct(super().settings(axes))

    def workers(self, arguments: Arguments) -> int:
        """As the base class says."""
        return torch_arguments.workers(arguments)

    def batches_in_flight(self, arguments: Arguments) -> int:
        """As the base class says."""
        return torch_arguments.batches_in_flight(arguments)

    def recognises(self, target: Target) -> bool:
        """As the base class says."""
        return True

    def open(self, target: Target, arguments: Arguments) -> OpenLoader:
        """As the base class says."""
        return IterableLoader(target, arguments, call(target, arguments))


def call(target: Target, arguments: Arguments) -> Any:
    """Call the target with these arguments; where it needs one that is not set, with the default of torch."""
    try:
        parameters = inspect.signature(target.function).parameters.values()
    except (TypeError, ValueError):  # written in C
        return target.call(arguments)
    needed = {one.name for one in parameters if one.default is one.empty} - target.options.keys()
    defaults = {name: value for name, value in torch_arguments.DEFAULTS.items() if name in needed}
    return target.call({**defaults, **arguments})
