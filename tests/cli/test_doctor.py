"""`batchtune doctor`: on this machine, with a torch that is broken, and with made GPUs."""

import json
import os

import pytest
from cli.conftest import flat
from jsonschema import Draft202012Validator
from probe.made_nvml import GIB, NO_PERMISSION, MadeGpu, MadeNvml

from batchtune.probe.devices import lock_device
from batchtune.probe.devices.cpu import describe_cpu
from batchtune.reports.page import doctor_page, schema_of
from batchtune.results import Doctor, DoctorGpu, DoctorTorch, meta_of

PROBLEM = "libcudart.so.12: cannot open shared object file"
NO_TORCH = f"raise ImportError('{PROBLEM}')"


def put_first(folder, **modules):
    """An environment in which modules of these names and texts are imported instead of the real ones."""
    folder.mkdir(exist_ok=True)
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    others = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{others}"}


def doctor(succeed, env=None, *options):
    ran = succeed("doctor", "--json", *options, env=env)
    found = json.loads(ran.stdout)
    assert list(Draft202012Validator(schema_of("doctor")).iter_errors(found)) == []
    return found


@pytest.mark.process
def test_distorting_settings_are_warned_of_and_a_probe_is_shown(batchtune):
    with lock_device("cpu", "the CPU"):
        found = doctor(batchtune, {"CUDA_LAUNCH_BLOCKING": "1"})
    assert found["torch"]["problem"] is None
    assert found["environment"]["CUDA_LAUNCH_BLOCKING"] == "1"
    (warning,) = found["warnings"]
    assert warning.startswith("CUDA_LAUNCH_BLOCKING is set:")
    assert found["cpu"]["probe_process"] == os.getpid()


@pytest.mark.process
@pytest.mark.parametrize(
    ("torch", "timeout", "told"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 60, "SIGSEGV"),
        ("import time; time.sleep(600)", 1, "gave no answer within"),
    ],
    ids=["a segmentation fault", "a hang"],
)
def test_a_broken_torch_is_a_problem_and_the_rest_is_shown(
    batchtune, tmp_path, torch, timeout, told
):
    broken = put_first(tmp_path / "first", torch=torch)
    found = doctor(batchtune, broken, "--timeout", timeout)
    assert told in found["torch"]["problem"]
    assert found["gpus"] == []
    assert found["cpu"]["total_bytes"] > 0


MADE_GPU = MadeGpu(
    name="Made \x1b[31mGPU", compute=[(4711, 5 * GIB)], mig=False, reasons=4
)


def doctor_without_torch(batchtune, folder, gpu):
    """What the command says of a made GPU where PyTorch can't be imported."""
    env = put_first(folder / "first", torch=NO_TORCH) | MadeNvml([gpu]).environment()
    return batchtune("doctor", env=env, code=0)


@pytest.mark.process
def test_it_is_readable_with_a_gpu_that_torch_does_not_see(batchtune, tmp_path):
    ran = doctor_without_torch(batchtune, tmp_path, MADE_GPU)
    assert ran.stderr == ""
    assert max(map(len, ran.stdout.splitlines())) <= 100
    assert ran.stdout.startswith("batchtune ")
    assert "\x1b" not in ran.stdout
    for title in ("\ncpu\n", "\nmemory limit", "\nSoftware\n", "\nPackages\n"):
        assert title in ran.stdout
    for words in (
        PROBLEM,
        "which PyTorch does not see",
        "80 GiB",
        "1 other process (4711 with 5 GiB)",
        "1,500 MHz of at most 1,980 MHz, lowered now: power cap",
    ):
        assert words in flat(ran.stdout)


def unknown(record, **known):
    """A record of which only these fields are known."""
    return record(**{**dict.fromkeys(record.__struct_fields__), **known})


@pytest.mark.parametrize(
    ("works", "variable", "shown"),
    [
        (True, None, "takes expandable: expandable segments work"),
        (False, None, "takes native: expandable segments don't work"),
        (
            True,
            "expandable_segments:False",
            "takes native: expandable segments work",
        ),
        (None, None, "\u2013"),
    ],
)
def test_the_allocator_of_a_gpu_is_shown(works, variable, shown):
    gpu = unknown(DoctorGpu, device="cuda:0", expandable_segments=works)
    found = unknown(
        Doctor,
        meta=meta_of(Doctor),
        torch=unknown(DoctorTorch),
        gpus=[gpu],
        cpu=describe_cpu(None),
        environment={"PYTORCH_ALLOC_CONF": variable} if variable else {},
        packages={"lhotse": None},
        warnings=[],
    )
    tables = {table.title: table for table in doctor_page(found).sections[0].tables}
    assert dict(tables["cuda:0"].rows).get("--allocator auto", "\u2013") == shown


@pytest.mark.process
def test_what_nvml_refuses_to_answer_is_said(batchtune, tmp_path):
    denied = MadeGpu(fails={"nvmlDeviceGetMemoryInfo": NO_PERMISSION})
    ran = doctor_without_torch(batchtune, tmp_path, denied)
    said = (
        "does not answer everything: Insufficient Permissions (nvmlDeviceGetMemoryInfo)"
    )
    assert said in flat(ran.stdout)
