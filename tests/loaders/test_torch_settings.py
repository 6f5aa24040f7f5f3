"""The settings of torch's DataLoader that are swept: each once."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchtune.errors import UsageError
from batchtune.loaders import kind_of
from batchtune.loaders.runner import swept_axes

NOTHING = frozenset()
TORCH = kind_of("torch")


@pytest.mark.parametrize(
    ("processors", "workers"),
    [
        (1, [0, 1]),
        (2, [0, 1, 2]),
        (6, [0, 1, 2, 4, 6]),
        (8, [0, 1, 2, 4, 8]),
        (9, [0, 1, 2, 4, 8, 9]),
    ],
)
def test_workers_double_up_to_the_processors(processors, workers):
    axes = TORCH.axes(processors, accelerator=False, takes=NOTHING)
    assert list(axes["num_workers"]) == workers


def test_memory_is_pinned_only_for_a_gpu():
    assert "pin_memory" not in TORCH.axes(2, accelerator=False, takes=NOTHING)
    assert TORCH.axes(2, accelerator=True, takes=NOTHING)["pin_memory"] == [False, True]


def test_an_iterable_is_swept_only_by_what_its_function_takes():
    takes = frozenset({"num_workers", "folder"})
    assert kind_of("iterable").axes(2, accelerator=True, takes=takes) == {
        "num_workers": [0, 1, 2]
    }


@given(st.integers(2, 20))
def test_settings_that_are_the_same_are_left_out(processors):
    settings = TORCH.settings(TORCH.axes(processors, accelerator=False, takes=NOTHING))
    assert len({tuple(arguments.items()) for arguments in settings}) == len(settings)
    counts = Counter(arguments["num_workers"] for arguments in settings)
    # prefetch_factor; in_order too.
    assert (counts[0], counts[1], counts[processors]) == (
        1,
        2,
        4,
    )


@pytest.mark.parametrize(
    ("swept", "message"),
    [
        ({"reader_threads": [-1]}, "-1 must be a whole number of at least 0"),
        ({"queue_depth": [0]}, "0 must be a whole number of at least 1"),
        ({"eval_mode": ["lazy"]}, "Invalid enum value 'lazy'"),
    ],
)
def test_values_are_checked_before_measuring(swept, message):
    with pytest.raises(UsageError, match=message):
        swept_axes(kind_of("dali"), {}, swept, [])
