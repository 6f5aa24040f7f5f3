"""What surrounds a training step: gradients that DDP copies, and the settings that are recorded."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from batchtune.probe.devices import describe_environment
from batchtune.probe.devices.cuda import CudaMeter
from batchtune.probe.parameters import gradient_bytes
from batchtune.probe.worker import describe_settings


@pytest.fixture(autouse=True)
def nothing_of_other_tests_is_trained() -> Iterator[None]:
    """Other tests' models may still be alive: their parameters require no gradient meanwhile, and count for nothing."""
    gc.collect()
    live = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.nn.Parameter) and thing.requires_grad]
    for parameter in live:
        parameter.requires_grad_(False)
    yield
    for parameter in live:
        parameter.requires_grad_(True)


def test_the_gradients_of_what_an_optimizer_trains_are_counted() -> None:
    model = torch.nn.Linear(100, 10)
    optimizer = torch.optim.AdamW(model.parameters())
    assert gradient_bytes() == (100 * 10 + 10) * 4
    del optimizer


def test_a_parameter_that_two_optimizers_train_is_counted_once() -> None:
    model = torch.nn.Linear(100, 10, bias=False)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.AdamW(model.parameters())]
    assert gradient_bytes() == 4000
    del optimizers


def test_frozen_parameters_have_no_gradient() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(100, 10, bias=False), torch.nn.Linear(10, 10, bias=False))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert gradient_bytes() == 400
    del optimizer


def test_a_gradient_has_its_parameters_type() -> None:
    model = torch.nn.Linear(100, 10, bias=False, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert gradient_bytes() == 2000
    del optimizer


def test_a_model_without_an_optimizer_does_not_count() -> None:
    trained, teacher = torch.nn.Linear(100, 10, bias=False), torch.nn.Linear(100, 100)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    assert gradient_bytes() == 4000
    del optimizer, teacher


def test_without_an_optimizer_every_gradient_counts() -> None:
    model = torch.nn.Linear(100, 10, bias=False)
    frozen = torch.nn.Linear(100, 10, bias=False).requires_grad_(False)
    assert gradient_bytes() == 4000
    del model, frozen


def test_what_is_only_waiting_to_be_collected_does_not_count() -> None:
    abandoned = torch.nn.Linear(100, 10)
    abandoned.itself = abandoned  # type: ignore[assignment]  # a cycle, which only the collector undoes
    del abandoned
    assert gradient_bytes() == 0


def test_a_parameter_without_a_shape_yet_does_not_count() -> None:
    model = torch.nn.LazyLinear(10)
    assert gradient_bytes() == 0
    del model


def test_objects_that_must_not_be_touched_are_not() -> None:
    class Touchy:
        @property
        def __class__(self) -> type:  # type: ignore[override]  # what isinstance would ask
            raise AssertionError("touched")

    held = [Touchy()]
    assert gradient_bytes() == 0
    held.clear()


def test_variables_are_recorded_where_they_are_set() -> None:
    found = describe_environment(
        {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "CUDA_LAUNCH_BLOCKING": "", "A": "b"}
    )
    assert found == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


NEW_SWITCHES = hasattr(torch.backends.cudnn, "conv")  # torch 2.9 and later
# What a workload does -> what is then told of matmul and of cuDNN's convolutions.
TF32_SWITCHES = {
    "pass": ["ieee", "tf32"],
    "torch.backends.cuda.matmul.allow_tf32 = True": ["tf32", "tf32"],
    "torch.backends.cudnn.allow_tf32 = False": ["ieee", "ieee"],
    "torch.set_float32_matmul_precision('high')": ["tf32", "tf32"],
}
if NEW_SWITCHES:
    TF32_SWITCHES |= {
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'": ["tf32", "tf32"],
        "torch.backends.fp32_precision = 'tf32'": ["tf32", "tf32"],
        "torch.backends.cuda.matmul.allow_tf32 = True; torch.backends.cudnn.conv.fp32_precision = 'ieee'": [
            "tf32",
            "ieee",
        ],
    }

# The switches are global: each is set in a process of its own, forked from one that has imported torch. A workload's
# own use of one may warn; telling them must not.
SCRIPT = """
import json, os, sys, types, warnings, torch
from batchtune.probe.devices.cuda import CudaMeter
from batchtune.probe.worker import describe_settings
for code in json.load(sys.stdin):
    if os.fork():
        assert os.wait()[1] == 0, code
        continue
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(code)
    warnings.simplefilter("error")
    meter = types.SimpleNamespace(_users_share=1.0)
    print(json.dumps([code, describe_settings(CudaMeter.switches(meter))]), flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def settings_after() -> dict[str, dict[str, object]]:
    """What is told after each of the switches was used."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTORCH_", "CUDA_", "CUBLAS_"))}
    cases = json.dumps([*TF32_SWITCHES])
    ran = subprocess.run([sys.executable, "-c", SCRIPT], input=cases, capture_output=True, text=True, env=clean)
    assert ran.returncode == 0, ran.stderr
    return dict(json.loads(line) for line in ran.stdout.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("code", TF32_SWITCHES)
def test_tf32_is_told_whichever_switch_was_used(settings_after: dict[str, dict[str, object]], code: str) -> None:
    found = settings_after[code]
    assert [found["matmul_precision"], found["cudnn_conv_precision"]] == TF32_SWITCHES[code]


def test_cudnns_and_deterministic_switches_are_told() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False):
            found = describe_settings(CudaMeter.switches(SimpleNamespace(_users_share=1.0)))  # type: ignore[arg-type]
    finally:
        torch.use_deterministic_algorithms(False)
    assert [found["cudnn_benchmark"], found["cudnn_deterministic"], found["deterministic_algorithms"]] == [
        True,
        False,
        True,
    ]
