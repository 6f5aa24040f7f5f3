"""The worker process of a probe whose workload is a training script: starts the script, and passes messages on to it.

Each process of the script that trains, one or several ranks, connects when its loop has taken an optimizer step
(`scripts.feeding`), and answers from then on; one reply is made of theirs, as of a gang's (`probe.gang`). What starts
them (torchrun, accelerate, Lightning, a shell script) needs to know nothing of that.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Mapping
from typing import NoReturn

from batchtune.errors import ProbeError, WorkloadError
from batchtune.probe.gang import Leader, PrintedOutput
from batchtune.probe.ranks import Ranks
from batchtune.probe.requests import (
    Describe,
    Prepare,
    Ran,
    Reply,
    Request,
    RunTrial,
)
from batchtune.processes.worker import Failed, oom_kills, serve
from batchtune.results import Trial
from batchtune.scripts.interposing import environment
from batchtune.scripts.scratch import is_cluster, start

# How long a command may take to end once the process that trained has.
_ENDING_SECONDS = 10.0
# How much later than the first rank the last one may begin to train: they wait for each other in every step.
_APART_SECONDS = 120.0
_LONGER = "If it needs longer, to download or to compile, allow that with --setup-timeout SECONDS."


def work(channel: int) -> None:
    """Serve requests in a forked process."""
    serve(channel, Request, Launcher().answer)


class Launcher(Leader):
    """A script that was started, and the connections to its processes that train.

    If the script dies, so does this process.
    """

    _process: subprocess.Popen[bytes]
    _output: PrintedOutput
    _oom_kills: int | None

    def _one_of(
        self, replies: Mapping[int, Reply], request: Prepare | Describe | RunTrial
    ) -> Reply:
        """Return the reply of the only rank, or one of those of several."""
        if self._ranks.world_size != 1:
            return super()._one_of(replies, request)
        reply = replies[0]
        if not isinstance(reply, Failed):
            return reply
        if reply.outcome == "crash":
            self._end_as_the_script()
        if not isinstance(request, RunTrial):
            return reply
        trial = Trial.of(request.shape, "timeout", error=reply.message)
        return Ran(trial=trial, renew=True)

    def _start(self, request: Prepare | Describe) -> Failed | None:
        """Start the script, and wait until all its ranks train; return why they don't."""
        script = request.script
        assert script is not None
        timeout_seconds = request.timeout_seconds
        self._oom_kills = oom_kills()
        token = secrets.token_hex(16)
        # The address at which ranks reach this process, and the one that it listens at.
        host = "127.0.0.1"
        interface = host
        if is_cluster():
            host = socket.gethostname()
            interface = ""
        with socket.create_server((interface, 0)) as listener:
            options = {
                "mode": "probe",
                "address": [host, listener.getsockname()[1]],
                "token": token,
            }
            output = PrintedOutput()
            self._ranks = Ranks(listener, token, None, output.text, self._oom_kills)
            try:
                self._process = start(
                    script,
                    lambda of_place: environment({**options, **of_place}),
                    stdout=output.end,
                    stderr=output.end,
                )
            except ProbeError as error:
                return Failed.of(error, "device")
            except WorkloadError as error:
                return Failed.of(error, "import")
            output.follow()
            self._output = output
            if self._ranks.accept(timeout_seconds, self._has_ended, _APART_SECONDS):
                return None
        if self._has_ended():
            self._end_as_the_script()
        connected = self._ranks.connected
        if not connected:
            return Failed(
                stage="setup",
                outcome="timeout",
                message=f"it did not train within {timeout_seconds:g} s: no optimizer stepped after a batch of a torch "
                "DataLoader",
                hint=_LONGER,
            )
        ranks = ", ".join(map(str, connected))
        return Failed(
            stage="import",
            message=f"of {self._ranks.world_size} ranks, only {ranks} asked a DataLoader of its own for batches",
            hint="Each rank needs batches of its own: with accelerate, set dispatch_batches=False. "
            + _LONGER,
        )

    def _has_ended(self) -> bool:
        return self._process.poll() is not None

    def _end_as_the_script(self) -> NoReturn:
        """End with the script's exit code or signal, so that the supervisor sees what became of it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING_SECONDS)
        self._output.finish()
        if oom_kills() != self._oom_kills:  # torchrun survives, and exits with 1
            os.kill(os.getpid(), signal.SIGKILL)
        code = self._process.poll() or 0
        if code < 0:
            if -code != signal.SIGKILL:  # which has no handler to replace
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)
