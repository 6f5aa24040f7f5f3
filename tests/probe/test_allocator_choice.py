"""The allocator of a probe: asked for, found out on a made CUDA device, recorded, and held to."""

import os

import msgspec
import pytest
import torch
from made_trials import made_trial
from probe.made_cuda import MadeCuda
from probe.made_nvml import MadeGpu
from verify.made_stepper import made_stepper

from batchtune.allocators import worker_variables
from batchtune.errors import ProbeError, ResultError
from batchtune.lengths import Lengths
from batchtune.probe.confirmation import Turns
from batchtune.probe.devices import backend_for
from batchtune.probe.messages import about_turns
from batchtune.probe.settings import (
    ProbeSettings,
    begin_run,
    open_run,
    refuse_other_allocator,
)
from batchtune.probe.supervisor import worker_program
from batchtune.probe.worker import _torch_settings
from batchtune.results import TRIALS_FILE, BatchShape, ProbedWith, Trial
from batchtune.run_folder import append_trial
from batchtune.trust import settings_differences, trust_warnings
from batchtune.workloads import first_line

LENGTHS = Lengths.of([1.0, 2.0])


@pytest.fixture
def cuda(monkeypatch):
    return MadeCuda(MadeGpu()).install(monkeypatch)


def opened(patch, allocator, settings=None):
    """A meter in a worker that the supervisor of a user with such settings starts."""
    if settings:
        patch.setenv("PYTORCH_ALLOC_CONF", settings)
    for name, value in worker_variables(allocator, os.environ).items():
        patch.setenv(name, value)
    return backend_for("cuda").open("cuda", ProbedWith(allocator=allocator), None)


@pytest.mark.parametrize(
    ("allocator", "settings", "expected", "others"),
    [
        ("auto", "", "expandable", ""),
        ("expandable", "", "expandable", ""),
        ("native", "", "native", ""),
        ("auto", "expandable_segments:False", "native", ""),
        ("auto", "max_split_size_mb:64", "expandable", "max_split_size_mb:64"),
    ],
)
def test_the_device_records_the_allocator_that_is_in_force(
    cuda, monkeypatch, allocator, settings, expected, others
):
    device = opened(monkeypatch, allocator, settings).device
    assert (device.allocator, device.allocator_settings) == (expected, others)
    assert device.allocator_problem is None
    assert not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & {*_torch_settings()}


def test_another_backend_is_recorded_by_its_name(cuda, monkeypatch):
    cuda.backend = "cudaMallocAsync"
    device = opened(monkeypatch, "auto", "backend:cudaMallocAsync").device
    assert device.allocator == "cudaMallocAsync"
    assert device.allocator_setting == "PYTORCH_ALLOC_CONF=backend:cudaMallocAsync"


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (
            {"refusal": "CUDA driver error: operation not supported\nmore"},
            "CUDA driver error: operation not supported",
        ),
        ({"grows": False}, "this build of PyTorch, or the platform, lacks them"),
    ],
    ids=["driver", "torch"],
)
def test_without_expandable_segments_auto_is_native_and_says_why(
    monkeypatch, made, reason
):
    MadeCuda(MadeGpu(), **made).install(monkeypatch)
    problem = f"expandable segments don't work: {reason}"
    meter = opened(monkeypatch, "auto", "max_split_size_mb:64")
    assert meter.device.allocator == "native"
    assert meter.device.allocator_settings == "max_split_size_mb:64"
    meter.settle(0, 0)
    assert meter.device.allocator_problem == problem
    warnings = " ".join(trust_warnings(meter.device, []))
    assert f"Memory was taken natively, as {problem}. --allocator native" in warnings


def test_expandable_segments_that_do_not_work_are_an_error(cuda, monkeypatch):
    cuda.grows = False
    message = "expandable is impossible here: expandable segments don't work: this"
    with pytest.raises(ProbeError, match=message):
        opened(monkeypatch, "expandable")


@pytest.mark.parametrize("allocator", ["auto", "native"])
def test_what_a_driver_refuses_for_other_reasons_stays_an_error(
    cuda, monkeypatch, allocator
):
    def refuse(device):
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy\nmore")

    monkeypatch.setattr("batchtune.probe.devices.cuda._create_context", refuse)
    message = "Made GPU can't be used: CUDA error: all CUDA-capable devices are busy"
    with pytest.raises(ProbeError, match=f"^{message}\n`batchtune"):
        opened(monkeypatch, allocator)


def test_a_workload_that_changes_the_allocator_is_noticed(cuda, monkeypatch):
    meter = opened(monkeypatch, "auto")
    cuda.turned_off = True
    meter.settle(0, 0)
    assert meter.device.allocator == "native"
    cuda.turned_off = False
    meter = opened(monkeypatch, "expandable")
    cuda.turned_off = True
    with pytest.raises(
        ProbeError,
        match="runs without expandable segments, which your code chooses itself",
    ):
        meter.settle(0, 0)


@pytest.mark.parametrize("kind", [{}, {"script": True}, {"ranks": True}])
def test_the_workers_environment_holds_the_choice(monkeypatch, kind):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    _, _, environment, _ = worker_program(**kind, allocator="auto")
    wanted = "expandable_segments:True,max_split_size_mb:64"
    assert environment["PYTORCH_CUDA_ALLOC_CONF"] == wanted
    _, _, environment, _ = worker_program(**kind)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environment


def settings(allocator):
    return ProbeSettings(workload="made.py:Made", options={}, allocator=allocator)


def on(allocator):
    device = made_stepper().device
    return msgspec.structs.replace(device, allocator=allocator, torch="2.13.0")


@pytest.mark.parametrize(
    ("began", "found", "now", "goes_on"),
    [
        ("auto", "expandable", "auto", True),
        ("auto", "expandable", "expandable", True),
        ("expandable", "expandable", "auto", True),
        ("auto", "native", "native", True),
        ("auto", None, "expandable", True),
        ("auto", "expandable", "native", False),
    ],
)
def test_a_run_goes_on_only_with_the_allocator_that_it_has(
    tmp_path, began, found, now, goes_on
):
    begin_run(LENGTHS, settings(began), tmp_path, on(found), force=False)
    append_trial(tmp_path / TRIALS_FILE, Trial.of(BatchShape(1, 1.0), "ok"))
    if not goes_on:
        message = f"something else: allocator = {found}, now {now}"
        with pytest.raises(ResultError, match=message):
            open_run(LENGTHS, settings(now), tmp_path)
        return
    run, _ = open_run(LENGTHS, settings(now), tmp_path)
    assert run.settings["allocator"] == began
    refuse_other_allocator("it", run.device.allocator, on(found))


@pytest.mark.parametrize(
    ("measured", "now", "message", "remedy"),
    [
        (
            "expandable",
            "native",
            "it was measured with expandable segments, but this runs without",
            "--allocator expandable",
        ),
        (
            "native",
            "expandable",
            "it was measured without expandable segments, but this runs with",
            "--allocator native",
        ),
        (
            "cudaMallocAsync",
            "native",
            "it was measured with the allocator cudaMallocAsync",
            "PYTORCH_ALLOC_CONF=backend:cudaMallocAsync",
        ),
    ],
)
def test_another_allocator_than_was_measured_is_refused(measured, now, message, remedy):
    with pytest.raises(ResultError) as caught:
        refuse_other_allocator("it", measured, on(now))
    assert caught.value.message.startswith(message)
    assert caught.value.hint.startswith(f"Go on with {remedy}, or measure again")


@pytest.mark.parametrize("allocator", ["native", "expandable", "cudaMallocAsync"])
def test_expandable_segments_are_advised_only_where_they_are_off(allocator):
    turns = Turns(steps=[made_trial(BatchShape(1, 1.0), alloc_retries=1)] * 5)
    (warning,) = about_turns(turns, on(allocator))
    assert "emptied its cache 5 times" in warning
    assert ("--allocator expandable" in warning) == (allocator == "native")


def test_torchs_own_advice_is_not_recorded():
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2 MiB. 1 MiB is reserved by PyTorch but unallocated. If reserved but "
        "unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  "
        "See documentation for Memory Management  (https://pytorch.org)"
    )
    assert first_line(error) == (
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 MiB. 1 MiB is reserved by PyTorch but unallocated."
    )


def test_other_settings_of_the_allocator_are_compared():
    before = on("expandable")
    now = msgspec.structs.replace(before, allocator_settings="max_split_size_mb:64")
    (difference,) = settings_differences(before, now)
    assert difference.startswith(
        "The allocator's settings was not set, and max_split_size_mb:64 later"
    )
