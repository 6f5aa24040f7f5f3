"""`batchtune doctor`, as a process: on this machine, with a torch that is broken, and with made GPUs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import Run
from probe.made_nvml import GIB, NO_PERMISSION, MadeGpu, MadeNvml

from batchtune.probe.devices.cpu import describe_cpu
from batchtune.reports.page import doctor_page
from batchtune.results import Doctor, DoctorGpu, DoctorTorch, meta_of

TESTS = Path(__file__).parents[1]


def put_first(folder: Path, **modules: str) -> dict[str, str]:
    """An environment in which modules of these names and texts are imported instead of the real ones."""
    folder.mkdir(exist_ok=True)
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    return {
        "PYTHONPATH": os.pathsep.join(
            [str(folder), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        )
    }


def doctor(
    batchtune: Run, env: dict[str, str] | None = None, *options: str
) -> dict[str, Any]:
    ran = batchtune("doctor", "--json", *options, env=env)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)  # type: ignore[no-any-return]


def test_distorting_settings_are_warned_of_and_a_probe_is_shown(examined: Path) -> None:
    found, pid = (
        json.loads((examined / "doctor.json").read_text()),
        (examined / "pid").read_text(),
    )
    assert found["environment"]["CUDA_LAUNCH_BLOCKING"] == "1"
    assert [text.partition(":")[0] for text in found["warnings"]] == [
        "CUDA_LAUNCH_BLOCKING is set"
    ]
    assert found["cpu"]["probe_process"] == int(pid)


def test_it_is_readable_and_all_on_stdout(batchtune: Run, tmp_path: Path) -> None:
    ran = batchtune(
        "doctor",
        env=put_first(tmp_path / "first", torch="raise ImportError('no torch here')"),
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert max(map(len, ran.stdout.splitlines())) <= 100
    assert ran.stdout.startswith("batchtune ")
    for words in ("\ncpu\n", "\nmemory limit", "\nSoftware\n", "\nPackages\n"):
        assert words in ran.stdout


@pytest.mark.parametrize(
    ("torch", "told"),
    [
        (
            "raise ImportError('libcudart.so.12: cannot open shared object file')",
            "libcudart.so.12",
        ),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("import time; time.sleep(600)", "gave no answer within"),
    ],
    ids=["an import that fails", "a segmentation fault", "a hang"],
)
def test_a_broken_torch_is_a_problem_and_the_rest_is_shown(
    batchtune: Run, tmp_path: Path, torch: str, told: str
) -> None:
    found = doctor(
        batchtune,
        put_first(tmp_path / "first", torch=torch),
        "--timeout",
        "1" if "sleep" in torch else "60",
    )
    assert told in found["torch"]["problem"]
    assert found["gpus"] == []
    assert found["cpu"]["total_bytes"] > 0


NO_TORCH = "raise ImportError('no torch here')"
MADE_GPU = MadeGpu(
    name="Made \x1b[31mGPU", compute=[(4711, 5 * GIB)], mig=False, reasons=4
)


def test_a_gpu_is_shown_and_does_nothing_to_the_terminal(
    batchtune: Run, tmp_path: Path
) -> None:
    env = (
        put_first(tmp_path / "first", torch=NO_TORCH)
        | MadeNvml([MADE_GPU]).environment()
    )
    shown = batchtune("doctor", env=env).stdout
    assert "\x1b" not in shown
    for words in (
        "which PyTorch does not see",
        "80 GiB",
        "1 other process (4711 with 5 GiB)",
        "1,500 MHz of at most 1,980 MHz, lowered now: power cap",
    ):
        assert words in shown


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
        (None, None, None),
    ],
)
def test_the_allocator_of_a_gpu_is_shown(
    works: bool | None, variable: str | None, shown: str | None
) -> None:
    gpu = DoctorGpu(
        **{
            **dict.fromkeys(DoctorGpu.__struct_fields__),
            "name": "Made GPU",
            "device": "cuda:0",
            "expandable_segments": works,
        }
    )
    environment = {"PYTORCH_ALLOC_CONF": variable} if variable else {}
    page = doctor_page(
        Doctor(
            meta=meta_of(Doctor),
            python="3.11",
            system="Linux",
            torch=DoctorTorch(
                version="2.13", cuda="13", hip=None, cudnn=None, problem=None
            ),
            driver=None,
            nvml_problem=None,
            gpus=[gpu],
            cpu=describe_cpu(None),
            environment=environment,
            packages={"lhotse": None},
            warnings=[],
        )
    )
    (table,) = [table for table in page.sections[0].tables if table.title == "cuda:0"]
    assert dict(table.rows).get("--allocator auto", "\u2013") == (shown or "\u2013")


def test_what_nvml_refuses_to_answer_is_said(batchtune: Run, tmp_path: Path) -> None:
    denied = MadeGpu(fails={"nvmlDeviceGetMemoryInfo": NO_PERMISSION})
    env = (
        put_first(tmp_path / "first", torch=NO_TORCH) | MadeNvml([denied]).environment()
    )
    shown = " ".join(batchtune("doctor", env=env).stdout.split())
    assert (
        "does not answer everything: Insufficient Permissions (nvmlDeviceGetMemoryInfo)"
        in shown
    )
