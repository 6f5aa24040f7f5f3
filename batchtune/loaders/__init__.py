"""Measures data loaders, each setting in a fresh process. Each kind is a `LoaderKind`, with its line in `_KINDS`.

A kind says which arguments its loaders have, and how one is built from the user's code and measured.
"""

from __future__ import annotations

import importlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from batchtune.errors import ResultError, shortened
from batchtune.results import (
    Argument,
    Arguments,
    LoaderTuning,
    read_result,
)

if TYPE_CHECKING:
    from batchtune.loaders.worker import BatchFacts

SweptArguments = Mapping[str, Sequence[Argument]]
"""Arguments that are swept, each with its values, the cheapest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The user's code, imported in the worker process, not yet called.

    Attributes:
        function: The class or function that `FILE.py:NAME` names.
        options: From `--set`.
        takes: The names of its parameters; an argument among them is passed to it. `needs`: those without a default.
        seed: For all random numbers; passed as `seed` if the function takes it.
        device: Where batches are delivered to, `cpu` or `cuda:0`; passed as `device` likewise.
        config: The run's `sampler.yaml`, if it has one.
    """

    function: Callable[..., Any]
    options: Mapping[str, Any]
    takes: frozenset[str]
    needs: frozenset[str] = frozenset()
    seed: int
    device: str
    config: str | None

    def call(self, arguments: Mapping[str, Argument]) -> Any:
        """Call the function with the options, and with those of the arguments, `seed` and `device` that it takes."""
        offered = {"seed": self.seed, "device": self.device, **arguments}
        taken = {name: value for name, value in offered.items() if name in self.takes}
        return self.function(**taken | dict(self.options))


class OpenLoader(ABC):
    """A loader that was built, in the worker process.

    Attributes:
        kind: The kind that the target turned out to be when it was called.
        exact: Whether `facts` gives true lengths, in the unit of the run.
        dealt: Whether this process deals the examples to workers; else each worker has to take its own part.
    """

    kind: ClassVar[str]
    exact = False
    dealt = False

    @abstractmethod
    def epoch(self) -> Generator[Any, None, None]:
        """Start an epoch and yield its batches, each ready on the device when it is yielded (`await`ed, if need be)."""

    @abstractmethod
    def facts(self, batch: Any) -> BatchFacts:
        """Describe a batch. Called after each batch: must be cheap, well under a millisecond."""

    def batches(self) -> int | None:
        """Return how many batches an epoch has, if that is known before."""
        return None


class LoaderKind(ABC):
    """One kind of loader.

    Attributes:
        GIVEN: Parameters that a function may have without a default: the kind gives them, in addition to what is swept.
        IS_DATALOADER: Whether its arguments are those of torch's DataLoader.
        ARGUMENTS: Name → type of all that it can be swept by.
        WORKERS: The argument that is the number of processes or threads that make batches.
        WORKERS_ARE: The kind's word for the processes or threads that make batches, in the plural.
        SPLIT: How the user's code lets each of them take its own part of the data.
    """

    GIVEN: ClassVar[tuple[str, ...]] = ()
    IS_DATALOADER: ClassVar[bool] = False
    ARGUMENTS: ClassVar[Mapping[str, Any]] = {}
    WORKERS: ClassVar[str]
    WORKERS_ARE: ClassVar[str] = "workers"
    SPLIT: ClassVar[str] = "Split the data set by torch.utils.data.get_worker_info()."

    @abstractmethod
    def axes(
        self, processors: int, *, accelerator: bool, takes: frozenset[str]
    ) -> SweptArguments:
        """Return what is swept unless the user says otherwise; runs without the library.

        `processors` are those of one rank; `accelerator` is whether batches go to a GPU; `takes` are the parameters of
        the user's function.
        """

    def settings(self, axes: SweptArguments) -> list[Arguments]:
        """Return all different settings that these values make."""
        settings = []
        for values in itertools.product(*axes.values()):
            arguments = self.simplified(dict(zip(axes, values, strict=True)))
            if arguments not in settings:
                settings.append(arguments)
        return settings

    def simplified(self, arguments: Arguments) -> Arguments:
        """Return the simplest arguments that mean the same: without workers, nothing is prefetched."""
        return arguments

    def workers(self, arguments: Arguments) -> int:
        """Return how many processes or threads make batches, without the one that trains."""
        number = arguments.get(self.WORKERS)
        return number if isinstance(number, int) else 0

    @abstractmethod
    def recognises(self, target: Target) -> bool:
        """Return whether this target is of this kind, before it is called."""

    @abstractmethod
    def open(self, target: Target, arguments: Arguments) -> OpenLoader:
        """Build the loader with these arguments; may import the library.

        Raises LoaderError for what can't be a loader; lets pass whatever the user's code raises.
        """


# A target is offered to them in this order.
_KINDS = {
    "dali": "batchtune.loaders.dali:DaliKind",
    "torch": "batchtune.loaders.dataloader:TorchKind",
    "iterable": "batchtune.loaders.dataloader:IterableKind",
}
KINDS = tuple(_KINDS)


def kind_of(name: str) -> LoaderKind:
    """Return a kind of loader by its name; imports its module, but not its library."""
    module, _, member = _KINDS[name].partition(":")
    kind: LoaderKind = getattr(importlib.import_module(module), member)()
    return kind


def read_tuning(path: Path) -> LoaderTuning:
    """Read `loader.json`, and check its arguments by the kind of the loader.

    Raises:
        ResultError: As `read_result`; or the kind is unknown, or an argument can't have its value.
    """
    tuning = read_result(path, LoaderTuning)
    for problem in _problems(tuning):
        raise ResultError(
            f"{path} is edited or damaged: {problem}",
            "Run `batchtune tune-loader` again.",
        )
    return tuning


def _problems(tuning: LoaderTuning) -> Iterator[str]:
    if tuning.kind not in KINDS:
        yield f"kind is {shortened(tuning.kind)}, but must be {', '.join(KINDS)}"
        return
    types = kind_of(tuning.kind).ARGUMENTS
    for index, row in enumerate(tuning.rows):
        for name, value in row.arguments.items():
            try:
                msgspec.convert(value, types.get(name, Any))
            except msgspec.ValidationError as error:
                yield f"rows, entry {index}: arguments: {name}: {error}"
