"""Drives the worker process: starts it, requests trials, replaces it when it dies or hangs. Never imports torch."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
from msgspec.structs import replace

from batchtune.allocators import (
    EXPANDABLE,
    NATIVE,
    asked_for,
    settings_in,
    variables_for,
)
from batchtune.epochs.recorded import counted
from batchtune.errors import (
    BatchtuneError,
    OptionError,
    ProbeError,
    UsageError,
    WorkloadError,
    meaning_of_output,
)
from batchtune.files import temporary_folder
from batchtune.lengths import Lengths
from batchtune.probe.devices import DeviceBusy, DeviceIdentity, lock_device
from batchtune.probe.devices.law import MadeDevice, is_law
from batchtune.probe.nodes import Nodes
from batchtune.probe.ranks import first_to_end
from batchtune.probe.requests import (
    Identified,
    Identify,
    Measurer,
    Prepare,
    Ran,
    Ready,
    Replay,
    Replayed,
    RunTrial,
    ScriptRequest,
    setup_exceeds_limit,
    worker_program,
)
from batchtune.probe.settings import ProbeSettings
from batchtune.processes.worker import Failed, Nursery, WorkerLost, tail
from batchtune.results import (
    BatchShape,
    Device,
    DeviceProcess,
    Script,
    Trial,
)
from batchtune.results.shared import EQUAL_TWINS
from batchtune.units import format_seconds

Prepared = TypeVar("Prepared", Identified, Ready)

UNPROTECTED = "none"
"""The scratch folder of a script that may write to the user's files."""
# Of a driver, or a platform, that can't map memory.
_DRIVER_ERROR = re.compile(r"CUDA driver error: (?!out of memory).*")
_POLL_SECONDS = 0.5  # while waiting for another probe to end
LEADING_SECONDS = 15.0
"""How much longer than their time limit to wait for what leads ranks: it asks them where they hang, and may itself."""
_MOST_SAMPLED = 1 << 28
_MOST_LENGTHS = 50_000  # sent to a script, which compares its own with them


def measurer_for(
    settings: ProbeSettings,
    limit_bytes: int | None = None,
    *,
    last_worker: int = 0,
    lengths: Lengths | None = None,
    on_note: Callable[[str], None] | None = None,
    nodes: Nodes | None = None,
) -> Measurer:
    """Return what measures on the device of the settings; the arguments are those of `Supervisor`."""
    if is_law(settings.device):
        return MadeDevice.of(settings, limit_bytes, last_worker)
    return Supervisor(
        settings,
        limit_bytes,
        last_worker=last_worker,
        lengths=lengths,
        on_note=on_note,
        nodes=nodes,
    )


class Supervisor(Measurer):
    """Measures batch shapes, with a fresh worker whenever the last one died, hung or was damaged.

    Use as a context manager: no process outlives it, and it holds the device for itself from `start` to the end.
    `limit_bytes` is the memory limit of a continued run; None: the first worker computes it. Training will sample from
    these `lengths`. `on_note` is called with sentences that the user should read meanwhile.
    `nodes` are the other machines with ranks, if any.
    """

    def __init__(
        self,
        settings: ProbeSettings,
        limit_bytes: int | None = None,
        *,
        last_worker: int = 0,
        lengths: Lengths | None = None,
        on_note: Callable[[str], None] | None = None,
        nodes: Nodes | None = None,
    ) -> None:
        if settings.nnodes is not None and nodes is None:
            raise UsageError(
                f"ranks on {settings.nnodes} machines were probed, but this command runs on one",
                "Start it on each of them, with --nnodes, --nproc-per-node and --rdzv-endpoint.",
            )
        self._settings = settings
        self._nodes = nodes
        self._lengths = lengths
        self._limit_bytes = limit_bytes
        self.worker = last_worker
        self.packed = False
        """Whether the workload packs its batches; known once a worker has started."""
        self._program = worker_program(
            script=settings.command is not None,
            ranks=settings.has_ranks,
            allocator=settings.allocator,
        )
        self._nursery = Nursery(*self._program)
        self._allocator_problem: str | None = None
        self._scratch: ScriptRequest | None = None
        self._cleaning = contextlib.ExitStack()
        self._learned: Script | None = None
        self._has_worker = False
        self._unused = False
        self._locks: dict[str, io.FileIO] = {}  # by the device's id
        self._busy: DeviceBusy | None = None
        self._note = on_note or (lambda text: None)

    def __exit__(self, *raised: object) -> None:
        """End all processes, and release the device."""
        self._drop()
        self._nursery.close()
        self._release()
        self._cleaning.close()
        self._scratch = None

    def start(self) -> Device:
        """Build the workload in a worker of a fresh process, as training starts.

        On the CPU, the processes of the device include another probe that uses it.

        Raises:
            WorkloadError: The workload can't be imported or built.
            ProbeError: The device can't be used, or the workload alone exceeds the limit.
            DeviceBusy: Another probe uses the GPU, and did not end in time.
        """
        self._drop()
        if not self._settings.has_ranks:  # which are never forked
            self._nursery.close()
        return self._start_worker()

    def reply_to(self, request: RunTrial, *, fresh: bool = False) -> Ran:
        """Run what is requested, as `Measurer.reply_to` says."""
        started = time.monotonic()
        if not self._has_worker or (fresh and not self._unused):
            self._start_worker()
        self._unused = False
        limit = self._settings.trial_timeout_seconds
        request = replace(request, timeout_seconds=limit)
        try:
            ran = self._nursery.ask(request, (Ran,), self._patience(limit))
        except WorkerLost as lost:
            error = f"the worker process {lost}"
            if lost.outcome == "timeout":
                error = f"no answer within {limit:g} s{lost.place}"
            elif lost.output:
                error += f": {tail(lost.output, lines=3)}"
            ran = Ran(
                trial=Trial.of(request.shape, lost.outcome, error=error), renew=True
            )
        if ran.renew:
            self._drop()
            if self._nodes is not None:
                self._nodes.check()
                if ran.trial.outcome == "crash":
                    self._show_nodes(self._nodes)
        if ran.unexplained and not request.noting:
            again = self.reply_to(replace(request, noting=True))
            if again.trial.outcome == "oom":
                return again
        elapsed = round(time.monotonic() - started, 6)
        return ran.with_trial(worker=self.worker, elapsed_seconds=elapsed)

    def replay(self, request: Replay) -> Replayed | None:
        """Replay recorded steps, as `Measurer.replay` says."""
        self._drop()
        _, replies, environment, _ = self._program
        nursery = Nursery("batchtune.probe.worker", replies, environment)
        with contextlib.ExitStack() as ending:
            ending.callback(nursery.close)
            nursery.start_worker()
            ending.callback(nursery.end_worker)
            try:
                timeout = self._settings.setup_timeout_seconds + request.most_seconds
                return nursery.ask(request, (Replayed,), timeout)
            except WorkerLost as lost:
                problem = f"the worker process {lost} {tail(lost.output, lines=1)}"
                self._note(f"The steps could not be replayed: {problem.rstrip()}.")
                return None

    def _start_worker(self) -> Device:
        """Build the workload in a new worker, which may be forked from the same process as the last one."""
        self._drop()
        self.worker += 1
        self._nursery.start_worker()
        self._has_worker = True
        settings = self._settings
        examples = 0
        # Training streams larger data sets: it keeps no list of their examples.
        if self._lengths is not None and self._lengths.count <= _MOST_SAMPLED:
            examples = self._lengths.count
        request = Prepare(
            workload=settings.workload,
            options=settings.options,
            settings=settings,
            limit_bytes=self._limit_bytes,
            examples=examples,
            script=self._script(),
            first_shape=self._first_shape(),
            timeout_seconds=settings.setup_timeout_seconds,
        )
        try:
            if not self._locks:
                self._take_devices()
            if self._nodes is not None:
                request = replace(request, launch=self._nodes.start(settings.allocator))
            ready = self._ask(request, Ready)
            device = ready.device
            if self._allocator_problem is not None:
                device = replace(device, allocator_problem=self._allocator_problem)
            self.packed = ready.packed
            self._take_those_of(device)
        except ExpandableRefused as refused:
            self._drop()
            if settings.allocator == EXPANDABLE:
                raise
            self.worker -= 1
            self._take_memory_natively(refused.problem)
            return self._start_worker()
        except BaseException as error:
            self._drop()
            if self._nodes is not None and isinstance(error, BatchtuneError):
                self._nodes.check()
                self._show_nodes(self._nodes)
            raise
        self._limit_bytes = device.limit_bytes
        self._unused = True
        if device.script is not None and self._learned is None:
            assert self._scratch is not None and self._lengths is not None
            own = counted(self._scratch.own_batches, self._lengths, device.world_size)
            learned = replace(device.script, own_batches=own)
            self._learned = learned
            device = replace(device, script=learned)
            for note in about_script(learned, self._settings.scratch):
                self._note(note)
        if self._locks or self._busy is None or self._busy.process is None:
            return device
        other = DeviceProcess(pid=self._busy.process, used_bytes=None)
        return replace(device, other_processes=1, processes=[other])

    def _take_memory_natively(self, problem: str) -> None:
        """Start scripts without expandable segments from now on."""
        self._allocator_problem = problem
        module, replies, environment, imports = self._program
        environment = {**environment, **variables_for(NATIVE, os.environ)}
        self._program = module, replies, environment, imports
        self._nursery.close()
        self._nursery = Nursery(*self._program)

    def _show_nodes(self, nodes: Nodes) -> None:
        """Show what other nodes printed last: they were lost, or did not start."""
        for text in nodes.last_words:
            self._note(text)

    def _first_shape(self) -> BatchShape | None:
        """Return the smallest batch of the data, which ranks run first; None for a process that is alone."""
        if not self._settings.has_ranks or self._lengths is None:
            return None
        target = None
        targets = self._lengths.runs.targets
        if targets is not None:
            target = float(targets.min())
        return BatchShape(1, self._lengths.shortest, target)

    def _patience(self, timeout_seconds: float) -> float:
        """Return how long to wait for a reply; what leads ranks, or a script, keeps to the time limit itself."""
        if self._settings.has_ranks or self._settings.command is not None:
            return timeout_seconds + LEADING_SECONDS
        return timeout_seconds

    def _script(self) -> ScriptRequest | None:
        """Return the script to start, with a fresh folder for its files; None for a workload."""
        settings = self._settings
        if settings.command is None or self._lengths is None:
            return None
        if self._scratch is None:
            self._scratch = self._cleaning.enter_context(
                script_request(settings.command, settings.scratch)
            )
        lengths = self._lengths
        if lengths.count > _MOST_LENGTHS:  # those evenly spaced, with both ends
            kept = np.linspace(0, lengths.count - 1, _MOST_LENGTHS).astype(int)
            lengths = lengths.sample(kept)
        targets = None
        if lengths.targets is not None:
            targets = np.sort(lengths.targets).tolist()
        return replace(
            self._scratch,
            lengths=np.sort(lengths.values).tolist(),
            targets=targets,
            rows=self._lengths.rows,
            compare=self._learned is None,
            force=settings.force,
            steps_vary=self._learned is not None and self._learned.steps_vary,
        )

    def _take_devices(self) -> None:
        """Lock the device for this probe, or each rank's."""
        first = self._identified(self._settings.device)
        self._take(first)
        if self._settings.has_ranks and not first.shared:
            for local_rank in range(1, self._settings.nproc_per_node or 1):
                self._take(self._identified(f"cuda:{local_rank}"))

    def _take_those_of(self, device: Device) -> None:
        """Lock the GPU that a script chose, and those of its other ranks here: they are known only now."""
        if device.kind != "cuda":
            return
        if device.uuid is not None and device.uuid not in self._locks:
            self._release()
            self._take(DeviceIdentity(id=device.uuid, name=device.name))
        ranks_here = [
            rank for rank in device.ranks if rank.host == socket.gethostname()
        ]
        for local_rank in range(len(self._locks), len(ranks_here)):
            self._take(self._identified(f"cuda:{local_rank}"))

    def _identified(self, device: str) -> DeviceIdentity:
        return self._ask(Identify(device=device), Identified).device

    def _take(self, device: DeviceIdentity) -> None:
        """Lock a device; if another probe holds the CPU, go on without."""
        wait_seconds = self._settings.wait_seconds
        deadline = time.monotonic() + wait_seconds
        while True:
            try:
                self._locks[device.id] = lock_device(device.id, device.name)
                return
            except DeviceBusy as busy:
                if self._busy is None and wait_seconds > 0:
                    self._note(f"Waiting for it to end: {busy.message}.")
                self._busy = busy
                if time.monotonic() < deadline:
                    time.sleep(_POLL_SECONDS)
                elif device.shared:
                    return
                else:
                    raise

    def _ask(self, request: Identify | Prepare, kind: type[Prepared]) -> Prepared:
        """Ask the new worker for what comes before any trial."""
        try:
            reply = self._nursery.ask(
                request,
                (kind, Failed),
                self._patience(self._settings.setup_timeout_seconds),
            )
        except WorkerLost as lost:
            raise self._setup_error(lost) from None
        if isinstance(reply, kind):
            return reply
        assert isinstance(reply, Failed)
        if reply.stage == "device":
            raise ProbeError(reply.message, reply.hint)
        if reply.stage == "options":
            raise OptionError(reply.message, reply.hint)
        if reply.outcome == "oom":
            raise setup_exceeds_limit(self._settings.workload, reply.message)
        message = reply.message
        if reply.stage == "setup":
            message = f"{self._settings.workload}: its setup failed: {message}"
        elif reply.stage == "step":
            message = f"{self._settings.workload}: its first step failed: {message}"
        elif self._settings.command is not None:
            message = f"{self._settings.workload}, in its first batches: {message}"
        raise WorkloadError(message, reply.hint, reply.traceback)

    def _setup_error(self, lost: WorkerLost) -> BatchtuneError:
        """Return the error for a worker that died or hung before any trial."""
        if lost.outcome == "oom":
            return setup_exceeds_limit(self._settings.workload, str(lost))
        workload = self._settings.workload
        if lost.outcome == "timeout":
            return WorkloadError(
                f"{workload}: its setup took longer than "
                f"{format_seconds(self._settings.setup_timeout_seconds)}{lost.place}",
                "If it needs longer, to download or to compile, allow that with --setup-timeout SECONDS.",
                lost.output or None,
            )
        if self._settings.command is not None:
            refused = _DRIVER_ERROR.search(lost.output)
            wanted = asked_for(settings_in({**os.environ, **self._program[2]}))
            if refused and wanted == EXPANDABLE and self._allocator_problem is None:
                return ExpandableRefused(refused[0])
            return script_error(workload, lost)
        return WorkloadError(
            f"{workload}: the worker process {lost} while it built the workload",
            "Its last output may say why. If something outside kills it (a job's or a container's limit), it needs "
            "less memory or time, or a higher limit there.",
            tail(lost.output, lines=12),
        )

    def _release(self) -> None:
        for lock in self._locks.values():
            lock.close()
        self._locks.clear()

    def _drop(self) -> None:
        if self._has_worker:
            self._has_worker = False
            self._nursery.end_worker()
            if self._nodes is not None:
                self._nodes.end()


class ExpandableRefused(ProbeError):
    """The driver refused a script's first memory, as it was to take expandable segments."""

    def __init__(self, error: str) -> None:
        self.problem = f"expandable segments don't work: {error}"
        super().__init__(
            f"--allocator expandable is impossible here: {self.problem}",
            "Leave it out: whatever works is then measured, and every result says how to train with it.",
        )


def script_error(command: str, lost: WorkerLost) -> WorkloadError:
    """Return the error for a training script that ended, or hung, before it trained."""
    message = f"{command} {lost} before it trained"
    output = lost.output
    first = first_to_end(output)
    if first is not None:
        how, output = first
        message += f": {how}"
    hint = (
        "Its last output may say why. Run it by itself first; here it gets no input, and what it writes lands in a "
        "scratch folder."
    )
    if os.strerror(errno.ENOSPC) in output:
        hint = "What it writes lands in a scratch folder, whose disk is full. Name one with more room: --scratch DIR."
    failed = not str(lost).endswith("exit code 0")
    said = meaning_of_output(output, failed=failed)
    if said is not None:
        message += f": {said[0]}"
        hint = said[1]
    elif not failed:
        message += ": no optimizer stepped after a batch of a torch DataLoader"
        hint = (
            "A torch DataLoader must load its batches, in a process with PYTHONPATH (`python -I` ignores it), whose "
            "Python has batchtune. Or does it resume from a checkpoint at its end?"
        )
    return WorkloadError(message, hint, tail(output, lines=12))


@contextlib.contextmanager
def script_request(
    command: list[str], scratch: str | None = None
) -> Iterator[ScriptRequest]:
    """Yield the request for a script, with a scratch folder that is removed at the end; `scratch` as in settings."""
    unprotected = scratch == UNPROTECTED
    with temporary_folder("batchtune-", None if unprotected else scratch) as folder:
        yield ScriptRequest(
            command=command, scratch=str(folder.absolute()), unprotected=unprotected
        )


def about_script(script: Script, scratch: str | None = None) -> Iterator[str]:
    """Yield what was learned of a training script, as sentences for the user."""
    where = (
        "What the script writes lands in a scratch folder, which is removed at the end"
    )
    if scratch == UNPROTECTED:
        where = "Warning: the script runs in the working folder itself, and may overwrite or delete your files"
    yield f"{where}; trackers such as wandb and MLflow are turned off."
    yield f"Learned from the script's own data ({script.loader}): {'; '.join(script.batches)}."
    if script.packed:
        yield "Its batches are packed: ΣL is the sum of the lengths of their sequences."
    if script.accumulation > 1:
        mean = " on average" if script.steps_vary else ""
        yield f"An optimizer step trains on {script.accumulation} batches{mean}."
    for twin in script.twins:
        difference = twin.difference
        if abs(difference) > EQUAL_TWINS:
            yield (
                f"Warning: a made batch of {twin.shape} allocates {difference:+.1%} compared with the script's own: "
                "largest batches may be off by as much."
            )
    if script.why_unproven is not None:
        yield "Warning: no batch size will be proven to fit."
