"""The messages between the supervisor and its worker process."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from batchtune.processes.worker import Message
from batchtune.results import Device, ProbedWith, Trial
from batchtune.shapes import BatchShape

Stage = Literal["import", "device", "setup", "make_batch", "step"]


class Prepare(Message, frozen=True):
    """Asks for what comes before any trial.

    Up to `device`: name it, without using its memory (`Identified`); `import`: import the workload and check its
    options, without using the device; `setup`: build it (`Ready`, both).
    """

    workload: str
    options: dict[str, Any]
    settings: ProbedWith
    limit_bytes: int | None  # to enforce; None: worked out from the cap and the fraction
    up_to: Literal["device", "import", "setup"]


class Identified(Message, frozen=True):
    """The device that a name such as `auto` or `cuda:1` stands for here."""

    id: str  # tells it from all others of this machine: `cpu`, or the UUID
    name: str  # for people
    shared: bool = False  # whether a probe may start while another one uses it; times then can't be trusted


class Ready(Message, frozen=True):
    """The workload can be imported, and is built if a device is given."""

    device: Device | None = None


class Run(Message, frozen=True):
    """Asks for a trial: several steps with one batch.

    Or for a `single` step of a new batch, as in training: no warm-up, the allocator's cache kept, or emptied before
    if `release`.
    """

    shape: BatchShape
    single: bool = False
    release: bool = False


class Ran(Message, frozen=True):
    """A trial, or a single step as a trial of one."""

    trial: Trial  # the supervisor fills in its index, worker and wall time
    stage: Stage | None = None  # where the error was raised
    traceback: str | None = None  # the last lines of the workload's own frames
    hint: str | None = None  # how to fix the error
    renew: bool = False  # the worker must be replaced: damaged (a sticky device error), or its memory is full of holes


class Failed(Message, frozen=True):
    """The workload can't be built or run: its own error."""

    stage: Stage
    message: str
    hint: str | None = None
    traceback: str | None = None
    out_of_memory: bool = False


Request = Prepare | Run
Reply = Identified | Ready | Ran | Failed

decode_request = msgspec.json.Decoder[Request](Request).decode
