"""A GPU as the driver describes it, by NVML (`pynvml`, of the package nvidia-ml-py), and as torch does (`Card`).

NVML may be absent (no NVIDIA driver, ROCm), and every single question may fail: not supported by this GPU, a virtual
one or a part of one, not permitted in a container, unknown to an older driver, named differently by another version
of the package. Each unanswered question is None, and the others still count.

Names and meanings are those of the NVML API reference (https://docs.nvidia.com/deploy/nvml-api/).
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from batchtune.errors import ProbeError
from batchtune.results import DeviceProcess, DoctorGpu

# The driver's answer if it does not know a process's memory: -1, as an unsigned number of 64 bits.
_NOT_AVAILABLE = 2**64 - 1
_CLOCK_SM = 1  # NVML_CLOCK_SM

# nvmlClocksEventReasons: the bits that mean "slower than it could be". Idle, and clocks that somebody set (bits 1 and
# 2), are the normal state of a GPU.
_THROTTLE_REASONS = {
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "thermal slowdown by the driver",
    0x040: "thermal slowdown by the hardware",
    0x080: "power brake by the hardware",
    0x100: "display clocks",
    0x200: "board limit",
    0x400: "reliability limit",
}
_HARDWARE_SLOWDOWN = 0x008
_HARDWARE_CAUSES = 0x040 | 0x080

# Errors that doctor shows: an answer that an older GPU, a part of one or an older driver lacks is nothing unusual.
_REFUSALS = {4, 15}  # NVML_ERROR_NO_PERMISSION, NVML_ERROR_GPU_IS_LOST


class _Nvml:
    """NVML, by the initialised module: each unanswered question is None, and what was refused is kept."""

    def __init__(self, nvml: Any, *handle: Any) -> None:
        self.nvml = nvml
        self.refused: dict[str, str] = {}  # call → NVML's reason
        self._handle = handle

    def ask(self, call: str, *arguments: Any) -> Any:
        """Return a call's answer; None if it is missing in this version, not supported here, or fails."""
        try:
            return getattr(self.nvml, call)(*self._handle, *arguments)
        except Exception as error:  # besides NVMLError: AttributeError, a library mismatch, a name that is not UTF-8
            if getattr(error, "value", None) in _REFUSALS:
                self.refused[call] = str(error)
            return None

    def gpu(self, call: str, *arguments: Any) -> Gpu | None:
        """Return the GPU whose handle a call returns."""
        handle = self.ask(call, *arguments)
        if handle is None:
            return None
        return Gpu(self.nvml, handle)


class Gpu(_Nvml):
    """A GPU, or an instance of one, by its handle, about which it asks."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        super().__init__(nvml, handle)
        self._whole = self  # clocks and ECC are the whole GPU's
        self.is_instance = bool(_number(self.ask("nvmlDeviceIsMigDeviceHandle")))
        if self.is_instance:
            call = "nvmlDeviceGetDeviceHandleFromMigDeviceHandle"
            self._whole = self.gpu(call) or self

    def driver(self) -> str | None:
        """Return the driver's version."""
        return _text(_Nvml(self.nvml).ask("nvmlSystemGetDriverVersion"))

    def facts(self) -> DoctorGpu:
        """Describe it as it is now; in a container the processes have the host's ids."""
        total, free = self.memory()
        return DoctorGpu(
            name=_text(self.ask("nvmlDeviceGetName")) or "GPU without a name",
            device=None,
            uuid=self.uuid(),
            capability=None,
            total_bytes=total,
            free_bytes=free,
            processes=self.processes(),
            mig=self.is_instance or self.divided(),
            ecc=self._whole._current_mode("nvmlDeviceGetEccMode"),
            sm_clock_mhz=self.sm_clock_mhz(),
            max_sm_clock_mhz=_number(
                self._whole.ask("nvmlDeviceGetMaxClockInfo", _CLOCK_SM)
            ),
            throttle_reasons=self.throttle_reasons(),
            probe_process=None,
            nvml_problem=self._problem(),  # last, when all that was refused is known
        )

    def _problem(self) -> str | None:
        """Return NVML's reasons for not answering, each with the calls it refused, of this GPU and of its whole."""
        calls: dict[str, list[str]] = {}
        refused = {**self._whole.refused, **self.refused}
        for call, reason in refused.items():
            calls.setdefault(reason, []).append(call)
        problems = [f"{reason} ({', '.join(names)})" for reason, names in calls.items()]
        return "; ".join(problems) or None

    def uuid(self) -> str | None:
        """Return its UUID: `GPU-…`, or `MIG-…` for an instance."""
        return _text(self.ask("nvmlDeviceGetUUID"))

    def divided(self) -> bool | None:
        """Return whether this GPU is divided into instances; None for GPUs that can't be."""
        return self._current_mode("nvmlDeviceGetMigMode")

    def instances(self) -> list[Gpu]:
        """Return the instances that this GPU is divided into."""
        if not self.divided():
            return []
        call = "nvmlDeviceGetMigDeviceHandleByIndex"
        count = _number(self.ask("nvmlDeviceGetMaxMigDeviceCount")) or 0
        slots = [self.gpu(call, index) for index in range(count)]
        return [gpu for gpu in slots if gpu is not None]

    def memory(self) -> tuple[int | None, int | None]:
        """Return the bytes in total, and those that are free."""
        memory = self.ask("nvmlDeviceGetMemoryInfo")
        return _bytes(memory, "total"), _bytes(memory, "free")

    def processes(self) -> list[DeviceProcess] | None:
        """Return who uses it, for computing or for graphics, each with its memory, in the order of their ids."""
        compute = self.ask("nvmlDeviceGetComputeRunningProcesses")
        if compute is None:
            return None
        graphics = self.ask("nvmlDeviceGetGraphicsRunningProcesses") or ()
        used: dict[int, int | None] = {}
        for process in (*compute, *graphics):
            size = _bytes(process, "usedGpuMemory")
            listed = used.setdefault(process.pid, size)
            if size is not None:
                used[process.pid] = max(size, listed or 0)
        return [DeviceProcess(pid=pid, used_bytes=used[pid]) for pid in sorted(used)]

    def sm_clock_mhz(self) -> int | None:
        """Return the current clock of the multiprocessors."""
        return _number(self._whole.ask("nvmlDeviceGetClockInfo", _CLOCK_SM))

    def throttle_reasons(self) -> list[str] | None:
        """Return why it is slower now than it could be, in plain words; empty if it is not."""
        # The second is its name before driver 535.
        for call in ("EventReasons", "ThrottleReasons"):
            bits = _number(self._whole.ask(f"nvmlDeviceGetCurrentClocks{call}"))
            if bits is not None:
                return named_reasons(bits)
        return None

    def _current_mode(self, call: str) -> bool | None:
        modes = self.ask(call)  # the current one and the pending one
        if not modes:
            return None
        return bool(modes[0])


def named_reasons(bits: int) -> list[str]:
    """Name the reasons in NVML's bit mask of clock events, without those that mean nothing bad."""
    if bits & _HARDWARE_CAUSES:
        bits &= ~_HARDWARE_SLOWDOWN  # set along with its cause, which says more
    return [words for bit, words in _THROTTLE_REASONS.items() if bits & bit]


def find_gpu(
    uuid: str | None, pci_bus_id: str | None, visible: str | None = None
) -> Gpu | None:
    """Return the GPU or instance with this UUID, else at `pci_bus_id` (`0000:65:00.0`); None if NVML can't tell.

    The UUID may lack its `GPU-` or `MIG-`. `visible` is CUDA_VISIBLE_DEVICES: it names the instance if the UUID is the
    whole GPU's.
    """
    nvml, _ = _loaded()
    system = _Nvml(nvml)
    gpu = None
    for prefix in ("", "GPU-", "MIG-"):
        if uuid and gpu is None:
            gpu = system.gpu("nvmlDeviceGetHandleByUUID", prefix + uuid)
    if gpu is None and pci_bus_id is not None:
        gpu = system.gpu("nvmlDeviceGetHandleByPciBusId", pci_bus_id)
    if gpu is None or gpu.is_instance or not gpu.divided():
        return gpu
    # CUDA shows a process only one instance, and older drivers report its GPU's UUID for it.
    for name in (name.strip() for name in (visible or "").split(",")):
        if name.startswith("MIG-"):
            return system.gpu("nvmlDeviceGetHandleByUUID", name)
    instances = gpu.instances()
    if len(instances) != 1:
        return None
    return instances[0]


def all_gpus() -> tuple[list[Gpu], str | None]:
    """Return every GPU, divided ones as their instances, and why NVML can't be asked, at all or for some."""
    nvml, problem = _loaded()
    system = _Nvml(nvml)
    gpus: list[Gpu] = []
    for index in range(_number(system.ask("nvmlDeviceGetCount")) or 0):
        gpu = system.gpu("nvmlDeviceGetHandleByIndex", index)
        if gpu is not None:
            gpus += gpu.instances() or [gpu]
    return gpus, problem or ", ".join(dict.fromkeys(system.refused.values())) or None


class Card:
    """One of torch's devices, and NVML's view of it; its UUID as NVML writes it. Takes no memory on it."""

    def __init__(self, index: int) -> None:
        import torch

        self.index = index
        self._properties = torch.cuda.get_device_properties(index)
        self.name = str(self._properties.name)
        # torch does not say whether it is the GPU's or the instance's; some versions give all zeros.
        uuid = str(getattr(self._properties, "uuid", "") or "")
        if not uuid.strip("0-"):
            uuid = ""
        place = None
        with contextlib.suppress(AttributeError):  # an older torch
            pci: Any = self._properties
            place = f"{pci.pci_domain_id:04x}:{pci.pci_bus_id:02x}:{pci.pci_device_id:02x}.0"
        self.gpu = find_gpu(uuid or None, place, os.environ.get("CUDA_VISIBLE_DEVICES"))
        self.uuid: str | None = None
        if self.gpu is not None:
            self.uuid = self.gpu.uuid()
        if uuid and self.uuid is None:
            self.uuid = f"GPU-{uuid.removeprefix('GPU-')}"
        self.id = self.uuid or f"PCI-{place or index}"

    def seen(self) -> DoctorGpu:
        """Describe it as torch sees it."""
        facts: dict[str, Any] = dict.fromkeys(DoctorGpu.__struct_fields__)
        facts |= {
            "name": self.name,
            "device": f"cuda:{self.index}",
            "uuid": self.id,
            "capability": f"{self._properties.major}.{self._properties.minor}",
            "total_bytes": int(self._properties.total_memory),
        }
        return DoctorGpu(**facts)


def card_of(device: str) -> Card:
    """Return the device that a `--device` value means. Raises ProbeError if this machine has no such device."""
    import torch

    if device != "auto" and not torch.cuda.is_available():
        raise ProbeError(
            f"--device {device} was asked for, but PyTorch {torch.__version__} sees no CUDA device here",
            "`batchtune doctor` shows what is here. Install a CUDA build of PyTorch and a matching driver, or use "
            "--device cpu.",
        )
    index = int(device.partition(":")[2] or 0)
    if index >= torch.cuda.device_count():
        raise ProbeError(
            f"{device} does not exist: this machine shows {torch.cuda.device_count()} CUDA device(s)",
            "`batchtune doctor` lists them. The first is cuda:0; CUDA_VISIBLE_DEVICES may hide some.",
        )
    return Card(index)


def _loaded() -> tuple[Any, str | None]:
    """Return the initialised module, or None and NVML's reason why it can't be used."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # no package, no library, no driver, no permission
        return None, str(error) or type(error).__name__
    return pynvml, None


def _text(value: Any) -> str | None:
    if isinstance(value, str) and value:
        return value
    return None


def _number(value: Any) -> int | None:
    value = getattr(value, "value", value)  # ctypes may have wrapped it
    if isinstance(value, int):
        return int(value)
    return None


def _bytes(facts: Any, field: str) -> int | None:
    size = _number(getattr(facts, field, None))
    if size == _NOT_AVAILABLE:
        return None
    return size
