"""What is learned of whole batches: made ones equal what the script's own code would collate."""

import numpy as np
import pytest
import torch
from made_data import CASES

from batchtune.scripts.learning import AxisShape, Learned, Unclear
from batchtune.scripts.trees import flatten, numeric, sizes

BATCH_SIZES = [3, 4, 5, 3, 6, 4]


def facts(batch):
    """The type and shape of every leaf; of lists of arrays each shape, of short ones all values."""
    found = {}
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


def random_batches(case, seed):
    examples = case.random(seed)
    return [case.collate([examples.pop() for _ in range(size)]) for size in BATCH_SIZES]


def of_columns(make, seed=0):
    """Batches that are made of their number of rows and of columns, 50 to 499."""
    random = np.random.default_rng(seed)
    return [make(rows, int(random.integers(50, 500))) for rows in BATCH_SIZES]


def same_as_collated(case, learned):
    axes = AxisShape(7, case.length, case.target_length)
    made = learned.sized(axes)
    seen = learned.axes_of(made)
    assert (seen.row, seen.target_length) == (axes.row, axes.target_length)
    return facts(made) == facts(case.collate(case.equal(7)))


def check_seed(seed):
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


def test_made_batches_equal_collated_ones():
    assert sum(map(check_seed, range(3))) >= 18


def test_single_rows_and_few_batches_are_unclear():
    rows = [{"x": torch.ones(1, n), "y": torch.ones(1, n)} for n in range(50, 56)]
    with pytest.raises(Unclear, match="every batch has 1 rows"):
        Learned.from_batches(rows)
    with pytest.raises(Unclear, match="5 whole batches"):
        Learned.from_batches(rows[:5])


def test_batches_of_one_size_are_understood_unless_doubtful():
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    sizes_seen = random.integers(50, 500, 6).tolist()
    batches = [
        {"x": torch.rand(8, n), "y": torch.randint(0, 9, (8,))} for n in sizes_seen
    ]
    made = Learned.from_batches(batches).sized(AxisShape(3, 77))
    assert made["x"].shape == (3, 77) and made["y"].shape == (3,)
    with pytest.raises(
        Unclear, match=r"every batch has 8 rows: .* \(heads \(value\)\)"
    ):
        Learned.from_batches([{**batch, "heads": 8} for batch in batches])


def test_a_size_that_may_follow_the_length_is_unclear():
    def batch(rows, length):
        mask = torch.ones(rows, -(-length // 3))
        return {"x": torch.zeros(rows, length, 40), "mask": mask}

    shapes = zip(BATCH_SIZES, [31, 33, 32, 33, 31, 32], strict=True)
    with pytest.raises(Unclear, match="mask axis 1, always 11, follows the length"):
        Learned.from_batches([batch(*shape) for shape in shapes])
    shapes = zip(BATCH_SIZES, [31, 93, 62, 93, 31, 42], strict=True)
    learned = Learned.from_batches([batch(*shape) for shape in shapes])
    assert sizes(learned.sized(AxisShape(2, 99))["mask"]) == (2, 33)


def test_a_batch_size_key_settles_a_tie():
    def make(rows, columns):
        return {"x": torch.rand(rows, columns), "order": torch.ones(columns)}

    batches = of_columns(make)
    with pytest.raises(Unclear, match=r"the first axis .* is not the same") as raised:
        Learned.from_batches(batches)
    assert "--batch-size-key" in str(raised.value.hint)
    made = Learned.from_batches(batches, batch_size_key="x").sized(AxisShape(2, 60))
    assert made["x"].shape == (2, 60) and made["order"].shape == (60,)


@pytest.mark.parametrize("left", [False, True])
def test_the_last_made_row_alone_is_padded(left):
    """Labels begin alike where the other leaves have no padding."""
    batches = []
    for batch in random_batches(CASES["causal language model"], 0):
        if left:
            batch = {name: leaf.flip(1) for name, leaf in batch.items()}
        batches.append({**batch, "lengths": batch["attention_mask"].sum(1)})
    learned = Learned.from_batches(batches)
    for shape, _, made in learned.twins(batches):
        mask = made["attention_mask"]
        assert mask[:-1].all() and (made["input_ids"][:-1] >= 3).all()
        assert 0 < mask[-1].sum() <= 0.9 * shape.length
        assert mask.shape == (shape.batch_size, shape.length)
        assert made["lengths"].tolist() == pytest.approx(mask.sum(1), abs=2)


def test_lengths_of_batches_padded_to_a_multiple_are_whole():
    def make(rows, longest):
        lengths = longest - torch.arange(rows)
        return {"x": torch.rand(rows, longest + -longest % 8), "lengths": lengths}

    made = Learned.from_batches(of_columns(make)).sized(AxisShape(3, 304))
    assert made["x"].shape == (3, 304) and made["lengths"].tolist() == [304] * 3


def test_the_largest_of_few_tokens_is_no_length():
    """It fits 1/544·L+79, which is what a stride of 544 would make of an offset of 79."""

    def make(rows, columns):
        tokens = torch.full((rows,), 79 + columns // 544)
        return {"x": torch.rand(rows, columns), "tokens": tokens}

    columns = [600, 1900, 700, 1200, 2300, 500]
    batches = list(map(make, BATCH_SIZES, columns))
    learned = Learned.from_batches(batches)
    assert learned.lines == ("x: [B, L] float32", "tokens: [B] int64")


def test_numbers_of_speakers_are_no_lengths():
    def make(rows, columns):
        speakers = torch.randint(0, 40, (rows,))
        return {"x": torch.rand(rows, columns), "speakers": speakers}

    for seed in range(20):
        torch.manual_seed(seed)
        try:
            made = Learned.from_batches(of_columns(make, seed)).sized(
                AxisShape(3, 5000)
            )
        except Unclear:
            continue
        assert made["speakers"].max() < 40
