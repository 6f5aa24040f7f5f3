"""The messages between a probe's supervisor and its worker, the program and the base class that answer them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from batchtune.allocators import Choice, worker_variables
from batchtune.errors import ProbeError
from batchtune.lengths import RowLength
from batchtune.probe.devices import DeviceIdentity, backends
from batchtune.processes.worker import Failed, Introduction, Message
from batchtune.results import BatchShape, Device, ProbedWith, Trial

# A script that is probed logs to no tracker; and Arrow allocates as everything else does (its own pool holds 1 GiB).
_NOTHING_SENT = {
    "WANDB_MODE": "disabled",
    "COMET_START_MODE": "disabled",
    "NEPTUNE_MODE": "offline",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "disabled",
    "MLFLOW_TRACKING_URI": "file:mlruns",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}

TEMPORARY = "tmp"
"""The folder for a script's temporary files within its scratch folder, the same in all of its starts."""

Stage = Literal["device", "import", "setup", "make_batch", "step"]


class Identify(Message, frozen=True):
    """Asks which device a name such as `auto` or `cuda:1` means, without using its memory (`Identified`)."""

    device: str


class Prepare(Message, frozen=True):
    """Asks to open the device, to limit its memory, and to build the workload on it (`Ready`).

    Ranks then run a step of `first_shape`, and have `timeout_seconds` for all of it.
    """

    workload: str
    options: dict[str, Any]
    settings: ProbedWith
    limit_bytes: int | None  # to enforce; None: computed from the cap and the fraction
    examples: int  # of the data that training will sample
    script: ScriptRequest | None = None
    first_shape: BatchShape | None = None
    timeout_seconds: float = 0.0
    launch: Launch | None = None  # of node 0, where there are several


class ScriptRequest(Message, frozen=True):
    """A training script to run unchanged, and the data that it is tuned for.

    Attributes:
        scratch: Folder for what it writes.
        unprotected: Whether it may write to the user's files.
        lengths: Of the manifest, in ascending order, or as many of them as tell its unit.
        targets: Target lengths, likewise; None without targets.
        rows: Rows of the manifest in its order, by `lengths.rows_of`.
        compare: Whether to compare its own batches with made ones of the same shape.
        force: Whether to go on if their peaks differ.
        steps_vary: Whether its steps are known to train on different numbers of batches.
    """

    command: list[str]
    scratch: str
    unprotected: bool = False
    lengths: list[float] = msgspec.field(default_factory=list)
    targets: list[float] | None = None
    rows: tuple[RowLength, ...] = ()
    compare: bool = True
    force: bool = False
    steps_vary: bool = False

    @property
    def own_batches(self) -> Path:
        """The file for two epochs of its own batches, by `epochs.recorded`: rank 0 may write it."""
        return Path(self.scratch, TEMPORARY, "own-batches.npz")


class Describe(Message, frozen=True):
    """Asks for the lengths in a script's own data set, to be written as a Parquet table (`Described`).

    The script has `timeout_seconds` for it, its start included.
    """

    script: ScriptRequest
    options: dict[str, Any]
    output: str
    timeout_seconds: float = 0.0


class Described(Message, frozen=True):
    """The lengths are written; they are those of this data set."""

    loader: str


class Identified(Message, frozen=True):
    """The device that is meant."""

    device: DeviceIdentity


class Ready(Message, frozen=True):
    """The workload is built, on this device; `packed`: its batches are."""

    device: Device
    packed: bool = False


class RunTrial(Message, frozen=True):
    """Asks for a trial (several steps with one batch), or for a `single` step of a new batch, as in training.

    A single step has no warm-up, and keeps the allocator's cache unless `release` empties it first.
    If `noting`, an out-of-memory error in any step is noted even if it is caught, which makes them
    slower. If only the `timing` is wanted, the trial is not brief. Ranks have `timeout_seconds` for
    it. The further batches of an optimizer step that takes several are like this one, or those of
    `others`. If `recording`, the reply holds the step's requests to the GPU's allocator.
    """

    shape: BatchShape
    others: tuple[BatchShape, ...] = ()
    single: bool = False
    release: bool = False
    noting: bool = False
    timing: bool = False
    recording: bool = False
    timeout_seconds: float = 0.0


OF_A_STREAM = 1 << 48
"""More bytes than a GPU has."""


class RecordedStep(msgspec.Struct, frozen=True):
    """A step's requests to the allocator.

    Attributes:
        device: Index of the GPU.
        held: What was in use before the step, if it is the first that its process records; else
            None. For each segment: the number of its stream, its bytes (0 for one of small blocks),
            then the bytes of its blocks in their order, negative for a free one.
        requests: In their order: the bytes of a block, plus `OF_A_STREAM` times the number of its stream (0 for the
            default one); or, to free one, -1 - 2 i for the i-th that the step has made, and -2 - 2 i for the i-th of
            those that the step before it left.
    """

    device: int
    held: list[list[int]] | None
    requests: list[int]


class Ran(Message, frozen=True):
    """A trial, or a single step as a trial of one."""

    trial: Trial  # the supervisor fills in its index, worker and wall time
    stage: Stage | None = None  # where the error was raised
    traceback: str | None = None  # the last lines of the workload's own frames
    hint: str | None = None  # how to fix the error
    unexplained: bool = (
        False  # a script has ended by itself, maybe after an error that it caught
    )
    renew: bool = False  # the worker must be replaced: damaged by a sticky device error, or its memory is full of holes
    recorded: RecordedStep | None = None

    def with_trial(self, **changes: Any) -> Ran:
        """Return the reply with these changes of its trial."""
        return replace(self, trial=replace(self.trial, **changes))


class Replay(Message, frozen=True):
    """Asks to replay the recorded steps of a process, in one without a workload (`Replayed`).

    Attributes:
        seconds: How long processes may still begin, beyond the fewest that are needed.
        most_seconds: How long all may take.
    """

    limit_bytes: int
    steps: list[RecordedStep]
    seconds: float
    most_seconds: float
    seed: int


class Replayed(Message, frozen=True):
    """How many processes and steps were replayed; `failed` is the number of the step that ran out of memory."""

    processes: int
    steps: int
    failed: int | None = None
    error: str | None = None


class Start(Message, frozen=True, kw_only=True):
    """Tells an agent (`probe.nodes`) to start its ranks.

    Attributes:
        rdzv_id: Of this start alone: an old rendezvous must not be joined.
        token: Shows the leader that a rank was started for this.
        allocator: That of the ranks; None: as this process's environment says.
    """

    rdzv_id: str = msgspec.field(default_factory=partial(token_hex, 16))
    token: str = msgspec.field(default_factory=partial(token_hex, 16))
    allocator: Choice | None = None


class Launch(Start, frozen=True, kw_only=True):
    """Asks to start the ranks of one node (`Launched`), which connect to their leader on node 0.

    Attributes:
        host, port: Of the rendezvous; a port of 0: any.
        leader_port: Where the leader listens, on the same host; 0: any.
    """

    nproc_per_node: int
    nnodes: int = 1
    node_rank: int = 0
    host: str = "127.0.0.1"
    port: int = 0
    leader_port: int = 0

    @property
    def control_port(self) -> int:
        """The port of node 0 that agents connect to."""
        return self.port + 1


class Launched(Message, frozen=True):
    """The ranks of this node are starting."""


class Hello(Introduction, frozen=True):
    """What a rank says first, over a socket of its own; `token` shows that it was started for this."""

    rank: int
    world_size: int
    host: str
    pid: int
    node_rank: int = 0


class Vote(Message, frozen=True):
    """Asks, in the middle of a request, for the largest value that any rank votes for (`Decision`).

    `caught` is an out-of-memory error that the workload caught itself: other ranks may wait forever for the rest of
    that step.
    """

    value: int
    caught: str | None = None


class Decision(Message, frozen=True):
    """The largest value that a rank voted for, once all have."""

    value: int


Request = Identify | Describe | Prepare | RunTrial | Replay
Reply = Identified | Described | Ready | Ran | Launched | Replayed | Failed


def worker_program(
    *, script: bool = False, ranks: bool = False, allocator: Choice | None = None
) -> tuple[str, Any, dict[str, str], tuple[str, ...]]:
    """Return the module of a probe's workers, the type of their replies, their environment, and what to import.

    Raises UsageError if the user's environment contradicts the `allocator`.
    """
    environment: dict[str, str] = {}
    if allocator is not None:
        environment |= worker_variables(allocator, os.environ)
    for backend in backends():
        environment |= backend.WORKER_ENVIRONMENT
    if script:
        environment |= _NOTHING_SENT
        return "batchtune.scripts.launching", Reply, environment, ("torch",)
    if ranks:
        return "batchtune.probe.gang", Reply, environment, ()
    return "batchtune.probe.worker", Reply, environment, ("torch",)


# The base class of everything that runs trials and steps: worker processes, or a device made by a law.


class Measurer(ABC):
    """Measures batch shapes. Use as a context manager, and `start` it first.

    Attributes:
        worker: Number of the worker that ran last, from 1.
        packed: Whether the workload packs its batches; known once started.
    """

    worker: int
    packed: bool

    def __enter__(self) -> Measurer:
        return self

    def __exit__(self, *raised: object) -> None:  # noqa: B027  # a hook: a made device holds nothing
        """Free what the measurer holds."""

    @abstractmethod
    def start(self) -> Device:
        """Build the workload in a worker of a fresh process, as training starts.

        Raises:
            WorkloadError: The workload can't be imported or built.
            ProbeError: The device can't be used, or the workload alone exceeds the limit.
        """

    @abstractmethod
    def reply_to(self, request: RunTrial, *, fresh: bool = False) -> Ran:
        """Run what is requested; if `fresh`, in a worker that has run nothing before.

        If the worker dies or hangs, that is the trial's outcome (`crash`, `oom`, `timeout`). Raises as `start`.
        """

    def measure(
        self,
        shape: BatchShape,
        index: int,
        *,
        fresh: bool = False,
        timing: bool = False,
    ) -> Ran:
        """Run one trial, the journal's entry `index`; `fresh` as in `reply_to`."""
        ran = self.reply_to(RunTrial(shape=shape, timing=timing), fresh=fresh)
        return ran.with_trial(index=index, timing=timing)

    def step(
        self,
        shape: BatchShape,
        others: Sequence[BatchShape] = (),
        *,
        release: bool = False,
        recording: bool = False,
    ) -> Ran:
        """Run one step of a new batch with the allocator's cache as it is, or emptied first if `release`.

        An optimizer step that takes several batches has `others` after this one, or more like it; if it fails, the
        trial is that of the batch that failed. `recording` as in `RunTrial`.
        """
        request = RunTrial(
            shape=shape,
            others=tuple(others),
            single=True,
            release=release,
            recording=recording,
        )
        return self.reply_to(request)

    def replay(self, request: Replay) -> Replayed | None:
        """Replay recorded steps in a process without the workload, whose worker ends; None where that is impossible."""
        return None


def setup_exceeds_limit(workload: str, reason: str) -> ProbeError:
    """Return the error for a workload that runs out of memory in its setup."""
    return ProbeError(
        f"the memory limit is too small: {workload} ran out of it in its setup, before any batch ({reason})",
        "Give more with --memory, or take a smaller model with --set.",
    )
