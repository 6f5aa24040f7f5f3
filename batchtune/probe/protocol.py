"""What the supervisor and its worker process say to each other: one JSON document a line, over a socket."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from batchtune.results import Device

Stage = Literal["import", "device", "setup", "make_batch", "step"]


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag="setup"):
    """Build the workload.

    Attributes:
        limit_bytes: The limit to enforce; None: worked out from the cap and the fraction.
    """

    workload: str
    options: dict[str, Any]
    device: str
    memory_bytes: int | None
    memory_fraction: float
    limit_bytes: int | None
    seed: int


class Measure(msgspec.Struct, frozen=True, kw_only=True, tag="measure"):
    """Run one trial."""

    batch_size: int
    length: float
    target_length: float | None


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
        stage: Where `error` was raised; None where there is none.
        renew: The worker must be replaced: damaged (a sticky device error), or its memory is full of holes.
    """

    outcome: Literal["ok", "oom", "error"]
    steps: int
    step_seconds: float | None
    peak_bytes: int | None
    reserved_bytes: int | None
    alloc_retries: int | None
    error: str | None = None
    stage: Stage | None = None
    traceback: str | None = None
    renew: bool = False


Request = Setup | Measure
Reply = Ready | Failed | Measured

encode = msgspec.json.Encoder().encode
_requests: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
_replies: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)
decode_request = _requests.decode
decode_reply = _replies.decode
