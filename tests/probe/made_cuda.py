"""A made `torch.cuda`: devices whose memory is the sum of what a test puts into it."""

import os
import sys
from types import SimpleNamespace

import torch
from made_devices import MIB
from probe.made_nvml import GIB, MadeNvml

from batchtune.allocators import EXPANDABLE, NATIVE, asked_for, settings_in
from batchtune.probe.devices import cuda as cuda_module


class MadeCuda:
    """CUDA devices of 80 GiB, one for each UUID: what they show is the sum of what is put into them."""

    others = 0
    outside = 0
    reserved = 0
    allocated = 0
    fraction = 1.0
    uuids = ("aaaaaaaa",)
    own_pid = os.getpid()
    total = 80 * GIB
    current = 0
    backend = "native"
    grows = True  # whether it can take memory in expandable segments
    refusal = None  # how the driver refuses those
    turned_off = False

    def __init__(self, gpu, **facts):
        self.gpu = gpu
        for name, value in facts.items():
            setattr(self, name, value)

    @property
    def expandable(self):
        wanted = asked_for(settings_in(os.environ))
        return wanted == EXPANDABLE and self.grows and not self.turned_off

    def create_context(self, device):
        if self.expandable and self.refusal is not None:
            raise RuntimeError(self.refusal)
        self.take(500 * MIB)

    def set_settings(self, settings):
        self.turned_off = asked_for(settings) == NATIVE

    def free(self):
        return self.total - self.others - self.outside - self.reserved

    def properties(self, index):
        """As `torch.cuda.get_device_properties`."""
        return SimpleNamespace(
            name="Made GPU",
            uuid=self.uuids[index],
            total_memory=self.total,
            major=9,
            minor=0,
            pci_domain_id=0,
            pci_bus_id=0x65 + index,
            pci_device_id=0,
        )

    def show(self):
        """Lets NVML see the same."""
        self.gpu.free = self.free()
        held = self.outside + self.reserved
        used = {4711: self.others, self.own_pid: held}
        self.gpu.compute = [(pid, size) for pid, size in used.items() if pid and size]
        if self.nvml.gpus:
            self.nvml.show()

    def take(self, outside):
        self.outside += outside
        self.show()

    def install(self, patch, gpus=None):
        """Take the place of `torch.cuda`; NVML shows `gpus`, its own unless given, or is absent if there are none."""
        self.nvml = MadeNvml([self.gpu] if gpus is None else gpus)
        if self.nvml.gpus:
            self.nvml.install(patch)
        else:
            patch.setitem(sys.modules, "pynvml", None)
        made = {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: len(self.uuids),
            "set_device": lambda device: setattr(self, "current", device.index),
            "get_device_properties": self.properties,
            "mem_get_info": lambda device: (self.free(), self.total),
            "memory_reserved": lambda device: self.reserved,
            "memory_allocated": lambda device: self.allocated,
            "set_per_process_memory_fraction": lambda share, device=None: setattr(
                self, "fraction", share
            ),
            "get_per_process_memory_fraction": lambda device: self.fraction,
            "get_allocator_backend": lambda: self.backend,
            "memory_snapshot": lambda: [{"is_expandable": self.expandable}],
            "synchronize": lambda device: None,
            "empty_cache": self.show,
        }
        for name, function in made.items():
            patch.setattr(torch.cuda, name, function)
        patch.setattr(torch.cuda.memory, "_set_allocator_settings", self.set_settings)
        patch.setattr(cuda_module, "_create_context", self.create_context)
        patch.setattr(
            cuda_module, "_create_handles", lambda device: self.take(200 * MIB)
        )
        self.show()
        return self

    def limit(self):
        return round(self.fraction * self.total)
