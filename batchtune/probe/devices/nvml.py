"""The driver's description of a GPU, by NVML (`pynvml`, from the package nvidia-ml-py). Knows nothing of torch.

NVML may be absent (no NVIDIA driver, ROCm), and every single question may fail: not supported by this GPU, a virtual
one or a part of one, not permitted in a container, unknown to an older driver, named differently by another version
of the package. Each unanswered question is None, and the others still count.

Names and meanings are those of the NVML API reference (https://docs.nvidia.com/deploy/nvml-api/).
"""

from __future__ import annotations

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


class _Calls:
    """NVML's functions: each unanswered question is None, and what was refused is kept."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml
        self.refused: dict[str, str] = {}  # call → NVML's reason

    def ask(self, call: str, *arguments: Any) -> Any:
        """Return a call's answer; None if it is missing in this version, not supported here, or fails."""
        try:
            return getattr(self.nvml, call)(*arguments)
        except Exception as error:  # besides NVMLError: AttributeError, a library mismatch, a name that is not UTF-8
            if getattr(error, "value", None) in _REFUSALS:
                self.refused[call] = str(error)
            return None

    def number(self, call: str, *arguments: Any) -> int | None:
        """Return a call's answer if it is a number."""
        return _number(self.ask(call, *arguments))

    def gpu(self, call: str, *arguments: Any) -> Gpu | None:
        """Return the GPU whose handle a call returns."""
        handle = self.ask(call, *arguments)
        if handle is None:
            return None
        return Gpu(self.nvml, handle)


class Gpu:
    """A GPU, or an instance of one, by the initialised module `pynvml` and its handle."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._calls = _Calls(nvml)
        self._handle = handle
        self._whole = self  # clocks and ECC are the whole GPU's
        self.is_instance = bool(self._number("nvmlDeviceIsMigDeviceHandle"))
        if self.is_instance:
            self._whole = (
                self._calls.gpu("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
                or self
            )

    def driver(self) -> str | None:
        """Return the driver's version."""
        return _text(self._calls.ask("nvmlSystemGetDriverVersion"))

    def facts(self) -> DoctorGpu:
        """Describe it as it is now; in a container the processes have the host's ids."""
        total, free = self.memory()
        facts = DoctorGpu(
            name=_text(self._ask("nvmlDeviceGetName")) or "GPU without a name",
            device=None,
            uuid=self.uuid(),
            capability=None,
            total_bytes=total,
            free_bytes=free,
            processes=self.processes(),
            mig=self.is_instance or self.divided(),
            ecc=self._whole._current_mode("nvmlDeviceGetEccMode"),
            sm_clock_mhz=self.sm_clock_mhz(),
            max_sm_clock_mhz=self._whole._number(
                "nvmlDeviceGetMaxClockInfo", _CLOCK_SM
            ),
            throttle_reasons=self.throttle_reasons(),
            probe_process=None,
        )
        return msgspec.structs.replace(facts, nvml_problem=self._problem())

    def _problem(self) -> str | None:
        """Return NVML's reasons for not answering, each with the calls it refused, of this GPU and of its whole."""
        calls: dict[str, list[str]] = {}
        for call, reason in {
            **self._whole._calls.refused,
            **self._calls.refused,
        }.items():
            calls.setdefault(reason, []).append(call)
        return (
            "; ".join(
                f"{reason} ({', '.join(refused)})" for reason, refused in calls.items()
            )
            or None
        )

    def uuid(self) -> str | None:
        """`GPU-…`, or `MIG-…` for an instance."""
        return _text(self._ask("nvmlDeviceGetUUID"))

    def divided(self) -> bool | None:
        """Return whether this GPU is divided into instances; None for GPUs that can't be."""
        return self._current_mode("nvmlDeviceGetMigMode")

    def instances(self) -> list[Gpu]:
        """Return the instances that this GPU is divided into."""
        if not self.divided():
            return []
        count = self._number("nvmlDeviceGetMaxMigDeviceCount") or 0
        call = "nvmlDeviceGetMigDeviceHandleByIndex"
        return [
            gpu
            for index in range(count)
            if (gpu := self._calls.gpu(call, self._handle, index)) is not None
        ]

    def memory(self) -> tuple[int | None, int | None]:
        """Return the bytes in total, and those that are free."""
        memory = self._ask("nvmlDeviceGetMemoryInfo")
        return _bytes(memory, "total"), _bytes(memory, "free")

    def processes(self) -> list[DeviceProcess] | None:
        """Return who uses it, for computing or for graphics, each with its memory, in the order of their ids."""
        compute = self._processes("nvmlDeviceGetComputeRunningProcesses")
        if compute is None:
            return None
        used: dict[int, int | None] = {}
        for process in (
            *compute,
            *(self._processes("nvmlDeviceGetGraphicsRunningProcesses") or ()),
        ):
            sizes = [_bytes(process, "usedGpuMemory"), used.get(int(process.pid))]
            used[int(process.pid)] = max(
                (size for size in sizes if size is not None), default=None
            )
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
        return self._calls.ask(call, self._handle, *arguments)

    def _number(self, call: str, *arguments: Any) -> int | None:
        return self._calls.number(call, self._handle, *arguments)

    def _current_mode(self, call: str) -> bool | None:
        modes = self._ask(call)  # the current one and the pending one
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
    calls = _Calls(nvml)
    gpu = None
    for prefix in ("", "GPU-", "MIG-"):
        if uuid and gpu is None:
            gpu = calls.gpu("nvmlDeviceGetHandleByUUID", prefix + uuid)
    if gpu is None and pci_bus_id is not None:
        gpu = calls.gpu("nvmlDeviceGetHandleByPciBusId", pci_bus_id)
    if gpu is None or gpu.is_instance or not gpu.divided():
        return gpu
    # CUDA shows a process only one instance, and older drivers report its GPU's UUID for it.
    for name in (name.strip() for name in (visible or "").split(",")):
        if name.startswith("MIG-"):
            return calls.gpu("nvmlDeviceGetHandleByUUID", name)
    instances = gpu.instances()
    if len(instances) != 1:
        return None
    return instances[0]


def all_gpus() -> tuple[list[Gpu], str | None]:
    """Return every GPU, divided ones as their instances, and why NVML can't be asked, at all or for some."""
    nvml, problem = _loaded()
    calls = _Calls(nvml)
    gpus: list[Gpu] = []
    for index in range(calls.number("nvmlDeviceGetCount") or 0):
        gpu = calls.gpu("nvmlDeviceGetHandleByIndex", index)
        if gpu is not None:
            gpus += gpu.instances() or [gpu]
    return gpus, problem or ", ".join(dict.fromkeys(calls.refused.values())) or None


def _loaded() -> tuple[Any, str | None]:
    """Return the initialised module, or None and NVML's reason why it can't be used."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # no package, no library, no driver, no permission
        return None, str(error) or type(error).__name__
    return pynvml, None


def _text(value: Any) -> str | None:
    if isinstance(value, bytes):  # older packages answer in bytes
        value = value.decode(errors="replace")
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
