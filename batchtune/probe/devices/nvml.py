"""The driver's description of a GPU, by NVML (`pynvml`, from the package nvidia-ml-py). Knows nothing of torch.

NVML may be absent (no NVIDIA driver, ROCm), and every single question may fail: not supported by this GPU, a virtual
one or a part of one, not permitted in a container, unknown to an older driver, named differently by another version
of the package. Each unanswered question is None, and the others still count.

Names and meanings are those of the NVML API reference (https://docs.nvidia.com/deploy/nvml-api/).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

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


class Gpu:
    """A GPU, or an instance of one, by the initialised module `pynvml` and its handle."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._refused: dict[str, str] = {}  # call → NVML's reason
        self.is_instance = bool(self._number("nvmlDeviceIsMigDeviceHandle"))
        parent = self._ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle") if self.is_instance else None
        self._whole = Gpu(nvml, parent) if parent is not None else self  # clocks and ECC are the whole GPU's

    def driver(self) -> str | None:
        """Return the driver's version."""
        return _text(_answer(self._nvml, "nvmlSystemGetDriverVersion"))

    def facts(self) -> DoctorGpu:
        """Describe it as it is now; in a container the processes have the host's ids."""
        total, free = self.memory()
        found = DoctorGpu(
            name=_text(self._ask("nvmlDeviceGetName")) or "GPU without a name",
            device=None,
            uuid=self.uuid(),
            capability=None,
            total_bytes=total,
            free_bytes=free,
            processes=self.processes(),
            mig=True if self.is_instance else self.divided(),
            ecc=self._whole._current_mode("nvmlDeviceGetEccMode"),
            sm_clock_mhz=self.sm_clock_mhz(),
            max_sm_clock_mhz=self._whole._number("nvmlDeviceGetMaxClockInfo", _CLOCK_SM),
            throttle_reasons=self.throttle_reasons(),
            probe_process=None,
        )
        return msgspec.structs.replace(found, nvml_problem=self._problem())

    def _problem(self) -> str | None:
        """Return NVML's reasons for not answering, each with the calls it refused, of this GPU and of its whole."""
        refused = {**self._whole._refused, **self._refused}
        calls = {reason: [call for call in refused if refused[call] == reason] for reason in refused.values()}
        return "; ".join(f"{reason} ({', '.join(calls[reason])})" for reason in calls) or None

    def uuid(self) -> str | None:
        """`GPU-…`, or `MIG-…` for an instance."""
        return _text(self._ask("nvmlDeviceGetUUID"))

    def divided(self) -> bool | None:
        """Return whether this GPU is divided into instances; None for GPUs that can't be."""
        return self._current_mode("nvmlDeviceGetMigMode")

    def instances(self) -> Iterator[Gpu]:
        """Yield the instances that this GPU is divided into."""
        count = 0
        if self.divided():
            count = self._number("nvmlDeviceGetMaxMigDeviceCount") or 0
        return _found(self._nvml, "nvmlDeviceGetMigDeviceHandleByIndex", *((self._handle, i) for i in range(count)))

    def memory(self) -> tuple[int | None, int | None]:
        """Return the bytes in total, and those that are free."""
        memory = self._ask("nvmlDeviceGetMemoryInfo")
        return _bytes(memory, "total"), _bytes(memory, "free")

    def processes(self) -> list[DeviceProcess] | None:
        """Return who uses it, for computing or for graphics, each with its memory, in the order of their ids."""
        if (compute := self._processes("nvmlDeviceGetComputeRunningProcesses")) is None:
            return None
        used: dict[int, int | None] = {}
        for process in (*compute, *(self._processes("nvmlDeviceGetGraphicsRunningProcesses") or ())):
            pid = int(process.pid)
            its_bytes = _bytes(process, "usedGpuMemory")
            known = used.get(pid)
            if known is not None:
                its_bytes = max(known, its_bytes or 0)
            used[pid] = its_bytes
        return [DeviceProcess(pid=pid, used_bytes=used[pid]) for pid in sorted(used)]

    def _processes(self, call: str) -> Any:
        """Ask by the newest form of the call that both the package and the driver know."""
        answers = (self._ask(call + version) for version in ("", "_v3", "_v2"))
        return next((answer for answer in answers if answer is not None), None)

    def sm_clock_mhz(self) -> int | None:
        """Return the current clock of the multiprocessors."""
        return self._whole._number("nvmlDeviceGetClockInfo", _CLOCK_SM)

    def throttle_reasons(self) -> list[str] | None:
        """Return why it is slower now than it could be, in plain words; empty if it is not."""
        bits = self._whole._number("nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:  # its name before driver 535
            bits = self._whole._number("nvmlDeviceGetCurrentClocksThrottleReasons")
        if bits is None:
            return None
        return named_reasons(bits)

    def _ask(self, call: str, *arguments: Any) -> Any:
        errors: list[Exception] = []
        answer = _answer(self._nvml, call, self._handle, *arguments, errors=errors)
        for error in errors:
            if getattr(error, "value", None) in _REFUSALS:
                self._refused[call] = str(error)
        return answer

    def _number(self, call: str, *arguments: Any) -> int | None:
        return _number(self._ask(call, *arguments))

    def _current_mode(self, call: str) -> bool | None:
        modes = self._ask(call)  # the current one and the pending one
        return bool(modes[0]) if isinstance(modes, (list, tuple)) and modes else None


def named_reasons(bits: int) -> list[str]:
    """Name the reasons in NVML's bit mask of clock events, without those that mean nothing bad."""
    if bits & _HARDWARE_CAUSES:
        bits &= ~_HARDWARE_SLOWDOWN  # set along with its cause, which says more
    return [words for bit, words in _THROTTLE_REASONS.items() if bits & bit]


def find_gpu(uuid: str | None, pci_bus_id: str | None, visible: str | None = None) -> Gpu | None:
    """Return the GPU or instance with this UUID, else at `pci_bus_id` (`0000:65:00.0`); None if NVML can't tell.

    The UUID may lack its `GPU-` or `MIG-`. `visible` is CUDA_VISIBLE_DEVICES: it names the instance if the UUID is the
    whole GPU's.
    """
    nvml = _loaded()
    if isinstance(nvml, str):
        return None
    names = []
    if uuid and uuid.startswith(("GPU-", "MIG-")):
        names = [uuid]
    elif uuid:
        names = [f"GPU-{uuid}", f"MIG-{uuid}"]
    gpu = next(_found(nvml, "nvmlDeviceGetHandleByUUID", *((name,) for name in names)), None)
    if gpu is None and pci_bus_id is not None:
        gpu = next(_found(nvml, "nvmlDeviceGetHandleByPciBusId", (pci_bus_id,)), None)
    if gpu is None or gpu.is_instance or not gpu.divided():
        return gpu
    # CUDA shows a process only one instance, and older drivers report its GPU's UUID for it.
    for name in (name.strip() for name in (visible or "").split(",")):
        if name.startswith("MIG-"):
            return next(_found(nvml, "nvmlDeviceGetHandleByUUID", (name,)), None)
    instances = list(gpu.instances())
    if len(instances) != 1:
        return None
    return instances[0]


def all_gpus() -> tuple[list[Gpu], str | None]:
    """Return every GPU, divided ones as their instances, and why NVML can't be asked, at all or for some."""
    nvml = _loaded()
    if isinstance(nvml, str):
        return [], nvml
    errors: list[Exception] = []
    count = _number(_answer(nvml, "nvmlDeviceGetCount", errors=errors)) or 0
    handles = (_answer(nvml, "nvmlDeviceGetHandleByIndex", index, errors=errors) for index in range(count))
    gpus = [Gpu(nvml, handle) for handle in handles if handle is not None]
    problem = ", ".join(dict.fromkeys(map(str, errors))) or None
    parts: list[Gpu] = []
    for gpu in gpus:
        parts += list(gpu.instances()) or [gpu]
    return parts, problem


def _loaded() -> Any | str:
    """Return the initialised module, or NVML's reason why it can't be used."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # no package, no library, no driver, no permission
        return str(error) or type(error).__name__
    return pynvml


def _found(nvml: Any, call: str, *arguments: tuple[Any, ...]) -> Iterator[Gpu]:
    """Yield a GPU for each of the arguments for which the call returns a handle."""
    handles: Iterable[Any] = (_answer(nvml, call, *each) for each in arguments)
    return (Gpu(nvml, handle) for handle in handles if handle is not None)


def _answer(nvml: Any, call: str, *arguments: Any, errors: list[Exception] | None = None) -> Any:
    """Return a call's answer; None if it is missing in this version, not supported here, or fails: see `errors`."""
    try:
        return getattr(nvml, call)(*arguments)
    except Exception as error:  # besides NVMLError: AttributeError, a library mismatch, a name that is not UTF-8
        if errors is not None:
            errors.append(error)
        return None


def _text(value: Any) -> str | None:
    text = value.decode(errors="replace") if isinstance(value, bytes) else value  # older packages answer in bytes
    return text if isinstance(text, str) and text else None


def _number(value: Any) -> int | None:
    value = getattr(value, "value", value)  # ctypes may have wrapped it
    return int(value) if isinstance(value, int) else None


def _bytes(facts: Any, field: str) -> int | None:
    size = _number(getattr(facts, field, None))
    if size == _NOT_AVAILABLE:
        return None
    return size
