"""What a machine offers, as text."""

from __future__ import annotations

import msgspec
import pytest
from report_records import GIB, made_meta

from batchtune.reports.doctor_text import render_doctor
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


def test_a_machine_in_order() -> None:
    assert render_doctor(MACHINE) == (
        "batchtune      0.1.0\n"
        "Python         3.12.1 on Linux 6.8 x86_64\n"
        "PyTorch        2.13.0, built for CUDA 13.0, cuDNN 91002\n"
        "Driver         NVIDIA 580.95\n"
        "--device auto  takes cuda:0\n"
        "\n"
        "cuda:0\n"
        "  name          NVIDIA H200, compute capability 9.0\n"
        "  UUID          GPU-1\n"
        "  memory        140 GiB, 139 GiB free\n"
        "  used by       nobody\n"
        "  a probe       none is running\n"
        "  MIG           off\n"
        "  ECC           on\n"
        "  clock         345 MHz of at most 1,980 MHz\n"
        "\n"
        "cpu\n"
        "  name          EPYC, 16 processors\n"
        "  memory        128 GiB, 99 GiB available\n"
        "  memory limit  works: a probe here runs out of memory for real, and measures it\n"
        "  a probe       none is running\n"
        "\n"
        "Settings\n"
        "  PYTORCH_CUDA_ALLOC_CONF  expandable_segments:True\n"
        "\n"
        "Packages\n"
        "  lhotse        1.33.0\n"
        "  transformers  not installed\n"
        "\n"
        "Nothing stands in the way of a probe.\n"
    )


def test_what_can_not_be_told_is_unknown() -> None:
    blank = {
        name: None for name in GPU.__struct_fields__ if name not in ("name", "device", "probe_process", "capability")
    }
    shown = render_doctor(msgspec.structs.replace(MACHINE, gpus=[msgspec.structs.replace(GPU, **blank)]))
    for words in ("UUID          unknown", "memory        unknown", "used by       unknown", "clock         unknown"):
        assert words in shown


@pytest.mark.parametrize("width", [40, 72, 100])
def test_no_line_is_longer_than_wanted(width: int) -> None:
    crowd = [DeviceProcess(pid=10_000 + number, used_bytes=GIB) for number in range(9)]
    crowded = msgspec.structs.replace(
        MACHINE,
        gpus=[msgspec.structs.replace(GPU, processes=crowd, throttle_reasons=["power cap", "sync boost"])],
        environment={},
        warnings=["A warning of many words. " * 5],
    )
    assert max(map(len, render_doctor(crowded, width).splitlines())) <= width
