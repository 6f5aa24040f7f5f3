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
from batchtune.probe.parameters import Training, gradient_bytes
from batchtune.probe.process_limits import lowered_limit, process_limits
from batchtune.probe.protocol import Identified, Prepare, Ran, Ready, Run, Stage
from batchtune.probe.session import Session
from batchtune.processes.serving import serve
from batchtune.processes.start import command
from batchtune.processes.worker import Failed
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
    serve(socket.socket(fileno=channel), protocol.decode_request, Trials().answer)
    os._exit(0)  # without the workload's finalizers, which may hang


class Trials:
    """The workload that this worker process built, and the answers to what is asked of it."""

    def __init__(self) -> None:
        self._session: Session | None = None
        self._training: Training | None = None

    def answer(self, request: Prepare | Run) -> protocol.Reply:
        """Do what a request asks for."""
        if isinstance(request, Prepare):
            self._session, reply = _prepare(request)
            self._training = None
            if self._session is not None:
                self._training = Training()
            return reply
        assert self._session is not None and self._training is not None, "a trial before the setup"
        return _run(self._session, self._training, request)


def _run(session: Session, training: Training, request: Run) -> Ran:
    """Run a trial, or a single step."""
    if request.single:
        return session.step(request.shape, release=request.release)
    ran = session.measure(request.shape)
    if ran.trial.outcome != "ok":
        return ran
    return replace(ran, trial=replace(ran.trial, parameters_changed=training.has_changed()))


def _prepare(request: Prepare) -> tuple[Session | None, Identified | Ready | Failed]:
    """Identify the device, or import the workload, or open and limit the device and build the workload."""
    from batchtune.workloads import load_workload

    stage: Stage = "device"
    settings = request.settings
    limits = process_limits()
    try:
        if request.up_to == "device":
            return None, backend_for(settings.device).identify(settings.device)
        if request.up_to == "setup":
            meter = backend_for(settings.device).open(settings.device, settings, request.limit_bytes)
        stage = "import"
        workload = load_workload(request.workload, request.options)
        _check_limits(limits)
        if request.up_to == "import":
            return None, Ready()
        import torch

        stage = "device"
        meter.hold(request.examples)
        meter.limit()
        stage = "setup"
        limits = process_limits()
        torch.manual_seed(settings.seed)
        workload.setup(meter.torch_device)
        meter.synchronize()
        _check_limits(limits)
        stage = "device"
        meter.settle(settings.reserve_bytes, gradient_bytes() if settings.ddp else 0)
        settings_now = describe_settings(meter.switches())
    except BatchtuneError as error:
        last_lines = error.traceback if isinstance(error, WorkloadError) else None
        failed_stage = "options" if isinstance(error, OptionError) else stage
        return None, Failed(stage=failed_stage, message=error.message, hint=error.hint, traceback=last_lines)
    except BaseException as error:
        message = first_line(error)
        if stage == "device":
            message = f"--device {settings.device}: {message}"
        lowered = lowered_limit(limits)
        is_oom = lowered is None and error_verdict(error) == "oom"
        return None, Failed(
            stage=stage,
            message=lowered or message,
            traceback=user_traceback(error),
            outcome="oom" if is_oom else "error",
        )
    return Session(workload, meter), Ready(device=replace(meter.device, settings=settings_now))


def _check_limits(before: dict[str, int]) -> None:
    """Raise WorkloadError if the workload has lowered a limit of this process."""
    if lowered := lowered_limit(before):
        raise WorkloadError(lowered)


def describe_settings(switches: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `Device.settings` records: environment variables, torch's switches, and the device's own."""
    import torch

    precision: str | None = None
    with contextlib.suppress(RuntimeError):  # from torch 2.9 on, if its newer form was used too
        precision = torch.get_float32_matmul_precision()
    return {
        **describe_environment(),
        "float32_matmul_precision": precision,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        **switches,
    }
