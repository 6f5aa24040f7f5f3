"""How memory is limited and measured on each kind of device; runs in the worker process.

A meter enforces the limit, so that running out is real, and tells the peak of what happened since it was reset.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Protocol

from batchtune.errors import ProbeError
from batchtune.probe.cpu_meter import CpuMeter, cpu_name
from batchtune.probe.cuda_meter import CudaMeter, cuda_identity
from batchtune.probe.protocol import Identified
from batchtune.results import Device

if TYPE_CHECKING:
    import torch

CPU_ENVIRONMENT = {
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


class Meter(Protocol):
    """Memory of one device: opened, limited, settled after the workload's setup, and then read for each trial."""

    device: Device

    def limit(self) -> None:
        """Enforces `device.limit_bytes` from now on."""

    def settle(self, reserve_bytes: int, ddp_bytes: int) -> None:
        """Works out the final limit, once the workload is set up, and enforces it; `device` is complete then.

        Args:
            reserve_bytes: To keep free because the user said so.
            ddp_bytes: To keep free for one copy of the gradients.

        Raises:
            ProbeError: Nothing is left for batches.
        """

    def reset(self) -> None:
        """Starts a new peak."""

    def peak(self) -> int | None:
        """Most bytes in use since the reset; None where the system can't tell."""

    def reserved(self) -> int | None:
        """Most bytes held by the allocator since the reset, its cache included; None where it has none."""

    def in_use(self) -> int:
        """Bytes in use now."""

    def outside(self) -> int | None:
        """Bytes of the device that this process holds outside torch's allocator; None where that can't be told."""

    def clocks(self) -> tuple[int | None, list[str] | None]:
        """The clock in MHz, now, and why it is lower than it could be; None where the device can't tell."""

    def retries(self) -> int:
        """How often the allocator has emptied its cache to go on, since the process started."""

    def ooms(self) -> int:
        """How often the allocator has run out of memory, since the process started; 0 where it does not count."""

    def other_processors(self) -> float | None:
        """How many processors other programs took since this was last asked, on average; None on a GPU."""

    def synchronize(self) -> None:
        """Waits for all that was queued on the device."""

    def release(self) -> None:
        """Gives cached memory back to the device."""

    def healthy(self) -> bool:
        """Whether the device still answers, after an error."""

    def worn(self) -> bool:
        """Whether so much is held at rest that the next trial would not compare with the first."""


def identify(device: str) -> Identified:
    """Which device is meant, without using any of its memory.

    Args:
        device: What the user asked for; `auto` is CUDA (or ROCm) where there is one.

    Returns:
        Its `id` is `cpu`, or the UUID of the GPU or of its instance (MIG); where there is none, its place on the
        PCI bus, or `cuda:N`.

    Raises:
        ProbeError: There is no such device.
    """
    index = _cuda_index(device)
    if index is None:
        return Identified(id="cpu", name=cpu_name())
    identity, name = cuda_identity(index)
    return Identified(id=identity, name=name)


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
    index = _cuda_index(device)
    if index is None:
        return CpuMeter(memory_bytes, fraction, limit_bytes)
    return CudaMeter(index, memory_bytes, fraction, limit_bytes)


def torch_device(meter: Meter) -> torch.device:
    """The torch device that a meter measures."""
    import torch

    return meter.torch_device if isinstance(meter, CudaMeter) else torch.device("cpu")


def _cuda_index(device: str) -> int | None:
    """The index of the CUDA device that is meant; None for the CPU.

    Raises:
        ProbeError: There is no such device.
    """
    if device == "cpu":
        return None
    import torch

    if device == "auto":
        return 0 if torch.cuda.is_available() else None
    match = re.fullmatch(r"cuda(?::(\d+))?", device)
    if match is None:
        raise ProbeError(f"there is no device {device!r}", "Say --device auto, cpu, cuda or cuda:N.")
    if not torch.cuda.is_available():
        raise ProbeError(
            f"--device {device} was asked for, but PyTorch {torch.__version__} sees no CUDA device here",
            "`batchtune doctor` tells what is here. A CUDA build of PyTorch and a driver that fits it are needed; "
            "or say --device cpu.",
        )
    index = int(match[1] or 0)
    if index >= torch.cuda.device_count():
        raise ProbeError(
            f"there is no {device}: this machine shows {torch.cuda.device_count()} CUDA device(s)",
            "`batchtune doctor` lists them. The first is cuda:0; CUDA_VISIBLE_DEVICES may hide some.",
        )
    return index
