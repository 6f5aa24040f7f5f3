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
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from batchtune.allocators import VARIABLES
from batchtune.errors import BatchtuneError, WorkloadError
from batchtune.probe.attempt import Agree, alone
from batchtune.probe.devices import backend_for, backends, describe_environment
from batchtune.probe.failures import error_verdict, lowered_limit, process_limits
from batchtune.probe.parameters import TrainingCheck, gradient_bytes
from batchtune.probe.replay import replay
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
from batchtune.probe.session import Session
from batchtune.processes import command
from batchtune.processes.worker import Failed, serve
from batchtune.results import BatchShape
from batchtune.workloads.loading import first_line, user_traceback

if TYPE_CHECKING:
    from batchtune.probe.devices import Meter
    from batchtune.results import ProbedWith
    from batchtune.workloads import Workload


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
        from batchtune.workloads.loading import load_workload

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
