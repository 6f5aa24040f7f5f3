"""Describe the devices, memory and software of this machine."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import msgspec
from msgspec.structs import replace

from batchtune.probe.devices import describe_environment
from batchtune.probe.devices.cpu import CPU_ID, describe_cpu
from batchtune.probe.inventory import DriverFacts, TorchFacts, decode_line
from batchtune.probe.lock import lock_path
from batchtune.processes.start import command
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
    "nvidia-dali": ("nvidia-dali-cuda130", "nvidia-dali-cuda120", "nvidia-dali-cuda110"),
}


def examine(timeout_seconds: float) -> Doctor:
    """Examine this machine. Torch and the driver are queried in a separate process, for at most so long."""
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
        packages={name: _installed(distributions) for name, distributions in _PACKAGES.items()},
        warnings=settings_warnings(environment),
    )


def merge_gpus(by_driver: Sequence[DoctorGpu], by_torch: Sequence[DoctorGpu]) -> list[DoctorGpu]:
    """Return one entry a GPU: those that torch sees, in its order, then those that only the driver knows."""
    driver_facts = {gpu.uuid: gpu for gpu in by_driver if gpu.uuid}
    gpus = []
    for gpu in by_torch:
        facts = driver_facts.get(gpu.uuid or "", gpu)
        gpus.append(
            replace(
                facts,
                name=gpu.name,
                device=gpu.device,
                capability=gpu.capability,
                total_bytes=gpu.total_bytes,
            )
        )
    seen = {gpu.uuid for gpu in by_torch}
    for gpu in by_driver:
        # Without a UUID it may be one that torch sees.
        is_unseen = not seen if gpu.uuid is None else gpu.uuid not in seen
        if is_unseen:
            gpus.append(gpu)
    return [replace(gpu, probe_process=lock_holder(gpu.uuid) if gpu.uuid else None) for gpu in gpus]


def lock_holder(device_id: str) -> int | None:
    """Return the process that holds a device's lock, by the kernel's list of locks (man 5 proc); None if unknown.

    The lock itself is not tried: a probe that starts at this moment would find it held.
    """
    with contextlib.suppress(OSError, ValueError):
        path = lock_path(device_id)
        inode = path.stat().st_ino
        written = int(path.read_text())
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            # `1: FLOCK ADVISORY WRITE 4711 fe:01:1234 0 EOF`; in a container the process may be 0.
            if "FLOCK" in fields and "WRITE" in fields and any(field.endswith(f":{inode}") for field in fields):
                return written
    return None


def _ask_in_a_process(timeout_seconds: float) -> tuple[DriverFacts, TorchFacts]:
    """Query the driver and torch; a missing answer becomes a problem."""
    # Files, not pipes: a process that a library leaves running may hold a pipe open forever.
    with tempfile.TemporaryFile() as answers, tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            command("batchtune.probe.inventory"),
            stdin=subprocess.DEVNULL,
            stdout=answers,
            stderr=printed,
            start_new_session=True,
        )
        last_line = None
        try:
            exit_code = process.wait(timeout_seconds)
            problem = f"the process ended with exit code {exit_code}"
            if exit_code < 0:
                problem = f"the process was killed by {signal.Signals(-exit_code).name}"
            printed.seek(0)
            lines_printed = printed.read().decode(errors="replace").strip().splitlines()
            if lines_printed:
                last_line = lines_printed[-1]
        except subprocess.TimeoutExpired:
            problem = f"it gave no answer within {timeout_seconds:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        answers.seek(0)
        lines = answers.read().splitlines()
    driver = DriverFacts(driver=None, gpus=[], problem=f"the query of the driver failed: {problem}")
    broken_torch = DoctorTorch(
        version=_installed(("torch",)), cuda=None, hip=None, cudnn=None, problem=last_line or problem
    )
    torch = TorchFacts(torch=broken_torch, gpus=[])
    for line in lines:
        with contextlib.suppress(msgspec.DecodeError):  # the process was ended in the middle of a line
            facts = decode_line(line)
            if isinstance(facts, DriverFacts):
                driver = facts
            else:
                torch = facts
    return driver, torch


def _installed(distributions: Sequence[str]) -> str | None:
    """Return the version of the first distribution that is installed, without importing it."""
    for name in distributions:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name) or "unknown version"
    return None
