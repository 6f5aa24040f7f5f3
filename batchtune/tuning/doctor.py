"""The devices, memory and software of this machine, and what prevents or disturbs a probe."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import msgspec
from msgspec.structs import replace

from batchtune.probe.devices import describe_environment
from batchtune.probe.devices.cpu import CPU_ID, describe_cpu
from batchtune.probe.inventory import DriverFacts, TorchFacts, decode_line
from batchtune.probe.lock import lock_path
from batchtune.processes.start import command
from batchtune.results import Doctor, DoctorCpu, DoctorGpu, DoctorTorch, meta_of
from batchtune.trust import busy_with, settings_warnings
from batchtune.units import counted

# Optional package → the distributions that provide it; the first that is installed counts.
_PACKAGES = {
    **{
        name: (name,)
        for name in ("soundfile", "tokenizers", "speechbrain", "lhotse", "webdataset", "datasets", "transformers")
    },
    "lightning": ("lightning", "pytorch-lightning"),
    "nvidia-dali": ("nvidia-dali-cuda130", "nvidia-dali-cuda120", "nvidia-dali-cuda110"),
}

_GET_TORCH = "https://pytorch.org/get-started/locally/"
_GRANT = (
    "Allow it in the container (NVIDIA_DRIVER_CAPABILITIES=compute,utility) and for this user. A GPU that is lost "
    "needs a restart of the machine."
)
# A load above this part of the processors is more than background work.
_BUSY_SHARE = 0.5


def examine(timeout_seconds: float) -> Doctor:
    """Examine this machine. Torch and the driver are queried in a separate process, for at most so long."""
    driver, torch = _ask_in_a_process(timeout_seconds)
    environment = describe_environment()
    cpu = describe_cpu(lock_holder(CPU_ID))
    gpus = merge_gpus(driver.gpus, torch.gpus)
    return Doctor(
        meta=meta_of(Doctor),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        torch=torch.torch,
        driver=driver.driver,
        nvml_problem=driver.problem,
        gpus=gpus,
        cpu=cpu,
        environment=environment,
        packages={name: _installed(distributions) for name, distributions in _PACKAGES.items()},
        warnings=[*_warnings(torch.torch, gpus, cpu, driver.problem), *settings_warnings(environment)],
    )


def merge_gpus(by_driver: Sequence[DoctorGpu], by_torch: Sequence[DoctorGpu]) -> list[DoctorGpu]:
    """Return one entry a GPU: those that torch sees, in its order, then those that only the driver knows."""
    known = {one.uuid: one for one in by_driver if one.uuid}
    gpus = [
        replace(
            known.get(one.uuid or "", one),
            **{name: getattr(one, name) for name in ("name", "device", "capability", "total_bytes")},
        )
        for one in by_torch
    ]
    seen = {one.uuid for one in by_torch}
    # Without a UUID it may be one that torch sees.
    gpus += [one for one in by_driver if (not seen if one.uuid is None else one.uuid not in seen)]
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
        last_words = None
        try:
            code = process.wait(timeout_seconds)
            ended = f"the process ended with exit code {code}"
            if code < 0:
                ended = f"the process was killed by {signal.Signals(-code).name}"
            printed.seek(0)
            last_words = next(reversed(printed.read().decode(errors="replace").strip().splitlines()), None)
        except subprocess.TimeoutExpired:
            ended = f"it gave no answer within {timeout_seconds:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        answers.seek(0)
        lines = answers.read().splitlines()
    driver = DriverFacts(driver=None, gpus=[], problem=f"the query of the driver failed: {ended}")
    version = _installed(("torch",))
    torch = TorchFacts(
        torch=DoctorTorch(version=version, cuda=None, hip=None, cudnn=None, problem=last_words or ended), gpus=[]
    )
    for line in lines:
        with contextlib.suppress(msgspec.DecodeError):  # the process was ended in the middle of a line
            facts = decode_line(line)
            driver, torch = (facts, torch) if isinstance(facts, DriverFacts) else (driver, facts)
    return driver, torch


def _installed(distributions: Sequence[str]) -> str | None:
    """Return the version of the first distribution that is installed, without importing it."""
    for name in distributions:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name) or "unknown version"
    return None


def _warnings(torch: DoctorTorch, gpus: Sequence[DoctorGpu], cpu: DoctorCpu, nvml_problem: str | None) -> Iterator[str]:
    unseen = [gpu for gpu in gpus if gpu.device is None]
    if torch.version is None:
        yield f"PyTorch is not installed ({torch.problem}). Install it: {_GET_TORCH}."
    elif torch.problem is not None:
        yield (
            f"PyTorch {torch.version} does not work here: {torch.problem}. No probe can run. "
            f"Reinstall it, in a build that fits driver and system: {_GET_TORCH}."
        )
    elif unseen and not (torch.cuda or torch.hip):
        yield (
            f"PyTorch {torch.version} was built without CUDA, so a probe would run on the CPU instead of "
            f"{unseen[0].name}. Install a CUDA build: {_GET_TORCH}."
        )
    elif unseen:
        yield (
            f"PyTorch does not see {counted(len(unseen), 'GPU')} that the driver knows ({unseen[0].name}). "
            "Check whether CUDA_VISIBLE_DEVICES hides it."
        )
    if nvml_problem is not None and gpus and not torch.hip:
        yield (
            f"NVML, the driver's library, can't be asked about every GPU ({nvml_problem}): a probe goes on without it, "
            f"and can't warn of other processes or of a lowered clock. {_GRANT}"
        )
    for gpu in gpus:
        name = f"{gpu.device} ({gpu.name})" if gpu.device else gpu.name
        if gpu.nvml_problem is not None:
            yield (
                f"NVML, the driver's library, does not answer everything about {name}: {gpu.nvml_problem}. A probe "
                f"goes on without these answers, and can't warn of what they would show. {_GRANT}"
            )
        if gpu.probe_process is not None:
            yield (
                f"A probe (process {gpu.probe_process}) is using {name}: another one has to wait until it ends, as "
                "--wait does."
            )
        elif who := busy_with(gpu.processes):
            yield f"{name} is used by {who}. Stop it, or probe another device."
        if gpu.throttle_reasons:
            yield (
                f"The clock of {name} is held down now ({', '.join(gpu.throttle_reasons)}): step times would be "
                "too long. Check its cooling and power limit."
            )
    if cpu.limit_problem is not None:
        yield f"No probe on the CPU is possible here: {cpu.limit_problem}. Probe on a GPU, or on Linux."
    if cpu.probe_process is not None:
        yield (
            f"A probe (process {cpu.probe_process}) is using the CPU: step times of another one would be too long. "
            "Wait until it ends, as --wait does."
        )
    elif cpu.load_average is not None and cpu.load_average > _BUSY_SHARE * cpu.processors:
        yield (
            f"Other programs use the CPU: a load average of {cpu.load_average:.1f} in the last minute, on "
            f"{counted(cpu.processors, 'processor')}. Step times of a probe on the CPU would be too long. "
            "Stop them first."
        )
