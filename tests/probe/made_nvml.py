"""A made `pynvml`: GPUs that answer, fail, or lack a call, as real ones do."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

GIB = 1 << 30
NOT_AVAILABLE = 2**64 - 1


class NVMLError(Exception):
    """As the package raises it."""


@dataclass
class MadeGpu:
    """What one GPU (or instance) answers; `fails` are the calls that raise, `parent` is an instance's GPU."""

    uuid: Any = "GPU-aaaaaaaa"
    name: Any = "Made GPU"
    total: int = 80 * GIB
    free: int = 79 * GIB
    compute: list[tuple[int, Any]] = field(default_factory=list)
    graphics: list[tuple[int, Any]] = field(default_factory=list)
    mig: bool | None = None
    ecc: bool = True
    clock: int = 1500
    reasons: int = 0
    pci: str = "0000:65:00.0"
    instances: list[MadeGpu] = field(default_factory=list)
    parent: MadeGpu | None = None
    fails: set[str] = field(default_factory=set)


class MadeNvml(ModuleType):
    """The module. `missing` are calls that this version of the package does not have."""

    NVMLError = NVMLError

    def __init__(self, gpus: list[MadeGpu], *, driver: Any = "570.86", missing: tuple[str, ...] = ()) -> None:
        super().__init__("pynvml")
        self.gpus, self.driver, self.missing = gpus, driver, missing

    def __getattr__(self, name: str) -> Any:
        if name.startswith("nvml") and name not in self.missing:
            method = getattr(type(self), f"_{name}", None)
            if method is not None:

                def call(*arguments: Any) -> Any:
                    if any(isinstance(one, MadeGpu) and name in one.fails for one in arguments):
                        raise NVMLError("Not Supported")
                    return method(self, *arguments)

                return call
        raise AttributeError(name)

    def _everything(self) -> list[MadeGpu]:
        return [one for gpu in self.gpus for one in (gpu, *gpu.instances)]

    def _nvmlInit(self) -> None: ...

    def _nvmlSystemGetDriverVersion(self) -> Any:
        return self.driver

    def _nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def _nvmlDeviceGetHandleByIndex(self, index: int) -> MadeGpu:
        return self.gpus[index]

    def _nvmlDeviceGetHandleByUUID(self, uuid: str) -> MadeGpu:
        for one in self._everything():
            if one.uuid == uuid:
                return one
        raise NVMLError("Not Found")

    def _nvmlDeviceGetHandleByPciBusId(self, pci: str) -> MadeGpu:
        for one in self.gpus:
            if one.pci == pci:
                return one
        raise NVMLError("Not Found")

    def _nvmlDeviceGetName(self, gpu: MadeGpu) -> Any:
        return gpu.name

    def _nvmlDeviceGetUUID(self, gpu: MadeGpu) -> Any:
        return gpu.uuid

    def _nvmlDeviceGetMemoryInfo(self, gpu: MadeGpu) -> Any:
        return SimpleNamespace(total=gpu.total, free=gpu.free, used=gpu.total - gpu.free)

    def _nvmlDeviceGetComputeRunningProcesses(self, gpu: MadeGpu) -> Any:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in gpu.compute]

    def _nvmlDeviceGetComputeRunningProcesses_v2(self, gpu: MadeGpu) -> Any:
        return self._nvmlDeviceGetComputeRunningProcesses(gpu)

    def _nvmlDeviceGetGraphicsRunningProcesses(self, gpu: MadeGpu) -> Any:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in gpu.graphics]

    def _nvmlDeviceGetMigMode(self, gpu: MadeGpu) -> list[int]:
        if gpu.mig is None:
            raise NVMLError("Not Supported")
        return [int(gpu.mig), 0]

    def _nvmlDeviceIsMigDeviceHandle(self, gpu: MadeGpu) -> Any:
        return SimpleNamespace(value=int(gpu.parent is not None))  # the package returns ctypes' own type

    def _nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, gpu: MadeGpu) -> MadeGpu:
        assert gpu.parent is not None
        return gpu.parent

    def _nvmlDeviceGetMaxMigDeviceCount(self, gpu: MadeGpu) -> int:
        return 7

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: MadeGpu, index: int) -> MadeGpu:
        if index >= len(gpu.instances):
            raise NVMLError("Not Found")
        return gpu.instances[index]

    def _nvmlDeviceGetEccMode(self, gpu: MadeGpu) -> list[int]:
        return [int(gpu.ecc), 1]

    def _nvmlDeviceGetClockInfo(self, gpu: MadeGpu, kind: int) -> int:
        assert kind == 1
        if gpu.parent is not None:
            raise NVMLError("Not Supported")
        return gpu.clock

    def _nvmlDeviceGetMaxClockInfo(self, gpu: MadeGpu, kind: int) -> int:
        return 1980

    def _nvmlDeviceGetCurrentClocksEventReasons(self, gpu: MadeGpu) -> int:
        return gpu.reasons

    def _nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: MadeGpu) -> int:
        return gpu.reasons


def divided_gpu(*uuids: str) -> MadeGpu:
    """A GPU with one instance for each UUID."""
    whole = MadeGpu(mig=True)
    whole.instances = [MadeGpu(uuid=uuid, name="Made GPU 1g", total=10 * GIB, free=9 * GIB) for uuid in uuids]
    for instance in whole.instances:
        instance.parent = whole
    return whole
