"""The CPU's memory: limited by the kernel, measured by the kernel's figures of this process (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import time
from pathlib import Path
from typing import Any, ClassVar

import psutil
from msgspec.structs import replace

from batchtune.errors import ProbeError
from batchtune.probe.devices import DeviceBackend, DeviceIdentity, Meter
from batchtune.processes.pool import available_memory, total_memory
from batchtune.results import Device, DoctorCpu, ProbedWith
from batchtune.units import format_size

CPU_ID = "cpu"  # of its lock
# Holes of the heap, as a part of the limit, that cost the worker: one example of 33 s left 5 MiB of them, and all later
# peaks were higher by that.
_WORN_SHARE = 0.01
# What a training process holds besides what a worker does: 12 MiB at its start, most of it the stack of a thread that a
# forked process lacks; 8 to 14 MiB by `sampler_from_config` and a DataLoader; 20 to 32 bytes an example, in a million.
_TRAINING_BYTES = 24 << 20
_BYTES_OF_AN_EXAMPLE = 40
_MOST_FILLER = 1 << 45  # bytes; a process may have 2**47 on x86-64


class CpuBackend(DeviceBackend):
    """The CPU (Linux)."""

    OOM_MESSAGES = (r"DefaultCPUAllocator: (can't allocate memory|not enough memory)",)
    VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    WORKER_ENVIRONMENT: ClassVar[dict[str, str]] = {
        # Read by glibc when the process starts: blocks of 16 KiB or more are mapped one by one and returned when freed,
        # so the process holds just its tensors. Smaller ones leave holes in the heap: with a threshold of 64 KiB, a
        # small batch could leave some MiB of them.
        "MALLOC_MMAP_THRESHOLD_": "16384",
        "MALLOC_TRIM_THRESHOLD_": "16384",
        "MALLOC_ARENA_MAX": "1",
        # By default oneDNN caches a compiled primitive and its memory for each of the last 1024 shapes: some MiB a
        # trial, which would count against all later ones.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0",
        "LRU_CACHE_CAPACITY": "1",
    }

    def is_available(self) -> bool:
        """Return True: every machine has one."""
        return True

    def identify(self, device: str) -> DeviceIdentity:
        """Return the one CPU; torch is not imported for it."""
        return DeviceIdentity(id=CPU_ID, name=_cpu_name(), shared=True)

    def open(
        self, device: str, settings: ProbedWith, limit_bytes: int | None
    ) -> CpuMeter:
        """Open this process's memory."""
        return CpuMeter(settings, limit_bytes)


BACKEND = CpuBackend()


def describe_cpu(probe_process: int | None) -> DoctorCpu:
    """Describe the CPU and its memory, with the batchtune process that is probing it."""
    problem = None
    if platform.system() != "Linux":
        problem = "it needs Linux: other systems enforce no limit on a process's memory"
    elif "VmPeak" not in _status():
        problem = "/proc/self/status has no VmPeak: memory peaks can't be measured"
    return DoctorCpu(
        name=_cpu_name(),
        processors=len(_usable()),
        total_bytes=total_memory(),
        available_bytes=available_memory(),
        limit_problem=problem,
        probe_process=probe_process,
        load_average=round(os.getloadavg()[0], 2),
    )


class CpuMeter(Meter):
    """The CPU's memory: the private writable memory of this process (Linux).

    `RLIMIT_DATA` limits it: beyond the limit, mmap and brk fail and torch raises. The limit counts
    what is mapped, touched or not. The kernel keeps no peak of that (man 5 proc), only one of the
    address space (`VmPeak`), which can't be reset. So a reset fills the address space up to its old
    peak with pages that nobody may touch and that don't count as data: whatever the data grows by
    then shows in `VmPeak`. The peak is too low only in a process's first step, while libraries are
    still being loaded, by what they take after it.
    """

    def __init__(self, settings: ProbedWith, limit_bytes: int | None) -> None:
        self._seconds = _SecondsOfOthers()
        load = round(os.getloadavg()[0], 2)
        import torch

        self.torch_device = torch.device("cpu")
        total = total_memory()
        wanted = int(
            min(settings.memory_bytes or total, total) * settings.memory_fraction
        )
        self.device = Device(
            kind="cpu",
            name=_cpu_name(),
            total_bytes=total,
            limit_bytes=limit_bytes or wanted,
            driver=None,
            torch=str(torch.__version__),
            allocator=None,
            other_processes=None,
            free_bytes=available_memory(),
            processors=len(_usable()),
            load_average=load,
        )
        self._continued = limit_bytes is not None
        self._at_reset: dict[str, int] = {}
        self._filler: mmap.mmap | None = None
        self._held: mmap.mmap | None = None
        self._gap = 0

    def limit(self) -> None:
        """Set RLIMIT_DATA, after starting torch's threads (forward and backward), whose stacks count as data."""
        import torch

        weight = torch.randn(256, 256, requires_grad=True)
        torch.autograd.backward((torch.randn(1024, 256) @ weight).square().sum())
        self._enforce("Python, PyTorch and your code hold")

    def hold(self, examples: int, spent_bytes: int = 0) -> None:
        """Take as much as training takes for its data: pages that nothing touches, but that count as data."""
        size = _TRAINING_BYTES + _BYTES_OF_AN_EXAMPLE * examples - spent_bytes
        if size > 0:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._held = mmap.mmap(-1, size, flags=flags)

    def settle(self, reserve_bytes: int, ddp_bytes: int) -> None:
        """Lower the limit by what must stay free; a continued run's limit was lowered when the run began."""
        kept = reserve_bytes + ddp_bytes
        if self._continued:
            kept = 0
        self.device = replace(
            self.device,
            limit_bytes=self.device.limit_bytes - kept,
            reserve_bytes=reserve_bytes,
            ddp_bytes=ddp_bytes,
            **self.surroundings(),
        )
        self.lower(self.device.limit_bytes)

    def lower(self, limit_bytes: int) -> None:
        """Set RLIMIT_DATA."""
        self.device = replace(self.device, limit_bytes=limit_bytes)
        self._enforce("with the workload built, Python and PyTorch hold")

    def _enforce(self, holds: str) -> None:
        """Set RLIMIT_DATA to the limit. Raises ProbeError if that much is held already."""
        import resource

        held = self.in_use()
        device = self.device
        if held >= device.limit_bytes:
            kept = format_size(device.reserve_bytes + device.ddp_bytes)
            raise ProbeError(
                f"a memory limit of {format_size(max(0, device.limit_bytes))} is too small, with {kept} kept free: "
                f"{holds} {format_size(held)}",
                "Give more with --memory or --memory-fraction, or keep less free with --reserve.",
            )
        resource.setrlimit(
            resource.RLIMIT_DATA, (device.limit_bytes, device.limit_bytes)
        )
        self._gap = _trimmed_gap()

    def reset(self) -> None:
        """Fill the address space up to its peak."""
        if self._filler is not None:
            self._filler.close()
            self._filler = None
        before = _status()
        self._at_reset = {}
        with contextlib.suppress(OSError):  # the address space is limited (ulimit -v)
            if missing := before.get("VmPeak", 0) - before["VmSize"]:
                self._filler = mmap.mmap(
                    -1, missing, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0
                )
            self._at_reset = _status()

    def peak(self) -> int | None:
        """Return the peak of the data since the reset, computed as the class says; at least the data now."""
        before = self._at_reset
        if "VmPeak" not in before:
            return None
        now = _status()
        others = max(0, _besides_data(now) - _besides_data(before))
        growth = now["VmPeak"] - before["VmPeak"] - others
        return max(now["VmData"], before["VmData"] + growth)

    def in_use(self) -> int:
        """Return the bytes of the process's data."""
        return _status()["VmData"]

    def allocated(self) -> int:
        """Return the bytes of the process's data without the heap's holes: a GRU's steps leave some MiB more each."""
        return self.in_use() - _free_in_heap()

    def surroundings(self) -> dict[str, Any]:
        """Return how many processors other programs used since the last call, on average, if Linux can tell."""
        before = self._seconds
        self._seconds = _SecondsOfOthers()
        processors = self._seconds.busy - before.busy
        processors /= self._seconds.now - before.now
        # The seconds of a program that has ended are gone, and clocks tick every hundredth of a second: within a few
        # of them, more seconds may be counted than the processors have.
        processors = min(max(0.0, processors), len(_usable()))
        return {"other_processors": round(processors, 3)}

    def switches(self) -> dict[str, Any]:
        """Return the number of threads."""
        import torch

        return {"threads": torch.get_num_threads()}

    def worn(self) -> bool:
        """Return whether the heap has holes, left by blocks too small to be mapped, or its address space is used up.

        Holes count as data. The filler grows by the peak of each step.
        """
        if self._filler is not None and len(self._filler) > _MOST_FILLER:
            return True
        return _trimmed_gap() - self._gap > _WORN_SHARE * self.device.limit_bytes


class _SecondsOfOthers:
    """How long this process's processors have been busy by now, but not with it or with those that it started."""

    def __init__(self) -> None:
        self.busy = 0.0
        for number, times in enumerate(psutil.cpu_times(percpu=True)):
            if number in _usable():
                # From user to steal; the times of guests are in those of the user.
                self.busy += sum(times[:8]) - times.idle - times.iowait
        process = psutil.Process()
        if "LOCAL_RANK" in os.environ:  # the ranks beside it are no others
            process = process.parent() or process
        for member in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it has ended
                self.busy -= sum(member.cpu_times()[:4])  # with its ended children
        self.now = time.monotonic()


def _usable() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _status() -> dict[str, int]:
    """Return the memory lines of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    pairs = (line.split(":", 1) for line in lines if line.startswith(("Vm", "Rss")))
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}


def _besides_data(status: dict[str, int]) -> int:
    """Return the address space that is not data: files, shared memory, the filler."""
    return status["VmSize"] - status["VmData"]


def _trimmed_gap() -> int:
    """Return the size of the heap's holes, after trimming: bytes held, but not in memory."""
    # It is glibc's; others give memory back by themselves.
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    status = _status()
    # Without pages of files (0 before Linux 4.5): libraries are loaded while the first steps run, and would hide holes.
    files = status.get("RssFile", 0) + status.get("RssShmem", 0)
    return status["VmData"] - status["VmRSS"] + files


class _HeapInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = (("counts", ctypes.c_size_t * 10),)


def _free_in_heap() -> int:
    """Return the free bytes of the heap; 0 where glibc doesn't tell them (before 2.33)."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    mallinfo.restype = _HeapInfo
    free: int = mallinfo().counts[8]
    return free


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
