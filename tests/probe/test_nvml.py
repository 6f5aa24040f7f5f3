"""What NVML tells of a GPU, and what is left where it can't: by a stub of it, asked through the real `pynvml`."""

import re
from pathlib import Path

import pytest
from msgspec.structs import asdict
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


# What a call's failure takes away: nothing but its own fact.
FACT_OF_CALL = {
    "nvmlDeviceGetName": "name",
    "nvmlDeviceGetEccMode": "ecc",
    "nvmlDeviceGetMigMode": "mig",
    "nvmlDeviceGetClockInfo": "sm_clock_mhz",
    "nvmlDeviceGetMaxClockInfo": "max_sm_clock_mhz",
    "nvmlDeviceGetUUID": "uuid",
}


@pytest.mark.parametrize(
    "code", [NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, LOST]
)
@pytest.mark.parametrize("call", FACT_OF_CALL)
def test_a_call_that_fails_costs_its_own_fact_alone(monkeypatch, call, code):
    whole = asdict(facts_of(monkeypatch, MadeGpu(mig=False)))
    found = asdict(facts_of(monkeypatch, MadeGpu(mig=False, fails={call: code})))
    reason = {NO_PERMISSION: "Insufficient Permissions", LOST: "GPU is lost"}.get(code)
    assert found.pop("nvml_problem") == (f"{reason} ({call})" if reason else None)
    assert whole.pop("nvml_problem") is None
    assert found == {
        **whole,
        FACT_OF_CALL[call]: "GPU without a name"
        if call == "nvmlDeviceGetName"
        else None,
    }


def test_a_lost_gpu_leaves_the_others_and_is_told(monkeypatch):
    MadeNvml(
        [MadeGpu(uuid="GPU-x", fails={"handle": LOST}), MadeGpu(uuid="GPU-y")]
    ).install(monkeypatch)
    gpus, problem = all_gpus()
    assert ([gpu.uuid() for gpu in gpus], problem) == (["GPU-y"], "GPU is lost")
    assert find_gpu("GPU-x", "0000:01:00.0") is None


def test_gpus_that_may_not_be_counted_are_told(monkeypatch):
    MadeNvml([MadeGpu()], fails={"nvmlDeviceGetCount_v2": NO_PERMISSION}).install(
        monkeypatch
    )
    assert all_gpus() == ([], "Insufficient Permissions")


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


@pytest.mark.parametrize("uuid", ["GPU-aaaaaaaa", "aaaaaaaa"])
def test_a_gpu_is_found_by_its_uuid_with_or_without_prefix(monkeypatch, uuid):
    MadeNvml([MadeGpu(uuid="GPU-x"), MadeGpu()]).install(monkeypatch)
    assert find_gpu(uuid, None).uuid() == "GPU-aaaaaaaa"


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


def test_all_gpus_are_listed_divided_ones_by_their_instances(monkeypatch):
    MadeNvml(
        [MadeGpu(uuid="GPU-x"), divided_gpu("MIG-1", "MIG-2"), MadeGpu(uuid="GPU-y")]
    ).install(monkeypatch)
    gpus, problem = all_gpus()
    assert ([gpu.uuid() for gpu in gpus], problem) == (
        ["GPU-x", "MIG-1", "MIG-2", "GPU-y"],
        None,
    )


def test_no_driver_is_no_error_and_its_reason_is_told(monkeypatch):
    MadeNvml([MadeGpu()], fails={"nvmlInitWithFlags": DRIVER_NOT_LOADED}).install(
        monkeypatch
    )
    assert find_gpu("GPU-a", None) is None
    assert all_gpus() == ([], "Driver Not Loaded")


def test_every_call_is_one_of_the_packages_own():
    import pynvml

    calls = set(
        re.findall(
            r"nvml[A-Z]\w+(?=\")", Path(cuda.__file__).read_text(encoding="utf-8")
        )
    )
    assert len(calls) > 10
    # The older name of the throttle reasons is announced to go.
    assert [
        name
        for name in sorted(calls)
        if not hasattr(pynvml, name) and "Throttle" not in name
    ] == []
