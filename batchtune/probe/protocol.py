"""What the supervisor and its worker process say to each other: one JSON document a line, over a socket."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from batchtune.results import Device, Outcome

Stage = Literal["import", "device", "setup", "make_batch", "step"]


class Identify(msgspec.Struct, frozen=True, kw_only=True, tag="identify"):
    """Say which device is meant, without using its memory."""

    device: str


class Identified(msgspec.Struct, frozen=True, kw_only=True, tag="identified"):
    """The device that a name such as `auto` or `cuda:1` stands for here.

    Attributes:
        id: What tells it from all others of this machine: `cpu`, or the UUID.
        name: Its name, for people.
    """

    id: str
    name: str


class Load(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """Import the workload and check its options, without using the device."""

    workload: str
    options: dict[str, Any]


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag="loaded"):
    """The workload can be imported."""


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag="setup"):
    """Build the workload.

    Attributes:
        limit_bytes: The limit to enforce; None: worked out from the cap and the fraction.
        reserve_bytes: Memory to keep free besides.
        ddp: Whether to keep one copy of the gradients free besides, for the buckets of DistributedDataParallel.
    """

    workload: str
    options: dict[str, Any]
    device: str
    memory_bytes: int | None
    memory_fraction: float
    limit_bytes: int | None
    seed: int
    reserve_bytes: int = 0
    ddp: bool = False


class Measure(msgspec.Struct, frozen=True, kw_only=True, tag="measure"):
    """Run one trial."""

    batch_size: int
    length: float
    target_length: float | None


class Step(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """Make one batch and run one training step, as training would: no warm-up, the allocator's cache kept.

    Attributes:
        release: Whether to empty the allocator's cache before.
    """

    batch_size: int
    length: float
    target_length: float | None
    release: bool = False


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The workload is built.

    Attributes:
        base_bytes: Memory in use before any batch.
    """

    device: Device
    base_bytes: int | None


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The workload can't be built or run: its own error."""

    stage: Stage
    message: str
    hint: str | None = None
    traceback: str | None = None
    out_of_memory: bool = False


class Measured(msgspec.Struct, frozen=True, kw_only=True, tag="measured"):
    """What a trial showed.

    Attributes:
        step_seconds_spread: Interquartile range of the measured steps; None for fewer than two.
        steady_peak_bytes, peak_spread_bytes: As in `Trial`.
        mean_step_seconds: Mean of the measured steps.
        rest_bytes: In use after the trial, when its batch was freed.
        outside_bytes: Memory of the device that this process holds outside torch's allocator; None where unknown.
        sm_clock_mhz, throttle_reasons: While the steps were timed; None where the device can't tell.
        failed_peak_bytes, caught, other_processors: As in `Trial`.
        hint: What to do about `error`; None where there is nothing to add.
        stage: Where `error` was raised; None where there is none.
        renew: The worker must be replaced: damaged (a sticky device error), or its memory is full of holes.
    """

    outcome: Literal["ok", "oom", "error"]
    steps: int
    step_seconds: float | None
    step_seconds_spread: float | None = None
    steady_peak_bytes: int | None = None
    peak_spread_bytes: int | None = None
    mean_step_seconds: float | None = None
    rest_bytes: int | None = None
    outside_bytes: int | None = None
    sm_clock_mhz: int | None = None
    throttle_reasons: list[str] | None = None
    failed_peak_bytes: int | None = None
    caught: bool = False
    other_processors: float | None = None
    peak_bytes: int | None
    reserved_bytes: int | None
    alloc_retries: int | None
    error: str | None = None
    hint: str | None = None
    stage: Stage | None = None
    traceback: str | None = None
    renew: bool = False


class Stepped(msgspec.Struct, frozen=True, kw_only=True, tag="stepped"):
    """What one step showed. The supervisor makes one itself where the worker died (`crash`, `oom`) or hung.

    Attributes:
        step_seconds: Of forward, backward and optimizer step, device-synchronised; the batch's making is not in it.
        alloc_retries: How often the allocator emptied its cache during this step.
        rest_bytes: In use afterwards, when the batch was freed.
        caught: As in `Trial`.
    """

    outcome: Outcome
    step_seconds: float | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    rest_bytes: int | None = None
    alloc_retries: int | None = None
    error: str | None = None
    stage: Stage | None = None
    traceback: str | None = None
    caught: bool = False
    renew: bool = False


Request = Identify | Load | Setup | Measure | Step
Reply = Identified | Loaded | Ready | Failed | Measured | Stepped

encode = msgspec.json.Encoder().encode
_requests: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
_replies: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)
decode_request = _requests.decode
decode_reply = _replies.decode
