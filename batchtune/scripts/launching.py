"""The worker process of a probe whose workload is a training script: starts the script, and passes messages on to it.

Each process of the script that trains, one or several ranks, connects when its loop has taken an
optimizer step (`scripts.feeding`), and answers from then on; their replies are merged into one, as
a gang's are (`probe.gang`). What starts them (torchrun, accelerate, Lightning, a shell script)
needs to know nothing of that.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from batchtune.errors import ProbeError, WorkloadError
from batchtune.files import command_text
from batchtune.probe.gang import Leader, PrintedOutput
from batchtune.probe.ranks import Ranks
from batchtune.probe.requests import (
    TEMPORARY,
    Describe,
    Prepare,
    Ran,
    Reply,
    Request,
    RunTrial,
    ScriptRequest,
)
from batchtune.processes.worker import Failed, oom_kills, serve
from batchtune.results import Trial
from batchtune.scripts import environment, sandbox

# Keeps a script that is only measured from the user's files: its writes land in a scratch folder, or fail.
#
# Where the kernel allows it, the script gets mounts of its own (`sandbox`): it works in the folder that it was started
# in, and each disk has a layer that takes its writes. Elsewhere (most containers), and where a scheduler starts
# processes on other machines, it works in a copy of that folder, and Landlock forbids it to write to anything but its
# scratch folder.

# In a copy, larger files are linked, and so are all once this much is copied.
_LARGEST_COPY = 32 << 20
_MOST_COPIED = 512 << 20
# Folders with more entries (data), those further down, and those beyond so many entries in all, are linked as a whole.
_MOST_ENTRIES = 1000
_DEEPEST = 4
_MOST_IN_ALL = 5000
# What libraries download, convert and compile, for every start of the script.
_CACHES = (
    "~/.cache",
    "~/.triton",
    "~/.nv",
    "$XDG_CACHE_HOME",
    "$HF_HOME",
    "$TORCH_HOME",
)


class ScratchPlace(NamedTuple):
    """Where a script runs, and how it is kept from the user's files.

    Attributes:
        folder: Its working folder.
        enter: What its first process does before it executes the command; raises OSError if the kernel refuses.
        options: Of the hook, for `sandbox.stay_inside`.
    """

    folder: Path
    enter: Callable[[], None] | None
    options: dict[str, Any]


def start(
    script: ScriptRequest,
    environment: Callable[[Mapping[str, Any]], dict[str, str]],
    **streams: Any,
) -> subprocess.Popen[bytes]:
    """Start a script where it can't harm the user's files.

    `environment` returns the variables for the options of the hook. Raises WorkloadError if the command can't be
    started, ProbeError if nothing here protects files.
    """
    for place in _places(script):
        try:
            return subprocess.Popen(
                script.command,
                env=environment(place.options)
                | {"TMPDIR": os.path.join(script.scratch, TEMPORARY)},
                cwd=place.folder,
                stdin=subprocess.DEVNULL,
                preexec_fn=place.enter,
                **streams,
            )
        except subprocess.SubprocessError:  # the place can't be entered
            continue
        except OSError as error:
            raise WorkloadError(
                f"{command_text(script.command)} can't be started: {error.strerror or error}",
                "Give the command as in a shell, such as -- python train.py --epochs 1.",
            ) from error
    raise ProbeError(
        "nothing here protects your files from the script: neither user namespaces with overlayfs, nor Landlock",
        "With --scratch none, the script runs in the working folder itself, and may overwrite or delete your files.",
    )


def _places(script: ScriptRequest) -> Iterator[ScratchPlace]:
    """Yield where a script can run, the best place first. Raises ProbeError if the scratch folder can't be written."""
    working = Path.cwd()
    temporary = os.path.join(script.scratch, TEMPORARY)
    try:
        os.makedirs(temporary, exist_ok=True)
        if script.unprotected:
            yield ScratchPlace(working, None, {})
            return
        folder = Path(tempfile.mkdtemp(dir=script.scratch))
        outside = folder / "outside"
        outside.touch()
        caches = list(_caches(working))
        if not is_cluster() and "srun" not in script.command:
            enter = partial(
                sandbox.enter,
                folder / "layers",
                working,
                cached={
                    cache: Path(script.scratch, f"cache-{number}")
                    for number, cache in enumerate(caches)
                },
                # Where programs meet that share a GPU.
                writable=[
                    temporary,
                    os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"),
                ],
                read_only=str(outside),
            )
            yield ScratchPlace(
                working, enter, {"outside": str(outside), "writable": []}
            )
        for shared in glob(f"{sandbox.SHARED_MEMORY}/*/"):
            raise ProbeError(
                f"nothing here protects the folder {shared} in shared memory from the script",
                "Move it to a disk. With --scratch none, the script may overwrite or delete any of your files.",
            )
        copy = mirror(working, folder / "copy")
    except OSError as error:
        raise ProbeError(
            f"the scratch folder can't be written: {error.filename or script.scratch}: {error.strerror or error}",
            "Name a folder on another disk with --scratch DIR, or a smaller working folder.",
        ) from error
    writable = [temporary, str(folder / "copy"), *caches]
    options = {"outside": str(outside), "writable": writable}
    yield ScratchPlace(copy, partial(sandbox.confine, writable), options)


def is_cluster() -> bool:
    """Return whether the command may start ranks on other machines too, as `srun torchrun` does."""
    nodes = os.environ.get("SLURM_NNODES") or os.environ.get("SLURM_JOB_NUM_NODES")
    return nodes not in (None, "1")


def _caches(working: Path) -> Iterator[str]:
    """Yield the folders of libraries' caches that exist, unless they hold the user's own."""
    for name in _CACHES:
        folder = os.path.realpath(os.path.expandvars(os.path.expanduser(name)))
        if os.path.isdir(folder) and not working.is_relative_to(folder):
            yield folder


def mirror(folder: Path, scratch: Path) -> Path:
    """Make `scratch` look like the file system around `folder`, and return the working folder in it.

    Its parents are links to their entries. Within, folders are made anew, files up to 32 MiB copied, others are links.
    """
    scratch.mkdir()
    real = Path("/")
    copy = scratch
    for part in folder.parts[1:]:
        if real != Path("/") and _count_entries(str(real)) <= _MOST_ENTRIES:
            for entry in os.scandir(real):
                if entry.name != part:
                    Path(copy, entry.name).symlink_to(entry.path)
        real /= part
        copy /= part
        copy.mkdir()
    _copy(real, copy, scratch)
    return copy


def _copy(folder: Path, copy_of_folder: Path, scratch: Path) -> None:
    """Copy a folder as far as it is small: first what lies high, as a script's own files do, then its data."""
    room = _MOST_COPIED
    entries = 0
    folders = deque([(folder, copy_of_folder, 0)])
    while folders:
        source, target, depth = folders.popleft()
        for entry in os.scandir(source):
            copy = target / entry.name
            if scratch.is_relative_to(entry.path):
                continue
            if entry.is_dir() and not entry.is_symlink() and depth < _DEEPEST:
                count = _count_entries(entry.path)
                if count <= min(_MOST_ENTRIES, _MOST_IN_ALL - entries):
                    entries += count
                    copy.mkdir()
                    folders.append((Path(entry), copy, depth + 1))
                    continue
            with contextlib.suppress(PermissionError, FileNotFoundError):
                if entry.is_file():
                    size = entry.stat().st_size
                    if size <= min(room, _LARGEST_COPY):
                        shutil.copy2(entry, copy)
                        room -= size
                        continue
            copy.symlink_to(os.path.abspath(entry))


def _count_entries(folder: str) -> int:
    """Return the number of entries of a folder; too many if they may not be listed."""
    try:
        return len(os.listdir(folder))
    except PermissionError:
        return _MOST_ENTRIES + 1


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
        return Ran(
            trial=Trial.of(request.shape, "timeout", error=reply.message), renew=True
        )

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
