"""The messages between `LoaderRunner` and its worker process."""

from __future__ import annotations

from typing import Any

import msgspec

from batchtune.processes.worker import Failed, Message
from batchtune.results import Arguments


class Open(Message, frozen=True):
    """A request to import the user's code and to build the loader.

    Attributes:
        kind: As the user named it; None: recognised.
        processors: The processors that the process and all that it starts may use.
        device: `auto`, `cpu` or `cuda:N`.
        inspect: Whether to drop arguments that the user's function does not take.
        config: Path of the run's `sampler.yaml`, if it has one.
    """

    spec: str
    options: dict[str, Any]
    kind: str | None
    arguments: Arguments
    processors: list[int]
    device: str
    seed: int
    inspect: bool = False
    config: str | None = None


class Opened(Message, frozen=True):
    """The loader that was built.

    Attributes:
        takes: The parameters of the user's function.
        device: That batches go to, `cpu` or `cuda:N`; device_name: as a person knows it.
        batches: Of an epoch; None: unknown.
        exact, dealt: As in `OpenLoader`.
    """

    pid: int
    kind: str
    takes: list[str]
    device: str
    device_name: str
    batches: int | None
    exact: bool = False
    dealt: bool = False


class Take(Message, frozen=True):
    """A request for an epoch, or its first part.

    Attributes:
        seconds: It ends so long after its first batch, or
        batches: with so many, whichever comes first.
        steps: How long the consumer is busy with each batch in turn, from the start again after the last; None: it
            takes batches as fast as they come.
        digests: Whether to hash each batch.
    """

    seconds: float
    batches: int | None = None
    steps: list[float] | None = None
    digests: bool = False


class BatchFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A delivered batch; None: unknown.

    Attributes:
        total_length: Sum of the true lengths where they are known, else of the padded ones, in the loader's unit.
        size_bytes: Of all its tensors and arrays.
        length: Longest true length, in the run's unit.
    """

    examples: int | None
    total_length: float | None
    size_bytes: int
    length: float | None = None


class Taken(Message, frozen=True):
    """A delivered epoch, or its first part; lists have one entry for each batch.

    Attributes:
        complete: Whether the epoch came to its end.
        waits: Seconds for each batch, the first from the start of the epoch.
        steps: Seconds that the consumer then took.
        cpu_seconds: Of the process and all that it started.
        words: The shape of the first batch, in words.
        digests: Of each batch, name → hash.
    """

    complete: bool = False
    waits: list[float] = msgspec.field(default_factory=list)
    steps: list[float] = msgspec.field(default_factory=list)
    batches: list[BatchFacts] = msgspec.field(default_factory=list)
    cpu_seconds: float = 0.0
    words: str | None = None
    digests: list[dict[str, str]] = msgspec.field(default_factory=list)

    @property
    def seconds(self) -> float:
        """From its start to its end, without starting the workers of the next epoch."""
        return sum(self.waits) + sum(self.steps)


LoaderRequest = Open | Take
LoaderReply = Opened | Taken | Failed
