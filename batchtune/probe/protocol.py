"""The messages between the supervisor and its worker process."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from batchtune.processes.worker import Failed, Message
from batchtune.results import Device, ProbedWith, Trial
from batchtune.shapes import BatchShape

Stage = Literal["device", "import", "setup", "make_batch", "step"]


class Identify(Message, frozen=True):
    """Asks which device a name such as `auto` or `cuda:1` means, without using its memory (`Identified`)."""

    device: str


class Prepare(Message, frozen=True):
    """Asks to open the device, to limit its memory, and to build the workload on it (`Ready`)."""

    workload: str
    options: dict[str, Any]
    settings: ProbedWith
    limit_bytes: int | None  # to enforce; None: computed from the cap and the fraction
    examples: int  # of the data that training will sample


class Identified(Message, frozen=True):
    """The device that is meant."""

    id: str  # unique on this machine: `cpu`, or the UUID
    name: str  # for people
    shared: bool = False  # whether a probe may start while another one uses it; times are then unreliable


class Ready(Message, frozen=True):
    """The workload is built, on this device."""

    device: Device


class Run(Message, frozen=True):
    """Asks for a trial (several steps with one batch), or for a `single` step of a new batch, as in training.

    A single step has no warm-up, and keeps the allocator's cache unless `release` empties it first.
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
    renew: bool = False  # the worker must be replaced: damaged by a sticky device error, or its memory is full of holes


Reply = Identified | Ready | Ran | Failed

decode_request = msgspec.json.Decoder[Identify | Prepare | Run](
    Identify | Prepare | Run
).decode
