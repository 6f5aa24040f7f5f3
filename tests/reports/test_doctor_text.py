"""What a machine offers, as text."""

from __future__ import annotations

import io

import msgspec
import pytest
from report_records import GIB, made_meta
from rich.console import Console

from batchtune.reports.doctor_text import doctor_facts
from batchtune.reports.terminal import render_facts
from batchtune.results import DeviceProcess, Doctor, DoctorCpu, DoctorGpu, DoctorTorch

GPU = DoctorGpu(
    name="NVIDIA H200",
    device="cuda:0",
    uuid="GPU-1",
    capability="9.0",
    total_bytes=140 * GIB,
    free_bytes=139 * GIB,
    processes=[],
    mig=False,
    ecc=True,
    sm_clock_mhz=345,
    max_sm_clock_mhz=1980,
    throttle_reasons=[],
    probe_process=None,
)
MACHINE = Doctor(
    meta=made_meta("doctor"),
    python="3.12.1",
    system="Linux 6.8 x86_64",
    torch=DoctorTorch(version="2.13.0", cuda="13.0", hip=None, cudnn="91002", problem=None),
    driver="580.95",
    nvml_problem=None,
    gpus=[GPU],
    cpu=DoctorCpu(
        name="EPYC",
        processors=16,
        total_bytes=128 * GIB,
        available_bytes=99 * GIB,
        limit_problem=None,
        probe_process=None,
    ),
    environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    packages={"lhotse": "1.33.0", "transformers": None},
    warnings=[],
)


def lines_of(machine: Doctor, width: int = 100) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None, _environ={})
    render_facts(doctor_facts(machine), console)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_a_machine_in_order() -> None:
    assert lines_of(MACHINE) == [
        "batchtune      0.1.0",
        "Python         3.12.1 on Linux 6.8 x86_64",
        "PyTorch        2.13.0, built for CUDA 13.0, cuDNN 91002",
        "Driver         NVIDIA 580.95",
        "--device auto  takes cuda:0",
        "",
        "cuda:0",
        "  name     NVIDIA H200, compute capability 9.0",
        "  UUID     GPU-1",
        "  memory   140 GiB, 139 GiB free",
        "  used by  nobody",
        "  a probe  none is running",
        "  MIG      off",
        "  ECC      on",
        "  clock    345 MHz of at most 1,980 MHz",
        "",
        "cpu",
        "  name          EPYC, 16 processors",
        "  memory        128 GiB, 99 GiB available",
        "  memory limit  works",
        "  a probe       none is running",
        "",
        "Settings",
        "  PYTORCH_CUDA_ALLOC_CONF  expandable_segments:True",
        "",
        "Packages",
        "  lhotse        1.33.0",
        "  transformers  not installed",
    ]


def test_what_can_not_be_told_is_unknown() -> None:
    known = ("name", "device", "probe_process", "capability", "nvml_problem")
    blank = {name: None for name in GPU.__struct_fields__ if name not in known}
    unknown = msgspec.structs.replace(GPU, **blank)
    facts = dict(doctor_facts(msgspec.structs.replace(MACHINE, gpus=[unknown]))["cuda:0"])
    assert [facts[name] for name in ("UUID", "memory", "used by", "clock")] == ["unknown"] * 4


@pytest.mark.parametrize("width", [40, 72])
def test_no_line_is_longer_than_wanted(width: int) -> None:
    crowd = [DeviceProcess(pid=10_000 + number, used_bytes=GIB) for number in range(9)]
    crowded = msgspec.structs.replace(
        MACHINE,
        gpus=[msgspec.structs.replace(GPU, processes=crowd, throttle_reasons=["power cap", "sync boost"])],
        warnings=["A warning of many words. " * 5],
    )
    assert max(map(len, lines_of(crowded, width))) <= width
