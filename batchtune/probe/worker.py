"""The worker process: builds the workload once, and runs the trials that the supervisor requests.

Forked by the nursery, or where that is impossible, started as a new program. It speaks only
over its socket: what the workload prints goes to the standard streams and disturbs nothing.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from batchtune.allocators import VARIABLES
from batchtune.errors import BatchtuneError, NoStepError, WorkloadError, linked_errors
from batchtune.probe.attempt import OOM_COUNTED, Agree, Attempt, alone
from batchtune.probe.devices import Meter, backend_for, backends, describe_environment
from batchtune.probe.failures import (
    OomVerdict,
    compilations,
    error_verdict,
    lowered_limit,
    noting_ooms,
    process_limits,
)
from batchtune.probe.replay import RequestRecorder, replay
from batchtune.probe.requests import (
    Describe,
    Described,
    Identified,
    Identify,
    Prepare,
    Ran,
    Ready,
    Replay,
    Reply,
    Request,
    RunTrial,
    Stage,
)
from batchtune.processes import command
from batchtune.processes.worker import Failed, serve
from batchtune.results import BatchShape
from batchtune.workloads import (
    TrainingCheck,
    drop_gradients,
    first_line,
    gradient_bytes,
    user_traceback,
)

if TYPE_CHECKING:
    from batchtune.results import ProbedWith
    from batchtune.workloads import Workload

# A built workload on a limited device: runs trials and single steps, and judges their outcomes.

# A failure that leaves more than this part of the limit in use costs the worker.
_HELD_SHARE = 0.002
# After so many trials in a row whose steps were equal, one timed step may be enough.
_EQUAL_TRIALS = 3
_LEAK_HINT = (
    "Something keeps tensors from step to step, such as a loss that is added to a list without .item() or .detach(). "
    "Fix it and run the same command again; the trials so far are kept. "
    "A cache that each step adds to looks the same: fill it in setup()."
)


@dataclass
class Session:
    """A built workload on a limited device."""

    _workload: Workload
    _meter: Meter
    _agree: Agree = alone
    _has_stepped: bool = False
    _limits: dict[str, int] = field(default_factory=process_limits)
    # The last ones in a row whose equal steps took equal time and memory.
    _equal_trials: int = 0
    _recorder: RequestRecorder | None = None
    # In use after the setup, then after the last step or trial that passed.
    _rest_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self._rest_bytes = self._meter.in_use()

    def measure(
        self, shape: BatchShape, *, noting: bool = False, timing: bool = False
    ) -> Ran:
        """Run one trial from an empty cache, so that what the allocator reserves follows from the shape.

        The last trial's gradients are freed, too: on the emulated device, they made 1.1 trials of each length fail.
        If the steps passed only because the allocator emptied its cache, or because something caught its error, the
        trial runs once more: neither what earlier trials left between the pages nor what a library tries only the
        first time may count against this shape. `noting` and `timing` as in `RunTrial`.
        """
        self._empty()
        may_be_brief = self._equal_trials >= _EQUAL_TRIALS and not timing
        attempt = self._attempt(shape, noting=noting, is_brief=may_be_brief)
        again = bool(attempt.retries or attempt.caught_oom)
        if attempt.error is None and self._agree(again, attempt.caught_oom):
            self._empty()
            attempt = self._attempt(shape, is_brief=may_be_brief)
        gc.collect()
        if attempt.has_equal_steps:
            self._equal_trials += 1
        elif len(attempt.seconds) > 1:
            self._equal_trials = 0
        return self._ran(attempt)

    def step(
        self,
        shape: BatchShape,
        *,
        release: bool = False,
        noting: bool = False,
        recording: bool = False,
    ) -> Ran:
        """Make one batch and run one step, as in training; if `release`, empty the allocator's cache first.

        In a process's first step, what libraries keep lies where it lies in training that begins
        with this batch.
        """
        if not self._has_stepped:
            self._meter.free_workspaces()
        if release:
            self._free()
        if recording:
            if self._recorder is None:
                self._recorder = RequestRecorder(self._meter.torch_device.index)
            self._recorder.begin()
        attempt = self._attempt(shape, single=True, noting=noting)
        # A library may have caught it, and gone on with a smaller workspace.
        may_pass = attempt.ooms > 0 and not attempt.caught
        if attempt.error is None and self._agree(may_pass):
            with noting_ooms(attempt.caught):
                self._attempt(shape, single=True)
        ran = self._ran(attempt)
        if recording and self._recorder is not None:
            ran = replace(ran, recorded=self._recorder.take())
        return ran

    def _attempt(
        self,
        shape: BatchShape,
        *,
        single: bool = False,
        noting: bool = False,
        is_brief: bool = False,
    ) -> Attempt:
        meter = self._meter
        workload = self._workload
        if not single:
            workload = getattr(workload, "for_trials", workload)
        attempt = Attempt(
            workload,
            meter,
            shape,
            single=single,
            is_brief=is_brief,
            agree=self._agree,
        )
        retries_before, ooms_before = meter.retries_and_ooms()
        compilations_before = compilations()
        watch = noting_ooms(attempt.caught) if noting else contextlib.nullcontext()
        try:
            with watch:
                attempt.run()
        except BaseException as error:  # also sys.exit() and the like: nothing that a step raises ends the worker
            # No memory may be left, or a device that no longer answers after a sticky error.
            with contextlib.suppress(Exception):
                attempt.peaks.append(meter.peak())
            has_run_out = meter.retries_and_ooms()[1] > ooms_before
            if has_run_out and not attempt.caught and isinstance(error, NoStepError):
                attempt.caught.append(OOM_COUNTED)
            # Only text leaves this block: the exception holds the failed step's frames, and they its tensors. A script
            # that catches its OOM skips the optimizer's step: the OOM is what failed.
            if not attempt.caught or not isinstance(error, NoStepError):
                attempt.error, attempt.verdict, attempt.traceback = _described(error)
        retries, ooms = meter.retries_and_ooms()
        attempt.retries = retries - retries_before
        attempt.ooms = ooms - ooms_before
        attempt.compilations = compilations() - compilations_before
        lowered = lowered_limit(self._limits)
        if lowered is not None:
            attempt.error = lowered
            attempt.verdict = None
        if attempt.in_use:
            self._has_stepped = True
        return attempt

    def _empty(self) -> None:
        """Free what the last step left for the next one: its gradients and the cache, if there is a cache."""
        if self._meter.reserved() is not None:
            drop_gradients()
        self._meter.release()

    def _free(self) -> None:
        """Free what a failure may have left behind, and the allocator's cache."""
        drain_autograd()
        gc.collect()
        self._meter.release()

    def _ran(self, attempt: Attempt) -> Ran:
        passed = attempt.judged()[0] == "ok"
        if not passed:
            self._free()
        trial = attempt.trial()
        # Any error but a plain OOM costs the worker. So does an OOM in its very first step: the optimizer's state may
        # be incomplete, and the next step would fail because of that.
        is_plain_oom = attempt.verdict == "oom" and (
            self._has_stepped or attempt.stage != "step"
        )
        is_harmless = attempt.error is None or (is_plain_oom and self._meter.healthy())
        # Steps go on with what earlier ones left, as training does.
        is_worn = not attempt.single and self._meter.worn()
        in_use = self._meter.in_use()
        if passed:
            self._rest_bytes = in_use
        # What a failure left in use and can't be freed would count against the next shapes.
        held_bytes = in_use - self._rest_bytes
        holds_more = held_bytes > _HELD_SHARE * self._meter.device.limit_bytes
        return Ran(
            trial=trial,
            stage=None if passed else attempt.stage,
            traceback=attempt.traceback,
            hint=None if attempt.leak is None else _LEAK_HINT,
            renew=attempt.leak is not None or not is_harmless or holds_more or is_worn,
        )


def drain_autograd() -> None:
    """Free what a failed backward pass left in this thread: torch keeps its queue until the next one begins."""
    import torch

    with (
        contextlib.suppress(Exception),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        torch.autograd.backward(torch.ones(1, device="cpu", requires_grad=True).sum())


def _described(error: BaseException) -> tuple[str, OomVerdict | None, str | None]:
    """Return an exception's message, its verdict, and its traceback.

    The failed step's variables are freed first: otherwise no memory may be left to write a text.
    """
    try:
        for cause in linked_errors(error, contexts=True):
            traceback.clear_frames(cause.__traceback__)
        return first_line(error), error_verdict(error), user_traceback(error)
    except MemoryError:
        return "MemoryError, and no memory to say where", "oom", None


NCCL_BYTES = 1 << 30
"""What NCCL takes on each GPU, outside torch's allocator, for the one communicator of FSDP2.

Measured were 688 MiB on four A100 with NVLink (https://github.com/NVIDIA/nccl/issues/964). By NVIDIA it grows with the
number of channels, which a faster GPU has more of, and no longer with the number of GPUs beyond two nodes
(https://github.com/NVIDIA/nccl/issues/864).
"""


def work(channel: int) -> None:
    """Serve requests in a forked process, or in a new program if a backend can't be used after a fork."""
    if any(backend.is_broken_by_fork() for backend in backends()):
        os.set_inheritable(channel, True)
        os.execv(sys.executable, command("batchtune.probe.worker", channel))
    serve(channel, Request, Worker().answer)


def main() -> None:
    """Serve requests over the descriptor that the command line names."""
    serve(int(sys.argv[1]), Request, Worker().answer)


class Worker:
    """The workload that this process built, and the answers to what is asked of it."""

    _session: Session
    _training: TrainingCheck
    _stage: Stage = "device"
    _limits: Mapping[str, int]

    def __init__(self, agree: Agree = alone) -> None:
        self.agree = agree

    def answer(self, request: Request) -> Reply:
        """Do what a request asks for."""
        if isinstance(request, RunTrial):
            return self._run(request)
        if isinstance(request, Replay):
            return replay(request)
        self._limits = process_limits()
        try:
            if isinstance(request, Identify):
                device = backend_for(request.device).identify(request.device)
                return Identified(device=device)
            if isinstance(request, Describe):
                return self._describe(request)
            return self._prepare(request)
        except BatchtuneError as error:
            return Failed.of(error, self._stage)
        except BaseException as error:
            lowered = lowered_limit(self._limits)
            if lowered is not None:
                return Failed(stage=self._stage, message=lowered)
            failed = Failed(
                stage=self._stage,
                message=first_line(error),
                traceback=user_traceback(error),
            )
            if error_verdict(error) == "oom":
                return replace(failed, outcome="oom")
            return failed

    def _run(self, request: RunTrial) -> Ran:
        """Run a trial, or a single step."""
        if request.single:
            return self._session.step(
                request.shape,
                release=request.release,
                noting=request.noting,
                recording=request.recording,
            )
        ran = self._session.measure(
            request.shape, noting=request.noting, timing=request.timing
        )
        if ran.trial.outcome != "ok":
            return ran
        return ran.with_trial(parameters_changed=self._training.has_changed())

    def _describe(self, request: Describe) -> Described:
        """Write the lengths of a script's data set; a workload has none."""
        raise NotImplementedError

    def _prepare(self, request: Prepare) -> Ready:
        """Open and limit the device, and build the workload on it."""
        from batchtune.workloads import load_workload

        meter = self._open(request)
        self._stage = "import"
        workload = load_workload(request.workload, request.options)
        self._check_limits()
        import torch

        self._stage = "device"
        meter.hold(request.examples)
        meter.limit()
        self._stage = "setup"
        self._limits = process_limits()
        torch.manual_seed(request.settings.seed)
        workload.setup(meter.torch_device)
        meter.synchronize()
        self._check_limits()
        if request.settings.simulate_world_size is not None:
            refuse_ddp()
        if request.first_shape is not None:
            first_shape = request.first_shape
            if packs(workload):
                first_shape = BatchShape.packed([math.ceil(first_shape.length)])
            self._stage = "step"
            # NCCL allocates its buffers outside torch, not before they are used.
            workload.step(workload.make_batch(first_shape))
            meter.synchronize()
            gc.collect()
        self._stage = "device"
        return self._ready(workload, meter, request.settings)

    def _open(self, request: Prepare) -> Meter:
        """Open the device.

        If ranks are simulated, this process stands for all, under torch's fake process group, which communicates
        nothing. It is rank 0, whose shard is no smaller than another's: FSDP2 cuts the first dimension, and rounds up.
        """
        settings = request.settings
        meter = backend_for(settings.device).open(
            settings.device, settings, request.limit_bytes
        )
        if settings.simulate_world_size is not None:
            from torch import distributed
            from torch.testing._internal.distributed.fake_pg import FakeStore

            distributed.init_process_group(
                "fake",
                store=FakeStore(),
                rank=0,
                world_size=settings.simulate_world_size,
            )
        return meter

    def _ready(
        self, workload: Workload, meter: Meter, probed_with: ProbedWith
    ) -> Ready:
        """Settle the limit, now that the workload is built; trials can be run from then on."""
        world_size = probed_with.simulate_world_size
        ddp_bytes = gradient_bytes() if probed_with.ddp else 0
        meter.settle(reserve_of(probed_with, meter.device.kind), ddp_bytes)
        self._session = Session(workload, meter, self.agree)
        self._training = TrainingCheck()
        settings = {**_torch_settings(), **meter.switches()}
        device = replace(meter.device, settings=settings)
        if world_size is not None:
            device = replace(
                device, world_size=world_size, backend="fake", simulated=True
            )
        return Ready(device=device, packed=packs(workload))

    def _check_limits(self) -> None:
        """Raise WorkloadError if the workload has lowered a limit of this process."""
        lowered = lowered_limit(self._limits)
        if lowered is not None:
            raise WorkloadError(lowered)


def refuse_ddp() -> None:
    """Raise WorkloadError if a model is wrapped in DDP, whose gradients the fake group can't reduce (torch 2.13)."""
    from torch.nn.parallel import DistributedDataParallel

    # By type, as in `trained_parameters`.
    if any(
        issubclass(type(thing), DistributedDataParallel) for thing in gc.get_objects()
    ):
        raise WorkloadError(
            "the model is wrapped in DistributedDataParallel, which --simulate-world-size can't run",
            "It is for FSDP2 (built-ins: --set parallel=fsdp2). DDP takes the same memory however many ranks there "
            "are: measure a single process with --ddp, or two ranks with --nproc-per-node 2.",
        )


def reserve_of(probed_with: ProbedWith, kind: str) -> int:
    """Return the bytes to keep free: those that the user gave, or NCCL's if ranks on GPUs are simulated."""
    if (
        probed_with.simulate_world_size is not None
        and kind == "cuda"
        and not probed_with.reserve_bytes
    ):
        return NCCL_BYTES
    return probed_with.reserve_bytes


def packs(workload: Workload) -> bool:
    """Return whether a workload's batches are packed; users' mostly don't say."""
    return bool(getattr(workload, "packed", False))


def _torch_settings() -> dict[str, Any]:
    """Return the environment variables and torch's switches that affect memory and time."""
    import torch

    precision: str | None = None
    # From torch 2.9 on, it fails if its newer form was used too.
    with contextlib.suppress(RuntimeError):
        precision = torch.get_float32_matmul_precision()
    environment = describe_environment()
    for name in VARIABLES:  # the device's fields say more of the allocator
        environment.pop(name, None)
    return {
        **environment,
        "float32_matmul_precision": precision,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }
