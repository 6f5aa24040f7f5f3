"""A kind of data loader: which arguments it has, and how one is built from the user's code and measured."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from batchtune.results import Argument, Arguments, LoaderStage


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the loader of one rank may use, as the sweep knows it.

    Attributes:
        processors: Of this rank: those of the machine / ranks per node.
        accelerator: Whether batches go to a GPU.
    """

    processors: int
    accelerator: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The user's code, imported in the worker process, not yet called.

    Attributes:
        function: The class or function that `FILE.py:NAME` names.
        options: Of `--set`.
        takes: The names of the parameters of `function`; an argument among them is passed to it.
        seed: For all random numbers; passed as `seed` if the function takes it.
        device: Where batches are delivered to, `cpu` or `cuda:0`; passed as `device` likewise.
        config: The run's `sampler.yaml`; None without one.
    """

    function: Callable[..., Any]
    options: Mapping[str, Any]
    takes: frozenset[str]
    seed: int
    device: str
    config: str | None

    def call(self, arguments: Mapping[str, Argument] = {}) -> Any:
        """Call the function with the options, and with those of the arguments, `seed` and `device` that it takes."""
        offered = {"seed": self.seed, "device": self.device, **arguments}
        return self.function(
            **{name: value for name, value in offered.items() if name in self.takes} | dict(self.options)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFacts:
    """What a delivered batch is. None: it can't be told.

    Attributes:
        examples: Number of examples.
        length: Longest length, in the loader's unit (or the run's, where the lengths are known).
        total_length: Sum of the true lengths where they are known, else examples × length.
        size_bytes: Of all its tensors and arrays.
    """

    examples: int | None
    length: float | None
    total_length: float | None
    size_bytes: int


class OpenLoader(ABC):
    """A loader that was built, in the worker process.

    Attributes:
        kind: The kind that the target turned out to be when it was called; None: the one that opened it.
        exact: Whether `facts` gives true lengths in the unit of the run.
    """

    kind: ClassVar[str | None] = None
    exact = False

    @abstractmethod
    def epoch(self) -> Iterator[Any]:
        """Start an epoch and yield its batches, each ready on the device when it is yielded (`await`ed, if need be)."""

    @abstractmethod
    def facts(self, batch: Any) -> BatchFacts:
        """Describe a batch. Called after each batch: must be cheap, well under a millisecond."""

    def batches(self) -> int | None:
        """Return how many batches an epoch has; None if that is not known before."""
        return None

    def examples(self) -> int | None:
        """Return how many examples an epoch has; None if that is not known before."""
        return None

    def explain(self, error: BaseException) -> str | None:
        """Return what else can be said of an error that the last epoch raised: `item 17 of the dataset raises it`."""
        return None

    def emptiness(self) -> str | None:
        """Return why an epoch has no batch, as far as that can be told: `drop_last leaves all 3 examples out`."""
        return None

    def stages(self, seconds: float) -> list[LoaderStage]:
        """Measure the stages of making a batch apart, in this process, for about so many seconds; empty: it can't."""
        return []

    def close(self) -> None:
        """End all workers."""
        return


class LoaderKind(ABC):
    """One kind of loader.

    Attributes:
        START_AXES: The arguments that matter for the start of an epoch only.
        ARGUMENTS: Name → type of all that it can be swept by.
        WORKERS_AXIS: The number of workers, if there may be more of them than processors.
        GIVEN: Parameters that a function may have without a default: the kind gives them, besides what is swept.
    """

    name: ClassVar[str]
    GIVEN: ClassVar[tuple[str, ...]] = ()
    START_AXES: ClassVar[tuple[str, ...]] = ()
    WORKERS_AXIS: ClassVar[str | None] = None
    ARGUMENTS: ClassVar[Mapping[str, Any]] = {}

    @abstractmethod
    def axes(self, machine: Machine, takes: frozenset[str]) -> dict[str, Sequence[Argument]]:
        """Return the arguments that are swept, each with its values, the cheapest first; runs without the library.

        `takes` are the parameters of the user's function.
        """

    def settings(self, axes: Mapping[str, Sequence[Argument]]) -> list[Arguments]:
        """Return all settings that these values make, without those that are the same (no workers: no prefetching)."""
        return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]

    @abstractmethod
    def workers(self, arguments: Arguments) -> int:
        """Return how many processes or threads make batches beside the one that trains."""

    def batches_in_flight(self, arguments: Arguments) -> int:
        """Return how many batches may wait in shared memory at once; 0: none is there."""
        return 0

    def prefetched(self, arguments: Arguments) -> int:
        """Return how many batches of each worker may be ready before they are taken."""
        return max(1, self.batches_in_flight(arguments) // max(1, self.workers(arguments)))

    @abstractmethod
    def recognises(self, target: Target) -> bool:
        """Return whether this target is of this kind, before it is called."""

    @abstractmethod
    def open(self, target: Target, arguments: Arguments) -> OpenLoader:
        """Build the loader with these arguments; may import the library.

        Raises LoaderError for what can't be a loader; whatever the user's code raises is left as it is.
        """
