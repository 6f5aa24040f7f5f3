"""Describe the devices, memory and software of this machine.

Torch and the driver are queried in a process of their own (`main`): broken ones may end that, and nothing else.
"""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import re
import signal
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import msgspec
from msgspec.structs import replace

from batchtune.probe.devices import backends, describe_environment, lock_path
from batchtune.probe.devices.cpu import CPU_ID, describe_cpu
from batchtune.processes import command
from batchtune.processes.worker import judged_end
from batchtune.results import Doctor, DoctorGpu, DoctorTorch, meta_of
from batchtune.trust import settings_warnings

# Optional package → the distributions that provide it; the first that is installed counts.
_PACKAGES = {
    "mutagen": ("mutagen",),
    "tokenizers": ("tokenizers",),
    "speechbrain": ("speechbrain",),
    "lhotse": ("lhotse",),
    "webdataset": ("webdataset",),
    "datasets": ("datasets",),
    "transformers": ("transformers",),
    "lightning": ("lightning", "pytorch-lightning"),
    "nvidia-dali": (
        "nvidia-dali-cuda130",
        "nvidia-dali-cuda120",
        "nvidia-dali-cuda110",
    ),
}


class _DriverFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The driver's own description; `problem` says why it can't be asked."""

    driver: str | None
    gpus: list[DoctorGpu]
    problem: str | None


class _TorchFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Torch, and the devices that it sees."""

    torch: DoctorTorch
    gpus: list[DoctorGpu]


def examine(timeout_seconds: float) -> Doctor:
    """Examine this machine. Torch and the driver are queried for at most this time."""
    driver, torch = _ask_in_a_process(timeout_seconds)
    environment = describe_environment()
    return Doctor(
        meta=meta_of(Doctor),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        torch=torch.torch,
        driver=driver.driver,
        nvml_problem=driver.problem,
        gpus=merge_gpus(driver.gpus, torch.gpus),
        cpu=describe_cpu(lock_holder(CPU_ID)),
        environment=environment,
        packages={
            name: _installed(distributions) for name, distributions in _PACKAGES.items()
        },
        warnings=settings_warnings(environment),
    )


def merge_gpus(
    by_driver: Sequence[DoctorGpu], by_torch: Sequence[DoctorGpu]
) -> list[DoctorGpu]:
    """Return one entry a GPU: those that torch sees, in its order, then those that only the driver knows."""
    unseen = {gpu.uuid: gpu for gpu in by_driver if gpu.uuid or not by_torch}
    gpus = []
    for gpu in by_torch:
        facts = unseen.pop(gpu.uuid, gpu)
        gpus.append(
            replace(
                facts,
                name=gpu.name,
                device=gpu.device,
                capability=gpu.capability,
                total_bytes=gpu.total_bytes,
                expandable_segments=gpu.expandable_segments,
            )
        )
    gpus += unseen.values()
    return [replace(gpu, probe_process=lock_holder(gpu.uuid)) for gpu in gpus]


def lock_holder(device_id: str | None) -> int | None:
    """Return the process that holds a device's lock, by the kernel's list of locks (man 5 proc); None if unknown.

    The lock itself is not tried: a probe that starts at this moment would find it held.
    """
    with contextlib.suppress(OSError, ValueError):
        path = lock_path(device_id or "")
        # `1: FLOCK ADVISORY WRITE 4711 fe:01:1234 0 EOF`; in a container the process may be 0.
        if re.search(
            rf"FLOCK .* WRITE .*:{path.stat().st_ino} ", Path("/proc/locks").read_text()
        ):
            return int(path.read_text())
    return None


def _ask_in_a_process(timeout_seconds: float) -> tuple[_DriverFacts, _TorchFacts]:
    """Query the driver and torch; a missing answer becomes a problem."""
    # Files, not pipes: a process that a library leaves running may hold a pipe open forever.
    with tempfile.TemporaryFile() as answers, tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            command("batchtune.probe.doctor"),
            stdin=subprocess.DEVNULL,
            stdout=answers,
            stderr=printed,
            start_new_session=True,
        )
        try:
            exit_code = process.wait(timeout_seconds)
            _, how = judged_end(exit_code, "", None)
            problem = f"the process {how}"
        except subprocess.TimeoutExpired:
            problem = f"it gave no answer within {timeout_seconds:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        answers.seek(0)
        # The process may have been ended in the middle of the last one.
        *lines, _ = answers.read().split(b"\n")
        printed.seek(0)
        last_words = printed.read().decode(errors="replace").strip().rpartition("\n")[2]
    driver = _DriverFacts(
        driver=None, gpus=[], problem=f"the query of the driver failed: {problem}"
    )
    broken = DoctorTorch(
        version=_installed(["torch"]),
        cuda=None,
        hip=None,
        cudnn=None,
        problem=last_words or problem,
    )
    torch = _TorchFacts(torch=broken, gpus=[])
    if lines:
        driver = msgspec.json.decode(lines[0], type=_DriverFacts)
    if len(lines) > 1:
        torch = msgspec.json.decode(lines[1], type=_TorchFacts)
    return driver, torch


def _installed(distributions: Sequence[str]) -> str | None:
    """Return the version of the first distribution that is installed, without importing it."""
    for name in distributions:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name) or "unknown version"
    return None


def main() -> None:
    """Write what the driver says to stdout, then what torch says, a JSON document a line, each as soon as it is known.

    What libraries print goes to stderr.
    """
    gc.disable()  # a third of the time that the import of torch takes
    answers = os.dup(1)
    os.dup2(2, 1)
    os.write(answers, msgspec.json.encode(_ask_driver()) + b"\n")
    os.write(answers, msgspec.json.encode(_ask_torch()) + b"\n")
    os._exit(0)  # nothing that a library does at its end can spoil it


def _ask_driver() -> _DriverFacts:
    driver = None
    problem = None
    gpus: list[DoctorGpu] = []
    for backend in backends():
        gpus_seen, version, reason = backend.seen_by_driver()
        gpus += gpus_seen
        driver = driver or version
        problem = problem or reason
    return _DriverFacts(driver=driver, gpus=gpus, problem=problem)


def _ask_torch() -> _TorchFacts:
    """Raise whatever the import of torch raises: the traceback on stderr is shown."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gpus: list[DoctorGpu] = []
        for backend in backends():
            gpus += backend.seen_by_torch()
    cudnn = None
    problem = None
    if gpus:
        cudnn = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]  # torch's
    elif caught:
        problem = str(caught[0].message).splitlines()[0]
    facts = DoctorTorch(
        version=str(torch.__version__),
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        cudnn=cudnn,
        problem=problem,
    )
    return _TorchFacts(torch=facts, gpus=gpus)
