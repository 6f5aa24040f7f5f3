"""How memory is limited and measured on each kind of device; runs in the worker process.

A meter enforces the limit, so that running out is real, and tells the peak of what happened since it was reset.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from batchtune.errors import ProbeError
from batchtune.results import Device
from batchtune.units import format_size

if TYPE_CHECKING:
    import torch

CPU_ENVIRONMENT = {
    # Read by glibc when the process starts: every block of 64 KiB or more is mapped by itself and given back when
    # freed. What the process holds is then what its tensors hold, and nothing is hidden in arenas.
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
    # oneDNN keeps a compiled primitive with its memory for each of the last 1024 shapes: some MiB a trial that
    # would count against all later ones.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0",
    "LRU_CACHE_CAPACITY": "1",
}

_WORN_SHARE = 0.02


class Meter(Protocol):
    """Memory of one device."""

    device: Device

    def limit(self) -> None:
        """Enforces `device.limit_bytes` from now on."""

    def reset(self) -> None:
        """Starts a new peak."""

    def peak(self) -> int | None:
        """Most bytes in use since the reset; None where the system can't tell."""

    def reserved(self) -> int | None:
        """Most bytes held by the allocator since the reset, its cache included; None where it has none."""

    def retries(self) -> int:
        """How often the allocator has emptied its cache to go on, since the process started."""

    def synchronize(self) -> None:
        """Waits for all that was queued on the device."""

    def release(self) -> None:
        """Gives cached memory back to the device."""

    def healthy(self) -> bool:
        """Whether the device still answers, after an error."""

    def worn(self) -> bool:
        """Whether so much is held at rest that the next trial would not compare with the first."""


def open_meter(device: str, memory_bytes: int | None, fraction: float, limit_bytes: int | None) -> Meter:
    """The meter for `auto`, `cpu`, `cuda` or `cuda:N`.

    Args:
        device: What the user asked for; `auto` is CUDA (or ROCm) where there is one.
        memory_bytes: Cap on the memory, or None for all of the device.
        fraction: Part of it that may be used.
        limit_bytes: The limit of the run that is being continued; overrides both.

    Raises:
        ProbeError: There is no such device, or it has less memory free than the limit needs.
    """
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return CpuMeter(memory_bytes, fraction, limit_bytes)
    match = re.fullmatch(r"cuda(?::(\d+))?", device)
    if match is None:
        raise ProbeError(f"there is no device {device!r}", "Say --device auto, cpu, cuda or cuda:N.")
    if not torch.cuda.is_available():
        raise ProbeError(
            f"--device {device} was asked for, but PyTorch {torch.__version__} sees no CUDA device here",
            "Check the driver with nvidia-smi and that PyTorch is a CUDA build, or say --device cpu.",
        )
    index = int(match[1] or 0)
    if index >= torch.cuda.device_count():
        raise ProbeError(f"there is no {device}: this machine shows {torch.cuda.device_count()} CUDA device(s)")
    return CudaMeter(index, memory_bytes, fraction, limit_bytes)


class CpuMeter:
    """The CPU's memory, as what the process holds of private writable memory (Linux).

    `RLIMIT_DATA` limits it: beyond, mmap and brk fail and torch raises. The kernel keeps a resettable peak only of
    the resident set (`VmHWM`, reset by writing 5 to /proc/self/clear_refs; man 5 proc), so the peak of the data is
    data at the reset + the growth of the resident set since: exact for memory that is touched, as tensors are.
    """

    def __init__(self, memory_bytes: int | None, fraction: float, limit_bytes: int | None) -> None:
        import torch

        if platform.system() != "Linux":
            raise ProbeError(
                "on the CPU the probe needs Linux: other systems enforce no limit on a process's memory",
                "Probe on a CUDA device, or on Linux.",
            )
        total = _total_memory()
        self.device = Device(
            kind="cpu",
            name=_cpu_name(),
            total_bytes=total,
            limit_bytes=limit_bytes or int(min(memory_bytes or total, total) * fraction),
            driver=None,
            torch=str(torch.__version__),
            allocator="malloc, mapped and returned block by block",
            other_processes=None,
        )
        self._data = self._resident = self._gap = 0
        self._can_reset = True

    def limit(self) -> None:
        """Sets RLIMIT_DATA, after starting the threads that would later need memory for their stacks."""
        import resource

        _start_threads()
        held = _status()["VmData"]
        limit = self.device.limit_bytes
        if held >= limit:
            raise ProbeError(
                f"a memory limit of {format_size(limit)} is too small: "
                f"Python and PyTorch alone hold {format_size(held)}",
                "Give more with --memory.",
            )
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        self._gap = _trimmed_gap()

    def reset(self) -> None:
        """Resets the kernel's high-water mark of the resident set."""
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self._can_reset = False
        status = _status()
        self._data, self._resident = status["VmData"], status["VmRSS"]

    def peak(self) -> int | None:
        """Data held at the reset + the resident set's growth since."""
        if not self._can_reset:
            return None
        return self._data + max(0, _status()["VmHWM"] - self._resident)

    def reserved(self) -> int | None:
        """The CPU's allocator keeps no cache."""
        return None

    def retries(self) -> int:
        """The CPU's allocator does not retry."""
        return 0

    def synchronize(self) -> None:
        """The CPU queues nothing."""

    def release(self) -> None:
        """Freed blocks have already been given back."""

    def healthy(self) -> bool:
        """A failed allocation on the CPU leaves nothing broken."""
        return True

    def worn(self) -> bool:
        """Whether the heap has grown holes: blocks too small to be mapped leave them, and they count as data."""
        return _trimmed_gap() - self._gap > _WORN_SHARE * self.device.limit_bytes


class CudaMeter:
    """A CUDA (or ROCm) device's memory, as torch's caching allocator holds it."""

    def __init__(self, index: int, memory_bytes: int | None, fraction: float, limit_bytes: int | None) -> None:
        import torch

        self._torch_device = torch.device("cuda", index)
        properties = torch.cuda.get_device_properties(index)
        driver, others = _nvml_facts(str(getattr(properties, "uuid", "")))
        torch.zeros(1, device=self._torch_device)  # creates the context, which takes memory of its own
        torch.cuda.synchronize(self._torch_device)
        free, total = torch.cuda.mem_get_info(index)
        available = free + torch.cuda.memory_reserved(index)
        wanted = limit_bytes or int(min(memory_bytes or total, total) * fraction)
        # A little less is no matter: what the driver itself takes differs from process to process.
        if limit_bytes is not None and limit_bytes > available * 1.02:
            raise ProbeError(
                f"this run was measured with a limit of {format_size(limit_bytes)}, "
                f"but only {format_size(available)} of the device are free now",
                "Stop what else uses the device, or measure anew with --force.",
            )
        self._total = total
        self.device = Device(
            kind="cuda",
            name=properties.name,
            total_bytes=total,
            limit_bytes=min(wanted, available),
            driver=driver,
            torch=str(torch.__version__),
            allocator=_cuda_allocator(),
            other_processes=others,
        )

    def limit(self) -> None:
        """Limits what torch's allocator may hold."""
        import torch

        share = min(1.0, self.device.limit_bytes / self._total)
        torch.cuda.set_per_process_memory_fraction(share, self._torch_device)

    def reset(self) -> None:
        """Resets the allocator's own peaks."""
        import torch

        torch.cuda.reset_peak_memory_stats(self._torch_device)

    def peak(self) -> int | None:
        """Most bytes allocated to tensors."""
        import torch

        return torch.cuda.max_memory_allocated(self._torch_device)

    def reserved(self) -> int | None:
        """Most bytes held, the cache included."""
        import torch

        return torch.cuda.max_memory_reserved(self._torch_device)

    def retries(self) -> int:
        """The allocator's own count of flushed caches."""
        import torch

        return int(torch.cuda.memory_stats(self._torch_device).get("num_alloc_retries", 0))

    def synchronize(self) -> None:
        """Waits for the device's queue."""
        import torch

        torch.cuda.synchronize(self._torch_device)

    def release(self) -> None:
        """Empties the allocator's cache; after a sticky error not even that works, which `healthy` then tells."""
        import torch

        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()

    def healthy(self) -> bool:
        """Whether the device can still compute: after a sticky error nothing can."""
        import torch

        try:
            torch.ones(16, device=self._torch_device).sum().item()
        except RuntimeError:
            return False
        return True

    def worn(self) -> bool:
        """The allocator's cache is part of what is measured: training has it too."""
        return False


def torch_device(meter: Meter) -> torch.device:
    """The torch device that a meter measures."""
    import torch

    return meter._torch_device if isinstance(meter, CudaMeter) else torch.device("cpu")


def _status() -> dict[str, int]:
    """The memory lines of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    pairs = (line.split(":", 1) for line in lines if line.startswith("Vm"))
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}


def _trimmed_gap() -> int:
    """Data that is held, but not in memory, after the heap has given back what it can: its holes, in bytes."""
    with contextlib.suppress(AttributeError):  # glibc's; others give memory back by themselves
        ctypes.CDLL(None).malloc_trim(0)
    status = _status()
    return status["VmData"] - status["VmRSS"]


def _start_threads() -> None:
    """Makes torch start its worker threads (forward and backward), whose stacks count as data."""
    import torch

    weight = torch.randn(256, 256, requires_grad=True)
    loss = (torch.randn(1024, 256) @ weight).square().sum()
    torch.autograd.backward(loss)


def _total_memory() -> int:
    """The machine's memory, or the container's where that is less, in bytes."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            total = min(total, int(Path(limit).read_text()))
    return total


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _cuda_allocator() -> str:
    """The allocator's backend and the settings it was given."""
    import torch

    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    backend = torch.cuda.get_allocator_backend()
    return f"{backend} ({settings})" if settings else backend


def _nvml_facts(uuid: str) -> tuple[str | None, int | None]:
    """The driver's version and how many other processes use the device; None where NVML can't tell.

    Asked before this process uses the device: in a container NVML tells the host's process ids, among which it could
    not find its own. NVML may be absent (ROCm) or fail: that is no error.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return None, None
    driver: str | None = None
    others: int | None = None
    with contextlib.suppress(pynvml.NVMLError):
        driver = str(pynvml.nvmlSystemGetDriverVersion())
    with contextlib.suppress(pynvml.NVMLError):
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        others = sum(process.pid != os.getpid() for process in processes)
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlShutdown()
    return driver, others
