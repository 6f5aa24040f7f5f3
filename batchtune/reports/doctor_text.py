"""The report of `batchtune doctor` as plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from batchtune.results import Doctor, DoctorCpu, DoctorGpu, DoctorTorch
from batchtune.trust import busy_with
from batchtune.units import counted, format_size

_WIDTH = 100
_NAMES = 14  # columns for the names of facts, where none needs more
_SWITCH = {None: "unknown, or not supported", True: "on", False: "off"}


def render_doctor(found: Doctor, width: int = _WIDTH) -> str:
    """Show all of it, in lines of that width, at least 40: versions, devices, settings, packages, warnings."""
    settings = list(found.environment.items()) or [("", "no environment variable changes what a step takes")]
    packages = [(name, version or "not installed") for name, version in found.packages.items()]
    blocks = [
        _block("", _versions(found), width),
        *(_block(gpu.device or "GPU", _gpu(gpu), width) for gpu in found.gpus),
        _block("cpu", _cpu(found.cpu), width),
        _block("Settings", settings, width),
        _block("Packages", packages, width),
    ]
    if found.warnings:
        wrapper = textwrap.TextWrapper(
            width, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False, break_long_words=False
        )
        blocks.append(["Warnings", *(line for text in found.warnings for line in wrapper.wrap(text))])
    else:
        blocks.append(["Nothing stands in the way of a probe."])
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _block(title: str, facts: Iterable[tuple[str, str]], width: int) -> list[str]:
    """Return a title and its facts, names and values in columns; a value that is too long is broken."""
    facts = list(facts)
    columns = max(_NAMES, *(len(name) + 2 for name, _ in facts))
    lines, start = ([title], "  ") if title else ([], "")
    for name, value in facts:
        lead = f"{start}{name:<{columns}}" if name else start
        wrapper = textwrap.TextWrapper(
            width, initial_indent=lead, subsequent_indent=" " * len(lead), break_on_hyphens=False
        )
        lines += wrapper.wrap(value) or [lead.rstrip()]
    return lines


def _versions(found: Doctor) -> Iterator[tuple[str, str]]:
    yield "batchtune", found.meta.batchtune
    yield "Python", f"{found.python} on {found.system}"
    yield "PyTorch", _torch(found.torch)
    driver = f"NVIDIA {found.driver}"
    if found.driver is None:
        problem = found.nvml_problem
        unanswered = problem is not None and not found.gpus
        driver = f"no NVIDIA driver answers ({problem})" if unanswered else "NVIDIA, of unknown version"
    yield "Driver", driver
    if not found.gpus:
        yield "GPUs", "none"
    yield "--device auto", f"takes {next((gpu.device for gpu in found.gpus if gpu.device), 'cpu')}"


def _torch(torch: DoctorTorch) -> str:
    if torch.version is None:
        return "not installed"
    built = "does not work" if torch.problem else "built without CUDA and ROCm"
    if torch.cuda is not None:
        built = f"built for CUDA {torch.cuda}"
    elif torch.hip is not None:
        built = f"built for ROCm {torch.hip}"
    return f"{torch.version}, {built}{f', cuDNN {torch.cudnn}' if torch.cudnn else ''}"


def _gpu(gpu: DoctorGpu) -> Iterator[tuple[str, str]]:
    capability = f", compute capability {gpu.capability}" if gpu.capability else ""
    yield "name", f"{gpu.name}{capability}{'' if gpu.device else ', which PyTorch does not see'}"
    yield "UUID", gpu.uuid or "unknown"
    yield "memory", _memory(gpu.total_bytes, gpu.free_bytes, "free")
    idle = "only processes that hold almost nothing" if gpu.processes else "nobody"
    yield "used by", "unknown" if gpu.processes is None else busy_with(gpu.processes) or idle
    yield "a probe", _probe(gpu.probe_process)
    yield "MIG", _SWITCH[gpu.mig]
    yield "ECC", _SWITCH[gpu.ecc]
    clock = "unknown"
    if gpu.sm_clock_mhz is not None:
        most = f" of at most {gpu.max_sm_clock_mhz:,} MHz" if gpu.max_sm_clock_mhz else ""
        held = f", lowered now: {', '.join(gpu.throttle_reasons)}" if gpu.throttle_reasons else ""
        clock = f"{gpu.sm_clock_mhz:,} MHz{most}{held}"
    yield "clock", clock


def _cpu(cpu: DoctorCpu) -> Iterator[tuple[str, str]]:
    processors = counted(cpu.processors, "processor")
    yield "name", f"{cpu.name}, {processors}"
    yield "memory", _memory(cpu.total_bytes, cpu.available_bytes, "available")
    works = "works: a probe here runs out of memory for real, and measures it"
    yield "memory limit", works if cpu.limit_problem is None else f"does not work: {cpu.limit_problem}"
    if cpu.load_average is not None:
        yield "load average", f"{cpu.load_average:.1f} in the last minute, on {processors}"
    yield "a probe", _probe(cpu.probe_process)


def _memory(total_bytes: int | None, free_bytes: int | None, free: str) -> str:
    if total_bytes is None:
        return "unknown"
    left = "the free part is unknown" if free_bytes is None else f"{format_size(free_bytes)} {free}"
    return f"{format_size(total_bytes)}, {left}"


def _probe(process: int | None) -> str:
    return "none is running" if process is None else f"process {process} is running one"
