"""The messages between `LoaderRunner` and its worker process."""

from __future__ import annotations

from typing import Any

import msgspec

from batchtune.processes.worker import Message
from batchtune.results import Arguments, LoaderOutcome, LoaderStage


class Open(Message, frozen=True):
    """Asks to import the user's code and to build the loader.

    Attributes:
        spec, options: The target and its `--set` options.
        kind: As the user named it; None: recognised.
        processors: The processors that the process and all that it starts may use.
        device: `auto`, `cpu` or `cuda:N`.
        inspect: Whether only those of the arguments count that the user's function takes.
        config: Path of the run's `sampler.yaml`; None without one.
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
    """The loader is built; None: not known.

    Attributes:
        pid: The worker process.
        takes: The parameters of the user's function.
        device: That batches go to, `cpu` or `cuda:N`; device_name: as a person knows it.
        exact: Whether the lengths of batches are true ones in the unit of the run.
        warnings: What the code warned of, each once.
    """

    pid: int
    kind: str
    takes: list[str]
    device: str
    device_name: str
    batches: int | None
    examples: int | None
    exact: bool = False
    warnings: list[str] = msgspec.field(default_factory=list)


class Take(Message, frozen=True):
    """Asks for an epoch, or its first part: it ends after so many batches or seconds, whichever comes first.

    Attributes:
        steps: How long the consumer is busy with each batch in turn, from the start again after the last; None: it
            takes batches as fast as they come.
        digests: Whether to hash each batch.
    """

    batches: int | None
    seconds: float
    steps: list[float] | None = None
    digests: bool = False


class Taken(Message, frozen=True):
    """What an epoch, or its first part, delivered; lists have one entry for each batch.

    Attributes:
        complete: Whether the epoch came to its end.
        seconds: From its start to its end, the workers of the next epoch not counted.
        waits: Seconds for each batch, the first from the start of the epoch.
        steps: Seconds that the consumer then took.
        examples, lengths, total_lengths: As in `BatchFacts`; None where it can't be told.
        bytes: Of the largest batch.
        cpu_seconds: Of the process and all that it started.
        words: What the first batch is; None without one.
        digests: Of each batch, name → hash.
    """

    complete: bool
    seconds: float
    waits: list[float]
    steps: list[float]
    examples: list[int | None]
    lengths: list[float | None]
    total_lengths: list[float | None]
    bytes: int
    cpu_seconds: float
    words: str | None
    digests: list[dict[str, str]] = msgspec.field(default_factory=list)


class Split(Message, frozen=True):
    """Asks for the time of each stage, measured for about so many seconds."""

    seconds: float


class Stages(Message, frozen=True):
    """The stages, in their order; empty where they can't be told apart."""

    stages: list[LoaderStage]


class Failed(Message, frozen=True):
    """The user's code, or the loader, raised an error.

    Attributes:
        outcome: `error`, `oom`, `shared_memory`, `crash` (a worker of the loader died) or `timeout`.
        traceback: The last lines of the user's own frames.
        fatal: Whether other settings would fail alike: the target can't be imported or is no loader.
    """

    outcome: LoaderOutcome
    message: str
    hint: str | None = None
    traceback: str | None = None
    fatal: bool = False


Request = Open | Take | Split
Reply = Opened | Taken | Stages | Failed

decode_request = msgspec.json.Decoder[Request](Request).decode
