"""Processes and devices: who holds memory, what is left to others, and what NVML says of it."""

from contextlib import contextmanager

import pytest
from emulated_cuda.machine import CONTEXT, MIB

pytestmark = pytest.mark.process
DRIVERS_BYTES = 256 * MIB

HOLDER = """
import sys, torch
held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device=sys.argv[2])
print("held", flush=True)
sys.stdin.read()
"""

FREE = """
import json, torch
print(json.dumps([torch.cuda.mem_get_info(device) for device in range(torch.cuda.device_count())]))
"""

NVML = """
import json, pynvml
pynvml.nvmlInit()
cards = []
for index in range(pynvml.nvmlDeviceGetCount()):
    card = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(card)
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(card)
    cards.append({
        "name": pynvml.nvmlDeviceGetName(card),
        "uuid": pynvml.nvmlDeviceGetUUID(card),
        "memory": [memory.total, memory.used, memory.free],
        "processes": [[process.pid, process.usedGpuMemory] for process in processes],
    })
print(json.dumps(cards))
"""


@contextmanager
def holder(machine, size_bytes, device, **settings):
    """A process that holds memory of a device of a machine with two; yields its id, and kills it."""
    with machine.start(
        HOLDER, str(size_bytes), device, devices=2, **settings
    ) as process:
        try:
            assert process.stdout.readline() == "held\n"
            yield process.pid
        finally:
            process.kill()


def test_each_device_has_memory_that_its_processes_share(emulated_cuda):
    with holder(emulated_cuda, 1024 * MIB, "cuda:1") as pid:
        first, second = emulated_cuda.figures(FREE, devices=2)
        cards = emulated_cuda.figures(NVML, devices=2)
    assert first == [2048 * MIB - CONTEXT, 2048 * MIB]
    # Two contexts there, of the holder and of the one that asks.
    assert second == [1024 * MIB - 2 * CONTEXT, 2048 * MIB]
    check_nvml(*cards, pid, 1024 * MIB + CONTEXT)
    # What a killed process held is free.
    free = [2048 * MIB - CONTEXT, 2048 * MIB]
    assert emulated_cuda.figures(FREE, devices=2) == [free, free]


def check_nvml(first, second, pid, used):
    """NVML tells of the same devices; a process uses memory of the second one."""
    total = 2048 * MIB + DRIVERS_BYTES
    assert first["name"] == second["name"] == "Emulated GPU"
    assert first["uuid"] != second["uuid"]
    assert first["memory"] == [total, DRIVERS_BYTES, 2048 * MIB]
    assert first["processes"] == []
    assert second["memory"] == [total, used + DRIVERS_BYTES, 2048 * MIB - used]
    assert second["processes"] == [[pid, used]]


def test_a_machine_without_nvml_has_its_devices_all_the_same(emulated_cuda):
    without = {"EMULATED_CUDA_NVML": "0"}
    assert "Driver Not Loaded" in emulated_cuda("-c", NVML, **without).stderr
    assert emulated_cuda.figures(FREE, **without) == [
        [2048 * MIB - CONTEXT, 2048 * MIB]
    ]
