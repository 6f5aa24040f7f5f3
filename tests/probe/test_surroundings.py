"""What surrounds a training step: gradients that DDP copies, settings that are recorded, whether parameters change."""

import gc
import os

import pytest
import torch

from batchtune.probe.devices import describe_environment
from batchtune.workloads import TrainingCheck, drop_gradients, gradient_bytes


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


def with_an_optimizer(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def through_data(model):
    model.weight.data.sub_(1.0)


def without_an_optimizer_step(model):
    model(torch.ones(1, 4)).sum().backward()


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (with_an_optimizer, [True, True, True]),
        (through_data, [None, True, True]),
        (without_an_optimizer_step, [None, False, False]),
    ],
)
def test_a_change_is_seen_however_it_is_written(step, expected):
    model = torch.nn.Linear(4, 2)
    training = TrainingCheck()
    for has_changed in expected:
        step(model)
        assert training.has_changed() is has_changed


def test_a_model_that_was_replaced_is_neither_known_nor_kept():
    model = torch.nn.Linear(4, 2)
    training = TrainingCheck()
    del model
    assert training.has_changed() is None


def test_gradients_are_dropped_but_not_those_in_a_buffer():
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    buffer = torch.zeros(8)
    model.weight.grad = buffer.view(2, 4)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    drop_gradients()
    assert model.bias.grad is None
    assert model.weight.grad is not None
    assert buffer.tolist() == [1.0] * 8
