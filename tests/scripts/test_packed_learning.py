"""Collate functions that pack: what is learned of them makes any row of sequences, as they would collate it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_data import column, packed, padded

from batchtune.scripts.learning import Axes, Learned, Unclear
from batchtune.scripts.packed_rows import packed_row

Collate = Callable[[list[Any]], Any]
ROW = (150, 40, 40, 7)


def examples(seed: int = 0, count: int = 60) -> list[dict[str, Any]]:
    random = np.random.default_rng(seed)
    lengths = random.integers(5, 200, count)
    return [
        {"input_ids": random.integers(3, 100, length).tolist()} for length in lengths
    ]


def of_lengths(row: tuple[int, ...]) -> list[dict[str, Any]]:
    return [{"input_ids": [5] * length} for length in row]


def rows_of(batch: list[dict[str, Any]]) -> list[torch.Tensor]:
    return [torch.tensor(row) for row in column(batch, "input_ids")]


def to_multiple_of_64(batch: list[Any]) -> dict[str, Any]:
    """As TRL pads: each token of the padding is a sequence of its own."""
    made = packed(batch)
    more = -made["input_ids"].shape[1] % 64
    ends = made["cu_seqlens"][-1] + torch.arange(1, more + 1)
    return {
        **{
            name: torch.nn.functional.pad(made[name], (0, more))
            for name in ("input_ids", "labels", "position_ids")
        },
        "cu_seqlens": torch.cat([made["cu_seqlens"], ends.int()]),
        "max_seqlen": made["max_seqlen"],
    }


def last_one_longer(batch: list[Any]) -> dict[str, Any]:
    """Padding is part of the last sequence."""
    ids = torch.cat(rows_of(copy.deepcopy(batch)))
    ids = torch.nn.functional.pad(ids, (0, -len(ids) % 64))
    offsets = [0, *np.cumsum([len(row) for row in rows_of(batch)])[:-1], len(ids)]
    return {"ids": ids, "offsets": torch.tensor(offsets)}


def shifted(batch: list[Any]) -> dict[str, Any]:
    rows = rows_of(batch)
    return {
        "x": torch.cat([row[:-1] for row in rows])[None],
        "y": torch.cat([row[1:] for row in rows])[None],
        "positions": torch.cat([torch.arange(len(row) - 1) for row in rows]),
    }


def each_to_multiple_of_8(batch: list[Any]) -> dict[str, Any]:
    """As context parallelism needs it."""
    rows = [torch.nn.functional.pad(row, (0, -len(row) % 8)) for row in rows_of(batch)]
    numbers = [torch.full((len(row),), number) for number, row in enumerate(rows)]
    return {"ids": torch.cat(rows), "document_ids": torch.cat(numbers)}


def flattening(**options: bool) -> Collate:
    transformers = pytest.importorskip("transformers")
    collate: Collate = transformers.DataCollatorWithFlattening(**options)
    return collate


FLATTENING: list[dict[str, bool]] = [
    {},
    {"return_flash_attn_kwargs": True, "return_seq_idx": True},
    {"return_position_ids": False, "return_seq_idx": True},
    {"return_position_ids": False, "return_flash_attn_kwargs": True},
]
OTHERS: list[Collate] = [packed, shifted, last_one_longer, to_multiple_of_64]


def same(left: Any, right: Any) -> bool:
    return left.keys() == right.keys() and all(
        (
            np.shape(left[name]) == np.shape(right[name])
            and (name in ("input_ids", "labels", "x", "y", "ids"))
        )
        or np.array_equal(left[name], right[name])
        for name in left
    )


@pytest.mark.parametrize("packs", [*FLATTENING, *OTHERS])
def test_any_row_is_made_as_a_collate_function_packs_it(
    packs: dict[str, bool] | Collate,
) -> None:
    collate = flattening(**packs) if isinstance(packs, dict) else packs
    learned = Learned.from_examples(examples(), collate)
    assert learned.packing is not None
    made = learned.make(Axes.packed(ROW))
    assert same(made, collate(of_lengths(ROW)))
    own = collate(of_lengths((9, 150, 30)))
    twin = learned.make(learned.axes_of(own))
    assert {name: np.shape(leaf) for name, leaf in twin.items()} == {
        name: np.shape(leaf) for name, leaf in own.items()
    }


def test_the_row_of_a_batch_is_read_from_it() -> None:
    learned = Learned.from_examples(examples(), packed)
    assert learned.axes_of(packed(of_lengths((9, 150, 30)))).row == (150, 30, 9)
    learned = Learned.from_examples(examples(), shifted)
    assert learned.axes_of(shifted(of_lengths((9, 150, 30)))).row == (150, 30, 9)
    learned = Learned.from_examples(examples(), each_to_multiple_of_8)
    own = each_to_multiple_of_8(of_lengths((9, 150, 30)))
    assert learned.axes_of(own).row == (152, 32, 16)


def test_lines_show_sums() -> None:
    assert Learned.from_examples(examples(), packed).lines == (
        "input_ids: [1, ΣL] int64 < 100",
        "labels: [1, ΣL] int64 < 100",
        "position_ids: [1, ΣL] int64, value L-1",
        "cu_seqlens: [B+1] int32, value ΣL",
        "max_seqlen: [] int, value L",
    )
    lines = Learned.from_examples(examples(), to_multiple_of_64).lines
    assert lines[0] == "input_ids: [1, ΣL to a multiple of 64] int64 < 100"
    lines = Learned.from_examples(examples(), shifted).lines
    assert lines[0] == "x: [1, Σ(L-1)] int64 < 100"


def test_a_batch_without_bounds_is_one_sequence() -> None:
    """To the model it is, so a made one is the same."""

    def concatenated(batch: list[Any]) -> Any:
        return torch.cat(rows_of(batch))

    learned = Learned.from_examples(examples(), concatenated)
    assert learned.packing is not None and not learned.packing.shows_row
    assert learned.axes_of(concatenated(of_lengths((9, 30)))).row == (39,)
    assert len(learned.make(Axes.packed((9, 30)))) == 39


def test_padded_batches_without_a_batch_axis_are_not_packed() -> None:
    def flat(batch: list[Any]) -> Any:
        ids = padded(rows_of(batch))
        return {"ids": ids.flatten(), "rows": torch.zeros(len(ids))}

    learned = Learned.from_examples(examples(), flat)
    assert learned.packing is None
    assert learned.lines[0] == "ids: [B·L] int64 < 100"
    assert learned.axes_of(flat(of_lengths((9, 30)))).row == (30, 30)


@pytest.mark.parametrize("collate", [packed, each_to_multiple_of_8])
def test_whole_batches_that_are_packed_tell_their_rows(collate: Collate) -> None:
    random = np.random.default_rng(0)
    data = examples()
    batches = []
    for count in (3, 4, 2, 5, 3, 6):
        chosen = random.integers(0, len(data), count)
        batches.append(collate(copy.deepcopy([data[index] for index in chosen])))
    learned = Learned.from_batches(batches)
    row = (152, 40, 40, 8)
    assert learned.packing is not None
    made = learned.make(Axes.packed(row))
    assert same(made, collate(of_lengths(row)))
    assert learned.axes_of(made).row == row


def test_examples_that_are_packed_already_are_refused() -> None:
    random = np.random.default_rng(0)
    rows = [random.integers(5, 99, count).tolist() for count in (1, 2, 3, 4) * 9]
    as_trl = [{"input_ids": [1] * sum(row), "seq_lengths": row} for row in rows]
    with_positions = [
        {
            "input_ids": [1] * sum(row),
            "position_ids": np.concatenate([np.arange(length) for length in row]),
        }
        for row in rows
    ]
    for data in (as_trl, with_positions):
        with pytest.raises(Unclear, match="packed already, up to 4 sequences") as error:
            Learned.from_examples(data, packed)
        assert "padding_free=True" in str(error.value.hint)


def test_a_length_that_stands_alone_follows_the_made_sequence() -> None:
    """As TRL writes `seq_lengths` of examples that are not packed."""
    data = [{**one, "seq_lengths": [len(one["input_ids"])]} for one in examples()]

    def collate(batch: list[Any]) -> dict[str, Any]:
        lengths = [one["seq_lengths"][0] for one in batch]
        positions = torch.cat([torch.arange(length) for length in lengths])
        return {"ids": torch.cat(rows_of(batch)), "position_ids": positions}

    made = Learned.from_examples(data, collate).make(Axes.packed(ROW))
    assert len(made["position_ids"]) == len(made["ids"]) == sum(ROW)


LEAVES: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "position_ids": lambda rows: torch.cat([torch.arange(len(row)) for row in rows]),
    "cu_seqlens": lambda rows: torch.tensor(
        [0, *np.cumsum([len(row) for row in rows])]
    ),
    "seq_idx": lambda rows: torch.cat(
        [torch.full((len(row),), number) for number, row in enumerate(rows)]
    ),
    "mask": lambda rows: torch.block_diag(
        *[torch.ones(len(row), len(row)) for row in rows]
    ),
    "max_seqlen": lambda rows: max(len(row) for row in rows),
    "count": lambda rows: len(rows),
    "labels": lambda rows: torch.zeros(len(rows), dtype=torch.long),
}


@settings(max_examples=30, deadline=None)
@given(
    leaves=st.permutations(list(LEAVES)),
    kept=st.integers(0, len(LEAVES)),
    is_row=st.booleans(),
    seed=st.integers(0, 1000),
    row=st.lists(st.integers(2, 300), min_size=1, max_size=9),
)
def test_random_layouts(
    leaves: list[str], kept: int, is_row: bool, seed: int, row: list[int]
) -> None:
    def collate(batch: list[Any]) -> dict[str, Any]:
        rows = rows_of(batch)
        ids = torch.cat(rows)
        made = {name: LEAVES[name](rows) for name in leaves[:kept]}
        return {**made, "ids": ids[None] if is_row else ids}

    learned = Learned.from_examples(examples(seed), collate)
    assert learned.packing is not None
    shows_row = {"position_ids", "cu_seqlens", "seq_idx"} & set(leaves[:kept])
    assert learned.packing.shows_row == bool(shows_row)
    axes = Axes.packed(row)
    made = learned.make(axes)
    assert same(made, collate(of_lengths(axes.row)))
    if shows_row:
        assert learned.axes_of(made) == axes
    assert learned.axes_of(made).terms()["ΣL"] == sum(row)


@pytest.mark.parametrize(
    "batch",
    [
        {"ids": torch.randint(3, 100, (1, 40)), "mask": torch.ones(1, 40).long()},
        {"ids": torch.ones(4, 30), "positions": torch.arange(30).expand(4, 30)},
        {"x": torch.ones(4, 30, 8), "lengths": torch.tensor([30, 30, 30, 30])},
        {"x": torch.ones(4, 30, 8), "speakers": torch.tensor([0, 1, 0, 1])},
        {"x": torch.ones(4, 30), "is_positive": torch.tensor([0, 1, 0, 1])},
        {"x": torch.ones(4, 3), "index": torch.arange(4)},
        {"x": torch.ones(4, 30), "seq_idx": torch.zeros(4, 30, dtype=torch.long)},
        {"x": torch.ones(1, 30), "token_type_ids": torch.tensor([[0] * 10 + [1] * 20])},
        {"x": [[1, 2], [3]], "y": ["a", "b"], "z": 3, "u": []},
    ],
)
def test_batches_that_are_not_packed_have_no_row(batch: dict[str, Any]) -> None:
    assert packed_row(batch) is None
