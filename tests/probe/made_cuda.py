"""A made `torch.cuda`: devices whose memory is the sum of what a test puts into it."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from probe.made_nvml import GIB, MadeGpu, MadeNvml

from batchtune.probe.devices import cuda as cuda_module

MIB = 1 << 20


@dataclass
class MadeCuda:
    """A CUDA device of 80 GiB: what it shows is the sum of what is put into it."""

    gpu: MadeGpu
    others: int = 0
    context: int = 500 * MIB
    handles: int = 200 * MIB
    outside: int = 0
    reserved: int = 0
    allocated: int = 0
    fraction: float = 1.0
    uuid: str = "aaaaaaaa"
    own_pid: int | None = field(default_factory=os.getpid)
    total: int = 80 * GIB
    count: int = 1
    current: int = 0
    busy: bool = False

    def free(self) -> int:
        return self.total - self.others - self.outside - self.reserved

    def show(self) -> None:
        """Lets NVML see the same."""
        self.gpu.free = self.free()
        held = self.outside + self.reserved
        others = [(4711, self.others)] if self.others else []
        self.gpu.compute = [*others, *([(self.own_pid, held)] if held and self.own_pid is not None else [])]

    def take(self, outside: int) -> None:
        self.outside += outside
        self.show()

    def install(self, patch: pytest.MonkeyPatch, nvml: MadeNvml | None) -> None:
        patch.setitem(sys.modules, "pynvml", nvml)
        properties = SimpleNamespace(
            name="Made GPU", uuid=self.uuid, pci_domain_id=0, pci_bus_id=0x65, pci_device_id=0, total_memory=self.total
        )
        made: dict[str, Any] = {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: self.count,
            "set_device": lambda device: setattr(self, "current", device.index),
            "get_device_properties": lambda index: properties,
            "mem_get_info": lambda device: (self.free(), self.total),
            "memory_reserved": lambda device: self.reserved,
            "memory_allocated": lambda device: self.allocated,
            "set_per_process_memory_fraction": lambda share, device=None: setattr(self, "fraction", share),
            "get_per_process_memory_fraction": lambda device: self.fraction,
            "memory_stats": lambda device: {},
            "reset_peak_memory_stats": lambda device: None,
            "max_memory_allocated": lambda device: self.allocated,
            "max_memory_reserved": lambda device: self.reserved,
            "get_allocator_backend": lambda: "native",
            "synchronize": lambda device: setattr(self, "busy", False),
            "empty_cache": self.show,
        }
        for name, function in made.items():
            patch.setattr(torch.cuda, name, function)
        patch.setattr(cuda_module, "_create_context", lambda device: self.take(self.context))
        patch.setattr(cuda_module, "_create_handles", lambda device: self.take(self.handles))
        self.show()

    def limit(self) -> int:
        return round(self.fraction * self.total)
