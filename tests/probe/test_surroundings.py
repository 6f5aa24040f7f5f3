"""What surrounds a training step: gradients that DDP copies, and the settings that are recorded."""

import gc
import os

import pytest
import torch

from batchtune.probe.devices import describe_environment
from batchtune.workloads import gradient_bytes


@pytest.fixture(autouse=True)
def nothing_of_other_tests_is_trained():
    """Other tests' models may still be alive: their parameters require no gradient meanwhile, and count for nothing."""
    gc.collect()
    live = [
        thing
        for thing in gc.get_objects()
        if issubclass(type(thing), torch.nn.Parameter) and thing.requires_grad
    ]
    for parameter in live:
        parameter.requires_grad_(False)
    yield
    for parameter in live:
        parameter.requires_grad_(True)


def test_a_model_without_an_optimizer_does_not_count():
    trained, teacher = torch.nn.Linear(100, 10, bias=False), torch.nn.Linear(100, 100)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    assert gradient_bytes() == 4000
    del optimizer, teacher


def test_without_an_optimizer_every_gradient_counts():
    model = torch.nn.Linear(100, 10, bias=False)
    frozen = torch.nn.Linear(100, 10, bias=False).requires_grad_(False)
    assert gradient_bytes() == 4000
    del model, frozen


def test_objects_that_must_not_be_touched_are_not():
    class Touchy:
        @property
        def __class__(self):
            raise AssertionError("touched")

    held = [Touchy()]
    assert gradient_bytes() == 0
    held.clear()


def test_variables_are_recorded_where_they_are_set(monkeypatch):
    variables = {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "CUDA_LAUNCH_BLOCKING": "",
        "A": "b",
    }
    monkeypatch.setattr(os, "environ", variables)
    assert describe_environment() == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
