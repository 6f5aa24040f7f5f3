"""What NVML tells of a GPU, and what is left where it can't: by a stub of it, asked through the real `pynvml`."""

import re
from pathlib import Path

import pytest
from msgspec.structs import replace
from probe.made_nvml import (
    DRIVER_NOT_LOADED,
    FUNCTION_NOT_FOUND,
    GIB,
    LOST,
    NO_PERMISSION,
    NOT_SUPPORTED,
    MadeGpu,
    MadeNvml,
    divided_gpu,
)

from batchtune.probe.devices import cuda
from batchtune.probe.devices.cuda import all_gpus, find_gpu, named_reasons
from batchtune.results import DeviceProcess, DoctorGpu


def facts_of(monkeypatch, gpu):
    MadeNvml([gpu]).install(monkeypatch)
    return find_gpu(gpu.uuid, gpu.pci).facts()


def test_a_gpu_that_answers_is_described_in_full(monkeypatch):
    gpu = MadeGpu(
        compute=[(30, 5 * GIB)], graphics=[(7, 9 << 20)], mig=False, reasons=0x4
    )
    assert facts_of(monkeypatch, gpu) == DoctorGpu(
        name="Made GPU",
        uuid="GPU-aaaaaaaa",
        device=None,
        capability=None,
        probe_process=None,
        total_bytes=80 * GIB,
        free_bytes=79 * GIB,
        processes=[
            DeviceProcess(pid=7, used_bytes=9 << 20),
            DeviceProcess(pid=30, used_bytes=5 * GIB),
        ],
        mig=False,
        ecc=True,
        sm_clock_mhz=1500,
        max_sm_clock_mhz=1980,
        throttle_reasons=["power cap"],
    )


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (NOT_SUPPORTED, None),
        (NO_PERMISSION, "Insufficient Permissions"),
        (FUNCTION_NOT_FOUND, None),
        (LOST, "GPU is lost"),
    ],
)
@pytest.mark.parametrize(
    ("call", "fact", "left"),
    [
        ("nvmlDeviceGetName", "name", "GPU without a name"),
        ("nvmlDeviceGetEccMode", "ecc", None),
        ("nvmlDeviceGetMigMode", "mig", None),
        ("nvmlDeviceGetClockInfo", "sm_clock_mhz", None),
        ("nvmlDeviceGetMaxClockInfo", "max_sm_clock_mhz", None),
        ("nvmlDeviceGetUUID", "uuid", None),
    ],
)
def test_a_call_that_fails_costs_its_own_fact_alone(
    monkeypatch, call, fact, left, code, reason
):
    whole = facts_of(monkeypatch, MadeGpu(mig=False))
    found = facts_of(monkeypatch, MadeGpu(mig=False, fails={call: code}))
    problem = reason and f"{reason} ({call})"
    assert found == replace(whole, **{fact: left, "nvml_problem": problem})


@pytest.mark.parametrize(
    ("gpus", "fails", "listed", "problem"),
    [
        (
            [MadeGpu(uuid="x"), divided_gpu("MIG-1", "MIG-2"), MadeGpu(uuid="y")],
            {},
            ["x", "MIG-1", "MIG-2", "y"],
            None,
        ),
        (
            [MadeGpu(uuid="x", fails={"handle": LOST}), MadeGpu(uuid="y")],
            {},
            ["y"],
            "GPU is lost",
        ),
        (
            [MadeGpu()],
            {"nvmlDeviceGetCount_v2": NO_PERMISSION},
            [],
            "Insufficient Permissions",
        ),
        (
            [MadeGpu()],
            {"nvmlInitWithFlags": DRIVER_NOT_LOADED},
            [],
            "Driver Not Loaded",
        ),
    ],
    ids=["divided", "lost", "not permitted", "no driver"],
)
def test_gpus_that_answer_are_listed_and_why_others_do_not(
    monkeypatch, gpus, fails, listed, problem
):
    MadeNvml(gpus, fails).install(monkeypatch)
    found, told = all_gpus()
    assert ([gpu.uuid() for gpu in found], told) == (listed, problem)


@pytest.mark.parametrize(
    "made",
    [
        MadeNvml([MadeGpu(fails={"handle": LOST})]),
        MadeNvml([MadeGpu()], fails={"nvmlInitWithFlags": DRIVER_NOT_LOADED}),
    ],
    ids=["lost", "no driver"],
)
def test_a_gpu_that_does_not_answer_is_not_found(monkeypatch, made):
    made.install(monkeypatch)
    assert find_gpu("GPU-aaaaaaaa", "0000:65:00.0") is None


def test_throttle_reasons_in_words():
    words = {
        0x0: [],
        0x1 | 0x2: [],
        0x4: ["power cap"],
        0x8: ["hardware slowdown"],
        0x8 | 0x40: ["thermal slowdown by the hardware"],
        0x8 | 0x80: ["power brake by the hardware"],
        0x1 | 0x4 | 0x20: ["power cap", "thermal slowdown by the driver"],
        1 << 40: [],
    }
    assert {bits: named_reasons(bits) for bits in words} == words


@pytest.mark.parametrize(
    ("instances", "asked", "visible", "expected"),
    [
        (["MIG-1", "MIG-2"], "2", None, "MIG-2"),
        (["MIG-1", "MIG-2"], "GPU-aaaaaaaa", "MIG-2", "MIG-2"),
        (["MIG-1"], "GPU-aaaaaaaa", None, "MIG-1"),
        (["MIG-1", "MIG-2"], "GPU-aaaaaaaa", None, None),
        (
            ["MIG-GPU-aaaaaaaa/1/0", "MIG-GPU-aaaaaaaa/2/0"],
            "GPU-aaaaaaaa",
            "MIG-GPU-aaaaaaaa/2/0",
            "MIG-GPU-aaaaaaaa/2/0",
        ),
        (["MIG-GPU-aaaaaaaa/1/0"], "aaaaaaaa", None, "MIG-GPU-aaaaaaaa/1/0"),
    ],
    ids=[
        "by its own UUID",
        "by CUDA_VISIBLE_DEVICES",
        "the only one",
        "which one is not known",
        "by an older driver's UUID",
        "the only one of an older driver",
    ],
)
def test_an_instance_is_found_and_never_taken_for_the_whole_gpu(
    monkeypatch, instances, asked, visible, expected
):
    MadeNvml([divided_gpu(*instances)]).install(monkeypatch)
    found = find_gpu(asked, None, visible)
    assert (found.uuid() if found else None) == expected


def test_an_instance_has_its_own_memory_and_the_whole_gpus_clock(monkeypatch):
    MadeNvml([divided_gpu("MIG-1")]).install(monkeypatch)
    found = find_gpu("MIG-1", None)
    facts = found.facts()
    assert (facts.mig, facts.total_bytes, facts.sm_clock_mhz, facts.ecc) == (
        True,
        10 * GIB,
        1500,
        True,
    )


def test_every_call_is_one_of_the_packages_own():
    import pynvml

    source = Path(cuda.__file__).read_text(encoding="utf-8")
    calls = set(re.findall(r"nvml[A-Z]\w+(?=\")", source))
    assert len(calls) > 10
    assert {name for name in calls if not hasattr(pynvml, name)} == set()
