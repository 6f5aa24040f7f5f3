"""GPUs by CUDA or ROCm: torch's caching allocator limits the memory, and NVML shows the memory outside it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from batchtune import allocators
from batchtune.errors import ProbeError
from batchtune.probe.devices import DeviceBackend, DeviceIdentity, Meter
from batchtune.results import Device, DeviceProcess, DoctorGpu, ProbedWith
from batchtune.units import format_size

# A GPU as the driver describes it, by NVML (`pynvml`, of the package nvidia-ml-py), and as torch does (`Card`).
#
# NVML may be absent (no NVIDIA driver, ROCm), and every single question may fail: not supported by this GPU, a virtual
# one or a part of one, not permitted in a container, unknown to an older driver, named differently by another version
# of the package. Each unanswered question is None, and the others still count.
#
# Names and meanings are those of the NVML API reference (https://docs.nvidia.com/deploy/nvml-api/).

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
            "`batchtune doctor` shows what this machine has. Install a CUDA build of PyTorch and a matching driver, or "
            "use --device cpu.",
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


_SLACK = 1.02  # the driver's own memory differs a little from process to process
# CUDA and NVML differ by some hundred MiB in the total memory. If they differ by more than this fraction, NVML means
# the whole GPU, and CUDA an instance of it.
_SAME_TOTAL = 0.05
_UNCACHED_VARIABLES = (
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "PYTORCH_NO_HIP_MEMORY_CACHING",
)
_FRACTION = re.compile(r"per_process_memory_fraction\s*:\s*(\d*\.?\d+)")
_MAPS_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
# What torch's functions that reset a device's peaks call.
_RESETS = ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats")
_ROUNDING = 1e-6  # the allocator keeps a fraction as whole bytes


class CudaBackend(DeviceBackend):
    """GPUs of NVIDIA (CUDA) and AMD (ROCm, which torch calls CUDA too)."""

    OOM_MESSAGES = (
        r"(CUDA|HIP) out of memory",
        r"(CUDA|Cuda|HIP)( driver)? [Ee]rror: out of memory",
        r"CUDA_ERROR_OUT_OF_MEMORY",  # Numba, CuPy
        r"(cuda|hip)Error(MemoryAllocation|OutOfMemory)",  # CuPy, RMM
        r"((CU|HIP)BLAS_STATUS|CUSOLVER_STATUS|CUDNN_STATUS|CUFFT)_ALLOC_FAILED",
        r"CUDNN_STATUS_INTERNAL_ERROR_(DEVICE|HOST)_ALLOCATION_FAILED",
        r"Triton Error \[(CUDA|HIP)\]: out of memory",
        r"Cuda failure (2 )?'out of memory'",  # NCCL
        r"Failed to CUDA (host )?[cm]?alloc",  # NCCL
        r"CUDA allocation failed",  # DALI
        r"RMM failure at:.{0,300}Maximum pool size exceeded",
        r"Error while calling cuda\w{1,30}\(.{0,300}reason: out of memory",  # dlib
        r"Check failed: [^(\n]{0,200}\((2 vs\. 0|0 vs\. 2)\).{0,40}out of memory",  # k2
        r"cuda failed with error 2 out of memory",  # spconv
    )
    DISGUISED_MESSAGES = (
        r"(CU|HIP)BLAS_STATUS_NOT_INITIALIZED",
        r"(CU|HIP)BLAS_STATUS_INTERNAL_ERROR when calling `(cu|hip)blasCreate",
        r"CUDNN_STATUS_(NOT_SUPPORTED|INTERNAL_ERROR|EXECUTION_FAILED)",
        r"CUSOLVER_STATUS_INTERNAL_ERROR",
        r"unable to find an engine",
        r"CUFFT_INTERNAL_ERROR",
        r"NVML_SUCCESS.{0,40}INTERNAL ASSERT FAILED",
        # Batches of more elements than 32 bits can count, or of more blocks than a GPU starts.
        r"\w*32.?[Bb]it.?[Ii]ndex",
        r"integer out of range",
        r"invalid configuration argument",
        r"rnnt_loss status [1-9]",  # warp-rnnt
        r"cuda memcpy or memset failed",  # warp-transducer
        r"Some bad things happened\. Please read the above error messages",  # k2, which prints why
    )
    VARIABLES = (
        *allocators.VARIABLES,
        *_UNCACHED_VARIABLES,
        "CUDA_LAUNCH_BLOCKING",
        "CUDA_MODULE_LOADING",
        "CUBLAS_WORKSPACE_CONFIG",
        "NVIDIA_TF32_OVERRIDE",
    )

    def is_available(self) -> bool:
        """Return whether torch sees one."""
        import torch

        return torch.cuda.is_available()

    def identify(self, device: str) -> DeviceIdentity:
        """Return its UUID or that of its instance (MIG); without one its place on the PCI bus, or `cuda:N`."""
        card = card_of(device)
        return DeviceIdentity(id=card.id, name=card.name)

    def open(
        self, device: str, settings: ProbedWith, limit_bytes: int | None
    ) -> CudaMeter:
        """Create the CUDA context."""
        return CudaMeter(card_of(device), settings, limit_bytes)

    def is_broken_by_fork(self) -> bool:
        """Ask torch (`torch.cuda`, "bad fork"), if it is imported."""
        in_bad_fork = getattr(
            getattr(sys.modules.get("torch"), "_C", None), "_cuda_isInBadFork", None
        )
        return bool(in_bad_fork and in_bad_fork())

    def seen_by_torch(self) -> list[DoctorGpu]:
        """Describe the GPUs without using them: torch could find out how much is free only by taking memory there."""
        import torch

        if not torch.cuda.is_available():
            return []
        return [
            replace(Card(index).seen(), expandable_segments=_maps_memory(index))
            for index in range(torch.cuda.device_count())
        ]

    def seen_by_driver(self) -> tuple[list[DoctorGpu], str | None, str | None]:
        """Ask NVML."""
        gpus, problem = all_gpus()
        driver = None
        if gpus:
            driver = gpus[0].driver()
        return [gpu.facts() for gpu in gpus], driver, problem


BACKEND = CudaBackend()


class CudaMeter(Meter):
    """A CUDA (or ROCm) device's memory, as torch's caching allocator holds it.

    The memory of the device is torch's (tensors and cache), which is limited; this process's *outside* of that (the
    CUDA context, loaded kernels, workspaces of libraries); and the *others*', in use before this process started.
    """

    def __init__(
        self, card: Card, settings: ProbedWith, limit_bytes: int | None
    ) -> None:
        import torch

        self._cuda = torch.cuda
        self.torch_device = torch.device("cuda", card.index)
        self._peaks = PeakCounter(card.index)
        _refuse_uncached()
        self._gpu = card.gpu
        self._clock: dict[str, Any] = {"sm_clock_mhz": None, "throttle_reasons": None}
        # Before this process uses the device: in a container NVML reports the host's process ids, not this one's.
        facts = card.seen()
        driver = None
        if self._gpu is not None:
            facts = self._gpu.facts()
            driver = self._gpu.driver()
        is_used = torch.cuda.memory_reserved(self.torch_device) > 0  # by a script
        self._free_before = _free_before(facts, is_used=is_used)
        try:
            # What the workload calls `.cuda()` means this device too
            torch.cuda.set_device(self.torch_device)
            problem = begin(self.torch_device)
        except RuntimeError as error:
            # No memory for even that, exclusive mode, a driver that is too old
            raise ProbeError(
                f"{card.name} can't be used: {str(error).splitlines()[0]}",
                "`batchtune doctor` shows who uses it. Stop other programs, or probe another device with --device.",
            ) from None
        _, total = torch.cuda.mem_get_info(card.index)
        self._total_bytes = total
        self._choice = settings.allocator
        self._continued = limit_bytes is not None
        self._wanted = limit_bytes or int(
            min(settings.memory_bytes or total, total) * settings.memory_fraction
        )
        self._share = 1.0  # of the device, that torch's allocator was last allowed here
        self._users_share = 1.0
        self._respect_users_share()
        others: list[DeviceProcess] | None = None
        other_processes: int | None = None
        if facts.processes is not None:
            others = [user for user in facts.processes if user.pid != os.getpid()]
            other_processes = len(others)
        if abs((facts.total_bytes or 0) - total) > _SAME_TOTAL * total:
            self._free_before = None
        self.device = Device(
            kind="cuda",
            name=card.name,
            total_bytes=total,
            limit_bytes=min(self._wanted, self._available()),
            driver=driver,
            torch=str(torch.__version__),
            allocator=self._allocator(problem),
            allocator_settings=allocators.other_settings(
                allocators.settings_in(os.environ)
            ),
            allocator_problem=problem,
            other_processes=other_processes,
            processes=others,
            uuid=card.uuid,
            free_bytes=self._free_before,
            mig=facts.mig,
            ecc=facts.ecc,
        )

    def _allocator(self, problem: str | None) -> str | None:
        """Return the allocator that this process has. Raises ProbeError if it is not the one that was chosen."""
        allocator = allocators.in_force(self._cuda)
        if allocator is None:  # the workload holds nothing
            return self.device.allocator
        if self._choice in ("auto", allocator):
            return allocator
        if problem is None:
            problem = f"this process runs {allocators.in_words(allocator)}, which your code chooses itself"
        raise ProbeError(
            f"--allocator {self._choice} is impossible here: {problem}",
            "Leave it out: whatever works is then measured, and every result says how to train with it.",
        )

    def limit(self) -> None:
        """Limit what torch's allocator may hold."""
        self._respect_users_share()
        limit_bytes = min(self.device.limit_bytes, self._wanted)
        self.device = replace(self.device, limit_bytes=limit_bytes)
        self._enforce()

    def _enforce(self) -> None:
        self._share = min(1.0, self.device.limit_bytes / self._total_bytes)
        self._cuda.set_per_process_memory_fraction(self._share, self.torch_device)

    def _respect_users_share(self) -> None:
        """Lower the limit to the share of the device that the user allows torch: an allocator setting, or a call.

        A call of the workload's shows as a share below the one set here. Raises ProbeError if a continued run's limit
        no longer fits.
        """
        share = 1.0
        for name in allocators.VARIABLES:
            match = _FRACTION.search(os.environ.get(name, ""))
            if match is not None:
                share = min(share, float(match[1]))
        # An older torch, or an allocator, may not tell.
        with contextlib.suppress(AttributeError, RuntimeError):
            now = float(self._cuda.get_per_process_memory_fraction(self.torch_device))
            if now < self._share - _ROUNDING:
                share = min(share, now)
        self._users_share = min(self._users_share, share)
        allowed = int(self._users_share * self._total_bytes)
        self._check_continued(
            allowed,
            f"per_process_memory_fraction now allows {format_size(allowed)}",
            "Leave that setting as it was",
        )
        self._wanted = min(self._wanted, allowed)

    def settle(self, reserve_bytes: int, ddp_bytes: int) -> None:
        """Compute and enforce the limit, after making the handles of cuBLAS and cuDNN as the first step would.

            limit = min(cap × fraction, total - others - outside) - reserve - ddp

        where total - others - outside = free + held by torch. The limit of a continued run stays, and must still fit.
        """
        self._respect_users_share()
        _create_handles(self.torch_device)
        self.synchronize()
        self.release()
        kept = reserve_bytes + ddp_bytes
        available = self._available(kept)
        limit_bytes = min(self._wanted - kept, available)
        if self._continued:
            limit_bytes = self._wanted
        self.device = replace(
            self.device,
            allocator=self._allocator(None),  # the workload may have changed it
            outside_bytes=self._outside(),
            reserve_bytes=reserve_bytes,
            ddp_bytes=ddp_bytes,
        )
        self.lower(limit_bytes)

    def lower(self, limit_bytes: int) -> None:
        """Limit what torch's allocator may hold."""
        self.device = replace(self.device, limit_bytes=limit_bytes)
        kept = self.device.reserve_bytes + self.device.ddp_bytes
        allocated = self.in_use()
        if limit_bytes <= allocated:
            free, total = self._cuda.mem_get_info(self.torch_device)
            raise ProbeError(
                f"no memory is left for batches: the workload itself holds {format_size(allocated)}, with "
                f"{format_size(kept)} kept free and {format_size(free)} of {format_size(total)} free on the device",
                "Give more with --memory or --memory-fraction, keep less free with --reserve, or take a smaller model.",
            )
        self._enforce()

    def _available(self, kept_bytes: int = 0) -> int:
        """Return the bytes that torch could hold. Raises ProbeError if a continued run's limit no longer fits."""
        free, _ = self._cuda.mem_get_info(self.torch_device)
        available = free + self._cuda.memory_reserved(self.torch_device) - kept_bytes
        self._check_continued(
            available,
            f"only {format_size(max(0, available))} of the device are free now",
            "Stop what else uses the device",
        )
        return available

    def _check_continued(self, available: int, now: str, remedy: str) -> None:
        """Raise ProbeError if a continued run's limit is more than these bytes."""
        if self._continued and self._wanted > available * _SLACK:
            raise ProbeError(
                f"this run was measured with a limit of {format_size(self._wanted)}, but {now}",
                f"{remedy}, or measure again with --force.",
            )

    def reset(self) -> None:
        """Start new peaks."""
        self._peaks.reset()

    def peak(self) -> int | None:
        """Return the most bytes allocated to tensors."""
        return self._peaks.read()[0]

    def reserved(self) -> int | None:
        """Return the most bytes held, the cache included."""
        return self._peaks.read()[1]

    def in_use(self) -> int:
        """Return the bytes of tensors."""
        return int(self._cuda.memory_allocated(self.torch_device))

    def note_clock(self) -> None:
        """Ask NVML."""
        if self._gpu is not None:
            self._clock = {
                "sm_clock_mhz": self._gpu.sm_clock_mhz(),
                "throttle_reasons": self._gpu.throttle_reasons(),
            }

    def surroundings(self) -> dict[str, Any]:
        """Return the clock as it was noted, and what NVML says now of the memory outside torch's allocator."""
        return {"outside_bytes": self._outside(), **self._clock}

    def _outside(self) -> int | None:
        """Return what this process holds on the device - what torch's allocator holds; None without NVML.

        By how much less is free than before this process started, which includes what others have taken since.
        """
        if self._gpu is None or self._free_before is None:
            return None
        _, free = self._gpu.memory()
        if free is None:
            return None
        reserved = self._cuda.memory_reserved(self.torch_device)
        return max(0, self._free_before - free - reserved)

    def retries_and_ooms(self) -> tuple[int, int]:
        """Return the allocator's own counts of flushed caches and of errors raised, including those caught since."""
        stats = self._cuda.memory_stats(self.torch_device)
        return int(stats.get("num_alloc_retries", 0)), int(stats.get("num_ooms", 0))

    def synchronize(self) -> None:
        """Wait for the device's queue."""
        self._cuda.synchronize(self.torch_device)

    def release(self) -> None:
        """Empty the allocator's cache; after a sticky error even that fails, and `healthy` is False."""
        with contextlib.suppress(RuntimeError):
            self._cuda.empty_cache()

    def free_workspaces(self) -> None:
        """Free what cuBLAS works in."""
        import torch

        with contextlib.suppress(AttributeError):  # an older torch
            torch._C._cuda_clearCublasWorkspaces()
        self.release()

    def healthy(self) -> bool:
        """Return whether the device can still compute: after a sticky error nothing can."""
        import torch

        try:
            torch.ones(16, device=self.torch_device).sum().item()
        except RuntimeError:
            return False
        return True

    def switches(self) -> dict[str, Any]:
        """Return torch's switches for cuDNN, and the user's share of the device."""
        import torch

        cudnn = torch.backends.cudnn
        switches: dict[str, Any] = {
            "cudnn_benchmark": cudnn.benchmark,
            "cudnn_deterministic": cudnn.deterministic,
        }
        if self._users_share < 1:
            switches["per_process_memory_fraction"] = self._users_share
        return switches


class PeakCounter:
    """A GPU's highest memory since `reset`, though the measured code may reset torch's own statistics meanwhile."""

    def __init__(self, index: int) -> None:
        import torch

        self._cuda = torch.cuda
        self._index = index
        self._earlier = (0, 0)  # before the measured code's last reset
        for name in _RESETS:
            own = getattr(torch._C, name, None)
            if own is not None:
                setattr(torch._C, name, self._after_reading(own))

    def _after_reading(self, reset: Callable[[int], None]) -> Callable[[int], None]:
        @functools.wraps(reset)
        def read_and_reset(index: int) -> None:
            self._earlier = self.read()
            reset(index)

        return read_and_reset

    def reset(self) -> None:
        """Start new peaks."""
        self._cuda.reset_peak_memory_stats(self._index)
        self._earlier = (0, 0)

    def read(self) -> tuple[int, int]:
        """Return the most bytes allocated to tensors, and the most held, the cache included."""
        # As `max_memory_allocated`, which takes 100 µs to flatten and sort all the statistics.
        statistics = self._cuda.memory_stats_as_nested_dict(self._index)
        allocated, reserved = (
            int(statistics[kind]["all"]["peak"])
            for kind in ("allocated_bytes", "reserved_bytes")
        )
        return max(allocated, self._earlier[0]), max(reserved, self._earlier[1])


def _refuse_uncached() -> None:
    """Raise ProbeError if torch's allocator is turned off, as any value of a variable does: it knows no limit then."""
    for name in _UNCACHED_VARIABLES:
        if name in os.environ:
            raise ProbeError(
                f"{name} is set: PyTorch then allocates past its allocator, which neither limits nor measures it",
                f"Unset {name}, in training too.",
            )


def _free_before(facts: DoctorGpu, *, is_used: bool) -> int | None:
    """Return what was free before this process used a GPU; None if NVML does not tell what it has taken since."""
    if not is_used:
        return facts.free_bytes
    for user in facts.processes or ():
        if user.pid == os.getpid() and None not in (user.used_bytes, facts.free_bytes):
            return int(user.used_bytes or 0) + int(facts.free_bytes or 0)
    return None


def _maps_memory(index: int) -> bool | None:
    """Return whether a device can map memory into reserved addresses, as expandable segments do; None if unknown."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device = ctypes.c_int()
    maps = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), index):
        return None
    if driver.cuDeviceGetAttribute(ctypes.byref(maps), _MAPS_MEMORY, device):
        return None
    return bool(maps.value)


def begin(device: Any) -> str | None:
    """Create the context, natively if expandable segments don't work; return why they don't, if they were to be used.

    Raises RuntimeError if the device can't be used at all.
    """
    import torch

    problem = None
    wanted = allocators.asked_for(allocators.settings_in(os.environ))
    try:
        _create_context(device)
    except RuntimeError as error:
        if wanted != allocators.EXPANDABLE:
            raise
        problem = str(error).splitlines()[0]
        _take_memory_natively()
        _create_context(device)
    if wanted == allocators.EXPANDABLE != allocators.in_force(torch.cuda):
        problem = problem or "this build of PyTorch, or the platform, lacks them"
        return f"expandable segments don't work: {problem}"
    return None


def _take_memory_natively() -> None:
    """Turn expandable segments off, in this process and those that it starts."""
    import torch

    variables = allocators.variables_for(allocators.NATIVE, os.environ)
    os.environ.update(variables)
    with warnings.catch_warnings():
        # From 2.10 on it has another name, which does nothing in 2.9.
        warnings.simplefilter("ignore", FutureWarning)
        torch.cuda.memory._set_allocator_settings(variables["PYTORCH_ALLOC_CONF"])


def _create_context(device: Any) -> None:
    import torch

    torch.zeros(1, device=device)
    torch.cuda.synchronize(device)


def _create_handles(device: Any) -> None:
    """Use cuBLAS and cuDNN once, without random numbers: their handles, kernels and workspaces take memory."""
    import torch

    # Some may be unsupported here: bf16 on an old GPU, a deterministic mode that needs more settings.
    for dtype in (torch.float32, torch.bfloat16):
        with contextlib.suppress(RuntimeError), torch.enable_grad():
            matrix = torch.ones(
                128, 128, dtype=dtype, device=device, requires_grad=True
            )
            torch.autograd.backward((matrix @ matrix).sum())
    with contextlib.suppress(RuntimeError), torch.enable_grad():
        image = torch.ones(
            1, 16, 16, 16, dtype=torch.float32, device=device, requires_grad=True
        )
        torch.autograd.backward(torch.nn.functional.conv2d(image, image).sum())
