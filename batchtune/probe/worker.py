"""The worker process: builds the workload once, and runs the trials that the supervisor requests.

Forked by the nursery, or where that is impossible, started as a new program. It speaks only
over its socket: what the workload prints goes to the standard streams and disturbs nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from batchtune.errors import BatchtuneError, OptionError, WorkloadError
from batchtune.probe import protocol
from batchtune.probe.devices import backend_for, backends, describe_environment
from batchtune.probe.oom import error_verdict
from batchtune.probe.process_checks import (
    Training,
    gradient_bytes,
    lowered_limit,
    process_limits,
)
from batchtune.probe.protocol import Identify, Prepare, Ran, Ready, Run, Stage
from batchtune.probe.session import Session
from batchtune.processes import command
from batchtune.processes.worker import Failed, serve
from batchtune.workloads.loading import first_line, user_traceback


def work(channel: int) -> None:
    """Serve requests in a forked process, or in a new program if a backend can't be used after a fork."""
    if any(backend.is_broken_by_fork() for backend in backends()):
        os.set_inheritable(channel, True)
        os.execv(sys.executable, command("batchtune.probe.worker", channel))
    _serve(channel)


def main() -> None:
    """Serve requests over the descriptor that the command line names."""
    _serve(int(sys.argv[1]))


def _serve(channel: int) -> None:
    serve(socket.socket(fileno=channel), protocol.decode_request, Worker().answer)
    os._exit(0)  # without the workload's finalizers, which may hang


class Worker:
    """The workload that this process built, and the answers to what is asked of it."""

    _session: Session
    _training: Training
    _stage: Stage = "device"
    _limits: Mapping[str, int]

    def answer(self, request: Identify | Prepare | Run) -> protocol.Reply:
        """Do what a request asks for."""
        if isinstance(request, Run):
            return self._run(request)
        self._limits = process_limits()
        try:
            if isinstance(request, Identify):
                return backend_for(request.device).identify(request.device)
            return self._prepare(request)
        except OptionError as error:
            return Failed(stage="options", message=error.message, hint=error.hint)
        except WorkloadError as error:
            return Failed(
                stage=self._stage,
                message=error.message,
                hint=error.hint,
                traceback=error.traceback,
            )
        except BatchtuneError as error:
            return Failed(stage=self._stage, message=error.message, hint=error.hint)
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

    def _run(self, request: Run) -> Ran:
        """Run a trial, or a single step."""
        if request.single:
            return self._session.step(request.shape, release=request.release)
        ran = self._session.measure(request.shape)
        if ran.trial.outcome != "ok":
            return ran
        return replace(
            ran,
            trial=replace(ran.trial, parameters_changed=self._training.has_changed()),
        )

    def _prepare(self, request: Prepare) -> Ready:
        """Open and limit the device, and build the workload on it."""
        from batchtune.workloads.loading import load_workload

        settings = request.settings
        meter = backend_for(settings.device).open(
            settings.device, settings, request.limit_bytes
        )
        self._stage = "import"
        workload = load_workload(request.workload, request.options)
        self._check_limits()
        import torch

        self._stage = "device"
        meter.hold(request.examples)
        meter.limit()
        self._stage = "setup"
        self._limits = process_limits()
        torch.manual_seed(settings.seed)
        workload.setup(meter.torch_device)
        meter.synchronize()
        self._check_limits()
        self._stage = "device"
        ddp_bytes = gradient_bytes() if settings.ddp else 0
        meter.settle(settings.reserve_bytes, ddp_bytes)
        self._session = Session(workload, meter)
        self._training = Training()
        return Ready(
            device=replace(meter.device, settings=describe_settings(meter.switches()))
        )

    def _check_limits(self) -> None:
        """Raise WorkloadError if the workload has lowered a limit of this process."""
        lowered = lowered_limit(self._limits)
        if lowered is not None:
            raise WorkloadError(lowered)


def describe_settings(switches: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `Device.settings` records: environment variables, torch's switches, and the device's own."""
    import torch

    precision: str | None = None
    with contextlib.suppress(
        RuntimeError
    ):  # from torch 2.9 on, if its newer form was used too
        precision = torch.get_float32_matmul_precision()
    return {
        **describe_environment(),
        "float32_matmul_precision": precision,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        **switches,
    }
