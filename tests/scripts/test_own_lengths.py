"""The lengths that a script's data set holds itself."""

from __future__ import annotations

from typing import Any

import pytest

from batchtune.errors import WorkloadError
from batchtune.scripts.own_lengths import own_table


class Examples:
    """A data set of three examples, with attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return 3


def columns(**attributes: Any) -> dict[str, list[Any]]:
    table = own_table(Examples(**attributes))
    held: dict[str, list[Any]] = table.to_pydict()
    return held


def test_an_attribute_with_a_number_for_each_example_counts() -> None:
    assert columns(lengths=[3, 1, 2]) == {"length": [3, 1, 2]}
    assert columns(durations=[0.5, 1.5, 1.0]) == {"duration": [0.5, 1.5, 1.0]}


def test_the_numbers_of_rows_count_also_as_texts() -> None:
    rows = [
        {"ID": f"a{index}", "duration": f"{index + 1}.5", "frames": 10 * index}
        for index in range(3)
    ]
    expected = {"duration": [1.5, 2.5, 3.5], "frames": [0.0, 10.0, 20.0]}
    assert columns(rows=rows) == expected


def test_the_tokens_of_a_hugging_face_data_set_are_counted() -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"input_ids": [[1, 2, 3], [1]], "attention_mask": [[1, 1, 1], [1]]}
    table = own_table(datasets.Dataset.from_dict(rows)).to_pydict()
    assert table["num_tokens"] == table["input_ids"] == [3, 1]


@pytest.mark.parametrize(
    "attributes",
    [
        {"lengths": [3, 1]},
        {"rows": [{"duration": "1"}] * 2},
        {"rows": [{"text": "a"}, {"text": "1"}, {"text": None}]},
    ],
)
def test_without_numbers_for_each_example_it_is_an_error(
    attributes: dict[str, Any],
) -> None:
    with pytest.raises(WorkloadError, match="the lengths are unknown"):
        columns(**attributes)
