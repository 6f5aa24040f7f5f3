"""The CPU's memory: limited by the kernel, measured by what it tells of this process (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from batchtune.errors import ProbeError
from batchtune.machine import available_memory, total_memory
from batchtune.probe.devices.base import DeviceBackend, Meter
from batchtune.probe.protocol import Identified
from batchtune.results import Device, DoctorCpu, ProbedWith
from batchtune.units import format_size

# Of the device's lock.
CPU_ID = "cpu"

_WORN_SHARE = 0.02


class CpuBackend(DeviceBackend):
    """The CPU (Linux)."""

    OOM_MESSAGES = (r"DefaultCPUAllocator: (can't allocate memory|not enough memory)",)
    VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    WORKER_ENVIRONMENT: ClassVar = {
        # Read by glibc when the process starts: every block of 16 KiB or more is mapped by itself and given back when
        # freed. What the process holds is then what its tensors hold, and nothing is hidden in arenas. Smaller tensors
        # leave holes in the heap: with blocks of up to 64 KiB there, a small batch could leave some MiB of them.
        "MALLOC_MMAP_THRESHOLD_": "16384",
        "MALLOC_TRIM_THRESHOLD_": "16384",
        "MALLOC_ARENA_MAX": "1",
        # oneDNN keeps a compiled primitive with its memory for each of the last 1024 shapes: some MiB a trial that
        # would count against all later ones.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0",
        "LRU_CACHE_CAPACITY": "1",
    }

    def is_available(self) -> bool:
        """Return True: every machine has one."""
        return True

    def identify(self, device: str) -> Identified:
        """Return the one CPU; torch is not imported for it."""
        return Identified(id=CPU_ID, name=_cpu_name(), shared=True)

    def open(self, device: str, settings: ProbedWith, limit_bytes: int | None) -> CpuMeter:
        """Open this process's memory."""
        return CpuMeter(settings.memory_bytes, settings.memory_fraction, limit_bytes)


def describe_cpu(probe_process: int | None) -> DoctorCpu:
    """Describe the CPU and its memory, with the process of batchtune that is probing it."""
    return DoctorCpu(
        name=_cpu_name(),
        processors=len(_usable()),
        total_bytes=total_memory(),
        available_bytes=available_memory(),
        limit_problem=_limit_problem(),
        probe_process=probe_process,
        load_average=_load_average(),
    )


class CpuMeter(Meter):
    """The CPU's memory, as what the process holds of private writable memory (Linux).

    `RLIMIT_DATA` limits it: beyond, mmap and brk fail and torch raises. The kernel keeps a resettable peak only of
    the resident set (`VmHWM`, reset by writing 5 to /proc/self/clear_refs; man 5 proc), so the peak of the data is
    data at the reset + the growth of the resident set since, less the growth of its pages of files: exact for memory
    that is touched, as tensors are. Only while libraries are still being read in, in a process's first step, is it too
    low by what they take after the peak.
    """

    def __init__(self, memory_bytes: int | None, fraction: float, limit_bytes: int | None) -> None:
        self._shares = _ProcessorShares()
        load = _load_average()
        import torch

        self.torch_device = torch.device("cpu")
        if platform.system() != "Linux":
            raise ProbeError(
                "on the CPU the probe needs Linux: other systems enforce no limit on a process's memory",
                "Probe on a CUDA device, or on Linux.",
            )
        total = total_memory()
        self.device = Device(
            kind="cpu",
            name=_cpu_name(),
            total_bytes=total,
            limit_bytes=limit_bytes or int(min(memory_bytes or total, total) * fraction),
            driver=None,
            torch=str(torch.__version__),
            allocator="malloc, mapped and returned block by block",
            other_processes=None,
            free_bytes=available_memory(),
            processors=len(_usable()),
            load_average=load,
        )
        self._continued = limit_bytes is not None
        self._data = self._resident = self._files = self._gap = 0
        self._can_reset = True

    def limit(self) -> None:
        """Set RLIMIT_DATA, after starting the threads that would later need memory for their stacks."""
        _start_threads()
        self._enforce("Python and PyTorch alone hold")

    def settle(self, reserve_bytes: int, ddp_bytes: int) -> None:
        """Lower the limit by what is to be kept free: it becomes the cap × the fraction - reserve - ddp.

        The limit of a run that is being continued stays as it is: it was lowered then.
        """
        limit = self.device.limit_bytes
        self.device = msgspec.structs.replace(
            self.device,
            limit_bytes=limit if self._continued else limit - reserve_bytes - ddp_bytes,
            reserve_bytes=reserve_bytes,
            ddp_bytes=ddp_bytes,
            other_processors=self.other_processors(),
        )
        self._enforce("with the workload built, Python and PyTorch hold")

    def _enforce(self, holds: str) -> None:
        """Set RLIMIT_DATA to the limit. Raises ProbeError where that much is held already."""
        import resource

        held, device = _status()["VmData"], self.device
        if held >= device.limit_bytes:
            kept = device.reserve_bytes + device.ddp_bytes
            besides = f", with {format_size(kept)} kept free" if kept else ""
            raise ProbeError(
                f"a memory limit of {format_size(max(0, device.limit_bytes))} is too small{besides}: "
                f"{holds} {format_size(held)}",
                "Give more with --memory, or keep less free with --reserve." if kept else "Give more with --memory.",
            )
        resource.setrlimit(resource.RLIMIT_DATA, (device.limit_bytes, device.limit_bytes))
        self._gap = _trimmed_gap()

    def reset(self) -> None:
        """Reset the kernel's high-water mark of the resident set."""
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self._can_reset = False
        status = _status()
        self._data, self._resident, self._files = status["VmData"], status["VmRSS"], _files(status)

    def peak(self) -> int | None:
        """Data held at the reset + the resident set's growth since, but for the pages of files; at least the data."""
        if not self._can_reset:
            return None
        status = _status()
        files = max(0, _files(status) - self._files)
        return max(status["VmData"], self._data + status["VmHWM"] - self._resident - files)

    def in_use(self) -> int:
        """Return the bytes of the process's data."""
        return _status()["VmData"]

    def other_processors(self) -> float | None:
        """How many processors other programs took since this was last asked, on average; None before Linux told."""
        return self._shares.others()

    def switches(self) -> dict[str, Any]:
        """Return the number of threads."""
        import torch

        return {"threads": torch.get_num_threads()}

    def worn(self) -> bool:
        """Return whether the heap has grown holes: blocks too small to be mapped leave them, and they count as data."""
        return _trimmed_gap() - self._gap > _WORN_SHARE * self.device.limit_bytes


class _ProcessorShares:
    """Whose the processors are: this session's (a worker and what it started) or other programs' (man 5 proc)."""

    def __init__(self) -> None:
        self._before = _processor_seconds()

    def others(self) -> float | None:
        """How many processors other programs took, on average since this was last asked; None where not known."""
        before, self._before = self._before, _processor_seconds()
        if before is None or self._before is None:
            return None
        elapsed, busy, own = (now - then for now, then in zip(self._before, before, strict=True))
        # A program that has ended takes its own seconds with it, and clocks tick every hundredth of a second.
        return None if elapsed <= 0 else round(max(0.0, busy - own) / elapsed, 3)


def _processor_seconds() -> tuple[float, float, float] | None:
    """The time, for how long the processors that this process may use were busy, and with this session's processes."""
    ours = {f"cpu{number}" for number in _usable()}
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
        # user nice system idle iowait irq softirq steal; guests are in user already.
        busy = sum(int(one) for name, *times in lines if name in ours for one in (*times[:3], *times[5:8]))
        own = sum(_session_ticks(os.getsid(0)))
    except (OSError, ValueError, IndexError):
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    return time.monotonic(), busy / ticks, own / ticks


def _session_ticks(session: int) -> Iterator[int]:
    """Of each process of a session: the clock ticks that it, and its children that have ended, have run."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session:
                    yield sum(map(int, fields[11:15]))


def _usable() -> set[int]:
    """Return the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _load_average() -> float | None:
    """How many processes ran or waited to run in the last minute, on average; None where the system can't tell."""
    with contextlib.suppress(OSError, AttributeError):
        return round(os.getloadavg()[0], 2)
    return None


def _status() -> dict[str, int]:
    """Return the memory lines of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    pairs = (line.split(":", 1) for line in lines if line.startswith(("Vm", "Rss")))
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}


def _files(status: dict[str, int]) -> int:
    """Return the part of the resident set that is no data: pages of files and shared memory; 0 before Linux 4.5."""
    return status.get("RssFile", 0) + status.get("RssShmem", 0)


def _trimmed_gap() -> int:
    """Data that is held, but not in memory, after the heap has given back what it can: its holes, in bytes.

    The resident set without the pages of files: libraries are read in while the first steps run, and would hide holes.
    """
    with contextlib.suppress(AttributeError):  # glibc's; others give memory back by themselves
        ctypes.CDLL(None).malloc_trim(0)
    status = _status()
    return status["VmData"] - status["VmRSS"] + _files(status)


def _start_threads() -> None:
    """Make torch start its worker threads (forward and backward), whose stacks count as data."""
    import torch

    weight = torch.randn(256, 256, requires_grad=True)
    loss = (torch.randn(1024, 256) @ weight).square().sum()
    torch.autograd.backward(loss)


def _limit_problem() -> str | None:
    """Return why memory can't be limited and measured on the CPU of this machine; None where it can."""
    if platform.system() != "Linux":
        return "it needs Linux: other systems enforce no limit on a process's memory"
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        return f"/proc/self/clear_refs can't be written ({error.strerror}): peaks of memory can't be told"
    return None


def _cpu_name() -> str:
    """Return the processor's name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
