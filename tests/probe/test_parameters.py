"""Whether the steps so far have changed a parameter, however they write it."""

import gc

import pytest
import torch

from batchtune.workloads import TrainingCheck, drop_gradients


@pytest.fixture(autouse=True)
def nothing_of_other_tests_is_trained():
    """Drop the models and optimizers of other tests."""
    gc.collect()


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
