"""Collate functions that pack: what is learned of them makes any row of sequences, as they would collate it."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from made_data import column, packed, padded
from scripts.test_drawing import drawn_by

from batchtune.results import BatchShape
from batchtune.scripts.drawing import Drawn
from batchtune.scripts.learning import AxisShape, Learned, Unclear
from batchtune.scripts.trees import packed_row

Collate = Callable[[list[Any]], Any]


def examples(seed=0, count=60):
    random = np.random.default_rng(seed)
    lengths = random.integers(5, 200, count)
    return [
        {"input_ids": random.integers(3, 100, length).tolist()} for length in lengths
    ]


def of_lengths(row):
    return [{"input_ids": [5] * length} for length in row]


def rows_of(batch):
    return [torch.tensor(row) for row in column(batch, "input_ids")]


def to_multiple_of_64(batch):
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


def shifted(batch):
    rows = rows_of(batch)
    return {
        "x": torch.cat([row[:-1] for row in rows])[None],
        "y": torch.cat([row[1:] for row in rows])[None],
        "positions": torch.cat([torch.arange(len(row) - 1) for row in rows]),
    }


def numbers_of(rows):
    numbers = [torch.full((len(row),), number) for number, row in enumerate(rows)]
    return torch.cat(numbers)


def each_to_multiple_of_8(batch):
    """As context parallelism needs it."""
    rows = [torch.nn.functional.pad(row, (0, -len(row) % 8)) for row in rows_of(batch)]
    return {"ids": torch.cat(rows), "document_ids": numbers_of(rows)}


def flattening(**options):
    return pytest.importorskip("transformers").DataCollatorWithFlattening(**options)


FLATTENING = [
    {},
    {"return_flash_attn_kwargs": True, "return_seq_idx": True},
    {"return_position_ids": False, "return_seq_idx": True},
    {"return_position_ids": False, "return_flash_attn_kwargs": True},
]


def same(left, right):
    return left.keys() == right.keys() and all(
        (
            np.shape(left[name]) == np.shape(right[name])
            and name in ("input_ids", "labels", "x", "y", "ids")
        )
        or np.array_equal(left[name], right[name])
        for name in left
    )


def drawn_of(collate, data=None):
    """What draws by the lengths of its examples: of 5 to 199 tokens, if no others are given."""
    data = data or examples(count=200)
    return drawn_by(data, collate, [len(row["input_ids"]) for row in data])


@pytest.mark.parametrize("packs", [*FLATTENING, packed, shifted, to_multiple_of_64])
def test_any_row_is_made_as_a_collate_function_packs_it(packs):
    collate = flattening(**packs) if isinstance(packs, dict) else packs
    data = examples(count=200)
    drawn = drawn_of(collate, data)
    assert drawn.packed
    lengths = sorted({len(row["input_ids"]) for row in data}, reverse=True)
    row = (lengths[0], lengths[0], lengths[9], lengths[-1])
    assert same(drawn.make(BatchShape.packed(row)), collate(of_lengths(row)))


def test_a_sequence_that_is_lacking_is_the_next_longer_one():
    drawn = drawn_of(packed, of_lengths((100, 40, 20) * 9))
    made = drawn.make(BatchShape.packed([100, 22, 3]))
    assert packed_row(made).tolist() == [100, 40, 20]


def test_lines_show_sums():
    assert drawn_of(packed).lines == (
        "input_ids: [1, ΣL] int64",
        "labels: [1, ΣL] int64",
        "position_ids: [1, ΣL] int64",
        "cu_seqlens: […] int32",
        "max_seqlen: [] int",
    )


def test_a_batch_without_bounds_is_one_sequence():
    """To the model it is, so a made one is the same."""

    def concatenated(batch):
        return torch.cat(rows_of(batch))

    drawn = drawn_of(concatenated, of_lengths((30, 9) * 9))
    assert drawn.packed
    assert len(drawn.make(BatchShape.packed([30, 9]))) == 39


def test_padded_batches_without_a_batch_axis_are_not_packed():
    def flat(batch):
        ids = padded(rows_of(batch))
        return {"ids": ids.flatten(), "rows": torch.zeros(len(ids))}

    drawn = drawn_of(flat)
    assert not drawn.packed
    assert drawn.lines[0] == "ids: [B·L] int64"
    assert drawn.make(BatchShape(3, max(drawn.lengths)))["ids"].shape == (
        3 * max(drawn.lengths),
    )


@pytest.mark.parametrize("collate", [packed, each_to_multiple_of_8])
def test_whole_batches_that_are_packed_tell_their_rows(collate):
    random = np.random.default_rng(0)
    data = examples()
    batches = []
    for count in (3, 4, 2, 5, 3, 6):
        chosen = random.integers(0, len(data), count)
        batches.append(collate(copy.deepcopy([data[index] for index in chosen])))
    learned = Learned.from_batches(batches)
    row = (152, 40, 40, 8)
    assert learned.packed
    made = learned.sized(AxisShape.packed(row))
    assert same(made, collate(of_lengths(row)))
    assert learned.axes_of(made).row == row


def test_examples_that_are_packed_already_are_refused():
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
            Drawn(data, packed)
        assert "padding_free=True" in str(error.value.hint)


@pytest.mark.parametrize(
    "batch",
    [
        {"x": torch.ones(4, 30, 8), "lengths": torch.tensor([30, 30, 30, 30])},
        {"x": torch.ones(4, 30, 8), "speakers": torch.tensor([0, 1, 0, 1])},
        {"x": torch.ones(4, 3), "index": torch.arange(4)},
        {"x": torch.ones(4, 30), "seq_idx": torch.zeros(4, 30, dtype=torch.long)},
        {"x": torch.ones(1, 30), "token_type_ids": torch.tensor([[0] * 10 + [1] * 20])},
        {"x": [[1, 2], [3]], "y": ["a", "b"], "z": 3, "u": []},
    ],
)
def test_batches_that_are_not_packed_have_no_row(batch):
    assert packed_row(batch) is None
