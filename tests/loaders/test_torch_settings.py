"""The settings of torch's DataLoader that are swept: each once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchtune.loaders import KINDS, kind_of
from batchtune.loaders.base import Machine

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
    assert len({tuple(arguments.items()) for arguments in settings}) == len(settings)
    pinned = 2 if accelerator else 1
    single = 2 * 2 * 3 * pinned  # prefetch_factor, persistent_workers, context
    several = 2 * single  # in_order
    counts = Counter(arguments["num_workers"] for arguments in settings)
    assert counts.pop(0) == pinned
    assert counts.pop(1) == single
    assert set(counts.values()) <= {several}


def test_what_matters_for_the_start_of_an_epoch_is_an_axis() -> None:
    for kind in map(kind_of, KINDS):
        every: dict[str, Any] = {**kind.axes(Machine(processors=2, accelerator=True), frozenset(TORCH.START_AXES))}
        assert set(kind.START_AXES) <= set(every)
