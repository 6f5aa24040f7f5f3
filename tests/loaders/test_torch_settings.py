"""The settings of torch's DataLoader that are swept: each once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchtune.loaders import KINDS, kind_of
from batchtune.loaders.base import Machine
from batchtune.results import Arguments

NOTHING: frozenset[str] = frozenset()
TORCH = kind_of("torch")


@pytest.mark.parametrize(
    ("processors", "workers"),
    [(1, [0, 1]), (2, [0, 1, 2]), (6, [0, 1, 2, 4, 6]), (8, [0, 1, 2, 4, 8]), (9, [0, 1, 2, 4, 8, 9])],
)
def test_workers_double_up_to_the_processors(processors: int, workers: list[int]) -> None:
    axes = TORCH.axes(Machine(processors=processors, accelerator=False), NOTHING)
    assert list(axes["num_workers"]) == workers


def test_memory_is_pinned_only_for_a_gpu() -> None:
    assert "pin_memory" not in TORCH.axes(Machine(processors=2, accelerator=False), NOTHING)
    assert TORCH.axes(Machine(processors=2, accelerator=True), NOTHING)["pin_memory"] == [False, True]


def test_an_iterable_is_swept_only_by_what_its_function_takes() -> None:
    machine, takes = Machine(processors=2, accelerator=True), frozenset({"num_workers", "folder"})
    assert kind_of("iterable").axes(machine, takes) == {"num_workers": [0, 1, 2]}


@given(st.integers(1, 20), st.booleans())
def test_settings_that_are_the_same_are_left_out(processors: int, accelerator: bool) -> None:
    settings = TORCH.settings(TORCH.axes(Machine(processors=processors, accelerator=accelerator), NOTHING))
    assert len({tuple(one.items()) for one in settings}) == len(settings)
    pinned = 2 if accelerator else 1
    alone = [one for one in settings if one["num_workers"] == 0]
    assert len(alone) == pinned
    assert all(one["prefetch_factor"] is None and one["multiprocessing_context"] is None for one in alone)
    assert not any(one["persistent_workers"] for one in alone)
    assert all(one["in_order"] for one in settings if one["num_workers"] in (0, 1))
    single, several = 2 * 2 * 3 * pinned, 2 * 2 * 2 * 3 * pinned  # prefetch_factor, order, start
    workers = len({one["num_workers"] for one in settings}) - 2
    assert len(settings) == pinned + single + workers * several


@pytest.mark.parametrize(
    ("arguments", "workers", "waiting"),
    [
        ({}, 0, 0),
        ({"num_workers": 0, "prefetch_factor": None}, 0, 0),
        ({"num_workers": 3}, 3, 6),
        ({"num_workers": 3, "prefetch_factor": 4, "in_order": False}, 3, 12),
    ],
)
def test_batches_in_flight(arguments: Arguments, workers: int, waiting: int) -> None:
    for name in ("torch", "iterable"):
        assert (kind_of(name).workers(arguments), kind_of(name).batches_in_flight(arguments)) == (workers, waiting)


def test_what_matters_for_the_start_of_an_epoch_is_an_axis() -> None:
    for kind in map(kind_of, KINDS):
        every: dict[str, Any] = {**kind.axes(Machine(processors=2, accelerator=True), frozenset(TORCH.START_AXES))}
        assert set(kind.START_AXES) <= set(every)
