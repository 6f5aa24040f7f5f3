"""GPUs by CUDA or ROCm: torch's caching allocator limits the memory, and NVML shows the memory outside it."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from typing import Any

import msgspec

from batchtune.errors import ProbeError
from batchtune.probe.devices.base import DeviceBackend, Meter
from batchtune.probe.devices.cuda_messages import DISGUISED_MESSAGES, OOM_MESSAGES
from batchtune.probe.devices.nvml import all_gpus, find_gpu
from batchtune.probe.protocol import Identified
from batchtune.results import Device, DoctorGpu, ProbedWith
from batchtune.units import format_size

_SLACK = 1.02  # the driver's own memory differs a little from process to process
# CUDA and NVML differ by some hundred MiB in the total memory. If they differ by more than this fraction, NVML means
# the whole GPU, and CUDA an instance of it.
_SAME_TOTAL = 0.05
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_UNCACHED_VARIABLES = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING")
_FRACTION = re.compile(r"per_process_memory_fraction\s*:\s*(\d*\.?\d+)")
_ROUNDING = 1e-6  # the allocator keeps a fraction as whole bytes
_GIVE_MORE = "Give more with --memory or --memory-fraction, keep less free with --reserve, or take a smaller model."


class CudaBackend(DeviceBackend):
    """GPUs of NVIDIA (CUDA) and AMD (ROCm, which torch calls CUDA too)."""

    OOM_MESSAGES = OOM_MESSAGES
    DISGUISED_MESSAGES = DISGUISED_MESSAGES
    VARIABLES = (
        *_ALLOCATOR_VARIABLES[1:],
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

    def identify(self, device: str) -> Identified:
        """Return its UUID or that of its instance (MIG); without one its place on the PCI bus, or `cuda:N`."""
        card = _Card(_index(device))
        return Identified(id=card.id, name=card.name)

    def open(self, device: str, settings: ProbedWith, limit_bytes: int | None) -> CudaMeter:
        """Create the CUDA context."""
        return CudaMeter(_index(device), settings, limit_bytes)

    def is_broken_by_fork(self) -> bool:
        """Ask torch (`torch.cuda`, "bad fork"), if it is imported."""
        in_bad_fork = getattr(getattr(sys.modules.get("torch"), "_C", None), "_cuda_isInBadFork", None)
        return bool(in_bad_fork and in_bad_fork())

    def seen_by_torch(self) -> list[DoctorGpu]:
        """Describe the GPUs without using them: torch could find out how much is free only by taking memory there."""
        import torch

        unknown: dict[str, Any] = dict.fromkeys(DoctorGpu.__struct_fields__)
        found = []
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            card = _Card(index)
            facts = {"name": card.name, "device": f"cuda:{index}", "uuid": card.id}
            facts["capability"] = f"{card.properties.major}.{card.properties.minor}"
            found.append(DoctorGpu(**{**unknown, **facts, "total_bytes": int(card.properties.total_memory)}))
        return found

    def seen_by_driver(self) -> tuple[list[DoctorGpu], str | None, str | None]:
        """Ask NVML."""
        gpus, problem = all_gpus()
        versions = (gpu.driver() for gpu in gpus)
        return [gpu.facts() for gpu in gpus], next(filter(None, versions), None), problem


def _index(device: str) -> int:
    """Return the index that a `--device` value means. Raises ProbeError if this machine has no such device."""
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
            f"there is no {device}: this machine shows {torch.cuda.device_count()} CUDA device(s)",
            "`batchtune doctor` lists them. The first is cuda:0; CUDA_VISIBLE_DEVICES may hide some.",
        )
    return index


class _Card:
    """One of torch's devices, and NVML's view of it; its UUID as NVML writes it. Takes no memory on it."""

    def __init__(self, index: int) -> None:
        import torch

        self.properties = torch.cuda.get_device_properties(index)
        self.name = str(self.properties.name)
        # torch does not say whether it is the GPU's or the instance's; some versions give all zeros.
        uuid = str(getattr(self.properties, "uuid", "") or "")
        if not uuid.strip("0-"):
            uuid = ""
        numbers: list[Any] = [getattr(self.properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
        place = None
        if all(isinstance(number, int) for number in numbers):
            place = "{:04x}:{:02x}:{:02x}.0".format(*numbers)
        self.gpu = find_gpu(uuid or None, place, os.environ.get("CUDA_VISIBLE_DEVICES"))
        if uuid and not uuid.startswith(("GPU-", "MIG-")):
            uuid = f"GPU-{uuid}"
        self.uuid = (self.gpu.uuid() if self.gpu else None) or uuid or None
        self.id = self.uuid or (f"PCI-{place}" if place else f"cuda:{index}")


class CudaMeter(Meter):
    """A CUDA (or ROCm) device's memory, as torch's caching allocator holds it.

    The memory of the device is torch's (tensors and cache), which is limited; this process's *outside* of that (the
    CUDA context, loaded kernels, workspaces of libraries); and the *others*', in use before this process started.
    """

    def __init__(self, index: int, settings: ProbedWith, limit_bytes: int | None) -> None:
        import torch

        self._cuda = torch.cuda
        self.torch_device = torch.device("cuda", index)
        _refuse_uncached()
        card = _Card(index)
        self._gpu = card.gpu
        self._clock: dict[str, Any] = {"sm_clock_mhz": None, "throttle_reasons": None}
        # Before this process uses the device: in a container NVML reports the host's process ids, not this one's.
        facts = self._gpu.facts() if self._gpu else None
        try:
            torch.cuda.set_device(self.torch_device)  # what the workload calls `.cuda()` means this device too
            _create_context(self.torch_device)
        except RuntimeError as error:  # no memory for even that, exclusive mode, a driver that is too old
            raise ProbeError(
                f"{card.name} can't be used: {str(error).splitlines()[0]}",
                "`batchtune doctor` shows who uses it. Stop what need not run, or probe another device with --device.",
            ) from None
        total = torch.cuda.mem_get_info(index)[1]
        self._continued = limit_bytes is not None
        self._wanted = limit_bytes or int(min(settings.memory_bytes or total, total) * settings.memory_fraction)
        self._share = 1.0  # of the device, that torch's allocator was last allowed here
        self._users_share = 1.0
        self._respect_users_share(total)
        processes = facts.processes if facts else None
        others = None if processes is None else [one for one in processes if one.pid != os.getpid()]
        self._pid_is_ours = others == processes
        nvml_total = (facts.total_bytes if facts else None) or 0
        self._free_before = facts.free_bytes if facts and abs(nvml_total - total) <= _SAME_TOTAL * total else None
        allocator = torch.cuda.get_allocator_backend()
        given = next((os.environ[name] for name in _ALLOCATOR_VARIABLES if os.environ.get(name)), None)
        self.device = Device(
            kind="cuda",
            name=card.name,
            total_bytes=total,
            limit_bytes=min(self._wanted, self._available()),
            driver=self._gpu.driver() if self._gpu else None,
            torch=str(torch.__version__),
            allocator=f"{allocator} ({given})" if given else allocator,
            other_processes=None if others is None else len(others),
            processes=others,
            uuid=card.uuid,
            free_bytes=self._free_before,
            mig=facts.mig if facts else None,
            ecc=facts.ecc if facts else None,
        )

    def limit(self) -> None:
        """Limit what torch's allocator may hold."""
        self._respect_users_share(self.device.total_bytes)
        limit_bytes = min(self.device.limit_bytes, self._wanted)
        self.device = msgspec.structs.replace(self.device, limit_bytes=limit_bytes)
        self._enforce()

    def _enforce(self) -> None:
        self._share = min(1.0, self.device.limit_bytes / self.device.total_bytes)
        self._cuda.set_per_process_memory_fraction(self._share, self.torch_device)

    def _respect_users_share(self, total: int) -> None:
        """Lower the limit to the share of the device that the user allows torch: an allocator setting, or a call.

        A call of the workload's shows as a share below the one set here. Raises ProbeError if a continued run's limit
        no longer fits.
        """
        share = min([1.0, *_configured_shares()])
        with contextlib.suppress(AttributeError, RuntimeError):  # an older torch, or an allocator that can't tell
            now = float(self._cuda.get_per_process_memory_fraction(self.torch_device))
            if now < self._share - _ROUNDING:
                share = min(share, now)
        self._users_share = min(self._users_share, share)
        allowed = int(self._users_share * total)
        if self._continued and self._wanted > allowed * _SLACK:
            raise ProbeError(
                f"this run was measured with a limit of {format_size(self._wanted)}, but per_process_memory_fraction "
                f"now allows {format_size(allowed)}",
                "Leave that setting as it was, or measure again with --force.",
            )
        self._wanted = min(self._wanted, allowed)

    def settle(self, reserve_bytes: int, ddp_bytes: int) -> None:
        """Compute and enforce the limit, after making the handles of cuBLAS and cuDNN as the first step would.

            limit = min(cap × fraction, total - others - outside) - reserve - ddp

        where total - others - outside = free + held by torch. The limit of a continued run stays, and must still fit.
        """
        self._respect_users_share(self.device.total_bytes)
        _create_handles(self.torch_device)
        self.synchronize()
        self.release()
        kept = reserve_bytes + ddp_bytes
        available = self._available(kept)
        self.device = msgspec.structs.replace(
            self.device,
            limit_bytes=self._wanted if self._continued else min(self._wanted - kept, available),
            outside_bytes=self._outside(),
            reserve_bytes=reserve_bytes,
            ddp_bytes=ddp_bytes,
        )
        if self.device.limit_bytes <= (allocated := self.in_use()):
            free, total = self._cuda.mem_get_info(self.torch_device)
            parts = [f"the workload itself holds {format_size(allocated)}"]
            if reserve_bytes:
                parts.append(f"{format_size(reserve_bytes)} are kept free by --reserve")
            if ddp_bytes:
                parts.append(f"{format_size(ddp_bytes)} for DDP's gradient buckets")
            parts.append(f"{format_size(free)} of {format_size(total)} are free on the device")
            raise ProbeError(f"nothing of the memory is left for batches: {', '.join(parts)}", _GIVE_MORE)
        self._enforce()

    def _available(self, kept_bytes: int = 0) -> int:
        """Return the bytes that torch could hold. Raises ProbeError if a continued run's limit no longer fits."""
        free, _ = self._cuda.mem_get_info(self.torch_device)
        available = free + self._cuda.memory_reserved(self.torch_device) - kept_bytes
        if self._continued and self._wanted > available * _SLACK:
            raise ProbeError(
                f"this run was measured with a limit of {format_size(self._wanted)}, "
                f"but only {format_size(max(0, available))} of the device are free now",
                "Stop what else uses the device, or measure again with --force.",
            )
        return available

    def reset(self) -> None:
        """Reset the allocator's own peaks."""
        self._cuda.reset_peak_memory_stats(self.torch_device)

    def peak(self) -> int | None:
        """Return the most bytes allocated to tensors."""
        return self._cuda.max_memory_allocated(self.torch_device)

    def reserved(self) -> int | None:
        """Return the most bytes held, the cache included."""
        return self._cuda.max_memory_reserved(self.torch_device)

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

        By the driver's own figure for this process. Without one (in a container, which has its own process ids), by
        how much less is free than before this process started, which includes what others have taken since.
        """
        if self._gpu is None:
            return None
        reserved = self._cuda.memory_reserved(self.torch_device)
        held = None
        if self._pid_is_ours:
            held = next((one.used_bytes for one in self._gpu.processes() or () if one.pid == os.getpid()), None)
        if held is None or held < reserved:
            free = self._gpu.memory()[1]
            if free is None or self._free_before is None:
                return None
            held = self._free_before - free
        return max(0, held - reserved)

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

    def healthy(self) -> bool:
        """Return whether the device can still compute: after a sticky error nothing can."""
        import torch

        try:
            torch.ones(16, device=self.torch_device).sum().item()
        except RuntimeError:
            return False
        return True

    def switches(self) -> dict[str, Any]:
        """Return torch's switches for float32 (`tf32`, or `ieee`: full precision) and cuDNN."""
        import torch

        cudnn: Any = torch.backends.cudnn
        matmul: Any = torch.backends.cuda.matmul
        # Torch 2.9 has new switches, and warns or raises if the old ones are read after the new ones were set.
        if hasattr(cudnn, "conv") and hasattr(cudnn, "rnn"):
            precisions = [matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision]
        else:
            allowed = (matmul.allow_tf32, cudnn.allow_tf32, cudnn.allow_tf32)
            precisions = ["tf32" if one else "ieee" for one in allowed]
        names = ("matmul_precision", "cudnn_conv_precision", "cudnn_rnn_precision")
        # `none`: full precision, as nobody asked for less.
        switches: dict[str, Any] = {
            name: "ieee" if value == "none" else value for name, value in zip(names, precisions, strict=True)
        }
        switches["cudnn_benchmark"] = cudnn.benchmark
        switches["cudnn_deterministic"] = cudnn.deterministic
        if self._users_share < 1:
            switches["per_process_memory_fraction"] = self._users_share
        return switches


def _refuse_uncached() -> None:
    """Raise ProbeError if torch's allocator is turned off, as any value of a variable does: it knows no limit then."""
    for name in _UNCACHED_VARIABLES:
        if name in os.environ:
            raise ProbeError(
                f"{name} is set: PyTorch then allocates past its allocator, which neither limits nor measures it",
                f"Unset {name}, in training too.",
            )


def _configured_shares() -> list[float]:
    """Return the shares of the device that the allocator's settings allow a process."""
    settings = (os.environ.get(name, "") for name in _ALLOCATOR_VARIABLES)
    matches = (_FRACTION.search(setting) for setting in settings)
    return [float(match[1]) for match in matches if match is not None]


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
            matrix = torch.ones(128, 128, dtype=dtype, device=device, requires_grad=True)
            torch.autograd.backward((matrix @ matrix).sum())
    with contextlib.suppress(RuntimeError), torch.enable_grad():
        image = torch.ones(1, 16, 16, 16, dtype=torch.float32, device=device, requires_grad=True)
        weight = torch.ones(16, 16, 3, 3, dtype=torch.float32, device=device, requires_grad=True)
        torch.autograd.backward(torch.nn.functional.conv2d(image, weight).sum())
