"""What is learned of whole batches: made ones equal what the script's own code would collate."""

from typing import Any

import numpy as np
import pytest
import torch
from made_data import CASES, Case, padded, random_examples

from batchtune.scripts.learning import Axes, Learned, Unclear
from batchtune.scripts.trees import flatten, numeric, sizes

BATCH_SIZES = [3, 4, 5, 3, 6, 4]


def facts(batch: Any) -> dict[str, Any]:
    """The type and shape of every leaf; of lists of arrays each shape, of short ones all values."""
    found: dict[str, Any] = {}
    for path, (leaf,) in flatten([batch], stops={"xs", "ys"}).items():
        kind = getattr(leaf, "dtype", type(leaf))
        values = numeric(leaf)
        if isinstance(leaf, list):
            found[path] = kind, [sizes(item) for item in leaf]
        elif values is not None and values.ndim < 2:
            found[path] = kind, np.round(values, 3).tolist()
        else:
            found[path] = kind, sizes(leaf)
    return found


def random_batches(case: Case, seed: int) -> list[Any]:
    examples = random_examples(case, seed)
    return [case.collate([examples.pop() for _ in range(size)]) for size in BATCH_SIZES]


def same_as_collated(case: Case, learned: Learned) -> bool:
    axes = Axes(7, case.length, case.target_length)
    made = learned.sized(axes)
    seen = learned.axes_of(made)
    assert (seen.row, seen.target_length) == (axes.row, axes.target_length)
    return facts(made) == facts(case.collate(case.equal(7)))


def check_seed(seed: int) -> int:
    """Learns every case and returns how often whole batches told enough."""
    understood = 0
    for name, case in CASES.items():
        try:
            learned = Learned.from_batches(random_batches(case, seed))
        except Unclear:
            continue
        assert same_as_collated(case, learned), (name, seed)
        understood += 1
    return understood


def test_made_batches_equal_collated_ones() -> None:
    assert sum(map(check_seed, range(3))) >= 18


@pytest.mark.slow
def test_made_batches_equal_collated_ones_for_many_seeds() -> None:
    assert sum(map(check_seed, range(30))) >= 180


def test_single_rows_and_few_batches_are_unclear() -> None:
    rows = [{"x": torch.ones(1, n), "y": torch.ones(1, n)} for n in range(50, 56)]
    with pytest.raises(Unclear, match="every batch has 1 rows"):
        Learned.from_batches(rows)
    with pytest.raises(Unclear, match="5 whole batches"):
        Learned.from_batches(rows[:5])


def test_batches_of_one_size_are_understood_unless_doubtful() -> None:
    random = np.random.default_rng(0)
    sizes_seen = random.integers(50, 500, 6).tolist()
    batches = [
        {"x": torch.rand(8, n), "y": torch.randint(0, 9, (8,))} for n in sizes_seen
    ]
    made = Learned.from_batches(batches).sized(Axes(3, 77))
    assert made["x"].shape == (3, 77) and made["y"].shape == (3,)
    with pytest.raises(
        Unclear, match=r"every batch has 8 rows: .* \(heads \(value\)\)"
    ):
        Learned.from_batches([{**batch, "heads": 8} for batch in batches])


def test_a_size_that_may_follow_the_length_is_unclear() -> None:
    def batch(rows: int, length: int) -> dict[str, Any]:
        mask = torch.ones(rows, -(-length // 3))
        return {"x": torch.zeros(rows, length, 40), "mask": mask}

    shapes = zip(BATCH_SIZES, [31, 33, 32, 33, 31, 32], strict=True)
    with pytest.raises(Unclear, match="mask axis 1, always 11, follows the length"):
        Learned.from_batches([batch(*shape) for shape in shapes])
    shapes = zip(BATCH_SIZES, [31, 93, 62, 93, 31, 42], strict=True)
    learned = Learned.from_batches([batch(*shape) for shape in shapes])
    assert sizes(learned.sized(Axes(2, 99))["mask"]) == (2, 33)


def test_a_batch_size_key_settles_a_tie() -> None:
    random = np.random.default_rng(0)
    batches = []
    for rows in BATCH_SIZES:
        columns = int(random.integers(50, 500))
        batches.append({"x": torch.rand(rows, columns), "order": torch.ones(columns)})
    with pytest.raises(Unclear, match=r"the first axis .* is not the same") as raised:
        Learned.from_batches(batches)
    assert "--batch-size-key" in str(raised.value.hint)
    made = Learned.from_batches(batches, batch_size_key="x").sized(Axes(2, 60))
    assert made["x"].shape == (2, 60) and made["order"].shape == (60,)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("prompt", [0, 3])
def test_made_rows_have_no_padding(left: bool, prompt: int) -> None:
    def side(rows: list[Any], value: int) -> torch.Tensor:
        if not left:
            return padded(rows, value)
        return padded([row.flip(0) for row in rows], value).flip(1)

    random = np.random.default_rng(0)
    batches = []
    for count in BATCH_SIZES:
        rows = [torch.arange(n) % 7 + 3 for n in random.integers(20, 80, count)]
        labels = [torch.cat([torch.full((prompt,), -100), row]) for row in rows]
        masks = [torch.ones(len(row), dtype=torch.bool) for row in rows]
        batches.append(
            {
                "ids": side(rows, 0),
                "labels": side(labels, -100),
                "mask": side(masks, 0),
            }
        )
    made = Learned.from_batches(batches).sized(Axes(3, 100))
    assert made["mask"].all() and (made["ids"] >= 3).all()
    assert made["labels"].shape == (3, 100)
    assert made["mask"].shape == (3, 100 - prompt)


def test_lengths_of_batches_padded_to_a_multiple_are_whole() -> None:
    random = np.random.default_rng(0)
    batches = []
    for rows in BATCH_SIZES:
        lengths = torch.from_numpy(random.integers(50, 500, rows))
        columns = int(lengths.max()) + -int(lengths.max()) % 8
        batches.append({"x": torch.rand(rows, columns), "lengths": lengths})
    made = Learned.from_batches(batches).sized(Axes(3, 304))
    assert made["x"].shape == (3, 304) and made["lengths"].tolist() == [304] * 3


def test_numbers_of_speakers_are_no_lengths() -> None:
    for seed in range(20):
        random = np.random.default_rng(seed)
        batches = []
        for rows in BATCH_SIZES:
            x = torch.rand(rows, int(random.integers(50, 500)))
            speakers = torch.from_numpy(random.integers(0, 40, rows))
            batches.append({"x": x, "speakers": speakers})
        try:
            made = Learned.from_batches(batches).sized(Axes(3, 5000))
        except Unclear:
            continue
        assert made["speakers"].max() < 40
