"""Say in words what `batchtune doctor` found."""

from __future__ import annotations

from collections.abc import Iterator

from batchtune.reports.table import Fact
from batchtune.results import Doctor, DoctorCpu, DoctorGpu, DoctorTorch
from batchtune.trust import busy_with
from batchtune.units import counted, format_size

_SWITCH = {None: "unknown, or not supported", True: "on", False: "off"}


def doctor_facts(doctor: Doctor) -> dict[str, list[Fact]]:
    """Return versions, devices, settings, packages and warnings: title of a list → its facts."""
    settings = list(doctor.environment.items())
    groups = {"": list(_versions(doctor))}
    for gpu in doctor.gpus:
        groups[gpu.device or f"GPU {gpu.uuid}"] = list(_gpu(gpu))
    groups["cpu"] = list(_cpu(doctor.cpu))
    groups["Settings"] = settings or [("environment", "nothing set that changes memory or step times")]
    groups["Packages"] = [(name, version or "not installed") for name, version in doctor.packages.items()]
    if doctor.warnings:
        groups["Warnings"] = [("!", warning) for warning in doctor.warnings]
    return groups


def _versions(doctor: Doctor) -> Iterator[Fact]:
    yield "batchtune", doctor.meta.batchtune
    yield "Python", f"{doctor.python} on {doctor.system}"
    yield "PyTorch", _torch(doctor.torch)
    yield "Driver", _driver(doctor)
    if not doctor.gpus:
        yield "GPUs", "none"
    devices = [gpu.device for gpu in doctor.gpus if gpu.device]
    yield "--device auto", f"takes {devices[0] if devices else 'cpu'}"


def _driver(doctor: Doctor) -> str:
    driver = "none"
    if doctor.driver is not None:
        driver = f"NVIDIA {doctor.driver}"
    elif doctor.gpus:
        driver = "NVIDIA, of unknown version"
    if doctor.nvml_problem is not None:
        driver += f" (NVML: {doctor.nvml_problem})"
    return driver


def _torch(torch: DoctorTorch) -> str:
    if torch.version is None:
        return f"not installed ({torch.problem})"
    if torch.problem is not None:
        return f"{torch.version}, does not work: {torch.problem}"
    build = "built without CUDA and ROCm"
    if torch.cuda is not None:
        build = f"built for CUDA {torch.cuda}"
    elif torch.hip is not None:
        build = f"built for ROCm {torch.hip}"
    if torch.cudnn:
        build += f", cuDNN {torch.cudnn}"
    return f"{torch.version}, {build}"


def _gpu(gpu: DoctorGpu) -> Iterator[Fact]:
    name = gpu.name
    if gpu.capability:
        name += f", compute capability {gpu.capability}"
    if not gpu.device:
        name += ", which PyTorch does not see"
    yield "name", name
    yield "UUID", gpu.uuid or "unknown"
    yield "memory", _memory(gpu.total_bytes, gpu.free_bytes, "free")
    yield "used by", _users(gpu)
    yield "a probe", _probe(gpu.probe_process)
    yield "MIG", _SWITCH[gpu.mig]
    yield "ECC", _SWITCH[gpu.ecc]
    yield "clock", _clock(gpu)
    if gpu.nvml_problem is not None:
        yield "NVML", f"does not answer everything: {gpu.nvml_problem}"


def _users(gpu: DoctorGpu) -> str:
    if gpu.processes is None:
        return "unknown"
    if not gpu.processes:
        return "nobody"
    return busy_with(gpu.processes) or "only processes that hold almost nothing"


def _clock(gpu: DoctorGpu) -> str:
    if gpu.sm_clock_mhz is None:
        return "unknown"
    clock = f"{gpu.sm_clock_mhz:,} MHz"
    if gpu.max_sm_clock_mhz:
        clock += f" of at most {gpu.max_sm_clock_mhz:,} MHz"
    if gpu.throttle_reasons:
        clock += f", lowered now: {', '.join(gpu.throttle_reasons)}"
    return clock


def _cpu(cpu: DoctorCpu) -> Iterator[Fact]:
    processors = counted(cpu.processors, "processor")
    yield "name", f"{cpu.name}, {processors}"
    yield "memory", _memory(cpu.total_bytes, cpu.available_bytes, "available")
    if cpu.limit_problem is None:
        yield "memory limit", "works"
    else:
        yield "memory limit", f"does not work: {cpu.limit_problem}"
    if cpu.load_average is not None:
        yield "load average", f"{cpu.load_average:.1f} in the last minute, on {processors}"
    yield "a probe", _probe(cpu.probe_process)


def _memory(total_bytes: int | None, free_bytes: int | None, free: str) -> str:
    if total_bytes is None:
        return "unknown"
    total = format_size(total_bytes)
    if free_bytes is None:
        return f"{total}, the free part is unknown"
    return f"{total}, {format_size(free_bytes)} {free}"


def _probe(process: int | None) -> str:
    return "none is running" if process is None else f"process {process} is running one"
